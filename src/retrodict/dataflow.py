"""A JAX function in; for each of its outputs, which elements of which inputs it depends on.

The function's jaxpr is interpreted over `Dependence` in place of numbers: one rule a primitive says
where the axes of a result come from. No array is computed, but for constant indices of a gather or
a slice. What no rule covers is taken to depend on all of its operands, so that the answer is always
a superset of the truth: alignment along a plate is proved, not trusted to the declaration.

Constants count as sources, too (`Constant`), where they vary along an axis: that is how elements of
a plate that are not alike are found.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from numpy.typing import NDArray

from retrodict.relations import (
    AxisKey,
    Dependence,
    Relations,
    Step,
    Take,
    clip,
    identity,
    limit,
    move,
    union,
    widen,
)


class Constant(NamedTuple):
    """A source that is no input: an array the function closes over, or a counter."""

    number: int


@dataclass(frozen=True)
class Abstract:
    """What is known of an array: its dependence, its shape, and its value if it is a constant."""

    dependence: Dependence
    shape: tuple[int, ...]
    constant: "_Lazy | None" = None

    @property
    def sizes(self) -> dict[AxisKey, int]:
        """The array's own axes."""
        return dict(enumerate(self.shape))

    @property
    def value(self) -> NDArray[Any] | None:
        """The array itself, if it is a constant."""
        return None if self.constant is None else self.constant.value

    def take(self, taken: Mapping[AxisKey, Take]) -> Dependence:
        """The dependence of a result whose axes are taken from this array's."""
        return self.dependence.move(self.sizes, taken)

    def keep(self, axes: Mapping[int, int]) -> Dependence:
        """The dependence of a result with axes kept whole: old axis → new axis."""
        return self.take({old: Take(new, self.shape[old]) for old, new in axes.items()})


class _Lazy:
    """A constant that is computed when somebody asks for it."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute

    @cached_property
    def value(self) -> NDArray[Any]:
        with jax.ensure_compile_time_eval():
            return np.asarray(self._compute())


Rule: TypeAlias = Callable[[JaxprEqn, Sequence[Abstract], "_Reader"], list[Dependence]]


@dataclass(frozen=True)
class Flow:
    """A traced function of a dict of arrays, whose names are the sources."""

    names: tuple[str, ...]
    closed: ClosedJaxpr
    tree: Any

    @staticmethod
    def of(fn: Callable[[Any], Any], inputs: Mapping[str, Any]) -> "Flow":
        """Trace `fn(inputs)`; inputs are arrays or `jax.ShapeDtypeStruct`s."""
        closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(dict(inputs))
        names = tuple(sorted(inputs))  # as JAX flattens a dict
        return Flow(names, closed, jax.tree.structure(out_shape))

    def dependence(self) -> Any:
        """A pytree like the function's output with an `Abstract` in place of each array."""
        arguments = [
            Abstract(Dependence({name: identity(len(_shape(var)))}), _shape(var))
            for name, var in zip(self.names, self.closed.jaxpr.invars, strict=True)
        ]
        return jax.tree.unflatten(self.tree, _Reader().read(self.closed, arguments))

    def code(self, rename: Callable[[str], str]) -> Any:
        """A pytree like the output with a text that is equal for outputs computed alike.

        Args:
            rename: what an input is called in the texts, so that two outputs that treat different
                inputs in the same way can be seen to do so.
        """
        jaxpr = self.closed.jaxpr
        origin = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        inputs = dict(zip(jaxpr.invars, self.names, strict=True))
        consts = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))

        def text(output: Any) -> str:
            numbers: dict[Any, int] = {}
            lines: list[str] = []

            def name(atom: Any) -> str:
                if isinstance(atom, Literal):
                    return f"{atom.val}:{atom.aval}"
                if atom in inputs:
                    return rename(inputs[atom])
                return f"%{numbers[atom]}"

            pending = [output]
            while pending:
                atom = pending[-1]
                if isinstance(atom, Literal) or atom in inputs or atom in numbers:
                    pending.pop()
                    continue
                if atom in consts:
                    value = np.asarray(consts[atom])
                    numbers[atom] = len(numbers)
                    digest = hashlib.sha256(value.tobytes()).hexdigest()
                    lines.append(f"const {value.dtype}{value.shape} {digest}")
                    continue
                eqn = origin[atom]
                missing = [
                    a
                    for a in eqn.invars
                    if not isinstance(a, Literal) and a not in inputs and a not in numbers
                ]
                if missing:
                    pending.extend(reversed(missing))
                    continue
                for var in eqn.outvars:
                    numbers[var] = len(numbers)
                lines.append(f"{eqn.primitive}{eqn.params}({' '.join(map(name, eqn.invars))})")
            return "\n".join([*lines, name(output)])

        return jax.tree.unflatten(self.tree, [text(output) for output in jaxpr.outvars])


