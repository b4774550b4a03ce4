"""Bits that add up in one observation, and their chances, in; what it says of a few at a time out.

Where bits x_d move the mean of an observation y by s_d each, the density of y given some of them is
that of a sum of independent terms, whose characteristic function is a product:

    φ(ω) = exp(-ω² σ² / 2) ∏_d (1 - p_d + p_d exp(i ω s_d)),   over the bits d that are not known.

On an even grid of frequencies that is a Fourier series, which is exact for normal noise as long as
the sum stays within the period. A few bits are looked at together, as one of all their patterns:
what a block's patterns add to the phase is the same for all rows wherever the s_d are, so that
densities of all patterns, and the characteristic function of a block, are products of matrices.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict.heads import along_first, patterns
from retrodict.rows import total

# Frequencies at the most, and where the series may end and should end, in units of 1 / σ: the noise
# leaves exp(-3.3² / 2), four in a thousand, of the former.
MOST, LEAST_CUT, USUAL_CUT = 64, 3.3, 4.0
# How far sums reach, in standard deviations of what adds up.
REACH = 12.0
# What a series in single precision cannot tell from nothing, of the noise's own peak.
BLIND = 1e-6


class Waves(NamedTuple):
    """A grid of frequencies.

    Attributes:
        spacing: between two of them, the first being zero.
        number: of frequencies.
        blur: variance that is added to the noise, where so few could not show it as it is.
        exact: whether the picture is: noise is normal, and bits are independent before it.
    """

    spacing: float
    number: int
    blur: float
    exact: bool

    @property
    def frequencies(self) -> Float[np.ndarray, " waves"]:
        """From zero on."""
        return self.spacing * np.arange(self.number)


def fitted(effects: np.ndarray, spread: float, noise: float, exact: bool) -> Waves:
    """A grid for what is left of a sum once the first bits are known.

    Args:
        effects: of the other bits.
        spread: standard deviation of their sum, as it usually is.
        noise: standard deviation of the noise, where it is small.
        exact: see `Waves`.
    """
    needed = float(np.abs(effects).sum()) + REACH * noise
    period = min(needed, max(2 * np.pi * MOST * noise / LEAST_CUT, REACH * spread))
    number = int(np.clip(np.ceil(USUAL_CUT * period / (2 * np.pi * noise)), 1, MOST))
    shown = max(noise, LEAST_CUT * period / (2 * np.pi * number))
    return Waves(2 * np.pi / period, number, shown**2 - noise**2, exact)


class Turn(NamedTuple):
    """Complex numbers, as their parts: XLA's own are worked out one by one."""

    real: Float[Array, "waves *rows"]
    imaginary: Float[Array, "waves *rows"]

    def __mul__(self, other: "Turn") -> "Turn":  # type: ignore[override]
        return Turn(
            self.real * other.real - self.imaginary * other.imaginary,
            self.real * other.imaginary + self.imaginary * other.real,
        )


class Block(NamedTuple):
    """A few bits that are drawn together, and what comes after them.

    Attributes:
        chances: of all patterns, before anything is observed.
        sums: by how much each pattern moves the observation.
        turns: exp(i ω sum) of each pattern; it has rows only if effects do.
        rest: φ of what is not known once these bits are; none if that is noise alone.
    """

    chances: Float[Array, "patterns *rows"]
    sums: Float[Array, "patterns *rows"]
    turns: Turn
    rest: Turn | None


class Sum(NamedTuple):
    """What of the observation is left to explain.

    Attributes:
        unset: the observation less its mean if no more bits were set.
        phase: exp(-i ω unset).
    """

    unset: Float[Array, "*rows"]
    phase: Turn


def blocks_of(
    waves: Waves,
    spans: Sequence[int],
    effects: Float[Array, "bits *rows"],
    chances: Float[Array, "bits *rows"],
    noise: Float[Array, "*rows"],
) -> tuple[Block, ...]:
    """The blocks in the order drawn, each with all that is after it."""
    found: list[Block] = []
    weights = _weights(waves, noise)
    rest: Turn | None = None
    stop = sum(spans)
    for span in reversed(spans):
        own = slice(stop - span, stop)
        sums = _of_patterns(effects[own])
        # what all rows have in common is a matrix
        common = sums[..., 0] if sums.ndim > 1 and sums.shape[-1] == 1 else sums
        angles = along_first(waves.frequencies.astype(sums.dtype), common[None]) * common
        turns = Turn(jnp.cos(angles), jnp.sin(angles))
        chance = _chances(chances[own])
        shown = None if rest is None else Turn(rest.real * weights, rest.imaginary * weights)
        found.insert(0, Block(chance, sums, turns, shown))
        spectrum = Turn(_product(turns.real, chance), _product(turns.imaginary, chance))
        rest = spectrum if rest is None else spectrum * rest
        stop -= span
    return tuple(found)


