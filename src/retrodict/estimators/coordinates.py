"""Map the latents of a factor to a row of coordinates, each with a kind of density.

An autoregressive network draws one coordinate after another. Two maps lead from a value to the
number that a density is put on. The first maps a whole latent: a simplex of three becomes two
reals, a vector of booleans as many numbers, and a multinomial loses its last entry, which the
others determine. The second is a scalar bijection for each coordinate: the logarithm of a positive
number, the logit of an interval. The sampler applies the second as it draws, so that the density it
reports belongs to the value it returns, including rounding.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from retrodict.errors import UnsupportedModel
from retrodict.estimators.scalar_bijections import (
    ABOVE,
    BELOW,
    BETWEEN,
    IDENTITY,
    SOFTPLUS,
    Coordinate,
)
from retrodict.estimators.vector_bijections import Support, base_support, vector_bijection

Kind = Literal["mixture", "bernoulli", "categorical", "count"]

# Integers of larger ranges are counts.
MAX_CATEGORIES = 256


@dataclass(frozen=True)
class Latent:
    """A site that a factor draws, with the shape of one draw."""

    name: str
    support: Support = field(hash=False)
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """The coordinates of one latent.

    Attributes:
        latent: the site.
        kind: of the coordinates' densities.
        start: position of the first coordinate in the row.
        size: the number of coordinates.
        table: constants of the coordinates.
        flatten: maps a value to its coordinates, and gives log |det| of the inverse map.
        unflatten: maps coordinates to a value.
        elementwise: whether each coordinate is one entry of the value.
    """

    latent: Latent
    kind: Kind
    start: int
    size: int
    table: Coordinate[np.ndarray] = field(hash=False, compare=False)
    flatten: Callable[[Array], tuple[Array, Array]] = field(hash=False, compare=False)
    unflatten: Callable[[Array], Array] = field(hash=False, compare=False)
    elementwise: bool = True


@cache
def blocks(latents: tuple[Latent, ...]) -> tuple[Block, ...]:
    """The coordinates of every latent, in order.

    Raises:
        UnsupportedModel: if there are no latents, or one has no coordinates.
    """
    if not latents:
        raise UnsupportedModel("A network needs at least one latent to draw; this factor has none.")
    names = [latent.name for latent in latents]
    if len(set(names)) < len(names):
        raise UnsupportedModel(f"A network draws each latent once; got {names}.")
    result: list[Block] = []
    start = 0
    for latent in latents:
        block = _block(latent, start)
        if block.size == 0:
            raise UnsupportedModel(
                f"Site '{latent.name}' of shape {latent.shape} with support {latent.support!r} "
                "has no free coordinate: nothing to draw. Make it deterministic in the model."
            )
        result.append(block)
        start += block.size
    return tuple(result)


@cache
def coordinate_table(latents: tuple[Latent, ...]) -> Coordinate[np.ndarray]:
    """Constants of all coordinates."""
    rows = [block.table for block in blocks(latents)]
    return Coordinate(*(np.concatenate(column) for column in zip(*rows, strict=True)))


def flatten(
    latents: tuple[Latent, ...], x: Mapping[str, Array]
) -> tuple[Float[Array, " coordinates"], Float[Array, ""]]:
    """The row of coordinates of a draw, and log |det| of the map from the row to the draw."""
    parts, log_slope = [], jnp.zeros(())
    for block in blocks(latents):
        name, shape = block.latent.name, block.latent.shape
        if name not in x:
            raise ValueError(
                f"The network draws {[b.latent.name for b in blocks(latents)]}: '{name}' is "
                f"missing, found {sorted(x)}."
            )
        if jnp.shape(x[name]) != shape:
            raise ValueError(
                f"Site '{name}' needs shape {shape}, found {jnp.shape(x[name])}. Networks take one "
                "draw at a time: use jax.vmap for a batch."
            )
        values, slope = block.flatten(jnp.asarray(x[name]).astype(float))
        parts.append(values)
        log_slope += slope
    return jnp.concatenate(parts), log_slope


def unflatten(latents: tuple[Latent, ...], row: Float[Array, " coordinates"]) -> dict[str, Array]:
    """The draw that has a row of coordinates."""
    return {
        block.latent.name: block.unflatten(row[block.start : block.start + block.size])
        for block in blocks(latents)
    }


def _block(latent: Latent, start: int) -> Block:
    base = base_support(latent.support)
    if base is constraints.boolean:
        return _integers(latent, start, "bernoulli", 0, 1)
    if isinstance(base, constraints.integer_interval):
        span = np.max(np.asarray(base.upper_bound) - np.asarray(base.lower_bound))
        kind: Kind = "categorical" if span < MAX_CATEGORIES else "count"
        return _integers(latent, start, kind, base.lower_bound, base.upper_bound)
    if isinstance(base, constraints.integer_greater_than):
        return _integers(latent, start, "count", base.lower_bound, np.inf)
    if isinstance(base, constraints.multinomial):
        return _multinomial(latent, start, base.upper_bound)
    if not getattr(base, "is_discrete", False):
        for constraint, (code, bounds) in _ELEMENTWISE.items():
            if isinstance(base, constraint):
                return _reals(latent, start, code, *bounds(base))
        try:
            return _vector(latent, start)
        except NotImplementedError:
            pass
    raise UnsupportedModel(
        f"Site '{latent.name}' has support {latent.support!r}, which is not supported: NumPyro has "
        "no bijection from the reals to it. Sample a site with a supported support instead, such "
        "as a real vector, and make this site a deterministic function of it."
    )


_ELEMENTWISE: dict[type, tuple[int, Callable[[Any], tuple[Any, Any]]]] = {
    type(constraints.softplus_positive): (SOFTPLUS, lambda c: (0.0, 1.0)),
    type(constraints.real): (IDENTITY, lambda c: (0.0, 1.0)),
    constraints.greater_than: (ABOVE, lambda c: (c.lower_bound, np.inf)),
    constraints.less_than: (BELOW, lambda c: (-np.inf, c.upper_bound)),
    constraints.interval: (BETWEEN, lambda c: (c.lower_bound, c.upper_bound)),
}


def _float() -> type[np.floating]:
    return np.dtype(jnp.result_type(float)).type


def broadcast_bound(name: str, bound: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A bound of a support for each entry of a draw."""
    try:
        return np.broadcast_to(np.asarray(bound, _float()), shape).reshape(-1)
    except ValueError:
        raise UnsupportedModel(
            f"Site '{name}': a bound of its support has shape {np.shape(bound)}, which does not "
            f"broadcast to the shape {shape} of a draw. Give the bound one entry for each."
        ) from None


