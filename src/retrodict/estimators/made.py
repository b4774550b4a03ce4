"""The masked autoregressive network: densities of rows of coordinates.

The network is MADE (Germain et al. 2015) with a context. Features of drawn coordinates, hidden
units and parameters have degrees, and a unit receives input from units of no higher degree.
Parameters of step d have degree d, as have the hidden units that may depend on the d steps before
it; the features of step d have degree d + 1. Units are sorted by degree, with equally many hidden
units of each, so that all weight matrices are block triangular. A density takes one pass through
the whole matrices. A draw takes one pass as well (see `made_sampler`): once step d − 1 is drawn,
only the units of degree d remain to be computed before step d can be drawn. If the model gives a
linear estimate (see `linear_estimate`), the units of degree d also see the estimate of step d given
the steps before.

A step draws one coordinate, or a few bits at once as one of all their patterns.
"""

import math
from functools import cache
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._xla.jit import floats
from retrodict._xla.tuning import TRIANGULAR_BLOCK_SIZE
from retrodict.estimators import guide_inputs
from retrodict.estimators.coordinates import Latent, coordinate_table
from retrodict.estimators.linear_estimate import LinearEstimate, condition_all
from retrodict.estimators.scalar_bijections import Coordinate
from retrodict.estimators.segments import Segment


class Encoding(NamedTuple):
    """Encoded conditions.

    Attributes:
        biases: of the hidden units of each layer, and of the parameters.
        estimate: the model's linear estimate, if there is one.
    """

    biases: tuple[Float[Array, " units"], ...]
    estimate: LinearEstimate | None = None


class Degrees(NamedTuple):
    """Degrees of the features of coordinates, hidden units of each layer, and parameters."""

    features: Int[np.ndarray, " features"]
    hidden: tuple[Int[np.ndarray, " units"], ...]
    params: Int[np.ndarray, " params"]


@cache
def unit_degrees(segments: tuple[Segment, ...], widths: tuple[int, ...]) -> Degrees:
    """Degrees in ascending order, with `widths` hidden units of each degree."""
    number = segments[-1].steps.stop
    steps = [np.arange(segment.steps.start, segment.steps.stop) for segment in segments]
    heads = [segment.head for segment in segments]
    features = [np.repeat(at, head.num_features) for head, at in zip(heads, steps, strict=True)]
    params = [np.repeat(at, head.num_params) for head, at in zip(heads, steps, strict=True)]
    return Degrees(
        np.concatenate(features) + 1,
        tuple(np.repeat(np.arange(number), width) for width in widths),
        np.concatenate(params),
    )


