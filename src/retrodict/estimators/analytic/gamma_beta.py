"""Gamma and beta conditionals, sampled through approximations of fixed cost.

Exact gamma samplers are rejection samplers with an unbounded number of iterations. The families
here sample from approximations that need one iteration, have a density in closed form and tails as
heavy as the exact ones. The importance weights correct the difference, at a cost of at most half a
percent of the draws for a gamma and two percent for a beta.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict.estimators.analytic.family import ConditionalTarget, Randomness
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


# Below this shape one approximation is closer, above it the other; here both lose 0.4 % of the
# effective draws.
CUBE_FROM_SHAPE = 2.0
# Factor between the typical value and the two points at which gradients are taken.
POINT_RATIO = 1e4


@dataclass(frozen=True)
class Gamma:
    """Gamma(x | a, b), or that of 1/x if `inverse`: x·∇log γ is linear in x, or in 1/x.

    For a < 2, the approximation is x = -log(1 - U^{1/a}) / λ, with the density
    a λ (1 - e^{-λx})^{a-1} e^{-λx} (Kundu & Gupta 2007); above, the cube of a normal
    variable, the proposal of which Marsaglia & Tsang (2000) accept nearly all draws.
    """

    inverse: bool = False
    evaluations: int = 4
    defensive: bool = True

    @property
    def name(self) -> str:  # noqa: D102
        return "inverse gamma" if self.inverse else "gamma"

    def num_uniforms(self, coordinates: int) -> int:  # noqa: D102
        return coordinates

    def parameters(self, target: ConditionalTarget, start: Array) -> GammaParameters:
        """From gradients at two points: in w = ±log x, ∇log γ = a − b e^w."""
        score, sign = target.score, -1.0 if self.inverse else 1.0
        places = (start / POINT_RATIO, start * POINT_RATIO)
        few, many = places if sign > 0 else places[::-1]  # of e^w
        low, high = (sign * (x * score(x) + 1)[..., 0] for x in (few, many))
        near, far = (x[..., 0] ** sign for x in (few, many))
        rate = (low - high) / (far - near)
        shape = low + rate * near
        sound = (shape > 0) & (rate > 0) & jnp.isfinite(shape) & jnp.isfinite(rate)
        rate = jnp.where(sound, rate, start[..., 0] ** -sign)
        return GammaParameters(jnp.where(sound, shape, 1.0), jnp.log(rate))

    def sample(  # noqa: D102
        self, parameters: GammaParameters, randomness: Randomness, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        w = _approximate_gamma(parameters.shape, randomness) - parameters.log_rate
        row = constrain(-w if self.inverse else w, _single(c), (ABOVE,))[None]
        return row, self.log_prob(parameters, row, c)

    def log_prob(self, parameters: GammaParameters, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        z, log_slope = unconstrain(row[0], _single(c), (ABOVE,))
        w = -z if self.inverse else z
        return _log_approximate_gamma(parameters.shape, w + parameters.log_rate) - log_slope


def _approximate_gamma(a: Array, randomness: Randomness) -> Array:
    """The logarithm of an approximate gamma variable of shape a and rate one."""
    small = jnp.minimum(a, CUBE_FROM_SHAPE)
    power = jnp.log(randomness.uniform[0]) / small
    one_tail = jnp.log(-jnp.log1p(-jnp.exp(power)))
    one_tail = jnp.where(power < -10, power, one_tail) + jnp.log(_tail(small))
    d = _cube_scale(a)
    cube = jnp.log(d) + 3 * jnp.log(jnp.abs(1 + randomness.normal[0] / (3 * jnp.sqrt(d))))
    return jnp.where(a < CUBE_FROM_SHAPE, one_tail, cube)


def _log_approximate_gamma(a: Array, w: Array) -> Array:
    """The log density of that logarithm."""
    return jnp.where(a < CUBE_FROM_SHAPE, _log_one_tail(a, w), _log_cube(a, w))


def _tail(a: Array) -> Array:
    """1/λ that nearly minimises the variance of the weights (found by quadrature)."""
    return 0.69 + 0.31 * a


def _cube_scale(a: Array) -> Array:
    """d such that d (1 + n/3√d)³ with n standard normal is nearly gamma of shape a."""
    return jnp.maximum(a, CUBE_FROM_SHAPE) - 1 / 3


def _log_one_tail(a: Array, log_x: Array) -> Array:
    small = jnp.minimum(a, CUBE_FROM_SHAPE)
    tail = _tail(small)
    log_y = log_x - jnp.log(tail)
    y = jnp.exp(jnp.minimum(log_y, 80.0))
    # log(1 − exp(−y)) without cancellation for small y.
    rest = jnp.where(y < 0.01, log_y - y / 2, jnp.log(1 - jnp.exp(-jnp.maximum(y, 0.01))))
    return jnp.log(small) + (small - 1) * rest - y + log_y


def _log_cube(a: Array, log_x: Array) -> Array:
    d = _cube_scale(a)
    log_d = jnp.log(d)
    log_root = (jnp.minimum(log_x, 80.0) - log_d) / 3
    root = jnp.exp(log_root)
    n = jnp.clip(3 * jnp.sqrt(d) * (root - 1), -1e9, 1e9)
    # A root and its mirror image have the same cube.
    mirrored = jnp.log(1 + jnp.exp(-18 * d * root))
    density: Array = mirrored - 0.5 * n**2 + log_root + 0.5 * log_d - 0.5 * np.log(2 * np.pi)
    return density


class BetaParameters(NamedTuple):
    """The two shapes."""

    a: Float[Array, "*rows"]
    b: Float[Array, "*rows"]


# The logit is nearly normal if both shapes are larger than this and differ by less than this
# factor; elsewhere the gamma approximation is closer.
LOGIT_NORMAL, LOGIT_RATIO = 3.0, 3.0
# Distance from the bounds of the two points at which gradients are taken.
FROM_BOUNDS = 1e-3


@dataclass(frozen=True)
class Beta:
    """Beta(x | a, b), 0 < x < 1: x (1 − x) ∇log γ = a − 1 − (a + b − 2) x.

    For a ≤ b, −log(1 − x) is nearly gamma of shape a and rate b + (a − 1)/2, exactly so for a = 1;
    for b < a, −log x is.
    """

    name: str = "beta"
    evaluations: int = 4
    defensive: bool = True

    def num_uniforms(self, coordinates: int) -> int:  # noqa: D102
        return coordinates

    def parameters(self, target: ConditionalTarget, start: Array) -> BetaParameters:
        """From gradients near both bounds."""
        score = target.score
        near, far = jnp.full_like(start, FROM_BOUNDS), jnp.full_like(start, 1 - FROM_BOUNDS)
        low, high = ((x * (1 - x) * score(x))[..., 0] for x in (near, far))
        slope = (high - low) / (1 - 2 * FROM_BOUNDS)
        a, b = low - slope * FROM_BOUNDS + 1, -(high + slope * FROM_BOUNDS) + 1
        sound = (a > 0) & (b > 0) & jnp.isfinite(a) & jnp.isfinite(b)
        return BetaParameters(jnp.where(sound, a, 1.0), jnp.where(sound, b, 1.0))

    def sample(  # noqa: D102
        self, parameters: BetaParameters, randomness: Randomness, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        small, rate = _smaller_shape(parameters)
        w = _approximate_gamma(small, randomness) - jnp.log(rate)
        y = jnp.exp(jnp.minimum(w, 80.0))
        # log(e^y − 1) without cancellation for small y.
        z = jnp.where(y < 0.01, w + y / 2, y + jnp.log(1 - jnp.exp(-jnp.maximum(y, 0.01))))
        z = jnp.where(parameters.a <= parameters.b, z, -z)
        centre, scale = _logit(parameters)
        z = jnp.where(_is_balanced(parameters), centre + scale * randomness.normal[0], z)
        row = constrain(z, _single(c), (BETWEEN,))[None]
        return row, self.log_prob(parameters, row, c)

    def log_prob(self, parameters: BetaParameters, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        z, log_slope = unconstrain(row[0], _single(c), (BETWEEN,))
        small, rate = _smaller_shape(parameters)
        turned = jnp.where(parameters.a <= parameters.b, z, -z)
        y = jnp.maximum(turned, 0) + jnp.log1p(jnp.exp(-jnp.abs(turned)))
        w = jnp.where(turned < -10, turned, jnp.log(y))
        skewed = _log_approximate_gamma(small, w + jnp.log(rate)) + turned - y - w
        centre, scale = _logit(parameters)
        gap = jnp.clip((z - centre) / scale, -1e9, 1e9)
        normal = -0.5 * gap**2 - jnp.log(scale) - 0.5 * np.log(2 * np.pi)
        return jnp.where(_is_balanced(parameters), normal, skewed) - log_slope


def _smaller_shape(parameters: BetaParameters) -> tuple[Array, Array]:
    """The smaller shape, and the rate of the corresponding gamma."""
    small, large = jnp.minimum(*parameters), jnp.maximum(*parameters)
    # If both are small, the tail is that of the larger.
    return small, jnp.maximum(large + (small - 1) / 2, large * _tail(jnp.minimum(small, 1.0)))


def _logit(parameters: BetaParameters) -> tuple[Array, Array]:
    """Mean and standard deviation of the logit for shapes that are not small."""
    a, b = (jnp.maximum(shape, 1.0) - 0.5 for shape in parameters)
    return jnp.log(a / b), jnp.sqrt(1 / a + 1 / b)


def _is_balanced(parameters: BetaParameters) -> Array:
    small, large = jnp.minimum(*parameters), jnp.maximum(*parameters)
    return (small > LOGIT_NORMAL) & (large < LOGIT_RATIO * small)


def _single(c: Coordinate[Array]) -> Coordinate[Array]:
    return Coordinate(*(column[0] for column in c))