def widest_support(support: Support, shape: tuple[int, ...], axes: Collection[int]) -> Support:
    """The smallest support that contains those of all elements along some axes of a value.

    The bounds of elements may differ, such as the numbers of trials of binomials in a plate; an
    encoder that is applied to every element needs one support for all.
    """
    base = base_support(support)
    sides = [side for side in ("lower_bound", "upper_bound") if hasattr(base, side)]
    if all(np.ndim(getattr(base, side)) == 0 for side in sides) or base.event_dim:
        return support
    bounds = []
    for side in sides:
        whole = np.broadcast_to(np.asarray(getattr(base, side)), shape)
        reduce = np.min if side == "lower_bound" else np.max
        bounds.append(reduce(whole, axis=tuple(axes), keepdims=False))
    widest: Support = type(base)(*bounds)
    return widest


def _table(
    code: int, lower: np.ndarray, upper: np.ndarray, min_value: np.ndarray, max_value: np.ndarray
) -> Coordinate[np.ndarray]:
    return Coordinate(
        bijection=np.full(lower.size, code),
        lower=lower,
        upper=upper,
        min_value=min_value,
        max_value=max_value,
        continues_total=np.zeros(lower.size, bool),
        centre=np.zeros_like(lower),
        scale=np.ones_like(lower),
        shift=np.zeros_like(lower),
        stretch=np.ones_like(lower),
    )


