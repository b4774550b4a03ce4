"""A factor's parents in; one vector of context for its network out (sec. 3.3; permutation
invariance after Zaheer et al. 2017, "Deep sets"; the recurrence after Feng et al. 2024, "Were
RNNs all we needed?").

An aligned parent is a plain input. A whole plate is a set: the same weights for any number of
elements, the same answer in any order, and the count among what is known. A whole series is read
from its end, so that the summary of what is still to come at every step comes with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key
from numpyro.distributions import biject_to, constraints

from retrodict.coordinates import base_support, interior
from retrodict.heads import compress

LARGEST_ONE_HOT = 32


@dataclass(frozen=True)
class Value:
    """An aligned parent: a plain input."""

    name: str
    support: constraints.Constraint = field(hash=False)
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Set:
    """A whole plate: elements in no order. A set inside a set is a plate inside a plate."""

    name: str
    elements: tuple["Value | Set | Series", ...]


@dataclass(frozen=True)
class Series:
    """A whole time series: steps in order."""

    name: str
    elements: tuple["Value | Set", ...]


Input = Value | Set | Series
Context = Mapping[str, "Array | Context"]
Encoder = Union["ValueEncoder", "SetEncoder", "SeriesEncoder"]


class Scaling(eqx.Module):
    """Centre and scale learned from data by order statistics; kept with the weights, not trained."""

    centre: Float[Array, " features"]
    scale: Float[Array, " features"]

    def __call__(self, x: Float[Array, " features"]) -> Float[Array, " features"]:
        """Standardise."""
        centre, scale = jax.lax.stop_gradient((self.centre, self.scale))
        return (x - centre) / scale

    @staticmethod
    def unit(size: int) -> "Scaling":
        """Leave values as they are."""
        return Scaling(jnp.zeros(size), jnp.ones(size))

    @staticmethod
    def fit(rows: Float[Array, "rows features"], there: Bool[Array, " rows"] | None = None) -> "Scaling":
        """Median, and the spread of the middle half as a normal's standard deviation."""
        stride = max(1, rows.shape[0] // 100_000)
        rows = rows[::stride]
        known = jnp.isfinite(rows)
        if there is not None:
            known &= there[::stride, None]
        low, centre, high = jnp.nanquantile(
            jnp.where(known, rows, jnp.nan), jnp.array([0.25, 0.5, 0.75]), axis=0
        )
        centre = jnp.nan_to_num(centre)
        scale = jnp.nan_to_num(high - low) / 1.349
        # Where more than half the draws are one value, the rest still have a size.
        offset = jnp.where(known, jnp.abs(rows - centre), 0)
        typical = jnp.nanmedian(jnp.where(offset > 0, offset, jnp.nan), axis=0)
        scale = jnp.where(scale > 0, scale, jnp.nan_to_num(typical))
        scale = jnp.where(scale > 1e-6 * jnp.abs(centre) + 1e-30, scale, 1.0)
        return Scaling(centre, scale)


class MLP(eqx.Module):
    """Linear layers with a smooth nonlinearity after each."""

    layers: tuple[eqx.nn.Linear, ...]

    def __init__(self, key: Key[Array, ""], size: int, widths: tuple[int, ...]) -> None:
        sizes = (size, *widths)
        keys = jax.random.split(key, len(widths))
        self.layers = tuple(
            _he(k, eqx.nn.Linear(a, b, key=k))
            for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
        )

    def __call__(self, x: Float[Array, " size"]) -> Float[Array, " width"]:
        """Apply the layers in turn."""
        for layer in self.layers:
            x = jax.nn.silu(layer(x))
        return x


def _he(key: Key[Array, ""], linear: eqx.nn.Linear) -> eqx.nn.Linear:
    weight = jax.nn.initializers.he_normal(in_axis=1, out_axis=0)(key, linear.weight.shape)
    return eqx.tree_at(lambda m: (m.weight, m.bias), linear, (weight, jnp.zeros(weight.shape[0])))


Column = Literal["scaled", "fine", "plain"]


class ValueEncoder(eqx.Module):
    """A value as features: the scale on which its support makes it comparable, standardised."""

    spec: Value = eqx.field(static=True)
    scaling: Scaling

    @property
    def size(self) -> int:
        """How many features."""
        return self.scaling.centre.shape[0]

    def __call__(self, x: Array) -> Float[Array, " features"]:
        """Features of one value."""
        _check_shape(self.spec.name, self.spec.shape, x)
        raw, columns = value_columns(self.spec, x)
        u = self.scaling(raw)
        fine, plain = (np.array([c == kind for c in columns]) for kind in ("fine", "plain"))
        # small differences near the centre, whose size may span orders of magnitude
        bent = jnp.where(fine, jnp.arcsinh(30 * u) / 4, compress(u))
        return jnp.where(plain, raw, bent)

    def fit(self, x: Array, there: Array | None) -> "ValueEncoder":
        """Learn the scaling from values with any leading axes."""
        rows = x.reshape(-1, *self.spec.shape)
        columns = jax.vmap(lambda v: value_columns(self.spec, v)[0])(rows)
        scaling = Scaling.fit(columns, None if there is None else there.reshape(-1))
        return eqx.tree_at(lambda m: m.scaling, self, scaling)


def value_columns(spec: Value, x: Array) -> tuple[Float[Array, " features"], tuple[Column, ...]]:
    """Unscaled features of a value, and how each is to be scaled."""
    base = base_support(spec.support)
    x = jnp.asarray(x)
    raw = x.reshape(-1).astype(float)
    spread = lambda bound: np.broadcast_to(np.asarray(bound), spec.shape).reshape(-1)  # noqa: E731
    if base is constraints.boolean:
        return 2 * raw - 1, ("plain",) * raw.size
    if isinstance(base, constraints.integer_interval):
        low, high = spread(base.lower_bound), spread(base.upper_bound)
        categories = int(np.max(high - low, initial=0)) + 1
        if categories <= LARGEST_ONE_HOT:
            hot = (raw - low)[:, None] == np.arange(categories)
            return hot.astype(float).reshape(-1), ("plain",) * (raw.size * categories)
        shared = jnp.log(raw - low + 1) - jnp.log(high - raw + 1)
    elif isinstance(base, constraints.integer_greater_than):
        shared = jnp.log1p(jnp.maximum(raw - spread(base.lower_bound), 0))
    elif isinstance(base, constraints.multinomial):
        shared = jnp.log1p(raw)
    elif base is constraints.circular:
        return jnp.concatenate([jnp.sin(raw), jnp.cos(raw)]), ("plain",) * (2 * raw.size)
    elif isinstance(base, constraints.greater_than):
        shared = _log(raw - spread(base.lower_bound))
    elif isinstance(base, constraints.less_than):
        shared = -_log(spread(base.upper_bound) - raw)
    elif isinstance(base, constraints.interval):
        shared = _log(raw - spread(base.lower_bound)) - _log(spread(base.upper_bound) - raw)
    elif base is constraints.simplex:
        shared = _log(raw)
    elif base.event_dim > 0 and not base.is_discrete and type(base) in biject_to._registry:
        z = biject_to(base)._inverse(interior(base, x.astype(float)))
        shared = jnp.clip(jnp.nan_to_num(z.reshape(-1)), -1e30, 1e30)
    else:
        return jnp.concatenate([raw, raw]), ("scaled",) * raw.size + ("fine",) * raw.size
    return jnp.concatenate([shared, raw]), ("scaled",) * (shared.size + raw.size)


def _log(x: Array) -> Array:
    return jnp.log(jnp.maximum(x, jnp.finfo(x.dtype).tiny))


class SetEncoder(eqx.Module):
    """Mean and maximum of the elements' embeddings, with the logarithm of their number.

    A posterior given n exchangeable elements depends on them through means and narrows with n,
    so these are what the network needs to go from any number to any other.
    """

    spec: Set = eqx.field(static=True)
    elements: tuple[Encoder, ...]
    embed: MLP
    summarise: MLP
    count: Scaling

    @property
    def size(self) -> int:
        """How many features: the summary, the mean embedding itself and the count."""
        return self.summarise.layers[-1].out_features + self.embed.layers[-1].out_features + 1

    def __call__(self, context: Context) -> Float[Array, " features"]:
        """Summary of one set, in no order."""
        features, there = _embed_elements(self, context)
        embedded = jax.vmap(self.embed)(features)
        number = jnp.sum(there)
        mean = jnp.sum(jnp.where(there[:, None], embedded, 0), 0) / jnp.maximum(number, 1)
        most = jnp.max(jnp.where(there[:, None], embedded, -jnp.inf), 0, initial=-1e6)
        most = jnp.where(number > 0, most, 0)
        count = compress(self.count(jnp.log(jnp.maximum(number, 1).astype(float))[None]))
        pooled = jnp.concatenate([mean, most, count])
        return jnp.concatenate([self.summarise(pooled), mean, count])

    def fit(self, context: Context, there: Array | None) -> "SetEncoder":
        """Learn all scalings inside from contexts with any leading axes."""
        return _fit_plate(self, context, there)


class SeriesEncoder(eqx.Module):
    """A gated recurrence from the last step to the first, so every suffix has its summary.

        h_t = (1 - g_t) ⊙ h_{t+1} + g_t ⊙ v_t,   g_t and v_t functions of step t alone

    is linear in h and runs as an associative scan. Running means over the suffix go beside it: a
    gate forgets, but what a whole series says of a constant is an average.
    """

    spec: Series = eqx.field(static=True)
    elements: tuple[Encoder, ...]
    embed: MLP
    gates: tuple[eqx.nn.Linear, ...]
    values: tuple[eqx.nn.Linear, ...]
    summarise: MLP
    count: Scaling

    @property
    def size(self) -> int:
        """How many features."""
        return self.summarise.layers[-1].out_features + 1

    def __call__(self, context: Context) -> Float[Array, " features"]:
        """Summary of the whole series."""
        return self.suffixes(context)[0]

    def suffixes(self, context: Context) -> Float[Array, "time features"]:
        """Summary of steps t, t+1, … for every t."""
        features, there = _embed_elements(self, context)
        weight = there[:, None].astype(float)
        state = jax.vmap(self.embed)(features)
        number = jnp.cumsum(weight[::-1], 0)[::-1]
        parts = []
        for gate, value in zip(self.gates, self.values, strict=True):
            g = weight * jax.nn.sigmoid(jax.vmap(gate)(state))
            state = _recur_backwards(1 - g, g * jax.vmap(value)(state))
            mean = jnp.cumsum((weight * jax.nn.silu(state))[::-1], 0)[::-1]
            parts += [state, mean / jnp.maximum(number, 1)]
        log_number = jnp.log(jnp.maximum(number, 1))
        count = compress(jax.vmap(self.count)(log_number))
        pooled = jnp.concatenate([*parts, count], -1)
        return jnp.concatenate([jax.vmap(self.summarise)(pooled), count], -1)

    def fit(self, context: Context, there: Array | None) -> "SeriesEncoder":
        """Learn all scalings inside from contexts with any leading axes."""
        return _fit_plate(self, context, there)


def _recur_backwards(keep: Array, add: Array) -> Array:
    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return later[0] * earlier[0], earlier[0] * later[1] + earlier[1]

    return jax.lax.associative_scan(join, (keep, add), reverse=True)[1]


def _embed_elements(
    encoder: SetEncoder | SeriesEncoder, context: Context
) -> tuple[Float[Array, "elements features"], Bool[Array, " elements"]]:
    parts = _parts(encoder, context)
    lengths = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(parts)}
    if len(lengths) != 1:
        raise ValueError(
            f"Input '{encoder.spec.name}': all its arrays need one leading axis of the same "
            f"length, one entry an element; found lengths {sorted(lengths)}."
        )
    (length,) = lengths
    there = jnp.asarray(context.get("mask", np.ones(length, bool)))
    if there.shape != (length,):
        raise ValueError(
            f"Input '{encoder.spec.name}': its mask needs shape {(length,)}, one entry an "
            f"element; found {there.shape}."
        )
    encoded = [jax.vmap(e)(part) for e, part in zip(encoder.elements, parts, strict=True)]
    # what is masked out may be anything, NaN included, and must leave no trace
    return jnp.where(there[:, None], jnp.concatenate(encoded, -1), 0), there


