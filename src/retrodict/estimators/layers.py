"""Linear layers and multilayer perceptrons."""

from itertools import pairwise

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.jit import floats


class Linear(eqx.Module):
    """xW + b, initialised for inputs from rectified units (He et al. 2015)."""

    weight: Float[Array, "size width"]
    bias: Float[Array, " width"]

    def __init__(self, rng: np.random.Generator, size: int, width: int) -> None:
        scale = np.sqrt(2 / max(size, 1))
        self.weight = floats(scale * rng.standard_normal((size, width)))
        self.bias = floats(np.zeros(width))

    def __call__(self, x: Float[Array, "size *rows"]) -> Float[Array, "width *rows"]:
        """Apply the map."""
        return linear(self.weight, self.bias, x)


def linear(
    weight: Float[Array, "size width"],
    bias: Float[Array, " width"],
    x: Float[Array, "size *rows"],
) -> Float[Array, "width *rows"]:
    """xW + b, of one vector or of all columns of a matrix."""
    if x.ndim == 1:
        return x @ weight + bias
    # XLA computes this product faster than weight.T @ x.
    return (x.T @ weight).T + bias[:, None]


class MLP(eqx.Module):
    """Linear layers, each followed by a SiLU."""

    layers: tuple[Linear, ...]

    def __init__(self, rng: np.random.Generator, size: int, widths: tuple[int, ...]) -> None:
        self.layers = tuple(Linear(rng, a, b) for a, b in pairwise((size, *widths)))

    def __call__(self, x: Float[Array, "size *rows"]) -> Float[Array, "width *rows"]:
        """Apply the layers in turn."""
        for layer in self.layers:
            x = jax.nn.silu(layer(x))
        return x