def _reals(latent: Latent, start: int, code: int, lower: Any, upper: Any) -> Block:
    low = broadcast_bound(latent.name, lower, latent.shape)
    high = broadcast_bound(latent.name, upper, latent.shape)
    real = _float()
    tiny, largest = np.finfo(real).tiny, np.finfo(real).max
    min_value, max_value = np.full_like(low, -largest), np.full_like(high, largest)
    if code in (ABOVE, BETWEEN, SOFTPLUS):
        # Most devices flush subnormals to zero: the next float after zero is the smallest normal.
        min_value = np.where(abs(low) < tiny, tiny, np.nextafter(low, real(np.inf)))
    if code in (BELOW, BETWEEN):
        max_value = np.where(abs(high) < tiny, -tiny, np.nextafter(high, real(-np.inf)))
    if np.any(min_value > max_value):
        raise UnsupportedModel(f"Site '{latent.name}': its support {latent.support!r} is empty.")
    if code == ABOVE:
        high = low + 1
    if code == BELOW:
        low = high - 1
    return Block(
        latent,
        "mixture",
        start,
        low.size,
        _table(code, low, high, min_value, max_value),
        lambda x: (x.reshape(-1), jnp.zeros(())),
        lambda v: v.reshape(latent.shape),
    )


def _integers(latent: Latent, start: int, kind: Kind, lower: Any, upper: Any) -> Block:
    low = broadcast_bound(latent.name, lower, latent.shape)
    high = broadcast_bound(latent.name, upper, latent.shape)
    if np.any(high < low):
        raise UnsupportedModel(f"Site '{latent.name}': its support {latent.support!r} is empty.")
    # The largest integer that is also a float, so that a draw differs from its neighbours.
    largest = float(np.nextafter(_float()(np.iinfo(jnp.result_type(int)).max), _float()(0)))
    max_value = np.minimum(high, largest) - low
    return Block(
        latent,
        kind,
        start,
        low.size,
        _table(IDENTITY, low, high - low, np.zeros_like(low), max_value),
        lambda x: (jnp.clip(x.reshape(-1) - low, 0, max_value), jnp.zeros(())),
        lambda v: (v.astype(int) + low.astype(jnp.result_type(int))).reshape(latent.shape),
    )


def _multinomial(latent: Latent, start: int, total: Any) -> Block:
    *batch, categories = latent.shape
    free = (*batch, categories - 1)
    totals = np.broadcast_to(np.asarray(total, _float())[..., None], (*batch, categories))
    high = totals[..., :-1].reshape(-1)
    table = _table(IDENTITY, np.zeros_like(high), high, np.zeros_like(high), high)
    table = table._replace(
        continues_total=np.broadcast_to(np.arange(categories - 1) > 0, free).reshape(-1)
    )

    def unflatten(v: Array) -> Array:
        counts = v.reshape(free)
        last = totals[..., :1] - counts.sum(-1, keepdims=True)
        return jnp.concatenate([counts, last], -1).astype(int)

    return Block(
        latent,
        "count",
        start,
        high.size,
        table,
        lambda x: (x[..., :-1].reshape(-1), jnp.zeros(())),
        unflatten,
    )


def _vector(latent: Latent, start: int) -> Block:
    transform = vector_bijection(latent.support, latent.shape)
    low = np.zeros(transform.size, _float())
    largest = np.full_like(low, np.finfo(_float()).max)
    return Block(
        latent,
        "mixture",
        start,
        transform.size,
        _table(IDENTITY, low, low + 1, -largest, largest),
        transform.unconstrain,
        transform.constrain,
        elementwise=False,
    )
