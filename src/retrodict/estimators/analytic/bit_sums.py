"""Bits that add up in one observation, and their chances, in; what it says of a few at a time out.

Where bits x_d move the mean of an observation y by s_d each, the density of y given some of them is
that of a sum of independent terms, whose characteristic function is a product:

    φ(ω) = exp(-ω² σ² / 2) ∏_d (1 - p_d + p_d exp(i ω s_d)),   over the bits d that are not known.

On an even grid of frequencies that is a Fourier series, which is exact for normal noise as long as
the sum stays within the period. A few bits are looked at together, as one of all their patterns:
what a block's patterns add to the phase is known beforehand, as the s_d are, so that densities of
all patterns, and the characteristic function of a block, are products by constant matrices. Counted
from the middle of what a block can add, a pattern and its opposite turn the phase the other way
round: cosines are needed of half the patterns and their sums, sines of half and their differences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict.estimators.heads import along_first, patterns

# Frequencies at the most, and where they end, in units of 1 / σ: the noise leaves exp(-3² / 2),
# one in a hundred, of the last.
MOST, CUT = 64, 3.0
# How far sums reach, in standard deviations of what adds up.
REACH = 7.0
# What a series in single precision cannot tell from nothing, of the noise's own peak.
BLIND = 1e-6
# What a series so short leaves in doubt, in the same unit. Without it, what is seldom and not shown
# would have next to no chance, and then a weight to match.
DOUBT = 1e-4
# Products of more multiplications than this XLA hands to Eigen, which takes two to three times as
# long for a few dozen rows. So they are cut into parts, if they need not be many: every part has a
# copy of what is multiplied.
WRITTEN_DOWN, PARTS = 2**14, (1, 2, 4)


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
    def parts(self) -> tuple[Int[np.ndarray, " coarse"], Int[np.ndarray, " fine"]]:
        """Of two numbers, one of each, every frequency is the sum, in units of the spacing."""
        number = max(self.numbers, default=1)
        low = _low(number)
        fine = _even_first((number - 1).bit_length() - low)
        return _even_first(low), 2**low * fine[fine < -(-number // 2**low)]

    @property
    def places(self) -> Int[np.ndarray, " waves"]:
        """The frequencies, in units of the spacing, in their order."""
        found: np.ndarray = np.add.outer(*self.parts).ravel()
        return found

    def period(self, number: int) -> float:
        """Of a sum that so many of the frequencies show."""
        return 2 * np.pi / self.spacing * number / max(self.numbers)

    @property
    def frequencies(self) -> Float[np.ndarray, " waves"]:
        """In their order, from zero on."""
        return self.spacing * self.places


def _low(number: int) -> int:
    """Digits of the first of the two parts of which so many frequencies are made."""
    digits = (number - 1).bit_length()
    return digits - digits // 2


def _even_first(digits: int) -> Int[np.ndarray, " numbers"]:
    """Numbers of so many binary digits, the first 2ᵏ of which are as far apart as can be."""
    found = np.zeros(1, int)
    for digit in reversed(range(digits)):
        found = np.concatenate([found, found + 2**digit])
    return found


def fitted(
    effects: Sequence[float],
    spans: Sequence[int],
    spreads: Sequence[float],
    noise: float,
    exact: bool,
) -> Waves:
    """A grid for what is left of a sum after each block of bits but the last.

    A period must hold what the block's own patterns may explain as well: one that is wrong by the
    length of a period would look right.

    Args:
        effects: of the bits in the order drawn.
        spans: of the blocks.
        spreads: standard deviations of what is left of the sum before each, as they usually are.
        noise: standard deviation of the noise, where it is small.
        exact: see `Waves`.
    """
    needed = [
        min(float(np.abs(effects[start:]).sum()), REACH * spread) + REACH * noise
        for start, spread in zip(starts_of(spans)[:-1], spreads, strict=True)
    ]
    if not needed:
        return Waves(1.0, (), 0.0, exact)
    least = min(math.ceil(CUT * needed[0] / (2 * np.pi * noise)), MOST)
    whole = 2 ** _low(least)
    number = -(-least // whole) * whole
    period = max(needed[0], 2 * np.pi * number * noise / CUT)
    shown = max(noise, CUT * period / (2 * np.pi * number))
    widest = number & -number  # the largest power of two that divides it
    strides = [2 ** int(math.log2(min(period / length, widest))) for length in needed]
    numbers = tuple(number // stride for stride in strides)
    return Waves(2 * np.pi / period, numbers, shown**2 - noise**2, exact)


def starts_of(spans: Sequence[int]) -> tuple[int, ...]:
    """The first bit of every block."""
    return tuple(int(end) - span for end, span in zip(np.cumsum(spans), spans, strict=True))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Effects:
    """By how much each bit moves the observation, in the order drawn: constants, and no arrays."""

    values: tuple[float, ...]


class Turn(NamedTuple):
    """Complex numbers, as their parts: XLA's own are worked out one by one."""

    real: Float[Array | np.ndarray, "waves *rows"]
    imaginary: Float[Array | np.ndarray, "waves *rows"]

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
        chances: of all patterns, before anything is observed.
        sums: by how much each pattern moves the observation from the middle.
        turns: exp(i ω sum) of the first half of the patterns; the others are their opposites.
        rest: φ of what is not known once these bits are; none if that is noise alone.
        mean: of what is not known, from the middle.
    """

    chances: Float[Array, "patterns *rows"]
    sums: Float[np.ndarray, " patterns"]
    turns: Turn
    rest: Turn | None
    mean: Float[Array, "*rows"] | float = 0.0

    @property
    def bits(self) -> int:
        """How many."""
        return self.sums.size.bit_length() - 1

    def shown(self, wave: Turn) -> Float[Array, "patterns *rows"]:
        """The real part of the sum of wave · exp(i ω sum), for every pattern."""
        cosines, sines = (part.T for part in self.turns.first(wave.real.shape[0]))
        even, odd = jnp.matmul(cosines, wave.real), jnp.matmul(sines, wave.imaginary)
        return jnp.concatenate([even - odd, (even + odd)[::-1]])


def blocks_of(
    waves: Waves,
    effects: Effects,
    spans: Sequence[int],
    chances: Float[Array, "bits *rows"],
    noise: Float[Array, "*rows"],
) -> tuple[Block, ...]:
    """The blocks in the order drawn, each with all that is after it."""
    found: list[Block] = []
    spectra: list[Turn] = []
    for span, run in groupby(spans):
        number, start = len(list(run)), sum(block.bits for block in found)
        # blocks of one size are looked at together: XLA would share them out among threads
        own = slice(start, start + number * span)
        sums = np.array(effects.values[own]).reshape(number, span) @ (patterns(span).T - 0.5)
        angles = waves.frequencies[:, None] * sums[:, None, : 2**span // 2]
        turns = Turn(*(wave(angles).astype(chances.dtype) for wave in (np.cos, np.sin)))
        bits = chances[own].reshape(number, span, *chances.shape[1:])
        known = zip(bits, sums.astype(chances.dtype), *turns, strict=True)
        # each by itself: XLA would work out those of all for each
        found += [Block(_chances(p[None])[0], s, Turn(*turn), None) for p, s, *turn in known]
        later = int(start == 0)  # nothing is before the first
        seen = _seen(Turn(*(part[later:] for part in turns)), _chances(bits[later:]))
        spectra += [Turn(*parts) for parts in zip(*seen, strict=True)]
    rest: Turn | None = None
    means = _means(effects, spans, chances)
    # all but the last have something after them, and what is before sees that of all
    for place in reversed(range(len(waves.numbers))):
        rest = spectra[place] if rest is None else spectra[place] * rest
        shown = _damped(waves, rest.first(waves.numbers[place]), noise)
        found[place] = found[place]._replace(rest=shown, mean=means[place])
    return tuple(found)


def _means(
    effects: Effects, spans: Sequence[int], chances: Float[Array, "bits *rows"]
) -> Float[Array, "blocks *rows"]:
    """Of what bits after each block add, from the middle."""
    later = np.greater_equal.outer(np.arange(len(effects.values)), np.cumsum(spans)).T
    return jnp.tensordot((later * effects.values).astype(chances.dtype), chances - 0.5, 1)


def _seen(turns: Turn, weights: Float[Array, "blocks patterns *rows"]) -> Turn:
    """The weighted sum of exp(i ω sum) over the patterns of each block."""
    half = turns.real.shape[-1]
    first, opposite = weights[:, :half], weights[:, : half - 1 : -1]
    return Turn(
        _products(np.asarray(turns.real), first + opposite),
        _products(np.asarray(turns.imaginary), first - opposite),
    )


def _products(
    waves: Float[np.ndarray, "blocks waves patterns"],
    weights: Float[Array, "blocks patterns *rows"],
) -> Float[Array, "blocks waves *rows"]:
    """A product for each block, in parts that XLA writes down itself."""
    blocks, number, patterns = waves.shape
    each = number * patterns * math.prod(weights.shape[2:])
    parts = next((n for n in PARTS if number % n == 0 and each <= n * WRITTEN_DOWN), 1)
    found = jnp.einsum(
        "bcwp,bcp...->bcw...",
        waves.reshape(blocks, parts, number // parts, patterns),
        jnp.broadcast_to(weights[:, None], (blocks, parts, *weights.shape[1:])),
    )
    return found.reshape(blocks, number, *weights.shape[2:])


def start(
    effects: Effects, residual: Float[Array, "*rows"], chances: Float[Array, "bits *rows"]
) -> Float[Array, "*rows"]:
    """What of the observation is left to explain while no bit is known.

    That is the observation less its mean if bits that are not known were half set; `residual` is
    the observation less its mean.
    """
    return residual + jnp.matmul(np.array(effects.values, chances.dtype), chances - 0.5)


def _phase(waves: Waves, at: Float[Array, "*rows"], number: int) -> Turn:
    """exp(i ω at) of so many frequencies, by parts: sines are dear, products are not."""
    coarse, fine = waves.parts
    coarse = coarse[: -(-number // fine.size)]
    places = along_first(np.concatenate([coarse, fine]), at[None])
    circle = _circle(jnp.multiply(places, at * (waves.spacing / (2 * np.pi))))
    # a product by one keeps them from being worked out again wherever they are used
    one = np.eye(places.shape[0], dtype=at.dtype)
    parts = [jnp.split(jnp.tensordot(one, part, 1), [coarse.size]) for part in circle]
    both = Turn(*(p[:, None] for p, _ in parts)) * Turn(*(p[None] for _, p in parts))
    return Turn(*(part.reshape(-1, *at.shape) for part in both)).first(number)


def _circle(turns: Float[Array, "*rows"]) -> Turn:
    """exp(2π i turns): XLA's own sine, which takes any angle, takes eight times as long."""
    # of a quarter of what is left of a turn, at most π / 4, few terms of the series are needed
    quarter = (turns - jnp.round(turns)) * (np.pi / 2)
    square = quarter**2
    sine = quarter * (1 - square / 6 * (1 - square / 20 * (1 - square / 42)))
    cosine = 1 - square / 2 * (1 - square / 12 * (1 - square / 30 * (1 - square / 56)))
    for _ in range(2):
        sine, cosine = 2 * sine * cosine, 1 - 2 * sine**2
    return Turn(cosine, sine)


