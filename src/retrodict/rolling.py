"""A function in; the same function, with what it does over and over put into loops, out.

A model written as a Python loop over numbered sites is traced one site after the other, and so is
what is done with it: XLA would compile every step by itself, which takes it nearly a second each.
`repeats` finds the steps; here each stretch of them becomes one loop, whose step is compiled once.
What steps take from outside is stacked beforehand, what others take from them afterwards: a `Row`
stands for one entry of such a stack until it is needed as an array of its own. Even to cut a stack
into a thousand outputs would take XLA a while, so `Packed` brings stacks out of a compiled function
whole, to be cut up outside.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array

from retrodict.loops import scan
from retrodict.repeats import Inside, Repeat, find_repeats, needed


# Functions with rules of their own, for derivatives or for vectorising: all that has been done by
# now, so that only what they compute is left.
_CALLED = {
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call_jaxpr": ("call_jaxpr", "fun_jaxpr"),
    "custom_vmap_call": ("call",),
    "closed_call": ("call_jaxpr",),
}


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


@dataclass(frozen=True)
class Rolled:
    """A traced function and the repeats among its equations."""

    closed: ClosedJaxpr
    eqns: tuple[JaxprEqn, ...]
    repeats: tuple[Repeat, ...]

    @staticmethod
    def of(closed: ClosedJaxpr) -> "Rolled":
        """Look for repeats."""
        eqns = tuple(needed(closed.jaxpr))
        return Rolled(closed, eqns, find_repeats(eqns))

    def __call__(self, *arguments: Array) -> list["Array | Row"]:
        """The outputs."""
        jaxpr = self.closed.jaxpr
        known: dict[Var, Array | Row] = {}
        known.update(zip(jaxpr.constvars, self.closed.consts, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))
        after = self._taken_outside()
        place = 0
        for repeat in (*self.repeats, None):
            until = len(self.eqns) if repeat is None else repeat.start
            for eqn in self.eqns[place:until]:
                _write_out(eqn, known)
            if repeat is not None:
                _Loop(self.eqns, repeat, known, after[repeat.start]).run()
                place = repeat.stop
        return [_look_up(atom, known) for atom in jaxpr.outvars]

    def _taken_outside(self) -> dict[int, dict[tuple[int, int], set[int]]]:
        """By repeat, which results of which steps are taken by what is not part of it."""
        owner: dict[Var, tuple[Repeat, int, int, int]] = {}
        where: dict[int, Repeat] = {}
        for repeat in self.repeats:
            for step in range(repeat.count):
                for offset in range(repeat.period):
                    place = repeat.place(step, offset)
                    where[place] = repeat
                    for number, var in enumerate(self.eqns[place].outvars):
                        owner[var] = (repeat, step, offset, number)
        found: dict[int, dict[tuple[int, int], set[int]]] = {r.start: {} for r in self.repeats}

        def take(atom: Any, taker: Repeat | None) -> None:
            if isinstance(atom, Literal) or atom not in owner:
                return
            repeat, step, offset, number = owner[atom]
            if taker is not repeat:
                found[repeat.start].setdefault((offset, number), set()).add(step)

        for place, eqn in enumerate(self.eqns):
            for atom in eqn.invars:
                take(atom, where.get(place))
        for atom in self.closed.jaxpr.outvars:
            take(atom, None)
        return found


@dataclass(frozen=True)
class _Loop:
    """One repeat, with what is known before it."""

    eqns: Sequence[JaxprEqn]
    repeat: Repeat
    known: dict[Var, "Array | Row"]
    taken: dict[tuple[int, int], set[int]]

    def run(self) -> None:
        """Work out all steps, and add to what is known."""
        repeat = self.repeat
        for offset in sorted(repeat.apart):
            for step in range(repeat.count):
                _write_out(self.eqns[repeat.place(step, offset)], self.known)
        outside, stacks = self._outside()
        lags = self._lags()
        last = {key: lag for key, lag in lags.items() if self._only_last(key, lag)}
        kept = [key for key in self.taken if key not in last and key[0] not in repeat.apart]
        start = {
            key: [self._before(key, lag) for lag in range(1, longest + 1)]
            for key, longest in lags.items()
        }

        def step(state: Any, entries: Any) -> tuple[Any, Any]:
            found = self._step(state, outside, entries)
            state = {key: [found[key], *past[:-1]] for key, past in state.items()}
            return state, [found[key] for key in kept]

        entries = (jnp.arange(repeat.count), stacks)
        made = jax.eval_shape(step, start, jax.tree.map(lambda leaf: leaf[0], entries))
        loop = jax.lax.scan if _has_keys(made[1]) else scan
        end, found = loop(step, start, entries)
        for key, stack in zip(kept, found, strict=True):
            for number in self.taken[key]:
                self.known[self._var(number, key)] = Row(stack, number)
        for key in last:
            for number in self.taken.get(key, ()):
                self.known[self._var(number, key)] = end[key][repeat.count - 1 - number]

    def _var(self, step: int, key: tuple[int, int]) -> Var:
        return self.eqns[self.repeat.place(step, key[0])].outvars[key[1]]

    def _before(self, key: tuple[int, int], lag: int) -> Array:
        return _array(_look_up(self._var(-lag, key), self.known))

    def _only_last(self, key: tuple[int, int], lag: int) -> bool:
        """Whether all that is taken of a result is what the loop ends with."""
        return all(step >= self.repeat.count - lag for step in self.taken.get(key, ()))

    def _lags(self) -> dict[tuple[int, int], int]:
        """For each result that later steps take, how many steps later."""
        found: dict[tuple[int, int], int] = {}
        for offset, links in enumerate(self.repeat.links):
            if offset in self.repeat.apart:
                continue
            for link in links:
                if link is not None and link.lag and link.offset not in self.repeat.apart:
                    key = (link.offset, link.number)
                    found[key] = max(found.get(key, 0), link.lag)
        return found

    def _outside(self) -> tuple[dict[tuple[int, int], Any], list[Array]]:
        """Operands from outside: what all steps share, or which stack has one for each."""
        repeat = self.repeat
        found: dict[tuple[int, int], Any] = {}
        numbers: dict[Any, int] = {}
        stacks: list[Array] = []
        for offset, links in enumerate(repeat.links):
            if offset in repeat.apart:
                continue
            for k, link in enumerate(links):
                if link is not None and link.offset not in repeat.apart:
                    continue
                atoms = [
                    self.eqns[repeat.place(step, offset)].invars[k] for step in range(repeat.count)
                ]
                names = tuple(map(_name, atoms))
                if len(set(names)) == 1:
                    found[offset, k] = _array(_look_up(atoms[0], self.known))
                    continue
                if names not in numbers:
                    numbers[names] = len(stacks)
                    stacks.append(stacked([_look_up(atom, self.known) for atom in atoms]))
                found[offset, k] = _Entry(numbers[names])
        return found, stacks

    def _step(
        self, state: Any, outside: dict[tuple[int, int], Any], entries: Any
    ) -> dict[tuple[int, int], Array]:
        found: dict[tuple[int, int], Array] = {}
        repeat, (_, stacks) = self.repeat, entries

        def operand(offset: int, k: int, link: Inside | None) -> Any:
            if (offset, k) in outside:
                shared = outside[offset, k]
                return stacks[shared.number] if isinstance(shared, _Entry) else shared
            assert link is not None
            key = (link.offset, link.number)
            return state[key][link.lag - 1] if link.lag else found[key]

        for offset, links in enumerate(repeat.links):
            if offset in repeat.apart:
                continue
            operands = [operand(offset, k, link) for k, link in enumerate(links)]
            results = apply(self.eqns[repeat.place(0, offset)], operands)
            found |= {(offset, number): result for number, result in enumerate(results)}
        return found


class _Entry(NamedTuple):
    """An operand that comes from a stack, one for each step."""

    number: int


def stacked(entries: Sequence["Array | Row"]) -> Array:
    """Arrays and rows as one stack."""
    if all(isinstance(entry, Row) and entry.kept for entry in entries):
        bare = [entry._replace(kept=False) for entry in entries]  # type: ignore[union-attr]
        return jnp.expand_dims(stacked(bare), 1)
    entries = [_array(e) if isinstance(e, Row) and e.kept else e for e in entries]
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


def _stack(arrays: Sequence[Any]) -> Array:
    if not any(isinstance(array, jax.Array) for array in arrays):
        return jnp.asarray(np.stack(arrays))
    return jnp.stack([jnp.asarray(array) for array in arrays])


def _name(atom: Any) -> Any:
    """Equal for operands that are the same."""
    if isinstance(atom, Literal):
        return "literal", np.asarray(atom.val).tobytes(), atom.aval.dtype
    return atom


def _look_up(atom: Any, known: dict[Var, Array | Row]) -> Any:
    if isinstance(atom, Literal):
        return np.asarray(atom.val, atom.aval.dtype)
    return known[atom]


def _array(value: Any) -> Any:
    return value.array() if isinstance(value, Row) else value


def _write_out(eqn: JaxprEqn, known: dict[Var, Array | Row]) -> None:
    """One equation by itself; rows that are only put elsewhere stay rows."""
    operands = [
        atom.val if isinstance(atom, Literal) else known[atom] for atom in eqn.invars
    ]
    moved = _moved(eqn, operands)
    if moved is not None:
        known[eqn.outvars[0]] = moved
        return
    known.update(zip(eqn.outvars, apply(eqn, list(map(_array, operands))), strict=True))


def _moved(eqn: JaxprEqn, operands: Sequence[Any]) -> "Array | Row | None":
    """What an equation makes that takes a row out, changes its shape, or puts rows together."""
    name, first = eqn.primitive.name, operands[0] if operands else None
    shape = eqn.outvars[0].aval.shape
    match name:
        case "slice" if not isinstance(first, Row):
            start, stop = eqn.params["start_indices"], eqn.params["limit_indices"]
            whole = all(s == 0 for s in start[1:]) and stop[1:] == first.shape[1:]
            if len(start) and whole and stop[0] == start[0] + 1 and first.shape[0] > 1:
                return Row(first, start[0], True)
        case "reduce_sum" if isinstance(first, Row) and not eqn.params["axes"]:
            return first
        case "squeeze" | "reshape" | "broadcast_in_dim" if isinstance(first, Row):
            rest = first.stack.shape[1:]
            if eqn.params.get("broadcast_dimensions", ()) not in ((), *_behind(len(rest))):
                return None
            if shape in (rest, (1, *rest)):
                return first._replace(kept=shape == (1, *rest))
        case "stack" if eqn.params["axis"] == 0 and any(isinstance(o, Row) for o in operands):
            return stacked(operands)
        case "concatenate" if eqn.params["dimension"] == 0:
            rows = [o for o in operands if isinstance(o, Row)]
            if rows and all(row.kept == rows[0].kept for row in rows):
                pieces = [
                    p.array().reshape(-1, *shape[1:]) if isinstance(p, _Piece) else p
                    for p in _joined(operands)
                ]
                return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
    return None


def _behind(ndim: int) -> tuple[tuple[int, ...], ...]:
    """How a row's axes are placed if they stay, with an axis before them or none."""
    return tuple(range(ndim)), tuple(range(1, ndim + 1))


