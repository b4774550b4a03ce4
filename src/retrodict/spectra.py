"""Bits that add up in one observation, and their chances, in; what it says of a few at a time out.

Where bits x_d move the mean of an observation y by s_d each, the density of y given some of them is
that of a sum of independent terms, whose characteristic function is a product:

    φ(ω) = exp(-ω² σ² / 2) ∏_d (1 - p_d + p_d exp(i ω s_d)),   over the bits d that are not known.

On an even grid of frequencies that is a Fourier series, which is exact for normal noise as long as
the sum stays within the period. A few bits are looked at together, as one of all their patterns:
what a block's patterns add to the phase is the same for all rows wherever the s_d are, so that
densities of all patterns, and the characteristic function of a block, are products of matrices.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict.heads import along_first, patterns
from retrodict.rows import total

# Frequencies at the most, and where they end, in units of 1 / σ: the noise leaves exp(-3.3² / 2),
# four in a thousand, of the last.
MOST, CUT = 64, 3.3
# How far sums reach, in standard deviations of what adds up.
REACH = 8.0
# What a series in single precision cannot tell from nothing, of the noise's own peak.
BLIND = 1e-6


def spans(number: int, most: int) -> tuple[int, ...]:
    """Bits cut into blocks of no more than so many, of which none is alone if there are others."""
    rest = number % most
    if rest == 1 < number:
        rest += most
        return (most,) * ((number - rest) // most) + (rest - rest // 2, rest // 2)
    return (most,) * (number // most) + (rest,) * (rest > 0)


class Waves(NamedTuple):
    """A grid of frequencies.

    What is left after later blocks spreads less, so that a shorter period, and every second or
    fourth frequency, will do for them. Frequencies are in such an order that those come first.

    Attributes:
        spacing: between two frequencies, the first being zero.
        numbers: of frequencies that show what is left after each block but the last.
        blur: variance that is added to the noise, where so few could not show it as it is.
        exact: whether the picture is: noise is normal, and bits are independent before it.
    """

    spacing: float
    numbers: tuple[int, ...]
    blur: float
    exact: bool

    @property
    def places(self) -> Int[np.ndarray, " waves"]:
        """The frequencies, in units of the spacing, in their order."""
        every = range(max(self.numbers, default=1))
        strides = sorted({len(every) // number for number in self.numbers} | {1}, reverse=True)
        found: np.ndarray = np.array(list(dict.fromkeys(k for s in strides for k in every[::s])))
        return found

    @property
    def frequencies(self) -> Float[np.ndarray, " waves"]:
        """In their order, from zero on."""
        return self.spacing * self.places


def fitted(
    effects: Sequence[np.ndarray], spreads: Sequence[float], noise: float, exact: bool
) -> Waves:
    """A grid for what is left of a sum after each block of bits but the last.

    A period must hold what the block's own patterns may explain as well: one that is wrong by the
    length of a period would look right.

    Args:
        effects: of the bits that are left before each.
        spreads: standard deviations of their sums, as they usually are.
        noise: standard deviation of the noise, where it is small.
        exact: see `Waves`.
    """
    needed = [
        min(float(np.abs(left).sum()), REACH * spread) + REACH * noise
        for left, spread in zip(effects, spreads, strict=True)
    ]
    if not needed:
        return Waves(1.0, (), 0.0, exact)
    least = CUT * needed[0] / (2 * np.pi * noise)
    number = min(2 ** max(0, math.ceil(math.log2(least))), MOST)
    period = max(needed[0], 2 * np.pi * number * noise / CUT)
    shown = max(noise, CUT * period / (2 * np.pi * number))
    strides = [2 ** int(math.log2(min(period / length, number))) for length in needed]
    numbers = tuple(number // stride for stride in strides)
    return Waves(2 * np.pi / period, numbers, shown**2 - noise**2, exact)


class Turn(NamedTuple):
    """Complex numbers, as their parts: XLA's own are worked out one by one."""

    real: Float[Array, "waves *rows"]
    imaginary: Float[Array, "waves *rows"]

    def __mul__(self, other: "Turn") -> "Turn":  # type: ignore[override]
        return Turn(
            self.real * other.real - self.imaginary * other.imaginary,
            self.real * other.imaginary + self.imaginary * other.real,
        )

    def first(self, number: int) -> "Turn":
        """So many of them."""
        return Turn(self.real[:number], self.imaginary[:number])


