"""A real number in; a value strictly inside an interval, and the slope there, out (sec. 3.3).

NumPyro's elementwise bijections once more, as a table: coordinates of one factor differ in their
curves and bounds, and a loop over coordinates needs one function for all. Values are kept inside
their support as floats too, and preimages are computed so that a value's own is found again.
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
    """Constants of one coordinate, or of a run of them along a leading axis."""

    curve: Column  # which of CURVES leads from the reals to the value
    lower: Column  # bounds of the support; the value of an integer counts from the lower one
    upper: Column
    least: Column  # the closed range of floats strictly inside the support
    most: Column
    continues: Column  # whether it takes from a total that those before it have taken from
    centre: Column  # of the unconstrained value under the prior
    scale: Column
    shift: Column  # where a network begins to look, and how widely, in units of the scale
    stretch: Column


@dataclass(frozen=True)
class Curve:
    """A monotone map of the reals onto an interval, with its inverse and log derivative."""

    constrain: Callable[[Array, Coordinate[Array]], Array]
    unconstrain: Callable[[Array, Coordinate[Array]], tuple[Array, Array]]
    anchor: Callable[[Coordinate[Array]], Array]


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
CURVES: tuple[Curve, ...] = (
    Curve(lambda z, c: z, lambda x, c: (x, jnp.zeros_like(x)), lambda c: c.lower),
    Curve(lambda z, c: c.lower + jnp.exp(z), _above_inverse, lambda c: c.lower + 1),
    Curve(lambda z, c: c.upper - jnp.exp(z), _below_inverse, lambda c: c.upper - 1),
    Curve(
        lambda z, c: c.lower + (c.upper - c.lower) * jax.nn.sigmoid(z),
        _between_inverse,
        lambda c: (c.lower + c.upper) / 2,
    ),
    Curve(lambda z, c: jax.nn.softplus(z), _softplus_inverse, lambda c: jnp.ones_like(c.lower)),
)


def constrain(z: Array, c: Coordinate[Array], curves: tuple[int, ...]) -> Array:
    """The value at z, strictly inside the support; `curves` are the codes that occur."""
    x = CURVES[curves[0]].constrain(z, c)
    if len(curves) > 1:
        x = jnp.zeros_like(z)
        for code in curves:
            here = c.curve == code
            # zero keeps the gradient of a branch not taken finite
            x = jnp.where(here, CURVES[code].constrain(jnp.where(here, z, 0.0), c), x)
    return jnp.clip(x, c.least, c.most)


def unconstrain(x: Array, c: Coordinate[Array], curves: tuple[int, ...]) -> tuple[Array, Array]:
    """The real number z that leads to x, and log |dx/dz| there."""
    x = jnp.clip(x, c.least, c.most)
    z, log_slope = jnp.zeros_like(x), jnp.zeros_like(x)
    for code in curves:
        here = c.curve == code
        curve = CURVES[code]
        # the anchor keeps the gradient of a branch not taken finite
        z_here, slope_here = curve.unconstrain(jnp.where(here, x, curve.anchor(c)), c)
        z, log_slope = jnp.where(here, z_here, z), jnp.where(here, slope_here, log_slope)
    return z, log_slope


def match_gaussian(mean: Array, sd: Array, c: Coordinate[Array]) -> tuple[Array, Array]:
    """Mean and standard deviation of z that give x about those asked for.

    A mean outside the support is moved to where a fifth of a standard deviation is left to it.
    """

    def log_moments(above: Array) -> tuple[Array, Array]:
        m = jnp.maximum(above, 0.2 * sd)
        log_ratio = jnp.log1p((sd / m) ** 2)
        return jnp.log(m) - log_ratio / 2, jnp.sqrt(log_ratio)

    above, spread_above = log_moments(mean - c.lower)
    below, spread_below = log_moments(c.upper - mean)
    width = c.upper - c.lower
    share = jnp.clip((mean - c.lower) / width, 0.02, 0.98)
    logit = jnp.log(share) - jnp.log1p(-share)
    positive = jnp.maximum(mean, 0.2 * sd)
    slope = -jnp.expm1(-positive)
    return (
        jnp.select(
            [c.curve == ABOVE, c.curve == BELOW, c.curve == BETWEEN, c.curve == SOFTPLUS],
            [above, below, logit, positive + jnp.log(slope)],
            mean,
        ),
        jnp.select(
            [c.curve == ABOVE, c.curve == BELOW, c.curve == BETWEEN, c.curve == SOFTPLUS],
            [
                spread_above,
                spread_below,
                jnp.minimum(sd / (width * share * (1 - share)), 2.0),
                sd / slope,
            ],
            sd,
        ),
    )
