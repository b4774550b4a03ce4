"""Rules for the primitives of JAX: what a result depends on, given what its operands depend on.

A rule relates the elements of a result to those of the operands. A primitive without a rule is
taken to depend on all of its operands: a superset is always safe.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from numpy.typing import NDArray

from retrodict.graph.index_atoms import INF, Atom, Table, Window, left_range, right_range
from retrodict.graph.index_relations import Relation


@dataclass(frozen=True)
class Dependence:
    """The relations of one array to every source that it depends on."""

    sources: Mapping[Hashable, Relation]

    @staticmethod
    def nothing() -> "Dependence":
        """The dependence of an array that depends on no source."""
        return Dependence({})

    def __or__(self, other: "Dependence") -> "Dependence":
        if not other.sources:
            return self
        merged = dict(self.sources)
        for source, relation in other.sources.items():
            merged[source] = merged[source] | relation if source in merged else relation
        return Dependence(merged)

    def through(self, relation: Relation) -> "Dependence":
        """The dependence of a result that is related to this array."""
        composed = {name: relation.compose(source) for name, source in self.sources.items()}
        return Dependence({name: source for name, source in composed.items() if source})


@dataclass(frozen=True)
class Abstract:
    """What is known of an array.

    Attributes:
        dependence: on what it depends.
        shape: of the array.
        constant: the array itself, if it is a constant.
        by_step: inside of a scan, its values at all steps, if they are constants.
    """

    dependence: Dependence
    shape: tuple[int, ...]
    constant: "Lazy | None" = None
    by_step: "tuple[int, Lazy] | None" = None

    @property
    def value(self) -> NDArray[Any] | None:
        """The array itself, if it is a constant."""
        return None if self.constant is None else self.constant.value

    def take(self, atoms: Iterable[Atom], shape: Sequence[int]) -> Dependence:
        """The dependence of a result of this shape, which atoms relate to the array."""
        if not self.dependence.sources:
            return self.dependence
        return self.dependence.through(Relation.of(atoms, shape, self.shape))

    def keep(self, axes: Mapping[int, int], shape: Sequence[int]) -> Dependence:
        """The dependence of a result of this shape with axes kept whole: old axis → new axis."""
        return self.take([Window(new, old) for old, new in axes.items()], shape)


class Lazy:
    """A constant that is computed when somebody asks for it."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute

    @cached_property
    def value(self) -> NDArray[Any]:
        """The constant, computed now if it has not been before."""
        with jax.ensure_compile_time_eval():
            return np.asarray(self._compute())


Rule: TypeAlias = Callable[[JaxprEqn, Sequence[Abstract]], list[Dependence]]


def shape_of(var: Any) -> tuple[int, ...]:
    """The shape of a variable of a jaxpr."""
    return tuple(getattr(var.aval, "shape", ()))


def together(parts: Sequence[Dependence]) -> Dependence:
    """What depends on all that any of the parts depends on."""
    total = Dependence.nothing()
    for part in parts:
        total = total | part
    return total


def elementwise(operands: Sequence[Abstract], shape: tuple[int, ...]) -> Dependence:
    """Position by position; an axis of size one is stretched over the result's."""
    return together(
        [
            operand.dependence
            if operand.shape in ((), shape)
            else operand.keep({a: a for a, n in enumerate(operand.shape) if n == shape[a]}, shape)
            for operand in operands
        ]
    )


def anything(operands: Sequence[Abstract]) -> Dependence:
    """Every position may depend on all of every operand."""
    return together([operand.take([], ()) for operand in operands])


