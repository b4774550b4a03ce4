"""Heads of coordinates with finitely many values, mixed with a uniform distribution."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from retrodict._xla.batch_last import sum_features
from retrodict.estimators.bit_patterns import pattern_number, patterns
from retrodict.estimators.heads import cumulative_weights, positions, select
from retrodict.estimators.scalar_bijections import Coordinate


@dataclass(frozen=True)
class Bernoulli:
    """P(1) = (1 − floor) sigmoid(logit) + floor / 2."""

    floor: float
    span: int = 1
    num_params: int = 1
    num_features: int = 1
    num_uniforms: int = 1

    def initial_bias(self) -> np.ndarray:  # noqa: D102
        return np.zeros(1)

    def _probability(self, logit: Array) -> Array:
        return (1 - self.floor) * jax.nn.sigmoid(logit) + self.floor / 2

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.log(self._probability(jnp.where(value > 0.5, params[0], -params[0])))

    def noise(self, uniform: Array) -> Array:  # noqa: D102
        return uniform

    def sample(self, params: Array, noise: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return (noise[0] < self._probability(params[0])).astype(params.dtype)

    def location(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.zeros_like(value)

    def features(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return 2 * value[None] - 1


@dataclass(frozen=True)
class Bits:
    """P(x) = (1 − floor) softmax(logits)_x + floor / 2ᵏ, for all patterns x of k bits."""

    span: int
    floor: float
    num_uniforms: int = 1

    @property
    def num_params(self) -> int:  # noqa: D102
        return int(2**self.span)

    @property
    def num_features(self) -> int:  # noqa: D102
        return self.span

    def initial_bias(self) -> np.ndarray:  # noqa: D102
        return np.zeros(self.num_params)

    def _probabilities(self, params: Array) -> Array:
        weights = jnp.exp(params - jax.lax.stop_gradient(jnp.max(params, 0)))
        softmax = weights / sum_features(weights)
        return (1 - self.floor) * softmax + self.floor / self.num_params

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        is_value = positions(params) == pattern_number(value)
        return jnp.log(select(is_value, self._probabilities(params)))

    def noise(self, uniform: Array) -> Array:  # noqa: D102
        return uniform

    def sample(self, params: Array, noise: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        passed = cumulative_weights(self._probabilities(params)) < noise[0]
        # The chosen pattern is the sum of the differences between consecutive patterns up to it.
        differences = np.diff(patterns(self.span), axis=0).T.astype(params.dtype)
        return jnp.tensordot(differences, passed.astype(params.dtype), 1)

    def location(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.zeros_like(value)

    def features(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return 2 * value - 1


@dataclass(frozen=True)
class Categorical:
    """P(k) = (1 − floor) softmax(logits)_k + floor / K, for K = upper + 1 categories.

    Coordinates that share the head may differ in K, which is at most `num_params`.
    """

    num_params: int
    floor: float
    span: int = 1
    num_uniforms: int = 1

    @property
    def num_features(self) -> int:  # noqa: D102
        return self.num_params

    def initial_bias(self) -> np.ndarray:  # noqa: D102
        return np.zeros(self.num_params)

    def _probabilities(self, params: Array, c: Coordinate[Array]) -> Array:
        exists = positions(params) <= c.upper
        softmax = jax.nn.softmax(jnp.where(exists, params, -jnp.inf), 0)
        return jnp.where(exists, (1 - self.floor) * softmax + self.floor / (c.upper + 1), 0.0)

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.log(jnp.sum(self._probabilities(params, c) * self.features(value, c), 0))

    def noise(self, uniform: Array) -> Array:  # noqa: D102
        return uniform

    def sample(self, params: Array, noise: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        passed = jnp.cumsum(self._probabilities(params, c), 0) < noise[0]
        return jnp.minimum(jnp.sum(passed, 0), c.upper).astype(params.dtype)

    def location(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        return jnp.zeros_like(value)

    def features(self, value: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        categories = np.arange(self.num_params).reshape(-1, *(1,) * jnp.ndim(value))
        return jnp.equal(value, categories).astype(c.centre.dtype)
