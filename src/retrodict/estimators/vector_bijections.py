"""Bijections between real vectors and the supports of vectors and matrices.

The bijections are NumPyro's, made safe in floating point: a value on the boundary of its support,
such as a simplex with a zero, has a finite preimage, and the image of every real vector passes
NumPyro's check of the support.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import biject_to, constraints

Support = constraints.Constraint[Any]


def base_support(support: Support) -> Support:
    """The support of one entry, without the `independent` wrapped around it."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


class VectorBijection(NamedTuple):
    """A map from real vectors onto a support.

    Attributes:
        constrain: the map.
        unconstrain: its inverse, and log |det dx/dz|.
        size: length of the real vectors.
    """

    constrain: Callable[[Array], Array]
    unconstrain: Callable[[Array], tuple[Array, Array]]
    size: int


def vector_bijection(support: Support, shape: tuple[int, ...]) -> VectorBijection:
    """The bijection onto values of some shape in a support.

    Raises:
        NotImplementedError: if NumPyro has no bijection onto the support.
    """
    base = base_support(support)
    simplex = base is constraints.simplex
    transform = biject_to(base)
    free = tuple(transform.inverse_shape(shape))

    def constrain(z: Array) -> Array:
        z = z.reshape(free)
        image = _simplex if simplex else transform
        x = image(z)
        # Reals whose image overflows are clipped; the density is evaluated at the clipped value.
        finite = jnp.all(jnp.abs(x) < 1e30)
        x = jnp.where(finite, x, image(jnp.clip(z, -20, 20)))
        return well_conditioned(base, interior(base, x))

    def unconstrain(x: Array) -> tuple[Array, Array]:
        x = interior(base, x)
        if simplex:
            z, log_slope = _simplex_inverse(x)
        else:
            # The logarithm of a difference that underflows.
            z = jnp.nan_to_num(transform._inverse(x), posinf=104.0, neginf=-104.0)
            log_slope = transform.log_abs_det_jacobian(z, x)
        return z.reshape(-1), jnp.sum(log_slope)

    return VectorBijection(constrain, unconstrain, math.prod(free))


def _simplex(z: Array) -> Array:
    """Stick-breaking, with logarithms of the sticks for the accuracy of small entries."""
    sticks = z.shape[-1]
    z = z - jnp.log(jnp.arange(sticks, 0, -1.0))
    log_rest = jnp.cumsum(jax.nn.log_sigmoid(-z), -1)
    before = jnp.pad(log_rest[..., :-1], [(0, 0)] * (z.ndim - 1) + [(1, 0)])
    log_x = jnp.concatenate([jax.nn.log_sigmoid(z) + before, log_rest[..., -1:]], -1)
    x = jnp.exp(log_x)
    return x / x.sum(-1, keepdims=True)


def _simplex_inverse(x: Array) -> tuple[Array, Array]:
    log_x = jnp.log(x)
    # The rest of the stick is summed from the end: 1 - cumsum(x) would cancel.
    log_rest = jnp.log(jnp.cumsum(x[..., ::-1], -1)[..., ::-1])
    sticks = x.shape[-1] - 1
    z = log_x[..., :-1] - log_rest[..., 1:] + jnp.log(jnp.arange(sticks, 0, -1.0))
    return z, log_x[..., :-1] + log_rest[..., 1:] - log_rest[..., :-1]


def interior(support: Support, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Move a vector or matrix that rounding has put on the boundary into the support."""
    eps, tiny = float(np.finfo(x.dtype).eps), float(np.finfo(x.dtype).tiny)
    if support is constraints.simplex:
        return jnp.maximum(x, tiny)
    if support is constraints.ordered_vector:
        return _spaced(x)
    if support is constraints.positive_ordered_vector:
        return _spaced(jnp.maximum(x, tiny))
    if isinstance(support, type(constraints.lower_cholesky)):
        diagonal = jnp.eye(x.shape[-1], dtype=bool)
        return jnp.where(diagonal, jnp.maximum(x, tiny), jnp.tril(x))
    if support is constraints.corr_cholesky:
        diagonal = jnp.eye(x.shape[-1], dtype=bool)
        # The inverse subtracts squares from one: the differences must exceed rounding error.
        x = jnp.where(diagonal, jnp.maximum(x, 10 * eps**0.5), jnp.tril(x))
        return x * jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True))
    return x


def well_conditioned(support: Support, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Increase small eigenvalues of a matrix to where they are positive in floating point."""
    if support in (constraints.positive_definite, constraints.positive_semidefinite):
        x = (x + jnp.swapaxes(x, -1, -2)) / 2
        size = x.shape[-1]
        largest = jnp.max(jnp.diagonal(x, axis1=-2, axis2=-1), -1)[..., None, None]
        return x + 8 * size * float(np.finfo(x.dtype).eps) * largest * jnp.eye(size)
    if support is constraints.corr_matrix:
        x = (x + jnp.swapaxes(x, -1, -2)) / 2
        size = x.shape[-1]
        shrunk = x * (1 - 8 * size * float(np.finfo(x.dtype).eps))
        return jnp.where(jnp.eye(size, dtype=bool), 1.0, shrunk)
    return x


def _spaced(x: Array) -> Array:
    """Make entries strictly increasing along the last axis, by one float at least."""
    integer = jnp.int32 if x.dtype == jnp.float32 else jnp.int64
    # Number the floats in order; subnormals are left out, as devices flush them to zero.
    skipped = 2 ** np.finfo(x.dtype).nmant - 1
    largest = float(np.finfo(x.dtype).max)
    bits = jax.lax.bitcast_convert_type(jnp.abs(jnp.clip(x, -largest, largest)), integer)
    number = jnp.where(x < 0, -1, 1) * jnp.maximum(bits - skipped, 0)
    rank = jnp.arange(x.shape[-1], dtype=integer)
    number = jax.lax.cummax(number - rank, axis=number.ndim - 1) + rank
    last = np.asarray(largest, x.dtype).view(np.dtype(integer)) - skipped
    number = jnp.minimum(number, last - rank[::-1])
    size = jax.lax.bitcast_convert_type(jnp.abs(number) + skipped, x.dtype)
    spaced = jnp.where(number == 0, 0, jnp.where(number < 0, -size, size))
    return jnp.where(spaced == x, x, spaced)  # The same value, but with a gradient.
