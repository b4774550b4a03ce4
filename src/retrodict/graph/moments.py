"""Mean and variance of each entry of a distribution's value; NaN where they are not defined."""

from typing import NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from retrodict.graph.distribution_parameters import value_mask
from retrodict.graph.stacked_distribution import Stacked

# The variance of a masked entry, which carries no information.
NO_INFORMATION = 1e30


class Moments(NamedTuple):
    """Mean and variance of each entry of a value."""

    mean: Float[Array, "*shape"]
    variance: Float[Array, "*shape"]


def moments(fn: dist.Distribution, sample_shape: tuple[int, ...] = ()) -> Moments:
    """Mean and variance of a distribution's entries; NaN where they are not defined."""
    if isinstance(fn, Stacked):
        copies: Moments = fn.each(lambda one: moments(one, sample_shape))
        return Moments(*(jnp.moveaxis(part, 0, len(sample_shape)) for part in copies))
    shape = fn.shape(sample_shape)
    try:
        mean, variance = jnp.asarray(fn.mean, float), jnp.asarray(fn.variance, float)
        entries = Moments(jnp.broadcast_to(mean, shape), jnp.broadcast_to(variance, shape))
    except (NotImplementedError, AttributeError, TypeError, ValueError):
        unknown = jnp.full(shape, jnp.nan)
        return Moments(unknown, unknown)
    mask = value_mask(fn, shape)
    if mask is None:
        return entries
    return entries._replace(variance=jnp.where(mask, entries.variance, NO_INFORMATION))
