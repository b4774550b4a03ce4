"""An encoded context in; the density of a row of coordinates, or a draw, out (sec. 2.3, 3.3).

The network is MADE with a context. Drawn coordinates, hidden units and parameters carry labels,
and a unit takes input from those labelled no higher than itself. Parameters of coordinate d are
labelled d; so are hidden units that may see the d coordinates before it; a coordinate itself may
be seen from the next label on. Units are sorted by label, equally many for each, so all weight
matrices are triangular in blocks. The density takes one pass over the whole matrices. Drawing
takes one as well: once coordinate d-1 is known, only the units labelled d are left to compute
before coordinate d can be drawn. Where the model says what it expects of each coordinate given
those before it (see `guides`), the units labelled d see that of coordinate d as well.

A few bits may be drawn at once, as one of all their patterns; then they have one label.
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

from retrodict._xla.jit import floats
from retrodict.estimators import guide_inputs
from retrodict.estimators.coordinates import Block, Latent, blocks, coordinate_table
from retrodict.estimators.heads import (
    Bernoulli,
    Bits,
    Categorical,
    Count,
    Head,
    Mixture,
    block_sizes,
)
from retrodict.estimators.scalar_bijections import Coordinate


class Encoding(NamedTuple):
    """A context, encoded: what it adds to all units by layer, and what the model expects."""

    layers: tuple[Float[Array, " units"], ...]
    expected: guide_inputs.LinearEstimate | None = None


class Run(NamedTuple):
    """Consecutive coordinates with one head, drawn step by step."""

    start: int
    stop: int
    head: Head
    first_step: int
    first_feature: int
    first_param: int

    @property
    def at(self) -> slice:
        """Its place among the coordinates."""
        return slice(self.start, self.stop)

    @property
    def steps(self) -> int:
        """How many steps."""
        return (self.stop - self.start) // self.head.span

    @property
    def at_steps(self) -> slice:
        """Its place among the steps."""
        return slice(self.first_step, self.first_step + self.steps)

    def part(self, first: int, last: int) -> "Run":
        """Some of its steps."""
        return self._replace(
            start=self.start + first * self.head.span,
            stop=self.start + last * self.head.span,
            first_step=self.first_step + first,
            first_feature=self.first_feature + first * self.head.features,
            first_param=self.first_param + first * self.head.size,
        )

    def by_step(self, values: Array) -> Array:
        """Its part of what there is for each coordinate, along a first axis of steps."""
        if self.head.span == 1:
            return values[self.at]
        return values[self.at].reshape(self.steps, self.head.span, *values.shape[1:])


@cache
def runs(
    latents: tuple[Latent, ...], components: int, wide: float, floor: float, together: int = 1
) -> tuple[Run, ...]:
    """The coordinates in order, those with the same kind of density together.

    `wide` and `floor` are shared out over the coordinates, so that a draw of a hundred has no
    more chance of a stray one than a draw of one. As many bits as `together` are drawn at once.
    """
    number = sum(block.size for block in blocks(latents))
    found: list[Run] = []
    start = step = feature = param = 0
    for _, group in groupby(blocks(latents), lambda block: block.kind):
        members = list(group)
        size = sum(block.size for block in members)
        alone = _head(members, components, wide / number, floor / number)
        heads = [(alone, size)]
        if together > 1 and members[0].kind == "bernoulli":
            heads = [
                (Bits(k, floor * k / number) if k > 1 else alone, sum(parts))
                for k, parts in groupby(block_sizes(size, together))
            ]
        for head, many in heads:
            run = Run(start, start + many, head, step, feature, param)
            found.append(run)
            start, step = start + many, step + run.steps
            feature, param = feature + run.steps * head.features, param + run.steps * head.size
    return tuple(found)


def _head(members: list[Block], components: int, wide: float, floor: float) -> Head:
    kind = members[0].kind
    if kind == "mixture":
        codes = sorted({int(code) for block in members for code in block.table.bijection})
        return Mixture(components, wide, tuple(codes))
    if kind == "bernoulli":
        return Bernoulli(floor)
    if kind == "categorical":
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
    number = plan[-1].at_steps.stop
    steps = [np.arange(run.at_steps.start, run.at_steps.stop) for run in plan]
    features = [np.repeat(at, run.head.features) for run, at in zip(plan, steps, strict=True)]
    params = [np.repeat(at, run.head.size) for run, at in zip(plan, steps, strict=True)]
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
    group = np.cumsum(~coordinate_table(latents).continues_total)
    shares: np.ndarray = np.tril(group[:, None] == group[None, :], -1).astype(float)
    return shares


class Autoregressive(eqx.Module):
    """Weights between coordinates, hidden units and parameters."""

    plan: tuple[Run, ...] = eqx.field(static=True)
    widths: tuple[int, ...] = eqx.field(static=True)  # hidden units with one label, by layer
    layers: tuple[
        Float[Array, "previous units"], ...
    ]  # the first from features, the last to params
    direct: Float[Array, "features params"] | None
    guided: tuple[Float[Array, "steps inputs width"], ...]  # by layer, then by run to params

    def __init__(
        self,
        rng: np.random.Generator,
        plan: tuple[Run, ...],
        hidden: tuple[int, ...],
        guide_size: int = 0,
    ) -> None:
        self.plan = plan
        number = plan[-1].at_steps.stop
        self.widths = tuple(math.ceil(width / number) for width in hidden)
        unit = self.labels
        inputs, outputs = (unit.features, *unit.hidden), (*unit.hidden, unit.params)
        *layers, last = (initial(rng, into, out) for into, out in zip(inputs, outputs, strict=True))
        # training starts from the heads' own spread, whatever the input
        self.layers = (*map(floats, layers), floats(0.1 * last))
        self.direct = floats(0.1 * initial(rng, unit.features, unit.params)) if hidden else None
        shapes = [(number, guide_size, width) for width in self.widths]
        shapes += [(run.steps, guide_size, run.head.size) for run in plan]
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
    ) -> tuple[Float[Array, "steps params"], ...]:
        """Parameters of all coordinates at once: for each run, a row for each step.

        Where the model expects something of them, the constants must hold their anchors.
        """
        unit = self.labels
        added = self._added(encoding, row, c)
        features = jnp.concatenate(
            [
                jax.vmap(run.head.feature)(run.by_step(row), _by_step(run, c)).reshape(-1)
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
        return self._by_run(out)

    def _by_run(self, out: Float[Array, " params"]) -> tuple[Float[Array, "steps params"], ...]:
        ends = np.cumsum([run.steps * run.head.size for run in self.plan])[:-1]
        return tuple(
            part.reshape(run.steps, run.head.size)
            for run, part in zip(self.plan, jnp.split(out, ends), strict=True)
        )

    def log_prob(
        self, encoding: Encoding, row: Float[Array, " coordinates"], c: Coordinate[Array]
    ) -> Float[Array, ""]:
        """log q of a row of coordinates."""
        if encoding.expected is not None:
            view = guide_inputs.condition_all(encoding.expected, row)
            c = guide_inputs.anchor(view.mean, view.scale, c)
        params = self.params(encoding, row, c)
        densities = [
            jnp.sum(jax.vmap(run.head.log_prob)(rows, run.by_step(row), _by_step(run, c)))
            for run, rows in zip(self.plan, params, strict=True)
        ]
        return jnp.sum(jnp.stack(densities))

    def _added(
        self, encoding: Encoding, row: Array, c: Coordinate[Array]
    ) -> list[Float[Array, " units"]]:
        """What the context, and the model's own expectation of each coordinate, add to units."""
        added = list(encoding.layers)
        expected = encoding.expected
        if expected is None:
            return added
        every = guide_inputs.coordinate_inputs(guide_inputs.condition_all(expected, row), c)
        seen, logits = [], []
        for run in self.plan:
            inputs, begun = every[:, run.at], jnp.zeros((run.head.size, 1))
            if run.head.span > 1:
                begun, inputs = guide_inputs.condition_all_bits(
                    expected, row, run.at, run.head.span
                )
            seen.append(inputs)
            logits.append(begun.T)
        layers = len(self.widths)
        whole = jnp.concatenate(seen, 1)
        for layer, weight in enumerate(self.guided[:layers]):
            added[layer] += jnp.einsum("in,niw->nw", whole, weight).reshape(-1)
        out = [
            (own + jnp.einsum("in,nip->np", part, weight)).reshape(-1)
            for own, part, weight in zip(logits, seen, self.guided[layers:], strict=True)
        ]
        added[-1] += jnp.concatenate(out)
        return added

    def _residual(self, layer: int) -> bool:
        return layer > 0 and self.widths[layer] == self.widths[layer - 1]


def _by_step(run: Run, c: Coordinate[Array]) -> Coordinate[Array]:
    return Coordinate(*map(run.by_step, c))


def rows_of(c: Coordinate[Array], at: slice) -> Coordinate[Array]:
    """The constants of some coordinates."""
    return Coordinate(*(column[at] for column in c))
