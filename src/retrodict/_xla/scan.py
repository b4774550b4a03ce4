"""A scan that keeps the reading and writing of entries apart from the computation.

XLA fuses the reading of an entry from a series, and the writing of a result into another, with the
computation of the step; code that reads or writes at a dynamic index is not vectorised. Therefore
each step reads the entry of the next step and writes the result of the previous one, and both are
part of the carry.

Every array of the carry is copied twice in each step, and XLA uses a second thread if there are
more than eight independent operations, which for small arrays takes longer than one thread. So
small entries of the same type are packed into one array.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, PyTree

from retrodict._xla.tuning import MAX_PACKED_SIZE

State = TypeVar("State")


@dataclass(frozen=True)
class _EntryPacking:
    """How a pytree of one step is packed into few arrays.

    Attributes:
        treedef: The structure of the pytree.
        leaves: Shapes and dtypes of its leaves.
        groups: Indices of the leaves that share an array. A leaf alone keeps its shape and dtype.
    """

    treedef: Any
    leaves: tuple[Any, ...]
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(tree: PyTree) -> "_EntryPacking":
        leaves, treedef = jax.tree.flatten(tree)
        groups: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
            alone = is_key or not 0 < leaf.size <= MAX_PACKED_SIZE
            groups.setdefault(index if alone else _packed_dtype(leaf.dtype), []).append(index)
        return _EntryPacking(treedef, tuple(leaves), tuple(map(tuple, groups.values())))

    def pack(self, tree: PyTree, *, stacked: bool = False) -> list[Array]:
        """Pack the entries of one step, or of all steps if they are `stacked`."""
        leaves: list[Array] = jax.tree.leaves(tree)
        axis = int(stacked)

        def pack_group(indices: tuple[int, ...]) -> Array:
            if len(indices) == 1:
                return leaves[indices[0]]
            flat = [leaves[index].reshape(*leaves[index].shape[:axis], -1) for index in indices]
            return jnp.concatenate([leaf.astype(_packed_dtype(leaf.dtype)) for leaf in flat], axis)

        return list(map(pack_group, self.groups))

    def unpack(self, arrays: list[Array], *, stacked: bool = False) -> PyTree:
        leaves: dict[int, Array] = {}
        for indices, array in zip(self.groups, arrays, strict=True):
            if len(indices) == 1:
                leaves[indices[0]] = array
                continue
            shapes, steps = [self.leaves[index] for index in indices], array.shape[: int(stacked)]
            ends = np.cumsum([leaf.size for leaf in shapes])[:-1]
            for index, leaf, values in zip(
                indices, shapes, jnp.split(array, ends, len(steps)), strict=True
            ):
                leaves[index] = values.reshape(*steps, *leaf.shape).astype(leaf.dtype)
        return jax.tree.unflatten(self.treedef, [leaves[index] for index in range(len(leaves))])


def _packed_dtype(dtype: Any) -> Any:
    """The dtype of a packed array; booleans are packed as integers."""
    return np.dtype(np.int32) if dtype == np.dtype(bool) else dtype


class _Carry(NamedTuple):
    """What one step of the loop passes to the next.

    Attributes:
        state: The caller's state.
        entry: This step's entry, packed.
        result: The previous step's result, packed, still to be written.
        results: The results of all steps so far.
    """

    state: Any
    entry: list[Array]
    result: list[Array]
    results: list[Array]


def scan(
    step: Callable[[State, Any], tuple[State, Any]],
    start: State,
    entries: PyTree,
    *,
    reverse: bool = False,
) -> tuple[State, Any]:
    """Equal to `jax.lax.scan`; faster if a step computes more than matrix products."""
    length = jax.tree.leaves(entries)[0].shape[0]
    if length < 2:
        return jax.lax.scan(step, start, entries, reverse=reverse)

    entry_struct = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], entries))
    jaxpr, (_, result_struct) = jax.make_jaxpr(step, return_shape=True)(start, entry_struct)
    traced_step = jaxpr_as_fun(jaxpr)  # the shapes are needed first, so reuse that trace
    treedef = jax.tree.structure((start, result_struct))
    entry_packing, result_packing = _EntryPacking.of(entry_struct), _EntryPacking.of(result_struct)
    packed_entries = entry_packing.pack(entries, stacked=True)
    first, last, forward = (length - 1, 0, -1) if reverse else (0, length - 1, 1)

    def read(index: Array | int) -> list[Array]:
        return [jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False) for a in packed_entries]

    def loop_step(carry: _Carry, index: Array) -> tuple[_Carry, None]:
        arguments = jax.tree.leaves((carry.state, entry_packing.unpack(carry.entry)))
        state, result = jax.tree.unflatten(treedef, traced_step(*arguments))
        # Beyond the ends any index will do: the entry is not used, and the result is overwritten.
        results = _write(carry.results, carry.result, jnp.clip(index - forward, 0, length - 1))
        entry = read(jnp.clip(index + forward, 0, length - 1))
        return _Carry(state, entry, result_packing.pack(result), results), None

    blank = result_packing.pack(
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result_struct)
    )
    results = [jnp.zeros((length, *leaf.shape), leaf.dtype) for leaf in blank]
    carry, _ = jax.lax.scan(
        loop_step, _Carry(start, read(first), blank, results), jnp.arange(length), reverse=reverse
    )
    results = _write(carry.results, carry.result, last)
    return carry.state, result_packing.unpack(results, stacked=True)


def _write(series: list[Array], values: list[Array], index: Array | int) -> list[Array]:
    return [
        jax.lax.dynamic_update_index_in_dim(array, value, index, 0)
        for array, value in zip(series, values, strict=True)
    ]


def sequential_map(fn: Callable[[Any], Any], entries: PyTree) -> Any:
    """Equal to `jax.lax.map`."""
    return scan(lambda state, entry: (state, fn(entry)), (), entries)[1]
