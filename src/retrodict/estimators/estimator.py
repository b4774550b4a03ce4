"""The protocol of conditional density estimators, learned or analytic."""

from collections.abc import Mapping
from typing import Protocol

from jaxtyping import Array, Float, Key, PyTree

from retrodict.estimators.encoders import Conditions
from retrodict.types import Values


class Estimator(Protocol):
    """q(x | conditions) of one copy of a factor.

    Methods take one draw; `jax.vmap` gives a batch. Conditions are encoded once and shared between
    draws; all randomness of a draw is made beforehand.
    """

    def encode(self, conditions: Conditions, *, differentiable: bool = True) -> PyTree:
        """Everything that depends on the conditions alone."""

    def noise(self, key: Key[Array, ""], copies: tuple[int, ...] = ()) -> PyTree:
        """The randomness of draws, axes of copies first."""

    def sample(self, encoding: PyTree, noise: PyTree) -> tuple[Values, Float[Array, ""]]:
        """The draw that some noise leads to, and its log q."""

    def log_prob(self, encoding: PyTree, x: Mapping[str, Array]) -> Float[Array, ""]:
        """log q(x | conditions)."""

    def fit_scalings(self, conditions: Conditions, xs: Mapping[str, Array]) -> "Estimator":
        """Centres and scales of inputs and latents, from a batch of synthetic draws."""
