"""A factor's latents in; a row of coordinates, each with its kind of density, out (sec. 3.3).

A latent enters an autoregressive network one coordinate after the other. Two maps lead from a
value to what a density is put on. The first works on a whole latent: a simplex of three becomes
two reals, a vector of booleans as many numbers, a multinomial loses its last, determined entry.
The second works on a coordinate by itself: the logarithm of a positive, the logit of an interval.
The sampler applies the second while it draws, so that the density it reports belongs to the value
it returns, as rounded to the float it is returned in.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped
from numpyro.distributions import biject_to, constraints

Family = Literal["mixture", "bernoulli", "categorical", "count"]
Values = dict[str, Array]

LARGEST_CATEGORICAL = 256


@dataclass(frozen=True)
class Latent:
    """What a factor draws: one site, with the shape of one draw."""

    name: str
    support: constraints.Constraint = field(hash=False)
    shape: tuple[int, ...]


class Coordinate(NamedTuple):
    """Constants of one coordinate, or of a run of them along a leading axis."""

    curve: Array  # which of CURVES leads from the reals to the value
    lower: Array  # bounds of the support; for integers the value counts from `lower`
    upper: Array
    least: Array  # the closed range of floats strictly inside the support
    most: Array
    continues: Array  # what earlier coordinates of the latent took is no longer to be had
    centre: Array  # of the unconstrained value under the prior
    scale: Array


@dataclass(frozen=True)
class Curve:
    """A monotone map of the reals onto an interval, with its inverse and log derivative."""

    constrain: Callable[[Array, Coordinate], Array]
    unconstrain: Callable[[Array, Coordinate], tuple[Array, Array]]
    anchor: Callable[[Coordinate], Array]


def _below_inverse(x: Array, c: Coordinate) -> tuple[Array, Array]:
    z = jnp.log(c.upper - x)
    return z, z


def _above_inverse(x: Array, c: Coordinate) -> tuple[Array, Array]:
    z = jnp.log(x - c.lower)
    return z, z


def _between_inverse(x: Array, c: Coordinate) -> tuple[Array, Array]:
    from_lower, to_upper = jnp.log(x - c.lower), jnp.log(c.upper - x)
    return from_lower - to_upper, from_lower + to_upper - jnp.log(c.upper - c.lower)


def _softplus_inverse(x: Array, c: Coordinate) -> tuple[Array, Array]:
    log_slope = jnp.log(-jnp.expm1(-x))
    return x + log_slope, log_slope


IDENTITY, ABOVE, BELOW, BETWEEN, SOFTPLUS = range(5)
CURVES: tuple[Curve, ...] = (
    Curve(lambda z, c: z, lambda x, c: (x, jnp.zeros_like(x)), lambda c: c.lower),
    Curve(lambda z, c: c.lower + jnp.exp(z), _above_inverse, lambda c: c.lower + 1),
    Curve(lambda z, c: c.upper - jnp.exp(z), _below_inverse, lambda c: c.upper - 1),
    Curve(
        lambda z, c: c.lower + (c.upper - c.lower) * jax.nn.sigmoid(z),
        _between_inverse,
        lambda c: (c.lower + c.upper) / 2,
    ),
    Curve(lambda z, c: jax.nn.softplus(z), _softplus_inverse, lambda c: jnp.ones_like(c.lower)),
)


def constrain(z: Array, c: Coordinate, curves: tuple[int, ...]) -> Array:
    """The value at z, strictly inside the support; `curves` are the codes that occur."""
    x = CURVES[curves[0]].constrain(z, c)
    for code in curves[1:]:
        x = jnp.where(c.curve == code, CURVES[code].constrain(z, c), x)
    return jnp.clip(x, c.least, c.most)


def unconstrain(x: Array, c: Coordinate, curves: tuple[int, ...]) -> tuple[Array, Array]:
    """The real number z that leads to x, and log |dx/dz| there."""
    x = jnp.clip(x, c.least, c.most)
    z, log_slope = jnp.zeros_like(x), jnp.zeros_like(x)
    for code in curves:
        here = c.curve == code
        curve = CURVES[code]
        # the anchor keeps the gradient of a branch not taken finite
        z_here, slope_here = curve.unconstrain(jnp.where(here, x, curve.anchor(c)), c)
        z, log_slope = jnp.where(here, z_here, z), jnp.where(here, slope_here, log_slope)
    return z, log_slope


@dataclass(frozen=True)
class Block:
    """One latent's coordinates, and the way there and back."""

    latent: Latent
    family: Family
    start: int
    size: int
    table: tuple[np.ndarray, ...] = field(hash=False, compare=False)  # as Coordinate, unscaled
    flatten: Callable[[Array], tuple[Array, Array]] = field(hash=False, compare=False)
    unflatten: Callable[[Array], Array] = field(hash=False, compare=False)
    elementwise: bool = True


