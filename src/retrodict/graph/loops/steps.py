"""The parts of a loop in a recorded model: steps that compute the same, and their operands."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from jax.extend.core import Var

from retrodict.graph.loops.recording import Atom, Recording, Statement


class SiteValue(NamedTuple):
    """The value of the site at a position within a step."""

    position: int


class Result(NamedTuple):
    """A result of one of the equations that belong to the site at a position within a step."""

    position: int
    equation: int
    number: int


Quantity: TypeAlias = SiteValue | Result


class Now(NamedTuple):
    """An operand from the step itself."""

    quantity: Quantity


class Past(NamedTuple):
    """An operand from an earlier step."""

    register: int
    lag: int


class Shared(NamedTuple):
    """An operand from outside of the loop that is the same in all steps."""

    atom: Atom


class PerStep(NamedTuple):
    """An operand from outside of the loop, one for each step."""

    number: int


Source: TypeAlias = Now | Past | Shared | PerStep


@dataclass
class Stack:
    """Operands from outside of the loop, one for each step; None for steps that do not use it."""

    entries: list[Atom | None]


@dataclass
class Slices:
    """Slices of one array from outside of the loop, one for each step.

    Attributes:
        operand: the array.
        sizes: the shape of a slice.
        entries: where the slices start; None for steps that do not use it.
    """

    operand: Atom
    sizes: tuple[int, ...]
    entries: list[tuple[int, ...] | None]


@dataclass
class Register:
    """A quantity that later steps need.

    Attributes:
        quantity: the quantity.
        depth: the largest number of steps after which it is needed.
        early: for steps without this quantity, by number, the operand in its place. Steps before
            the first have negative numbers.
    """

    quantity: Quantity
    depth: int = 0
    early: dict[int, Atom] = field(default_factory=dict)


class SiteBlock(NamedTuple):
    """A site in one step of a loop, with the equations that belong to it.

    Attributes:
        statement: the site.
        eqns: numbers of the equations.
        kinds: kinds of the equations.
        operands: of each equation, and last of the site: the parameters of its distribution.
    """

    statement: Statement
    eqns: tuple[int, ...]
    kinds: tuple[int, ...]
    operands: tuple[tuple[Atom, ...], ...]


Step: TypeAlias = Sequence[SiteBlock]


def quantities(recording: Recording, step: Step) -> dict[Var, Quantity]:
    """The values of the sites of a step and the results of its equations."""
    by_variable: dict[Var, Quantity] = {}
    for position, block in enumerate(step):
        if block.statement.value is not None:
            by_variable[block.statement.value] = SiteValue(position)
        for equation, number in enumerate(block.eqns):
            for place, var in enumerate(recording.eqns[number].outvars):
                by_variable[var] = Result(position, equation, place)
    return by_variable


@dataclass(frozen=True)
class Loop:
    """A run of steps that compute the same.

    Attributes:
        start, stop: the first statement of the recorded model inside, and the first one after.
        steps: all steps; the last is the template.
        special: for each site, the number of first steps in which it has other equations.
        sources: for each site, and each of its equations and last its parameters, the origin of
            the operands of the template; `PerStep` for an equation whose result is an input.
        registers: quantities that steps take from earlier ones; if none, steps are independent.
        inputs: operands from outside that differ from step to step.
    """

    start: int
    stop: int
    steps: tuple[Step, ...]
    special: tuple[int, ...]
    sources: tuple[tuple[tuple[Source, ...] | PerStep, ...], ...]
    registers: tuple[Register, ...]
    inputs: tuple[Stack | Slices, ...]

    @property
    def template(self) -> Step:
        """The step whose equations are those of all steps, except in special ones."""
        return self.steps[-1]

    def contains(self, statement: int) -> bool:
        """Whether a statement of the recorded model is inside."""
        return self.start <= statement < self.stop

    def special_blocks(self) -> Iterator[tuple[int, int, SiteBlock]]:
        """The sites with other equations than the template's: step, position and block."""
        for position, number in enumerate(self.special):
            for step in range(number):
                yield step, position, self.steps[step][position]

    def parameters(self, position: int) -> tuple[Source, ...]:
        """The origin of the parameters of a site."""
        row = self.sources[position][-1]
        assert not isinstance(row, PerStep)
        return row

    def current_sources(self, position: int) -> Iterator[Quantity]:
        """Quantities of the same step that a site and its equations take as operands."""
        for row in self.sources[position]:
            for source in () if isinstance(row, PerStep) else row:
                if isinstance(source, Now):
                    yield source.quantity

    def entries(self, recording: Recording) -> Mapping[Var, tuple[int, Quantity]]:
        """By variable, the step and the quantity, except for results in special steps."""
        return {
            var: (step, quantity)
            for step, blocks in enumerate(self.steps)
            for var, quantity in quantities(recording, blocks).items()
            if isinstance(quantity, SiteValue) or step >= self.special[quantity.position]
        }
