"""The conditional density estimator of a factor's latents given its context.

Encoders turn the inputs of the context into a vector, which adds to every layer of a masked
autoregressive network (Paige & Wood 2016, sec. 3.3). The network draws the coordinates of the
latents, each with a density that suits its support.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from retrodict._xla import threefry
from retrodict._xla.batch_last import batch_last, concatenate_features
from retrodict._xla.jit import floats
from retrodict.estimators import guide_inputs, made_sampler
from retrodict.estimators.coordinates import Latent, blocks, coordinate_table, flatten, unflatten
from retrodict.estimators.encoders import (
    Conditions,
    Context,
    Elements,
    Embedding,
    Encoder,
    Input,
    Series,
    SeriesEncoder,
    Set,
    build_encoder,
    encode_input,
    fit_encoder,
    values_in_order,
)
from retrodict.estimators.features import Scaling, Value
from retrodict.estimators.layers import MLP, linear
from retrodict.estimators.linear_estimate import LinearEstimate
from retrodict.estimators.made import (
    AutoregressiveNetwork,
    Encoding,
    initial_weights,
    shared_totals,
)
from retrodict.estimators.scalar_bijections import Coordinate
from retrodict.estimators.segments import make_segments
from retrodict.types import Values

__all__ = [
    "MADE",
    "ConditionalMADE",
    "Latent",
    "Series",
    "Set",
    "Value",
    "trainable",
]


class GuideSpec(NamedTuple):
    """The form of the linear estimate that the conditions hold (see `guide_inputs`).

    Attributes:
        order: the coordinates in sampling order, by their position among those of the latents.
        channels: the number of observations whose innovations are inputs.
    """

    order: tuple[int, ...]
    channels: int


# The smallest weight of a defensive component, however many copies share the total weight.
MIN_DEFENSIVE_SHARE = 1e-5
# The largest number of coordinates of a factor that counts as small.
MAX_SMALL_FACTOR = 4


@dataclass(frozen=True)
class MADE:
    """Size of the density estimator.

    Attributes:
        hidden: Units in each hidden layer of the autoregressive network. None: two layers of 128;
            of 64 for a factor of few coordinates that is repeated over a plate or in time, or of 32
            if the model also gives a linear estimate of its latents; no network if the conditional
            is known in closed form. If given, every factor has a network of these layers.
        components: Components of each mixture.
        context: Units in each layer of the network that the context passes through. None: one layer
            of half as many units as a hidden layer has by default.
        embedding: Sizes of the encoders of sets and series.
        wide: Probability that a draw uses a heavy-tailed defensive component for any coordinate of
            any copy of a factor; hence also the share of particles that are spent on it.
        floor: The same for the uniform distribution mixed into discrete coordinates.

    Raises:
        ValueError: if a size is below one, or `wide` or `floor` is not between zero and one.

    Example:
        >>> import retrodict as rd
        >>> rd.MADE(hidden=(64, 64), components=5).components
        5
    """

    hidden: tuple[int, ...] | None = None
    components: int = 10
    context: tuple[int, ...] | None = None
    embedding: Embedding = field(default_factory=Embedding)
    wide: float = 0.004
    floor: float = 0.001

    def __post_init__(self) -> None:
        widths = (*(self.hidden or ()), *(self.context or ()))
        if self.components < 1 or min(widths, default=1) < 1:
            raise ValueError(f"All sizes of {self!r} must be at least 1.")
        if not (0 < self.wide < 1 and 0 < self.floor < 1):
            raise ValueError(
                f"wide and floor are probabilities strictly between 0 and 1: {self!r}."
            )

    def build(
        self,
        key: Key[Array, ""],
        latents: tuple[Latent, ...],
        inputs: tuple[Input, ...],
        guide: GuideSpec | None = None,
        copies: int = 1,
    ) -> "ConditionalMADE":
        """Build an untrained estimator.

        Args:
            key: for the initial weights.
            latents: to draw.
            inputs: of the context.
            guide: the form of the model's linear estimate, if there is one.
            copies: how many times a draw from the proposal uses the estimator.
        """
        number = sum(block.size for block in blocks(latents))
        sizes = self.layer_sizes(number, copies, guide)
        # NumPy draws the weights: JAX would compile programs for shapes that occur once.
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return ConditionalMADE(rng, sizes, tuple(latents), tuple(inputs), guide, copies)

    def layer_sizes(
        self, coordinates: int, copies: int, guide: GuideSpec | None = None
    ) -> "LayerSizes":
        """Sizes that suit a factor: a small one, evaluated for every copy, has little to learn."""
        small = coordinates <= MAX_SMALL_FACTOR and copies > 1
        width = (64 if guide is None else 32) if small else 128
        hidden = (width, width) if self.hidden is None else self.hidden
        context = (width // 2,) if self.context is None else self.context
        return LayerSizes(hidden, context, self)


class LayerSizes(NamedTuple):
    """Sizes of the layers of one estimator, and the options that all have in common."""

    hidden: tuple[int, ...]
    context: tuple[int, ...]
    options: MADE


class ConditionalMADE(eqx.Module):
    """q(x | conditions) of the latents of one factor, see `estimator.Estimator`.

    Attributes:
        latents: of the factor.
        inputs: of the context.
        guide: the form of the model's linear estimate, if there is one.
        scaling: of the latents' coordinates.
        encoders: of the inputs.
        trunk: layers between the encoded inputs and the network.
        from_context: weights from the context to each hidden layer, and to the parameters.
        biases: of each hidden layer, and of the parameters.
        network: over the coordinates in sampling order.
    """

    latents: tuple[Latent, ...] = eqx.field(static=True)
    inputs: tuple[Input, ...] = eqx.field(static=True)
    guide: GuideSpec | None = eqx.field(static=True)
    scaling: Scaling
    encoders: tuple[Encoder, ...]
    trunk: MLP
    from_context: tuple[Float[Array, "context units"], ...]
    biases: tuple[Float[Array, " units"], ...]
    network: AutoregressiveNetwork

    def __init__(
        self,
        rng: np.random.Generator,
        sizes: LayerSizes,
        latents: tuple[Latent, ...],
        inputs: tuple[Input, ...],
        guide: GuideSpec | None = None,
        copies: int = 1,
    ) -> None:
        hidden, context, options = sizes
        self.latents, self.inputs, self.guide = latents, inputs, guide
        shares = (
            max(share / copies, MIN_DEFENSIVE_SHARE) for share in (options.wide, options.floor)
        )
        has_channels = guide is not None and guide.channels > 0
        bits_per_step = guide_inputs.BITS_PER_STEP if has_channels else 1
        segments = make_segments(latents, options.components, *shares, bits_per_step)
        num_guide_inputs = 0 if guide is None else guide_inputs.num_inputs(guide.channels)
        self.network = AutoregressiveNetwork(rng, segments, hidden, num_guide_inputs)
        coordinates = segments[-1].stop
        self.scaling = Scaling.unit(coordinates)
        self.encoders = tuple(build_encoder(rng, spec, options.embedding) for spec in self.inputs)
        size = sum(encoder.size for encoder in self.encoders)
        if guide is not None and not guide.channels:
            size += guide_inputs.num_marginal_inputs(coordinates)
        self.trunk = MLP(rng, size, context if size else ())
        if self.trunk.layers:
            size += context[-1]
        degrees = self.network.degrees
        lowest = np.full(size, -1)  # Every unit may see the context.
        outputs = (*degrees.hidden, degrees.params)
        *layers, params = (initial_weights(rng, lowest, degree) for degree in outputs)
        self.from_context = (*map(floats, layers), floats(0.1 * params))
        initial = [np.tile(s.head.initial_bias(), s.num_steps) for s in segments]
        hidden_biases = (floats(np.zeros(degree.size)) for degree in degrees.hidden)
        self.biases = (*hidden_biases, floats(np.concatenate(initial)))

    def encode(self, conditions: Conditions, *, differentiable: bool = True) -> Encoding:
        """Biases of all units that the conditions give.

        Args:
            conditions: a set or series among the inputs may also be given as its summary, an array
                from `summary` or `suffixes`.
            differentiable: if false, a batch is faster.
        """
        values = values_in_order("The network's context", self.inputs, conditions.inputs)
        parts = [encode_input(e, value) for e, value in zip(self.encoders, values, strict=True)]
        estimate = None
        if self.guide is not None:
            estimate = cast(LinearEstimate, conditions.from_model)
            if not self.guide.channels:
                parts.append(guide_inputs.marginal_inputs(estimate, self._constants()))
        weights = (self.trunk, self.from_context, self.biases)
        fast = parts and not differentiable
        biases = (batch_last(_context_biases) if fast else _context_biases)(weights, parts)
        return Encoding(biases, estimate)

    def summary(
        self, name: Hashable, value: "Array | Context | Elements"
    ) -> Float[Array, " features"]:
        """The features of one input, which may replace it in conditions that share it."""
        return encode_input(self._encoder(name), value)

    def suffixes(
        self, name: Hashable, value: "Context | Elements"
    ) -> Float[Array, "time features"]:
        """Features of the steps t, t + 1, … of a series, for every t.

        Raises:
            ValueError: if the input is not a series.
        """
        encoder = self._encoder(name)
        if not isinstance(encoder, SeriesEncoder):
            raise ValueError(f"Input '{name}' is a {type(encoder.spec).__name__}, not a Series.")
        return encoder.suffixes(value)

    def log_prob(self, encoding: Encoding, x: Mapping[str, Array]) -> Float[Array, ""]:
        """log q(x | conditions)."""
        row, log_slope = self._row(x)
        return self.network.log_prob(encoding, row, self._constants(row)) - log_slope

    def noise(
        self, key: Key[Array, ""], copies: tuple[int, ...] = ()
    ) -> Float[Array, "*copies steps numbers"]:
        """The noise of all heads for every copy, from uniform numbers strictly between 0 and 1."""
        segments = self.network.segments
        numbers = max(s.head.num_uniforms for s in segments)
        uniform = threefry.uniform(key, (segments[-1].steps.stop, numbers, *copies))
        uniform = uniform + float(np.finfo(uniform.dtype).eps) / 2
        parts = []
        for s in segments:
            noise = jax.vmap(s.head.noise)(uniform[s.steps, : s.head.num_uniforms])
            unused = jnp.zeros((s.num_steps, numbers - s.head.num_uniforms, *copies), noise.dtype)
            parts.append(jnp.concatenate([noise, unused], 1))
        # Callers vectorise over leading axes of copies; in memory they are last, see `batch_last`.
        return jnp.moveaxis(jnp.concatenate(parts), (0, 1), (-2, -1))

    def sample(
        self, encoding: Encoding, noise: Float[Array, "steps numbers"]
    ) -> tuple[Values, Float[Array, ""]]:
        """The draw with some noise, and its log q."""
        row, log_q = made_sampler.sample(self.network, encoding, noise, self._constants())
        if self.guide is not None:
            row = row[np.argsort(self.guide.order)]
        x = unflatten(self.latents, row)
        if all(block.elementwise for block in blocks(self.latents)):
            return x, log_q
        # The bijection of a vector rounds after all coordinates are drawn, so that the density of
        # the returned value has to be evaluated separately.
        return x, self.log_prob(encoding, x)

    def fit_scalings(self, conditions: Conditions, xs: Mapping[str, Array]) -> "ConditionalMADE":
        """Fit centres and scales of inputs and latents to a batch of synthetic draws."""
        values = values_in_order("The network's context", self.inputs, conditions.inputs)
        encoders = tuple(
            fit_encoder(e, value, None) for e, value in zip(self.encoders, values, strict=True)
        )
        scaling = Scaling.fit(_locations(self, dict(xs)))
        fitted: ConditionalMADE = eqx.tree_at(
            lambda m: (m.encoders, m.scaling), self, (encoders, scaling)
        )
        return fitted

    def _constants(self, row: Array | None = None) -> Coordinate[Array]:
        """Constants of all coordinates; given a row, upper bounds are what remains of totals."""
        c = Coordinate(*(jnp.asarray(column) for column in coordinate_table(self.latents)))
        if self.guide is not None:
            c = Coordinate(*(column[np.array(self.guide.order)] for column in c))
        centre, scale = jax.lax.stop_gradient((self.scaling.centre, self.scaling.scale))
        c = c._replace(centre=centre, scale=scale)
        return c if row is None else c._replace(upper=c.upper - shared_totals(self.latents) @ row)

    def _row(self, x: Mapping[str, Array]) -> tuple[Array, Array]:
        """The coordinates in sampling order, and log |det| of the map from them to the draw."""
        row, log_slope = flatten(self.latents, x)
        return (row if self.guide is None else row[np.array(self.guide.order)]), log_slope

    def _encoder(self, name: Hashable) -> Encoder:
        for encoder in self.encoders:
            if encoder.spec.name == name:
                return encoder
        raise ValueError(f"No input '{name}' among {[spec.name for spec in self.inputs]}.")


def _context_biases(
    weights: tuple[MLP, tuple[Array, ...], tuple[Array, ...]],
    parts: list[Float[Array, "features *rows"]],
) -> tuple[Float[Array, "units *rows"], ...]:
    """Biases of the hidden units of each layer, and of the parameters, from encoded inputs."""
    trunk, from_context, biases = weights
    context = concatenate_features(parts)
    if trunk.layers:
        context = concatenate_features([context, trunk(context)])
    # One product for all layers: contexts are short, and may be many.
    joined = linear(jnp.concatenate(from_context, 1), jnp.concatenate(biases), context)
    ends = np.cumsum([bias.size for bias in biases])[:-1]
    return tuple(jnp.split(joined, ends))


@eqx.filter_jit
def _locations(net: ConditionalMADE, xs: Values) -> Float[Array, "draws coordinates"]:
    """The coordinates of draws on the scales on which they are standardised."""
    c = net._constants()

    def locations(x: Values) -> Array:
        row, _ = net._row(x)
        parts = [
            jax.vmap(s.head.location)(
                row[s.coordinates], Coordinate(*(column[s.coordinates] for column in c))
            )
            for s in net.network.segments
        ]
        return jnp.concatenate(parts)

    return jax.vmap(locations)(xs)


def trainable(module: PyTree) -> PyTree:
    """A filter for `equinox.partition`: true for weights, false for scalings, which are fitted."""
    return jax.tree.map(
        lambda leaf: not isinstance(leaf, Scaling) and eqx.is_inexact_array(leaf),
        module,
        is_leaf=lambda leaf: isinstance(leaf, Scaling),
    )


def has_weights(network: PyTree) -> bool:
    """Whether there are weights to train."""
    return bool(jax.tree.leaves(eqx.filter(network, trainable(network))))
