"""Encoders of a factor's inputs: plain values, sets and series.

An aligned parent is a plain value. A whole plate is a set (Zaheer et al. 2017, "Deep sets"): its
encoder has the same weights for any number of elements, does not depend on their order, and gives
their number as a feature. A whole series is encoded from its end by a linear recurrence (Feng et
al. 2024, "Were RNNs all we needed?"), so that every suffix has its encoding.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar, Union, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from retrodict.estimators.features import BatchMask, Scaling, Value, ValueEncoder, num_columns
from retrodict.estimators.heads import compress
from retrodict.estimators.layers import MLP, Linear


@dataclass(frozen=True)
class Set:
    """A whole plate, whose elements have no order; a nested plate is a set of sets."""

    name: Hashable
    elements: tuple["Value | Set | Series", ...]


@dataclass(frozen=True)
class Series:
    """A whole time series, whose elements are its steps in order."""

    name: Hashable
    elements: tuple["Value | Set", ...]


Input = Value | Set | Series
Context = Mapping[Hashable, Union[Array, "Context", "Elements"]]


class Elements(NamedTuple):
    """The elements of a set or series.

    Attributes:
        values: arrays with a leading axis of elements.
        mask: which elements exist; None if all do.
    """

    values: Context
    mask: Bool[Array, " elements"] | None = None


class Conditions(NamedTuple):
    """What one copy of a factor is conditioned on.

    Attributes:
        inputs: by name, the array of a value, or the elements of a set or series.
        from_model: what the model gives: a linear estimate of the latents, or the parameters of
            their closed-form conditional; None if neither is known.
    """

    inputs: Context
    from_model: PyTree = None


Encoder = Union[ValueEncoder, "SetEncoder", "SeriesEncoder"]
PlateEncoder = TypeVar("PlateEncoder", "SetEncoder", "SeriesEncoder")


@dataclass(frozen=True)
class Embedding:
    """Sizes of the encoders of sets and series.

    Attributes:
        element: Units in each layer of the network applied to every element.
        summary: Units in each layer of the network applied to the pooled elements.
        recurrent: Units of each recurrence over a series.
        recurrences: The number of recurrences, each over the one before.
    """

    element: tuple[int, ...] = (64, 64)
    summary: tuple[int, ...] = (64,)
    recurrent: int = 64
    recurrences: int = 2


class SetEncoder(eqx.Module):
    """Mean and maximum of the elements' embeddings, and the logarithm of their number.

    A posterior given n exchangeable elements depends on them through means and narrows with n:
    with these features the network generalises to other numbers of elements.

    Attributes:
        spec: the input.
        elements: encoders of the inputs of an element.
        embed: applied to every encoded element.
        summarise: applied to the pooled embeddings.
        count: scaling of the logarithm of the number of elements.
    """

    spec: Set = eqx.field(static=True)
    elements: tuple[Encoder, ...]
    embed: MLP
    summarise: MLP
    count: Scaling

    @property
    def size(self) -> int:
        """The number of features: summary, mean embedding and number of elements."""
        return _width(self.summarise) + _width(self.embed) + 1

    def __call__(self, context: "Context | Elements") -> Float[Array, " features"]:
        """Features of one set."""
        features, exists = _encode_elements(self, context)
        embedded = jax.vmap(self.embed)(features)
        number = jnp.sum(exists)
        mean = jnp.sum(jnp.where(exists[:, None], embedded, 0), 0) / jnp.maximum(number, 1)
        largest = jnp.max(jnp.where(exists[:, None], embedded, -jnp.inf), 0, initial=-1e6)
        largest = jnp.where(number > 0, largest, 0)
        count = compress(self.count(jnp.log(jnp.maximum(number, 1).astype(float))[None]))
        pooled = jnp.concatenate([mean, largest, count])
        return jnp.concatenate([self.summarise(pooled), mean, count])

    def fit(self, context: "Context | Elements", exists: BatchMask) -> "SetEncoder":
        """Fit all scalings inside to contexts with any leading axes."""
        return _fit_plate(self, context, exists)


class SeriesEncoder(eqx.Module):
    """A gated recurrence from the last step to the first, which encodes every suffix.

        h_t = (1 − g_t) ⊙ h_{t+1} + g_t ⊙ v_t,   g_t and v_t functions of step t alone

    is linear in h and computed by an associative scan. Means over the suffix are further features:
    gates forget, but the information of a series on a constant is an average.

    Attributes:
        spec: the input.
        elements: encoders of the inputs of a step.
        embed: applied to every encoded step.
        gates, values: the layers of g_t and v_t, for each recurrence.
        summarise: applied to the states and means.
        count: scaling of the logarithm of the number of steps.
    """

    spec: Series = eqx.field(static=True)
    elements: tuple[Encoder, ...]
    embed: MLP
    gates: tuple[Linear, ...]
    values: tuple[Linear, ...]
    summarise: MLP
    count: Scaling

    @property
    def size(self) -> int:
        """The number of features: summary and number of steps."""
        return _width(self.summarise) + 1

    def __call__(self, context: "Context | Elements") -> Float[Array, " features"]:
        """Features of a whole series."""
        return self.suffixes(context)[0]

    def suffixes(self, context: "Context | Elements") -> Float[Array, "time features"]:
        """Features of the steps t, t + 1, … for every t."""
        features, exists = _encode_elements(self, context)
        weight = exists[:, None].astype(float)
        state = jax.vmap(self.embed)(features)
        number = jnp.cumsum(weight[::-1], 0)[::-1]
        parts = []
        for gate, value in zip(self.gates, self.values, strict=True):
            g = weight * jax.nn.sigmoid(jax.vmap(gate)(state))
            state = _recur_backwards(1 - g, g * jax.vmap(value)(state))
            total = jnp.cumsum((weight * jax.nn.silu(state))[::-1], 0)[::-1]
            parts += [state, total / jnp.maximum(number, 1)]
        log_number = jnp.log(jnp.maximum(number, 1))
        count = compress(jax.vmap(self.count)(log_number))
        pooled = jnp.concatenate([*parts, count], -1)
        return jnp.concatenate([jax.vmap(self.summarise)(pooled), count], -1)

    def fit(self, context: "Context | Elements", exists: BatchMask) -> "SeriesEncoder":
        """Fit all scalings inside to contexts with any leading axes."""
        return _fit_plate(self, context, exists)


def _recur_backwards(keep: Array, add: Array) -> Array:
    """h_t = keep_t ⊙ h_{t+1} + add_t, from h = 0 after the last step."""

    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return later[0] * earlier[0], earlier[0] * later[1] + earlier[1]

    _, state = jax.lax.associative_scan(join, (keep, add), reverse=True)
    return cast(Array, state)


def _encode_elements(
    plate: "SetEncoder | SeriesEncoder", context: "Context | Elements"
) -> tuple[Float[Array, "elements features"], Bool[Array, " elements"]]:
    """Features of every element, zero for those that do not exist, and which exist."""
    name, (values, mask) = plate.spec.name, as_elements(plate.spec, context)
    parts = element_values(plate.spec, values)
    lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0 for leaf in jax.tree.leaves(parts)}
    if len(lengths) != 1:
        raise ValueError(
            f"Input '{name}': all its arrays need a leading axis of one length, with an entry for "
            f"each element; found lengths {sorted(lengths)}."
        )
    (length,) = lengths
    exists = jnp.asarray(np.ones(length, bool) if mask is None else mask)
    if exists.shape != (length,):
        raise ValueError(
            f"Input '{name}': its mask needs shape {(length,)}, an entry for each element; "
            f"found {exists.shape}."
        )
    encoded = [
        jax.vmap(lambda value, e=e: encode_input(e, value))(part)
        for e, part in zip(plate.elements, parts, strict=True)
    ]
    # Elements that do not exist may hold any values, including NaN.
    return jnp.where(exists[:, None], jnp.concatenate(encoded, -1), 0), exists


def as_elements(spec: Set | Series, context: "Context | Elements") -> Elements:
    """The elements of a set or series; all elements of a plain mapping exist."""
    if isinstance(context, Elements):
        return context
    if not isinstance(context, Mapping):
        raise ValueError(
            f"Input '{spec.name}' is a {type(spec).__name__}: expected a dict with the arrays of "
            f"{[str(e.name) for e in spec.elements]}, found {type(context).__name__}."
        )
    return Elements(context)


def element_values(spec: Set | Series, values: Context) -> list["Array | Context | Elements"]:
    """The values of the inputs of an element, in order."""
    return values_in_order(f"Input '{spec.name}'", spec.elements, values)


def values_in_order(
    owner: str, specs: tuple[Input, ...], context: Context
) -> list["Array | Context | Elements"]:
    """The values of some inputs in a context, in order.

    Raises:
        ValueError: if an input has no value.
    """
    if missing := [str(spec.name) for spec in specs if spec.name not in context]:
        raise ValueError(
            f"{owner} needs values for {[str(spec.name) for spec in specs]}: {missing} missing, "
            f"found {sorted(map(str, context))}."
        )
    return [context[spec.name] for spec in specs]


def encode_input(
    encoder: Encoder, value: "Array | Context | Elements"
) -> Float[Array, " features"]:
    """Features of one input; an array in place of a set or series is taken as its features."""
    if isinstance(encoder, ValueEncoder):
        return encoder(cast(Array, value))
    if isinstance(value, Mapping | Elements):
        return encoder(value)
    if jnp.shape(value) != (encoder.size,):
        raise ValueError(
            f"Input '{encoder.spec.name}' is a {type(encoder.spec).__name__}: expected a dict with "
            f"the arrays of {[str(e.name) for e in encoder.spec.elements]}, or a summary of shape "
            f"{(encoder.size,)}; found an array of shape {jnp.shape(value)}."
        )
    return value


def _fit_plate(
    plate: PlateEncoder, context: "Context | Elements", exists: BatchMask
) -> PlateEncoder:
    values, mask = as_elements(plate.spec, context)
    parts = element_values(plate.spec, values)
    shape = _leading_shape(plate, values)
    # NumPy, because JAX would compile a program for every operation.
    element_exists = np.broadcast_to(np.asarray(True if mask is None else mask), shape)
    if exists is not None:
        element_exists = element_exists & np.asarray(exists)[..., None]
    log_number = np.log(np.maximum(element_exists.sum(-1), 1))
    count = Scaling.fit(log_number.reshape(-1, 1), None if exists is None else np.ravel(exists))
    elements = tuple(
        fit_encoder(e, part, element_exists) for e, part in zip(plate.elements, parts, strict=True)
    )
    fitted: PlateEncoder = eqx.tree_at(lambda m: (m.elements, m.count), plate, (elements, count))
    return fitted


def fit_encoder(
    encoder: Encoder, context: "Array | Context | Elements", exists: BatchMask
) -> Encoder:
    """Fit the scalings of an encoder.

    Args:
        encoder: to fit.
        context: values of its input, with any leading axes.
        exists: which entries of the leading axes are used; None for all.
    """
    if isinstance(encoder, ValueEncoder):
        return encoder.fit(cast(Array, context), exists)
    return encoder.fit(cast("Context | Elements", context), exists)


def _leading_shape(plate: "SetEncoder | SeriesEncoder", values: Context) -> tuple[int, ...]:
    """Sizes of the axes of the batch, of the plates around, and of the plate itself."""
    first, part = plate.elements[0], element_values(plate.spec, values)[0]
    if isinstance(first, ValueEncoder):
        shape = jnp.shape(cast(Array, part))
        return shape[: len(shape) - len(first.spec.shape)]
    elements = as_elements(first.spec, cast("Context | Elements", part))
    return _leading_shape(first, elements.values)[:-1]


def build_encoder(rng: np.random.Generator, spec: Input, sizes: Embedding) -> Encoder:
    """Build an encoder with random weights."""
    if isinstance(spec, Value):
        return ValueEncoder(spec, Scaling.unit(num_columns(spec)))
    if not spec.elements:
        raise ValueError(f"Input '{spec.name}' is a {type(spec).__name__} without elements.")
    elements = tuple(build_encoder(rng, element, sizes) for element in spec.elements)
    embed = MLP(rng, sum(e.size for e in elements), sizes.element)
    if isinstance(spec, Set):
        summarise = MLP(rng, 2 * sizes.element[-1] + 1, sizes.summary)
        return SetEncoder(spec, elements, embed, summarise, Scaling.unit(1))
    widths = (sizes.element[-1],) + (sizes.recurrent,) * sizes.recurrences
    gates = tuple(Linear(rng, a, b) for a, b in pairwise(widths))
    values = tuple(Linear(rng, a, b) for a, b in pairwise(widths))
    summarise = MLP(rng, 2 * sizes.recurrent * sizes.recurrences + 1, sizes.summary)
    return SeriesEncoder(spec, elements, embed, gates, values, summarise, Scaling.unit(1))


def _width(mlp: MLP) -> int:
    return int(mlp.layers[-1].bias.size)
