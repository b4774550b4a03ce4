"""An encoded context in; the density of a row of coordinates, or a draw, out (sec. 2.3, 3.3).

The network is MADE with a context. Drawn coordinates, hidden units and parameters carry labels,
and a unit takes input from those labelled no higher than itself. Parameters of coordinate d are
labelled d; so are hidden units that may see the d coordinates before it; a coordinate itself may
be seen from the next label on. Units are sorted by label, equally many for each, so all weight
matrices are triangular in blocks. The density takes one pass over the whole matrices. Drawing
takes one as well: once coordinate d-1 is known, only the units labelled d are left to compute
before coordinate d can be drawn. Where the model says what it expects of each coordinate given
those before it (see `guides`), the units labelled d see that of coordinate d as well.
"""

import math
from functools import cache
from itertools import groupby
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict import guides
from retrodict.coordinates import Block, Latent, blocks, table
from retrodict.curves import Coordinate
from retrodict.heads import Bernoulli, Categorical, Count, Head, Mixture
from retrodict.xla import floats


class Encoding(NamedTuple):
    """A context, encoded: what it adds to all units by layer, and what the model expects."""

    layers: tuple[Float[Array, " units"], ...]
    expected: guides.Expected | None = None


# Coordinates are drawn in this many loops: between loops, what is known enters by large products;
# within one, by small ones. More loops draw faster and compile slower.
LOOPS = 4
# A product of no more inputs than this is written out as a sum.
FEW = 4
# Loops no longer than this are written out.
SHORT = 2


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

    @property
    def number(self) -> int:
        """How many coordinates."""
        return self.stop - self.start


@cache
def runs(
    latents: tuple[Latent, ...], components: int, wide: float, floor: float
) -> tuple[Run, ...]:
    """The coordinates in order, those with the same kind of density together.

    `wide` and `floor` are shared out over the coordinates, so that a draw of a hundred has no
    more chance of a stray one than a draw of one.
    """
    number = sum(block.size for block in blocks(latents))
    found: list[Run] = []
    start = feature = param = 0
    for _, group in groupby(blocks(latents), lambda block: block.family):
        members = list(group)
        head = _head(members, components, wide / number, floor / number)
        size = sum(block.size for block in members)
        found.append(Run(start, start + size, head, feature, param))
        start, feature = start + size, feature + size * head.features
        param += size * head.size
    return tuple(found)


def _head(members: list[Block], components: int, wide: float, floor: float) -> Head:
    family = members[0].family
    if family == "mixture":
        curves = sorted({int(code) for block in members for code in block.table.curve})
        return Mixture(components, wide, tuple(curves))
    if family == "bernoulli":
        return Bernoulli(floor)
    if family == "categorical":
        return Categorical(1 + max(int(block.table.upper.max()) for block in members), floor)
    return Count(components, wide)


class Labels(NamedTuple):
    """A label for every feature of a coordinate, hidden unit, and parameter."""

    features: Int[np.ndarray, " features"]
    hidden: tuple[Int[np.ndarray, " units"], ...]
    params: Int[np.ndarray, " params"]


@cache
def labels(plan: tuple[Run, ...], widths: tuple[int, ...]) -> Labels:
    """Labels in ascending order, with `widths` hidden units for each."""
    number = plan[-1].stop
    features = [np.repeat(np.arange(run.start, run.stop), run.head.features) for run in plan]
    params = [np.repeat(np.arange(run.start, run.stop), run.head.size) for run in plan]
    return Labels(
        np.concatenate(features) + 1,
        tuple(np.repeat(np.arange(number), width) for width in widths),
        np.concatenate(params),
    )


# Half of a triangular matrix is zero. Cut into blocks of about this many units, a part of that is
# not computed; smaller ones take longer for what they are than they save.
BLOCK = 100