def chances_of(
    waves: Waves, block: Block, left: Float[Array, "*rows"], noise: Float[Array, "*rows"]
) -> Float[Array, "patterns *rows"]:
    """Each pattern's chance times the density of what is left, up to a constant."""
    if block.rest is None:
        sums = along_first(block.sums, block.chances)
        gap = jnp.clip((left - sums) / jnp.sqrt(noise), -1e9, 1e9)
        density = jnp.exp(0.5 * (jnp.min(gap**2, 0) - gap**2))
        return block.chances * (density + BLIND)
    number = block.rest.real.shape[0]
    density = block.shown(block.rest * _phase(waves, -left, number))
    # what is a whole period off looks right as well: of the two, the nearer to what is expected is
    off = left - block.mean - along_first(block.sums, block.chances)
    near = jnp.abs(off) <= waves.period(number) / 2
    return block.chances * (jnp.where(near, jnp.maximum(density, 0), 0) + DOUBT)


def learn(
    block: Block, left: Float[Array, "*rows"], chosen: Float[Array, "patterns *rows"]
) -> tuple[Float[Array, "bits *rows"], Float[Array, "*rows"]]:
    """A block's bits, and what is left once they are known.

    `chosen` is one for the pattern at hand, and zero for all others.
    """
    told = np.concatenate([patterns(block.bits).T, block.sums[None]]).astype(chosen.dtype)
    *bits, moved = jnp.matmul(told, chosen)
    return jnp.stack(bits), left - moved


