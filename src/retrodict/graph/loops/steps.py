"""What a loop of a recorded model is made of: steps that compute the same, and their operands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import Var

from retrodict.graph.loops.equation_kinds import type_of
from retrodict.graph.loops.recording import Atom, Recording, Statement


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


@dataclass
class Stack:
    """Operands from outside, one for each step; None for special steps that do not use it."""

    entries: list[Atom | None]


@dataclass
class Slices:
    """Slices of one array from outside, one for each step.

    Attributes:
        operand: the array.
        sizes: of a slice.
        entries: where the slices start; None for special steps that do not use it.
    """

    operand: Atom
    sizes: tuple[int, ...]
    entries: list[tuple[int, ...] | None]


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
        kinds: of the equations.
        operands: for each equation, then for each site, its operands; those of a site are the
            parameters of its distribution.
    """

    statements: tuple[Statement, ...]
    eqns: tuple[int, ...]
    positions: tuple[int, ...]
    kinds: tuple[int, ...]
    operands: tuple[tuple[Atom, ...], ...]

    def quantities(self, recording: Recording) -> dict[Var, Quantity]:
        """The values of its sites and the results of its equations."""
        found: dict[Var, Quantity] = {}
        for position, statement in enumerate(self.statements):
            if statement.value is not None:
                found[statement.value] = SiteValue(position)
        for offset, number in enumerate(self.eqns):
            for place, var in enumerate(recording.eqns[number].outvars):
                found[var] = Result(offset, place)
        return found

    def rows(self, position: int) -> list[int]:
        """Rows of `operands` that belong to a site: its equations, and itself."""
        own = [offset for offset, owner in enumerate(self.positions) if owner == position]
        return [*own, len(self.eqns) + position]


@dataclass(frozen=True)
class Loop:
    """A run of steps that compute the same.

    Attributes:
        start, stop: the first statement of the recorded model inside, and the first behind.
        steps: all of them; the last is the template.
        special: how many first steps have sites with equations of their own.
        plain: positions of the sites that have none in the special steps either.
        sources: where the operands of the template come from.
        registers: quantities that steps take from earlier ones; if none, steps are independent.
        inputs: operands from outside that differ from step to step.
        slices: for equations of the template that take another slice in each step, the input.
    """

    start: int
    stop: int
    steps: tuple[Step, ...]
    special: int
    plain: frozenset[int]
    sources: tuple[tuple[Source, ...], ...]
    registers: tuple[Register, ...]
    inputs: tuple[Stack | Slices, ...]
    slices: Mapping[int, int]

    @property
    def template(self) -> Step:
        """The step whose equations are those of all steps, up to special ones."""
        return self.steps[-1]

    @property
    def in_time(self) -> bool:
        """Whether steps depend on earlier ones."""
        return bool(self.registers)

    def owns(self, statement: int) -> bool:
        """Whether a statement of the recorded model is inside."""
        return self.start <= statement < self.stop

    def quantities(self, recording: Recording) -> dict[Var, tuple[int, Quantity]]:
        """By variable, the step and which of its quantities it is."""
        return {
            var: (number, quantity)
            for number, step in enumerate(self.steps)
            for var, quantity in step.quantities(recording).items()
        }

    def type_of(self, recording: Recording, quantity: Quantity) -> Any:
        """Shape and type of a quantity."""
        if isinstance(quantity, SiteValue):
            return type_of(self.template.statements[quantity.position].value)
        eqn = recording.eqns[self.template.eqns[quantity.offset]]
        return type_of(eqn.outvars[quantity.number])
