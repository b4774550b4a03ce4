"""Parameters from the network in; a coordinate's log density, or a draw of it, out (sec. 3.3).

A head is the last stage of the network for one coordinate: it takes `size` numbers along the first
axis and reads a density from them; axes behind it are rows, all alike. Draws are made from numbers
that no parameter has a say in, so that a sampler can make all its noise beforehand. Every head
keeps a share of its mass where training cannot remove it, which bounds the importance weights where
the network has seen no data.
"""

from dataclasses import dataclass
from itertools import product
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array, Float

from retrodict._xla.batch_last import sum_features
from retrodict.estimators.scalar_bijections import Coordinate, constrain, unconstrain

# Scales of mixture components, in prior scales: a posterior is seldom 10⁴ times narrower than its
# prior, and a density that may grow without limit ends in a spike on one training point.
SMALLEST_LOG_SCALE, LARGEST_LOG_SCALE = -9.0, 5.0


def compress(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """Linear within five scales, logarithmic beyond: no finite value can drown the others."""
    size = jnp.maximum(jnp.abs(u), 5.0)
    return jnp.where(jnp.abs(u) <= 5.0, u, jnp.sign(u) * (5.0 + jnp.log(size / 5.0)))


class Head(Protocol):
    """The density of a coordinate, or of a few at once, read from `size` parameters."""

    @property
    def span(self) -> int:
        """How many coordinates; if more than one, values have an axis of them."""

    @property
    def size(self) -> int:
        """How many parameters the network must give."""

    @property
    def features(self) -> int:
        """How many numbers tell later coordinates of a drawn value."""

    @property
    def uniforms(self) -> int:
        """How many uniform numbers a draw needs."""

    def bias(self) -> np.ndarray:
        """Parameters to start training from."""

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:
        """log q(value), with the Jacobian of the coordinate's curve."""

    def chance(self, uniform: Array) -> Array:
        """What a draw is made from, as many numbers along the first axis as are uniform."""

    def draw(self, params: Array, chance: Array, c: Coordinate[Array]) -> Array:
        """The value that some `chance` leads to."""

    def location(self, value: Array, c: Coordinate[Array]) -> Array:
        """The value where it is centred and scaled; zero if it is not."""

    def feature(self, value: Array, c: Coordinate[Array]) -> Array:
        """The value as later coordinates see it."""


def along_first(values: np.ndarray, like: Array) -> np.ndarray:
    """Constants along the first axis, beside an array that has rows."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _places(like: Array) -> np.ndarray:
    return along_first(np.arange(like.shape[0]), like)


def _pair(first: Array, second: Array) -> Array:
    """Two arrays as one; what XLA merges with `jnp.stack` is computed one number at a time."""
    here = along_first(np.array([True, False]), first[None])
    return jnp.where(here, first, second)


def _ends(weights: Array) -> Array:
    """Where the share of each but the last ends."""
    # few weights are added up quicker by a product than by a scan
    before = np.tril(np.ones((weights.shape[0] - 1, weights.shape[0]), weights.dtype))
    return jnp.tensordot(before, weights, 1)


def _pick(weights: Array, uniform: Array) -> Array:
    """Choice by inverse transform: true at one place."""
    return jnp.sum(_ends(weights) < uniform, 0) == _places(weights)


def _chosen(choice: Array, values: Array) -> Array:
    return sum_features(jnp.where(choice, values, 0))


def _log_total(logs: Array) -> Array:
    """log Σ exp, over the first axis."""
    most = jax.lax.stop_gradient(jnp.max(logs, 0))
    most = jnp.where(jnp.isfinite(most), most, 0)
    found: Array = most + jnp.log(sum_features(jnp.exp(logs - most)))
    return found


def _components(params: Array) -> tuple[Array, Array, Array]:
    logits, means, scales = jnp.split(params, 3)
    above = scales - SMALLEST_LOG_SCALE
    # softplus; log1p would be exact to more digits than are kept, and takes XLA longer
    above = jnp.maximum(above, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(above)))
    scales = SMALLEST_LOG_SCALE + above
    scales = jnp.minimum(scales, LARGEST_LOG_SCALE)
    return logits - _log_total(logits), _sloped(means, scales), scales


@jax.custom_jvp
def _sloped(means: Array, log_scales: Array) -> Array:
    """The means, with slopes in units of σ.

    The slope of log q in a mean grows as 1/σ, so that rows with narrow posteriors would drown all
    others. Slopes in units of σ leave values, and what is optimal, as they are: Seitzer et al.
    2022, "On the pitfalls of heteroscedastic uncertainty estimation".
    """
    return means


@_sloped.defjvp
def _sloped_slope(at: tuple[Array, Array], moved: tuple[Array, Array]) -> tuple[Array, Array]:
    means, log_scales = at
    return means, jnp.exp(jnp.minimum(log_scales, 0.0)) * moved[0]


def _component_bias(components: int) -> np.ndarray:
    # Components that start alike stay alike, so they start spread over the prior.
    spread = np.linspace(-1.5, 1.5, components) if components > 1 else np.zeros(1)
    log_scale = np.log(0.7) if components > 1 else 0.0
    return np.concatenate([np.zeros(components), spread, np.full(components, log_scale)])


@dataclass(frozen=True)
class Mixture:
    """Gaussians and one Cauchy of fixed weight, on a standardised unconstrained coordinate.

        q(z) = (1 - w) Σ_d α_d N(u | μ_d, σ_d²) / s + w Cauchy(u | 0, 1) / s,   u = (z - m) / s

    with m, s the prior's centre and scale. The Cauchy's tail is as heavy as any in common use. The
    means and scales of every second Gaussian are relative to the coordinate's anchor, where it has
    one: the place and scale that the model itself expects.
    """

    components: int
    wide: float
    curves: tuple[int, ...]
    span: int = 1
    features: int = 1
    uniforms: int = 2

    @property
    def size(self) -> int:  # noqa: D102
        return 3 * self.components

    def bias(self) -> np.ndarray:  # noqa: D102
        return _component_bias(self.components)

    def _anchored(self, params: Array, c: Coordinate[Array]) -> tuple[Array, Array, Array]:
        log_weights, means, log_scales = _components(params)
        held = _places(means) % 2 == 0
        means = jnp.where(held, c.shift + c.stretch * means, means)
        return log_weights, means, log_scales + jnp.where(held, jnp.log(c.stretch), 0.0)

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        z, log_slope = unconstrain(value, c, self.curves)
        # beyond this there is no mass to speak of, and squares stay finite
        u = jnp.clip((z - c.centre) / c.scale, -1e9, 1e9)
        log_weights, means, log_scales = self._anchored(params, c)
        offsets = (u - means) * jnp.exp(-log_scales)
        narrow = _log_total(log_weights - log_scales - 0.5 * offsets**2)
        narrow -= 0.5 * np.log(2 * np.pi)
        cauchy = -jnp.log1p(u**2) - np.log(np.pi)
        log_q = jnp.logaddexp(np.log1p(-self.wide) + narrow, np.log(self.wide) + cauchy)
        return log_q - jnp.log(c.scale) - log_slope

    def chance(self, uniform: Array) -> Array:
        """The first number chooses a component, below zero the wide one, which the second suits."""
        is_wide = uniform[0] < self.wide
        angle = np.pi * (uniform[1] - 0.5)
        # XLA's tangent is worked out one number at a time, and again wherever it is used
        cauchy = jnp.sin(angle) / jnp.cos(angle)
        standard = jnp.where(is_wide, cauchy, ndtri(uniform[1]))
        return _pair((uniform[0] - self.wide) / (1 - self.wide), standard)

    def draw(self, params: Array, chance: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        log_weights, means, log_scales = self._anchored(params, c)
        chosen = _pick(jnp.exp(log_weights), chance[0])
        mean, log_scale = _chosen(chosen, means), _chosen(chosen, log_scales)
        u = (
            jnp.where(chance[0] < 0, 0, mean)
            + jnp.exp(jnp.where(chance[0] < 0, 0, log_scale)) * chance[1]
        )
        return constrain(c.centre + c.scale * u, c, self.curves)

    def location(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return unconstrain(value, c, self.curves)[0]

    def feature(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return compress((self.location(value, c) - c.centre) / c.scale)[None]


@dataclass(frozen=True)
class Bernoulli:
    """P(1) = (1 - floor) sigmoid(logit) + floor / 2."""

    floor: float
    span: int = 1
    size: int = 1
    features: int = 1
    uniforms: int = 1

    def bias(self) -> np.ndarray:  # noqa: D102
        return np.zeros(1)

    def _probability(self, logit: Array) -> Array:
        return (1 - self.floor) * jax.nn.sigmoid(logit) + self.floor / 2

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.log(self._probability(jnp.where(value > 0.5, params[0], -params[0])))

    def chance(self, uniform: Array) -> Array:  # noqa: D102
        return uniform

    def draw(self, params: Array, chance: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return (chance[0] < self._probability(params[0])).astype(params.dtype)

    def location(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.zeros_like(value)

    def feature(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return 2 * value[None] - 1


def patterns(span: int) -> np.ndarray:
    """All values of a few bits, one a row."""
    return np.array(list(product((0.0, 1.0), repeat=span)))


def block_sizes(bits: int, largest: int) -> tuple[int, ...]:
    """Cut bits into blocks of at most `largest`, none of them a single bit if there are others."""
    rest = bits % largest
    if rest == 1 < bits:
        rest += largest
        return (largest,) * ((bits - rest) // largest) + (rest - rest // 2, rest // 2)
    return (largest,) * (bits // largest) + (rest,) * (rest > 0)


@dataclass(frozen=True)
class Bits:
    """P(x) = (1 - floor) softmax(logits)_x + floor / 2ᵏ, for all patterns x of k bits at once."""

    span: int
    floor: float
    uniforms: int = 1

    @property
    def size(self) -> int:  # noqa: D102
        return int(2**self.span)

    @property
    def features(self) -> int:  # noqa: D102
        return self.span

    def bias(self) -> np.ndarray:  # noqa: D102
        return np.zeros(self.size)

    def _probabilities(self, params: Array) -> Array:
        raised = jnp.exp(params - jax.lax.stop_gradient(jnp.max(params, 0)))
        return (1 - self.floor) * raised / sum_features(raised) + self.floor / self.size

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        place = jnp.tensordot(2.0 ** np.arange(self.span)[::-1], value, 1)
        return jnp.log(_chosen(_places(params) == place, self._probabilities(params)))

    def chance(self, uniform: Array) -> Array:  # noqa: D102
        return uniform

    def draw(self, params: Array, chance: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        passed = _ends(self._probabilities(params)) < chance[0]
        # from each pattern to the next, as far as they are passed
        onward = np.diff(patterns(self.span), axis=0).T.astype(params.dtype)
        return jnp.tensordot(onward, passed.astype(params.dtype), 1)

    def location(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.zeros_like(value)

    def feature(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return 2 * value - 1


@dataclass(frozen=True)
class Categorical:
    """P(k) = (1 - floor) softmax(logits)_k + floor / K, for the K = upper + 1 values there are."""

    size: int
    floor: float
    span: int = 1
    uniforms: int = 1

    @property
    def features(self) -> int:  # noqa: D102
        return self.size

    def bias(self) -> np.ndarray:  # noqa: D102
        return np.zeros(self.size)

    def _probabilities(self, params: Array, c: Coordinate[Array]) -> Array:
        # coordinates of one run may differ in how many values they have
        there = _places(params) <= c.upper
        soft = jax.nn.softmax(jnp.where(there, params, -jnp.inf), 0)
        return jnp.where(there, (1 - self.floor) * soft + self.floor / (c.upper + 1), 0.0)

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.log(jnp.sum(self._probabilities(params, c) * self.feature(value, c), 0))

    def chance(self, uniform: Array) -> Array:  # noqa: D102
        return uniform

    def draw(self, params: Array, chance: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        below = jnp.cumsum(self._probabilities(params, c), 0) < chance[0]
        return jnp.minimum(jnp.sum(below, 0), c.upper).astype(params.dtype)

    def location(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.zeros_like(value)

    def feature(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        places = np.arange(self.size).reshape(-1, *(1,) * jnp.ndim(value))
        return jnp.equal(value, places).astype(c.centre.dtype)


@dataclass(frozen=True)
class Count:
    """Logistics on the logarithm of a count, cut into cells: all of {0, 1, …, upper} has mass.

        P(n) = F(log(n + ½)) - F(log(n - ½)),   F a mixture of logistic distribution functions

    whose first and last cells reach to minus and plus infinity, so that the sum is exactly one
    whatever the bound. One logistic of fixed weight spans the prior.
    """

    components: int
    wide: float
    span: int = 1
    features: int = 1
    uniforms: int = 2

    @property
    def size(self) -> int:  # noqa: D102
        return 3 * self.components

    def bias(self) -> np.ndarray:  # noqa: D102
        return _component_bias(self.components)

    def _with_wide(self, params: Array) -> tuple[Array, Array, Array]:
        log_weights, means, log_scales = _components(params)

        def and_wide(values: Array, wide: float) -> Array:
            return jnp.concatenate([values, jnp.full_like(values[:1], wide)])

        log_weights = and_wide(log_weights + np.log1p(-self.wide), np.log(self.wide))
        return log_weights, and_wide(means, 0.0), and_wide(log_scales, 0.0)

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        log_weights, means, log_scales = self._with_wide(params)
        first, last = value <= 0, value >= c.upper
        floor = jnp.where(first, 0.5, value - 0.5)
        precision = jnp.exp(-log_scales)

        def standard(edge: Array) -> Array:
            return ((jnp.log(edge) - c.centre) / c.scale - means) * precision

        # σ(b) - σ(a) = σ(b) σ(-a) (1 - exp(a - b)), with b - a free of cancellation
        width = jnp.log1p(1 / floor) / c.scale * precision
        log_cells = (
            jnp.where(last, 0.0, jax.nn.log_sigmoid(standard(value + 0.5)))
            + jnp.where(first, 0.0, jax.nn.log_sigmoid(-standard(floor)))
            + jnp.where(first | last, 0.0, jnp.log(-jnp.expm1(-width)))
        )
        return _log_total(log_weights + log_cells)

    def chance(self, uniform: Array) -> Array:  # noqa: D102
        logit = jnp.log(uniform[1]) - jnp.log1p(-uniform[1])
        return _pair(uniform[0], logit)

    def draw(self, params: Array, chance: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        log_weights, means, log_scales = self._with_wide(params)
        chosen = _pick(jnp.exp(log_weights), chance[0])
        u = _chosen(chosen, means) + jnp.exp(_chosen(chosen, log_scales)) * chance[1]
        largest = np.log(np.finfo(u.dtype).max) - 1
        count = jnp.exp(jnp.minimum(c.centre + c.scale * u, largest))
        return jnp.clip(jnp.floor(count + 0.5), 0.0, jnp.minimum(c.max_value, c.upper))

    def location(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.log(value + 0.5)

    def feature(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return compress((self.location(value, c) - c.centre) / c.scale)[None]
