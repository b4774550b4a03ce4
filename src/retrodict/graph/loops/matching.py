"""Find the loops of a recorded model: runs of numbered sites whose steps compute the same.

The steps of a loop over `x_0, y_0, x_1, y_1, …` are told by the numbers in the names. Their
equations must be of the same kind, one by one, and each operand must come from the same place in
every step: from the step itself, from a fixed number of steps before, or from outside of the loop,
where it may be one for all steps or one for each. The first steps, which have no past, may have
equations of their own.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Var

from retrodict.graph.loops.equation_kinds import EquationKinds, type_of
from retrodict.graph.loops.operands import LONGEST_LAG, OperandSearch
from retrodict.graph.loops.recording import Recording, Statement, shape_of, variables
from retrodict.graph.loops.stacked_uses import stacked_uses
from retrodict.graph.loops.steps import Loop, Step

# Attempts to match a run, each with another number of first steps left out or treated apart.
ATTEMPTS = 64


class Name(NamedTuple):
    """A numbered name, `x_3` or `x[3]`, in parts."""

    before: str
    number: int
    after: str


_NUMBERED = re.compile(r"^(.*\D)(\d+)(\]?)$")


def numbered(name: str) -> Name | None:
    """The parts of a numbered name."""
    match = _NUMBERED.match(name)
    return None if match is None else Name(match[1], int(match[2]), match[3])


def find_loops(recording: Recording, observed: Iterable[str]) -> tuple[Loop, ...]:
    """All loops that can be written as one step, in program order."""
    search = _LoopSearch(recording, frozenset(observed))
    return tuple(search.within(0, len(recording.statements)))


class _LoopSearch:
    """Looks for loops among the statements of a model."""

    def __init__(self, recording: Recording, observed: frozenset[str]) -> None:
        self.recording, self.observed, self.kinds = recording, observed, EquationKinds()
        self.names = [numbered(statement.name) for statement in recording.statements]

    def within(self, place: int, end: int) -> Iterator[Loop]:
        """All loops between two places, in program order."""
        retry = refused = place
        while place < end:
            run = _run(self.names[:end], place)
            loop = None
            # A run that could not be matched is tried once more from each site of its first step.
            if run is not None and not retry < place < refused:
                matcher = _Matcher(self.recording, self.kinds, self.observed, place, *run)
                loop = matcher.loop()
                if loop is None and place >= refused:
                    size, count = run
                    retry, refused = place + size, place + size * count
            if loop is None:
                place += 1
                continue
            # Steps before it may be a loop of their own.
            yield from self.within(place, loop.start)
            yield loop
            place = loop.stop


def _run(names: Sequence[Name | None], first: int) -> tuple[int, int] | None:
    """How many sites a step has, and how many steps follow one another, from a site on."""
    start = names[first]
    if start is None:
        return None
    for place in range(first + 1, len(names)):
        other = names[place]
        if other is None:
            return None
        if (other.before, other.after) == (start.before, start.after):
            size, stride = place - first, other.number - start.number
            break
    else:
        return None

    def follows(place: int) -> bool:
        name, before = names[place], names[place - size]
        return before is not None and name == before._replace(number=before.number + stride)

    end = next((p for p in range(first + size, len(names)) if not follows(p)), len(names))
    count = (end - first) // size
    return (size, count) if count > 1 and stride else None


class _Matcher:
    """Matches the steps of one run of numbered sites.

    Args:
        recording: the model.
        kinds: of equations.
        observed: names of the observed sites.
        start: the first statement of the run.
        size: statements of a step.
        count: steps.
    """

    def __init__(
        self,
        recording: Recording,
        kinds: EquationKinds,
        observed: frozenset[str],
        start: int,
        size: int,
        count: int,
    ) -> None:
        self.recording, self.kinds, self.observed, self.start = recording, kinds, observed, start
        by_step = _equations(recording, start, size, count)
        self.steps = [
            self._step(start + number * size, size, eqns) for number, eqns in enumerate(by_step)
        ]
        self.places = {
            var: (number, quantity)
            for number, step in enumerate(self.steps)
            for var, quantity in step.quantities(recording).items()
        }

    def _step(self, first: int, size: int, eqns: tuple[int, ...]) -> Step:
        statements = self.recording.statements[first : first + size]
        equations = [self.recording.eqns[number] for number in eqns]
        return Step(
            statements,
            eqns,
            tuple(self.recording.owner[number] - first for number in eqns),
            tuple(map(self.kinds.kind, equations)),
            (*(tuple(eqn.invars) for eqn in equations), *(s.leaves for s in statements)),
        )

    def loop(self) -> Loop | None:
        """The longest run of steps that compute the same, with special steps before them."""
        segments = list(self._segments())
        for first, stop in sorted(segments, key=lambda ends: ends[0] - ends[1]):
            # Steps that compute the same are special all together, or not at all.
            starts = [
                start
                for start in range(max(0, first - LONGEST_LAG), first + 1)
                if not any(a < start < b for a, b in segments)
            ]
            attempts = [
                (start, special)
                for start in starts
                for special in range(first - start, min(first - start + LONGEST_LAG, stop - start))
                if stop - start - special >= max(2, (stop - first) / 2)
            ]
            for start, special in attempts[:ATTEMPTS]:
                loop = self._search(start, special, stop)
                if loop is not None and (_is_series(loop) or self._is_plate(loop)):
                    return loop
        return None

    def _segments(self) -> Iterator[tuple[int, int]]:
        """Where steps that compute the same begin and end."""
        forms, first = [self._form(step) for step in self.steps], 0
        for place in range(1, len(forms) + 1):
            if place == len(forms) or not (
                forms[place] == forms[first] and self._alike(self.steps[place], self.steps[first])
            ):
                if place - first > 1:
                    yield first, place
                first = place

    def _search(self, start: int, special: int, stop: int) -> Loop | None:
        template, early = self.steps[stop - 1], self.steps[start : start + special]
        if not all(self._alike(step, template) for step in early):
            return None
        return OperandSearch(
            self.recording, self.start, self.steps, self.places, start, special, stop
        ).loop()

    def _form(self, step: Step) -> Any:
        """Equal for steps that compute the same from what is not their own."""
        own = step.quantities(self.recording)
        wiring = [
            [own.get(atom) if isinstance(atom, Var) else None for atom in row]
            for row in step.operands
        ]
        shapes = [[shape_of(leaf) for leaf in statement.leaves] for statement in step.statements]
        return step.positions, step.kinds, wiring, shapes

    def _alike(self, step: Step, template: Step) -> bool:
        """Whether the sites of two steps differ in nothing but the values of parameters."""
        return all(map(self._same_form, step.statements, template.statements))

    def _same_form(self, one: Statement, other: Statement) -> bool:
        if (one.value is None) != (other.value is None) or not _same_tree(one.tree, other.tree):
            return False
        shapes = [(shape_of(a), shape_of(b)) for a, b in zip(one.leaves, other.leaves, strict=True)]
        if not all(_stretches(a, b) for a, b in shapes):
            return False
        if one.value is not None and type_of(one.value) != type_of(other.value):
            return False
        return (
            (one.name in self.observed) == (other.name in self.observed)
            and one.frames == other.frames
            and one.sample_shape == other.sample_shape
        )

    def _is_plate(self, loop: Loop) -> bool:
        """Whether independent steps are used alike outside: all, as one array, or not at all."""
        if loop.special or loop.in_time:
            return False
        recording = self.recording
        covered = {n for use in stacked_uses(recording, loop).values() for n in use.eqns}
        inside = set(loop.quantities(recording))
        for number, eqn in enumerate(recording.eqns):
            outside = recording.owner[number] >= 0 and not loop.owns(recording.owner[number])
            if outside and number not in covered and not inside.isdisjoint(variables(eqn.invars)):
                return False
        return all(
            loop.owns(number) or inside.isdisjoint(variables(statement.leaves))
            for number, statement in enumerate(recording.statements)
        )


def _is_series(loop: Loop) -> bool:
    """Whether steps depend on earlier ones, and special steps are those without a past."""
    return loop.in_time and loop.special <= 1 + max(r.depth for r in loop.registers)


def _equations(recording: Recording, start: int, size: int, count: int) -> list[tuple[int, ...]]:
    """The equations of each step, without those that need be computed only once for all steps."""
    stop = start + size * count
    by_step: list[list[int]] = [[] for _ in range(count)]
    varying: set[Var] = {s.value for s in recording.statements[start:stop] if s.value is not None}
    for number, (eqn, owner) in enumerate(zip(recording.eqns, recording.owner, strict=True)):
        if start <= owner < stop:
            by_step[(owner - start) // size].append(number)
            if not varying.isdisjoint(variables(eqn.invars)):
                varying.update(eqn.outvars)
    users: dict[int, set[int]] = {}

    def use(atoms: Iterable[Any], user: int) -> None:
        for var in variables(atoms):
            if var in recording.origin:
                users.setdefault(recording.origin[var], set()).add(user)

    for number, statement in enumerate(recording.statements):
        use(statement.leaves, (number - start) // size)
    shared: set[int] = set()
    for number in reversed(range(len(recording.eqns))):
        eqn, owner = recording.eqns[number], recording.owner[number]
        if owner < 0:
            continue
        step = (owner - start) // size
        constant = start <= owner < stop and varying.isdisjoint(eqn.outvars)
        if constant and users.get(number, {step}) != {step}:
            shared.add(number)
            step = -1
        use(eqn.invars, step)
    return [tuple(n for n in numbers if n not in shared) for numbers in by_step]


def _same_tree(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError):  # of arrays that are no leaves
        return False


def _stretches(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    """Whether an array can be broadcast onto a shape with as many axes."""
    return len(shape) == len(onto) and all(a in (1, b) for a, b in zip(shape, onto, strict=True))
