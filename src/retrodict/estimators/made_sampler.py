"""Sampling of masked autoregressive networks in one pass.

Once step d − 1 is drawn, only the units of degree d remain to be computed before step d can be
drawn (see `made`). A few steps are unrolled; many are divided into a few loops. Between loops, the
units computed before contribute by large matrix products, within a loop by small ones. All arrays
have the batch axis last (see `retrodict._xla.batch_last`).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.batch_last import batch_last
from retrodict._xla.scan import scan
from retrodict._xla.tuning import MAX_UNROLLED_SAMPLING_STEPS, MIN_LOOP_LENGTH, NUM_SAMPLING_LOOPS
from retrodict.estimators.heads import Head
from retrodict.estimators.linear_estimate import GuideState, Position, initial_state
from retrodict.estimators.made import AutoregressiveNetwork, Encoding
from retrodict.estimators.scalar_bijections import Coordinate
from retrodict.estimators.segments import Segment
from retrodict.estimators.step_guide import StepGuide, StepView


def sample(
    network: AutoregressiveNetwork,
    encoding: Encoding,
    noise: Float[Array, "steps numbers"],
    c: Coordinate[Array],
) -> tuple[Float[Array, " coordinates"], Float[Array, ""]]:
    """Draw a row of coordinates, computing every unit once.

    Args:
        network: to draw from.
        encoding: of the conditions.
        noise: of the heads.
        c: constants of the coordinates.

    Returns:
        The row and its log density.
    """
    return batch_last(_sample)((network, c), (encoding, noise))


class _SamplerState(NamedTuple):
    """What the steps drawn so far determine.

    Attributes:
        features: of the coordinates.
        hidden: units by layer.
        subtotal: sum of the coordinates before that share a total with the next one.
        guide: state of the estimate, if there is one.
    """

    features: Float[Array, "features rows"]
    hidden: tuple[Float[Array, "units rows"], ...]
    subtotal: Float[Array, " rows"]
    guide: GuideState | None


class _SamplerInputs(NamedTuple):
    """What all steps are drawn from."""

    network: AutoregressiveNetwork
    encoding: Encoding
    noise: Float[Array, "steps numbers rows"]
    c: Coordinate[Array]
    guide: StepGuide | None


class _Step(NamedTuple):
    """What one step is drawn from, besides the steps before it.

    Attributes:
        position: of its first coordinate.
        c: constants of its coordinates.
        biases: of its hidden units by layer, and of its parameters.
        weights: to these from the units before; then those from features to parameters, if any.
        noise: of its head.
        guide_weights: to its hidden units and parameters from the inputs of the estimate.
    """

    position: Position
    c: Coordinate[Array]
    biases: Sequence[Array]
    weights: Sequence[Array]
    noise: Array
    guide_weights: Array | None


def _sample(
    shared: tuple[AutoregressiveNetwork, Coordinate[Array]], batch: tuple[Encoding, Array]
) -> tuple[Float[Array, "coordinates rows"], Float[Array, " rows"]]:
    (network, c), (encoding, noise) = shared, batch
    rows = max(leaf.shape[-1] for leaf in jax.tree.leaves(batch))
    guide = guide_state = None
    if encoding.estimate is not None:
        guide = StepGuide.of(encoding.estimate)
        guide_state = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (*leaf.shape[:-1], rows)),
            initial_state(encoding.estimate),
        )
    empty = jnp.zeros((0, rows))
    state = _SamplerState(empty, (empty,) * len(network.widths), jnp.zeros(rows), guide_state)
    noise = jnp.broadcast_to(noise, (*noise.shape[:-1], rows))
    c = Coordinate(*(column[:, None] for column in c))
    inputs = _SamplerInputs(network, encoding, noise, c, guide)
    steps = network.segments[-1].steps.stop
    length = max(MIN_LOOP_LENGTH, math.ceil(steps / NUM_SAMPLING_LOOPS))
    length = 1 if steps <= MAX_UNROLLED_SAMPLING_STEPS else length
    values, log_densities = [], []
    for number, segment in enumerate(network.segments):
        for first in range(0, segment.num_steps, length):
            part = segment.part(first, min(first + length, segment.num_steps))
            guide_weights = _guide_weights(network, number, part, first)
            sample_part = _sample_unrolled if part.num_steps == 1 else _sample_loop
            state, value, log_q = sample_part(inputs, part, state, guide_weights)
            values.append(value)
            log_densities.append(log_q)
    return jnp.concatenate(values), sum(log_densities, jnp.zeros(rows))


def _guide_weights(
    network: AutoregressiveNetwork, number: int, part: Segment, first: int
) -> Float[Array, "steps inputs units"] | None:
    """Weights from the estimate's inputs to the units of some steps, all layers side by side."""
    if not network.guide_layers:
        return None
    layers = [weight[part.steps] for weight in network.guide_layers[: len(network.widths)]]
    to_params = network.guide_layers[len(network.widths) + number]
    # One product for all layers: they are small, and there are many.
    return jnp.concatenate([*layers, to_params[first : first + part.num_steps]], -1)


