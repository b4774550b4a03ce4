"""Find where the operands of a loop's steps come from, and whether that holds in all steps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from retrodict.graph.loops.equation_kinds import is_dense_slice, type_of
from retrodict.graph.loops.recording import Atom, ConcreteLeaf, Recording, shape_of, variables
from retrodict.graph.loops.steps import (
    Loop,
    Now,
    Past,
    PerStep,
    Quantity,
    Register,
    Shared,
    SiteValue,
    Slices,
    Source,
    Stack,
    Step,
)

# A step may depend on steps at most this far back.
LONGEST_LAG = 24


class OperandSearch:
    """Finds the sources of the operands of a run of steps.

    Args:
        recording: the model.
        steps: the steps of the run, as far as their sites are numbered on.
        places: by variable, its step and quantity.
        first: the first step of the loop.
        stop: the first step after the loop.
    """

    def __init__(
        self,
        recording: Recording,
        steps: Sequence[Step],
        places: Mapping[Var, tuple[int, Quantity]],
        first: int,
        stop: int,
    ) -> None:
        self.recording, self.steps, self.places = recording, steps, places
        self.first, self.stop, self.template = first, stop, steps[stop - 1]
        self.special = [self._other_equations(p) for p in range(len(self.template))]
        self.registers: list[Register] = []
        self.inputs: list[Stack | Slices] = []

    def loop(self, start: int, most_special: int) -> Loop | None:
        """The loop, if every operand comes from the same place in all steps but special ones.

        Args:
            start: the first statement of the loop.
            most_special: the largest number of special steps.
        """
        sources: list[Any] = []
        while len(sources) < len(self.template):
            rows = self._rows(len(sources))
            if rows is not None:
                sources.append(rows)
                continue
            # Start again with one more special step for this site.
            self.special[len(sources)] += 1
            sources, self.registers, self.inputs = [], [], []
            if max(self.special) > most_special:
                return None
        loop = Loop(
            start=start,
            stop=start + (self.stop - self.first) * len(self.template),
            steps=tuple(self.steps[self.first : self.stop]),
            special=tuple(self.special),
            sources=tuple(sources),
            registers=(),
            inputs=tuple(self.inputs),
        )
        return self._with_registers(loop)

    def _other_equations(self, position: int) -> int:
        """The number of first steps in which a site has other equations than in the template."""

        def form(step: Step) -> Any:
            return step[position].kinds, list(map(shape_of, step[position].statement.leaves))

        steps = self.steps[self.first : self.stop]
        numbers = (n for n, step in enumerate(steps, 1) if form(step) != form(self.template))
        return max(numbers, default=0)

    def _place(self, atom: Any) -> tuple[int, Quantity] | None:
        """The step and the quantity that an operand is, if it is from inside."""
        place = self.places.get(atom) if isinstance(atom, Var) else None
        return None if place is None or not self.first <= place[0] < self.stop else place

    def _available(self, quantity: Quantity) -> int:
        """The first step that has a quantity."""
        special = 0 if isinstance(quantity, SiteValue) else self.special[quantity.position]
        return self.first + special

    def _rows(self, position: int) -> tuple[tuple[Source, ...] | PerStep, ...] | None:
        """The sources of the operands of a site and its equations, if all steps agree."""
        general = range(self.first + self.special[position], self.stop)
        blocks = [self.steps[step][position] for step in general]
        rows: list[tuple[Source, ...] | PerStep] = []
        for number, operands in enumerate(blocks[-1].operands):
            columns = list(zip(*(block.operands[number] for block in blocks), strict=True))
            starts: list[Any] = [None]
            if number < len(blocks[-1].eqns):
                starts = [_starts(self.recording.eqns[block.eqns[number]]) for block in blocks]
            if None not in starts and len(set(starts)) > 1:
                if not isinstance(self._source(general, columns[0]), Shared):
                    return None
                sizes = shape_of(self.recording.eqns[blocks[-1].eqns[number]].outvars[0])
                rows.append(self._input(Slices(operands[0], sizes, self._padded(starts))))
                continue
            sources = [self._source(general, atoms) for atoms in columns]
            if None in sources:
                return None
            rows.append(tuple(source for source in sources if source is not None))
        return tuple(rows)

    def _source(self, general: range, atoms: Sequence[Atom]) -> Source | None:
        """The origin of one operand in the steps of a range; None if they disagree."""
        last = self._place(atoms[-1])
        if last is None:
            if any(self._place(atom) is not None for atom in atoms):
                return None
            if all(same_atom(atom, atoms[-1]) for atom in atoms):
                return Shared(atoms[-1])
            return self._input(Stack(self._padded(atoms)))
        step, quantity = last
        lag = self.stop - 1 - step
        if lag > LONGEST_LAG:
            return None
        early = {}
        for number, atom in zip(general, atoms, strict=True):
            at, place = number - lag, self._place(atom)
            if at >= self._available(quantity):
                if place != (at, quantity):
                    return None
            elif lag and (place is None or self.first <= place[0] <= at):
                early[at - self.first] = atom
            else:
                return None
        return Past(self._register(quantity, lag, early), lag) if lag else Now(quantity)

    def _padded(self, entries: Sequence[Any]) -> list[Any]:
        return [None] * (self.stop - self.first - len(entries)) + list(entries)

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
        self.registers.append(Register(quantity, lag, early))
        return len(self.registers) - 1

    def _input(self, new: Stack | Slices) -> PerStep:
        """The input with these entries, which may also be those of another operand."""
        for number, other in enumerate(self.inputs):
            if _compatible(other, new):
                pairs: Any = zip(other.entries, new.entries, strict=True)
                other.entries = [b if a is None else a for a, b in pairs]
                return PerStep(number)
        self.inputs.append(new)
        return PerStep(len(self.inputs) - 1)

    def _with_registers(self, loop: Loop) -> Loop:
        """The loop with registers, also for the values of sites that special steps need."""
        needed = [(step, block.statement.leaves) for step, _, block in loop.special_blocks()]
        for register in self.registers:
            needed += [(step, (atom,)) for step, atom in register.early.items() if step >= 0]
        for step, atoms in needed:
            for at, value in self._sites_behind(atoms):
                if at < self.first + step:
                    self._register(value, self.first + step - at, {})
        return replace(loop, registers=tuple(self.registers))

    def _sites_behind(self, atoms: Iterable[Atom]) -> Iterator[tuple[int, SiteValue]]:
        """The values of sites inside of the loop that operands are computed from, with steps."""
        pending, done = list(variables(atoms)), set[Var]()
        while pending:
            var = pending.pop()
            place = self._place(var)
            if var in done or place is None:
                continue
            done.add(var)
            step, quantity = place
            if isinstance(quantity, SiteValue):
                yield step, quantity
            else:
                pending += variables(self.recording.eqns[self.recording.origin[var]].invars)


def _starts(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """Where an equation that takes a slice starts; None if it takes none, or starts vary."""
    if is_dense_slice(eqn):
        return tuple(eqn.params["start_indices"])
    starts = [atom.val for atom in eqn.invars[1:] if isinstance(atom, Literal)]
    if eqn.primitive.name != "dynamic_slice" or len(starts) < len(eqn.invars) - 1:
        return None
    limits = np.subtract(type_of(eqn.invars[0])[0], eqn.params["slice_sizes"])
    return tuple(np.clip(starts, 0, limits).tolist())


def same_atom(one: Atom | None, other: Atom | None) -> bool:
    """Whether two operands are the same, or equal numbers."""
    if one is other:
        return True
    if isinstance(one, ConcreteLeaf) and isinstance(other, ConcreteLeaf):
        a, b = np.asarray(one.value), np.asarray(other.value)
    elif isinstance(one, Literal) and isinstance(other, Literal):
        a, b = np.asarray(one.val), np.asarray(other.val)
    else:
        return False
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _compatible(one: Stack | Slices, other: Stack | Slices) -> bool:
    """Whether two inputs have the same entries in all steps that use both."""
    if isinstance(one, Slices) and isinstance(other, Slices):
        if not same_atom(one.operand, other.operand) or one.sizes != other.sizes:
            return False
    elif type(one) is not type(other):
        return False
    pairs: Any = zip(one.entries, other.entries, strict=True)
    return all(a is None or b is None or a == b or same_atom(a, b) for a, b in pairs)
