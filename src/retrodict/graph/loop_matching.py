"""Find the loops of a recorded model: runs of numbered sites whose steps compute the same.

The steps of a loop over `x_0, y_0, x_1, y_1, …` are told by the numbers in the names. Their
equations must be of the same kind, one by one, and each operand must come from the same place in
every step: from the step itself, from a fixed number of steps before, or from outside of the loop,
where it may be one for all steps or one for each. The first steps, which have no past, may have
equations of their own.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from retrodict.graph.equation_kinds import EquationKinds, type_of
from retrodict.graph.recording import Atom, Constant, Recording, Statement, variables

# A step may look so many steps back, and as many first steps may have equations of their own.
LONGEST_LAG = 24
# Attempts to match a run, each with another number of first steps left out or treated apart.
ATTEMPTS = 64


class SiteValue(NamedTuple):
    """The value of a step's site."""

    position: int


class Result(NamedTuple):
    """A result of one of a step's equations."""

    offset: int
    number: int


Quantity: TypeAlias = SiteValue | Result


class Now(NamedTuple):
    """An operand from the step itself."""

    quantity: Quantity


class Past(NamedTuple):
    """An operand from a number of steps before."""

    register: int
    lag: int


class Shared(NamedTuple):
    """An operand from outside, the same in all steps."""

    atom: Atom


class PerStep(NamedTuple):
    """An operand from outside, one for each step."""

    number: int


Source: TypeAlias = Now | Past | Shared | PerStep


class Stack(NamedTuple):
    """Operands from outside, one for each step that is not special."""

    atoms: tuple[Atom, ...]


class Slices(NamedTuple):
    """Slices of one array from outside, one for each step that is not special."""

    operand: Atom
    starts: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]


@dataclass
class Register:
    """A quantity that later steps need.

    Attributes:
        quantity: which.
        depth: how many steps later it is needed at most.
        early: for steps without such a quantity, by number, the operand in its place. Negative
            numbers are of steps before the first.
    """

    quantity: Quantity
    depth: int = 0
    early: dict[int, Atom] = field(default_factory=dict)


class Step(NamedTuple):
    """One step of a loop.

    Attributes:
        statements: its sites.
        eqns: numbers of the equations that belong to them.
        positions: for each equation, which of the sites it belongs to.
        operands: of all equations, then the parameters of all sites.
        kind: equal for steps that compute the same from operands of the same types.
    """

    statements: tuple[Statement, ...]
    eqns: tuple[int, ...]
    positions: tuple[int, ...]
    operands: tuple[Atom, ...]
    kind: Any


@dataclass(frozen=True)
class Loop:
    """A run of steps that compute the same.

    Attributes:
        start, stop: the first statement of the recorded model inside, and the first behind.
        steps: all of them; the last is the template.
        special: how many first steps have equations of their own.
        sources: where the operands of the template come from.
        registers: quantities that steps take from earlier ones; if none, steps are independent.
        inputs: operands from outside that differ from step to step.
        slices: for equations of the template that take another slice in each step, the input.
    """

    start: int
    stop: int
    steps: tuple[Step, ...]
    special: int
    sources: tuple[Source, ...]
    registers: tuple[Register, ...]
    inputs: tuple[Stack | Slices, ...]
    slices: Mapping[int, int]

    @property
    def template(self) -> Step:
        """The step whose equations are those of all steps but the special ones."""
        return self.steps[-1]

    @property
    def in_time(self) -> bool:
        """Whether steps depend on earlier ones."""
        return bool(self.registers)

    def owns(self, statement: int) -> bool:
        """Whether a statement of the recorded model is inside."""
        return self.start <= statement < self.stop


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
    kinds, names = EquationKinds(), [numbered(s.name) for s in recording.statements]
    loops: list[Loop] = []
    place = retry = refused = 0
    while place < len(names):
        run = _run(names, place)
        loop = None
        # A run that could not be matched is tried once more from each site of its first step.
        if run is not None and not retry < place < refused:
            loop = _Matcher(recording, kinds, frozenset(observed), place, *run).loop()
            if loop is None and place >= refused:
                size, count = run
                retry, refused = place + size, place + size * count
        if loop is None:
            place += 1
        else:
            loops.append(loop)
            place = loop.stop
    return tuple(loops)


