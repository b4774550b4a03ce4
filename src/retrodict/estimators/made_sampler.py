"""An autoregressive network and encoded contexts in; draws and their densities, in one pass, out.

Once coordinate d-1 is known, only the units labelled d are left to compute before coordinate d can
be drawn (sec. 3.3; see `autoregressive`). Few steps are written out; many are put into a few loops:
between loops, what is known enters by large products, within one, by small ones. All arrays have
rows last (see `rows`).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.batch_last import batch_last
from retrodict._xla.scan import scan
from retrodict.estimators import guide_inputs
from retrodict.estimators.guide_inputs import Position
from retrodict.estimators.heads import Head
from retrodict.estimators.made import Autoregressive, Encoding, Run
from retrodict.estimators.scalar_bijections import Coordinate

# More loops draw faster and compile slower.
LOOPS = 4
# No more steps than this are written out.
SHORT = 6


def draw(
    network: Autoregressive,
    encoding: Encoding,
    noise: Float[Array, "steps numbers"],
    c: Coordinate[Array],
) -> tuple[Float[Array, " coordinates"], Float[Array, ""]]:
    """A row of coordinates and its log q, each unit computed once.

    Args:
        network: what to draw from.
        encoding: the context.
        noise: uniform numbers.
        c: constants of the coordinates, the same for all rows.
    """
    return batch_last(_draw)((network, c), (encoding, noise))


class _Known(NamedTuple):
    """What is known when a step comes; in a loop, zero where it is not yet."""

    features: Float[Array, "features rows"]  # of the coordinates drawn
    states: tuple[Float[Array, "units rows"], ...]  # of the hidden units that depend on these alone
    taken: Float[Array, " rows"]  # of the total that coordinates of the same latent share
    left: guide_inputs.GuideState | None  # to expect of the others


class _Guide(NamedTuple):
    expected: guide_inputs.LinearEstimate
    tails: Float[Array, "coordinates channels rows"]


class _Given(NamedTuple):
    """What all steps are drawn from."""

    network: Autoregressive
    encoding: Encoding
    noise: Float[Array, "steps numbers rows"]
    c: Coordinate[Array]
    guide: _Guide | None


class _Seen(NamedTuple):
    """What the model expects of a step: for the network to see, and the heads to begin with."""

    c: Coordinate[Array]
    inputs: Float[Array, "inputs rows"] | None = None
    logits: Float[Array, "params rows"] | float = 0.0
    view: guide_inputs.CoordinateView | None = None


def _draw(
    shared: tuple[Autoregressive, Coordinate[Array]], given: tuple[Encoding, Array]
) -> tuple[Float[Array, "coordinates rows"], Float[Array, " rows"]]:
    (network, c), (encoding, noise) = shared, given
    rows = max(leaf.shape[-1] for leaf in jax.tree.leaves(given))
    guide = left = None
    if encoding.expected is not None:
        guide = _Guide(encoding.expected, encoding.expected.innovation_variance)
        left = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (*leaf.shape[:-1], rows)),
            guide_inputs.initial_state(encoding.expected),
        )
    known = _Known(
        jnp.zeros((0, rows)),
        tuple(jnp.zeros((0, rows)) for _ in network.widths),
        jnp.zeros(rows),
        left,
    )
    whole = _Given(
        network,
        encoding,
        jnp.broadcast_to(noise, (*noise.shape[:-1], rows)),
        Coordinate(*(column[:, None] for column in c)),
        guide,
    )
    steps = network.plan[-1].at_steps.stop
    length = 1 if steps <= SHORT else max(4, math.ceil(steps / LOOPS))
    values, densities = [], []
    for number, run in enumerate(network.plan):
        for first in range(0, run.steps, length):
            part = run.part(first, min(first + length, run.steps))
            guided = _guided(network, number, part, first)
            form = _written_out if part.steps == 1 else _loop
            known, value, log_q = form(whole, part, known, guided)
            values.append(value)
            densities.append(log_q)
    return jnp.concatenate(values), sum(densities, jnp.zeros(rows))


def _guided(network: Autoregressive, number: int, part: Run, first: int) -> Array | None:
    """Weights by which a part's units and parameters, layer after layer, see its guide."""
    if not network.guided:
        return None
    layers = [weight[part.at_steps] for weight in network.guided[: len(network.widths)]]
    to_params = network.guided[len(network.widths) + number][first : first + part.steps]
    # one product, not one for each layer: they are small, and there are many
    return jnp.concatenate([*layers, to_params], -1)


