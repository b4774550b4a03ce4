"""Arrays and entries of stacks in; one stack out.

What the steps of a loop find comes as a stack with an entry for each. A `Row` stands for an entry
until it is needed as an array of its own: mostly it is only put into another stack, and then all
that follow one another are taken over in one piece.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

# A stack is put together from no more pieces of others than this.
MOST_PIECES = 8


class Row(NamedTuple):
    """One entry of a stack, with the axis of the stack kept or not."""

    stack: Array
    place: int
    kept: bool = False

    def array(self) -> Array:
        """The entry by itself."""
        found: Array = jax.lax.index_in_dim(self.stack, self.place, 0, self.kept)
        return found


def array_of(value: Any) -> Any:
    """A row as an array of its own; all else as it is."""
    return value.array() if isinstance(value, Row) else value


def stacked(entries: Sequence["Array | Row"]) -> Array:
    """Arrays and rows as one stack."""
    if all(isinstance(entry, Row) and entry.kept for entry in entries):
        bare = [entry._replace(kept=False) for entry in entries]  # type: ignore[union-attr]
        return jnp.expand_dims(stacked(bare), 1)
    entries = [array_of(e) if isinstance(e, Row) and e.kept else e for e in entries]
    pieces = list(_joined(entries))
    if sum(isinstance(piece, _Piece) for piece in pieces) > MOST_PIECES:
        return _picked(entries)
    parts: list[Array] = []
    single: list[Any] = []
    for entry in (*pieces, None):
        if entry is not None and not isinstance(entry, _Piece):
            single.append(entry)
            continue
        if single:
            parts.append(_stack(single))
            single = []
        if entry is not None:
            parts.append(entry.array())
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _picked(entries: Sequence["Array | Row"]) -> Array:
    """Rows of a few stacks in any order, as when the steps of one loop are two of another."""
    alone = [entry for entry in entries if not isinstance(entry, Row)]
    stacks = {id(entry.stack): entry.stack for entry in entries if isinstance(entry, Row)}
    first, size = {}, len(alone)
    for name, stack in stacks.items():
        first[name] = size
        size += stack.shape[0]
    number = iter(range(len(alone)))
    places = [
        first[id(entry.stack)] + entry.place if isinstance(entry, Row) else next(number)
        for entry in entries
    ]
    whole = jnp.concatenate([*([_stack(alone)] if alone else []), *stacks.values()])
    return whole[np.array(places)]


class _Piece(NamedTuple):
    """Rows that follow one another in the same stack."""

    stack: Array
    first: int
    last: int

    def array(self) -> Array:
        """The rows by themselves."""
        low, high = sorted((self.first, self.last))
        part = self.stack
        if (low, high) != (0, part.shape[0] - 1):
            part = jax.lax.slice_in_dim(part, low, high + 1)
        return jax.lax.rev(part, (0,)) if self.first > self.last else part


def _joined(entries: Sequence["Array | Row"]) -> Iterator["Array | _Piece"]:
    """Rows that follow one another, or come in the opposite order, in one piece."""
    place = 0
    while place < len(entries):
        first = entries[place]
        stop = place + 1
        if not isinstance(first, Row):
            yield first
            place = stop
            continue
        step = 0
        while stop < len(entries):
            after = entries[stop]
            if not isinstance(after, Row) or after.stack is not first.stack:
                break
            if stop == place + 1:
                step = after.place - first.place
            if abs(step) != 1 or after.place != first.place + step * (stop - place):
                break
            stop += 1
        yield _Piece(first.stack, first.place, first.place + step * (stop - place - 1))
        place = stop


def concatenated(entries: Sequence["Array | Row"], shape: tuple[int, ...]) -> Array:
    """Arrays and rows one after the other along their first axis; gives an array of that shape."""
    pieces = [
        piece.array().reshape(-1, *shape[1:]) if isinstance(piece, _Piece) else piece
        for piece in _joined(entries)
    ]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def _stack(arrays: Sequence[Any]) -> Array:
    if not any(isinstance(array, jax.Array) for array in arrays):
        return jnp.asarray(np.stack(arrays))
    return jnp.stack([jnp.asarray(array) for array in arrays])
