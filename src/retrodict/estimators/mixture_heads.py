"""Heads of real and integer coordinates: mixtures with a defensive component of fixed weight."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array

from retrodict._xla.batch_last import along_first, sum_features
from retrodict.estimators.heads import choose, compress, positions, select
from retrodict.estimators.scalar_bijections import Coordinate, constrain, unconstrain

# Scales of mixture components, in prior scales. A posterior is seldom 10⁴ times narrower than its
# prior, and an unbounded density would collapse onto single training points.
MIN_LOG_SCALE, MAX_LOG_SCALE = -9.0, 5.0


@dataclass(frozen=True)
class Mixture:
    """Gaussians and a defensive Cauchy on a standardised unconstrained coordinate.

        q(z) = (1 − w) Σ_d α_d N(u | μ_d, σ_d²) / s + w Cauchy(u | 0, 1) / s,   u = (z − m) / s

    with m, s the prior's centre and scale. The Cauchy has tails as heavy as any distribution in
    common use. The means and scales of every second Gaussian are relative to the coordinate's
    anchor, if it has one: the location and scale that the model itself gives.

    Attributes:
        components: the number of Gaussians.
        defensive_share: w.
        bijections: codes of the coordinates' bijections.
    """

    components: int
    defensive_share: float
    bijections: tuple[int, ...]
    span: int = 1
    num_features: int = 1
    num_uniforms: int = 2

    @property
    def num_params(self) -> int:  # noqa: D102
        return 3 * self.components

    def initial_bias(self) -> np.ndarray:  # noqa: D102
        return _initial_components(self.components)

    def _anchored_components(
        self, params: Array, c: Coordinate[Array]
    ) -> tuple[Array, Array, Array]:
        log_weights, means, log_scales = _components(params)
        anchored = positions(means) % 2 == 0
        means = jnp.where(anchored, c.shift + c.stretch * means, means)
        return log_weights, means, log_scales + jnp.where(anchored, jnp.log(c.stretch), 0.0)

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        z, log_slope = unconstrain(value, c, self.bijections)
        # Clipped where there is no mass to speak of, so that squares stay finite.
        u = jnp.clip((z - c.centre) / c.scale, -1e9, 1e9)
        log_weights, means, log_scales = self._anchored_components(params, c)
        offsets = (u - means) * jnp.exp(-log_scales)
        gaussians = _logsumexp(log_weights - log_scales - 0.5 * offsets**2)
        gaussians -= 0.5 * np.log(2 * np.pi)
        cauchy = -jnp.log1p(u**2) - np.log(np.pi)
        share = self.defensive_share
        log_q = jnp.logaddexp(np.log1p(-share) + gaussians, np.log(share) + cauchy)
        return log_q - jnp.log(c.scale) - log_slope

    def noise(self, uniform: Array) -> Array:
        """A number that chooses the component, below zero the Cauchy, and a standard draw of it."""
        defensive = uniform[0] < self.defensive_share
        angle = np.pi * (uniform[1] - 0.5)
        # XLA evaluates a tangent one number at a time, and again at every use.
        cauchy = jnp.sin(angle) / jnp.cos(angle)
        standard = jnp.where(defensive, cauchy, ndtri(uniform[1]))
        return _pair((uniform[0] - self.defensive_share) / (1 - self.defensive_share), standard)

    def sample(self, params: Array, noise: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        log_weights, means, log_scales = self._anchored_components(params, c)
        choice = choose(jnp.exp(log_weights), noise[0])
        defensive = noise[0] < 0
        mean = jnp.where(defensive, 0, select(choice, means))
        log_scale = jnp.where(defensive, 0, select(choice, log_scales))
        u = mean + jnp.exp(log_scale) * noise[1]
        return constrain(c.centre + c.scale * u, c, self.bijections)

    def location(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return unconstrain(value, c, self.bijections)[0]

    def features(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return compress((self.location(value, c) - c.centre) / c.scale)[None]


@dataclass(frozen=True)
class Count:
    """Discretised logistic distributions of the logarithm of a count in {0, 1, …, upper}.

        P(n) = F(log(n + ½)) − F(log(n − ½)),   F a mixture of logistic distribution functions

    The first and last cells extend to minus and plus infinity, so that the sum is exactly one for
    any bound. A defensive logistic of fixed weight spans the prior.

    Attributes:
        components: the number of other logistics.
        defensive_share: weight of the defensive one.
    """

    components: int
    defensive_share: float
    span: int = 1
    num_features: int = 1
    num_uniforms: int = 2

    @property
    def num_params(self) -> int:  # noqa: D102
        return 3 * self.components

    def initial_bias(self) -> np.ndarray:  # noqa: D102
        return _initial_components(self.components)

    def _all_components(self, params: Array) -> tuple[Array, Array, Array]:
        log_weights, means, log_scales = _components(params)

        def append(values: Array, defensive: float) -> Array:
            return jnp.concatenate([values, jnp.full_like(values[:1], defensive)])

        share = self.defensive_share
        log_weights = append(log_weights + np.log1p(-share), np.log(share))
        return log_weights, append(means, 0.0), append(log_scales, 0.0)

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        log_weights, means, log_scales = self._all_components(params)
        first, last = value <= 0, value >= c.upper
        lower_edge = jnp.where(first, 0.5, value - 0.5)
        precision = jnp.exp(-log_scales)

        def standardise(edge: Array) -> Array:
            return ((jnp.log(edge) - c.centre) / c.scale - means) * precision

        # σ(b) − σ(a) = σ(b) σ(−a) (1 − exp(a − b)), with b − a free of cancellation
        width = jnp.log1p(1 / lower_edge) / c.scale * precision
        log_cells = (
            jnp.where(last, 0.0, jax.nn.log_sigmoid(standardise(value + 0.5)))
            + jnp.where(first, 0.0, jax.nn.log_sigmoid(-standardise(lower_edge)))
            + jnp.where(first | last, 0.0, jnp.log(-jnp.expm1(-width)))
        )
        return _logsumexp(log_weights + log_cells)

    def noise(self, uniform: Array) -> Array:
        """A number that chooses the component, and a standard logistic draw."""
        logit = jnp.log(uniform[1]) - jnp.log1p(-uniform[1])
        return _pair(uniform[0], logit)

    def sample(self, params: Array, noise: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        log_weights, means, log_scales = self._all_components(params)
        choice = choose(jnp.exp(log_weights), noise[0])
        u = select(choice, means) + jnp.exp(select(choice, log_scales)) * noise[1]
        largest = np.log(np.finfo(u.dtype).max) - 1
        count = jnp.exp(jnp.minimum(c.centre + c.scale * u, largest))
        return jnp.clip(jnp.floor(count + 0.5), 0.0, jnp.minimum(c.max_value, c.upper))

    def location(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.log(value + 0.5)

    def features(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return compress((self.location(value, c) - c.centre) / c.scale)[None]


def _initial_components(components: int) -> np.ndarray:
    # Components that start equal stay equal, so they start spread over the prior.
    means = np.linspace(-1.5, 1.5, components) if components > 1 else np.zeros(1)
    log_scale = np.log(0.7) if components > 1 else 0.0
    return np.concatenate([np.zeros(components), means, np.full(components, log_scale)])


def _components(params: Array) -> tuple[Array, Array, Array]:
    """Log weights, means and log scales of mixture components."""
    logits, means, log_scales = jnp.split(params, 3)
    excess = log_scales - MIN_LOG_SCALE
    # A softplus; log1p would be exact to more digits than are kept, and takes XLA longer.
    excess = jnp.maximum(excess, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(excess)))
    log_scales = jnp.minimum(MIN_LOG_SCALE + excess, MAX_LOG_SCALE)
    return logits - _logsumexp(logits), _scale_gradient(means, log_scales), log_scales


@jax.custom_jvp
def _scale_gradient(means: Array, log_scales: Array) -> Array:
    """The means, with gradients multiplied by σ.

    The gradient of log q in a mean grows as 1/σ, so that examples with narrow posteriors would
    dominate all others. The scaled gradient has the same zeros: Seitzer et al. 2022, "On the
    pitfalls of heteroscedastic uncertainty estimation with probabilistic neural networks".
    """
    return means


@_scale_gradient.defjvp
def _scale_gradient_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    means, log_scales = primals
    return means, jnp.exp(jnp.minimum(log_scales, 0.0)) * tangents[0]


def _logsumexp(logs: Array) -> Array:
    """log Σ exp over the first axis."""
    largest = jax.lax.stop_gradient(jnp.max(logs, 0))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    total: Array = largest + jnp.log(sum_features(jnp.exp(logs - largest)))
    return total


def _pair(first: Array, second: Array) -> Array:
    """Stack two arrays; XLA would compute a `jnp.stack` one number at a time."""
    is_first = along_first(np.array([True, False]), first[None])
    return jnp.where(is_first, first, second)
