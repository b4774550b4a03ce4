"""A factor's latents and parents in; a trainable q(x | context), and draws from it, out (sec. 3.3).

The joint conditional density estimator, put together: encoders turn the parents into a vector,
the vector adds to every layer of an autoregressive network, and the network's coordinates are the
latents' own, each with the density its support asks for.
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
    MLP,
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
    linear,
    named,
)
from retrodict.estimators.features import Scaling, Value
from retrodict.estimators.made import Autoregressive, Encoding, initial, rows_of, runs, sharing
from retrodict.estimators.scalar_bijections import Coordinate
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
    """That conditions hold a linear-Gaussian estimate of the latents, made by the model.

    Attributes:
        order: the coordinates as drawn, by their place in the order of the latents.
        channels: observations whose innovations are shown.
    """

    order: tuple[int, ...]
    channels: int


# However many copies share it, the wide component is met now and then.
MIN_DEFENSIVE_SHARE = 1e-5
# A factor of no more coordinates counts as small.
FEW_COORDINATES = 4


@dataclass(frozen=True)
class MADE:
    """Size of the density estimator.

    Attributes:
        hidden: Units in each hidden layer of the autoregressive network. None: two layers of 128,
            or of 64 for a factor of few coordinates that is repeated, over a plate or in time; of
            32 if the model itself says what it expects of them; none if what it says is exact. If
            given, there are networks even then.
        components: Components of each mixture.
        context: Units in each layer of the network that prepares the context. None: one layer of
            half as many.
        embedding: Sizes of the encoders of sets and series.
        wide: Chance that a draw uses a wide component anywhere; shared out over the coordinates of
            all copies of a factor, so that it is also the share of particles that are spent on it.
        floor: The same for the uniform distribution mixed into discrete coordinates.
    """

    hidden: tuple[int, ...] | None = None
    components: int = 10
    context: tuple[int, ...] | None = None
    embedding: Embedding = field(default_factory=Embedding)
    wide: float = 0.004
    floor: float = 0.001

    def __post_init__(self) -> None:
        given = (*(self.hidden or ()), *(self.context or ()))
        if self.components < 1 or min(given, default=1) < 1:
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
        """An untrained estimator of the latents given the inputs, used `copies` times a draw."""
        number = sum(block.size for block in blocks(latents))
        sizes = self.sized(number, copies, guide)
        # NumPy draws the weights: nothing to compile for shapes that occur once
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return ConditionalMADE(rng, sizes, tuple(latents), tuple(inputs), guide, copies)

    def sized(self, coordinates: int, copies: int, guide: GuideSpec | None = None) -> "Sized":
        """With sizes that suit a factor: a small one, run for every copy, has little to learn."""
        small = coordinates <= FEW_COORDINATES and copies > 1
        width = (64 if guide is None else 32) if small else 128
        hidden = (width, width) if self.hidden is None else self.hidden
        context = (width // 2,) if self.context is None else self.context
        return Sized(hidden, context, self)


class Sized(NamedTuple):
    """Sizes of one network's layers, and what is the same for all."""

    hidden: tuple[int, ...]
    context: tuple[int, ...]
    options: MADE


