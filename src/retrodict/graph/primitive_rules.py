"""Rules for the primitives of JAX: what a result depends on, given what its operands depend on.

A rule relates the elements of a result to those of the operands. A primitive without a rule is
taken to depend on all of its operands: a superset of the true dependence is always valid.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.extend.core import JaxprEqn

from retrodict.graph.dependence import Abstract, Dependence, together
from retrodict.graph.index_atoms import INF, Atom, Table, Window, right_range

Rule: TypeAlias = Callable[[JaxprEqn, Sequence[Abstract]], list[Dependence]]
Shape: TypeAlias = tuple[int, ...]
Parameters: TypeAlias = Mapping[str, Any]


def shape_of(var: Any) -> Shape:
    """The shape of a variable of a jaxpr."""
    return tuple(getattr(var.aval, "shape", ()))


def elementwise(operands: Sequence[Abstract], shape: Shape) -> Dependence:
    """Position by position; an axis of size one is broadcast along the result's."""
    return together(
        operand.dependence
        if operand.shape in ((), shape)
        else operand.keep({a: a for a, n in enumerate(operand.shape) if n == shape[a]}, shape)
        for operand in operands
    )


def anything(operands: Sequence[Abstract]) -> Dependence:
    """Every position may depend on all of every operand."""
    return together(operand.take([], ()) for operand in operands)


# Results whose axes are related to axes of the first operand. These functions take the equation's
# parameters and the shapes of operand and result, and return the atoms of that relation.


