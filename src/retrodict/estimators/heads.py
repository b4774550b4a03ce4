"""The protocol of heads, which read the density of a coordinate from the network's outputs.

A head is the last stage of the network for one coordinate (Paige & Wood 2016, sec. 3.3). It takes
`num_params` numbers along the first axis; all further axes are rows. Draws are made from noise that
does not depend on the parameters, so that a sampler can make all noise beforehand. Every head has a
defensive component of fixed weight, which bounds the importance weights where the network has seen
no data.
"""

from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.batch_last import along_first, sum_features
from retrodict.estimators.scalar_bijections import Coordinate


class Head(Protocol):
    """The density of a coordinate, or of a few at once, given its parameters."""

    @property
    def span(self) -> int:
        """The number of coordinates; if more than one, values have a first axis of coordinates."""

    @property
    def num_params(self) -> int:
        """The number of parameters that the network gives."""

    @property
    def num_features(self) -> int:
        """The number of features by which later coordinates see a value."""

    @property
    def num_uniforms(self) -> int:
        """The number of uniform random numbers that a draw needs."""

    def initial_bias(self) -> np.ndarray:
        """Parameters at the start of training."""

    def log_prob(self, params: Array, value: Array, c: Coordinate[Array]) -> Array:
        """The log density of a value, with the Jacobian of the coordinate's bijection."""

    def noise(self, uniform: Array) -> Array:
        """Transform uniform numbers, along the first axis, to the noise of a draw."""

    def sample(self, params: Array, noise: Array, c: Coordinate[Array]) -> Array:
        """The value drawn with some noise."""

    def location(self, value: Array, c: Coordinate[Array]) -> Array:
        """The value on the scale on which it is standardised; zero if it is not."""

    def features(self, value: Array, c: Coordinate[Array]) -> Array:
        """The value as an input of later coordinates."""


def compress(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """Identity for |u| ≤ 5, logarithmic beyond, so that no input is very large."""
    size = jnp.maximum(jnp.abs(u), 5.0)
    return jnp.where(jnp.abs(u) <= 5.0, u, jnp.sign(u) * (5.0 + jnp.log(size / 5.0)))


def positions(like: Array) -> np.ndarray:
    """0, 1, … along the first axis of an array that has rows."""
    return along_first(np.arange(like.shape[0]), like)


def cumulative_weights(weights: Array) -> Array:
    """Cumulative sums over the first axis, without the last one."""
    # A short cumulative sum is faster as a matrix product than as a scan.
    lower = np.tril(np.ones((weights.shape[0] - 1, weights.shape[0]), weights.dtype))
    return jnp.tensordot(lower, weights, 1)


def choose(weights: Array, uniform: Array) -> Array:
    """Choose by inverse transform; true at the choice, false elsewhere."""
    return jnp.sum(cumulative_weights(weights) < uniform, 0) == positions(weights)


def select(choice: Array, values: Array) -> Array:
    """The value at the choice."""
    return sum_features(jnp.where(choice, values, 0))
