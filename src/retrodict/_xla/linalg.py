"""Linear algebra of small matrices, batched.

XLA passes these to LAPACK one matrix at a time, which is slow for many small ones, and with few
threads can block forever. Loops over columns vectorise over the batch instead.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def cholesky(matrix: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """The lower triangular L with L Lᵀ = matrix, column by column."""
    number = matrix.shape[-1]
    places = jnp.arange(number)

    def column(place: Array, lower: Array) -> Array:
        row = lower[..., place, :]
        rest = matrix[..., :, place] - jnp.einsum("...ij,...j->...i", lower, row)
        new = rest / jnp.sqrt(rest[..., place])[..., None]
        return lower.at[..., :, place].set(jnp.where(places >= place, new, 0.0))

    return _counted(number, column, jnp.zeros_like(matrix))


def inverse_of_lower(lower: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """The inverse of a lower triangular matrix, row by row."""
    number = lower.shape[-1]
    unit = jnp.eye(number)

    def row(place: Array, found: Array) -> Array:
        known = jnp.einsum("...j,...jk->...k", lower[..., place, :], found)
        new = (unit[place] - known) / lower[..., place, place][..., None]
        return found.at[..., place, :].set(new)

    return _counted(number, row, jnp.zeros_like(lower))


def _counted(number: int, body: Callable[[Any, Array], Array], start: Array) -> Array:
    """A loop that is written out where it is short."""
    if number > 6:
        looped: Array = jax.lax.fori_loop(0, number, body, start)
        return looped
    for place in range(number):
        start = body(place, start)
    return start