def _run(names: Sequence[Name | None], first: int) -> tuple[int, int] | None:
    """How many sites a step has, and how many steps follow one another, from a site on."""
    start = names[first]
    if start is None:
        return None
    for place in range(first + 1, len(names)):
        found = names[place]
        if found is None:
            return None
        if (found.before, found.after) == (start.before, start.after):
            size, stride = place - first, found.number - start.number
            break
    else:
        return None

    def follows(place: int) -> bool:
        name, before = names[place], names[place - size]
        return (
            name is not None
            and before is not None
            and name == before._replace(number=before.number + stride)
        )

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
        self.recording, self.kinds, self.observed = recording, kinds, observed
        self.start, self.size, self.count = start, size, count
        by_step = _equations(recording, start, size, count)
        self.steps = [self._step(number, eqns) for number, eqns in enumerate(by_step)]
        self.places = {
            var: (number, quantity)
            for number, step in enumerate(self.steps)
            for var, quantity in _quantities(recording, step).items()
        }

    def _step(self, number: int, eqns: tuple[int, ...]) -> Step:
        first = self.start + number * self.size
        statements = self.recording.statements[first : first + self.size]
        equations = [self.recording.eqns[n] for n in eqns]
        positions = tuple(self.recording.owner[n] - first for n in eqns)
        leaves = [leaf for statement in statements for leaf in statement.leaves]
        operands = (*(atom for eqn in equations for atom in eqn.invars), *leaves)
        step = Step(statements, eqns, positions, operands, None)
        own = _quantities(self.recording, step)
        kind = (
            positions,
            tuple(map(self.kinds.kind, equations)),
            tuple(own.get(atom) if isinstance(atom, Var) else None for atom in operands),
            tuple(map(_shape, leaves)),
        )
        return step._replace(kind=kind)

    def loop(self) -> Loop | None:
        """The longest run of steps that compute the same, with special steps before it."""
        first, stop = _longest([step.kind for step in self.steps])
        attempts = [
            (start, special)
            for start in range(max(0, first - LONGEST_LAG), first + 1)
            for special in range(first - start, min(first - start + LONGEST_LAG, stop - start - 1))
        ]
        for start, special in attempts[:ATTEMPTS]:
            if all(self._alike(step, stop - 1) for step in range(start, stop - 1)):
                loop = _Attempt(self, start, special, stop).loop()
                if loop is not None and (loop.in_time or self._is_plate(loop)):
                    return loop
        return None

    def _alike(self, step: int, template: int) -> bool:
        """Whether the sites of two steps differ in nothing but the values of parameters."""
        return all(
            self._same_form(one, other)
            for one, other in zip(
                self.steps[step].statements, self.steps[template].statements, strict=True
            )
        )

    def _same_form(self, one: Statement, other: Statement) -> bool:
        if (one.value is None) != (other.value is None) or not _same_tree(one.tree, other.tree):
            return False
        shapes = [(_shape(a), _shape(b)) for a, b in zip(one.leaves, other.leaves, strict=True)]
        if any(not _stretches(a, b) for a, b in shapes):
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
        if loop.special:
            return False
        covered = {n for use in stacked_uses(self.recording, loop).values() for n in use.eqns}
        inside = set(_all_quantities(self.recording, loop))
        recording = self.recording
        for number, eqn in enumerate(recording.eqns):
            outside = recording.owner[number] >= 0 and not loop.owns(recording.owner[number])
            if outside and number not in covered and not inside.isdisjoint(variables(eqn.invars)):
                return False
        return not any(
            not loop.owns(number) and not inside.isdisjoint(variables(statement.leaves))
            for number, statement in enumerate(recording.statements)
        )