def masked_product(
    state: Float[Array, " inputs"],
    weight: Float[Array, "inputs outputs"],
    inputs: Int[np.ndarray, " inputs"],
    outputs: Int[np.ndarray, " outputs"],
) -> Float[Array, " outputs"]:
    """Multiply by the weights between units of sorted degrees that lead to no lower degree.

    Args:
        state: of the inputs.
        weight: of which entries that lead to a lower degree are ignored.
        inputs, outputs: degrees.
    """
    blocks = max(1, min(weight.shape) // TRIANGULAR_BLOCK_SIZE)
    parts = []
    for columns in np.array_split(np.arange(outputs.size), blocks):
        block = slice(columns[0], columns[-1] + 1)
        rows = int(np.searchsorted(inputs, outputs[columns[-1]], "right"))
        mask = inputs[:rows, None] <= outputs[None, block]
        parts.append(state[:rows] @ jnp.where(mask, weight[:rows, block], 0))
    return jnp.concatenate(parts)


def initial_weights(
    rng: np.random.Generator,
    inputs: Int[np.ndarray, " inputs"],
    outputs: Int[np.ndarray, " outputs"],
) -> Float[np.ndarray, "inputs outputs"]:
    """Random weights between units of some degrees, scaled by the number of unmasked inputs."""
    fan_in = np.sum(inputs[:, None] <= outputs[None, :], 0)
    weights = rng.standard_normal((inputs.size, outputs.size))
    scaled: np.ndarray = weights / np.sqrt(np.maximum(fan_in, 1))
    return scaled


@cache
def shared_totals(latents: tuple[Latent, ...]) -> Float[np.ndarray, "coordinates coordinates"]:
    """One where the column's coordinate precedes the row's and shares its total, else zero."""
    group = np.cumsum(~coordinate_table(latents).continues_total)
    shares: np.ndarray = np.tril(group[:, None] == group[None, :], -1).astype(float)
    return shares


class AutoregressiveNetwork(eqx.Module):
    """Weights between features of coordinates, hidden units and parameters.

    Attributes:
        segments: of the coordinates, in sampling order.
        widths: the number of hidden units of each degree, by layer.
        layers: weights of all layers; the first from features, the last to parameters.
        skip: weights from features to parameters, if there are hidden layers.
        guide_layers: weights from the inputs that the model's estimate gives each step, to each
            hidden layer and then to the parameters of each segment; empty without an estimate.
    """

    segments: tuple[Segment, ...] = eqx.field(static=True)
    widths: tuple[int, ...] = eqx.field(static=True)
    layers: tuple[Float[Array, "previous units"], ...]
    skip: Float[Array, "features params"] | None
    guide_layers: tuple[Float[Array, "steps inputs width"], ...]

    def __init__(
        self,
        rng: np.random.Generator,
        segments: tuple[Segment, ...],
        hidden: tuple[int, ...],
        num_guide_inputs: int = 0,
    ) -> None:
        self.segments = segments
        number = segments[-1].steps.stop
        self.widths = tuple(math.ceil(width / number) for width in hidden)
        unit = self.degrees
        inputs, outputs = (unit.features, *unit.hidden), (*unit.hidden, unit.params)
        *layers, last = (initial_weights(rng, *pair) for pair in zip(inputs, outputs, strict=True))
        # Small weights to the parameters: training starts near the heads' initial densities.
        self.layers = (*map(floats, layers), floats(0.1 * last))
        skip = initial_weights(rng, unit.features, unit.params) if hidden else None
        self.skip = None if skip is None else floats(0.1 * skip)
        shapes = [(number, num_guide_inputs, width) for width in self.widths]
        shapes += [(s.num_steps, num_guide_inputs, s.head.num_params) for s in segments]
        scales = [1.0] * len(self.widths) + [0.1] * len(segments)
        self.guide_layers = tuple(
            floats(scale * rng.standard_normal(shape) / np.sqrt(num_guide_inputs))
            for scale, shape in zip(scales, shapes, strict=True)
            if num_guide_inputs
        )

    @property
    def degrees(self) -> Degrees:
        """Degrees of all units."""
        return unit_degrees(self.segments, self.widths)

    def params(
        self, encoding: Encoding, row: Float[Array, " coordinates"], c: Coordinate[Array]
    ) -> tuple[Float[Array, "steps params"], ...]:
        """Parameters of all steps, by segment.

        If there is an estimate, the constants must hold the coordinates' anchors.
        """
        unit = self.degrees
        biases = self._biases(encoding, row, c)
        features = jnp.concatenate(
            [
                jax.vmap(s.head.features)(s.by_step(row), s.constants(c)).reshape(-1)
                for s in self.segments
            ]
        )
        state, inputs = features, unit.features
        for layer, outputs in enumerate(unit.hidden):
            product = masked_product(state, self.layers[layer], inputs, outputs)
            new = jax.nn.silu(biases[layer] + product)
            state, inputs = (state + new if self.is_residual(layer) else new), outputs
        params = biases[-1] + masked_product(state, self.layers[-1], inputs, unit.params)
        if self.skip is not None:
            params = params + masked_product(features, self.skip, unit.features, unit.params)
        ends = np.cumsum([s.num_steps * s.head.num_params for s in self.segments])[:-1]
        return tuple(
            part.reshape(s.num_steps, s.head.num_params)
            for s, part in zip(self.segments, jnp.split(params, ends), strict=True)
        )

    def log_prob(
        self, encoding: Encoding, row: Float[Array, " coordinates"], c: Coordinate[Array]
    ) -> Float[Array, ""]:
        """The log density of a row of coordinates."""
        if encoding.estimate is not None:
            view = condition_all(encoding.estimate, row)
            c = guide_inputs.anchor(view.mean, view.scale, c)
        params = self.params(encoding, row, c)
        log_densities = [
            jnp.sum(jax.vmap(s.head.log_prob)(part, s.by_step(row), s.constants(c)))
            for s, part in zip(self.segments, params, strict=True)
        ]
        return jnp.sum(jnp.stack(log_densities))

    def _biases(
        self, encoding: Encoding, row: Array, c: Coordinate[Array]
    ) -> list[Float[Array, " units"]]:
        """Biases of all units by layer, from the context and the estimate of each step."""
        biases = list(encoding.biases)
        estimate = encoding.estimate
        if estimate is None:
            return biases
        view = condition_all(estimate, row)
        all_inputs = guide_inputs.coordinate_inputs(view, c)
        inputs, logits = [], []
        for s in self.segments:
            part, pattern_logits = all_inputs[:, s.coordinates], jnp.zeros((s.head.num_params, 1))
            if s.head.span > 1:
                pattern_logits, part = guide_inputs.condition_all_bits(
                    estimate, row, s.coordinates, s.head.span
                )
            inputs.append(part)
            logits.append(pattern_logits.T)
        layers = len(self.widths)
        by_step = jnp.concatenate(inputs, 1)
        for layer, weight in enumerate(self.guide_layers[:layers]):
            biases[layer] += jnp.einsum("in,niw->nw", by_step, weight).reshape(-1)
        params = [
            (logit + jnp.einsum("in,nip->np", part, weight)).reshape(-1)
            for logit, part, weight in zip(logits, inputs, self.guide_layers[layers:], strict=True)
        ]
        biases[-1] += jnp.concatenate(params)
        return biases

    def is_residual(self, layer: int) -> bool:
        """Whether a hidden layer adds to the one before, which has the same width."""
        return layer > 0 and self.widths[layer] == self.widths[layer - 1]