def start(
    waves: Waves,
    residual: Float[Array, "*rows"],
    effects: Float[Array, "bits *rows"],
    chances: Float[Array, "bits *rows"],
) -> Sum:
    """Nothing is known yet; `residual` is the observation less its mean."""
    unset = residual + total(effects * chances)
    return Sum(unset, _powers(-waves.spacing * unset, waves.number))


def _powers(angle: Float[Array, "*rows"], number: int) -> Turn:
    """exp(i k angle) for k = 0, 1, …, from the powers of two: sines are dear."""
    levels = max(1, (number - 1).bit_length())
    doubled = jnp.asarray(along_first(2.0 ** np.arange(levels), angle[None]) * angle)
    # a product by one keeps them from being worked out again wherever they are used
    sines, cosines = (np.eye(levels) @ part for part in (jnp.sin(doubled), jnp.cos(doubled)))
    found = Turn(jnp.ones((1,) * doubled.ndim), jnp.zeros((1,) * doubled.ndim))
    for level in range(levels):
        here = along_first((np.arange(number) >> level) % 2 == 1, doubled)
        found *= Turn(jnp.where(here, cosines[level], 1), jnp.where(here, sines[level], 0))
    return found


def log_chances(
    waves: Waves, block: Block, left: Sum, noise: Float[Array, "*rows"]
) -> Float[Array, "patterns *rows"]:
    """log of each pattern's chance times the density of what is left, up to a constant."""
    if block.rest is None:
        gap = jnp.clip((left.unset - block.sums) / jnp.sqrt(noise), -1e9, 1e9)
        return jnp.log(block.chances + np.finfo(np.float32).tiny) - 0.5 * gap**2
    seen = block.rest * left.phase
    density = _product(jnp.swapaxes(block.turns.real, 0, 1), seen.real)
    density -= _product(jnp.swapaxes(block.turns.imaginary, 0, 1), seen.imaginary)
    return jnp.log(block.chances * (jnp.maximum(density, 0) + BLIND) + np.finfo(np.float32).tiny)


def learn(block: Block, left: Sum, values: Float[Array, "bits *rows"]) -> Sum:
    """What is left once the block's bits are known."""
    number = block.chances.shape[0]
    place = jnp.tensordot(2.0 ** np.arange(values.shape[0])[::-1], values, 1)
    chosen = (along_first(np.arange(number), block.chances) == place).astype(values.dtype)
    unset = left.unset - total(block.sums * chosen)
    if block.rest is None:
        return left._replace(unset=unset)
    turned = Turn(_product(block.turns.real, chosen), _product(block.turns.imaginary, chosen))
    return Sum(unset, left.phase * turned)


def _weights(waves: Waves, noise: Array) -> Float[Array, "waves *rows"]:
    """What noise leaves of each frequency; densities then have the noise's own peak at one."""
    squares = along_first(waves.frequencies.astype(noise.dtype) ** 2, noise[None])
    left = jnp.exp(-0.5 * squares * (noise + waves.blur))
    # all but the first frequency stand for a negative one as well
    left = left * along_first(np.where(np.arange(waves.number) > 0, 2.0, 1.0), left)
    return left / jnp.sum(left, 0)


def _of_patterns(each: Float[Array, "bits *rows"]) -> Float[Array, "patterns *rows"]:
    """For every pattern, the sum over its bits that are set."""
    return jnp.tensordot(patterns(each.shape[0]).astype(each.dtype), each, 1)


def _chances(p: Float[Array, "bits *rows"]) -> Float[Array, "patterns *rows"]:
    """Of every pattern of independent bits."""
    columns = [along_first(column, p) for column in patterns(p.shape[0]).T]
    found = jnp.ones((1,) * p.ndim, p.dtype)
    for bit, column in zip(p, columns, strict=True):
        found = found * jnp.where(column > 0, bit, 1 - bit)
    return found


def _product(matrix: Array, vector: Array) -> Array:
    """Of a matrix, which may have rows, by a vector, which may as well."""
    if matrix.ndim > 2:
        return jnp.sum(matrix * vector, 1)
    return matrix @ vector