def _look(
    guide: _Guide | None,
    left: guide_inputs.GuideState | None,
    head: Head,
    c: Coordinate[Array],
    place: Position,
) -> _Seen:
    if guide is None or left is None:
        return _Seen(c)
    if head.span > 1:
        bits = guide_inputs.condition_bits(guide.expected, guide.tails, left, place, head.span)
        return _Seen(c, bits.inputs, bits.logits)
    view = guide_inputs.condition(guide.expected, guide.tails, left, place)
    c = guide_inputs.anchor(view.mean, view.scale, c)
    return _Seen(c, guide_inputs.coordinate_inputs(view, c), view=view)


def _learn(
    guide: _Guide | None,
    left: guide_inputs.GuideState | None,
    seen: _Seen,
    place: Position,
    value: Array,
) -> guide_inputs.GuideState | None:
    if guide is None or left is None:
        return None
    if seen.view is None:
        return guide_inputs.update_bits(guide.expected, left, place, value)
    return guide_inputs.update(guide.expected, left, seen.view, place, value)


def _with_guide(added: list[Array], seen: _Seen, weight: Array | None) -> list[Array]:
    """What the context adds to the units and parameters of a step, and what the guide does."""
    if weight is None or seen.inputs is None:
        return [*added[:-1], added[-1] + seen.logits]
    ends = np.cumsum([a.shape[0] for a in added])[:-1]
    parts = jnp.split(weight.T @ seen.inputs, ends)
    *layers, params = (a + part for a, part in zip(added, parts, strict=True))
    return [*layers, params + seen.logits]


def _taking(c: Coordinate[Array], taken: Array) -> tuple[Coordinate[Array], Array]:
    """The constants of a step, given what was taken of its total, and that amount."""
    taken = jnp.where(c.continues_total, taken, 0)
    return c._replace(upper=c.upper - taken), taken


def _written_out(
    given: _Given, run: Run, known: _Known, guided: Array | None
) -> tuple[_Known, Array, Array]:
    """Draw the coordinates of a single step."""
    network, encoding, noise, c, guide = given
    head, step = run.head, run.first_step
    own_c, taken = Coordinate(*(run.by_step(column)[0] for column in c)), known.taken
    if head.span == 1:
        own_c, taken = _taking(own_c, taken)
    at = [slice(step * width, (step + 1) * width) for width in network.widths]
    at.append(slice(run.first_param, run.first_param + head.size))
    seen = _look(guide, known.left, head, own_c, run.start)
    added = [layer[cut] for layer, cut in zip(encoding.layers, at, strict=True)]
    added = _with_guide(added, seen, None if guided is None else guided[0])
    state, states, own = known.features, [], jnp.zeros(())
    for layer in range(len(network.widths)):
        new = jax.nn.silu(added[layer] + _product(network.layers[layer], state, at[layer]))
        new = jnp.broadcast_to(new, (new.shape[0], noise.shape[-1]))
        own = own + new if network._residual(layer) else new
        state = jnp.concatenate([known.states[layer], own])
        states.append(state)
    params = added[-1] + _product(network.layers[-1], state, at[-1])
    if network.direct is not None:
        params = params + _product(network.direct, known.features, at[-1])
    value, log_q = _drawn(head, params, noise[step], seen.c)
    left = _learn(guide, known.left, seen, run.start, value)
    after = _Known(
        jnp.concatenate([known.features, head.feature(value, seen.c)]),
        tuple(states),
        taken + value if head.span == 1 else taken,
        left,
    )
    return after, value.reshape(head.span, -1), log_q


def _drawn(head: Head, params: Array, noise: Array, c: Coordinate[Array]) -> tuple[Array, Array]:
    """A value and its log q."""
    value = head.draw(params, noise, c)
    return value, head.log_prob(params, value, c)


def _product(weight: Array, state: Float[Array, "units rows"], to: slice) -> Array | float:
    """What the units known add to some others."""
    return weight[: state.shape[0], to].T @ state if state.shape[0] else 0.0


