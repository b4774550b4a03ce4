"""Evaluate one step of a loop of a recorded model, by its template or as a special step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from retrodict.graph.loops.environment import Environment
from retrodict.graph.loops.operands import same_atom
from retrodict.graph.loops.recording import Atom, ConcreteLeaf, apply
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
    Source,
)


@dataclass
class StepEvaluation:
    """One step of a loop.

    Attributes:
        loop: the loop.
        kept: for each site, results of its equations that are needed after its statement.
        outer: values outside of the loop; operands that all steps share have been read.
        number: the number of the step.
        entries: operands from outside of this step.
        registers: quantities of the steps before, the latest first.
        current: site values and results of the step itself.
    """

    loop: Loop
    kept: Sequence[Sequence[Result]]
    outer: Environment
    number: Array
    entries: Sequence[Array]
    registers: Sequence[Sequence[Array]]
    current: dict[Quantity, Any]

    def evaluate(self, position: int) -> tuple[list[Any], dict[Quantity, Any]]:
        """The parameters of a site by the template, and `current` with the results on the way."""
        current = dict(self.current)

        def read(source: Source) -> Any:
            match source:
                case Now(quantity):
                    return current[quantity]
                case Past(register, lag):
                    return self.registers[register][lag - 1]
                case PerStep(number):
                    return self.entries[number]
                case Shared(atom):
                    return self.outer.read([atom])[0]

        for offset, number in enumerate(self.loop.template[position].eqns):
            row = self.loop.sources[position][offset]
            if isinstance(row, PerStep):
                results: Sequence[Any] = [read(row)]
            else:
                results = apply(self.outer.recording.eqns[number], list(map(read, row)))
            current |= {Result(position, offset, n): value for n, value in enumerate(results)}
        return list(map(read, self.loop.parameters(position))), current

    def leaves(self, position: int) -> list[Any]:
        """The parameters of a site."""
        loop, kept, special = self.loop, self.kept[position], self.loop.special[position]
        if not special:
            leaves, self.current = self.evaluate(position)
            return leaves

        def general() -> list[Any]:
            leaves, current = self.evaluate(position)
            return [*leaves, *(current[quantity] for quantity in kept)]

        statements = [loop.steps[number][position].statement for number in range(special)]
        values = self._switch(general, [[*s.leaves, *(None for _ in kept)] for s in statements])
        number = len(values) - len(kept)
        self.current |= dict(zip(kept, values[number:], strict=True))
        for column, source in enumerate(loop.parameters(position)):
            atom = source.atom if isinstance(source, Shared) else None
            if isinstance(atom, ConcreteLeaf) and all(
                same_atom(atom, statement.leaves[column]) for statement in statements
            ):
                values[column] = atom.value  # some distributions look at the value
        return values[:number]

    def quantity(self, register: Register) -> Array:
        """The quantity that a register keeps of this step."""
        quantity, value = register.quantity, jnp.asarray(self.current[register.quantity])
        special = 0 if isinstance(quantity, SiteValue) else self.loop.special[quantity.position]
        early = [register.early.get(step) for step in range(special)]
        if any(atom is not None for atom in early):
            (value,) = self._switch(lambda: [value], [[atom] for atom in early])
        return value

    def _switch(
        self, general: Callable[[], list[Any]], atoms: Sequence[Sequence[Atom | None]]
    ) -> list[Any]:
        """Values by the template, or in special steps those of operands; None stands for zeros."""

        def template() -> list[Array]:
            return list(map(jnp.asarray, general()))

        like = jax.eval_shape(template)

        def special(number: int) -> list[Array]:
            values = iter(self._read(number, [atom for atom in atoms[number] if atom is not None]))
            row = (0 if atom is None else next(values) for atom in atoms[number])
            return [
                jnp.broadcast_to(jnp.asarray(value, form.dtype), form.shape)
                for value, form in zip(row, like, strict=True)
            ]

        branches = [partial(special, number) for number in range(len(atoms))]
        values: list[Any] = lax.switch(self.number, [*branches, template])
        return values

    def _read(self, number: int, atoms: Sequence[Atom]) -> list[Any]:
        """Operands of a special step, from the values of its sites and of those before it."""
        sites = {}
        past: dict[Quantity, Sequence[Array]] = {}
        for register, values in zip(self.loop.registers, self.registers, strict=True):
            past[register.quantity] = max(past.get(register.quantity, ()), values, key=len)
        for step in range(number + 1):
            for position, block in enumerate(self.loop.steps[step]):
                quantity, lag = SiteValue(position), number - step
                if block.statement.value is None:
                    continue
                if lag == 0 and quantity in self.current:
                    sites[block.statement.value] = self.current[quantity]
                elif 0 < lag <= len(past.get(quantity, ())):
                    sites[block.statement.value] = past[quantity][lag - 1]
        return self.outer.extended(sites).read(atoms)
