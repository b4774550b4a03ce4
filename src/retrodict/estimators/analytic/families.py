"""Log densities known up to a constant in; parameters of the family they belong to, and draws, out.

Where all that some latents depend on, and all that depends on them, is known when they are drawn,
the product of the model's densities is their conditional but for a constant. In many models it is
of a family that can be drawn from, and then its parameters can be read from its derivatives:
nothing is left for a network to learn. Gelfand & Smith (1990) draw from such conditionals in turn;
here each is drawn from once, in the order of the inverse.

Arrays have rows last, see `rows`; targets are functions of all copies, coordinates last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from retrodict._xla.batch_last import sum_features
from retrodict._xla.linalg import cholesky, invert_lower_triangular
from retrodict.estimators.analytic.bit_sums import (
    Waves,
    blocks_of,
    chances_of,
    chosen_by,
    learn,
    spans,
    start,
)
from retrodict.estimators.guide_inputs import Expected, known_effects
from retrodict.estimators.heads import along_first
from retrodict.estimators.scalar_bijections import Coordinate

# log γ(x) of every copy, up to a constant; coordinates count from the lower end of their support
Target: TypeAlias = Callable[[Float[Array, "*copies coordinates"]], Float[Array, "*copies"]]


class Family(Protocol):
    """Densities that one can draw from, with parameters that a target's derivatives tell."""

    @property
    def name(self) -> str:
        """By which artefacts know it."""

    @property
    def evaluations(self) -> int:
        """How many times as much as the density itself the parameters take, roughly."""

    @property
    def wide(self) -> bool:
        """Whether draws should now and then be from elsewhere, as the family may be a likeness."""

    def uniforms(self, coordinates: int) -> int:
        """How many uniform numbers a draw of so many coordinates needs; as many if `wide`."""

    def parameters(self, target: Target, start: Float[Array, "*copies coordinates"]) -> PyTree:
        """Of every copy, if the target belongs to the family; `start` is a place to look at."""

    def draw(
        self, parameters: PyTree, chance: "Chance", c: Coordinate[Array]
    ) -> tuple[Float[Array, "coordinates rows"], Float[Array, " rows"]]:
        """The values that some chance leads to, and log q of them."""

    def log_prob(
        self, parameters: PyTree, row: Float[Array, "coordinates rows"], c: Coordinate[Array]
    ) -> Float[Array, " rows"]:
        """log q of values."""


class Chance(NamedTuple):
    """What draws are made from: uniform numbers, and for `wide` families normal ones as well."""

    uniform: Float[Array, "numbers rows"]
    normal: Float[Array, "numbers rows"]


def scores_of(target: Target) -> Callable[[Array], Array]:
    """Slopes of every copy's target in its own coordinates."""
    slope: Callable[[Array], Array] = jax.grad(lambda x: jnp.sum(target(x)))
    return slope


class NormalParameters(NamedTuple):
    """x = centre + root n, with n standard normal; white is the inverse of root."""

    centre: Float[Array, "coordinates *rows"]
    root: Float[Array, "coordinates coordinates *rows"]
    white: Float[Array, "coordinates coordinates *rows"]