def product(
    state: Float[Array, " inputs"],
    weight: Float[Array, "inputs outputs"],
    inputs: np.ndarray,
    outputs: np.ndarray,
) -> Float[Array, " outputs"]:
    """What units of sorted labels add to others, by the weights that lead to a label no lower."""
    blocks = max(1, min(weight.shape) // BLOCK)
    parts = []
    for columns in np.array_split(np.arange(outputs.size), blocks):
        at = slice(columns[0], columns[-1] + 1)
        rows = int(np.searchsorted(inputs, outputs[columns[-1]], "right"))
        seen = inputs[:rows, None] <= outputs[None, at]
        parts.append(state[:rows] @ jnp.where(seen, weight[:rows, at], 0))
    return jnp.concatenate(parts)


def initial(
    rng: np.random.Generator, inputs: np.ndarray, outputs: np.ndarray
) -> Float[np.ndarray, "inputs outputs"]:
    """Random weights, with a variance that counts only the inputs a unit may see."""
    seen = np.sum(inputs[:, None] <= outputs[None, :], 0)
    weights = rng.standard_normal((inputs.size, outputs.size))
    scaled: np.ndarray = weights / np.sqrt(np.maximum(seen, 1))
    return scaled


@cache
def sharing(latents: tuple[Latent, ...]) -> Float[np.ndarray, "coordinates coordinates"]:
    """One where the column's coordinate takes from the row's total before it, zero elsewhere."""
    group = np.cumsum(~table(latents).continues)
    shares: np.ndarray = np.tril(group[:, None] == group[None, :], -1).astype(float)
    return shares


class Known(NamedTuple):
    """What a sampler knows when it comes to a coordinate; zero where it does not yet."""

    features: Array  # of the coordinates drawn
    states: tuple[Array, ...]  # of the hidden units that depend on these alone, by layer
    taken: Array  # of the total that coordinates of the same latent share
    left: guides.Left | None  # to expect of the others


class Autoregressive(eqx.Module):
    """Weights between coordinates, hidden units and parameters."""

    plan: tuple[Run, ...] = eqx.field(static=True)
    widths: tuple[int, ...] = eqx.field(static=True)  # hidden units with one label, by layer
    layers: tuple[
        Float[Array, "previous units"], ...
    ]  # the first from features, the last to params
    direct: Float[Array, "features params"] | None
    guided: tuple[Float[Array, "coordinates inputs width"], ...]  # by layer, then by run to params

    def __init__(
        self,
        rng: np.random.Generator,
        plan: tuple[Run, ...],
        hidden: tuple[int, ...],
        guide_size: int = 0,
    ) -> None:
        self.plan = plan
        self.widths = tuple(math.ceil(width / plan[-1].stop) for width in hidden)
        unit = self.labels
        inputs, outputs = (unit.features, *unit.hidden), (*unit.hidden, unit.params)
        *layers, last = (initial(rng, into, out) for into, out in zip(inputs, outputs, strict=True))
        # training starts from the heads' own spread, whatever the input
        self.layers = (*map(floats, layers), floats(0.1 * last))
        self.direct = floats(0.1 * initial(rng, unit.features, unit.params)) if hidden else None
        number = plan[-1].stop
        shapes = [(number, guide_size, width) for width in self.widths]
        shapes += [(run.number, guide_size, run.head.size) for run in plan]
        scales = [1.0] * len(self.widths) + [0.1] * len(plan)
        self.guided = tuple(
            floats(scale * rng.standard_normal(shape) / np.sqrt(guide_size))
            for scale, shape in zip(scales, shapes, strict=True)
            if guide_size
        )

    @property
    def labels(self) -> "Labels":
        """What every unit may see."""
        return labels(self.plan, self.widths)

    def params(
        self, encoding: Encoding, row: Float[Array, " coordinates"], c: Coordinate[Array]
    ) -> tuple[Float[Array, "run params"], ...]:
        """Parameters of all coordinates at once: for each run, a row for each coordinate.

        Where the model expects something of them, the constants must hold their anchors.
        """
        unit = self.labels
        added = self._added(encoding, row, c)
        features = jnp.concatenate(
            [
                jax.vmap(run.head.feature)(row[run.at], rows_of(c, run.at)).reshape(-1)
                for run in self.plan
            ]
        )
        state, seen = features, unit.features
        for layer, own in enumerate(unit.hidden):
            new = jax.nn.silu(added[layer] + product(state, self.layers[layer], seen, own))
            state, seen = (state + new if self._residual(layer) else new), own
        out = added[-1] + product(state, self.layers[-1], seen, unit.params)
        if self.direct is not None:
            out = out + product(features, self.direct, unit.features, unit.params)
        ends = np.cumsum([run.number * run.head.size for run in self.plan])[:-1]
        return tuple(
            part.reshape(run.number, run.head.size)
            for run, part in zip(self.plan, jnp.split(out, ends), strict=True)
        )

    def log_prob(
        self, encoding: Encoding, row: Float[Array, " coordinates"], c: Coordinate[Array]
    ) -> Float[Array, ""]:
        """log q of a row of coordinates."""
        if encoding.expected is not None:
            c = guides.anchors(guides.look_at_all(encoding.expected, row), c)
        params = self.params(encoding, row, c)
        densities = [
            jnp.sum(jax.vmap(run.head.log_prob)(rows, row[run.at], rows_of(c, run.at)))
            for run, rows in zip(self.plan, params, strict=True)
        ]
        return jnp.sum(jnp.stack(densities))

    def _added(
        self, encoding: Encoding, row: Array, c: Coordinate[Array]
    ) -> list[Float[Array, " units"]]:
        """What the context, and the model's own expectation of each coordinate, add to units."""
        added = list(encoding.layers)
        if encoding.expected is None:
            return added
        seen = guides.inputs_of_all(guides.look_at_all(encoding.expected, row), c)
        layers = len(self.widths)
        for layer, weight in enumerate(self.guided[:layers]):
            added[layer] += jnp.einsum("ni,niw->nw", seen, weight).reshape(-1)
        out = [
            jnp.einsum("ni,nip->np", seen[run.at], weight).reshape(-1)
            for run, weight in zip(self.plan, self.guided[layers:], strict=True)
        ]
        added[-1] += jnp.concatenate(out)
        return added

    def draw(
        self, encoding: Encoding, noise: Float[Array, "coordinates numbers"], c: Coordinate[Array]
    ) -> tuple[Float[Array, " coordinates"], Float[Array, ""]]:
        """A row of coordinates and its log q, each unit computed once."""
        length = max(4, math.ceil(self.plan[-1].stop / LOOPS))
        expected = encoding.expected
        known = Known(
            jnp.zeros(0),
            tuple(jnp.zeros(0) for _ in self.widths),
            jnp.zeros(()),
            None if expected is None else guides.start(expected),
        )
        tails = None if expected is None else expected.tails
        rows, densities = [], []
        for number, run in enumerate(self.plan):
            for start in range(run.start, run.stop, length):
                part = run._replace(
                    start=start,
                    stop=min(start + length, run.stop),
                    first_feature=run.first_feature + (start - run.start) * run.head.features,
                    first_param=run.first_param + (start - run.start) * run.head.size,
                )
                guide = None
                if expected is not None and tails is not None:
                    layers = [weight[start : part.stop] for weight in self.guided]
                    out = self.guided[len(self.widths) + number]
                    first = start - run.start
                    to_params = out[first : first + part.number]
                    guide = _Guide(expected, tails, [*layers[: len(self.widths)], to_params])
                known, drawn, log_q = self._loop(part, known, encoding, noise, c, guide)
                rows.append(drawn)
                densities.append(log_q)
        return jnp.concatenate(rows), jnp.sum(jnp.concatenate(densities))

    def _loop(
        self,
        run: Run,
        known: Known,
        encoding: Encoding,
        noise: Array,
        c: Coordinate[Array],
        guide: "_Guide | None",
    ) -> tuple[Known, Array, Array]:
        """Draw the coordinates of a run, given what is known of those before."""
        number, head = run.number, run.head
        units = [_Units(run.start * width, width, number) for width in self.widths]
        drawn = _Units(run.first_feature, head.features, number)
        params = _Units(run.first_param, head.size, number)
        inputs, outputs = (drawn, *units), (*units, params)

        # What is known adds to all units of this loop at once, in one product for each layer.
        before = (known.features, *known.states)
        biases = [
            (bias[to.all] + state @ weight[: state.size, to.all]).reshape(number, to.width)
            for bias, state, weight, to in zip(
                encoding.layers, before, self.layers, outputs, strict=True
            )
        ]
        weights = list(map(_within, self.layers, inputs, outputs))
        if self.direct is not None:
            skipped = known.features @ self.direct[: drawn.first, params.all]
            biases[-1] += skipped.reshape(number, head.size)
            weights.append(_within(self.direct, drawn, params))

        def step(known: Known, xs: _StepInput) -> tuple[Known, tuple[Array, Array]]:
            state, own, states = known.features, jnp.zeros(()), []
            taken = jnp.where(xs.c.continues, known.taken, 0)
            c = xs.c._replace(upper=xs.c.upper - taken)
            added, left, view = list(xs.biases), known.left, None
            place = run.start + xs.place
            if guide is not None and left is not None and xs.guided is not None:
                view = guides.look(guide.expected, guide.tails, left, place)
                c = guides.anchor(view, c)
                seen = guides.inputs(view, c)
                # one product, not one for each layer: they are small, and there are many
                ends = np.cumsum([a.size for a in added])[:-1]
                parts = jnp.split(_few(seen, xs.guided), ends)
                added = [a + part for a, part in zip(added, parts, strict=True)]
            for layer, width in enumerate(self.widths):
                new = jax.nn.silu(added[layer] + state @ xs.weights[layer])
                own = own + new if self._residual(layer) else new
                state = jax.lax.dynamic_update_slice(known.states[layer], own, (xs.place * width,))
                states.append(state)
            params = added[-1] + state @ xs.weights[len(self.widths)]
            if self.direct is not None:
                params = params + known.features @ xs.weights[-1]
            value = head.draw(params, xs.noise, c)
            features = jax.lax.dynamic_update_slice(
                known.features, head.feature(value, c), (xs.place * head.features,)
            )
            log_q = head.log_prob(params, value, c)
            if guide is not None and left is not None and view is not None:
                left = guides.learn(guide.expected, left, view, place, value)
            return Known(features, tuple(states), taken + value, left), (value, log_q)

        fresh = Known(
            jnp.zeros(number * head.features),
            tuple(jnp.zeros(number * width) for width in self.widths),
            known.taken,
            known.left,
        )
        each = _StepInput(
            jnp.arange(number),
            weights,
            biases,
            rows_of(c, run.at),
            noise[run.at],
            None if guide is None else jnp.concatenate(guide.weights, -1),
        )
        new, (values, log_q) = jax.lax.scan(step, fresh, each, unroll=number <= SHORT)
        joined = Known(
            jnp.append(known.features, new.features),
            tuple(map(jnp.append, known.states, new.states)),
            new.taken,
            new.left,
        )
        return joined, values, log_q

    def _residual(self, layer: int) -> bool:
        return layer > 0 and self.widths[layer] == self.widths[layer - 1]


class _Units(NamedTuple):
    """Units of consecutive labels, `width` for each."""

    first: int
    width: int
    number: int

    @property
    def all(self) -> slice:
        return slice(self.first, self.first + self.width * self.number)


class _StepInput(NamedTuple):
    place: Array
    weights: list[Array]
    biases: list[Array]
    c: Coordinate[Array]
    noise: Array
    guided: Array | None


class _Guide(NamedTuple):
    """What the model expects, and the weights by which a loop's coordinates see it."""

    expected: guides.Expected
    tails: Array
    weights: list[Array]


def _few(state: Array, weight: Array) -> Array:
    """The product of very few inputs, written out so that it is fused with what follows."""
    if state.size > FEW:
        return state @ weight
    parts: list[Array] = [value * row for value, row in zip(state, weight, strict=True)]
    return sum(parts, jnp.zeros(()))


def _within(weight: Array, inputs: _Units, outputs: _Units) -> Array:
    """Weights between the units of one loop, by the label they lead to."""
    square = weight[inputs.all, outputs.all]
    return square.reshape(-1, outputs.number, outputs.width).swapaxes(0, 1)


def rows_of(c: Coordinate[Array], at: slice) -> Coordinate[Array]:
    """The constants of some coordinates."""
    return Coordinate(*(column[at] for column in c))