class Block(NamedTuple):
    """A few bits that are drawn together, and what comes after them.

    Attributes:
        chances, logs: of all patterns, before anything is observed, and their logarithms.
        sums: by how much each pattern moves the observation.
        effects: of each bit alone.
        turns: exp(i ω sum) of each pattern, real parts before the imaginary ones; it has rows only
            if effects do.
        rest: φ of what is not known once these bits are; none if that is noise alone.
    """

    chances: Float[Array, "patterns *rows"]
    logs: Float[Array, "patterns *rows"]
    sums: Float[Array, "patterns *rows"]
    effects: Float[Array, "bits *rows"]
    turns: Float[Array, "parts patterns *rows"]
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
    rest: Turn | None = None
    stop = sum(spans)
    # all but the last have something after them, and what is before sees that of all
    for number, span in zip((*waves.numbers, 0)[::-1], reversed(spans), strict=True):
        own = slice(stop - span, stop)
        sums = _of_patterns(effects[own])
        # what all rows have in common is a matrix
        common = sums[..., 0] if sums.ndim > 1 and sums.shape[-1] == 1 else sums
        angles = along_first(waves.frequencies.astype(sums.dtype), common[None]) * common
        turns = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)])
        chance = _chances(chances[own])
        shown = None if rest is None else _damped(waves, rest.first(number), noise)
        block = Block(chance, _log_chances(chances[own]), sums, effects[own], turns, shown)
        found.insert(0, block)
        spectrum = _turn(turns, chance, turns.shape[0] // 2)
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
    every = _powers(-waves.spacing * unset, max(waves.numbers, default=1))
    return Sum(unset, Turn(*(part[waves.places] for part in every)))


def _powers(angle: Float[Array, "*rows"], number: int) -> Turn:
    """exp(i k angle) for k = 0, 1, …: sines are dear, products are not."""
    levels = max(1, math.ceil(math.log(number, 4)))
    apart = along_first(4.0 ** np.arange(levels), angle[None]) * angle
    # a product by one keeps them from being worked out again wherever they are used
    firsts = (jnp.eye(levels) @ jnp.cos(apart), jnp.eye(levels) @ jnp.sin(apart))
    found: Turn | None = None
    for real, imaginary in zip(*firsts, strict=True):
        first = Turn(real, imaginary)
        second = first * first
        one = Turn(jnp.ones_like(real), jnp.zeros_like(real))
        four = Turn(*map(jnp.stack, zip(one, first, second, second * first, strict=True)))
        if found is None:
            found = four
            continue
        wide = Turn(four.real[:, None], four.imaginary[:, None]) * found
        found = Turn(*(part.reshape(-1, *angle.shape) for part in wide))
    assert found is not None
    return Turn(*(part[:number] for part in found))


def log_chances(
    waves: Waves, block: Block, left: Sum, noise: Float[Array, "*rows"]
) -> Float[Array, "patterns *rows"]:
    """log of each pattern's chance times the density of what is left, up to a constant."""
    if block.rest is None:
        gap = jnp.clip((left.unset - block.sums) / jnp.sqrt(noise), -1e9, 1e9)
        return block.logs - 0.5 * gap**2
    number = block.rest.real.shape[0]
    seen = block.rest * left.phase.first(number)
    cosines, sines = (part[:, :number] for part in jnp.split(jnp.swapaxes(block.turns, 0, 1), 2, 1))
    density = _product(cosines, seen.real) - _product(sines, seen.imaginary)
    return block.logs + jnp.log(jnp.maximum(density, 0) + BLIND)


def learn(block: Block, left: Sum, values: Float[Array, "bits *rows"], after: Block | None) -> Sum:
    """What is left once the block's bits are known, as the block after it needs to see it."""
    unset = left.unset - total(block.effects * values)
    if after is None or after.rest is None:
        return left._replace(unset=unset)
    place = jnp.tensordot(2.0 ** np.arange(values.shape[0])[::-1], values, 1)
    places = along_first(np.arange(block.chances.shape[0]), block.chances)
    number = after.rest.real.shape[0]
    turned = _turn(block.turns, (places == place).astype(values.dtype), number)
    return Sum(unset, left.phase.first(number) * turned)


def _turn(turns: Array, weights: Float[Array, "patterns *rows"], number: int) -> Turn:
    """The weighted sum of what patterns add to the phase, at so many frequencies."""
    parts = turns.reshape(2, -1, *turns.shape[1:])[:, :number]
    return Turn(*jnp.split(_product(parts.reshape(-1, *turns.shape[1:]), weights), 2))


def _damped(waves: Waves, spectrum: Turn, noise: Array) -> Turn:
    """What noise leaves of each frequency; densities then have the noise's own peak at one."""
    places = waves.places[: spectrum.real.shape[0]]
    squares = along_first((waves.spacing * places).astype(noise.dtype) ** 2, noise[None])
    left = jnp.exp(-0.5 * squares * (noise + waves.blur))
    # all but the first frequency stand for a negative one as well
    left = left * along_first(np.where(places > 0, 2.0, 1.0), left)
    left = left / jnp.sum(left, 0)
    return Turn(spectrum.real * left, spectrum.imaginary * left)


def _of_patterns(each: Float[Array, "bits *rows"]) -> Float[Array, "patterns *rows"]:
    """For every pattern, the sum over its bits that are set."""
    return jnp.tensordot(patterns(each.shape[0]).astype(each.dtype), each, 1)


def _chances(p: Float[Array, "bits *rows"]) -> Float[Array, "patterns *rows"]:
    """Of every pattern of independent bits."""
    columns = [along_first(column, p) for column in patterns(p.shape[0]).T]
    found = jnp.ones((1,) * p.ndim, p.dtype)
    for bit, column in zip(p, columns, strict=True):
        # a choice between the two would not be worked out in vectors
        found = found * (column * bit + (1 - column) * (1 - bit))
    return found


def _log_chances(p: Float[Array, "bits *rows"]) -> Float[Array, "patterns *rows"]:
    """Their logarithms, by a product, which is quicker than to take as many."""
    tiny = float(np.finfo(np.float32).tiny)
    yes, no = jnp.log(jnp.maximum(p, tiny)), jnp.log(jnp.maximum(1 - p, tiny))
    return _of_patterns(yes - no) + total(no)


def _product(matrix: Array, vector: Array) -> Array:
    """Of a matrix, which may have rows, by a vector, which may as well."""
    if matrix.ndim > 2:
        return jnp.sum(matrix * vector, 1)
    return matrix @ vector