@dataclass(frozen=True)
class Normal:
    """N(x | m, Λ⁻¹): of a quadratic function, the slope and curvature at any place tell all."""

    name: str = "normal"
    evaluations: int = 8
    wide: bool = True

    def uniforms(self, coordinates: int) -> int:  # noqa: D102
        return coordinates

    def parameters(self, target: Target, start: Array) -> NormalParameters:
        """A step of Newton's method, and one more against rounding: the first may be a long one."""
        score, number = scores_of(target), start.shape[-1]

        def curved(direction: np.ndarray) -> Array:
            along = jnp.broadcast_to(jnp.asarray(direction, start.dtype), start.shape)
            found: Array = jax.jvp(score, (start,), (along,))[1]
            return found

        columns = [curved(direction) for direction in np.eye(number)]
        precision = -jnp.stack(columns, -1)
        precision = (precision + jnp.swapaxes(precision, -1, -2)) / 2
        # in units in which its diagonal is one; what is no precision leaves no trace in derivatives
        diagonal = jnp.diagonal(precision, axis1=-2, axis2=-1)
        sound = jnp.all(diagonal > 0, -1) & jnp.all(jnp.isfinite(precision), (-1, -2))
        unknown = jnp.eye(number, dtype=start.dtype)
        precision = jnp.where(sound[..., None, None], precision, unknown)
        scale = 1 / jnp.sqrt(jnp.where(sound[..., None], diagonal, 1.0))
        unit = precision * scale[..., :, None] * scale[..., None, :]
        lower = cholesky(unit)
        left = invert_lower_triangular(lower)
        root = jnp.swapaxes(left, -1, -2) * scale[..., :, None]
        white = jnp.swapaxes(lower, -1, -2) / scale[..., None, :]
        centre = start
        for _ in range(2):
            step = jnp.einsum("...ij,...kj,...k->...i", root, root, score(centre))
            centre = centre + step
        sound &= jnp.all(jnp.isfinite(root), (-1, -2)) & jnp.all(jnp.isfinite(centre), -1)
        return NormalParameters(
            jnp.where(sound[..., None], centre, start),
            jnp.where(sound[..., None, None], root, unknown),
            jnp.where(sound[..., None, None], white, unknown),
        )

    def draw(  # noqa: D102
        self, parameters: NormalParameters, chance: Chance, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        row = parameters.centre + _times(parameters.root, chance.normal)
        return row, self.log_prob(parameters, row, c)

    def log_prob(self, parameters: NormalParameters, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        noise = _times(parameters.white, row - parameters.centre)
        noise = jnp.clip(noise, -1e9, 1e9)  # squares stay finite
        number = row.shape[0]
        density: Array = -0.5 * sum_features(noise**2) - number * 0.5 * np.log(2 * np.pi)
        for d in range(number):
            density = density + jnp.log(jnp.abs(parameters.white[d, d]))
        return density


def _times(matrix: Float[Array, "n n rows"], vector: Float[Array, "n rows"]) -> Array:
    """A small matrix of each row by its vector, written out."""
    found = matrix[:, 0] * vector[0]
    for d in range(1, vector.shape[0]):
        found = found + matrix[:, d] * vector[d]
    return found


@dataclass(frozen=True)
class Finite:
    """Any density on finitely many states: all of them are looked at.

    Attributes:
        sizes: how many values each coordinate has.
    """

    sizes: tuple[int, ...]
    name: str = "finite"
    wide: bool = False

    @property
    def evaluations(self) -> int:  # noqa: D102
        return len(self.states)

    @cached_property
    def states(self) -> Float[np.ndarray, "states coordinates"]:
        """All of them, the last coordinate changing first."""
        found: np.ndarray = np.array(list(product(*map(range, self.sizes))), float)
        return found

    def uniforms(self, coordinates: int) -> int:  # noqa: D102
        return 1

    def parameters(self, target: Target, start: Array) -> Float[Array, "*copies states"]:
        """Log densities of all states."""

        def at(state: Array) -> Array:
            return target(jnp.broadcast_to(state, start.shape))

        logits = jnp.moveaxis(jax.vmap(at)(jnp.asarray(self.states, start.dtype)), 0, -1)
        logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
        possible = jnp.any(logits > -jnp.inf, -1, keepdims=True)
        return jnp.where(possible, logits, 0.0)

    def draw(  # noqa: D102
        self, parameters: Array, chance: Chance, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        weights = jnp.exp(parameters - jnp.max(parameters, 0))
        ends = _ends(weights)
        chosen = _chosen(ends, chance.uniform[0])
        row = jnp.tensordot(self.states.T.astype(weights.dtype), chosen, 1)
        return row, _log_shares([(weights, chosen, ends)])

    def log_prob(self, parameters: Array, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        radix = np.append(np.cumprod(self.sizes[:0:-1])[::-1], 1).astype(float)
        place = jnp.tensordot(radix, row, 1)
        places = along_first(np.arange(len(self.states)), parameters)
        chosen = jnp.max(jnp.where(places == place, parameters, -jnp.inf), 0)
        most = jnp.max(parameters, 0)
        return chosen - most - jnp.log(sum_features(jnp.exp(parameters - most)))


def _ends(weights: Array) -> Array:
    """Where the share of each ends."""
    # few weights are added up quicker by a product than by a scan
    return jnp.tensordot(np.tril(np.ones((len(weights),) * 2, weights.dtype)), weights, 1)


def _chosen(ends: Array, uniform: Array) -> Array:
    """One for the state whose share a uniform number falls on, zero for all others."""
    passed = (ends[:-1] <= uniform * ends[-1]).astype(ends.dtype)
    rows = [(0, 0)] * (passed.ndim - 1)
    before = jnp.pad(passed, [(1, 0), *rows], constant_values=1)
    chosen: Array = before - jnp.pad(passed, [(0, 1), *rows])
    return chosen


def _log_shares(choices: Sequence[tuple[Array, Array, Array]]) -> Array:
    """Of the states chosen each time, of the whole, given weights and ends: the sum."""
    # every weight but one is multiplied by zero: of differences, small ones would be lost
    own = jnp.concatenate([weights * chosen for weights, chosen, _ in choices])
    # one product for all
    owners = np.repeat(np.arange(len(choices)), [len(weights) for weights, _, _ in choices])
    each = np.equal.outer(np.arange(len(choices)), owners).astype(own.dtype)
    shares = zip(jnp.tensordot(each, own, 1), choices, strict=True)
    return sum((jnp.log(share / ends[-1]) for share, (_, _, ends) in shares), jnp.zeros(()))


@dataclass(frozen=True)
class BitSums:
    """Bits that add up in one observation with normal noise: a few at a time, see `spectra`.

    Attributes:
        order: the bits as drawn, by their place in the order of the latents.
        waves: at which their sum is looked at.
        most: how many bits are drawn at a time, at the most.
    """

    order: tuple[int, ...]
    waves: Waves
    most: int
    name: str = "sum of bits"
    wide: bool = False
    evaluations: int = 2

    def uniforms(self, coordinates: int) -> int:  # noqa: D102
        return len(self._spans)

    def parameters(self, target: Target, start: Array) -> Expected:
        """They are a guide's, not a target's."""
        raise TypeError("what is expected of bits that add up comes from their guide")

    def draw(  # noqa: D102
        self, parameters: Expected, chance: Chance, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        bits, log_q = self._through(
            parameters, lambda step, ends: _chosen(ends, chance.uniform[step])
        )
        return bits[np.argsort(self.order)], log_q

    def log_prob(self, parameters: Expected, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        ends = np.cumsum(self._spans)
        own = np.split(np.array(self.order), ends[:-1])
        _, log_q = self._through(parameters, lambda step, _: chosen_by(row[own[step]]))
        return log_q

    @property
    def _spans(self) -> tuple[int, ...]:
        return spans(len(self.order), self.most)

    def _through(
        self, expected: Expected, choose: Callable[[int, Array], Array]
    ) -> tuple[Array, Array]:
        """Block after block: the bits in the order drawn, and log q of them."""
        (residual,), (noise,) = expected.residual, expected.noise
        effects = known_effects(expected)
        blocks = blocks_of(self.waves, effects, self._spans, expected.prior, noise)
        left = start(effects, residual, expected.prior)
        found, choices = [], []
        for step, block in enumerate(blocks):
            weights = chances_of(self.waves, block, left, noise)
            ends = _ends(weights)
            chosen = choose(step, ends)
            choices.append((weights, chosen, ends))
            bits, left = learn(block, left, chosen)
            found.append(bits)
        return jnp.concatenate(found), _log_shares(choices)
