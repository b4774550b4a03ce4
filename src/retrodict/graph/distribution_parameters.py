"""The parameters of a NumPyro distribution as arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array

from retrodict.graph.stacked_distribution import Stacked

_WRAPPERS = (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution, Stacked)


def innermost(fn: dist.Distribution) -> dist.Distribution:
    """The distribution without its wrappers."""
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
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
