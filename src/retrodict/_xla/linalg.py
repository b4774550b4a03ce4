"""Linear algebra of small matrices, batched.

XLA passes these to LAPACK one matrix at a time, which is slow for many small ones, and with few
threads can block forever. Loops over columns vectorise over the batch instead.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._xla.tuning import MAX_UNROLLED_COLUMNS


def cholesky(matrix: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """The lower triangular L with L Lᵀ = matrix, column by column."""
    size = matrix.shape[-1]
    indices = jnp.arange(size)

    def set_column(index: Array, lower: Array) -> Array:
        row = lower[..., index, :]
        residual = matrix[..., :, index] - jnp.einsum("...ij,...j->...i", lower, row)
        column = residual / jnp.sqrt(residual[..., index])[..., None]
        return lower.at[..., :, index].set(jnp.where(indices >= index, column, 0.0))

    return _loop(size, set_column, jnp.zeros_like(matrix))


def invert_lower_triangular(lower: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """The inverse of a lower triangular matrix, row by row by forward substitution."""
    size = lower.shape[-1]
    identity = jnp.eye(size)

    def set_row(index: Array, inverse: Array) -> Array:
        product = jnp.einsum("...j,...jk->...k", lower[..., index, :], inverse)
        row = (identity[index] - product) / lower[..., index, index][..., None]
        return inverse.at[..., index, :].set(row)

    return _loop(size, set_row, jnp.zeros_like(lower))


def _loop(size: int, body: Callable[[Any, Array], Array], start: Array) -> Array:
    """`jax.lax.fori_loop` over the columns, unrolled if they are few."""
    if size > MAX_UNROLLED_COLUMNS:
        result: Array = jax.lax.fori_loop(0, size, body, start)
        return result
    for index in range(size):
        start = body(index, start)
    return start
