"""Slopes of a log density in; gamma and beta numbers, or what is nearly so, out.

To draw from a gamma takes tries without number, and their density is not known beforehand. The
families here draw from likenesses that take one go, have densities in closed form, and tails as
heavy. The weights correct what is left between the two: half a percent of draws at the worst for a
gamma, two for a beta.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict.estimators.analytic.families import Chance, Target, scores_of
from retrodict.estimators.scalar_bijections import (
    ABOVE,
    BETWEEN,
    Coordinate,
    constrain,
    unconstrain,
)


class GammaParameters(NamedTuple):
    """Shape, and the logarithm of the rate."""

    shape: Float[Array, "*rows"]
    log_rate: Float[Array, "*rows"]


# Below this shape one likeness is nearer, above it the other: both are within 0.4 % there, in the
# share of draws that are effective.
LIKE_NORMAL = 2.0
# How far from a place to look the two are at which slopes are taken.
APART = 1e4


@dataclass(frozen=True)
class Gamma:
    """Gamma(x | a, b), or with `inverse` that of 1/x: x · slope is a line in x, or in 1/x.

    For a < 2, the likeness is x = -log(1 - U^{1/a}) / λ, with the density
    a λ (1 - e^{-λx})^{a-1} e^{-λx} (Kundu & Gupta 2007); from there on the cube of a normal number,
    from which Marsaglia & Tsang (2000) keep nearly all.
    """

    inverse: bool = False
    evaluations: int = 4
    wide: bool = True

    @property
    def name(self) -> str:  # noqa: D102
        return "inverse gamma" if self.inverse else "gamma"

    def uniforms(self, coordinates: int) -> int:  # noqa: D102
        return coordinates

    def parameters(self, target: Target, start: Array) -> GammaParameters:
        """From the slopes at two places: of w = ±log x, that of the log density is a - b e^w."""
        score, sign = scores_of(target), -1.0 if self.inverse else 1.0
        places = (start / APART, start * APART)
        few, many = places if sign > 0 else places[::-1]  # of e^w
        low, high = (sign * (x * score(x) + 1)[..., 0] for x in (few, many))
        near, far = (x[..., 0] ** sign for x in (few, many))
        rate = (low - high) / (far - near)
        shape = low + rate * near
        sound = (shape > 0) & (rate > 0) & jnp.isfinite(shape) & jnp.isfinite(rate)
        rate = jnp.where(sound, rate, start[..., 0] ** -sign)
        return GammaParameters(jnp.where(sound, shape, 1.0), jnp.log(rate))

    def draw(  # noqa: D102
        self, parameters: GammaParameters, chance: Chance, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        w = _like_gamma(parameters.shape, chance) - parameters.log_rate
        row = constrain(-w if self.inverse else w, _first(c), (ABOVE,))[None]
        return row, self.log_prob(parameters, row, c)

    def log_prob(self, parameters: GammaParameters, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        z, log_slope = unconstrain(row[0], _first(c), (ABOVE,))
        w = -z if self.inverse else z
        return _log_like_gamma(parameters.shape, w + parameters.log_rate) - log_slope


def _like_gamma(a: Array, chance: Chance) -> Array:
    """The logarithm of about a gamma number of shape a and rate one."""
    small = jnp.minimum(a, LIKE_NORMAL)
    power = jnp.log(chance.uniform[0]) / small
    one_tail = jnp.log(-jnp.log1p(-jnp.exp(power)))
    one_tail = jnp.where(power < -10, power, one_tail) + jnp.log(_tail(small))
    d = _cubed(a)
    cube = jnp.log(d) + 3 * jnp.log(jnp.abs(1 + chance.normal[0] / (3 * jnp.sqrt(d))))
    return jnp.where(a < LIKE_NORMAL, one_tail, cube)


def _log_like_gamma(a: Array, w: Array) -> Array:
    """Log density of that logarithm."""
    return jnp.where(a < LIKE_NORMAL, _log_one_tail(a, w), _log_cube(a, w))


def _tail(a: Array) -> Array:
    """1 / λ, for about the least variance of the weights (found by quadrature)."""
    return 0.69 + 0.31 * a


def _cubed(a: Array) -> Array:
    """d, with d (1 + n / 3√d)³ about a gamma number of shape a if n is a normal one."""
    return jnp.maximum(a, LIKE_NORMAL) - 1 / 3


def _log_one_tail(a: Array, log_x: Array) -> Array:
    small = jnp.minimum(a, LIKE_NORMAL)
    tail = _tail(small)
    log_y = log_x - jnp.log(tail)
    y = jnp.exp(jnp.minimum(log_y, 80.0))
    # log (1 - exp(-y)), of which nothing is left by rounding where y is small
    rest = jnp.where(y < 0.01, log_y - y / 2, jnp.log(1 - jnp.exp(-jnp.maximum(y, 0.01))))
    return jnp.log(small) + (small - 1) * rest - y + log_y


def _log_cube(a: Array, log_x: Array) -> Array:
    d = _cubed(a)
    log_d = jnp.log(d)
    log_root = (jnp.minimum(log_x, 80.0) - log_d) / 3
    root = jnp.exp(log_root)
    n = jnp.clip(3 * jnp.sqrt(d) * (root - 1), -1e9, 1e9)
    # a number and its mirror image lead to the same cube
    mirrored = jnp.log(1 + jnp.exp(-18 * d * root))
    density: Array = mirrored - 0.5 * n**2 + log_root + 0.5 * log_d - 0.5 * np.log(2 * np.pi)
    return density


class BetaParameters(NamedTuple):
    """The two shapes."""

    a: Float[Array, "*rows"]
    b: Float[Array, "*rows"]


# Shapes that are at least so large, and differ by less than such a factor, make the logit about
# normal; elsewhere the likeness of a gamma is nearer.
LOGIT_NORMAL, LOGIT_RATIO = 3.0, 3.0
# How far from the ends the two places are at which slopes are taken.
FROM_ENDS = 1e-3


@dataclass(frozen=True)
class Beta:
    """Beta(x | a, b), 0 < x < 1: x (1 - x) · slope is the line a - 1 - (a + b - 2) x.

    Where a ≤ b, -log(1 - x) is about a gamma number of shape a and rate b + (a - 1) / 2, exactly so
    for a = 1; where b < a, -log x is. The weights correct what is left.
    """

    name: str = "beta"
    evaluations: int = 4
    wide: bool = True

    def uniforms(self, coordinates: int) -> int:  # noqa: D102
        return coordinates

    def parameters(self, target: Target, start: Array) -> BetaParameters:
        """From the slopes near both ends."""
        score = scores_of(target)
        near, far = jnp.full_like(start, FROM_ENDS), jnp.full_like(start, 1 - FROM_ENDS)
        low, high = ((x * (1 - x) * score(x))[..., 0] for x in (near, far))
        slope = (high - low) / (1 - 2 * FROM_ENDS)
        a, b = low - slope * FROM_ENDS + 1, -(high + slope * FROM_ENDS) + 1
        sound = (a > 0) & (b > 0) & jnp.isfinite(a) & jnp.isfinite(b)
        return BetaParameters(jnp.where(sound, a, 1.0), jnp.where(sound, b, 1.0))

    def draw(  # noqa: D102
        self, parameters: BetaParameters, chance: Chance, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        small, rate = _smaller(parameters)
        w = _like_gamma(small, chance) - jnp.log(rate)
        y = jnp.exp(jnp.minimum(w, 80.0))
        # log(e^y - 1), of which nothing is left by rounding where y is small
        z = jnp.where(y < 0.01, w + y / 2, y + jnp.log(1 - jnp.exp(-jnp.maximum(y, 0.01))))
        z = jnp.where(parameters.a <= parameters.b, z, -z)
        centre, scale = _logit(parameters)
        z = jnp.where(_is_balanced(parameters), centre + scale * chance.normal[0], z)
        row = constrain(z, _first(c), (BETWEEN,))[None]
        return row, self.log_prob(parameters, row, c)

    def log_prob(self, parameters: BetaParameters, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        z, log_slope = unconstrain(row[0], _first(c), (BETWEEN,))
        small, rate = _smaller(parameters)
        turned = jnp.where(parameters.a <= parameters.b, z, -z)
        y = jnp.maximum(turned, 0) + jnp.log1p(jnp.exp(-jnp.abs(turned)))
        w = jnp.where(turned < -10, turned, jnp.log(y))
        skewed = _log_like_gamma(small, w + jnp.log(rate)) + turned - y - w
        centre, scale = _logit(parameters)
        gap = jnp.clip((z - centre) / scale, -1e9, 1e9)
        normal = -0.5 * gap**2 - jnp.log(scale) - 0.5 * np.log(2 * np.pi)
        return jnp.where(_is_balanced(parameters), normal, skewed) - log_slope


def _smaller(parameters: BetaParameters) -> tuple[Array, Array]:
    """The smaller shape, and the rate of the gamma that goes with it."""
    small, large = jnp.minimum(*parameters), jnp.maximum(*parameters)
    # where both are small, the tail is the larger's own
    return small, jnp.maximum(large + (small - 1) / 2, large * _tail(jnp.minimum(small, 1.0)))


def _logit(parameters: BetaParameters) -> tuple[Array, Array]:
    """Mean and standard deviation of the logit, of shapes that are not small."""
    a, b = (jnp.maximum(shape, 1.0) - 0.5 for shape in parameters)
    return jnp.log(a / b), jnp.sqrt(1 / a + 1 / b)


def _is_balanced(parameters: BetaParameters) -> Array:
    small, large = jnp.minimum(*parameters), jnp.maximum(*parameters)
    return (small > LOGIT_NORMAL) & (large < LOGIT_RATIO * small)


def _first(c: Coordinate[Array]) -> Coordinate[Array]:
    return Coordinate(*(column[0] for column in c))
