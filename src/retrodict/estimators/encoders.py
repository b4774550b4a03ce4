"""A factor's parents in; one vector of context for its network out (sec. 3.3).

An aligned parent is a plain input. A whole plate is a set (Zaheer et al. 2017, "Deep sets"): the
same weights for any number of elements, the same answer in any order, and the count among what is
known. A whole series is read from its end by a linear recurrence (Feng et al. 2024, "Were RNNs all
we needed?"), so that at every step the summary of what is still to come is there as well.
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

from retrodict._xla.jit import floats
from retrodict.estimators.features import Scaling, Value, ValueEncoder, count_columns
from retrodict.estimators.heads import compress


@dataclass(frozen=True)
class Set:
    """A whole plate: elements in no order. A set inside a set is a plate inside a plate."""

    name: Hashable
    elements: tuple["Value | Set | Series", ...]


@dataclass(frozen=True)
class Series:
    """A whole time series: steps in order."""

    name: Hashable
    elements: tuple["Value | Set", ...]


Input = Value | Set | Series
Context = Mapping[Hashable, Union[Array, "Context", "Elements"]]


class Elements(NamedTuple):
    """The elements of a set or series: arrays with a leading axis of elements, and which exist."""

    values: Context
    mask: Bool[Array, " elements"] | None = None


class Conditions(NamedTuple):
    """What one copy of a factor is conditioned on.

    Attributes:
        inputs: by name of the input, an array, or the elements of a set or series.
        from_model: what the model itself says of the latents: a linear-Gaussian estimate, or the
            parameters of a closed-form conditional; None if neither is known.
    """

    inputs: Context
    from_model: PyTree = None


Encoder = Union[ValueEncoder, "SetEncoder", "SeriesEncoder"]
Plate = TypeVar("Plate", "SetEncoder", "SeriesEncoder")


@dataclass(frozen=True)
class Embedding:
    """Sizes of the encoders of sets and series.

    Attributes:
        element: Units in each layer of the network applied to every element.
        summary: Units in each layer of the network applied to what was pooled.
        recurrent: Units of each recurrence over a series.
        recurrences: How many recurrences, each over the one before.
    """

    element: tuple[int, ...] = (64, 64)
    summary: tuple[int, ...] = (64,)
    recurrent: int = 64
    recurrences: int = 2


class Linear(eqx.Module):
    """Wx + b, with a variance of W for an input that half the units pass on."""

    weight: Float[Array, "size width"]
    bias: Float[Array, " width"]

    def __init__(self, rng: np.random.Generator, size: int, width: int) -> None:
        scale = np.sqrt(2 / max(size, 1))
        self.weight = floats(scale * rng.standard_normal((size, width)))
        self.bias = floats(np.zeros(width))

    def __call__(self, x: Float[Array, "size *rows"]) -> Float[Array, "width *rows"]:
        """Apply the map."""
        return linear(self.weight, self.bias, x)


def linear(
    weight: Float[Array, "size width"],
    bias: Float[Array, " width"],
    x: Float[Array, "size *rows"],
) -> Float[Array, "width *rows"]:
    """Wx + b, of one vector, or of as many as there are columns."""
    if x.ndim == 1:
        return x @ weight + bias
    # in this order, not weight.T @ x, it is a product for which XLA has a quicker way
    return (x.T @ weight).T + bias[:, None]


class MLP(eqx.Module):
    """Linear layers with a smooth nonlinearity after each."""

    layers: tuple[Linear, ...]

    def __init__(self, rng: np.random.Generator, size: int, widths: tuple[int, ...]) -> None:
        self.layers = tuple(Linear(rng, a, b) for a, b in pairwise((size, *widths)))

    def __call__(self, x: Float[Array, "size *rows"]) -> Float[Array, "width *rows"]:
        """Apply the layers in turn."""
        for layer in self.layers:
            x = jax.nn.silu(layer(x))
        return x


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
        return _width(self.summarise) + _width(self.embed) + 1

    def __call__(self, context: "Context | Elements") -> Float[Array, " features"]:
        """Summary of one set, in no order."""
        features, there = _encode_elements(self, context)
        embedded = jax.vmap(self.embed)(features)
        number = jnp.sum(there)
        mean = jnp.sum(jnp.where(there[:, None], embedded, 0), 0) / jnp.maximum(number, 1)
        most = jnp.max(jnp.where(there[:, None], embedded, -jnp.inf), 0, initial=-1e6)
        most = jnp.where(number > 0, most, 0)
        count = compress(self.count(jnp.log(jnp.maximum(number, 1).astype(float))[None]))
        pooled = jnp.concatenate([mean, most, count])
        return jnp.concatenate([self.summarise(pooled), mean, count])

    def fit(self, context: "Context | Elements", there: Array | np.ndarray | None) -> "SetEncoder":
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
    gates: tuple[Linear, ...]
    values: tuple[Linear, ...]
    summarise: MLP
    count: Scaling

    @property
    def size(self) -> int:
        """How many features."""
        return _width(self.summarise) + 1

    def __call__(self, context: "Context | Elements") -> Float[Array, " features"]:
        """Summary of the whole series."""
        return self.suffixes(context)[0]

    def suffixes(self, context: "Context | Elements") -> Float[Array, "time features"]:
        """Summary of steps t, t+1, … for every t."""
        features, there = _encode_elements(self, context)
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

    def fit(
        self, context: "Context | Elements", there: Array | np.ndarray | None
    ) -> "SeriesEncoder":
        """Learn all scalings inside from contexts with any leading axes."""
        return _fit_plate(self, context, there)


def _recur_backwards(keep: Array, add: Array) -> Array:
    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return later[0] * earlier[0], earlier[0] * later[1] + earlier[1]

    _, state = jax.lax.associative_scan(join, (keep, add), reverse=True)
    return cast(Array, state)


def _encode_elements(
    plate: "SetEncoder | SeriesEncoder", context: "Context | Elements"
) -> tuple[Float[Array, "elements features"], Bool[Array, " elements"]]:
    name, (values, mask) = plate.spec.name, elements_of(plate.spec, context)
    parts = parts_of(plate.spec, values)
    lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0 for leaf in jax.tree.leaves(parts)}
    if len(lengths) != 1:
        raise ValueError(
            f"Input '{name}': all its arrays need a leading axis of one length, with an entry for "
            f"each element; found lengths {sorted(lengths)}."
        )
    (length,) = lengths
    there = jnp.asarray(np.ones(length, bool) if mask is None else mask)
    if there.shape != (length,):
        raise ValueError(
            f"Input '{name}': its mask needs shape {(length,)}, an entry for each element; "
            f"found {there.shape}."
        )
    encoded = [
        jax.vmap(lambda value, e=e: encode_input(e, value))(part)
        for e, part in zip(plate.elements, parts, strict=True)
    ]
    # what is masked out may be anything, NaN included, and must leave no trace
    return jnp.where(there[:, None], jnp.concatenate(encoded, -1), 0), there


def elements_of(spec: Set | Series, context: "Context | Elements") -> Elements:
    """The elements of a set or series; a plain mapping is one in which all exist."""
    if isinstance(context, Elements):
        return context
    if not isinstance(context, Mapping):
        raise ValueError(
            f"Input '{spec.name}' is a {type(spec).__name__}: expected a dict with the arrays of "
            f"{[str(e.name) for e in spec.elements]}, found {type(context).__name__}."
        )
    return Elements(context)


def parts_of(spec: Set | Series, values: Context) -> list["Array | Context | Elements"]:
    """The arrays of a set's or a series' elements, in order."""
    return named(f"Input '{spec.name}'", spec.elements, values)


def named(
    owner: str, specs: tuple[Input, ...], context: Context
) -> list["Array | Context | Elements"]:
    """What the context holds for each input, in order."""
    if missing := [str(spec.name) for spec in specs if spec.name not in context]:
        raise ValueError(
            f"{owner} needs values for {[str(spec.name) for spec in specs]}: {missing} missing, "
            f"found {sorted(map(str, context))}."
        )
    return [context[spec.name] for spec in specs]


def encode_input(
    encoder: Encoder, value: "Array | Context | Elements"
) -> Float[Array, " features"]:
    """Features of one input; a set or series given as an array counts as already encoded."""
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
    plate: Plate, context: "Context | Elements", there: Array | np.ndarray | None
) -> Plate:
    values, mask = elements_of(plate.spec, context)
    parts = parts_of(plate.spec, values)
    shape = _leading(plate, values)
    # NumPy: JAX would compile a program for every operation.
    here = np.broadcast_to(np.asarray(True if mask is None else mask), shape)
    if there is not None:
        here = here & np.asarray(there)[..., None]
    number = np.log(np.maximum(here.sum(-1), 1))
    count = Scaling.fit(number.reshape(-1, 1), None if there is None else np.ravel(there))
    elements = tuple(fit_encoder(e, p, here) for e, p in zip(plate.elements, parts, strict=True))
    fitted: Plate = eqx.tree_at(lambda m: (m.elements, m.count), plate, (elements, count))
    return fitted


def fit_encoder(
    encoder: Encoder, context: "Array | Context | Elements", there: Array | np.ndarray | None
) -> Encoder:
    """The encoder with its scalings learned from contexts with any leading axes.

    `there` says, for each entry of the leading axes, whether it is to be counted.
    """
    if isinstance(encoder, ValueEncoder):
        return encoder.fit(cast(Array, context), there)
    return encoder.fit(cast("Context | Elements", context), there)


def _leading(plate: "SetEncoder | SeriesEncoder", values: Context) -> tuple[int, ...]:
    """Axes before an element's own: of the batch, of the plates around, and of this one."""
    first, part = plate.elements[0], parts_of(plate.spec, values)[0]
    if isinstance(first, ValueEncoder):
        shape = jnp.shape(cast(Array, part))
        return shape[: len(shape) - len(first.spec.shape)]
    return _leading(first, elements_of(first.spec, cast("Context | Elements", part)).values)[:-1]


def build_encoder(rng: np.random.Generator, spec: Input, sizes: Embedding) -> Encoder:
    """An encoder with fresh weights."""
    if isinstance(spec, Value):
        return ValueEncoder(spec, Scaling.unit(count_columns(spec)))
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