def _parts(encoder: SetEncoder | SeriesEncoder, context: Context) -> list["Array | Context"]:
    if not isinstance(context, Mapping):
        raise ValueError(
            f"Input '{encoder.spec.name}' is a {type(encoder.spec).__name__}: expected a dict of "
            f"its elements' arrays, found {type(context).__name__}."
        )
    _check_names(encoder.spec.name, encoder.spec.elements, context)
    return [context[e.spec.name] for e in encoder.elements]


def _fit_plate(encoder, context, there):  # type: ignore[no-untyped-def]
    parts = _parts(encoder, context)
    shape = _leading(encoder, parts)
    mask = context.get("mask")
    here = jnp.ones(shape, bool) if mask is None else jnp.broadcast_to(jnp.asarray(mask), shape)
    if there is not None:
        here &= there[..., None]
    number = jnp.maximum(here.sum(-1), 1).astype(float)
    count = Scaling.fit(jnp.log(number).reshape(-1, 1))
    fitted = tuple(e.fit(p, here) for e, p in zip(encoder.elements, parts, strict=True))
    return eqx.tree_at(lambda m: (m.elements, m.count), encoder, (fitted, count))


def _leading(encoder: SetEncoder | SeriesEncoder, parts: list["Array | Context"]) -> tuple[int, ...]:
    """Axes before an element's own: those of the batch, of the plates around, and of this one."""
    first, part = encoder.elements[0], parts[0]
    if isinstance(first, ValueEncoder):
        shape = jnp.shape(part)
        return shape[: len(shape) - len(first.spec.shape)]
    return _leading(first, _parts(first, part))[:-1]  # type: ignore[arg-type]


