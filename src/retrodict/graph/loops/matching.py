"""Find the loops of a recorded model: runs of numbered sites whose steps compute the same.

The numbers in the names delimit the steps of a loop over `x_0, y_0, x_1, y_1, …`. The equations of
the steps must be of the same kind, one by one, and each operand must come from the same place in
every step: from the step itself, from a fixed number of steps before, or from outside of the loop,
where it may be one for all steps or one for each. The first steps, which have no past, are special:
they may have other equations.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Var

from retrodict.graph.loops.equation_kinds import EquationKinds, type_of
from retrodict.graph.loops.operands import LONGEST_LAG, OperandSearch
from retrodict.graph.loops.recording import Recording, Statement, shape_of, variables
from retrodict.graph.loops.stacked_uses import stacked_uses
from retrodict.graph.loops.steps import Loop, SiteBlock, Step, quantities


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


def find_loops(recording: Recording) -> tuple[Loop, ...]:
    """All loops that can be written as one step, in program order."""
    names = [numbered(statement.name) for statement in recording.statements]
    return tuple(_loops(recording, EquationKinds(), names, 0))


def _loops(
    recording: Recording, kinds: EquationKinds, names: Sequence[Name | None], place: int
) -> Iterator[Loop]:
    """All loops among named statements from a place on, in program order."""
    retry = refused = place
    while place < len(names):
        run, loop = _run(names, place), None
        # A run that could not be matched is tried once more from each site of its first step.
        if run is not None and not retry < place < refused:
            size, count = run
            loop = _match(recording, kinds, place, size, count)
            if loop is None and place >= refused:
                retry, refused = place + size, place + size * count
        if loop is None:
            place += 1
            continue
        # Steps before the loop may form another one.
        yield from _loops(recording, kinds, names[: loop.start], place)
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


def _match(
    recording: Recording, kinds: EquationKinds, start: int, size: int, count: int
) -> Loop | None:
    """The longest loop in a run of numbered sites: steps that compute the same, after special ones.

    Args:
        recording: the model.
        kinds: the kinds of its equations.
        start: the first statement of the run.
        size: statements of a step.
        count: the number of steps.
    """
    blocks = _blocks(recording, kinds, start, size, count)
    steps = [blocks[number : number + size] for number in range(0, len(blocks), size)]
    places = {
        var: (number, quantity)
        for number, step in enumerate(steps)
        for var, quantity in quantities(recording, step).items()
    }
    segments = list(_segments(recording, steps))
    for first, stop in sorted(segments, key=lambda ends: ends[0] - ends[1]):
        for begin in range(max(0, first - LONGEST_LAG), first + 1):
            # Steps that compute the same are all special, or none is.
            if any(a < begin < b for a, b in segments):
                continue
            if not all(_same_sites(step, steps[stop - 1]) for step in steps[begin:first]):
                continue
            special = min(
                first - begin + LONGEST_LAG, stop - begin - max(2, (stop - first + 1) // 2)
            )
            search = OperandSearch(recording, steps, places, begin, stop)
            loop = search.loop(start + begin * size, special)
            if loop is not None and (_is_series(loop) or _is_plate(recording, loop)):
                return loop
    return None


def _segments(recording: Recording, steps: Sequence[Step]) -> Iterator[tuple[int, int]]:
    """Where at least two steps that compute the same begin and end."""
    forms, first = [_form(recording, step) for step in steps], 0
    for place in range(1, len(steps) + 1):
        if place == len(steps) or not (
            forms[place] == forms[first] and _same_sites(steps[place], steps[first])
        ):
            if place - first > 1:
                yield first, place
            first = place


def _form(recording: Recording, step: Step) -> Any:
    """Equal for steps that compute the same from operands outside of the step."""
    inside = quantities(recording, step)

    def wiring(block: SiteBlock) -> Any:
        rows = block.operands
        return [[inside.get(atom) if isinstance(atom, Var) else None for atom in r] for r in rows]

    return [(b.kinds, wiring(b), list(map(shape_of, b.statement.leaves))) for b in step]


def _same_sites(step: Step, template: Step) -> bool:
    """Whether the sites of two steps differ only in the values of parameters."""
    return all(_same_site(a.statement, b.statement) for a, b in zip(step, template, strict=True))


def _same_site(one: Statement, other: Statement) -> bool:
    def form(statement: Statement) -> Any:
        value = None if statement.value is None else type_of(statement.value)
        return value, statement.observed, statement.frames, statement.sample_shape

    try:
        if form(one) != form(other) or one.tree != other.tree:
            return False
    except (TypeError, ValueError):  # auxiliary data of a pytree may be arrays
        return False
    shapes = ((shape_of(a), shape_of(b)) for a, b in zip(one.leaves, other.leaves, strict=True))
    return all(_stretches(a, b) for a, b in shapes)


def _is_series(loop: Loop) -> bool:
    """Whether steps depend on earlier ones, and special steps are those without a past."""
    return max(loop.special) <= max((r.depth + 1 for r in loop.registers), default=-1)


def _is_plate(recording: Recording, loop: Loop) -> bool:
    """Whether steps are independent and are used outside all together, as one array, or not."""
    if any(loop.special) or loop.registers:
        return False
    covered = {n for use in stacked_uses(recording, loop).values() for n in use.eqns}
    uses: list[tuple[int, Sequence[Any]]] = [
        (owner, eqn.invars)
        for number, (owner, eqn) in enumerate(zip(recording.owner, recording.eqns, strict=True))
        if owner >= 0 and number not in covered
    ]
    uses += [(number, statement.leaves) for number, statement in enumerate(recording.statements)]
    inside = loop.entries(recording).keys()
    return all(loop.contains(n) or inside.isdisjoint(variables(atoms)) for n, atoms in uses)


def _blocks(
    recording: Recording, kinds: EquationKinds, start: int, size: int, count: int
) -> list[SiteBlock]:
    """The sites of all steps, each with its equations.

    An equation whose result is the same in all steps, and which more than one step needs, belongs
    to none: it is computed once, outside of the loop.
    """
    stop = start + size * count
    varying: set[Var] = {s.value for s in recording.statements[start:stop] if s.value is not None}
    for eqn, owner in zip(recording.eqns, recording.owner, strict=True):
        if start <= owner < stop and not varying.isdisjoint(variables(eqn.invars)):
            varying.update(eqn.outvars)
    users: dict[Var, set[int]] = {}
    for number, statement in enumerate(recording.statements):
        for var in variables(statement.leaves):
            users.setdefault(var, set()).add((number - start) // size)
    eqns: list[list[int]] = [[] for _ in range(start, stop)]
    for number in reversed(range(len(recording.eqns))):
        eqn, owner = recording.eqns[number], recording.owner[number]
        if owner < 0:
            continue
        step = (owner - start) // size
        if start <= owner < stop:
            steps = set().union(*(users.get(var, ()) for var in eqn.outvars))
            if varying.isdisjoint(eqn.outvars) and steps != {step}:
                step = -1
            else:
                eqns[owner - start].insert(0, number)
        for var in variables(eqn.invars):
            users.setdefault(var, set()).add(step)
    blocks = []
    for statement, numbers in zip(recording.statements[start:stop], eqns, strict=True):
        equations = [recording.eqns[number] for number in numbers]
        operands = (*(tuple(eqn.invars) for eqn in equations), statement.leaves)
        blocks.append(
            SiteBlock(statement, tuple(numbers), tuple(map(kinds.kind, equations)), operands)
        )
    return blocks


def _stretches(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    """Whether an array can be broadcast onto a shape with as many axes."""
    return len(shape) == len(onto) and all(a in (1, b) for a, b in zip(shape, onto, strict=True))
