"""Find out where the operands of a loop's steps come from, and whether that is so in all steps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from retrodict.graph.loops.equation_kinds import is_dense, type_of
from retrodict.graph.loops.recording import Atom, ConcreteLeaf, Recording, shape_of, variables
from retrodict.graph.loops.steps import (
    Loop,
    Now,
    Past,
    PerStep,
    Quantity,
    Register,
    Result,
    Shared,
    SiteValue,
    Slices,
    Source,
    Stack,
    Step,
)

# A step may look so many steps back.
LONGEST_LAG = 24


class OperandSearch:
    """Says where the operands of a run of steps come from.

    Args:
        recording: the model.
        start: its statement that the run begins with.
        steps: of the run, as many as are numbered on.
        places: by variable, the step and which of its quantities it is.
        first: the first step to be part of the loop.
        special: how many steps from there on may have equations of their own.
        stop: the first step behind the loop.
    """

    def __init__(
        self,
        recording: Recording,
        start: int,
        steps: Sequence[Step],
        places: Mapping[Var, tuple[int, Quantity]],
        first: int,
        special: int,
        stop: int,
    ) -> None:
        self.recording, self.start, self.steps, self.places = recording, start, steps, places
        self.first, self.stop = first, stop
        self.special, self.general = range(first, first + special), range(first + special, stop)
        self.template = steps[stop - 1]
        self.registers: list[Register] = []
        self.inputs: list[Stack | Slices] = []

    def loop(self) -> Loop | None:
        """The loop, if every operand comes from the same place in all steps."""
        slices = self._slices()
        sources: list[tuple[Source, ...]] = []
        for row, operands in enumerate(self.template.operands):
            # Where a slice starts is no operand.
            number = 1 if row in slices else len(operands)
            found = [self._source(row, column) for column in range(number)]
            if None in found or (row in slices and not isinstance(found[0], Shared)):
                return None
            rest = [Shared(atom) for atom in operands[number:]]
            sources.append((*(source for source in found if source is not None), *rest))
        numbers = {}
        for offset, (starts, sizes) in slices.items():
            each = Slices(self.template.operands[offset][0], sizes, starts)
            numbers[offset] = self._input(each)
        plain = self._plain(sources, numbers)
        if not self._provide(plain):
            return None
        for register in self.registers:
            register.early = {step - self.first: atom for step, atom in register.early.items()}
        size = len(self.template.statements)
        return Loop(
            start=self.start + self.first * size,
            stop=self.start + self.stop * size,
            steps=tuple(self.steps[self.first : self.stop]),
            special=len(self.special),
            plain=plain,
            sources=tuple(sources),
            registers=tuple(self.registers),
            inputs=tuple(self.inputs),
            slices=numbers,
        )

    def _place(self, atom: Any) -> tuple[int, Quantity] | None:
        """The step and the quantity that an operand is, if it is from inside."""
        place = self.places.get(atom) if isinstance(atom, Var) else None
        return None if place is None or not self.first <= place[0] < self.stop else place

    def _source(self, row: int, column: int) -> Source | None:
        atoms = [self.steps[step].operands[row][column] for step in self.general]
        last = self._place(atoms[-1])
        if last is None:
            if any(self._place(atom) is not None for atom in atoms):
                return None
            if all(same_atom(atom, atoms[-1]) for atom in atoms):
                return Shared(atoms[-1])
            return PerStep(self._input(Stack([*(None for _ in self.special), *atoms])))
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
        """The number of an input."""
        for number, other in enumerate(self.inputs):
            if _same_input(other, new):
                return number
        self.inputs.append(new)
        return len(self.inputs) - 1

    def _slices(self) -> dict[int, tuple[list[Any], tuple[int, ...]]]:
        """For equations that take another slice in each step, where, and how much."""
        found = {}
        for offset, number in enumerate(self.template.eqns):
            starts = [
                _starts(self.recording.eqns[self.steps[step].eqns[offset]]) for step in self.general
            ]
            if None not in starts and len(set(starts)) > 1:
                sizes = type_of(self.recording.eqns[number].outvars[0])[0]
                found[offset] = [*(None for _ in self.special), *starts], sizes
        return found

    def _plain(
        self, sources: Sequence[Sequence[Source]], slices: Mapping[int, int]
    ) -> frozenset[int]:
        """Positions of the sites for which special steps compute what all others do."""
        plain: set[int] = set()
        # By special step, the results of the template that its own are.
        results: list[dict[Result, Result]] = [{} for _ in self.special]
        for position in range(len(self.template.statements)):
            found = [
                self._agreement(position, step, sources, slices, results[number])
                for number, step in enumerate(self.special)
            ]
            agreed = [agreement for agreement in found if agreement is not None]
            if len(agreed) == len(found) and self._enter([e for a in agreed for e in a.entries]):
                plain.add(position)
                results = [{**old, **a.results} for old, a in zip(results, agreed, strict=True)]
        return frozenset(plain)

    def _enter(self, entries: Sequence[tuple[int, int, Any]]) -> bool:
        """Complete inputs for special steps: number, step and entry; False if they contradict."""
        new: dict[tuple[int, int], Any] = {}
        for number, step, entry in entries:
            other = new.get((number, step), self.inputs[number].entries[step])
            if other is not None and other != entry and not same_atom(other, entry):
                return False
            new[number, step] = entry
        for (number, step), entry in new.items():
            self.inputs[number].entries[step] = entry
        return True

    def _agreement(
        self,
        position: int,
        step: int,
        sources: Sequence[Sequence[Source]],
        slices: Mapping[int, int],
        results: Mapping[Result, Result],
    ) -> "_Agreement | None":
        """How a site of a special step is computed as in the template, if it is."""
        own, found = self.steps[step], _Agreement([], dict(results))
        rows, others = self.template.rows(position), own.rows(position)
        if len(rows) != len(others):
            return None
        for row, other in zip(rows, others, strict=True):
            operands = list(zip(sources[row], own.operands[other], strict=False))
            if row < len(self.template.eqns):
                eqn = self.recording.eqns[own.eqns[other]]
                starts = _starts(eqn)
                if self.template.kinds[row] != own.kinds[other]:
                    return None
                if row in slices and starts is not None:
                    found.entries.append((slices[row], step - self.first, starts))
                    operands = operands[:1]  # the others say where it starts
                elif starts != _starts(self.recording.eqns[self.template.eqns[row]]):
                    return None
                for number in range(len(eqn.outvars)):
                    found.results[Result(other, number)] = Result(row, number)
            for source, atom in operands:
                if isinstance(source, PerStep) and self._is_entry(source, atom):
                    found.entries.append((source.number, step - self.first, atom))
                elif not self._is(source, atom, step, found.results):
                    return None
        return found

    def _is_entry(self, source: PerStep, atom: Atom) -> bool:
        last: Any = self.inputs[source.number].entries[-1]
        return self._place(atom) is None and shape_of(atom) == shape_of(last)

    def _is(self, source: Source, atom: Atom, step: int, results: Mapping[Result, Result]) -> bool:
        """Whether an operand of a special step is from where the template says."""
        if isinstance(source, Shared):
            return same_atom(source.atom, atom)
        place = self._place(atom)
        if isinstance(source, Now):
            if place is None or place[0] != step:
                return False
            quantity = place[1]
            mine = results.get(quantity) if isinstance(quantity, Result) else quantity
            return mine == source.quantity
        if isinstance(source, Past):
            register = self.registers[source.register]
            return place == (step - source.lag, register.quantity) and isinstance(
                register.quantity, SiteValue
            )
        return False

    def _provide(self, plain: frozenset[int]) -> bool:
        """Keep the values of sites that special steps need; False if they need later ones."""
        for step in self.special:
            needed = [
                leaf
                for position, statement in enumerate(self.steps[step].statements)
                if position not in plain
                for leaf in statement.leaves
            ]
            needed += [r.early[step] for r in self.registers if step in r.early]
            for at, position in self._sites_behind(needed):
                if at > step:
                    return False
                if at < step:
                    self._register(SiteValue(position), step - at, {})
        return True

    def _sites_behind(self, atoms: Iterable[Atom]) -> Iterator[tuple[int, int]]:
        """The values of sites inside of the loop that operands are computed from."""
        pending, done = list(variables(atoms)), set[Var]()
        while pending:
            var = pending.pop()
            place = self._place(var)
            if var in done or place is None:
                continue
            done.add(var)
            if isinstance(place[1], SiteValue):
                yield place[0], place[1].position
            else:
                pending += variables(self.recording.eqns[self.recording.origin[var]].invars)


class _Agreement(NamedTuple):
    """How a special step computes a site as the template does.

    Attributes:
        entries: for inputs, by number, the entry of the step.
        results: which of the template's results its own are.
    """

    entries: list[tuple[int, int, Any]]
    results: dict[Result, Result]


def _starts(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """Where an equation that takes a slice starts, if it is one and that is written into it."""
    if eqn.primitive.name == "slice":
        return tuple(eqn.params["start_indices"]) if is_dense(eqn) else None
    literal = all(isinstance(atom, Literal) for atom in eqn.invars[1:])
    if eqn.primitive.name != "dynamic_slice" or not literal:
        return None
    shape, sizes = type_of(eqn.invars[0])[0], eqn.params["slice_sizes"]
    starts = [int(atom.val) for atom in eqn.invars[1:] if isinstance(atom, Literal)]
    return tuple(int(np.clip(s, 0, n - m)) for s, n, m in zip(starts, shape, sizes, strict=True))


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


def _same_input(one: Stack | Slices, other: Stack | Slices) -> bool:
    if isinstance(one, Stack) and isinstance(other, Stack):
        return all(map(same_atom, one.entries, other.entries))
    if isinstance(one, Slices) and isinstance(other, Slices):
        same = same_atom(one.operand, other.operand)
        return same and (one.sizes, one.entries) == (other.sizes, other.entries)
    return False
