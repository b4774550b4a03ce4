"""A parent's value in; numbers a network can take, of size about one, out (sec. 3.3).

Each support has a scale on which its values are comparable: the logarithm of a positive or of a
count, the logit of a proportion. There they are centred and scaled by what synthetic data show.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpyro.distributions import biject_to, constraints

from retrodict._xla.jit import floats
from retrodict.estimators.coordinates import broadcast_bound
from retrodict.estimators.heads import compress
from retrodict.estimators.vector_bijections import Support, base_support, interior

LARGEST_ONE_HOT = 32

Column = Literal["scaled", "fine", "plain"]


@dataclass(frozen=True)
class Value:
    """An aligned parent: a plain input."""

    name: Hashable
    support: Support = field(hash=False)
    shape: tuple[int, ...]


class Scaling(eqx.Module):
    """Centre and scale, learned from data by order statistics; kept with the weights, not trained.

    Order statistics, because priors in common use have no mean.
    """

    centre: Float[Array, " features"]
    scale: Float[Array, " features"]

    def __call__(self, x: Float[Array, " features"]) -> Float[Array, " features"]:
        """Standardise."""
        centre, scale = jax.lax.stop_gradient((self.centre, self.scale))
        return (x - centre) / scale

    @staticmethod
    def unit(size: int) -> "Scaling":
        """Leave values as they are."""
        return Scaling(floats(np.zeros(size)), floats(np.ones(size)))

    @staticmethod
    def fit(
        rows: Float[Array, "rows features"], there: Bool[Array | np.ndarray, " rows"] | None = None
    ) -> "Scaling":
        """Median, and the width of the middle half as a normal's standard deviation."""
        # twenty thousand rows give a quartile to one part in a hundred
        stride = max(1, rows.shape[0] // 20_000)
        sample = np.asarray(rows)[::stride]
        known = np.isfinite(sample)
        if there is not None:
            known &= np.asarray(there)[::stride, None]
        columns = zip(sample.T, known.T, strict=True)
        fitted = np.array([_centre_and_scale(column[here]) for column, here in columns], float)
        centre, scale = fitted.reshape(-1, 2).T
        return Scaling(floats(centre), floats(scale))


def _centre_and_scale(values: np.ndarray) -> tuple[float, float]:
    if values.size == 0:
        return 0.0, 1.0
    low, centre, high = np.quantile(values.astype(np.float64), [0.25, 0.5, 0.75])
    scale = (high - low) / 1.349
    if scale == 0:
        # where more than half the draws are one value, the others still have a typical distance
        offsets = np.abs(values - centre)
        scale = np.median(offsets[offsets > 0]) if offsets.any() else 0.0
    # a constant, up to rounding, is not worth a scale
    return float(centre), float(scale) if scale > 1e-6 * abs(centre) + 1e-30 else 1.0


class ValueEncoder(eqx.Module):
    """A value as features: on the scale of its support, centred, scaled, and bounded in effect."""

    spec: Value = eqx.field(static=True)
    scaling: Scaling

    @property
    def size(self) -> int:
        """How many features."""
        return int(self.scaling.centre.shape[0])

    def __call__(self, x: Array) -> Float[Array, " features"]:
        """Features of one value."""
        if jnp.shape(x) != self.spec.shape:
            raise ValueError(
                f"Input '{self.spec.name}' needs shape {self.spec.shape}, found {jnp.shape(x)}. "
                "Networks take one value at a time: use jax.vmap for a batch."
            )
        raw, columns = value_columns(self.spec, x)
        u = jnp.clip(self.scaling(raw), -1e30, 1e30)
        fine, plain = (np.array([c == kind for c in columns]) for kind in ("fine", "plain"))
        # a real's small distances from the centre may matter over orders of magnitude
        bent = jnp.where(fine, jnp.arcsinh(30 * u) / 4, compress(u))
        return jnp.where(plain, raw, bent)

    def fit(self, x: Array, there: Array | np.ndarray | None) -> "ValueEncoder":
        """Learn the scaling from values with any leading axes."""
        # by NumPy: JAX would compile a program for every shape
        rows = np.reshape(np.asarray(x), (-1, *self.spec.shape))
        counted = None if there is None else np.ravel(np.asarray(there))
        return ValueEncoder(self.spec, Scaling.fit(_many_columns(self.spec, rows), counted))


def value_columns(spec: Value, x: Array) -> tuple[Float[Array, " features"], tuple[Column, ...]]:
    """Features of a value before scaling, and what scaling each is to have."""
    base = base_support(spec.support)
    x = jnp.asarray(x)
    raw = x.reshape(-1).astype(float)

    def bound(side: str) -> Array:
        return jnp.asarray(broadcast_bound(str(spec.name), getattr(base, side), spec.shape))

    if base is constraints.boolean:
        return 2 * raw - 1, _columns("plain", raw.size)
    if base is constraints.circular:
        return jnp.concatenate([jnp.sin(raw), jnp.cos(raw)]), _columns("plain", 2 * raw.size)
    if isinstance(base, constraints.integer_interval):
        low, high = bound("lower_bound"), bound("upper_bound")
        span = np.asarray(base.upper_bound) - np.asarray(base.lower_bound)
        categories = int(np.max(span, initial=0)) + 1
        if categories <= LARGEST_ONE_HOT:
            hot = (raw - low)[:, None] == np.arange(categories)
            return hot.astype(float).reshape(-1), _columns("plain", raw.size * categories)
        own_scale = jnp.log(raw - low + 1) - jnp.log(high - raw + 1)
    elif isinstance(base, constraints.integer_greater_than):
        own_scale = jnp.log1p(jnp.maximum(raw - bound("lower_bound"), 0))
    elif isinstance(base, constraints.multinomial):
        own_scale = jnp.log1p(raw)
    elif isinstance(base, constraints.greater_than):
        own_scale = _log(raw - bound("lower_bound"))
    elif isinstance(base, constraints.less_than):
        own_scale = -_log(bound("upper_bound") - raw)
    elif isinstance(base, constraints.interval):
        own_scale = _log(raw - bound("lower_bound")) - _log(bound("upper_bound") - raw)
    elif base is constraints.simplex:
        own_scale = _log(raw)
    elif _has_bijection(base):
        z = biject_to(base)._inverse(interior(base, x.astype(float)))
        own_scale = jnp.clip(jnp.nan_to_num(z.reshape(-1)), -1e30, 1e30)
    else:
        return jnp.concatenate([raw, raw]), _columns("scaled", raw.size) + _columns(
            "fine", raw.size
        )
    return jnp.concatenate([own_scale, raw]), _columns("scaled", own_scale.size + raw.size)


def count_columns(spec: Value) -> int:
    """How many features a value has."""
    blank = jax.ShapeDtypeStruct(spec.shape, jnp.result_type(float))  # type: ignore[no-untyped-call]
    return int(jax.eval_shape(lambda x: value_columns(spec, x)[0], blank).size)


@partial(jax.jit, static_argnums=0)
def _many_columns(spec: Value, rows: Array) -> Array:
    return jax.vmap(lambda x: value_columns(spec, x)[0])(rows)


def _columns(kind: Column, number: int) -> tuple[Column, ...]:
    return (kind,) * number


def _has_bijection(base: Support) -> bool:
    if base.event_dim == 0 or base.is_discrete:
        return False
    try:
        biject_to(base)
    except NotImplementedError:
        return False
    return True


def _log(x: Array) -> Array:
    return jnp.log(jnp.maximum(x, float(np.finfo(x.dtype).tiny)))
