"""The equations of a traced function in; those that come over and over out, with how they are tied.

A Python loop over numbered sites leaves a trace of equations in which the same few come again with
every step. A stretch of such steps is a `Repeat` if each step takes what it takes from the same
place: from itself, from so many steps before, or from outside of the stretch altogether, where it
may be something else for every step. Numbers written into equations count as from outside, so steps
may differ in constants. Nothing here computes anything; see `rolling`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# Fewer steps than this stay written out.
FEWEST = 4
# So are all if none has more equations than this in all its steps, those of functions they call
# included: a loop keeps XLA from doing them at once.
WORTHWHILE = 300
MANY = 2 * FEWEST
# Equations that compute nothing.
MOVES = frozenset({"slice", "squeeze", "reshape", "broadcast_in_dim"})
# A step may look so many steps back.
LONGEST_LAG = 8
# How many equations must come again to be taken for the beginning of a step, and how many such
# places are tried as the beginning of the next one.
GRAM, TRIED = 4, 48
# Rules for derivatives and for vectorising are made anew with every call of their function.
_RULES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "rule"})


class Inside(NamedTuple):
    """An operand that an equation of this step, or of `lag` steps before, has found."""

    lag: int
    offset: int
    number: int


Link = Inside | None  # none: from outside


@dataclass(frozen=True)
class Repeat:
    """A stretch of equations that is so many times the same step.

    Attributes:
        start: the first equation.
        period: equations of a step.
        count: how many steps.
        links: for every equation of a step, where each of its operands is from.
        apart: equations of a step that take nothing from inside and are written with other
            constants every time, so that they are worked out before.
    """

    start: int
    period: int
    count: int
    links: tuple[tuple[Link, ...], ...]
    apart: frozenset[int]

    @property
    def stop(self) -> int:
        """The first equation after it."""
        return self.start + self.period * self.count

    def place(self, step: int, offset: int) -> int:
        """The number of an equation."""
        return self.start + step * self.period + offset


def needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations that the outputs depend on."""
    wanted = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(var in wanted for var in eqn.outvars):
            kept.append(eqn)
            wanted.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return kept[::-1]


def find_repeats(eqns: Sequence[JaxprEqn]) -> tuple[Repeat, ...]:
    """All stretches of repeated steps, in order; none of them overlap."""
    if len(eqns) < GRAM * FEWEST:
        return ()
    reader = _Reader()
    tokens = np.array([reader.token(eqn) for eqn in eqns])
    defined = {var: (i, m) for i, eqn in enumerate(eqns) for m, var in enumerate(eqn.outvars)}
    found = [
        repeat
        for start, period, count in _stretches(tokens)
        for repeat in _tied(eqns, defined, start, period, count)
    ]

    def size(repeat: Repeat) -> int:
        step = eqns[repeat.start : repeat.start + repeat.period]
        if all(eqn.primitive.name in MOVES for eqn in step):
            return 0
        return repeat.count * sum(map(reader.size, step))

    if max(map(size, found), default=0) < WORTHWHILE:
        return ()
    # beside a long loop, what takes one by one what its steps have found is put into one as well
    return tuple(r for r in found if size(r) >= (WORTHWHILE if r.count < MANY else 1))


