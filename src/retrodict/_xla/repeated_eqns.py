"""The equations of a traced function in; those that come over and over out, with how they are tied.

A Python loop over numbered sites leaves a trace of equations in which the same few come again with
every step. A stretch of such steps is a `Repeat` if each step takes what it takes from the same
place: from itself, from so many steps before, or from outside of the stretch altogether, where it
may be something else for every step. Numbers written into equations count as from outside, so steps
may differ in constants. Nothing here computes anything; see `rolling`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Int

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


_PLAIN = (bool, int, str, type(None))


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
        return repeat.count * sum(map(size_of, step))

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
    rank: dict[int, int] = {}
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
    defined: Mapping[Var, tuple[int, int]],
    start: int,
    period: int,
    count: int,
) -> Iterator[Repeat]:
    """The parts of a stretch in which every step is tied to the others in the same way."""
    ties = _Ties.of(eqns, defined, start, period, count)
    step = 0
    while step + FEWEST <= count:
        stop = step + FEWEST
        if ties.reach(step, stop) == stop:
            # what differs between steps, and so must be from outside, depends on how far one looks
            stop, before = count, count + 1
            while stop < before and stop >= step + FEWEST:
                stop, before = ties.reach(step, stop), stop
            repeat = ties.repeat(step, stop) if stop >= step + FEWEST else None
            if repeat is not None:
                yield repeat
                step = stop
                continue
        step += 1


@dataclass(frozen=True)
class _Ties:
    """Where the operands of a stretch come from: a row for each step, a column for each operand.

    Attributes:
        start, period: of the stretch.
        offsets: the equation within a step that each column belongs to.
        origin: the equation that has found an operand; −1 if none has.
        way: how far back that is, and which of its results; −1 if none has.
        lag: how many steps back that is.
        settings: by equation within a step, what it is written with, if that may differ.
    """

    start: int
    period: int
    offsets: Int[np.ndarray, " operands"]
    origin: Int[np.ndarray, "steps operands"]
    way: Int[np.ndarray, "steps operands"]
    lag: Int[np.ndarray, "steps operands"]
    settings: Mapping[int, Sequence[Any]]

    @staticmethod
    def of(
        eqns: Sequence[JaxprEqn],
        defined: Mapping[Var, tuple[int, int]],
        start: int,
        period: int,
        count: int,
    ) -> "_Ties":
        columns = [(o, k) for o in range(period) for k in range(len(eqns[start + o].invars))]
        origin = np.full((count, len(columns)), -1)
        way = np.full((count, len(columns)), -1)
        for step in range(count):
            for column, (offset, k) in enumerate(columns):
                here = start + step * period + offset
                atom = eqns[here].invars[k]
                found = None if isinstance(atom, Literal) else defined.get(atom)
                if found is not None:
                    origin[step, column] = found[0]
                    way[step, column] = (here - found[0]) * _MOST_RESULTS + found[1]
        offsets = np.array([offset for offset, _ in columns], int)
        lag = (way // _MOST_RESULTS - offsets + period - 1) // period
        settings = {
            offset: [
                eqns[start + n * period + offset].params["start_indices"] for n in range(count)
            ]
            for offset in range(period)
            if eqns[start + offset].primitive.name == "slice"
        }
        return _Ties(start, period, offsets, origin, way, lag, settings)

    def _inside(self, step: int, stop: int) -> Int[np.ndarray, " operands"]:
        """For how many steps each operand is from the same distance."""
        wrong = self.way[step:stop] != self.way[step]
        return _until(wrong | (self.way[step] < 0) | (self.lag[step] > LONGEST_LAG))

    def _outside(self, step: int, stop: int) -> Int[np.ndarray, " operands"]:
        """For how many steps each operand is from before the first of them."""
        return _until(self.origin[step:stop] >= self.start + step * self.period)

    def _apart(self, step: int, stop: int) -> frozenset[int]:
        return frozenset(o for o, set_ in self.settings.items() if len(set(set_[step:stop])) > 1)

    def reach(self, step: int, stop: int) -> int:
        """Up to where, before `stop`, all steps from one on are tied alike."""
        inside, outside = self._inside(step, stop), self._outside(step, stop)
        apart = np.isin(self.offsets, list(self._apart(step, stop)))
        longest = np.where(apart, outside, np.maximum(inside, outside))
        return step + int(longest.min(initial=stop - step))

    def repeat(self, step: int, stop: int) -> Repeat | None:
        """These steps, if none of them looks back further than they are many."""
        outside = self._outside(step, stop) >= stop - step
        links: list[list[Link]] = [[] for _ in range(self.period)]
        for column, offset in enumerate(self.offsets.tolist()):
            if outside[column]:
                links[offset].append(None)
                continue
            distance, number = divmod(int(self.way[step, column]), _MOST_RESULTS)
            lag = int(self.lag[step, column])
            if lag >= stop - step:
                return None
            links[offset].append(Inside(lag, (offset - distance) % self.period, number))
        first = self.start + step * self.period
        apart = self._apart(step, stop)
        return Repeat(first, self.period, stop - step, tuple(map(tuple, links)), apart)


_MOST_RESULTS = 4096


def _until(wrong: np.ndarray) -> np.ndarray:
    """How many rows of each column come before the first that is wrong."""
    return np.where(wrong.any(0), wrong.argmax(0), len(wrong))


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

    def _number(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _kind(self, eqn: JaxprEqn) -> Any:
        if eqn.effects:
            return self._itself(eqn)
        params = eqn.params
        if eqn.primitive.name == "slice":
            return eqn.primitive.name, params["strides"]
        return eqn.primitive, *(
            (name, self._value(value)) for name, value in params.items() if name not in _RULES
        )

    def _value(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self._function(value)
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

    def _function(self, function: ClosedJaxpr | Jaxpr) -> int:
        """The number of a function within an equation: equal only if it does exactly the same."""
        known = self.inner.get(id(function))
        if known is not None:
            return known
        jaxpr, consts = function, []
        if isinstance(function, ClosedJaxpr):
            jaxpr, consts = function.jaxpr, function.consts
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
        self.kept.append(function)
        self.inner[id(function)] = number
        return number


def _within(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equations of functions that an equation calls."""
    for param in eqn.params.values():
        for value in param if isinstance(param, tuple | list) else (param,):
            if isinstance(value, ClosedJaxpr | Jaxpr):
                yield from (value.jaxpr if isinstance(value, ClosedJaxpr) else value).eqns


def size_of(eqn: JaxprEqn) -> int:
    """How many equations it stands for."""
    return 1 + sum(map(size_of, _within(eqn)))


def bytes_of(eqn: JaxprEqn) -> int:
    """Memory of all that it finds, on the way as well."""
    own = sum(8 * int(np.prod(getattr(var.aval, "shape", ()))) for var in eqn.outvars)
    return own + sum(map(bytes_of, _within(eqn)))


def _type(atom: Any) -> Any:
    aval = atom.aval
    return getattr(aval, "shape", None), getattr(aval, "dtype", aval)
