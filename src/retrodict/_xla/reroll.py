"""A function in; the same function, with what it does over and over put into loops, out.

A model written as a Python loop over numbered sites is traced one site after the other, and so is
what is done with it: XLA would compile every step by itself, which takes it nearly a second each.
`repeats` finds the steps; here each stretch of them becomes one loop, whose step is compiled once.
What steps take from outside is stacked beforehand, and what they find comes as a stack: see
`stacks`. Steps that take nothing from one another are worked out side by side, if they are small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array

from retrodict._xla.repeated_eqns import MOVES, Inside, Repeat, bytes_of, find_repeats, needed
from retrodict._xla.scan import scan
from retrodict._xla.stacked import Row, array_of, concatenated, stacked

# Functions with rules of their own, for derivatives or for vectorising: all that has been done by
# now, so that only what they compute is left.
_CALLED = {
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call_jaxpr": ("call_jaxpr", "fun_jaxpr"),
    "custom_vmap_call": ("call",),
    "closed_call": ("call_jaxpr",),
}


# Steps that take nothing from each other are worked out at once if that holds no more than this.
AT_ONCE = 4 * 2**20


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
            for number in range(repeat.count):
                _write_out(self.eqns[repeat.place(number, offset)], self.known)
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

        end: dict[tuple[int, int], list[Array]] = {}
        if not start and stacks and self._working_bytes() <= AT_ONCE:
            found = jax.vmap(lambda entries: step({}, entries)[1])(stacks)
        else:
            entries = (jnp.arange(repeat.count), stacks)
            keys = any(_is_key(self._var(0, key)) for key in kept)
            loop = jax.lax.scan if keys else scan
            end, found = loop(lambda state, entry: step(state, entry[1]), start, entries)
        for key, stack in zip(kept, found, strict=True):
            for number in self.taken[key]:
                self.known[self._var(number, key)] = Row(stack, number)
        for key in last:
            for number in self.taken.get(key, ()):
                self.known[self._var(number, key)] = end[key][repeat.count - 1 - number]

    def _working_bytes(self) -> int:
        """About how much all steps would hold if they were worked out at once."""
        step = self.eqns[self.repeat.start : self.repeat.start + self.repeat.period]
        return self.repeat.count * sum(map(bytes_of, step))

    def _var(self, step: int, key: tuple[int, int]) -> Var:
        return self.eqns[self.repeat.place(step, key[0])].outvars[key[1]]

    def _before(self, key: tuple[int, int], lag: int) -> Array:
        found: Array = array_of(_look_up(self._var(-lag, key), self.known))
        return found

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
                    found[offset, k] = array_of(_look_up(atoms[0], self.known))
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
        repeat = self.repeat

        def operand(offset: int, k: int, link: Inside | None) -> Any:
            if (offset, k) in outside:
                shared = outside[offset, k]
                return entries[shared.number] if isinstance(shared, _Entry) else shared
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


def _name(atom: Any) -> Any:
    """Equal for operands that are the same."""
    if isinstance(atom, Literal):
        return "literal", np.asarray(atom.val).tobytes(), _aval(atom).dtype
    return atom


def _look_up(atom: Any, known: dict[Var, Array | Row]) -> Any:
    if isinstance(atom, Literal):
        return np.asarray(atom.val, _aval(atom).dtype)
    return known[atom]


def _write_out(eqn: JaxprEqn, known: dict[Var, Array | Row]) -> None:
    """One equation by itself; rows that are only put elsewhere stay rows."""
    operands = [atom.val if isinstance(atom, Literal) else known[atom] for atom in eqn.invars]
    moved = _moved(eqn, operands)
    if moved is not None:
        known[eqn.outvars[0]] = moved
        return
    known.update(zip(eqn.outvars, apply(eqn, list(map(array_of, operands))), strict=True))


def _moved(eqn: JaxprEqn, operands: Sequence[Any]) -> "Array | Row | None":
    """What an equation makes that takes a row out, changes its shape, or puts rows together."""
    if eqn.primitive.name not in _MOVING:
        return None
    first, shape = operands[0], _aval(eqn.outvars[0]).shape
    match eqn.primitive.name:
        case "slice" if not isinstance(first, Row) and first.ndim and shape[0] == 1:
            if shape[1:] == first.shape[1:] and first.shape[0] > 1:
                return Row(first, eqn.params["start_indices"][0], True)
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
                return concatenated(operands, shape)
    return None


_MOVING = MOVES | {"reduce_sum", "stack", "concatenate"}


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


def _aval(atom: Any) -> Any:
    """Shape and type of an atom, of which JAX does not say that it has them."""
    return atom.aval


def _is_key(var: Var) -> bool:
    return bool(jnp.issubdtype(_aval(var).dtype, jax.dtypes.prng_key))
