"""Run one loop of a recorded model: step by step in a scan, or all steps at once in a plate."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array
from numpyro.contrib.control_flow import scan
from numpyro.primitives import CondIndepStackFrame, apply_stack

from retrodict.graph.loops.environment import Environment
from retrodict.graph.loops.recording import Recording, Statement, apply, shape_of, variables
from retrodict.graph.loops.stacked_uses import StackedUse, entries_of, stacked_uses
from retrodict.graph.loops.step_evaluation import Operands, StepChoice
from retrodict.graph.loops.steps import Loop, Now, Quantity, Result, Shared, SiteValue
from retrodict.graph.stacked_distribution import Stacked


def sample(name: str, fn: Any, statement: Statement, frames: Sequence[Any] = ()) -> Any:
    """The value of a site whose distribution has been through the model's own handlers before."""
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
        loop: which loop.
        names: what the sites of a step become.
    """

    def __init__(self, recording: Recording, loop: Loop, names: Sequence[str]) -> None:
        self.recording, self.loop, self.names = recording, loop, names
        self.length, self.template = len(loop.steps), loop.template
        self.entries = entries_of(recording, loop)
        self.uses = stacked_uses(recording, loop)
        self.outside = self._used_outside()
        self.kept = [self._kept(position) for position in range(len(names))]

    def _used_outside(self) -> tuple[Quantity, ...]:
        """What statements outside of the loop take from its steps."""
        recording, used = self.recording, dict[Quantity, None]()

        def use(atoms: Sequence[Any]) -> None:
            used.update((self.entries[v][1], None) for v in variables(atoms) if v in self.entries)

        special = {n for step in self.loop.steps[: self.loop.special] for n in step.eqns}
        for number, (eqn, owner) in enumerate(zip(recording.eqns, recording.owner, strict=True)):
            if number in special or (owner >= 0 and not self.loop.owns(owner)):
                use(eqn.invars)
        for number, statement in enumerate(recording.statements):
            if not self.loop.owns(number):
                use(statement.leaves)
        return tuple(used)

    def _kept(self, position: int) -> tuple[Result, ...]:
        """Results of the equations of one site that are needed after its statement."""
        needed = {quantity for quantity in self.outside if isinstance(quantity, Result)}
        needed |= {r.quantity for r in self.loop.registers if isinstance(r.quantity, Result)}
        for user in range(position + 1, len(self.names)):
            for row in self.template.rows(user):
                sources = [s for s in self.loop.sources[row] if isinstance(s, Now)]
                needed |= {s.quantity for s in sources if isinstance(s.quantity, Result)}
        return tuple(sorted(q for q in needed if self.template.positions[q.offset] == position))

    def run(self, outer: Environment) -> None:
        """State all sites of the loop, and tell what later statements may need."""
        places = {
            (row, column): source.atom
            for row, sources in enumerate(self.loop.sources)
            for column, source in enumerate(sources)
            if isinstance(source, Shared)
        }
        shared = dict(zip(places, outer.read(list(places.values())), strict=True))
        inputs = [outer.input(each) for each in self.loop.inputs]
        run = self._run_scan if self.loop.in_time else self._run_plate
        found = run(outer, shared, inputs)
        for var, (step, quantity) in self.entries.items():
            if quantity in found:
                outer.entries[var] = (found[quantity], step)
        for number, use in self.uses.items():
            outer.stacks[number] = self._stacked(number, use, found[use.quantity])

    def _stacked(self, number: int, use: StackedUse, series: Array) -> Array:
        """What an equation makes of a quantity of all steps."""
        eqn = self.recording.eqns[number]

        def moved(entry: Array) -> Array:
            for place in use.chain:
                (entry,) = apply(self.recording.eqns[place], [entry])
            return entry

        series = jax.vmap(moved)(series)
        if eqn.primitive.name == "stack":
            return jnp.moveaxis(series, 0, eqn.params["axis"])
        joined: Array = jnp.moveaxis(series, 0, eqn.params["dimension"])
        return joined.reshape(shape_of(eqn.outvars[0]))

    def _run_plate(
        self, outer: Environment, shared: Mapping[tuple[int, int], Any], inputs: Sequence[Array]
    ) -> dict[Quantity, Array]:
        """State the sites of all steps at once; gives what is used outside, and more."""
        found: dict[Quantity, Array] = {}
        for position, (name, statement) in enumerate(
            zip(self.names, self.template.statements, strict=True)
        ):
            row = len(self.template.eqns) + position
            sources = enumerate(self.loop.sources[row])
            same = {column: shared[row, column] for column, s in sources if isinstance(s, Shared)}

            def one(entries: Any, current: Any, _: Array, position: int = position) -> Any:
                operands = Operands(self.recording, self.loop, shared, entries, (), dict(current))
                leaves = operands.evaluate(position)
                kept = {quantity: operands.current[quantity] for quantity in self.kept[position]}
                return dict(enumerate(leaves)), kept

            stacked, kept = jax.vmap(one)(inputs, found, jnp.arange(self.length))
            found = found | kept
            if statement.value is None:
                numpyro.deterministic(name, stacked[0])
                continue
            leaves = tuple({**stacked, **same}.values())
            apart = tuple(column not in same for column in stacked)
            fn = Stacked(leaves, apart, statement.tree, self.length)
            frame = CondIndepStackFrame(self.names[0], -len(fn.batch_shape), self.length)
            found[SiteValue(position)] = sample(name, fn, statement, [frame])
        return found

    def _run_scan(
        self, outer: Environment, shared: Mapping[tuple[int, int], Any], inputs: Sequence[Array]
    ) -> dict[Quantity, Array]:
        """State the sites step by step; gives what is used outside."""

        def step(registers: Any, own: Any) -> tuple[Any, Any]:
            form, entries = own
            operands = Operands(self.recording, self.loop, shared, entries, registers, {})
            choice = StepChoice(self.kept, outer, operands, form)
            for position, (name, statement) in enumerate(
                zip(self.names, self.template.statements, strict=True)
            ):
                leaves = choice.leaves(position)
                if statement.value is None:
                    numpyro.deterministic(name, leaves[0])
                    continue
                fn = jax.tree.unflatten(statement.tree, leaves)
                operands.current[SiteValue(position)] = sample(name, fn, statement)
            new = choice.quantities()
            registers = [[value, *past[:-1]] for value, past in zip(new, registers, strict=True)]
            return registers, {quantity: operands.current[quantity] for quantity in self.outside}

        forms = np.minimum(np.arange(self.length), self.loop.special).astype(np.int32)
        start = [self._initial(outer, number) for number in range(len(self.loop.registers))]
        found: dict[Quantity, Array]
        _, found = scan(step, start, (forms, inputs), length=self.length)
        return found

    def _initial(self, outer: Environment, number: int) -> list[Array]:
        """A register before the first step; what no step looks at is zero."""
        register = self.loop.registers[number]
        shape, dtype = self.loop.type_of(self.recording, register.quantity)
        found = []
        for lag in range(1, register.depth + 1):
            value: Any = np.zeros(shape, dtype)
            if -lag in register.early:
                (value,) = outer.read([register.early[-lag]])
            found.append(jnp.broadcast_to(jnp.asarray(value, dtype), shape))
        return found
