"""Run one loop of a recorded model: step by step in a scan, or all steps at once in a plate."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array
from numpyro.contrib.control_flow import scan
from numpyro.primitives import CondIndepStackFrame, apply_stack

from retrodict.graph.loops.environment import Environment
from retrodict.graph.loops.equation_kinds import type_of
from retrodict.graph.loops.recording import Recording, Statement, apply, shape_of, variables
from retrodict.graph.loops.stacked_uses import StackedUse, stacked_uses
from retrodict.graph.loops.step_evaluation import StepEvaluation
from retrodict.graph.loops.steps import (
    Loop,
    PerStep,
    Quantity,
    Register,
    Result,
    Shared,
    SiteValue,
    quantities,
)
from retrodict.graph.stacked_distribution import Stacked


def sample(name: str, fn: Any, statement: Statement, frames: Sequence[Any] = ()) -> Any:
    """The value of a site whose distribution the model's handlers have already processed."""
    message = {
        "type": "sample",
        "name": name,
        "fn": fn,
        "args": (),
        "kwargs": {"rng_key": None, "sample_shape": statement.sample_shape},
        "value": None,
        "scale": None,
        "is_observed": False,
        "intermediates": [],
        "cond_indep_stack": [*statement.frames, *frames],
        "infer": {},
    }
    return apply_stack(message)["value"]


class LoopRunner:
    """Runs one loop of a recorded model.

    Args:
        recording: the model.
        loop: the loop.
        names: the names of the lifted sites, one for each site of a step.
    """

    def __init__(self, recording: Recording, loop: Loop, names: Sequence[str]) -> None:
        self.recording, self.loop, self.names = recording, loop, names
        self.entries = loop.entries(recording)
        self.uses = stacked_uses(recording, loop)
        self.outside = self._used_outside()
        self.kept = [self._kept(position) for position in range(len(names))]

    def _used_outside(self) -> tuple[Quantity, ...]:
        """Quantities that statements outside of the loop, or special steps, take from its steps."""
        recording = self.recording
        special = {number for _, _, block in self.loop.special_blocks() for number in block.eqns}
        uses: list[Sequence[Any]] = [
            eqn.invars
            for number, (eqn, owner) in enumerate(zip(recording.eqns, recording.owner, strict=True))
            if number in special or (owner >= 0 and not self.loop.contains(owner))
        ]
        uses += [
            statement.leaves
            for number, statement in enumerate(recording.statements)
            if not self.loop.contains(number)
        ]
        used = (self.entries.get(var) for atoms in uses for var in variables(atoms))
        return tuple(dict.fromkeys(entry[1] for entry in used if entry is not None))

    def _kept(self, position: int) -> tuple[Result, ...]:
        """Results of the equations of one site that are needed after its statement."""
        needed = {*self.outside, *(register.quantity for register in self.loop.registers)}
        for later in range(position + 1, len(self.names)):
            needed.update(self.loop.current_sources(later))
        results = (quantity for quantity in needed if isinstance(quantity, Result))
        return tuple(sorted(result for result in results if result.position == position))

    def run(self, outer: Environment) -> None:
        """Run all sites of the loop, and make their values available to later statements."""
        for rows in self.loop.sources:
            sources = (s for row in rows if not isinstance(row, PerStep) for s in row)
            outer.read([source.atom for source in sources if isinstance(source, Shared)])
        inputs = [outer.input(source) for source in self.loop.inputs]
        run = self._run_scan if self.loop.registers else self._run_plate
        series = run(outer, inputs)
        for var, (step, quantity) in self.entries.items():
            if quantity in series:
                outer.entries[var] = (series[quantity], step)
        for number, use in self.uses.items():
            outer.stacks[number] = self._stacked(number, use, series[use.quantity])

    def _stacked(self, number: int, use: StackedUse, series: Array) -> Array:
        """The result of an equation that stacks a quantity of all steps."""
        eqn = self.recording.eqns[number]

        def reshaped(entry: Array) -> Array:
            for place in use.chain:
                (entry,) = apply(self.recording.eqns[place], [entry])
            return entry

        axis = eqn.params["axis" if eqn.primitive.name == "stack" else "dimension"]
        joined: Array = jnp.moveaxis(jax.vmap(reshaped)(series), 0, axis)
        return joined.reshape(shape_of(eqn.outvars[0]))

    def _run_plate(self, outer: Environment, inputs: Sequence[Array]) -> dict[Quantity, Array]:
        """Run the sites of all steps at once; returns quantities of all steps."""
        series: dict[Quantity, Array] = {}
        length = len(self.loop.steps)
        for position, (name, block) in enumerate(zip(self.names, self.loop.template, strict=True)):

            def one(number: Array, entries: Any, current: Any, position: int = position) -> Any:
                step = StepEvaluation(
                    self.loop, self.kept, outer, number, entries, (), dict(current)
                )
                leaves, current = step.evaluate(position)
                return leaves, {quantity: current[quantity] for quantity in self.kept[position]}

            leaves, kept = jax.vmap(one)(jnp.arange(length), inputs, series)
            series |= kept
            statement = block.statement
            if statement.value is None:
                numpyro.deterministic(name, leaves[0])
                continue
            varies = []
            for column, source in enumerate(self.loop.parameters(position)):
                varies.append(not isinstance(source, Shared))
                if isinstance(source, Shared):
                    (leaves[column],) = outer.read([source.atom])
            fn = Stacked(tuple(leaves), tuple(varies), statement.tree, length)
            frame = CondIndepStackFrame(self.names[0], -len(fn.batch_shape), length)
            series[SiteValue(position)] = sample(name, fn, statement, [frame])
        return series

    def _run_scan(self, outer: Environment, inputs: Sequence[Array]) -> dict[Quantity, Array]:
        """Run the sites step by step; returns quantities of all steps that are used outside."""

        def one(registers: Any, inputs: Any) -> tuple[Any, Any]:
            number, entries = inputs
            step = StepEvaluation(self.loop, self.kept, outer, number, entries, registers, {})
            for position, (name, block) in enumerate(
                zip(self.names, self.loop.template, strict=True)
            ):
                leaves = step.leaves(position)
                if block.statement.value is None:
                    numpyro.deterministic(name, leaves[0])
                    continue
                fn = jax.tree.unflatten(block.statement.tree, leaves)
                step.current[SiteValue(position)] = sample(name, fn, block.statement)
            registers = [
                [step.quantity(register), *values[:-1]]
                for register, values in zip(self.loop.registers, registers, strict=True)
            ]
            return registers, {quantity: step.current[quantity] for quantity in self.outside}

        length = len(self.loop.steps)
        start = [self._initial(outer, register) for register in self.loop.registers]
        numbers = np.arange(length, dtype=np.int32)
        series: dict[Quantity, Array]
        _, series = scan(one, start, (numbers, inputs), length=length)
        return series

    def _initial(self, outer: Environment, register: Register) -> list[Array]:
        """A register before the first step; zero where no step reads it."""
        template = quantities(self.recording, self.loop.template).items()
        shape, dtype = next(
            type_of(var) for var, quantity in template if quantity == register.quantity
        )
        values = []
        for lag in range(1, register.depth + 1):
            (value,) = outer.read([register.early[-lag]]) if -lag in register.early else (0,)
            values.append(jnp.broadcast_to(jnp.asarray(value, dtype), shape))
        return values