class ConditionalMADE(eqx.Module):
    """q(x | context) over the latents of one factor. Methods take one draw: `jax.vmap` for more."""

    latents: tuple[Latent, ...] = eqx.field(static=True)
    inputs: tuple[Input, ...] = eqx.field(static=True)
    guide: GuideSpec | None = eqx.field(static=True)
    scaling: Scaling  # of the latents' coordinates
    encoders: tuple[Encoder, ...]
    trunk: MLP
    from_context: tuple[Float[Array, "context units"], ...]  # to each layer, the parameters last
    biases: tuple[Float[Array, " units"], ...]
    network: Autoregressive

    def __init__(
        self,
        rng: np.random.Generator,
        sizes: Sized,
        latents: tuple[Latent, ...],
        inputs: tuple[Input, ...],
        guide: GuideSpec | None = None,
        copies: int = 1,
    ) -> None:
        hidden, context, options = sizes
        self.latents, self.inputs, self.guide = latents, inputs, guide
        shares = (
            max(chance / copies, MIN_DEFENSIVE_SHARE) for chance in (options.wide, options.floor)
        )
        together = guide_inputs.BITS_PER_STEP if guide is not None and guide.channels else 1
        plan = runs(latents, options.components, *shares, together)
        guide_size = 0 if guide is None else guide_inputs.num_inputs(guide.channels)
        self.network = Autoregressive(rng, plan, hidden, guide_size)
        self.scaling = Scaling.unit(plan[-1].stop)
        self.encoders = tuple(build_encoder(rng, spec, options.embedding) for spec in self.inputs)
        size = sum(encoder.size for encoder in self.encoders)
        if guide is not None and not guide.channels:
            size += guide_inputs.num_marginal_inputs(plan[-1].stop)
        self.trunk = MLP(rng, size, context if size else ())
        if self.trunk.layers:
            size += context[-1]
        unit = self.network.labels
        outputs = (*unit.hidden, unit.params)
        everywhere = np.full(size, -1)
        *layers, params = (initial(rng, everywhere, to) for to in outputs)
        self.from_context = (*map(floats, layers), floats(0.1 * params))
        start = np.concatenate([np.tile(run.head.bias(), run.steps) for run in plan])
        self.biases = (*(floats(np.zeros(to.size)) for to in unit.hidden), floats(start))

    def encode(self, conditions: Conditions, *, differentiable: bool = True) -> Encoding:
        """What the conditions add to every unit of every layer: worth sharing between draws.

        A set or a series may also come already summarised, as `summary` or `suffixes` gives it.
        An encoding that need not be differentiable is faster for a batch.
        """
        values = named("The network's context", self.inputs, conditions.inputs)
        parts = [encode_input(e, value) for e, value in zip(self.encoders, values, strict=True)]
        expected = None
        if self.guide is not None:
            expected = cast(guide_inputs.LinearEstimate, conditions.from_model)
            if not self.guide.channels:
                parts.append(guide_inputs.marginal_inputs(expected, self._constants()))
        weights = (self.trunk, self.from_context, self.biases)
        fast = parts and not differentiable
        encoded = (batch_last(_layers) if fast else _layers)(weights, parts)
        return Encoding(encoded, expected)

    def summary(
        self, name: Hashable, value: "Array | Context | Elements"
    ) -> Float[Array, " features"]:
        """One input summarised, to stand for it in contexts that have it in common."""
        return encode_input(self._encoder(name), value)

    def suffixes(
        self, name: Hashable, value: "Context | Elements"
    ) -> Float[Array, "time features"]:
        """Summaries of steps t, t+1, … of a series, for every t."""
        encoder = self._encoder(name)
        if not isinstance(encoder, SeriesEncoder):
            raise ValueError(f"Input '{name}' is a {type(encoder.spec).__name__}, not a Series.")
        return encoder.suffixes(value)

    def log_prob(self, encoding: Encoding, x: Mapping[str, Array]) -> Float[Array, ""]:
        """log q(x | conditions), the conditions already encoded."""
        row, log_slope = self._row(x)
        return self.network.log_prob(encoding, row, self._constants(row)) - log_slope

    def noise(
        self, key: Key[Array, ""], copies: tuple[int, ...] = ()
    ) -> Float[Array, "*copies steps numbers"]:
        """All the chance that draws need: `Head.chance` of numbers strictly between 0 and 1."""
        plan = self.network.plan
        numbers = max(run.head.uniforms for run in plan)
        uniform = threefry.uniform(key, (plan[-1].at_steps.stop, numbers, *copies))
        uniform = uniform + float(np.finfo(uniform.dtype).eps) / 2
        parts = []
        for run in plan:
            own = jax.vmap(run.head.chance)(uniform[run.at_steps, : run.head.uniforms])
            unused = jnp.zeros((run.steps, numbers - run.head.uniforms, *copies), own.dtype)
            parts.append(jnp.concatenate([own, unused], 1))
        # copies come first for who vectorises over them, but are kept last: see `rows`
        return jnp.moveaxis(jnp.concatenate(parts), (0, 1), (-2, -1))

    def sample(
        self, encoding: Encoding, noise: Float[Array, "steps numbers"]
    ) -> tuple[Values, Float[Array, ""]]:
        """The draw that some noise leads to, and its log q."""
        row, log_q = made_sampler.draw(self.network, encoding, noise, self._constants())
        x = unflatten(self.latents, row if self.guide is None else row[self._back])
        if all(block.elementwise for block in blocks(self.latents)):
            return x, log_q
        # A vector's bijection rounds only after all its coordinates are drawn, so the density at
        # what is returned takes a pass of its own.
        return x, self.log_prob(encoding, x)

    def fit_scalings(self, conditions: Conditions, xs: Mapping[str, Array]) -> "ConditionalMADE":
        """Centres and scales of inputs and latents, from a batch of synthetic draws."""
        given = named("The network's context", self.inputs, conditions.inputs)
        encoders = tuple(
            fit_encoder(e, value, None) for e, value in zip(self.encoders, given, strict=True)
        )
        fitted: ConditionalMADE = eqx.tree_at(
            lambda m: (m.encoders, m.scaling),
            self,
            (encoders, Scaling.fit(_locations(self, dict(xs)))),
        )
        return fitted

    def _constants(self, row: Array | None = None) -> Coordinate[Array]:
        """Constants of all coordinates; given their values, with what is left of shared totals."""
        c = Coordinate(*(jnp.asarray(column) for column in coordinate_table(self.latents)))
        if self.guide is not None:
            c = Coordinate(*(column[np.array(self.guide.order)] for column in c))
        centre, scale = jax.lax.stop_gradient((self.scaling.centre, self.scaling.scale))
        c = c._replace(centre=centre, scale=scale)
        return c if row is None else c._replace(upper=c.upper - sharing(self.latents) @ row)

    def _row(self, x: Mapping[str, Array]) -> tuple[Array, Array]:
        """The coordinates in the order drawn, and log |det| of the way to the draw."""
        row, log_slope = flatten(self.latents, x)
        return (row if self.guide is None else row[np.array(self.guide.order)]), log_slope

    @property
    def _back(self) -> np.ndarray:
        assert self.guide is not None
        back: np.ndarray = np.argsort(self.guide.order)
        return back

    def _encoder(self, name: Hashable) -> Encoder:
        for encoder in self.encoders:
            if encoder.spec.name == name:
                return encoder
        raise ValueError(f"No input '{name}' among {[spec.name for spec in self.inputs]}.")


