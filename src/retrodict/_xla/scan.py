"""A step and what it takes each time in; all steps, one after the other, out.

XLA merges the reading of an entry from a series, and the writing of one into another, with whatever
is computed from the entry or for it; and what reads or writes at a place that is known only when it
runs is worked out one number at a time instead of in vectors. So entries are handed
from step to step as they are: read at the end of the step before, and written in the step after.

What is handed on by itself is copied by itself, twice a step, and where more than eight things can
be done at once, XLA wakes another thread to share them, which for small ones takes longer than to
do them all. So small entries of one type are handed on side by side, as one array.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, PyTree

State = TypeVar("State")

# Entries of no more numbers than this are handed on with others.
SMALL = 256


@dataclass(frozen=True)
class _Luggage:
    """How the entries of a step are handed on.

    Attributes:
        form: of the tree that they are.
        leaves: their shapes and types.
        parts: numbers of the leaves that go together; what goes alone keeps its shape and type.
    """

    form: Any
    leaves: tuple[Any, ...]
    parts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(tree: PyTree) -> "_Luggage":
        """Of arrays, or what stands for them."""
        leaves, form = jax.tree.flatten(tree)
        together: dict[Any, list[int]] = {}
        for number, leaf in enumerate(leaves):
            alone = jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or not 0 < leaf.size <= SMALL
            together.setdefault(number if alone else _carried(leaf.dtype), []).append(number)
        return _Luggage(form, tuple(leaves), tuple(map(tuple, together.values())))

    def packed(self, tree: PyTree, *, stacked: bool = False) -> list[Array]:
        """As few arrays as may be; entries of all steps, if they are `stacked`."""
        leaves: list[Array] = jax.tree.leaves(tree)
        before = int(stacked)

        def part(numbers: tuple[int, ...]) -> Array:
            own = [leaves[number] for number in numbers]
            if len(own) == 1:
                return own[0]
            flat = [leaf.reshape(*leaf.shape[:before], -1) for leaf in own]
            return jnp.concatenate([leaf.astype(_carried(leaf.dtype)) for leaf in flat], before)

        return list(map(part, self.parts))

    def unpacked(self, arrays: list[Array], *, stacked: bool = False) -> PyTree:
        """The tree again."""
        found: dict[int, Array] = {}
        for numbers, array in zip(self.parts, arrays, strict=True):
            if len(numbers) == 1:
                found[numbers[0]] = array
                continue
            own, before = [self.leaves[number] for number in numbers], array.shape[: int(stacked)]
            cut = jnp.split(array, np.cumsum([leaf.size for leaf in own])[:-1], len(before))
            for number, leaf, values in zip(numbers, own, cut, strict=True):
                found[number] = values.reshape(*before, *leaf.shape).astype(leaf.dtype)
        return jax.tree.unflatten(self.form, [found[number] for number in range(len(found))])


def _carried(dtype: Any) -> Any:
    """The type in which others of its kind are handed on."""
    return np.dtype(np.int32) if dtype == np.dtype(bool) else dtype


def scan(
    step: Callable[[State, Any], tuple[State, Any]],
    start: State,
    entries: PyTree,
    *,
    reverse: bool = False,
) -> tuple[State, Any]:
    """As `jax.lax.scan`; faster where what is computed from an entry is more than products."""
    length = jax.tree.leaves(entries)[0].shape[0]
    if length < 2:
        return jax.lax.scan(step, start, entries, reverse=reverse)

    one = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], entries))
    traced, (_, shapes) = jax.make_jaxpr(step, return_shape=True)(start, one)
    again = jaxpr_as_fun(traced)  # traced once, though what it finds has to be known before
    form = jax.tree.structure((start, shapes))
    of_entry, of_found = _Luggage.of(one), _Luggage.of(shapes)
    given = of_entry.packed(entries, stacked=True)

    def at(place: Array | int) -> list[Array]:
        return [jax.lax.dynamic_index_in_dim(leaf, place, 0, keepdims=False) for leaf in given]

    # the step after a place in time, and the one before; beyond the ends it does not matter which
    after, before = (-1, 1) if reverse else (1, -1)

    def written(series: list[Array], found: list[Array], place: Array | int) -> list[Array]:
        return [
            jax.lax.dynamic_update_index_in_dim(leaf, entry, place, 0)
            for leaf, entry in zip(series, found, strict=True)
        ]

    def handing_on(held: Any, place: Array) -> tuple[Any, None]:
        state, entry, found, series = held
        known = jax.tree.leaves((state, of_entry.unpacked(entry)))
        state, new = jax.tree.unflatten(form, again(*known))
        series = written(series, found, jnp.clip(place + before, 0, length - 1))
        entry = at(jnp.clip(place + after, 0, length - 1))
        return (state, entry, of_found.packed(new), series), None

    blank = of_found.packed(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
    series = [jnp.zeros((length, *leaf.shape), leaf.dtype) for leaf in blank]
    first = at(length - 1 if reverse else 0)
    (state, _, last, series), _ = jax.lax.scan(
        handing_on, (start, first, blank, series), jnp.arange(length), reverse=reverse
    )
    series = written(series, last, 0 if reverse else length - 1)
    return state, of_found.unpacked(series, stacked=True)


def one_by_one(fn: Callable[[Any], Any], entries: PyTree) -> Any:
    """As `jax.lax.map`."""
    return scan(lambda state, entry: (state, fn(entry)), (), entries)[1]