def base_support(support: constraints.Constraint) -> constraints.Constraint:
    """The support of one entry, without the `independent` wrapped around it."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


@cache
def blocks(latents: tuple[Latent, ...]) -> tuple[Block, ...]:
    """The coordinates of every latent, in order."""
    if not latents:
        raise ValueError("A network needs at least one latent to draw; this factor has none.")
    names = [latent.name for latent in latents]
    if len(set(names)) < len(names):
        raise ValueError(f"A network draws each latent once; got {names}.")
    found: list[Block] = []
    start = 0
    for latent in latents:
        block = _block(latent, start)
        if block.size == 0:
            raise ValueError(
                f"Site '{latent.name}' of shape {latent.shape} with support {latent.support!r} "
                "has no free coordinate: nothing to draw. Make it deterministic in the model."
            )
        found.append(block)
        start += block.size
    return tuple(found)


def _block(latent: Latent, start: int) -> Block:
    base = base_support(latent.support)
    if base is constraints.boolean:
        return _integers(latent, start, "bernoulli", 0, 1)
    if isinstance(base, constraints.integer_interval):
        span = np.max(np.asarray(base.upper_bound) - np.asarray(base.lower_bound))
        family: Family = "categorical" if span < LARGEST_CATEGORICAL else "count"
        return _integers(latent, start, family, base.lower_bound, base.upper_bound)
    if isinstance(base, constraints.integer_greater_than):
        return _integers(latent, start, "count", base.lower_bound, np.inf)
    if isinstance(base, constraints.multinomial):
        return _multinomial(latent, start, base.upper_bound)
    if not getattr(base, "is_discrete", False):
        for kind, (code, bounds) in _ELEMENTWISE.items():
            if isinstance(base, kind):
                return _reals(latent, start, code, *bounds(base))
        try:
            return _vector(latent, start)
        except NotImplementedError:
            pass
    raise ValueError(
        f"Site '{latent.name}' has support {latent.support!r}, for which no density is known: "
        "NumPyro has no bijection from the reals to it. Write the site through one that has, "
        "such as a real vector with a deterministic function of it."
    )


_ELEMENTWISE: dict[type, tuple[int, Callable[[constraints.Constraint], tuple[object, object]]]] = {
    type(constraints.softplus_positive): (SOFTPLUS, lambda c: (0.0, 1.0)),
    type(constraints.real): (IDENTITY, lambda c: (0.0, 1.0)),
    constraints.greater_than: (ABOVE, lambda c: (c.lower_bound, np.inf)),
    constraints.less_than: (BELOW, lambda c: (-np.inf, c.upper_bound)),
    constraints.interval: (BETWEEN, lambda c: (c.lower_bound, c.upper_bound)),
}


def _float() -> type[np.floating]:
    return np.dtype(jnp.result_type(float)).type


def _spread(name: str, bound: object, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return np.broadcast_to(np.asarray(bound, _float()), shape).reshape(-1)
    except ValueError:
        raise ValueError(
            f"Site '{name}': its support's bound has shape {np.shape(bound)}, "  # type: ignore[arg-type]
            f"which does not broadcast to the shape {shape} of a draw."
        ) from None


def _table(
    code: int, lower: np.ndarray, upper: np.ndarray, least: np.ndarray, most: np.ndarray
) -> tuple[np.ndarray, ...]:
    size = lower.size
    return (np.full(size, code, np.int32), lower, upper, least, most, np.zeros(size, bool))


def _reals(latent: Latent, start: int, code: int, lower: object, upper: object) -> Block:
    low = _spread(latent.name, lower, latent.shape)
    high = _spread(latent.name, upper, latent.shape)
    real = _float()
    tiny, largest = np.finfo(real).tiny, np.finfo(real).max
    least, most = np.full_like(low, -largest), np.full_like(high, largest)
    if code in (ABOVE, BETWEEN, SOFTPLUS):
        # subnormals are flushed to zero on most devices, so zero's neighbour is the least normal
        least = np.where(abs(low) < tiny, tiny, np.nextafter(low, real(np.inf)))
    if code in (BELOW, BETWEEN):
        most = np.where(abs(high) < tiny, -tiny, np.nextafter(high, real(-np.inf)))
    if np.any(least > most):
        raise ValueError(f"Site '{latent.name}': its support {latent.support!r} is empty.")
    if code == ABOVE:
        high = low + 1
    if code == BELOW:
        low = high - 1
    return Block(
        latent,
        "mixture",
        start,
        low.size,
        _table(code, low, high, least, most),
        lambda x: (x.reshape(-1), jnp.zeros(())),
        lambda v: v.reshape(latent.shape),
    )


def _integers(latent: Latent, start: int, family: Family, lower: object, upper: object) -> Block:
    low = _spread(latent.name, lower, latent.shape)
    high = _spread(latent.name, upper, latent.shape)
    if np.any(high < low):
        raise ValueError(f"Site '{latent.name}': its support {latent.support!r} is empty.")
    # the largest integer that is also a float, so that a draw can be told from its neighbours' cell
    largest = float(np.nextafter(_float()(np.iinfo(jnp.result_type(int)).max), _float()(0)))
    most = np.minimum(high, largest) - low
    return Block(
        latent,
        family,
        start,
        low.size,
        _table(IDENTITY, low, high - low, np.zeros_like(low), most),
        lambda x: (jnp.clip(x.reshape(-1) - low, 0, most), jnp.zeros(())),
        lambda v: (v.astype(int) + low.astype(jnp.result_type(int))).reshape(latent.shape),
    )


def _multinomial(latent: Latent, start: int, total: object) -> Block:
    *batch, categories = latent.shape
    free = (*batch, categories - 1)
    totals = np.broadcast_to(np.asarray(total, _float())[..., None], (*batch, categories))
    high = totals[..., :-1].reshape(-1)
    table = list(_table(IDENTITY, np.zeros_like(high), high, np.zeros_like(high), high))
    table[5] = np.broadcast_to(np.arange(categories - 1) > 0, free).reshape(-1)

    def unflatten(v: Array) -> Array:
        counts = v.reshape(free)
        last = totals[..., :1] - counts.sum(-1, keepdims=True)
        return jnp.concatenate([counts, last], -1).astype(int)

    return Block(
        latent,
        "count",
        start,
        high.size,
        tuple(table),
        lambda x: (x[..., :-1].reshape(-1), jnp.zeros(())),
        unflatten,
    )


def _vector(latent: Latent, start: int) -> Block:
    base = base_support(latent.support)
    simplex = base is constraints.simplex
    transform = biject_to(base)
    shape = tuple(transform.inverse_shape(latent.shape))

    def flatten(x: Array) -> tuple[Array, Array]:
        x = interior(base, x)
        if simplex:
            z, log_slope = _simplex_inverse(x)
        else:
            z = transform._inverse(x)
            log_slope = transform.log_abs_det_jacobian(z, x)
        return z.reshape(-1), jnp.sum(log_slope)

    def unflatten(v: Array) -> Array:
        z = v.reshape(shape)
        x = jnp.nan_to_num(_simplex(z) if simplex else transform(z))
        return well_conditioned(base, interior(base, x))

    size = math.prod(shape)
    low = np.zeros(size, _float())
    largest = np.full_like(low, np.finfo(_float()).max)
    return Block(
        latent,
        "mixture",
        start,
        size,
        _table(IDENTITY, low, low + 1, -largest, largest),
        flatten,
        unflatten,
        elementwise=False,
    )


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


def interior(support: constraints.Constraint, x: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """The nearest value strictly inside a vector's support, where rounding has left it."""
    eps, tiny = jnp.finfo(x.dtype).eps, jnp.finfo(x.dtype).tiny
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
        x = jnp.where(diagonal, jnp.maximum(x, eps), jnp.tril(x))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x


