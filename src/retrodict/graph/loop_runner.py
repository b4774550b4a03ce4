"""Run one loop of a recorded model as a scan, or as a plate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax
from jax.extend.core import Literal, Var
from jaxtyping import Array
from numpyro.contrib.control_flow import scan
from numpyro.primitives import CondIndepStackFrame, apply_stack

from retrodict.graph.equation_kinds import type_of
from retrodict.graph.loop_matching import (
    Loop,
    Now,
    Past,
    PerStep,
    Quantity,
    Result,
    Shared,
    SiteValue,
    Slices,
    Stack,
    StackedUse,
    rows,
    same_atom,
    stacked_uses,
)
from retrodict.graph.recording import Atom, Constant, Recording, Statement, apply, variables
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


class Values:
    """What is known while a lifted model runs; equations are evaluated when they are needed.

    Attributes:
        recording: the model.
        known: values of variables.
        rows: variables that are entries of the arrays that a loop gave.
        stacks: by equation that puts such entries together again, the array.
    """

    def __init__(self, recording: Recording, known: dict[Var, Any]) -> None:
        self.recording, self.known = recording, known
        self.rows: dict[Var, tuple[Array, int]] = {}
        self.stacks: dict[int, Array] = {}

    def read(self, atoms: Sequence[Atom]) -> list[Any]:
        """The values of operands."""
        pending, needed = list(variables(atoms)), set[int]()
        while pending:
            var = pending.pop()
            if var in self.known or var in self.rows:
                continue
            number = self.recording.origin[var]
            if number not in needed:
                needed.add(number)
                if number not in self.stacks:
                    pending += variables(self.recording.eqns[number].invars)
        for number in sorted(needed):
            eqn = self.recording.eqns[number]
            if number in self.stacks:
                results: Sequence[Array] = [self.stacks[number]]
            else:
                results = apply(eqn, [self._value(atom) for atom in eqn.invars])
            self.known.update(zip(eqn.outvars, results, strict=True))
        return [self._value(atom) for atom in atoms]

    def _value(self, atom: Atom) -> Any:
        if isinstance(atom, Constant):
            return atom.value
        if isinstance(atom, Literal):
            return np.asarray(atom.val, type_of(atom)[1])
        if atom not in self.known:
            array, step = self.rows[atom]
            self.known[atom] = array[step]
        return self.known[atom]

    def inside(self, sites: Mapping[Var, Array]) -> "Values":
        """The same for use inside of a function, with values of sites that are known only there."""
        return Values(self.recording, {**self.known, **sites})


@dataclass
class _Operands:
    """Operands of one step of a loop.

    Attributes:
        loop: which.
        shared: by column, those from outside that are the same in all steps.
        entries: those from outside that are the step's own.
        registers: quantities of the steps before, the last first.
        current: site values and results of the step itself.
    """

    loop: Loop
    shared: Mapping[int, Any]
    entries: Sequence[Array]
    registers: Sequence[Sequence[Array]]
    current: dict[Quantity, Any]

    def read(self, column: int) -> Any:
        match self.loop.sources[column]:
            case Now(quantity):
                return self.current[quantity]
            case Past(register, lag):
                return self.registers[register][lag - 1]
            case PerStep(number):
                return self.entries[number]
            case Shared():
                return self.shared[column]


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
        self.rows = rows(recording, loop)
        self.uses = stacked_uses(recording, loop)
        sizes = [len(recording.eqns[number].invars) for number in self.template.eqns]
        sizes += [len(statement.leaves) for statement in self.template.statements]
        ends = np.cumsum(sizes).tolist()
        columns = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.eqn_columns = columns[: len(self.template.eqns)]
        self.leaf_columns = columns[len(self.template.eqns) :]
        self.outside = self._used_outside()
        self.kept = [self._kept(position) for position in range(len(names))]

    def _used_outside(self) -> tuple[Quantity, ...]:
        """What statements outside of the loop take from its steps."""
        recording, used = self.recording, dict[Quantity, None]()

        def use(atoms: Sequence[Any]) -> None:
            used.update((self.rows[v][1], None) for v in variables(atoms) if v in self.rows)

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
        owner = self.template.positions
        users = [*zip(owner, self.eqn_columns, strict=True), *enumerate(self.leaf_columns)]
        for user, columns in users:
            for source in (self.loop.sources[column] for column in columns):
                later = user > position and isinstance(source, Now)
                if later and isinstance(source.quantity, Result):
                    needed.add(source.quantity)
        return tuple(sorted(q for q in needed if owner[q.offset] == position))

    def run(self, values: Values) -> None:
        """State all sites of the loop, and tell what later statements may need."""
        columns = [n for n, s in enumerate(self.loop.sources) if isinstance(s, Shared)]
        atoms = [self.template.operands[column] for column in columns]
        shared = dict(zip(columns, values.read(atoms), strict=True))
        inputs = [self._input(values, each) for each in self.loop.inputs]
        run = self._run_scan if self.loop.in_time else self._run_plate
        found = run(values, shared, inputs)
        for var, (step, quantity) in self.rows.items():
            if quantity in found:
                values.rows[var] = (found[quantity], step)
        for number, use in self.uses.items():
            values.stacks[number] = self._stacked(number, use, found[use.quantity])

    def _input(self, values: Values, each: Stack | Slices) -> Array:
        """One entry a step; that of a special step is not used."""
        if isinstance(each, Slices):
            (operand,) = values.read([each.operand])
            return _slices(operand, each, self.loop.special)
        entries = [values.rows.get(atom) for atom in each.atoms if isinstance(atom, Var)]
        arrays = {id(entry[0]): entry[0] for entry in entries if entry is not None}
        if len(arrays) == 1 and len(entries) == len(each.atoms) and None not in entries:
            steps = np.array([entry[1] for entry in entries if entry is not None])
            return _entries(next(iter(arrays.values())), 0, steps, self.loop.special)
        read = values.read(each.atoms)
        blank = [np.zeros(np.shape(read[0]))] * self.loop.special
        if any(isinstance(value, jax.Array) for value in read):
            return jnp.stack([*blank, *map(jnp.asarray, read)])
        return jnp.asarray(np.stack([*blank, *read]))

    def _evaluate(self, position: int, operands: _Operands) -> list[Any]:
        """The parameters of one site of the template; results on the way are kept."""
        for offset, number in enumerate(self.template.eqns):
            if self.template.positions[offset] != position:
                continue
            eqn = self.recording.eqns[number]
            if offset in self.loop.slices:
                entry = operands.entries[self.loop.slices[offset]]
                operands.current[Result(offset, 0)] = entry
                continue
            results = apply(eqn, list(map(operands.read, self.eqn_columns[offset])))
            operands.current |= {Result(offset, n): result for n, result in enumerate(results)}
        return list(map(operands.read, self.leaf_columns[position]))

    def _stacked(self, number: int, use: StackedUse, series: Array) -> Array:
        """What an equation makes of a quantity of all steps."""
        eqn = self.recording.eqns[number]

        def moved(row: Array) -> Array:
            for place in use.chain:
                (row,) = apply(self.recording.eqns[place], [row])
            return row

        series = jax.vmap(moved)(series)
        if eqn.primitive.name == "stack":
            return jnp.moveaxis(series, 0, eqn.params["axis"])
        axis, shape = eqn.params["dimension"], type_of(eqn.outvars[0])[0]
        return jnp.moveaxis(series, 0, axis).reshape(shape)

    def _run_plate(
        self, values: Values, shared: Mapping[int, Any], inputs: Sequence[Array]
    ) -> dict[Quantity, Array]:
        """State the sites of all steps at once; gives what is used outside, and more."""
        found: dict[Quantity, Array] = {}
        for position, name in enumerate(self.names):
            columns, statement = self.leaf_columns[position], self.template.statements[position]

            def one(entries: Any, current: Any, _: Array, position: int = position) -> Any:
                operands = _Operands(self.loop, shared, entries, (), dict(current))
                leaves = self._evaluate(position, operands)
                kept = {quantity: operands.current[quantity] for quantity in self.kept[position]}
                own = [leaf for leaf, c in zip(leaves, columns, strict=True) if c not in shared]  # noqa: B023
                return own, kept

            own, kept = jax.vmap(one)(inputs, found, jnp.arange(self.length))
            found = found | kept
            rest = iter(own)
            leaves = tuple(shared[c] if c in shared else next(rest) for c in columns)
            if statement.value is None:
                shape = (self.length, *type_of(statement.leaves[0])[0])
                numpyro.deterministic(name, jnp.broadcast_to(leaves[0], shape))
                continue
            stacked = tuple(column not in shared for column in columns)
            fn = Stacked(leaves, stacked, statement.tree, self.length)
            frame = CondIndepStackFrame(self.names[0], -len(fn.batch_shape), self.length)
            found[SiteValue(position)] = sample(name, fn, statement, [frame])
        return found

    def _run_scan(
        self, values: Values, shared: Mapping[int, Any], inputs: Sequence[Array]
    ) -> dict[Quantity, Array]:
        """State the sites step by step; gives what is used outside."""
        form = np.minimum(np.arange(self.length), self.loop.special).astype(np.int32)

        def step(registers: Any, own: Any) -> tuple[Any, Any]:
            form, entries = own
            operands = _Operands(self.loop, shared, entries, registers, {})
            special = _SpecialSteps(self, values, operands, form)
            for position, (name, statement) in enumerate(
                zip(self.names, self.template.statements, strict=True)
            ):
                leaves = special.leaves(position)
                if statement.value is None:
                    numpyro.deterministic(name, leaves[0])
                    continue
                fn = jax.tree.unflatten(statement.tree, leaves)
                operands.current[SiteValue(position)] = sample(name, fn, statement)
            pushed = special.pushed()
            registers = [[new, *past[:-1]] for new, past in zip(pushed, registers, strict=True)]
            return registers, {quantity: operands.current[quantity] for quantity in self.outside}

        start = [self._initial(values, number) for number in range(len(self.loop.registers))]
        _, found = scan(step, start, (form, inputs), length=self.length)
        return found

    def type_of(self, quantity: Quantity) -> Any:
        """Shape and type of a quantity."""
        if isinstance(quantity, SiteValue):
            return type_of(self.template.statements[quantity.position].value)
        eqn = self.recording.eqns[self.template.eqns[quantity.offset]]
        return type_of(eqn.outvars[quantity.number])

    def _initial(self, values: Values, number: int) -> list[Array]:
        """A register before the first step; what no step looks at is zero."""
        register = self.loop.registers[number]
        shape, dtype = self.type_of(register.quantity)
        found = []
        for lag in range(1, register.depth + 1):
            value: Any = np.zeros(shape, dtype)
            if -lag in register.early:
                (value,) = values.read([register.early[-lag]])
            found.append(jnp.broadcast_to(jnp.asarray(value, dtype), shape))
        return found


@dataclass
class _SpecialSteps:
    """Chooses between the template and the special steps, inside of one step of a scan.

    Attributes:
        runner: of the loop.
        values: what is known outside.
        operands: of the step.
        form: the number of a special step, or how many there are for all other steps.
    """

    runner: LoopRunner
    values: Values
    operands: _Operands
    form: Array

    def leaves(self, position: int) -> list[Any]:
        """The parameters of a site."""
        runner, loop = self.runner, self.runner.loop
        if not loop.special:
            return runner._evaluate(position, self.operands)
        kept = runner.kept[position]

        def general() -> tuple[list[Array], list[Array]]:
            operands = _Operands(
                loop,
                self.operands.shared,
                self.operands.entries,
                self.operands.registers,
                dict(self.operands.current),
            )
            leaves = runner._evaluate(position, operands)
            return list(map(jnp.asarray, leaves)), [operands.current[q] for q in kept]

        shapes, results = jax.eval_shape(general)

        def special(number: int) -> Callable[[], Any]:
            def evaluate() -> tuple[list[Array], list[Array]]:
                leaves = self._read(number, loop.steps[number].statements[position].leaves)
                pairs = zip(leaves, shapes, strict=True)
                blank = [jnp.zeros(r.shape, r.dtype) for r in results]
                return [_as(leaf, like) for leaf, like in pairs], blank

            return evaluate

        leaves, values = self._choose([*map(special, range(loop.special)), general])
        self.operands.current |= dict(zip(kept, values, strict=True))
        for number, column in enumerate(runner.leaf_columns[position]):
            atom = loop.template.operands[column]
            others = (s.statements[position].leaves[number] for s in loop.steps[: loop.special])
            constant = column in self.operands.shared and isinstance(atom, Constant)
            if constant and all(same_atom(atom, other) for other in others):
                leaves[number] = atom.value  # some distributions look at their parameters
        return leaves

    def pushed(self) -> list[Array]:
        """For each register, the quantity of this step."""
        loop = self.runner.loop
        types = [self.runner.type_of(register.quantity) for register in loop.registers]

        def general() -> list[Array]:
            return [
                jnp.asarray(self.operands.current[register.quantity], dtype)
                for register, (_, dtype) in zip(loop.registers, types, strict=True)
            ]

        if not loop.special or all(isinstance(r.quantity, SiteValue) for r in loop.registers):
            return general()

        def special(number: int) -> Callable[[], Any]:
            def evaluate() -> list[Array]:
                return [
                    self._early(number, place, shape, dtype)
                    for place, (shape, dtype) in enumerate(types)
                ]

            return evaluate

        found: list[Array] = self._choose([*map(special, range(loop.special)), general])
        return found

    def _early(self, number: int, place: int, shape: Any, dtype: Any) -> Array:
        """What takes the place of a quantity in a special step."""
        register = self.runner.loop.registers[place]
        if isinstance(register.quantity, SiteValue):
            return jnp.asarray(self.operands.current[register.quantity], dtype)
        if number not in register.early:
            return jnp.zeros(shape, dtype)
        (value,) = self._read(number, [register.early[number]])
        return jnp.broadcast_to(jnp.asarray(value, dtype), shape)

    def _choose(self, forms: list[Callable[[], Any]]) -> Any:
        return lax.switch(self.form, forms)

    def _read(self, number: int, atoms: Sequence[Atom]) -> list[Any]:
        """Operands of a special step, from the values of its sites and of those before it."""
        loop, sites = self.runner.loop, {}
        pairs = zip(loop.registers, self.operands.registers, strict=True)
        depths = {r.quantity: past for r, past in sorted(pairs, key=lambda pair: pair[0].depth)}
        for step in range(number + 1):
            for position, statement in enumerate(loop.steps[step].statements):
                quantity, lag = SiteValue(position), number - step
                if statement.value is None:
                    continue
                if lag == 0 and quantity in self.operands.current:
                    sites[statement.value] = self.operands.current[quantity]
                elif 0 < lag <= len(depths.get(quantity, ())):
                    sites[statement.value] = depths[quantity][lag - 1]
        return self.values.inside(sites).read(atoms)


def _as(value: Any, like: Any) -> Array:
    return jnp.broadcast_to(jnp.asarray(value, like.dtype), like.shape)


def _slices(operand: Any, each: Slices, special: int) -> Array:
    """The slices of all steps, stacked; of an axis that steps run along, the axis itself."""
    starts, sizes = np.array(each.starts), each.sizes
    varying = np.flatnonzero(np.ptp(starts, axis=0))
    operand = jnp.asarray(operand)
    if len(varying) > 1 or sizes[varying[0]] > 1:
        starts = np.concatenate([np.repeat(starts[:1], special, 0), starts])
        take = jax.vmap(lambda start: lax.dynamic_slice(operand, tuple(start), sizes))
        found: Array = take(jnp.asarray(starts))
        return found
    (axis,) = map(int, varying)
    rest = [slice(start, start + size) for start, size in zip(starts[0], sizes, strict=True)]
    rest[axis] = slice(None)
    entries = _entries(operand[tuple(rest)], axis, starts[:, axis], special)
    return jnp.expand_dims(entries, axis + 1)


def _entries(array: Array, axis: int, places: np.ndarray[Any, Any], special: int) -> Array:
    """Entries along an axis, one a step; special steps before, which use none, have any."""
    before = places[0] - (places[1] - places[0]) * np.arange(special, 0, -1)
    places = np.concatenate([np.clip(before, 0, array.shape[axis] - 1), places])
    first, stop = int(places[0]), int(places[0]) + len(places)
    if np.array_equal(places, np.arange(first, stop)):
        array = lax.slice_in_dim(array, first, stop, axis=axis)
    else:
        array = jnp.take(array, places, axis=axis)
    return jnp.moveaxis(array, axis, 0)