def apply(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Array]:
    """What an equation gives for these operands."""
    for name in _CALLED.get(eqn.primitive.name, ()):
        if name in eqn.params:
            results: Sequence[Array] = jaxpr_as_fun(eqn.params[name])(*operands)
            return results
    bind: Callable[..., Any] = eqn.primitive.bind
    found = bind(*operands, **eqn.params)
    return found if eqn.primitive.multiple_results else [found]


def _has_keys(made: Any) -> bool:
    return any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(made))


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Packed:
    """A tree of arrays of which some are rows of the same few stacks.

    Attributes:
        arrays: the stacks, and arrays by themselves.
        places: for each leaf of the tree, which array, and which row of it, if it is one.
        tree: the structure.
    """

    arrays: tuple[Any, ...]
    places: tuple[tuple[int, int | None, bool], ...]
    tree: Any

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """For JAX."""
        return self.arrays, (self.places, self.tree)

    @classmethod
    def tree_unflatten(cls, rest: Any, arrays: tuple[Any, ...]) -> "Packed":
        """For JAX."""
        return cls(tuple(arrays), *rest)

    @staticmethod
    def of(leaves: Sequence["Array | Row"], tree: Any) -> "Packed":
        """What a `Rolled` function has found."""
        arrays: list[Any] = []
        numbers: dict[int, int] = {}
        places: list[tuple[int, int | None, bool]] = []
        for leaf in leaves:
            array = leaf.stack if isinstance(leaf, Row) else leaf
            if id(array) not in numbers:
                numbers[id(array)] = len(arrays)
                arrays.append(array)
            row = (leaf.place, leaf.kept) if isinstance(leaf, Row) else (None, False)
            places.append((numbers[id(array)], *row))
        return Packed(tuple(arrays), tuple(places), tree)

    def unpacked(self) -> Any:
        """The tree."""
        cut = {number for number, row, _ in self.places if row is not None}
        if any(isinstance(self.arrays[number], jax.core.Tracer) for number in cut):
            rows: dict[int, Any] = {number: self.arrays[number] for number in cut}
        else:  # to cut up what lies in this machine's memory takes no compiling
            rows = {number: np.asarray(self.arrays[number]) for number in cut}

        def leaf(number: int, row: int | None, kept: bool) -> Any:
            if row is None:
                return self.arrays[number]
            return rows[number][row : row + 1] if kept else rows[number][row]

        return jax.tree.unflatten(self.tree, jax.device_put([leaf(*place) for place in self.places]))


def packed(traced: Callable[..., Any]) -> Callable[..., Packed]:
    """A function to be compiled: another with its repeats in loops, what it finds `Packed`.

    Args:
        traced: gives, for arguments, what `jax.jit` has traced.
    """

    def run(*arguments: Any) -> Packed:
        found = traced(*arguments)
        leaves = Rolled.of(found.jaxpr)(*jax.tree.leaves(arguments))
        return Packed.of(leaves, jax.tree.structure(found.out_info))

    return run


def has_repeats(closed: ClosedJaxpr) -> bool:
    """Whether there is anything to be put into a loop."""
    return bool(Rolled.of(closed).repeats)