def _sample_step(
    inputs: _SamplerInputs,
    head: Head,
    step: _Step,
    state: _SamplerState,
    store: Callable[[Array, Array], Array],
) -> tuple[_SamplerState, Array, Array]:
    """Draw one step.

    Args:
        inputs: of the sampler.
        head: of the step.
        step: what it is drawn from.
        state: of the steps before.
        store: adds the units of this step to those of the steps before.

    Returns:
        The state after the step, the value and its log density.
    """
    network, rows = inputs.network, inputs.noise.shape[-1]
    c, subtotal = step.c, state.subtotal
    if head.span == 1:
        subtotal = jnp.where(c.continues_total, subtotal, 0)
        c = c._replace(upper=c.upper - subtotal)
    view, guide, guide_state = StepView(c), inputs.guide, state.guide
    if guide is not None and guide_state is not None:
        view = guide.view(guide_state, head, c, step.position)
    biases = _add_guide(step.biases, view, step.guide_weights)
    previous, units, hidden = state.features, jnp.zeros(()), []
    for layer in range(len(network.widths)):
        new = jax.nn.silu(biases[layer] + _product(step.weights[layer], previous))
        new = jnp.broadcast_to(new, (new.shape[0], rows))
        units = units + new if network.is_residual(layer) else new
        previous = store(state.hidden[layer], units)
        hidden.append(previous)
    params = biases[-1] + _product(step.weights[len(network.widths)], previous)
    if network.skip is not None:
        params = params + _product(step.weights[-1], state.features)
    value = head.sample(params, step.noise, view.c)
    log_q = head.log_prob(params, value, view.c)
    if guide is not None and guide_state is not None:
        guide_state = guide.update(guide_state, view, step.position, value)
    new_state = _SamplerState(
        store(state.features, head.features(value, view.c)),
        tuple(hidden),
        subtotal + value if head.span == 1 else subtotal,
        guide_state,
    )
    return new_state, value, log_q


def _add_guide(biases: Sequence[Array], view: StepView, weight: Array | None) -> list[Array]:
    """Biases of a step's units and parameters, with those that the estimate gives."""
    if weight is None or view.inputs is None:
        return [*biases[:-1], biases[-1] + view.logits]
    ends = np.cumsum([bias.shape[0] for bias in biases])[:-1]
    parts = jnp.split(weight.T @ view.inputs, ends)
    *hidden, params = (bias + part for bias, part in zip(biases, parts, strict=True))
    return [*hidden, params + view.logits]


def _product(weight: Array, units: Float[Array, "units rows"]) -> Array | float:
    """What units add to others; weights from units that are not computed yet are left out."""
    number = units.shape[0]
    return weight[:number].T @ units if number else 0.0


class _Units(NamedTuple):
    """The units of some consecutive steps, `width` of each."""

    first: int
    width: int
    num_steps: int

    @property
    def range(self) -> slice:
        return slice(self.first, self.first + self.width * self.num_steps)


def _hidden_units(network: AutoregressiveNetwork, segment: Segment) -> list[_Units]:
    steps = segment.num_steps
    return [_Units(segment.first_step * width, width, steps) for width in network.widths]


def _sample_unrolled(
    inputs: _SamplerInputs, segment: Segment, state: _SamplerState, guide_weights: Array | None
) -> tuple[_SamplerState, Array, Array]:
    """Draw the coordinates of a single step."""
    network, head = inputs.network, segment.head
    params = _Units(segment.first_param, head.num_params, 1)
    outputs = [units.range for units in (*_hidden_units(network, segment), params)]
    weights = [layer[:, to] for layer, to in zip(network.layers, outputs, strict=True)]
    if network.skip is not None:
        weights.append(network.skip[:, params.range])
    step = _Step(
        segment.start,
        Coordinate(*(column[0] for column in segment.constants(inputs.c))),
        [bias[to] for bias, to in zip(inputs.encoding.biases, outputs, strict=True)],
        weights,
        inputs.noise[segment.first_step],
        None if guide_weights is None else guide_weights[0],
    )

    def append(before: Array, new: Array) -> Array:
        return jnp.concatenate([before, new])

    state, value, log_q = _sample_step(inputs, head, step, state, append)
    return state, value.reshape(head.span, -1), log_q