class _StepInput(NamedTuple):
    place: Array
    weights: list[Array]
    biases: list[Array]
    constants: Array
    noise: Array
    guided: Array | None


def _loop(
    given: _Given, run: Run, known: _Known, guided: Array | None
) -> tuple[_Known, Array, Array]:
    """Draw the coordinates of many steps, given what is known of those before."""
    network, encoding, noise, c, guide = given
    number, head, rows = run.steps, run.head, noise.shape[-1]
    units = [_Units(run.first_step * width, width, number) for width in network.widths]
    drawn = _Units(run.first_feature, head.features, number)
    params = _Units(run.first_param, head.size, number)
    inputs, outputs = (drawn, *units), (*units, params)

    # What is known adds to all units of this loop at once, in one product for each layer.
    before = (known.features, *known.states)
    biases = [
        bias[to.all] + _product(weight, state, to.all)
        for bias, state, weight, to in zip(
            encoding.layers, before, network.layers, outputs, strict=True
        )
    ]
    weights = list(map(_within, network.layers, inputs, outputs))
    if network.direct is not None:
        biases[-1] = biases[-1] + _product(network.direct, known.features, params.all)
        weights.append(_within(network.direct, drawn, params))

    constants, unpacked = _packed(Coordinate(*map(run.by_step, c)), noise.dtype)

    def step(known: _Known, xs: _StepInput) -> tuple[_Known, tuple[Array, Array]]:
        state, own, states = known.features, jnp.zeros(()), []
        own_c, taken = unpacked(xs.constants), known.taken
        if head.span == 1:
            own_c, taken = _taking(own_c, taken)
        place = run.start + xs.place * head.span
        seen = _look(guide, known.left, head, own_c, place)
        added = _with_guide(xs.biases, seen, xs.guided)
        for layer, width in enumerate(network.widths):
            new = jax.nn.silu(added[layer] + xs.weights[layer].T @ state)
            own = own + new if network._residual(layer) else new
            state = jax.lax.dynamic_update_slice(known.states[layer], own, (xs.place * width, 0))
            states.append(state)
        params = added[-1] + xs.weights[len(network.widths)].T @ state
        if network.direct is not None:
            params = params + xs.weights[-1].T @ known.features
        value, log_q = _drawn(head, params, xs.noise, seen.c)
        features = jax.lax.dynamic_update_slice(
            known.features, head.feature(value, seen.c), (xs.place * head.features, 0)
        )
        left = _learn(guide, known.left, seen, place, value)
        taken = taken + value if head.span == 1 else taken
        return _Known(features, tuple(states), taken, left), (value, log_q)

    fresh = _Known(
        jnp.zeros((number * head.features, rows)),
        tuple(jnp.zeros((number * width, rows)) for width in network.widths),
        known.taken,
        known.left,
    )
    each = _StepInput(
        jnp.arange(number),
        weights,
        [
            bias.reshape(number, to.width, bias.shape[-1])
            for bias, to in zip(biases, outputs, strict=True)
        ],
        constants,
        noise[run.at_steps],
        guided,
    )
    new, (values, log_q) = scan(step, fresh, each)
    joined = _Known(
        jnp.concatenate([known.features, new.features]),
        tuple(jnp.concatenate(pair) for pair in zip(known.states, new.states, strict=True)),
        new.taken,
        new.left,
    )
    return joined, values.reshape(-1, rows), log_q.sum(0)


def _packed(
    c: Coordinate[Array], dtype: np.dtype
) -> tuple[Array, Callable[[Array], Coordinate[Array]]]:
    """Constants of all steps as one array, for a loop to hand on, and how to read a step's."""

    def unpacked(row: Array) -> Coordinate[Array]:
        return Coordinate(*(v.astype(old.dtype) for v, old in zip(row, c, strict=True)))

    return jnp.stack([column.astype(dtype) for column in c], 1), unpacked


class _Units(NamedTuple):
    """Units of consecutive labels, `width` for each."""

    first: int
    width: int
    number: int

    @property
    def all(self) -> slice:
        return slice(self.first, self.first + self.width * self.number)


def _within(weight: Array, inputs: _Units, outputs: _Units) -> Array:
    """Weights between the units of one loop, by the label they lead to."""
    square = weight[inputs.all, outputs.all]
    return square.reshape(-1, outputs.number, outputs.width).swapaxes(0, 1)
