"""The support of a vector or matrix in; a map from the reals onto it, and back, out (sec. 3.3).

NumPyro has the bijections. What is added is what float arithmetic needs: a value on the edge of
its support, such as a simplex with a zero, still has a finite preimage, and the image of any real
vector is still inside when NumPyro checks it.
"""

import math
from collections.abc import Callable
from typing import Any

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


def bijection(
    support: Support, shape: tuple[int, ...]
) -> tuple[Callable[[Array], Array], Callable[[Array], tuple[Array, Array]], int]:
    """From a row of reals to a value, back again with log |det dx/dz|, and how many reals.

    Raises `NotImplementedError` where NumPyro knows no bijection.
    """
    base = base_support(support)
    simplex = base is constraints.simplex
    transform = biject_to(base)
    free = tuple(transform.inverse_shape(shape))

    def there(z: Array) -> Array:
        z = z.reshape(free)
        image = _simplex if simplex else transform
        x = image(z)
        # what has overflowed is drawn nearer in; its density is asked for at where it comes to lie
        finite = jnp.all(jnp.abs(x) < 1e30)
        x = jnp.where(finite, x, image(jnp.clip(z, -20, 20)))
        return well_conditioned(base, interior(base, x))

    def back(x: Array) -> tuple[Array, Array]:
        x = interior(base, x)
        if simplex:
            z, log_slope = _simplex_inverse(x)
        else:
            # a difference below the least float has this logarithm at most
            z = jnp.nan_to_num(transform._inverse(x), posinf=104.0, neginf=-104.0)
            log_slope = transform.log_abs_det_jacobian(z, x)
        return z.reshape(-1), jnp.sum(log_slope)

    return there, back, math.prod(free)


def _simplex(z: Array) -> Array:
    # logarithms of the sticks, so that small entries keep their digits
    sticks = z.shape[-1]
    z = z - jnp.log(jnp.arange(sticks, 0, -1.0))
    left = jnp.cumsum(jax.nn.log_sigmoid(-z), -1)
    before = jnp.pad(left[..., :-1], [(0, 0)] * (z.ndim - 1) + [(1, 0)])
    log_x = jnp.concatenate([jax.nn.log_sigmoid(z) + before, left[..., -1:]], -1)
    x = jnp.exp(log_x)
    return x / x.sum(-1, keepdims=True)


def _simplex_inverse(x: Array) -> tuple[Array, Array]:
    log_x = jnp.log(x)
    # what is left is summed from the end: 1 - cumsum(x) would lose all digits of a short stick
    log_left = jnp.log(jnp.cumsum(x[..., ::-1], -1)[..., ::-1])
    sticks = x.shape[-1] - 1
    z = log_x[..., :-1] - log_left[..., 1:] + jnp.log(jnp.arange(sticks, 0, -1.0))
    return z, log_x[..., :-1] + log_left[..., 1:] - log_left[..., :-1]


def interior(support: Support, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The nearest value strictly inside a vector's support, where rounding has left it."""
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
        # the inverse takes differences of squares from one, so these must exceed rounding
        x = jnp.where(diagonal, jnp.maximum(x, 10 * eps**0.5), jnp.tril(x))
        return x * jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True))
    return x


def well_conditioned(support: Support, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """A matrix whose least eigenvalue is still positive when computed in floats."""
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
    """Strictly increasing along the last axis: each entry at least one float above the last."""
    whole = jnp.int32 if x.dtype == jnp.float32 else jnp.int64
    # Floats in order, numbered from zero; subnormals are left out, for devices take them as zero.
    skipped = 2 ** np.finfo(x.dtype).nmant - 1
    most = float(np.finfo(x.dtype).max)
    bits = jax.lax.bitcast_convert_type(jnp.abs(jnp.clip(x, -most, most)), whole)
    place = jnp.where(x < 0, -1, 1) * jnp.maximum(bits - skipped, 0)
    rank = jnp.arange(x.shape[-1], dtype=whole)
    place = jax.lax.cummax(place - rank, axis=place.ndim - 1) + rank
    last = np.asarray(most, x.dtype).view(np.dtype(whole)) - skipped
    place = jnp.minimum(place, last - rank[::-1])
    size = jax.lax.bitcast_convert_type(jnp.abs(place) + skipped, x.dtype)
    spaced = jnp.where(place == 0, 0, jnp.where(place < 0, -size, size))
    return jnp.where(spaced == x, x, spaced)  # the same value, but with a gradient
