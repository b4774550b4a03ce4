"""Evaluate one step of a loop of a recorded model, from its template or as a special step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from retrodict.graph.loops.environment import Environment
from retrodict.graph.loops.operands import same_atom
from retrodict.graph.loops.recording import Atom, ConcreteLeaf, Recording, apply
from retrodict.graph.loops.steps import (
    Loop,
    Now,
    Past,
    PerStep,
    Quantity,
    Result,
    Shared,
    SiteValue,
)


@dataclass
class Operands:
    """Operands of one step of a loop.

    Attributes:
        recording: the model.
        loop: which loop.
        shared: by row and column, those from outside that are the same in all steps.
        entries: those from outside that are the step's own.
        registers: quantities of the steps before, the last first.
        current: site values and results of the step itself.
    """

    recording: Recording
    loop: Loop
    shared: Mapping[tuple[int, int], Any]
    entries: Sequence[Array]
    registers: Sequence[Sequence[Array]]
    current: dict[Quantity, Any]

    def read(self, row: int) -> list[Any]:
        """The operands of an equation, or of a site."""
        found = []
        for column, source in enumerate(self.loop.sources[row]):
            match source:
                case Now(quantity):
                    found.append(self.current[quantity])
                case Past(register, lag):
                    found.append(self.registers[register][lag - 1])
                case PerStep(number):
                    found.append(self.entries[number])
                case Shared():
                    found.append(self.shared[row, column])
        return found

    def evaluate(self, position: int) -> list[Any]:
        """The parameters of one site of the template; results on the way are kept."""
        *offsets, own = self.loop.template.rows(position)
        for offset in offsets:
            if offset in self.loop.slices:
                self.current[Result(offset, 0)] = self.entries[self.loop.slices[offset]]
                continue
            eqn = self.recording.eqns[self.loop.template.eqns[offset]]
            results = enumerate(apply(eqn, self.read(offset)))
            self.current |= {Result(offset, number): value for number, value in results}
        return self.read(own)


@dataclass
class StepChoice:
    """Chooses between the template and the special steps, inside of one step of a scan.

    Attributes:
        kept: for each site, results that are needed after its statement.
        outer: what is known outside of the loop.
        operands: of the step.
        form: the number of a special step, or how many there are for all other steps.
    """

    kept: Sequence[Sequence[Result]]
    outer: Environment
    operands: Operands
    form: Array

    def leaves(self, position: int) -> list[Any]:
        """The parameters of a site."""
        loop, kept = self.operands.loop, self.kept[position]
        if not loop.special or position in loop.plain:
            return self.operands.evaluate(position)

        def general() -> tuple[list[Array], list[Array]]:
            operands = replace(self.operands, current=dict(self.operands.current))
            leaves = operands.evaluate(position)
            return list(map(jnp.asarray, leaves)), [operands.current[q] for q in kept]

        like = jax.eval_shape(general)

        def special(number: int) -> tuple[list[Array], list[Array]]:
            leaves = self._read(number, loop.steps[number].statements[position].leaves)
            return list(map(_as, leaves, like[0])), [jnp.zeros(q.shape, q.dtype) for q in like[1]]

        leaves: list[Any]
        leaves, results = self._choose(special, general)
        self.operands.current |= dict(zip(kept, results, strict=True))
        row = len(loop.template.eqns) + position
        for column, source in enumerate(loop.sources[row]):
            others = (s.statements[position].leaves[column] for s in loop.steps[: loop.special])
            atom = source.atom if isinstance(source, Shared) else None
            if isinstance(atom, ConcreteLeaf) and all(same_atom(atom, other) for other in others):
                leaves[column] = atom.value  # some distributions look at the value
        return leaves

    def quantities(self) -> list[Array]:
        """For each register, the quantity of this step."""
        loop = self.operands.loop
        types = [loop.type_of(self.operands.recording, r.quantity) for r in loop.registers]

        def general() -> list[Array]:
            pairs = zip(loop.registers, types, strict=True)
            return [jnp.asarray(self.operands.current[r.quantity], t) for r, (_, t) in pairs]

        if not loop.special or all(isinstance(r.quantity, SiteValue) for r in loop.registers):
            return general()

        def special(number: int) -> list[Array]:
            values = []
            for register, (shape, dtype) in zip(loop.registers, types, strict=True):
                value: Any = np.zeros(shape)
                if isinstance(register.quantity, SiteValue):
                    value = self.operands.current[register.quantity]
                elif number in register.early:
                    (value,) = self._read(number, [register.early[number]])
                values.append(jnp.broadcast_to(jnp.asarray(value, dtype), shape))
            return values

        found: list[Array] = self._choose(special, general)
        return found

    def _choose(self, special: Callable[[int], Any], general: Callable[[], Any]) -> Any:
        number = self.operands.loop.special
        forms: list[Callable[[], Any]] = [lambda n=n: special(n) for n in range(number)]  # type: ignore[misc]
        return lax.switch(self.form, [*forms, general])

    def _read(self, number: int, atoms: Sequence[Atom]) -> list[Any]:
        """Operands of a special step, from the values of its sites and of those before it."""
        loop, sites = self.operands.loop, {}
        pairs = zip(loop.registers, self.operands.registers, strict=True)
        past = {r.quantity: values for r, values in sorted(pairs, key=lambda pair: pair[0].depth)}
        for step in range(number + 1):
            for position, statement in enumerate(loop.steps[step].statements):
                quantity, lag = SiteValue(position), number - step
                if statement.value is None:
                    continue
                if lag == 0 and quantity in self.operands.current:
                    sites[statement.value] = self.operands.current[quantity]
                elif 0 < lag <= len(past.get(quantity, ())):
                    sites[statement.value] = past[quantity][lag - 1]
        return self.outer.inside(sites).read(atoms)


def _as(value: Any, like: Any) -> Array:
    return jnp.broadcast_to(jnp.asarray(value, like.dtype), like.shape)