def _moved(atoms: Callable[[Parameters, Shape, Shape], Iterable[Atom]]) -> Rule:
    def rule(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
        operand, shape = operands[0], shape_of(eqn.outvars[0])
        return [operand.take(atoms(eqn.params, operand.shape, shape), shape)]

    return rule


def _broadcast_in_dim(parameters: Parameters, old: Shape, new: Shape) -> Iterable[Atom]:
    dimensions = enumerate(parameters["broadcast_dimensions"])
    return [Window(axis, i) for i, axis in dimensions if old[i] == new[axis]]


def _squeeze(parameters: Parameters, old: Shape, new: Shape) -> Iterable[Atom]:
    return _without(parameters["dimensions"], old)


def _without(axes: Sequence[int], shape: Shape) -> list[Window]:
    rest = (axis for axis in range(len(shape)) if axis not in axes)
    return [Window(number, axis) for number, axis in enumerate(rest)]


def _transpose(parameters: Parameters, old: Shape, new: Shape) -> Iterable[Atom]:
    return [Window(axis, source) for axis, source in enumerate(parameters["permutation"])]


def _cumulate(parameters: Parameters, old: Shape, new: Shape) -> Iterable[Atom]:
    bounds = (0.0, INF) if parameters["reverse"] else (-INF, 0.0)
    return [Window(a, a, *(bounds if a == parameters["axis"] else ())) for a in range(len(old))]


def _slice(parameters: Parameters, old: Shape, new: Shape) -> Iterable[Atom]:
    for axis, start in enumerate(parameters["start_indices"]):
        stride = (parameters["strides"] or (1,) * len(old))[axis]
        if stride == 1:
            yield Window(axis, axis, start, start)
        else:
            yield Table.of_index(axis, axis, old[axis], start + stride * np.arange(new[axis]))


def _reverse(parameters: Parameters, old: Shape, new: Shape) -> Iterable[Atom]:
    for axis, n in enumerate(old):
        if axis in parameters["dimensions"]:
            yield Table.of_index(axis, axis, n, np.arange(n)[::-1])
        else:
            yield Window(axis, axis)


def _tile(parameters: Parameters, old: Shape, new: Shape) -> Iterable[Atom]:
    for source, n in enumerate(old):
        axis = len(new) - len(old) + source
        if n == new[axis]:
            yield Window(axis, source)
        else:
            yield Table.of_index(axis, source, n, np.arange(new[axis]) % n)


def _reshape(parameters: Parameters, old: Shape, new: Shape) -> Iterable[Atom]:
    for old_axes, new_axes in _matching_runs(old, new):
        if len(new_axes) == 1:  # of several, no single axis of the result determines the position
            (axis,), sizes = new_axes, [old[source] for source in old_axes]
            indices = np.unravel_index(np.arange(new[axis]), sizes)
            for source, index in zip(old_axes, indices, strict=True):
                yield Table.of_index(axis, source, old[source], index)


def _matching_runs(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Cut both shapes into the shortest runs of axes with equal numbers of elements.

    Axes of size one belong to no run.
    """

    def ends(shape: Shape) -> dict[int, int]:
        axes = [axis for axis, n in enumerate(shape) if n > 1]
        return dict(zip(axes, np.cumprod([shape[axis] for axis in axes]).tolist(), strict=True))

    before, after, start = ends(old), ends(new), 1
    for end in sorted({*before.values()} & {*after.values()}):
        first, second = (
            [a for a, e in side.items() if start < e <= end] for side in (before, after)
        )
        yield first, second
        start = end


# Results that all depend on the same elements of all operands.


def _reduced(axes: Callable[[Parameters, Shape], Sequence[int]], *, keepdims: bool = False) -> Rule:
    """The rule of an operation over some axes, position by position along the others."""

    def rule(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
        shape, parts = shape_of(eqn.outvars[0]), []
        for operand in operands:
            atoms = _without(axes(eqn.params, operand.shape), operand.shape)
            if keepdims:
                atoms = [Window(atom.right, atom.right) for atom in atoms]
            parts.append(operand.take(atoms, operand.shape if keepdims else shape))
        return [together(parts)] * len(eqn.outvars)

    return rule


# Slices, joins and updates.


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


Pieces: TypeAlias = Callable[[Parameters, Sequence[Shape]], Iterable[list[Atom]]]


def _cut(pieces: Pieces) -> Rule:
    """The rule of an operation that cuts an array into pieces."""

    def rule(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
        shapes = list(map(shape_of, eqn.outvars))
        pairs = zip(pieces(eqn.params, shapes), shapes, strict=True)
        return [operands[0].take(atoms, shape) for atoms, shape in pairs]

    return rule


def _joined(pieces: Pieces) -> Rule:
    """The rule of an operation that joins arrays."""

    def rule(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
        shape = shape_of(eqn.outvars[0])
        pairs = zip(pieces(eqn.params, [o.shape for o in operands]), operands, strict=True)
        return [together(o.take([a.transposed for a in atoms], shape) for atoms, o in pairs)]

    return rule


def _consecutive(parameters: Parameters, shapes: Sequence[Shape]) -> Iterable[list[Atom]]:
    """For each piece of an array along an existing axis, where its axes are in the array."""
    along, start = parameters.get("axis", parameters.get("dimension")), 0
    for shape in shapes:
        offsets = (start if axis == along else 0 for axis in range(len(shape)))
        yield [Window(axis, axis, offset, offset) for axis, offset in enumerate(offsets)]
        start += shape[along]


def _layers(parameters: Parameters, shapes: Sequence[Shape]) -> Iterable[list[Atom]]:
    """For each piece of an array along a new axis, where its axes are in the array."""
    along = parameters["axis"]
    for number, shape in enumerate(shapes):
        axes = [Window(axis, axis + (axis >= along)) for axis in range(len(shape))]
        yield [right_range(along, number, number + 1), *axes]


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


def _scatter(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    return [operands[0].dependence | anything(operands[1:])]


def _barrier(eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Dependence]:
    return [operand.dependence for operand in operands]


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


def _names(text: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(text.split(), rule)


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _moved(_broadcast_in_dim),
    "concatenate": _joined(_consecutive),
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "optimization_barrier": _barrier,
    "pad": _pad,
    "reshape": _moved(_reshape),
    "rev": _moved(_reverse),
    "slice": _moved(_slice),
    "sort": _reduced(lambda parameters, _: [parameters["dimension"]], keepdims=True),
    "split": _cut(_consecutive),
    "squeeze": _moved(_squeeze),
    "stack": _joined(_layers),
    "tile": _moved(_tile),
    "top_k": _reduced(lambda _, shape: [len(shape) - 1], keepdims=True),
    "transpose": _moved(_transpose),
    "unstack": _cut(_layers),
    **_names("cumsum cumprod cummax cummin cumlogsumexp", _moved(_cumulate)),
    **_names(
        "cholesky eig eigh lu qr svd triangular_solve",
        _reduced(lambda _, shape: range(len(shape))[-2:], keepdims=True),
    ),
    **_names(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
        "reduce_xor",
        _reduced(lambda parameters, _: parameters["axes"]),
    ),
    "reduce": _reduced(lambda parameters, _: parameters["dimensions"]),
    **_names(
        "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub "
        "scatter_add scatter_max scatter_min scatter_mul scatter_sub",
        _scatter,
    ),
}
