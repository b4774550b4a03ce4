"""An operation and what its operands depend on in; what its results depend on out.

One rule a primitive of JAX says where the axes of a result come from. What has no rule is taken to
depend on all of its operands: a superset is always safe.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from numpy.typing import NDArray

from retrodict.graph.index_relations import (
    AxisKey,
    Dependence,
    Relations,
    Step,
    Take,
    limit,
    widen,
)


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
    by_step: "tuple[Step, Lazy] | None" = None

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
            else operand.keep({a: a for a, n in enumerate(operand.shape) if n == shape[a]})
            for operand in operands
        ]
    )


def anything(operands: Sequence[Abstract]) -> Dependence:
    """Every position may depend on all of every operand."""
    return together([operand.take({}) for operand in operands])


def _broadcast_in_dim(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, shape = operands[0], eqn.params["shape"]
    places = eqn.params["broadcast_dimensions"]
    kept = {i: d for i, d in enumerate(places) if operand.shape[i] == shape[d]}
    return [operand.keep(kept)]


def _squeeze(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    gone = set(eqn.params["dimensions"])
    return [_drop(operands[0], gone)]


def _drop(operand: Abstract, gone: set[int]) -> Dependence:
    left = [axis for axis in range(len(operand.shape)) if axis not in gone]
    return operand.keep({old: new for new, old in enumerate(left)})


def _reshape(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
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


def _transpose(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    return [operands[0].keep({old: new for new, old in enumerate(eqn.params["permutation"])})]


def _reduce(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    gone = set(eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"])
    total = together(
        [_drop(operand, gone) if operand.shape else operand.dependence for operand in operands]
    )
    return [total] * len(eqn.outvars)


def _cumulate(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    axis, operand = eqn.params["axis"], operands[0]
    size, backward = operand.shape[axis], eqn.params["reverse"]
    return [operand.dependence.map(lambda r: widen(r, axis, size, backward=backward))]


def _slice(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
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


def _dynamic_slice(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, starts, sizes = operands[0], operands[1:], eqn.params["slice_sizes"]
    taken: dict[AxisKey, Take] = {}
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size == operand.shape[axis]:
            taken[axis] = Take(axis, size)
        elif start.value is not None:
            at = int(np.clip(start.value, 0, operand.shape[axis] - size))
            taken[axis] = Take(axis, size, shift=at)
    return [operand.take(taken) | anything(starts)]


def _dynamic_update_slice(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
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
    return [operand.dependence | placed | anything(starts)]


def _split(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, axis = operands[0], eqn.params["axis"]
    parts, start = [], 0
    for size in eqn.params["sizes"]:
        starts = [start if i == axis else 0 for i in range(len(operand.shape))]
        stops = [start + size if i == axis else n for i, n in enumerate(operand.shape)]
        parts.append(operand.take(_sliced(starts, stops, [1] * len(starts))))
        start += size
    return parts


def _pad(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, filler = operands
    shape = shape_of(eqn.outvars[0])
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


def _concatenate(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    along, shape = eqn.params["dimension"], shape_of(eqn.outvars[0])
    parts, start = [], 0
    for operand in operands:
        taken: dict[AxisKey, Take] = {
            axis: Take(axis, size, shift=-start if axis == along else 0)
            for axis, size in enumerate(shape)
        }
        parts.append(_inside(operand).move(operand.sizes, taken))
        start += operand.shape[along]
    return [together(parts)]


def _stack(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    along, count = eqn.params["axis"], len(operands)
    return [
        together(
            [
                operand.keep({a: a + (a >= along) for a in range(len(operand.shape))}).map(
                    lambda r, place=number: limit(r, along, count, place, place + 1)  # type: ignore[misc]
                )
                for number, operand in enumerate(operands)
            ]
        )
    ]


def _unstack(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
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


def _tile(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, shape = operands[0], shape_of(eqn.outvars[0])
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


def _each_its_own(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    return [operand.dependence for operand in operands]


def _last_axis(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    """Something along the last axis, batched over the others."""
    total = together([o.keep({a: a for a in range(len(o.shape) - 1)}) for o in operands])
    return [total] * len(eqn.outvars)


def _reverse(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
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


def _dot_general(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
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
    return [together(parts)]


def _gather(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    operand, indices = operands
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = shape_of(eqn.outvars[0])
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


def _scatter(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    return [operands[0].dependence | anything(operands[1:])]


def _sort(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    along = eqn.params["dimension"]
    total = together([o.keep({a: a for a in range(len(o.shape)) if a != along}) for o in operands])
    return [total] * len(eqn.outvars)


def _matrix(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    """Linear algebra over the last two axes, batched over the others."""
    total = together([o.keep({a: a for a in range(len(o.shape) - 2)}) for o in operands])
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