def _equations(recording: Recording, start: int, size: int, count: int) -> list[tuple[int, ...]]:
    """The equations of each step, without those that only need be computed once for all steps."""
    stop = start + size * count
    by_step: list[list[int]] = [[] for _ in range(count)]
    varying: set[Var] = {s.value for s in recording.statements[start:stop] if s.value is not None}
    users: dict[int, set[int]] = {}

    def use(atoms: Iterable[Any], user: int) -> None:
        for var in variables(atoms):
            if var in recording.origin:
                users.setdefault(recording.origin[var], set()).add(user)

    for number, (eqn, owner) in enumerate(zip(recording.eqns, recording.owner, strict=True)):
        if start <= owner < stop:
            by_step[(owner - start) // size].append(number)
            if not varying.isdisjoint(variables(eqn.invars)):
                varying.update(eqn.outvars)
    for number, statement in enumerate(recording.statements):
        use(statement.leaves, (number - start) // size)
    shared: set[int] = set()
    for number in reversed(range(len(recording.eqns))):
        eqn, owner = recording.eqns[number], recording.owner[number]
        if owner < 0:
            continue
        step = (owner - start) // size
        if start <= owner < stop and varying.isdisjoint(eqn.outvars):
            if number in users and users[number] != {step}:
                shared.add(number)
                step = -1
        use(eqn.invars, step)
    return [tuple(n for n in numbers if n not in shared) for numbers in by_step]


def _quantities(recording: Recording, step: Step) -> dict[Var, Quantity]:
    """The site values and results of a step."""
    found: dict[Var, Quantity] = {}
    for position, statement in enumerate(step.statements):
        if statement.value is not None:
            found[statement.value] = SiteValue(position)
    for offset, number in enumerate(step.eqns):
        for place, var in enumerate(recording.eqns[number].outvars):
            found[var] = Result(offset, place)
    return found


def _all_quantities(recording: Recording, loop: Loop) -> dict[Var, tuple[int, Quantity]]:
    return {
        var: (number, quantity)
        for number, step in enumerate(loop.steps)
        for var, quantity in _quantities(recording, step).items()
    }


def rows(recording: Recording, loop: Loop) -> dict[Var, tuple[int, Quantity]]:
    """Variables that a loop gives, each with its step: all but results of special steps."""
    return {
        var: (number, quantity)
        for var, (number, quantity) in _all_quantities(recording, loop).items()
        if number >= loop.special or isinstance(quantity, SiteValue)
    }


def _longest(kinds: Sequence[Any]) -> tuple[int, int]:
    """Where the longest run of equal kinds starts and stops; of equals, the last."""
    best, first = (0, 0), 0
    for place in range(1, len(kinds) + 1):
        if place == len(kinds) or kinds[place] != kinds[first]:
            if place - first >= best[1] - best[0]:
                best = (first, place)
            first = place
    return best


class _Attempt:
    """Says where the operands of a run of steps come from.

    Args:
        matcher: the run.
        first: the first step to be included.
        special: how many steps from there on have equations of their own.
        stop: the first step behind.
    """

    def __init__(self, matcher: _Matcher, first: int, special: int, stop: int) -> None:
        self.matcher, self.recording = matcher, matcher.recording
        self.first, self.general, self.stop = first, range(first + special, stop), stop
        self.template = matcher.steps[stop - 1]
        self.registers: list[Register] = []
        self.inputs: list[Stack | Slices] = []

    def loop(self) -> Loop | None:
        """The loop, if every operand comes from the same place in all steps."""
        # Steps that are mostly special are better left as they are.
        if len(self.general) < max(2, self.matcher.count / 2):
            return None
        slices, skipped = self._slices()
        sources: list[Source] = []
        for column, atom in enumerate(self.template.operands):
            source = Shared(atom) if column in skipped else self._source(column)
            if source is None:
                return None
            sources.append(source)
        numbers: dict[int, int] = {}
        columns = _first_columns(self.recording, self.template)
        for offset, (starts, sizes) in slices.items():
            operand = sources[columns[offset]]
            if not isinstance(operand, Shared):
                return None
            numbers[offset] = self._input(Slices(operand.atom, starts, sizes))
        if not self._special_steps():
            return None
        start = self.matcher.start + self.first * self.matcher.size
        stop = self.matcher.start + self.stop * self.matcher.size
        steps = tuple(self.matcher.steps[self.first : self.stop])
        for register in self.registers:
            register.early = {step - self.first: atom for step, atom in register.early.items()}
        special = self.general.start - self.first
        return Loop(
            start,
            stop,
            steps,
            special,
            tuple(sources),
            tuple(self.registers),
            tuple(self.inputs),
            numbers,
        )

    def _place(self, atom: Atom) -> tuple[int, Quantity] | None:
        """The step and the quantity that an operand is, if it is from inside."""
        place = self.matcher.places.get(atom) if isinstance(atom, Var) else None
        return None if place is None or not self.first <= place[0] < self.stop else place

    def _atoms(self, column: int) -> list[Atom]:
        return [self.matcher.steps[step].operands[column] for step in self.general]

    def _source(self, column: int) -> Source | None:
        atoms = self._atoms(column)
        last = self._place(atoms[-1])
        if last is None:
            if any(self._place(atom) is not None for atom in atoms):
                return None
            if all(same_atom(atom, atoms[-1]) for atom in atoms):
                return Shared(atoms[-1])
            return PerStep(self._input(Stack(tuple(atoms))))
        step, quantity = last
        lag = self.stop - 1 - step
        if lag == 0:
            wanted = [(step, quantity) for step in self.general]
            return Now(quantity) if list(map(self._place, atoms)) == wanted else None
        if lag > LONGEST_LAG:
            return None
        early = self._early(quantity, lag, atoms)
        return None if early is None else Past(self._register(quantity, lag, early), lag)

    def _early(self, quantity: Quantity, lag: int, atoms: Sequence[Atom]) -> dict[int, Atom] | None:
        """Operands in place of a quantity of steps that do not have it; None if some cannot be."""
        first = self.first if isinstance(quantity, SiteValue) else self.general.start
        early = {}
        for step, atom in zip(self.general, atoms, strict=True):
            place, at = self._place(atom), step - lag
            if at >= first:
                if place != (at, quantity):
                    return None
            elif place is None or (at >= self.first and place[0] <= at):
                early[at] = atom
            else:
                return None
        return early

    def _register(self, quantity: Quantity, lag: int, early: dict[int, Atom]) -> int:
        """The number of the register for a quantity."""
        for number, register in enumerate(self.registers):
            both = register.early.keys() & early.keys()
            if register.quantity == quantity and all(
                same_atom(register.early[step], early[step]) for step in both
            ):
                register.early |= early
                register.depth = max(register.depth, lag)
                return number
        self.registers.append(Register(quantity, lag, dict(early)))
        return len(self.registers) - 1

    def _input(self, new: Stack | Slices) -> int:
        for number, known in enumerate(self.inputs):
            if _same_input(known, new):
                return number
        self.inputs.append(new)
        return len(self.inputs) - 1

    def _slices(self) -> tuple[dict[int, tuple[Any, Any]], set[int]]:
        """Equations that take another slice in each step, and operands that only say where."""
        found: dict[int, tuple[Any, Any]] = {}
        skipped: set[int] = set()
        columns = _first_columns(self.recording, self.template)
        for offset in range(len(self.template.eqns)):
            eqns = [
                self.recording.eqns[self.matcher.steps[step].eqns[offset]] for step in self.general
            ]
            starts = [_starts(eqn) for eqn in eqns]
            if None in starts or len(set(starts)) == 1:
                continue
            found[offset] = tuple(starts), type_of(eqns[-1].outvars[0])[0]
            skipped |= {columns[offset] + n for n in range(1, len(eqns[-1].invars))}
        return found, skipped

    def _special_steps(self) -> bool:
        """Provide for what special steps take from one another; False if that cannot be."""
        for step in range(self.first, self.general.start):
            needed = [leaf for s in self.matcher.steps[step].statements for leaf in s.leaves]
            needed += [r.early[step] for r in self.registers if step in r.early]
            for at, position in self._sites_behind(needed):
                if at > step:
                    return False
                if at < step:
                    self._register(SiteValue(position), step - at, {})
        return True

    def _sites_behind(self, atoms: Iterable[Atom]) -> Iterator[tuple[int, int]]:
        """The values of sites inside of the loop that operands are computed from."""
        pending, known = list(variables(atoms)), set[Var]()
        while pending:
            var = pending.pop()
            place = self._place(var)
            if var in known or place is None:
                continue
            known.add(var)
            if isinstance(place[1], SiteValue):
                yield place[0], place[1].position
            else:
                eqn = self.recording.eqns[self.recording.origin[var]]
                pending += variables(eqn.invars)


def _first_columns(recording: Recording, step: Step) -> list[int]:
    """For each equation of a step, the number of its first operand; then that of the leaves."""
    sizes = [len(recording.eqns[number].invars) for number in step.eqns]
    return [0, *np.cumsum(sizes, dtype=int).tolist()]


def _starts(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """Where an equation that takes a slice starts, if it is one and that is written into it."""
    if eqn.primitive.name == "slice" and eqn.params["strides"] in (
        None,
        (1,) * eqn.invars[0].aval.ndim,
    ):  # noqa: E501
        return tuple(eqn.params["start_indices"])
    if eqn.primitive.name != "dynamic_slice":
        return None
    if not all(isinstance(atom, Literal) for atom in eqn.invars[1:]):
        return None
    shape, sizes = type_of(eqn.invars[0])[0], eqn.params["slice_sizes"]
    starts = [int(atom.val) for atom in eqn.invars[1:]]
    return tuple(int(np.clip(s, 0, n - m)) for s, n, m in zip(starts, shape, sizes, strict=True))


def same_atom(one: Atom, other: Atom) -> bool:
    """Whether two operands are the same, or equal numbers."""
    if isinstance(one, Var) or isinstance(other, Var) or type(one) is not type(other):
        return one is other
    a, b = (np.asarray(x.value if isinstance(x, Constant) else x.val) for x in (one, other))
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _same_input(one: Stack | Slices, other: Stack | Slices) -> bool:
    if isinstance(one, Slices) or isinstance(other, Slices):
        return (
            isinstance(one, Slices)
            and isinstance(other, Slices)
            and same_atom(one.operand, other.operand)
            and one[1:] == other[1:]
        )
    return all(map(same_atom, one.atoms, other.atoms))


def _same_tree(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError):  # of arrays among what is no leaf
        return False


def _shape(atom: Atom) -> tuple[int, ...]:
    return np.shape(atom.value) if isinstance(atom, Constant) else type_of(atom)[0]


def _stretches(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    """Whether an array can be broadcast onto a shape with as many axes."""
    return len(shape) == len(onto) and all(a in (1, b) for a, b in zip(shape, onto, strict=True))


class StackedUse(NamedTuple):
    """An equation outside of a loop that puts a quantity of all its steps together.

    Attributes:
        quantity: which.
        chain: equations of the last step's operand, from the quantity on.
        eqns: those of all steps, and the equation itself.
    """

    quantity: Quantity
    chain: tuple[int, ...]
    eqns: frozenset[int]


# Equations of one operand that change its shape or type and nothing else.
_MOVES = frozenset(
    {"broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze"}
)


def stacked_uses(recording: Recording, loop: Loop) -> dict[int, StackedUse]:
    """By equation, those that put a quantity of all steps together in order."""
    inside, kinds = rows(recording, loop), EquationKinds()
    found = {}
    for number, eqn in enumerate(recording.eqns):
        owner = recording.owner[number]
        if owner < loop.stop or eqn.primitive.name not in ("stack", "concatenate"):
            continue
        if len(eqn.invars) != len(loop.steps):
            continue
        chains = [_chain(recording, atom, inside) for atom in eqn.invars]
        places = [inside.get(base) for base, _ in chains if isinstance(base, Var)]
        forms = {tuple(kinds.kind(recording.eqns[n]) for n in chain) for _, chain in chains}
        last = places[-1] if places else None
        if last is None or len(forms) > 1:
            continue
        if places == [(step, last[1]) for step in range(len(loop.steps))]:
            every = frozenset(n for _, chain in chains for n in chain)
            found[number] = StackedUse(last[1], chains[-1][1], every | {number})
    return found


def _chain(
    recording: Recording, atom: Any, inside: Mapping[Var, Any]
) -> tuple[Any, tuple[int, ...]]:
    """The quantity that an operand is made of by changing its shape, and the equations that do."""
    chain: list[int] = []
    while isinstance(atom, Var) and atom not in inside and atom in recording.origin:
        number = recording.origin[atom]
        eqn = recording.eqns[number]
        if eqn.primitive.name not in _MOVES or len(eqn.invars) != 1:
            break
        chain.append(number)
        atom = eqn.invars[0]
    return atom, tuple(reversed(chain))