class _LoopSteps(NamedTuple):
    """The steps of a loop, along the first axis of all arrays; see `_Step`."""

    number: Array
    weights: list[Array]
    biases: list[Array]
    constants: Array
    noise: Array
    guide_weights: Array | None


def _sample_loop(
    inputs: _SamplerInputs, segment: Segment, state: _SamplerState, guide_weights: Array | None
) -> tuple[_SamplerState, Array, Array]:
    """Draw the coordinates of many steps by a loop."""
    network, head, rows = inputs.network, segment.head, inputs.noise.shape[-1]
    weights, biases = _loop_weights(inputs, segment, state)
    constants, unpack = _pack_constants(segment.constants(inputs.c), inputs.noise.dtype)

    def sample_step(
        within: _SamplerState, xs: _LoopSteps
    ) -> tuple[_SamplerState, tuple[Array, Array]]:
        def store(units: Array, new: Array) -> Array:
            start = xs.number * new.shape[0]
            stored: Array = jax.lax.dynamic_update_slice(units, new, (start, 0))
            return stored

        step = _Step(
            segment.start + xs.number * head.span,
            unpack(xs.constants),
            xs.biases,
            xs.weights,
            xs.noise,
            xs.guide_weights,
        )
        within, value, log_q = _sample_step(inputs, head, step, within, store)
        return within, (value, log_q)

    # Units of the loop are zero until they are computed, and then contribute nothing.
    initial = _SamplerState(
        jnp.zeros((segment.num_steps * head.num_features, rows)),
        tuple(jnp.zeros((segment.num_steps * width, rows)) for width in network.widths),
        state.subtotal,
        state.guide,
    )
    steps = _LoopSteps(
        jnp.arange(segment.num_steps),
        weights,
        biases,
        constants,
        inputs.noise[segment.steps],
        guide_weights,
    )
    final, (values, log_q) = scan(sample_step, initial, steps)
    joined = _SamplerState(
        jnp.concatenate([state.features, final.features]),
        tuple(jnp.concatenate(pair) for pair in zip(state.hidden, final.hidden, strict=True)),
        final.subtotal,
        final.guide,
    )
    return joined, values.reshape(-1, rows), log_q.sum(0)


def _loop_weights(
    inputs: _SamplerInputs, segment: Segment, state: _SamplerState
) -> tuple[list[Array], list[Array]]:
    """Weights within a loop, and biases that include the units before it, by step."""
    network, head, number = inputs.network, segment.head, segment.num_steps
    hidden = _hidden_units(network, segment)
    features = _Units(segment.first_feature, head.num_features, number)
    params = _Units(segment.first_param, head.num_params, number)
    sources, outputs = (features, *hidden), (*hidden, params)
    before = (state.features, *state.hidden)
    biases = [
        bias[to.range] + _product(layer[:, to.range], units)
        for bias, layer, units, to in zip(
            inputs.encoding.biases, network.layers, before, outputs, strict=True
        )
    ]
    weights = list(map(_within_loop, network.layers, sources, outputs))
    if network.skip is not None:
        biases[-1] = biases[-1] + _product(network.skip[:, params.range], state.features)
        weights.append(_within_loop(network.skip, features, params))
    by_step = [
        bias.reshape(number, to.width, bias.shape[-1])
        for bias, to in zip(biases, outputs, strict=True)
    ]
    return weights, by_step


def _within_loop(weight: Array, sources: _Units, outputs: _Units) -> Array:
    """Weights between the units of one loop, by the step they lead to."""
    square = weight[sources.range, outputs.range]
    return square.reshape(-1, outputs.num_steps, outputs.width).swapaxes(0, 1)


def _pack_constants(
    c: Coordinate[Array], dtype: np.dtype
) -> tuple[Array, Callable[[Array], Coordinate[Array]]]:
    """The constants of all steps as one array, and a function that unpacks those of a step."""

    def unpack(packed: Array) -> Coordinate[Array]:
        return Coordinate(*(v.astype(column.dtype) for v, column in zip(packed, c, strict=True)))

    return jnp.stack([column.astype(dtype) for column in c], 1), unpack
