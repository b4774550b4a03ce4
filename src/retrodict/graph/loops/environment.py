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

# Windows of so many elements are taken element by element, so that steps stay aligned with each.
WIDEST = 8


class Environment:
    """What is known while a recorded model runs; equations are evaluated when they are needed.

    Attributes:
        recording: the model.
        known: values of variables.
        entries: variables that are entries of the arrays that a loop gave.
        stacks: by equation that puts such entries together again, the array.
    """

    def __init__(self, recording: Recording, known: dict[Var, Any]) -> None:
        self.recording, self.known = recording, known
        self.entries: dict[Var, tuple[Array, int]] = {}
        self.stacks: dict[int, Array] = {}

    def read(self, atoms: Sequence[Atom]) -> list[Any]:
        """The values of operands."""
        pending, needed = list(variables(atoms)), set[int]()
        while pending:
            var = pending.pop()
            if var in self.known or var in self.entries:
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

    def _value(self, atom: Any) -> Any:
        if isinstance(atom, ConcreteLeaf):
            return atom.value
        if isinstance(atom, Literal):
            return np.asarray(atom.val, type_of(atom)[1])
        if atom not in self.known:
            array, step = self.entries[atom]
            self.known[atom] = array[step]
        return self.known[atom]

    def inside(self, sites: Mapping[Var, Array]) -> "Environment":
        """The same for use inside of a function, with values of sites that are known only there."""
        return Environment(self.recording, {**self.known, **sites})

    def input(self, each: Stack | Slices) -> Array:
        """An input of a loop: one entry a step; that of a step without one may be anything."""
        if isinstance(each, Slices):
            (operand,) = self.read([each.operand])
            return _slices(jnp.asarray(operand), each)
        used = [atom for atom in each.entries if atom is not None]
        steps = [self.entries[atom] for atom in variables(used) if atom in self.entries]
        if len(steps) == len(used) and len({id(array) for array, _ in steps}) == 1:
            places = iter(step for _, step in steps)
            own = [None if atom is None else next(places) for atom in each.entries]
            return _along(steps[0][0], 0, own)
        values = self.read(used)
        blank = np.zeros(np.shape(values[0]), jnp.result_type(*values))
        rest = iter(values)
        column = [blank if atom is None else next(rest) for atom in each.entries]
        if any(isinstance(value, jax.Array) for value in column):
            return jnp.stack(list(map(jnp.asarray, column)))
        return jnp.asarray(np.stack(column))


def _slices(operand: Array, each: Slices) -> Array:
    """The slices of all steps, stacked; of an axis that steps run along, the axis itself."""
    first = next(start for start in each.entries if start is not None)
    starts = np.array([first if start is None else start for start in each.entries])
    varying = np.flatnonzero(np.ptp(starts, axis=0))
    if len(varying) > 1 or each.sizes[varying[0]] > WIDEST:
        take: Any = jax.vmap(lambda start: lax.dynamic_slice(operand, tuple(start), each.sizes))
        found: Array = take(jnp.asarray(starts))
        return found
    (axis,) = map(int, varying)
    rest = [slice(start, start + size) for start, size in zip(first, each.sizes, strict=True)]
    rest[axis] = slice(None)
    array, parts = operand[tuple(rest)], []
    for shift in range(each.sizes[axis]):
        places = [None if start is None else start[axis] + shift for start in each.entries]
        parts.append(_along(array, axis, places))
    return jnp.stack(parts, axis + 1)


def _along(array: Array, axis: int, places: Sequence[int | None]) -> Array:
    """Entries along an axis, one for each place; where a place is missing, any."""
    missing = next(n for n, place in enumerate(places) if place is not None)
    line = np.array(places[missing:], int)
    stride = line[1] - line[0]
    before = line[0] - stride * np.arange(missing, 0, -1)
    line = np.concatenate([np.clip(before, 0, array.shape[axis] - 1), line])
    if np.array_equal(line, np.arange(line[0], line[0] + len(line))):
        array = lax.slice_in_dim(array, int(line[0]), int(line[0]) + len(line), axis=axis)
    else:
        array = jnp.take(array, line, axis=axis)
    return jnp.moveaxis(array, axis, 0)