def _check_shape(name: str, shape: tuple[int, ...], x: Array) -> None:
    if jnp.shape(x) != shape:
        raise ValueError(
            f"Input '{name}' needs shape {shape}, found {jnp.shape(x)}. Networks take one value "
            "at a time: use jax.vmap for a batch."
        )


def _check_names(name: str, specs: tuple[Input, ...], context: Context) -> None:
    expected, found = {spec.name for spec in specs}, set(context) - {"mask"}
    if missing := expected - found:
        raise ValueError(
            f"{name} needs inputs {sorted(expected)}; missing {sorted(missing)}, "
            f"found {sorted(found)}."
        )


@dataclass(frozen=True)
class Embedding:
    """Sizes of the encoders of sets and series."""

    element: tuple[int, ...] = (64, 64)
    summary: tuple[int, ...] = (64,)
    recurrent: int = 64
    recurrences: int = 2


def build_encoder(key: Key[Array, ""], spec: Input, sizes: Embedding) -> Encoder:
    """An encoder with fresh weights."""
    if isinstance(spec, Value):
        columns = jax.eval_shape(
            lambda x: value_columns(spec, x)[0], jax.ShapeDtypeStruct(spec.shape, jnp.result_type(float))
        )
        return ValueEncoder(spec, Scaling.unit(columns.shape[0]))
    if not spec.elements:
        raise ValueError(f"Input '{spec.name}' is a {type(spec).__name__} without elements.")
    element_key, embed_key, gate_key, summary_key = jax.random.split(key, 4)
    keys = jax.random.split(element_key, len(spec.elements))
    elements = tuple(build_encoder(k, s, sizes) for k, s in zip(keys, spec.elements, strict=True))
    width = sizes.element[-1]
    embed = MLP(embed_key, sum(e.size for e in elements), sizes.element)
    if isinstance(spec, Set):
        summarise = MLP(summary_key, 2 * width + 1, sizes.summary)
        return SetEncoder(spec, elements, embed, summarise, Scaling.unit(1))
    widths = (width,) + (sizes.recurrent,) * sizes.recurrences
    gate_keys = jax.random.split(gate_key, 2 * sizes.recurrences)
    layers = [
        eqx.nn.Linear(a, b, key=k)
        for k, (a, b) in zip(gate_keys, 2 * list(zip(widths[:-1], widths[1:], strict=True)), strict=True)
    ]
    summarise = MLP(summary_key, 2 * sizes.recurrent * sizes.recurrences + 1, sizes.summary)
    return SeriesEncoder(
        spec,
        elements,
        embed,
        tuple(layers[: sizes.recurrences]),
        tuple(layers[sizes.recurrences :]),
        summarise,
        Scaling.unit(1),
    )
