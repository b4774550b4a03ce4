"""The parameters and masks of a NumPyro distribution as arrays."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool

from retrodict.graph.stacked_distribution import Stacked

_WRAPPERS = (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution, Stacked)


def innermost(fn: dist.Distribution) -> dist.Distribution:
    """The distribution without its wrappers."""
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    return fn


def value_mask(fn: dist.Distribution, shape: tuple[int, ...]) -> Bool[Array, "*shape"] | None:
    """Which entries of a value of this shape count in the density; None if no mask is applied."""
    if isinstance(fn, Stacked):
        if value_mask(fn.base_dist, shape[1:]) is None:
            return None
        stacked: Array = fn.each(lambda one: value_mask(one, shape[1:]))
        return stacked
    masks = []
    while hasattr(fn, "base_dist"):
        if isinstance(fn, dist.MaskedDistribution):
            mask = jnp.asarray(fn._mask)
            masks.append(mask.reshape(*mask.shape, *(1 for _ in fn.event_shape)))
        fn = fn.base_dist
    return jnp.broadcast_to(reduce(jnp.logical_and, masks), shape) if masks else None


def unmasked(fn: dist.Distribution) -> dist.Distribution:
    """The distribution without masks."""
    if isinstance(fn, dist.MaskedDistribution):
        return unmasked(fn.base_dist)
    if isinstance(fn, dist.ExpandedDistribution):
        return unmasked(fn.base_dist).expand(fn.batch_shape)
    if isinstance(fn, dist.Independent):
        return unmasked(fn.base_dist).to_event(fn.reinterpreted_batch_ndims)
    return fn


def parameters(fn: dist.Distribution, batch_shape: tuple[int, ...]) -> list[Array]:
    """The distribution's parameters, each broadcast over the batch and flattened behind it.

    A parameter with neither the batch's axes nor the value's is omitted: it is the same for all
    elements of a plate.
    """
    if isinstance(fn, Stacked):
        each: list[Array] = fn.each(lambda one: parameters(one, batch_shape[1:]))
        return each
    arrays = []
    for leaf in map(jnp.asarray, _sorted_leaves(fn)):
        for shape in (
            (*batch_shape, *fn.event_shape),
            (*batch_shape, *leaf.shape[len(batch_shape) :]),
        ):
            try:
                whole = jnp.broadcast_to(leaf, shape)
            except ValueError:
                continue
            arrays.append(whole.reshape(*batch_shape, -1).astype(float))
            break
    return arrays


def _sorted_leaves(fn: dist.Distribution) -> list[Any]:
    """The parameters by name: the order in NumPyro's pytrees differs from process to process."""
    values = (vars(fn).get(name) for name in sorted(type(fn).gather_pytree_data_fields()))
    return [
        leaf
        for value in values
        for leaf in (
            _sorted_leaves(value)
            if isinstance(value, dist.Distribution)
            else jax.tree.leaves(value)
        )
    ]
