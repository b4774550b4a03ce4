"""A factor's latents and parents in; a trainable q(x | context), and draws from it, out (sec. 3.3).

The estimator is MADE made conditional: hidden units carry labels 0…N-1, a unit labelled d sees
the context and the first d coordinates, and the parameters of coordinate d are read from units
labelled at most d. Units are sorted by label, every label has equally many, and so all weight
matrices are lower triangular in blocks. Density needs one pass over the whole matrices. Drawing
needs one as well: once coordinate d-1 is known, only the units labelled d are left to compute
before coordinate d can be drawn.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from retrodict.coordinates import Coordinate, Latent, Values, blocks
from retrodict.encoders import (
    MLP,
    Context,
    Embedding,
    Encoder,
    Input,
    Scaling,
    _check_names,
    build_encoder,
)
from retrodict.heads import Head, head

Encoding = tuple[Float[Array, " units"], ...]

# One loop draws this many coordinates; its matrices reach only as far as its last one. Shorter
# loops skip more of the zeros above the diagonal, and take longer to compile.
LOOP = 8


@dataclass(frozen=True)
class MADE:
    """Size of the density estimator.

    Attributes:
        hidden: Units in each hidden layer of the autoregressive network.
        components: Components of each mixture.
        context: Units in each layer of the network that prepares the context.
        embedding: Sizes of the encoders of sets and series.
        wide: Chance that a draw uses a wide component anywhere; shared out over the coordinates.
        floor: The same for the uniform distribution mixed into discrete coordinates.
    """

    hidden: tuple[int, ...] = (128, 128)
    components: int = 10
    context: tuple[int, ...] = (64,)
    embedding: Embedding = Embedding()
    wide: float = 0.01
    floor: float = 0.001

    def __post_init__(self) -> None:
        if self.components < 1 or min((*self.hidden, *self.context), default=1) < 1:
            raise ValueError(f"All sizes of {self!r} must be at least 1.")
        if not (0 < self.wide < 1 and 0 < self.floor < 1):
            raise ValueError(f"wide and floor are probabilities strictly between 0 and 1: {self!r}.")

    def build(
        self, key: Key[Array, ""], latents: tuple[Latent, ...], inputs: tuple[Input, ...]
    ) -> "ConditionalMADE":
        """An untrained estimator of the latents given the inputs."""
        return ConditionalMADE(key, self, tuple(latents), tuple(inputs))


class Run(NamedTuple):
    """Consecutive coordinates with one head."""

    start: int
    stop: int
    head: Head
    first_feature: int
    first_param: int

    @property
    def at(self) -> slice:
        """Its place among the coordinates."""
        return slice(self.start, self.stop)


class Known(NamedTuple):
    """What a sampler knows when it comes to a coordinate; zero where it does not yet."""

    features: Array  # of the coordinates drawn
    states: tuple[Array, ...]  # of the hidden units that depend on these alone, by layer
    taken: Array  # of the total that coordinates of the same latent share


@cache
def runs(latents: tuple[Latent, ...], options: MADE) -> tuple[Run, ...]:
    """The coordinates in order, those with the same kind of density together."""
    number = sum(block.size for block in blocks(latents))
    found: list[Run] = []
    start = feature = param = 0
    for family, group in groupby(blocks(latents), lambda block: block.family):
        members = list(group)
        tables = [np.concatenate(column) for column in zip(*(b.table for b in members), strict=True)]
        density = head(
            family,
            components=options.components,
            wide=options.wide / number,
            floor=options.floor / number,
            categories=int(tables[2].max()) + 1 if family == "categorical" else 0,
            curves=tuple(int(code) for code in np.unique(tables[0])),
        )
        stop = start + sum(block.size for block in members)
        found.append(Run(start, stop, density, feature, param))
        feature += (stop - start) * density.features
        param += (stop - start) * density.size
        start = stop
    return tuple(found)


class Labels(NamedTuple):
    """What every unit may see: a unit takes input from those labelled no higher than itself."""

    features: np.ndarray
    hidden: tuple[np.ndarray, ...]
    params: np.ndarray


@cache
def labels(latents: tuple[Latent, ...], options: MADE) -> Labels:
    """Labels of the features of drawn coordinates, of hidden units, of parameters."""
    plan = runs(latents, options)
    number = plan[-1].stop
    repeat = lambda run, size: np.repeat(np.arange(run.start, run.stop), size)  # noqa: E731
    return Labels(
        # a drawn coordinate may be seen from the next label on
        features=np.concatenate([repeat(run, run.head.features) + 1 for run in plan]),
        hidden=tuple(np.repeat(np.arange(number), math.ceil(w / number)) for w in options.hidden),
        params=np.concatenate([repeat(run, run.head.size) for run in plan]),
    )


def _masked(weight: Array, inputs: np.ndarray, outputs: np.ndarray) -> Array:
    return jnp.where(inputs[:, None] <= outputs[None, :], weight, 0)


def _initial(
    key: Key[Array, ""], inputs: np.ndarray, outputs: np.ndarray, gain: float
) -> Float[Array, "inputs outputs"]:
    seen = np.sum(inputs[:, None] <= outputs[None, :], 0)
    spread = np.sqrt(gain / np.maximum(seen, 1))
    return jax.random.normal(key, (inputs.size, outputs.size)) * spread


class ConditionalMADE(eqx.Module):
    """q(x | context) over the latents of one factor. Methods take one draw: `jax.vmap` for more."""

    latents: tuple[Latent, ...] = eqx.field(static=True)
    inputs: tuple[Input, ...] = eqx.field(static=True)
    options: MADE = eqx.field(static=True)
    scaling: Scaling
    encoders: tuple[Encoder, ...]
    trunk: MLP
    from_context: tuple[Float[Array, "context units"], ...]  # one for each layer, the output last
    biases: tuple[Float[Array, " units"], ...]
    from_previous: tuple[Float[Array, "previous units"], ...]
    direct: Float[Array, "features params"]

    def __init__(
        self,
        key: Key[Array, ""],
        options: MADE,
        latents: tuple[Latent, ...],
        inputs: tuple[Input, ...],
    ) -> None:
        plan, unit = runs(latents, options), labels(latents, options)
        self.latents, self.inputs, self.options = latents, inputs, options
        self.scaling = Scaling.unit(plan[-1].stop)
        encoder_key, trunk_key, context_key, weight_key, direct_key = jax.random.split(key, 5)
        keys = jax.random.split(encoder_key, max(len(inputs), 1))
        self.encoders = tuple(
            build_encoder(k, spec, options.embedding)
            for k, spec in zip(keys, inputs, strict=len(inputs) > 0)
        )
        width = sum(encoder.size for encoder in self.encoders)
        self.trunk = MLP(trunk_key, width, options.context if width else ())
        if width:
            width += options.context[-1] if options.context else 0
        layers = (unit.features, *unit.hidden)
        outputs = (*unit.hidden, unit.params)
        everywhere = np.full(width, -1)
        # small output weights: training starts from the heads' own spread
        gains = [1.0] * len(unit.hidden) + [0.01]
        self.from_context = tuple(
            _initial(k, everywhere, out, gain)
            for k, out, gain in zip(
                jax.random.split(context_key, len(outputs)), outputs, gains, strict=True
            )
        )
        start = [np.tile(run.head.bias(), run.stop - run.start) for run in plan]
        self.biases = (*(jnp.zeros(u.size) for u in unit.hidden), jnp.asarray(np.concatenate(start), float))
        self.from_previous = tuple(
            _initial(k, into, out, gain)
            for k, into, out, gain in zip(
                jax.random.split(weight_key, len(outputs)), layers, outputs, gains, strict=True
            )
        )
        self.direct = _initial(direct_key, unit.features, unit.params, 0.01)

    def encode(self, context: Context) -> Encoding:
        """What the context adds to every unit of every layer: worth sharing between draws."""
        _check_names("The network's context", self.inputs, context)
        parts = [encoder(context[encoder.spec.name]) for encoder in self.encoders]  # type: ignore[arg-type]
        c = jnp.concatenate(parts) if parts else jnp.zeros(0)
        if self.trunk.layers:
            c = jnp.concatenate([c, self.trunk(c)])
        return tuple(c @ w + b for w, b in zip(self.from_context, self.biases, strict=True))

    def log_prob(self, context: Context, x: Mapping[str, Array]) -> Float[Array, ""]:
        """log q(x | context)."""
        return self.log_prob_encoded(self.encode(context), x)

    def log_prob_encoded(self, encoding: Encoding, x: Mapping[str, Array]) -> Float[Array, ""]:
        """log q(x | context), the context already encoded."""
        values, log_slope = self._flatten(x)
        c = self._coordinates(values)
        params = self.params(encoding, values)
        log_q = -log_slope
        for run, rows in zip(self._runs, params, strict=True):
            densities = jax.vmap(run.head.log_prob)(rows, values[run.at], _rows(c, run.at))
            log_q = log_q + jnp.sum(densities)
        return log_q

    def params(
        self, encoding: Encoding, values: Float[Array, " coordinates"]
    ) -> tuple[Float[Array, "run params"], ...]:
        """Parameters of all coordinates at once, a row each, for each run."""
        unit = labels(self.latents, self.options)
        c = self._coordinates(values)
        features = jnp.concatenate(
            [
                jax.vmap(run.head.feature)(values[run.at], _rows(c, run.at)).reshape(-1)
                for run in self._runs
            ]
        )
        state, seen = features, unit.features
        for index, own in enumerate(unit.hidden):
            weight = _masked(self.from_previous[index], seen, own)
            new = jax.nn.silu(encoding[index] + state @ weight)
            state = state + new if self._residual(index) else new
            seen = own
        out = encoding[-1] + state @ _masked(self.from_previous[-1], seen, unit.params)
        if unit.hidden:
            out = out + features @ _masked(self.direct, unit.features, unit.params)
        return tuple(
            out[run.first_param : run.first_param + (run.stop - run.start) * run.head.size].reshape(
                run.stop - run.start, run.head.size
            )
            for run in self._runs
        )

    def sample_and_log_prob(
        self, key: Key[Array, ""], context: Context
    ) -> tuple[Values, Float[Array, ""]]:
        """A draw x and log q(x | context)."""
        return self.sample_and_log_prob_encoded(key, self.encode(context))

    def sample_and_log_prob_encoded(
        self, key: Key[Array, ""], encoding: Encoding
    ) -> tuple[Values, Float[Array, ""]]:
        """A draw x and log q(x | context), the context already encoded."""
        return self.draw(encoding, self.noise(key))

    def noise(self, key: Key[Array, ""]) -> Float[Array, "coordinates 2"]:
        """Uniform numbers strictly between 0 and 1, all that a draw needs."""
        uniform = jax.random.uniform(key, (self._runs[-1].stop, 2))
        return uniform + jnp.finfo(uniform.dtype).eps / 2

    def draw(
        self, encoding: Encoding, noise: Float[Array, "coordinates 2"]
    ) -> tuple[Values, Float[Array, ""]]:
        """The draw at given noise, each unit computed once."""
        hidden = labels(self.latents, self.options).hidden
        known = Known(jnp.zeros(0), tuple(jnp.zeros(0) for _ in hidden), jnp.zeros(()))
        values, log_q = [], jnp.zeros(())
        for run in self._runs:
            for start in range(run.start, run.stop, LOOP):
                stop = min(start + LOOP, run.stop)
                known, drawn, densities = self._draw_loop(run, start, stop, known, encoding, noise)
                values.append(drawn)
                log_q = log_q + jnp.sum(densities)
        x = self._unflatten(jnp.concatenate(values))
        if all(block.elementwise for block in blocks(self.latents)):
            return x, log_q
        # A vector's bijection rounds only after all its coordinates are drawn, so the density at
        # what is returned takes a pass of its own.
        return x, self.log_prob_encoded(encoding, x)

    def _draw_loop(
        self, run: Run, start: int, stop: int, known: Known, encoding: Encoding, noise: Array
    ) -> tuple[Known, Array, Array]:
        """Draw coordinates start…stop-1 of one run, given what is known of those before."""
        widths = self._widths
        size, features = run.head.size, run.head.features
        features_stop = run.first_feature + (stop - run.start) * features
        first_param = run.first_param + (start - run.start) * size

        def columns(weight: Array, into: int, first: int, width: int) -> Array:
            """The columns of each coordinate's units, as far down as this loop can need."""
            block = weight[:into, first : first + (stop - start) * width]
            return block.reshape(into, stop - start, width).swapaxes(0, 1)

        def rows(vector: Array, first: int, width: int) -> Array:
            return vector[first : first + (stop - start) * width].reshape(stop - start, width)

        into = (features_stop, *(stop * w for w in widths))
        firsts = (*(start * w for w in widths), first_param)
        sizes = (*widths, size)
        weights = tuple(map(columns, self.from_previous, into, firsts, sizes))
        biases = tuple(map(rows, encoding, firsts, sizes))
        direct = columns(self.direct, features_stop, first_param, size)
        c = _rows(self._coordinates(None), slice(start, stop))

        def step(known: Known, xs: Any) -> tuple[Known, tuple[Array, Array]]:
            index, weights, biases, direct, c, noise = xs
            state, own, states = known.features, None, []
            for layer, width in enumerate(widths):
                new = jax.nn.silu(biases[layer] + state @ weights[layer])
                own = own + new if self._residual(layer) else new
                state = jax.lax.dynamic_update_slice(known.states[layer], own, (index * width,))
                states.append(state)
            params = biases[-1] + state @ weights[-1]
            if widths:
                params = params + known.features @ direct
            taken = jnp.where(c.continues, known.taken, 0)
            c = c._replace(upper=c.upper - taken)
            value = run.head.draw(params, noise, c)
            log_q = run.head.log_prob(params, value, c)
            place = run.first_feature + (index - run.start) * features
            feature = run.head.feature(value, c)
            drawn = jax.lax.dynamic_update_slice(known.features, feature, (place,))
            return Known(drawn, tuple(states), taken + value), (value, log_q)

        room = Known(
            _extend(known.features, features_stop),
            tuple(map(_extend, known.states, into[1:])),
            known.taken,
        )
        xs = (jnp.arange(start, stop), weights, biases, direct, c, noise[start:stop])
        known, (values, log_q) = jax.lax.scan(step, room, xs)
        return known, values, log_q

    def fit_scalings(self, contexts: Context, xs: Mapping[str, Array]) -> "ConditionalMADE":
        """Centres and scales of inputs and latents, from a batch of synthetic draws."""
        _check_names("The network's context", self.inputs, contexts)
        encoders = tuple(e.fit(contexts[e.spec.name], None) for e in self.encoders)

        def locations(x: Values) -> Array:
            values, _ = self._flatten(x)
            c = self._coordinates(None)
            return jnp.concatenate(
                [jax.vmap(run.head.location)(values[run.at], _rows(c, run.at)) for run in self._runs]
            )

        scaling = Scaling.fit(jax.vmap(locations)(dict(xs)))
        return eqx.tree_at(lambda m: (m.encoders, m.scaling), self, (encoders, scaling))

    @property
    def _runs(self) -> tuple[Run, ...]:
        return runs(self.latents, self.options)

    @property
    def _widths(self) -> tuple[int, ...]:
        """Hidden units with one label, in each layer."""
        number = self._runs[-1].stop
        return tuple(own.size // number for own in labels(self.latents, self.options).hidden)

    def _residual(self, layer: int) -> bool:
        return layer > 0 and self._widths[layer] == self._widths[layer - 1]

    def _coordinates(self, values: Array | None) -> Coordinate:
        """Constants of all coordinates; with values, what they leave to be had of a total."""
        tables = zip(*(block.table for block in blocks(self.latents)), strict=True)
        centre, scale = jax.lax.stop_gradient((self.scaling.centre, self.scaling.scale))
        c = Coordinate(*(jnp.asarray(np.concatenate(t)) for t in tables), centre, scale)
        if values is None:
            return c
        return c._replace(upper=c.upper - _earlier(self.latents) @ values)

    def _flatten(self, x: Mapping[str, Array]) -> tuple[Float[Array, " coordinates"], Array]:
        parts, log_slope = [], jnp.zeros(())
        for block in blocks(self.latents):
            latent = block.latent
            if latent.name not in x:
                raise ValueError(
                    f"The network draws {[b.latent.name for b in blocks(self.latents)]}; "
                    f"'{latent.name}' is missing from {sorted(x)}."
                )
            if jnp.shape(x[latent.name]) != latent.shape:
                raise ValueError(
                    f"Site '{latent.name}' needs shape {latent.shape}, found "
                    f"{jnp.shape(x[latent.name])}. Networks take one draw at a time: use jax.vmap."
                )
            value, slope = block.flatten(jnp.asarray(x[latent.name]).astype(float))
            parts.append(value)
            log_slope += slope
        return jnp.concatenate(parts), log_slope

    def _unflatten(self, values: Float[Array, " coordinates"]) -> Values:
        return {
            block.latent.name: block.unflatten(values[block.start : block.start + block.size])
            for block in blocks(self.latents)
        }


def trainable(module: PyTree) -> PyTree:
    """Filter for `equinox.partition`: true at the weights, false at scalings, which are fitted."""
    return jax.tree.map(
        lambda leaf: not isinstance(leaf, Scaling) and eqx.is_inexact_array(leaf),
        module,
        is_leaf=lambda leaf: isinstance(leaf, Scaling),
    )


def _rows(c: Coordinate, at: slice) -> Coordinate:
    return jax.tree.map(lambda column: column[at], c)  # type: ignore[no-any-return]


def _extend(row: Array, size: int) -> Array:
    return jnp.pad(row, (0, size - row.shape[0]))


@cache
def _earlier(latents: tuple[Latent, ...]) -> np.ndarray:
    """Which coordinates take from the same total before each one."""
    continues = np.concatenate([block.table[5] for block in blocks(latents)])
    group = np.cumsum(~continues)
    return np.tril(group[:, None] == group[None, :], -1).astype(float)