def _broadcast_in_dim(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, shape = operands[0], eqn.params["shape"]
    places = eqn.params["broadcast_dimensions"]
    kept = {i: d for i, d in enumerate(places) if operand.shape[i] == shape[d]}
    return [operand.keep(kept, shape)]


def _squeeze(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    return [_drop(operands[0], eqn.params["dimensions"])]


def _drop(operand: Abstract, gone: Iterable[int]) -> Dependence:
    axes = [axis for axis in range(len(operand.shape)) if axis not in {*gone}]
    shape = [operand.shape[axis] for axis in axes]
    return operand.keep({old: new for new, old in enumerate(axes)}, shape)


def _reshape(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, old, new = operands[0], operands[0].shape, eqn.params["new_sizes"]
    atoms: list[Atom] = []
    for old_axes, new_axes in _matching_runs(old, new):
        old_axes = [axis for axis in old_axes if old[axis] > 1]
        new_axes = [axis for axis in new_axes if new[axis] > 1]
        if len(new_axes) != 1:
            continue  # one axis split into several: no single axis of the result says where
        (place,), sizes = new_axes, [old[axis] for axis in old_axes]
        if len(sizes) == 1:
            atoms.append(Window(place, old_axes[0]))
            continue
        for axis, index in zip(
            old_axes, np.unravel_index(np.arange(new[place]), sizes), strict=True
        ):
            atoms.append(Table.of_index(place, axis, old[axis], index))
    return [operand.take(atoms, new)]


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


def _transpose(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    kept = {old: new for new, old in enumerate(eqn.params["permutation"])}
    return [operands[0].keep(kept, shape_of(eqn.outvars[0]))]


def _reduce(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    gone = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    total = together(
        [_drop(operand, gone) if operand.shape else operand.dependence for operand in operands]
    )
    return [total] * len(eqn.outvars)


def _cumulate(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, along = operands[0], eqn.params["axis"]
    lo, hi = (0.0, INF) if eqn.params["reverse"] else (-INF, 0.0)
    atoms = [
        Window(axis, axis, lo, hi) if axis == along else Window(axis, axis)
        for axis in range(len(operand.shape))
    ]
    return [operand.take(atoms, operand.shape)]


def _slice(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    operand = operands[0]
    atoms = [
        Window(axis, axis, start, start)
        if stride == 1
        else Table.of_index(axis, axis, operand.shape[axis], np.arange(start, stop, stride))
        for axis, (start, stop, stride) in enumerate(zip(starts, stops, strides, strict=True))
    ]
    return [operand.take(atoms, shape_of(eqn.outvars[0]))]


def _dynamic_slice(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, starts, sizes = operands[0], operands[1:], eqn.params["slice_sizes"]
    atoms = _offsets(starts, operand.shape, sizes)
    return [operand.take(atoms, sizes) | anything(starts)]


def _offsets(starts: Sequence[Abstract], whole: Sequence[int], part: Sequence[int]) -> list[Window]:
    """Where the axes of a part of an array start in the whole, as far as that is constant."""
    atoms = []
    for axis, (start, size, length) in enumerate(zip(starts, whole, part, strict=True)):
        if size == length:
            atoms.append(Window(axis, axis))
        elif start.value is not None:
            offset = int(np.clip(start.value, 0, size - length))
            atoms.append(Window(axis, axis, offset, offset))
    return atoms


def _dynamic_update_slice(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, update, *starts = operands
    atoms = [atom.transposed for atom in _offsets(starts, operand.shape, update.shape)]
    return [operand.dependence | update.take(atoms, operand.shape) | anything(starts)]


def _split(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    parts, start = [], 0
    for size, var in zip(eqn.params["sizes"], eqn.outvars, strict=True):
        parts.append(_shifted(operands[0], eqn.params["axis"], start, shape_of(var)))
        start += size
    return parts


def _shifted(operand: Abstract, along: int, offset: int, shape: Sequence[int]) -> Dependence:
    """A result whose axes are the operand's, one of them shifted."""
    atoms = [
        Window(axis, axis, offset, offset) if axis == along else Window(axis, axis)
        for axis in range(len(shape))
    ]
    return operand.take(atoms, shape)


def _pad(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, filler = operands
    shape = shape_of(eqn.outvars[0])
    atoms: list[Atom] = []
    for axis, (low, _, interior) in enumerate(eqn.params["padding_config"]):
        if interior:
            index, rest = np.divmod(np.arange(shape[axis]) - low, interior + 1)
            index = np.where(rest == 0, index, -1)
            atoms.append(Table.of_index(axis, axis, operand.shape[axis], index))
        else:
            atoms.append(Window(axis, axis, -low, -low))
    return [operand.take(atoms, shape) | filler.dependence]


def _concatenate(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    along, shape = eqn.params["dimension"], shape_of(eqn.outvars[0])
    parts, start = [], 0
    for operand in operands:
        parts.append(_shifted(operand, along, -start, shape))
        start += operand.shape[along]
    return [together(parts)]


def _stack(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    along, shape = eqn.params["axis"], shape_of(eqn.outvars[0])
    return [
        together(
            [
                operand.take(
                    [left_range(along, number, number + 1), *_around(along, operand.shape)], shape
                )
                for number, operand in enumerate(operands)
            ]
        )
    ]


def _around(along: int, shape: Sequence[int]) -> list[Window]:
    """The axes of an array in one that has a further axis."""
    return [Window(axis + (axis >= along), axis) for axis in range(len(shape))]


def _unstack(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    along, shape = eqn.params["axis"], shape_of(eqn.outvars[0])
    rest = [atom.transposed for atom in _around(along, shape)]
    return [
        operands[0].take([right_range(along, number, number + 1), *rest], shape)
        for number in range(len(eqn.outvars))
    ]


def _tile(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, shape = operands[0], shape_of(eqn.outvars[0])
    first = len(shape) - len(operand.shape)
    atoms = [
        Window(first + axis, axis)
        if n == shape[first + axis]
        else Table.of_index(first + axis, axis, n, np.arange(shape[first + axis]) % n)
        for axis, n in enumerate(operand.shape)
    ]
    return [operand.take(atoms, shape)]


def _each_its_own(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    return [operand.dependence for operand in operands]


def _batched(number: int) -> Rule:
    """The rule of an operation over the last axes, position by position along the others."""

    def rule(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
        total = together(
            [o.keep({a: a for a in range(len(o.shape) - number)}, o.shape) for o in operands]
        )
        return [total] * len(eqn.outvars)

    return rule


def _reverse(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand = operands[0]
    atoms = [
        Table.of_index(axis, axis, n, np.arange(n)[::-1])
        if axis in eqn.params["dimensions"]
        else Window(axis, axis)
        for axis, n in enumerate(operand.shape)
    ]
    return [operand.take(atoms, operand.shape)]


def _dot_general(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    contracted, batched = eqn.params["dimension_numbers"]
    place, shape = len(batched[0]), shape_of(eqn.outvars[0])
    parts = []
    for operand, summed, batch in zip(operands, contracted, batched, strict=True):
        kept = {axis: number for number, axis in enumerate(batch)}
        for axis in range(len(operand.shape)):
            if axis not in summed and axis not in batch:
                kept[axis] = place
                place += 1
        parts.append(operand.keep(kept, shape))
    return [together(parts)]


def _gather(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, indices = operands
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = shape_of(eqn.outvars[0])
    batch_axes = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
    hidden = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    visible = [axis for axis in range(len(operand.shape)) if axis not in hidden]
    atoms: list[Atom] = [
        Window(place, axis)
        for axis, place in zip(visible, numbers.offset_dims, strict=True)
        if sizes[axis] == operand.shape[axis]
    ]
    for axis, index_axis in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        atoms.append(Window(batch_axes[index_axis], axis))
    positions = _constant_gather(numbers, operand, indices, batch_axes)
    result = operand.take([*atoms, *positions], shape)
    if len(positions) < len(numbers.start_index_map):
        # The last axis of the indices holds the coordinates of one gathered point.
        result = result | indices.keep(dict(enumerate(batch_axes)), shape)
    return [result]


def _constant_gather(
    numbers: Any, operand: Abstract, indices: Abstract, batch_axes: Sequence[int]
) -> list[Atom]:
    """Where gathered axes come from when the index is a constant that varies along one axis."""
    if indices.value is None:
        return []
    atoms: list[Atom] = []
    for column, axis in enumerate(numbers.start_index_map):
        if axis not in numbers.collapsed_slice_dims:
            continue
        index = np.clip(indices.value[..., column], 0, operand.shape[axis] - 1)
        varying = [a for a in range(index.ndim) if np.any(np.take(index, [0], a) != index)]
        if not varying and index.size:
            position = int(index.flat[0])
            atoms.append(right_range(axis, position, position + 1))
        if len(varying) == 1:
            (along,) = varying
            line = np.moveaxis(index, along, 0).reshape(index.shape[along], -1)[:, 0]
            atoms.append(Table.of_index(batch_axes[along], axis, operand.shape[axis], line))
    return atoms


def _scatter(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    return [operands[0].dependence | anything(operands[1:])]


def _sort(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    along = eqn.params["dimension"]
    total = together(
        [o.keep({a: a for a in range(len(o.shape)) if a != along}, o.shape) for o in operands]
    )
    return [total] * len(eqn.outvars)


CALLS = frozenset(
    """
    jit pjit closed_call core_call call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr
    checkpoint composite remat remat2
    """.split()  # noqa: SIM905 (one name a line would take a page)
)

ELEMENTWISE = frozenset(
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

RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "top_k": _batched(1),
    "unstack": _unstack,
    "optimization_barrier": _each_its_own,
    "transpose": _transpose,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulate),
    **dict.fromkeys(
        ("cholesky", "eig", "eigh", "lu", "qr", "svd", "triangular_solve"), _batched(2)
    ),
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