def well_conditioned(
    support: constraints.Constraint, x: Float[Array, "..."]
) -> Float[Array, "..."]:
    """A matrix whose least eigenvalue is still positive when computed in floats."""
    if support in (constraints.positive_definite, constraints.positive_semidefinite):
        x = (x + jnp.swapaxes(x, -1, -2)) / 2
        size = x.shape[-1]
        largest = jnp.max(jnp.diagonal(x, axis1=-2, axis2=-1), -1)[..., None, None]
        return x + 8 * size * jnp.finfo(x.dtype).eps * largest * jnp.eye(size)
    if support is constraints.corr_matrix:
        x = (x + jnp.swapaxes(x, -1, -2)) / 2
        size = x.shape[-1]
        shrunk = x * (1 - 8 * size * jnp.finfo(x.dtype).eps)
        return jnp.where(jnp.eye(size, dtype=bool), 1.0, shrunk)
    return x


def _spaced(x: Array) -> Array:
    """Strictly increasing along the last axis: each entry at least one float above the last."""
    bits = jnp.int32 if x.dtype == jnp.float32 else jnp.int64
    keys = jax.lax.bitcast_convert_type(x, bits)
    # floats compare as integers once the order of the negative ones is turned round
    keys = jnp.where(keys < 0, jnp.iinfo(bits).min - keys, keys)
    rank = jnp.arange(x.shape[-1], dtype=bits)
    keys = jax.lax.cummax(keys - rank, axis=keys.ndim - 1) + rank
    keys = jnp.where(keys < 0, jnp.iinfo(bits).min - keys, keys)
    return jax.lax.bitcast_convert_type(keys, x.dtype)