def _stretches(tokens: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Where tokens begin to repeat, after how many, and how often."""
    number = len(tokens)
    grams: dict[tuple[int, ...], list[int]] = {}
    listed = tokens.tolist()
    at = [tuple(listed[i : i + GRAM]) for i in range(number)]
    for place, gram in enumerate(at):
        grams.setdefault(gram, []).append(place)
    rank = {}
    for places in grams.values():
        rank |= {place: n for n, place in enumerate(places)}
    begin = 0
    while begin < number:
        places, mine = grams[at[begin]], rank[begin]
        best = (0, 0, 0)  # equations, minus the period, times
        for place in places[mine + 1 : mine + 1 + TRIED]:
            period = place - begin
            if begin + FEWEST * period > number:
                break
            same = _same(tokens, begin, period)
            times = same // period + 1
            if times >= FEWEST:
                best = max(best, (times * period, -period, times))
        if best[0]:
            yield begin, -best[1], best[2]
            begin += best[0]
        else:
            begin += 1


def _same(tokens: np.ndarray, begin: int, period: int) -> int:
    """How many tokens from `begin` on are equal to those a period later."""
    size, done, most = 64, 0, len(tokens) - begin - period
    while done < most:
        part = slice(begin + done, begin + min(done + size, most))
        differ = tokens[part] != tokens[part.start + period : part.stop + period]
        if differ.any():
            return done + int(differ.argmax())
        done, size = done + differ.size, 2 * size
    return most


def _tied(
    eqns: Sequence[JaxprEqn],
    defined: dict[Var, tuple[int, int]],
    start: int,
    period: int,
    count: int,
) -> Iterator[Repeat]:
    """The parts of a stretch in which every step is tied to the others in the same way."""
    columns = [(o, k) for o in range(period) for k in range(len(eqns[start + o].invars))]
    origin = np.full((count, len(columns)), -1)  # the equation that an operand comes from
    way = np.full((count, len(columns)), -1)  # how far back that is, and which of its results
    for step in range(count):
        for column, (offset, k) in enumerate(columns):
            here = start + step * period + offset
            atom = eqns[here].invars[k]
            found = None if isinstance(atom, Literal) else defined.get(atom)
            if found is not None:
                origin[step, column] = found[0]
                way[step, column] = (here - found[0]) * _MOST_RESULTS + found[1]
    offsets = np.array([offset for offset, _ in columns], int)
    back = (way // _MOST_RESULTS - offsets + period - 1) // period  # steps
    usable = (way >= 0) & (back <= LONGEST_LAG)
    settings = _settings(eqns, start, period, count)

    step = 0
    while step + FEWEST <= count:
        first = start + step * period

        def ends(stop: int, step: int = step, first: int = first) -> tuple[np.ndarray, np.ndarray]:
            """Up to which step each column stays inside, or outside."""
            part = slice(step, stop)
            moved = (way[part] != way[step]) | ~usable[step]
            within = (origin[part] >= first)
            return _until(moved), _until(within)

        def reach(stop: int, step: int = step) -> int:
            inside, outside = ends(stop)
            apart = {o for o in settings if len(set(settings[o][step:stop])) > 1}
            fixed = np.isin(offsets, list(apart))
            each = np.where(fixed, outside, np.maximum(inside, outside))
            return int(each.min(initial=stop - step))

        if reach(step + FEWEST) < FEWEST:
            step += 1
            continue
        stop, length = count, 0
        # what is set apart depends on how far one looks
        while stop - step >= FEWEST and (length := reach(stop)) < stop - step:
            stop = step + length
        inside, outside = ends(stop)
        length = stop - step
        links: list[list[Link]] = [[] for _ in range(period)]
        longest = 0
        for column, (offset, _) in enumerate(columns):
            if outside[column] >= length:
                links[offset].append(None)
                continue
            distance, result = divmod(int(way[step, column]), _MOST_RESULTS)
            lag = int(back[step, column])
            longest = max(longest, lag)
            links[offset].append(Inside(lag, (offset - distance) % period, result))
        if length < FEWEST or length <= longest:
            step += 1
            continue
        apart = frozenset(o for o in settings if len(set(settings[o][step:stop])) > 1)
        yield Repeat(first, period, length, tuple(map(tuple, links)), apart)
        step = stop


_MOST_RESULTS = 4096


def _until(wrong: np.ndarray) -> np.ndarray:
    """How many rows of each column come before the first that is wrong."""
    return np.where(wrong.any(0), wrong.argmax(0), len(wrong))


def _settings(
    eqns: Sequence[JaxprEqn], start: int, period: int, count: int
) -> dict[int, list[Any]]:
    """For equations that look at a fixed place of an array, which place, step by step."""
    return {
        offset: [eqns[start + step * period + offset].params["start_indices"] for step in range(count)]
        for offset in range(period)
        if eqns[start + offset].primitive.name == "slice"
    }


@dataclass
class _Reader:
    """Gives equations that do the same the same number."""

    numbers: dict[Any, int] = field(default_factory=dict)
    inner: dict[int, int] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # so that no other can take its identity

    def token(self, eqn: JaxprEqn) -> int:
        """The number of an equation; whatever its operands are, and whichever numbers it holds."""
        key = (
            self._kind(eqn),
            tuple(_type(atom) for atom in eqn.invars),
            tuple(_type(var) for var in eqn.outvars),
        )
        return self._number(key)

    def size(self, eqn: JaxprEqn) -> int:
        """How many equations it stands for."""
        inner = [
            value.jaxpr if isinstance(value, ClosedJaxpr) else value
            for param in eqn.params.values()
            for value in (param if isinstance(param, tuple | list) else (param,))
            if isinstance(value, ClosedJaxpr | Jaxpr)
        ]
        return 1 + sum(self.size(eqn) for jaxpr in inner for eqn in jaxpr.eqns)

    def _number(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _kind(self, eqn: JaxprEqn) -> Any:
        if eqn.effects:
            return self._itself(eqn)
        params = eqn.params
        if eqn.primitive.name == "slice":
            return eqn.primitive.name, params["strides"]
        return eqn.primitive, tuple(
            (name, self._value(params[name])) for name in sorted(params) if name not in _RULES
        )

    def _value(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self._function(value.jaxpr, value.consts)
        if isinstance(value, Jaxpr):
            return self._function(value, ())
        if isinstance(value, tuple | list):
            return tuple(map(self._value, value))
        if isinstance(value, np.ndarray | jax.Array):
            return self._constant(value)
        try:
            hash(value)
        except TypeError:
            return self._itself(value)
        return value

    def _itself(self, value: Any) -> Any:
        self.kept.append(value)
        return ("itself", id(value))

    def _constant(self, value: Any) -> Any:
        if isinstance(value, jax.core.Tracer) or not isinstance(value, np.ndarray | jax.Array):
            return self._itself(value)
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return self._itself(value)
        array = np.asarray(value)
        return str(array.dtype), array.shape, array.tobytes()

    def _function(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> int:
        """The number of a function within an equation: equal only if it does exactly the same."""
        known = self.inner.get(id(jaxpr))
        if known is not None and not consts:
            return known
        places: dict[Any, int] = {}
        for var in (*jaxpr.constvars, *jaxpr.invars):
            places[var] = len(places)
        lines = []

        def name(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return "literal", str(atom.val), _type(atom)
            return places[atom]

        for eqn in jaxpr.eqns:
            kind = self._kind(eqn)
            if eqn.primitive.name == "slice":
                kind = (kind, eqn.params["start_indices"])
            operands = tuple(map(name, eqn.invars))
            for var in eqn.outvars:
                places[var] = len(places)
            lines.append((kind, operands, tuple(map(_type, eqn.outvars))))
        key = (
            tuple(map(_type, (*jaxpr.constvars, *jaxpr.invars))),
            tuple(lines),
            tuple(map(name, jaxpr.outvars)),
            tuple(map(self._constant, consts)),
        )
        number = self._number(key)
        if not consts:
            self.kept.append(jaxpr)
            self.inner[id(jaxpr)] = number
        return number


def _type(atom: Any) -> Any:
    aval = atom.aval
    return getattr(aval, "shape", None), getattr(aval, "dtype", aval)