def _layers(
    weights: tuple[MLP, tuple[Array, ...], tuple[Array, ...]],
    parts: list[Float[Array, "features *rows"]],
) -> tuple[Float[Array, "units *rows"], ...]:
    """What features of the context add to the units of each layer, the parameters last."""
    trunk, from_context, biases = weights
    c = concatenate_features(parts)
    if trunk.layers:
        c = concatenate_features([c, trunk(c)])
    # one product, not one for each layer: contexts are short, and may be many
    added = linear(jnp.concatenate(from_context, 1), jnp.concatenate(biases), c)
    ends = np.cumsum([bias.size for bias in biases])[:-1]
    return tuple(jnp.split(added, ends))


@eqx.filter_jit
def _locations(net: ConditionalMADE, xs: Values) -> Float[Array, "draws coordinates"]:
    """Where the coordinates of draws lie before they are centred and scaled."""
    c = net._constants()

    def one(x: Values) -> Array:
        row, _ = net._row(x)
        runs = net.network.plan
        parts = [jax.vmap(run.head.location)(row[run.at], rows_of(c, run.at)) for run in runs]
        return jnp.concatenate(parts)

    return jax.vmap(one)(xs)


def trainable(module: PyTree) -> PyTree:
    """Filter for `equinox.partition`: true at the weights, false at scalings, which are fitted."""
    return jax.tree.map(
        lambda leaf: not isinstance(leaf, Scaling) and eqx.is_inexact_array(leaf),
        module,
        is_leaf=lambda leaf: isinstance(leaf, Scaling),
    )


def has_weights(network: PyTree) -> bool:
    """Whether there are weights to train."""
    return bool(jax.tree.leaves(eqx.filter(network, trainable(network))))
