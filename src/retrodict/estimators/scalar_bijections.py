"""Elementwise bijections between the reals and intervals, selected by a code per coordinate.

These are NumPyro's elementwise bijections as a table: the coordinates of one factor differ in their
bijections and bounds, and a loop over coordinates needs one function for all. Values are kept
strictly inside their support in floating point as well, and a value's preimage is computed such
that it leads back to the value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

Column = TypeVar("Column", Array, np.ndarray)


class Coordinate(NamedTuple, Generic[Column]):
    """Constants of one coordinate, or of several along a leading axis.

    Attributes:
        bijection: position in BIJECTIONS of the map from the reals to the value.
        lower, upper: bounds of the support; an integer is measured from the lower one.
        min_value, max_value: the closed range of floats strictly inside the support.
        continues_total: whether it shares a total with the coordinate before it.
        centre, scale: of the unconstrained value under the prior.
        shift, stretch: the anchor, a location and scale given by the model, in units of `scale`
            from `centre`.
    """

    bijection: Column
    lower: Column
    upper: Column
    min_value: Column
    max_value: Column
    continues_total: Column
    centre: Column
    scale: Column
    shift: Column
    stretch: Column


@dataclass(frozen=True)
class ScalarBijection:
    """A monotone map of the reals onto an interval.

    Attributes:
        constrain: the map.
        unconstrain: its inverse, and log |dx/dz|.
        inner_point: a value inside the interval.
    """

    constrain: Callable[[Array, Coordinate[Array]], Array]
    unconstrain: Callable[[Array, Coordinate[Array]], tuple[Array, Array]]
    inner_point: Callable[[Coordinate[Array]], Array]


def _below_inverse(x: Array, c: Coordinate[Array]) -> tuple[Array, Array]:
    z = jnp.log(c.upper - x)
    return z, z


def _above_inverse(x: Array, c: Coordinate[Array]) -> tuple[Array, Array]:
    z = jnp.log(x - c.lower)
    return z, z


def _between_inverse(x: Array, c: Coordinate[Array]) -> tuple[Array, Array]:
    from_lower, to_upper = jnp.log(x - c.lower), jnp.log(c.upper - x)
    return from_lower - to_upper, from_lower + to_upper - jnp.log(c.upper - c.lower)


def _softplus_inverse(x: Array, c: Coordinate[Array]) -> tuple[Array, Array]:
    log_slope = jnp.log(-jnp.expm1(-x))
    return x + log_slope, log_slope


IDENTITY, ABOVE, BELOW, BETWEEN, SOFTPLUS = range(5)
BIJECTIONS: tuple[ScalarBijection, ...] = (
    ScalarBijection(lambda z, c: z, lambda x, c: (x, jnp.zeros_like(x)), lambda c: c.lower),
    ScalarBijection(lambda z, c: c.lower + jnp.exp(z), _above_inverse, lambda c: c.lower + 1),
    ScalarBijection(lambda z, c: c.upper - jnp.exp(z), _below_inverse, lambda c: c.upper - 1),
    ScalarBijection(
        lambda z, c: c.lower + (c.upper - c.lower) * jax.nn.sigmoid(z),
        _between_inverse,
        lambda c: (c.lower + c.upper) / 2,
    ),
    ScalarBijection(
        lambda z, c: jax.nn.softplus(z), _softplus_inverse, lambda c: jnp.ones_like(c.lower)
    ),
)


def constrain(z: Array, c: Coordinate[Array], codes: tuple[int, ...]) -> Array:
    """Map reals into the support; `codes` are the bijections that occur."""
    x = BIJECTIONS[codes[0]].constrain(z, c)
    if len(codes) > 1:
        x = jnp.zeros_like(z)
        for code in codes:
            selected = c.bijection == code
            # Zero keeps the gradient of the other branches finite.
            value = BIJECTIONS[code].constrain(jnp.where(selected, z, 0.0), c)
            x = jnp.where(selected, value, x)
    return jnp.clip(x, c.min_value, c.max_value)


def unconstrain(x: Array, c: Coordinate[Array], codes: tuple[int, ...]) -> tuple[Array, Array]:
    """The reals z that map to x, and log |dx/dz|; `codes` are the bijections that occur."""
    x = jnp.clip(x, c.min_value, c.max_value)
    z, log_slope = jnp.zeros_like(x), jnp.zeros_like(x)
    for code in codes:
        selected = c.bijection == code
        bijection = BIJECTIONS[code]
        # An inner point keeps the gradient of the other branches finite.
        inside = jnp.where(selected, x, bijection.inner_point(c))
        preimage, log_derivative = bijection.unconstrain(inside, c)
        z = jnp.where(selected, preimage, z)
        log_slope = jnp.where(selected, log_derivative, log_slope)
    return z, log_slope


def match_gaussian(mean: Array, sd: Array, c: Coordinate[Array]) -> tuple[Array, Array]:
    """Mean and standard deviation of z for which x has about the given ones.

    A mean outside the support is replaced by one that lies a fifth of a standard deviation inside.
    """

    def log_moments(distance: Array) -> tuple[Array, Array]:
        distance = jnp.maximum(distance, 0.2 * sd)
        log_ratio = jnp.log1p((sd / distance) ** 2)
        return jnp.log(distance) - log_ratio / 2, jnp.sqrt(log_ratio)

    above_mean, above_sd = log_moments(mean - c.lower)
    below_mean, below_sd = log_moments(c.upper - mean)
    width = c.upper - c.lower
    share = jnp.clip((mean - c.lower) / width, 0.02, 0.98)
    logit = jnp.log(share) - jnp.log1p(-share)
    logit_sd = jnp.minimum(sd / (width * share * (1 - share)), 2.0)
    positive = jnp.maximum(mean, 0.2 * sd)
    slope = -jnp.expm1(-positive)
    cases = [c.bijection == code for code in (ABOVE, BELOW, BETWEEN, SOFTPLUS)]
    means = [above_mean, below_mean, logit, positive + jnp.log(slope)]
    return (
        jnp.select(cases, means, mean),
        jnp.select(cases, [above_sd, below_sd, logit_sd, sd / slope], sd),
    )