def chosen_by(bits: Float[Array, "bits *rows"]) -> Float[Array, "patterns *rows"]:
    """What `learn` asks for, of bits that are known."""
    number = bits.shape[0]
    place = jnp.tensordot(2.0 ** np.arange(number)[::-1], bits, 1)
    chosen: Array = jnp.equal(along_first(np.arange(2**number), bits), place)
    return chosen.astype(bits.dtype)


def _damped(waves: Waves, spectrum: Turn, noise: Array) -> Turn:
    """What noise leaves of each frequency; densities then have the noise's own peak at one."""
    places = waves.places[: spectrum.real.shape[0]]
    squares = along_first((waves.spacing * places).astype(noise.dtype) ** 2, noise[None])
    left = jnp.exp(-0.5 * squares * (noise + waves.blur))
    # all but the first frequency stand for a negative one as well
    left = left * along_first(np.where(places > 0, 2.0, 1.0), left)
    left = left / jnp.sum(left, 0)
    return Turn(spectrum.real * left, spectrum.imaginary * left)


def _chances(p: Float[Array, "blocks bits *rows"]) -> Float[Array, "blocks patterns *rows"]:
    """Of every pattern of independent bits, the last changing first."""
    number = p.shape[1]
    if number == 1:
        set_to = np.arange(2.0).reshape(2, *(1,) * (p.ndim - 2)).astype(p.dtype)
        # a choice between the two would not be worked out in vectors
        either: Array = (1 - set_to) + (2 * set_to - 1) * p
        return either
    # by halves it takes few operations, and what takes many XLA would share out among threads
    first, second = (_chances(half) for half in jnp.split(p, [number // 2], 1))
    return (first[:, :, None] * second[:, None]).reshape(p.shape[0], 2**number, *p.shape[2:])
