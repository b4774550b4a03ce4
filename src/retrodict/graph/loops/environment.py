"""Values of the variables of a recorded model while it runs, and the inputs of its loops."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var
from jaxtyping import Array

from retrodict.graph.loops.equation_kinds import type_of
from retrodict.graph.loops.recording import Atom, ConcreteLeaf, Recording, apply, variables
from retrodict.graph.loops.steps import Slices, Stack

# Windows of at most this many elements are taken element by element, so that steps stay aligned
# with each.
WIDEST = 8


class Environment:
    """Values of variables while a recorded model runs; equations are evaluated on demand.

    Attributes:
        recording: the model.
        values: values of variables.
        entries: variables that are entries of arrays that a loop returned: the array, the step.
        stacks: by equation that stacks such entries again, the array.
    """

    def __init__(
        self,
        recording: Recording,
        values: dict[Var, Any],
        entries: dict[Var, tuple[Array, int]] | None = None,
        stacks: dict[int, Array] | None = None,
    ) -> None:
        self.recording, self.values = recording, values
        self.entries, self.stacks = entries or {}, stacks or {}

    def read(self, atoms: Sequence[Atom]) -> list[Any]:
        """The values of operands."""
        pending, needed = list(variables(atoms)), set[int]()
        while pending:
            var = pending.pop()
            if var in self.values or var in self.entries:
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
            self.values.update(zip(eqn.outvars, results, strict=True))
        return [self._value(atom) for atom in atoms]

    def _value(self, atom: Any) -> Any:
        if isinstance(atom, ConcreteLeaf):
            return atom.value
        if isinstance(atom, Literal):
            return np.asarray(atom.val, type_of(atom)[1])
        if atom not in self.values:
            array, step = self.entries[atom]
            self.values[atom] = array[step]
        return self.values[atom]

    def extended(self, sites: Mapping[Var, Array]) -> "Environment":
        """A copy for use inside of a traced function, with values of sites that exist there."""
        return Environment(self.recording, {**self.values, **sites}, self.entries, self.stacks)

    def input(self, source: Stack | Slices) -> Array:
        """An input of a loop: one entry for each step; arbitrary where a step does not use it."""
        if isinstance(source, Slices):
            (operand,) = self.read([source.operand])
            return _slices(jnp.asarray(operand), source)
        used = [atom for atom in source.entries if atom is not None]
        arrays = [self.entries[atom] for atom in variables(used) if atom in self.entries]
        if len(arrays) == len(used) and len({id(array) for array, _ in arrays}) == 1:
            return _along(arrays[0][0], 0, [step for _, step in arrays], len(source.entries))
        values = self.read(used)
        values = [values[0]] * (len(source.entries) - len(used)) + values
        if any(isinstance(value, jax.Array) for value in values):
            return jnp.stack(list(map(jnp.asarray, values)))
        return jnp.asarray(np.stack(values))


def _slices(operand: Array, slices: Slices) -> Array:
    """The slices of all steps, stacked; along an axis that the steps run along, views of it."""
    used = np.array([start for start in slices.entries if start is not None])
    number = len(slices.entries)
    varying = np.flatnonzero(np.ptp(used, axis=0))
    if len(varying) > 1 or slices.sizes[varying[0]] > WIDEST:
        starts = np.concatenate([used[:1].repeat(number - len(used), axis=0), used])
        take: Any = jax.vmap(lambda start: lax.dynamic_slice(operand, tuple(start), slices.sizes))
        stacked: Array = take(jnp.asarray(starts))
        return stacked
    (axis,) = map(int, varying)
    rest = [slice(start, start + n) for start, n in zip(used[0], slices.sizes, strict=True)]
    rest[axis] = slice(None)
    array, shifts = operand[tuple(rest)], range(slices.sizes[axis])
    views = [_along(array, axis, used[:, axis] + shift, number) for shift in shifts]
    return jnp.stack(views, axis + 1)


def _along(array: Array, axis: int, places: Any, number: int) -> Array:
    """Entries along an axis for the last of a number of steps; arbitrary ones for the others."""
    line = np.asarray(places, int)
    stride = line[1] - line[0]
    before = line[0] - stride * np.arange(number - len(line), 0, -1)
    line = np.concatenate([np.clip(before, 0, array.shape[axis] - 1), line])
    if np.array_equal(line, np.arange(line[0], line[0] + len(line))):
        array = lax.slice_in_dim(array, int(line[0]), int(line[0]) + len(line), axis=axis)
    else:
        array = jnp.take(array, line, axis=axis)
    return jnp.moveaxis(array, axis, 0)