class _Reader:
    """Interprets jaxprs over `Abstract` values."""

    def __init__(self) -> None:
        # By identity, with the object kept so that no other can take its place.
        self._constants: dict[int, tuple[Constant, object]] = {}

    def constant_source(self, origin: object) -> Constant:
        """The name of a constant that varies: the same whenever its origin is met again."""
        name = Constant(len(self._constants))
        return self._constants.setdefault(id(origin), (name, origin))[0]

    def constant(self, value: Any) -> Abstract:
        """A constant met in a jaxpr."""
        shape = np.shape(value)
        varies = False
        if np.size(value) > 1 and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            array = np.asarray(value)
            varies = bool(np.any(array != array.flat[0]))
        sources: dict[Hashable, Relations] = {}
        if varies:
            sources[self.constant_source(value)] = identity(len(shape))
        return Abstract(Dependence(sources), shape, _Lazy(lambda: value))

    def read(self, closed: ClosedJaxpr, arguments: Sequence[Abstract]) -> list[Abstract]:
        """The abstract outputs of a closed jaxpr."""
        return self.read_open(closed.jaxpr, [self.constant(c) for c in closed.consts], arguments)

    def read_open(
        self, jaxpr: Jaxpr, consts: Sequence[Abstract], arguments: Sequence[Abstract]
    ) -> list[Abstract]:
        """The abstract outputs of a jaxpr whose constants are given."""
        known: dict[Var, Abstract] = {}
        known.update(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def look_up(atom: Any) -> Abstract:
            if isinstance(atom, Literal):
                return Abstract(Dependence.nothing(), np.shape(atom.val), _Lazy(lambda: atom.val))
            return known[atom]

        for eqn in jaxpr.eqns:
            operands = [look_up(atom) for atom in eqn.invars]
            results = self._apply(eqn, operands)
            known.update(zip(eqn.outvars, results, strict=True))
        return [look_up(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Abstract]:
        name = eqn.primitive.name
        shapes = [_shape(var) for var in eqn.outvars]
        inner = _called(eqn)
        if inner is not None and len(inner.jaxpr.invars) == len(operands):
            return self.read(inner, operands)
        if name == "scan":
            return _scan(eqn, operands, self)
        if name in _RULES:
            found = _RULES[name](eqn, operands, self)
        elif name in _ELEMENTWISE and all(len(o.shape) in (0, len(shapes[0])) for o in operands):
            found = [_elementwise(operands, shapes[0])] * len(shapes)
        else:
            found = [_anything(operands)] * len(shapes)
        constant = all(operand.constant is not None for operand in operands)
        return [
            Abstract(dep, shape, _evaluated(eqn, operands, number) if constant else None)
            for number, (dep, shape) in enumerate(zip(found, shapes, strict=True))
        ]


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def _called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation merely calls: jit, custom derivatives, checkpoints."""
    if eqn.primitive.name not in _CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if isinstance(inner, ClosedJaxpr):
            return inner
        if isinstance(inner, Jaxpr) and not inner.constvars:
            return ClosedJaxpr(inner, ())
    return None


def _evaluated(eqn: JaxprEqn, operands: Sequence[Abstract], number: int) -> _Lazy:
    def compute() -> Any:
        bind: Callable[..., Any] = eqn.primitive.bind
        result = bind(*(operand.value for operand in operands), **eqn.params)
        return result[number] if eqn.primitive.multiple_results else result

    return _Lazy(compute)


def _join(parts: Sequence[Dependence]) -> Dependence:
    total = Dependence.nothing()
    for part in parts:
        total = total | part
    return total


def _elementwise(operands: Sequence[Abstract], shape: tuple[int, ...]) -> Dependence:
    return _join(
        [
            operand.dependence
            if operand.shape in ((), shape)
            # An axis of size one is stretched over the result's.
            else operand.keep({a: a for a, n in enumerate(operand.shape) if n == shape[a]})
            for operand in operands
        ]
    )


def _anything(operands: Sequence[Abstract]) -> Dependence:
    return _join([operand.take({}) for operand in operands])


def _broadcast_in_dim(
    eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader
) -> list[Dependence]:
    operand, shape = operands[0], eqn.params["shape"]
    places = eqn.params["broadcast_dimensions"]
    kept = {i: d for i, d in enumerate(places) if operand.shape[i] == shape[d]}
    return [operand.keep(kept)]


def _squeeze(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    gone = set(eqn.params["dimensions"])
    return [_drop(operands[0], gone)]


def _drop(operand: Abstract, gone: set[int]) -> Dependence:
    left = [axis for axis in range(len(operand.shape)) if axis not in gone]
    return operand.keep({old: new for new, old in enumerate(left)})


def _reshape(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    operand, old, new = operands[0], operands[0].shape, eqn.params["new_sizes"]
    taken: dict[AxisKey, Take] = {}
    for old_axes, new_axes in _matching_runs(old, new):
        old_axes = [axis for axis in old_axes if old[axis] > 1]
        new_axes = [axis for axis in new_axes if new[axis] > 1]
        if len(new_axes) != 1:
            continue  # one axis split into several: no single axis of the result says where
        sizes = [old[axis] for axis in old_axes]
        places = np.unravel_index(np.arange(new[new_axes[0]]), sizes) if len(sizes) > 1 else [None]
        for axis, index in zip(old_axes, places, strict=True):
            taken[axis] = Take(new_axes[0], new[new_axes[0]], picked=index)
    return [operand.take(taken)]


def _matching_runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Cut both shapes into the shortest runs of axes with equal numbers of elements."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        a = old[i] if left else 1
        b = new[j] if right else 1
        i, j = i + len(left), j + len(right)
        while a != b:
            if a < b:
                left.append(i)
                a *= old[i]
                i += 1
            else:
                right.append(j)
                b *= new[j]
                j += 1
        runs.append((left, right))
    return runs


def _transpose(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    return [operands[0].keep({old: new for new, old in enumerate(eqn.params["permutation"])})]


def _reduce(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    gone = set(eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"])
    total = _join(
        [_drop(operand, gone) if operand.shape else operand.dependence for operand in operands]
    )
    return [total] * len(eqn.outvars)


def _cumulate(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    axis, operand = eqn.params["axis"], operands[0]
    size, backward = operand.shape[axis], eqn.params["reverse"]
    return [operand.dependence.map(lambda r: widen(r, axis, size, backward=backward))]


def _slice(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return [operands[0].take(_sliced(starts, stops, strides))]


def _sliced(
    starts: Sequence[int], stops: Sequence[int], strides: Sequence[int]
) -> dict[AxisKey, Take]:
    taken: dict[AxisKey, Take] = {}
    for axis, (start, stop, stride) in enumerate(zip(starts, stops, strides, strict=True)):
        index = np.arange(start, stop, stride)
        taken[axis] = (
            Take(axis, len(index), shift=int(start))
            if stride == 1
            else Take(axis, len(index), picked=index)
        )
    return taken


def _dynamic_slice(
    eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader
) -> list[Dependence]:
    operand, starts, sizes = operands[0], operands[1:], eqn.params["slice_sizes"]
    taken: dict[AxisKey, Take] = {}
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size == operand.shape[axis]:
            taken[axis] = Take(axis, size)
        elif start.value is not None:
            at = int(np.clip(start.value, 0, operand.shape[axis] - size))
            taken[axis] = Take(axis, size, shift=at)
    return [operand.take(taken) | _anything(starts)]


def _dynamic_update_slice(
    eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader
) -> list[Dependence]:
    operand, update, *starts = operands
    taken: dict[AxisKey, Take] = {}
    for axis, (start, size) in enumerate(zip(starts, update.shape, strict=True)):
        whole = operand.shape[axis]
        if size == whole:
            taken[axis] = Take(axis, size)
        elif start.value is not None:
            at = int(np.clip(start.value, 0, whole - size))
            taken[axis] = Take(axis, whole, shift=-at)
    placed = _inside(update).move(update.sizes, taken)
    return [operand.dependence | placed | _anything(starts)]


def _split(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    operand, axis = operands[0], eqn.params["axis"]
    parts, start = [], 0
    for size in eqn.params["sizes"]:
        starts = [start if i == axis else 0 for i in range(len(operand.shape))]
        stops = [start + size if i == axis else n for i, n in enumerate(operand.shape)]
        parts.append(operand.take(_sliced(starts, stops, [1] * len(starts))))
        start += size
    return parts


def _pad(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    operand, filler = operands
    shape = _shape(eqn.outvars[0])
    taken: dict[AxisKey, Take] = {}
    for axis, (low, _, interior) in enumerate(eqn.params["padding_config"]):
        if interior:
            place = np.arange(shape[axis]) - low
            index = np.where(
                (place >= 0) & (place % (interior + 1) == 0), place // (interior + 1), -1
            )
            index[index >= operand.shape[axis]] = -1
            taken[axis] = Take(axis, shape[axis], picked=index)
        else:
            taken[axis] = Take(axis, shape[axis], shift=-low)
    return [_inside(operand).move(operand.sizes, taken) | filler.dependence]


def _inside(operand: Abstract) -> Dependence:
    """The dependence, saying on which positions it exists: for arrays placed in larger ones."""

    def limited(relations: Relations) -> Relations:
        for axis, size in enumerate(operand.shape):
            # No range is "all of the axis" here: the axis is about to grow.
            taken = {r for r in relations if all(a != axis for a, _, _ in r.present)}
            relations = limit(frozenset(taken), axis, -1, 0, size) | (relations - taken)
        return relations

    return operand.dependence.map(limited)


def _concatenate(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    along, shape = eqn.params["dimension"], _shape(eqn.outvars[0])
    parts, start = [], 0
    for operand in operands:
        taken: dict[AxisKey, Take] = {
            axis: Take(axis, size, shift=-start if axis == along else 0)
            for axis, size in enumerate(shape)
        }
        parts.append(_inside(operand).move(operand.sizes, taken))
        start += operand.shape[along]
    return [_join(parts)]


def _stack(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    along, count = eqn.params["axis"], len(operands)
    return [
        _join(
            [
                operand.keep({a: a + (a >= along) for a in range(len(operand.shape))}).map(
                    lambda r, place=number: limit(r, along, count, place, place + 1)  # type: ignore[misc]
                )
                for number, operand in enumerate(operands)
            ]
        )
    ]


def _unstack(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    operand, along = operands[0], eqn.params["axis"]
    parts = []
    for number in range(operand.shape[along]):
        taken: dict[AxisKey, Take] = {a: Take(a, n) for a, n in enumerate(operand.shape)}
        taken[along] = Take(along, 1, shift=number)
        one = Abstract(
            operand.take(taken), (*operand.shape[:along], 1, *operand.shape[along + 1 :])
        )
        parts.append(_drop(one, {along}))
    return parts


def _tile(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    operand, shape = operands[0], _shape(eqn.outvars[0])
    first = len(shape) - len(operand.shape)
    return [
        operand.take(
            {
                axis: Take(
                    first + axis, shape[first + axis], picked=np.arange(shape[first + axis]) % n
                )
                if n != shape[first + axis]
                else Take(first + axis, n)
                for axis, n in enumerate(operand.shape)
            }
        )
    ]


def _each_its_own(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    return [operand.dependence for operand in operands]


def _last_axis(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    """Something along the last axis, batched over the others."""
    total = _join([o.keep({a: a for a in range(len(o.shape) - 1)}) for o in operands])
    return [total] * len(eqn.outvars)


def _reverse(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    operand = operands[0]
    return [
        operand.take(
            {
                axis: Take(axis, n, picked=np.arange(n)[::-1])
                if axis in eqn.params["dimensions"]
                else Take(axis, n)
                for axis, n in enumerate(operand.shape)
            }
        )
    ]


def _dot_general(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    contracted, batched = eqn.params["dimension_numbers"]
    place = len(batched[0])
    parts = []
    for operand, summed, batch in zip(operands, contracted, batched, strict=True):
        kept = {axis: number for number, axis in enumerate(batch)}
        for axis in range(len(operand.shape)):
            if axis not in summed and axis not in batch:
                kept[axis] = place
                place += 1
        parts.append(operand.keep(kept))
    return [_join(parts)]


def _gather(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    operand, indices = operands
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = _shape(eqn.outvars[0])
    batch_axes = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
    hidden = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    visible = [axis for axis in range(len(operand.shape)) if axis not in hidden]

    taken: dict[AxisKey, Take] = {}
    for axis, place in zip(visible, numbers.offset_dims, strict=True):
        if sizes[axis] == operand.shape[axis]:
            taken[axis] = Take(place, sizes[axis])
    for axis, index_axis in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        taken[axis] = Take(batch_axes[index_axis], operand.shape[axis])
    explained = _constant_gather(numbers, operand, indices, batch_axes, shape)
    taken.update(explained)

    # The last axis of the indices holds the coordinates of one gathered point.
    index_places = dict(enumerate(batch_axes))
    located = len(explained) == len(numbers.start_index_map)
    return [operand.take(taken) | (Dependence.nothing() if located else indices.keep(index_places))]


def _constant_gather(
    numbers: Any,
    operand: Abstract,
    indices: Abstract,
    batch_axes: Sequence[int],
    shape: Sequence[int],
) -> dict[AxisKey, Take]:
    """Where gathered axes come from when the index is a constant that varies along one axis."""
    if indices.value is None:
        return {}
    taken: dict[AxisKey, Take] = {}
    for column, axis in enumerate(numbers.start_index_map):
        if axis not in numbers.collapsed_slice_dims:
            continue
        index = indices.value[..., column]
        varying = [a for a in range(index.ndim) if np.any(np.take(index, [0], a) != index)]
        if len(varying) > 1 or not batch_axes:
            continue
        along = varying[0] if varying else 0
        line = np.moveaxis(index, along, 0).reshape(index.shape[along], -1)[:, 0]
        line = np.clip(line, 0, operand.shape[axis] - 1).astype(np.int64)
        taken[axis] = Take(batch_axes[along], shape[batch_axes[along]], picked=line)
    return taken


def _scatter(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    return [operands[0].dependence | _anything(operands[1:])]


def _iota(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    axis = eqn.params["dimension"]
    if eqn.params["shape"][axis] < 2:
        return [Dependence.nothing()]
    counter = identity(1)
    placed = move(counter, {0: 0}, {0: Take(axis, eqn.params["shape"][axis])})
    return [Dependence({reader.constant_source(eqn): placed})]


def _sort(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    along = eqn.params["dimension"]
    total = _join([o.keep({a: a for a in range(len(o.shape)) if a != along}) for o in operands])
    return [total] * len(eqn.outvars)


def _matrix(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    """Linear algebra over the last two axes, batched over the others."""
    total = _join([o.keep({a: a for a in range(len(o.shape) - 2)}) for o in operands])
    return [total] * len(eqn.outvars)


def _branch(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    choice, *arguments = operands
    branches = [reader.read(branch, arguments) for branch in eqn.params["branches"]]
    return [
        _join([_anything([choice]), *(result.dependence for result in results)])
        for results in zip(*branches, strict=True)
    ]


_EXACT_STEPS = 64


def _scan(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Abstract]:
    """Follow the carry from step to step until nothing new comes, or widen.

    At step t the carry is what step t − 1 left, or the initial carry at the first step. Lags longer
    than `_EXACT_STEPS`, as of a running sum, become "all of the past".
    """
    num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    length, backward, body = eqn.params["length"], eqn.params["reverse"], eqn.params["jaxpr"]
    step = Step()
    first = length - 1 if backward else 0
    last = 0 if backward else length - 1
    constants, init, xs = (
        operands[:num_consts],
        operands[num_consts : num_consts + num_carry],
        operands[num_consts + num_carry :],
    )
    slices = [_scan_input(x, step) for x in xs]

    def initial(value: Abstract) -> Dependence:
        return value.dependence.map(lambda r: limit(r, step, length, first, first + 1))

    def one_later(value: Abstract) -> Dependence:
        shifted = Take(step, length, shift=1 if backward else -1)
        ranged = value.dependence.map(lambda r: _present_somewhere(r, step, length))
        moved = ranged.move({step: length}, {step: shifted})
        return moved.map(lambda r: clip(r, step, length))

    starts = [initial(value) for value in init]
    carry = [Abstract(s, v.shape) for s, v in zip(starts, init, strict=True)]
    for iteration in range(_EXACT_STEPS + 8):
        outputs = reader.read(body, [*constants, *carry, *slices])
        following = [
            Abstract(s | one_later(o), o.shape)
            for s, o in zip(starts, outputs[:num_carry], strict=True)
        ]
        if iteration >= _EXACT_STEPS:
            following = [
                Abstract(
                    a.dependence.map(lambda r: widen(r, step, length, backward=backward)), a.shape
                )
                for a in following
            ]
        if all(
            dict(a.dependence.sources) == dict(b.dependence.sources)
            for a, b in zip(carry, following, strict=True)
        ):
            break
        carry = following
    else:
        worst = _anything(operands)
        return [Abstract(worst, _shape(var)) for var in eqn.outvars]
    final: dict[AxisKey, Take] = {step: Take(step, 1, shift=last)}
    left = [
        Abstract(o.dependence.move({step: length}, final).move({step: 1}, {}), o.shape)
        for o in outputs[:num_carry]
    ]
    return left + [_stacked(o, step, length) for o in outputs[num_carry:]]


def _stacked(output: Abstract, step: Step, length: int) -> Abstract:
    taken: dict[AxisKey, Take] = {step: Take(0, length)}
    taken |= {axis: Take(axis + 1, size) for axis, size in enumerate(output.shape)}
    shape = (length, *output.shape)
    constant = None
    if output.constant is not None:
        constant = _Lazy(lambda: np.broadcast_to(np.asarray(output.value), shape))
    sizes: dict[AxisKey, int] = {step: length, **output.sizes}
    return Abstract(output.dependence.move(sizes, taken), shape, constant)


def _present_somewhere(relations: Relations, step: Step, length: int) -> Relations:
    """Say of every relation at which steps it exists, so that moving it cannot lengthen it."""
    bare = {r for r in relations if all(axis is not step for axis, _, _ in r.present)}
    return union(limit(frozenset(bare), step, -1, 0, length), relations - bare)


def _scan_input(operand: Abstract, step: Step) -> Abstract:
    taken: dict[AxisKey, Take] = {0: Take(step, operand.shape[0])}
    taken |= {a: Take(a - 1, n) for a, n in enumerate(operand.shape) if a}
    return Abstract(operand.take(taken), operand.shape[1:])


_CALLS = frozenset(
    """
    jit pjit closed_call core_call call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr
    checkpoint composite remat remat2
    """.split()  # noqa: SIM905 (one name a line would take a page)
)

_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi ne neg
    nextafter not or polygamma population_count pow random_gamma_grad real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor zeta
    """.split()  # noqa: SIM905
)

_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "cond": _branch,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "top_k": _last_axis,
    "unstack": _unstack,
    "optimization_barrier": _each_its_own,
    "transpose": _transpose,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulate),
    **dict.fromkeys(("cholesky", "eig", "eigh", "lu", "qr", "svd", "triangular_solve"), _matrix),
    **dict.fromkeys(
        (
            "argmax",
            "argmin",
            "reduce",
            "reduce_and",
            "reduce_max",
            "reduce_min",
            "reduce_or",
            "reduce_prod",
            "reduce_sum",
            "reduce_xor",
        ),
        _reduce,
    ),
    **dict.fromkeys(
        (
            "scatter",
            "scatter-add",
            "scatter-max",
            "scatter-min",
            "scatter-mul",
            "scatter-sub",
            "scatter_add",
            "scatter_max",
            "scatter_min",
            "scatter_mul",
            "scatter_sub",
        ),
        _scatter,
    ),
}
