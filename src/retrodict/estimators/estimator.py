"""The protocol of conditional density estimators, learned or analytic."""

from collections.abc import Mapping
from typing import Protocol

from jaxtyping import Array, Float, Key, PyTree

from retrodict.estimators.encoders import Conditions
from retrodict.types import Values


class Estimator(Protocol):
    """q(x | conditions) of the latents of one copy of a factor.

    Methods take one draw; `jax.vmap` gives a batch. Conditions are encoded once and shared between
    draws. The random numbers of a draw are generated beforehand.
    """

    def encode(self, conditions: Conditions, *, differentiable: bool = True) -> PyTree:
        """Compute what depends on the conditions alone.

        Args:
            conditions: of one copy.
            differentiable: if false, a faster implementation may be used for a batch.
        """

    def noise(self, key: Key[Array, ""], copies: tuple[int, ...] = ()) -> PyTree:
        """The random numbers of draws, axes of copies first."""

    def sample(self, encoding: PyTree, noise: PyTree) -> tuple[Values, Float[Array, ""]]:
        """The draw with some noise, and its log q."""

    def log_prob(self, encoding: PyTree, x: Mapping[str, Array]) -> Float[Array, ""]:
        """log q(x | conditions)."""

    def fit_scalings(self, conditions: Conditions, xs: Mapping[str, Array]) -> "Estimator":
        """Fit centres and scales of inputs and latents to a batch of synthetic draws."""
