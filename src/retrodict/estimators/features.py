"""Encoders of plain values: features of size about one on the scale of the support.

Each support has a scale on which its values are comparable: the logarithm of a positive number or a
count, the logit of a proportion. On this scale values are centred and scaled by the statistics of
synthetic data.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import biject_to, constraints

from retrodict._xla.jit import floats
from retrodict.estimators.coordinates import broadcast_bound
from retrodict.estimators.heads import compress
from retrodict.estimators.vector_bijections import Support, base_support, interior

# Integers with more values are encoded as numbers.
MAX_ONE_HOT = 32

# How a column is standardised: and compressed, and expanded near the centre, or not at all.
ColumnScaling = Literal["scaled", "fine", "plain"]
# Which entries of the leading axes of a batch are used; None for all.
BatchMask: TypeAlias = Array | np.ndarray | None


@dataclass(frozen=True)
class Value:
    """An input that is a plain value, such as an aligned parent."""

    name: Hashable
    support: Support = field(hash=False)
    shape: tuple[int, ...]


class Scaling(eqx.Module):
    """Centre and scale, fitted to data and not trained.

    They are order statistics, because priors in common use have no mean.
    """

    centre: Float[Array, " features"]
    scale: Float[Array, " features"]

    def __call__(self, x: Float[Array, " features"]) -> Float[Array, " features"]:
        """Standardise."""
        centre, scale = jax.lax.stop_gradient((self.centre, self.scale))
        return (x - centre) / scale

    @staticmethod
    def unit(size: int) -> "Scaling":
        """The scaling that leaves values unchanged."""
        return Scaling(floats(np.zeros(size)), floats(np.ones(size)))

    @staticmethod
    def fit(rows: Float[Array, "rows features"], exists: BatchMask = None) -> "Scaling":
        """Fit the median, and the interquartile range in standard deviations of a normal.

        Args:
            rows: of data; values that are not finite are ignored.
            exists: which rows are used.
        """
        # With twenty thousand rows the error of a quartile is about one percent.
        stride = max(1, rows.shape[0] // 20_000)
        sample = np.asarray(rows)[::stride]
        usable = np.isfinite(sample)
        if exists is not None:
            usable &= np.asarray(exists)[::stride, None]
        columns = zip(sample.T, usable.T, strict=True)
        fitted = np.array([_centre_and_scale(column[mask]) for column, mask in columns], float)
        centre, scale = fitted.reshape(-1, 2).T
        return Scaling(floats(centre), floats(scale))


def _centre_and_scale(values: np.ndarray) -> tuple[float, float]:
    if values.size == 0:
        return 0.0, 1.0
    low, centre, high = np.quantile(values.astype(np.float64), [0.25, 0.5, 0.75])
    scale = (high - low) / 1.349
    if scale == 0:
        # If more than half of the draws are equal, take the typical distance of the others.
        offsets = np.abs(values - centre)
        scale = np.median(offsets[offsets > 0]) if offsets.any() else 0.0
    # A constant, up to rounding, is not scaled.
    return float(centre), float(scale) if scale > 1e-6 * abs(centre) + 1e-30 else 1.0


class ValueEncoder(eqx.Module):
    """Encodes a value: on the scale of its support, centred, scaled and compressed."""

    spec: Value = eqx.field(static=True)
    scaling: Scaling

    @property
    def size(self) -> int:
        """The number of features."""
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
        # Small distances of a real from its centre may matter over orders of magnitude.
        compressed = jnp.where(fine, jnp.arcsinh(30 * u) / 4, compress(u))
        return jnp.where(plain, raw, compressed)

    def fit(self, x: Array, exists: BatchMask) -> "ValueEncoder":
        """Fit the scaling to values with any leading axes."""
        # NumPy, because JAX would compile a program for every shape.
        rows = np.reshape(np.asarray(x), (-1, *self.spec.shape))
        mask = None if exists is None else np.ravel(np.asarray(exists))
        return ValueEncoder(self.spec, Scaling.fit(_all_columns(self.spec, rows), mask))


def value_columns(
    spec: Value, x: Array
) -> tuple[Float[Array, " features"], tuple[ColumnScaling, ...]]:
    """Features of a value before scaling, and how each is scaled."""
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
        if categories <= MAX_ONE_HOT:
            hot = (raw - low)[:, None] == np.arange(categories)
            return hot.astype(float).reshape(-1), _columns("plain", raw.size * categories)
        scaled = jnp.log(raw - low + 1) - jnp.log(high - raw + 1)
    elif isinstance(base, constraints.integer_greater_than):
        scaled = jnp.log1p(jnp.maximum(raw - bound("lower_bound"), 0))
    elif isinstance(base, constraints.multinomial):
        scaled = jnp.log1p(raw)
    elif isinstance(base, constraints.greater_than):
        scaled = _log(raw - bound("lower_bound"))
    elif isinstance(base, constraints.less_than):
        scaled = -_log(bound("upper_bound") - raw)
    elif isinstance(base, constraints.interval):
        scaled = _log(raw - bound("lower_bound")) - _log(bound("upper_bound") - raw)
    elif base is constraints.simplex:
        scaled = _log(raw)
    elif _has_bijection(base):
        z = biject_to(base)._inverse(interior(base, x.astype(float)))
        scaled = jnp.clip(jnp.nan_to_num(z.reshape(-1)), -1e30, 1e30)
    else:
        return jnp.concatenate([raw, raw]), _columns("scaled", raw.size) + _columns(
            "fine", raw.size
        )
    return jnp.concatenate([scaled, raw]), _columns("scaled", scaled.size + raw.size)


def num_columns(spec: Value) -> int:
    """The number of features of a value."""
    blank = jax.ShapeDtypeStruct(spec.shape, jnp.result_type(float))  # type: ignore[no-untyped-call]
    return int(jax.eval_shape(lambda x: value_columns(spec, x)[0], blank).size)


@partial(jax.jit, static_argnums=0)
def _all_columns(spec: Value, rows: Array) -> Array:
    return jax.vmap(lambda x: value_columns(spec, x)[0])(rows)


def _columns(kind: ColumnScaling, number: int) -> tuple[ColumnScaling, ...]:
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
