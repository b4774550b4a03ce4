"""Functions whose batch axis comes last, however often they are vectorised.

`jax.vmap` puts the batch axis first, so that the contiguous axis holds the few parameters of a head
or the few hidden units of a coordinate; one step for a hundred particles then takes several times
as long. A function wrapped by `batch_last` merges all batch axes (copies, particles, data sets)
into one last axis, over which the processor vectorises.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from retrodict._xla.tuning import VECTOR_WIDTH

Shared = TypeVar("Shared")
Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


def batch_last(fn: Callable[[Shared, Inputs], Outputs]) -> Callable[[Shared, Inputs], Outputs]:
    """Turn a function of a batch into a function of one element whose `jax.vmap` is the batch's.

    Args:
        fn: Takes what all elements share, and arrays whose last axis is the batch, or has size one
            where all elements have the same value; returns arrays whose last axis is the batch.
    """

    @jax.custom_batching.custom_vmap
    def call_batch(shared: Shared, inputs: Inputs) -> Outputs:
        size = _batch_size(inputs)
        padding = -size % VECTOR_WIDTH if size > VECTOR_WIDTH else 0
        if not padding:
            return fn(shared, inputs)

        def pad(leaf: Array) -> Array:
            if leaf.shape[-1] != size:
                return leaf
            return jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, padding)], mode="edge")

        padded = fn(shared, jax.tree.map(pad, inputs))
        outputs: Outputs = jax.tree.map(lambda leaf: leaf[..., :size], padded)
        return outputs

    @call_batch.def_vmap
    def call_nested_batch(
        axis_size: int, batched: tuple[PyTree, PyTree], shared: Shared, inputs: Inputs
    ) -> tuple[Outputs, PyTree]:
        shared_batched, inputs_batched = batched
        if any(jax.tree.leaves(shared_batched)):
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
            outputs = jax.vmap(fn, axes, axis_size=axis_size)(shared, inputs)
        else:
            size = _batch_size(inputs)
            merged = jax.tree.map(
                lambda leaf, is_batched: _merge_axes(leaf, is_batched, axis_size, size),
                inputs,
                inputs_batched,
            )
            outputs = jax.tree.map(
                lambda leaf: _split_axes(leaf, axis_size, size), call_batch(shared, merged)
            )
        return outputs, jax.tree.map(lambda _: True, outputs)

    def call_one(shared: Shared, inputs: Inputs) -> Outputs:
        batch = call_batch(shared, jax.tree.map(lambda leaf: jnp.asarray(leaf)[..., None], inputs))
        outputs: Outputs = jax.tree.map(lambda leaf: leaf[..., 0], batch)
        return outputs

    return call_one


def _batch_size(inputs: PyTree) -> int:
    size: int = max(leaf.shape[-1] for leaf in jax.tree.leaves(inputs))
    return size


def _merge_axes(leaf: Array, is_batched: bool, axis_size: int, size: int) -> Array:
    """Merge the first axis, if there is one, into the batch axis; constants stay constants."""
    if not is_batched and leaf.shape[-1] == 1:
        return leaf
    if not is_batched:
        leaf = jnp.broadcast_to(leaf, (axis_size, *leaf.shape))
    leaf = jnp.moveaxis(leaf, 0, -2)
    leaf = jnp.broadcast_to(leaf, (*leaf.shape[:-1], size))
    return leaf.reshape(*leaf.shape[:-2], axis_size * size)


def _split_axes(leaf: Array, axis_size: int, size: int) -> Array:
    """The inverse of `_merge_axes`."""
    return jnp.moveaxis(leaf.reshape(*leaf.shape[:-1], axis_size, size), -2, 0)


def along_first(values: np.ndarray, like: Array) -> np.ndarray:
    """Constants along the first axis, shaped to broadcast with an array that has a batch axis."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def concatenate_features(parts: Sequence[Array]) -> Array:
    """Concatenate along the first axis; parts that are constant over the batch are repeated."""
    if not parts:
        return jnp.zeros(0)
    if parts[0].ndim == 1:
        return jnp.concatenate(parts)
    size = max(part.shape[-1] for part in parts)
    whole = [jnp.broadcast_to(part, (*part.shape[:-1], size)) for part in parts]
    return jnp.concatenate(whole)


def sum_features(values: Float[Array, "features *batch"]) -> Float[Array, "*batch"]:
    """Sum over the first axis.

    Over a batch this is a matrix product, which XLA does not fuse with the computation of the
    values: fused, they would be computed inside the sum, one number at a time.
    """
    if values.ndim == 1:
        return jnp.sum(values)
    return jnp.ones(values.shape[0], values.dtype) @ values


def sum_all(values: Float[Array, "..."]) -> Float[Array, ""]:
    """Sum over all axes of one batch element, as a product for the same reason."""
    return jnp.ravel(values) @ jnp.ones(values.size, values.dtype)
