"""Bits whose weighted sum is observed with normal noise.

Where independent bits x_d shift the mean of an observation y by s_d each, the density of y given
some of the bits is that of a sum of independent terms, with the characteristic function

    φ(ω) = exp(−ω²σ²/2) ∏_d (1 − p_d + p_d exp(iω s_d)),   over the bits d that are not yet known.

On an even grid of frequencies this is a Fourier series, exact for normal noise as long as the sum
stays within one period. Bits are drawn in blocks, as one of all patterns of the block. The phases
of a block's patterns are constants, because the s_d are, so that the densities of all patterns and
the characteristic function of a block are products with constant matrices. Sums are measured from
their midpoint, so that a pattern and its complement have opposite phases: cosines are needed for
half of the patterns and their sums, sines for half and their differences.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.batch_last import along_first
from retrodict._xla.tuning import MAX_INLINED_PRODUCT, PRODUCT_PARTS
from retrodict.estimators.analytic.family import ConditionalTarget, Randomness
from retrodict.estimators.analytic.finite import Choice, log_prob_of_choices
from retrodict.estimators.analytic.frequency_grid import FrequencyGrid, Phasor
from retrodict.estimators.bit_patterns import block_sizes, pattern_number, patterns
from retrodict.estimators.scalar_bijections import Coordinate

# Bits drawn at once, at most.
BLOCK_BITS = 4
# The rounding error of a density in single precision, relative to the peak of the noise.
ROUNDING_FLOOR = 1e-6
# The truncation error of the series, relative to the peak of the noise. Without this floor, rare
# patterns that the series does not resolve would be proposed with almost no probability and get
# correspondingly large weights.
TRUNCATION_FLOOR = 1e-4


class BitSumParameters(NamedTuple):
    """Prior probabilities of the bits in sampling order, and the observation of their sum.

    Attributes:
        probabilities: of each bit being one.
        residual: the observation minus its mean if every bit were one half.
        noise: variance of the observation.
    """

    probabilities: Float[Array, "bits *rows"]
    residual: Float[Array, "*rows"]
    noise: Float[Array, "*rows"]


@dataclass(frozen=True)
class BitSums:
    """q(x) of bits whose weighted sum is observed with normal noise, block after block.

    Attributes:
        order: the bits in sampling order, by their position among the coordinates.
        effects: how much each bit, in sampling order, shifts the observation.
        grid: frequencies at which the remaining sum is represented.
    """

    order: tuple[int, ...]
    effects: tuple[float, ...]
    grid: FrequencyGrid
    name: str = "bit sum"
    defensive: bool = False
    evaluations: int = 2

    @property
    def blocks(self) -> tuple[int, ...]:
        """Sizes of the blocks that are drawn at once."""
        return block_sizes(len(self.order), BLOCK_BITS)

    def num_uniforms(self, coordinates: int) -> int:  # noqa: D102
        return len(self.blocks)

    def parameters(self, target: ConditionalTarget, start: Array) -> BitSumParameters:
        """Probabilities and noise from the model's own moments, with all bits at zero."""
        moments = target.moments(jnp.zeros_like(start))
        residual = (moments.observed - moments.mean)[..., 0] - 0.5 * sum(self.effects)
        probabilities = moments.prior_mean[..., np.array(self.order)]
        # Values whose squares overflow would leave NaN in all patterns.
        residual = jnp.clip(jnp.nan_to_num(residual), -1e15, 1e15)
        return BitSumParameters(
            jnp.nan_to_num(probabilities), residual, jnp.maximum(moments.variance[..., 0], 1e-12)
        )

    def sample(  # noqa: D102
        self, parameters: BitSumParameters, randomness: Randomness, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        def choose(block: int, weights: Array) -> Choice:
            return Choice.sample(weights, randomness.uniform[block])

        bits, log_q = self._visit_blocks(parameters, choose)
        return bits[np.argsort(self.order)], log_q

    def log_prob(self, parameters: BitSumParameters, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        places = np.split(np.array(self.order), np.cumsum(self.blocks)[:-1])

        def choose(block: int, weights: Array) -> Choice:
            return Choice.of(weights, one_hot_pattern(row[places[block]]))

        return self._visit_blocks(parameters, choose)[1]

    def _visit_blocks(
        self, parameters: BitSumParameters, choose: Callable[[int, Array], Choice]
    ) -> tuple[Array, Array]:
        """Choose the bits of every block given those before; returns them and their log q."""
        blocks = make_blocks(self.grid, self.effects, self.blocks, parameters)
        remaining, bits, choices = parameters.residual, [], []
        for number, block in enumerate(blocks):
            weights = pattern_weights(self.grid, block, remaining, parameters.noise)
            choices.append(choose(number, weights))
            chosen, remaining = block.subtract(remaining, choices[-1].one_hot)
            bits.append(chosen)
        return jnp.concatenate(bits), log_prob_of_choices(choices)


class BitBlock(NamedTuple):
    """Bits that are drawn together, and the sum of the bits after them.

    Attributes:
        probabilities: prior probabilities of all patterns.
        sums: how much each pattern shifts the observation, from the midpoint.
        phases: exp(iω·sum) of the first half of the patterns; the others are their complements.
        rest: damped characteristic function of the bits after this block; None for the last.
        rest_mean: mean of the sum of the bits after this block, from the midpoint.
    """

    probabilities: Float[Array, "patterns *rows"]
    sums: Float[np.ndarray, " patterns"]
    phases: Phasor
    rest: Phasor | None = None
    rest_mean: Float[Array, "*rows"] | float = 0.0

    @property
    def size(self) -> int:
        """The number of bits."""
        return self.sums.size.bit_length() - 1

    def real_part(self, series: Phasor) -> Float[Array, "patterns *rows"]:
        """Re Σ_ω series(ω)·exp(iω·sum) for every pattern."""
        cosines, sines = (part.T for part in self.phases.first(series.real.shape[0]))
        even, odd = jnp.matmul(cosines, series.real), jnp.matmul(sines, series.imaginary)
        return jnp.concatenate([even - odd, (even + odd)[::-1]])

    def subtract(
        self, remaining: Float[Array, "*rows"], one_hot: Float[Array, "patterns *rows"]
    ) -> tuple[Float[Array, "bits *rows"], Float[Array, "*rows"]]:
        """The bits of a chosen pattern, and the observation that remains to be explained."""
        table = np.concatenate([patterns(self.size).T, self.sums[None]]).astype(one_hot.dtype)
        *bits, shift = jnp.matmul(table, one_hot)
        return jnp.stack(bits), remaining - shift


def make_blocks(
    grid: FrequencyGrid,
    effects: Sequence[float],
    sizes: Sequence[int],
    parameters: BitSumParameters,
) -> tuple[BitBlock, ...]:
    """The blocks in sampling order, each with the characteristic function of the bits after it."""
    probabilities = parameters.probabilities
    blocks: list[BitBlock] = []
    spectra: list[Phasor] = []
    for size, run in groupby(sizes):
        number, start = len(list(run)), sum(block.size for block in blocks)
        # Blocks of one size are computed together: XLA would distribute them over threads.
        here = slice(start, start + number * size)
        sums = np.array(effects[here]).reshape(number, size) @ (patterns(size).T - 0.5)
        angles = grid.frequencies[:, None] * sums[:, None, : 2**size // 2]
        phases = Phasor(*(wave(angles).astype(probabilities.dtype) for wave in (np.cos, np.sin)))
        bits = probabilities[here].reshape(number, size, *probabilities.shape[1:])
        constants = zip(bits, sums.astype(probabilities.dtype), *phases, strict=True)
        # Each block by itself: XLA would recompute those of all blocks for each.
        blocks += [
            BitBlock(_pattern_probabilities(p[None])[0], s, Phasor(*phase))
            for p, s, *phase in constants
        ]
        first = int(start == 0)  # No block needs the characteristic function of the first.
        spectrum = _characteristic(
            Phasor(*(part[first:] for part in phases)), _pattern_probabilities(bits[first:])
        )
        spectra += [Phasor(*parts) for parts in zip(*spectrum, strict=True)]
    rest: Phasor | None = None
    means = _rest_means(effects, sizes, probabilities)
    for place in reversed(range(len(grid.numbers))):
        rest = spectra[place] if rest is None else spectra[place] * rest
        damped = grid.damped(rest.first(grid.numbers[place]), parameters.noise)
        blocks[place] = blocks[place]._replace(rest=damped, rest_mean=means[place])
    return tuple(blocks)


def pattern_weights(
    grid: FrequencyGrid, block: BitBlock, remaining: Float[Array, "*rows"], noise: Array
) -> Float[Array, "patterns *rows"]:
    """Each pattern's prior probability times the density of the observation, up to a constant."""
    sums = along_first(block.sums, block.probabilities)
    if block.rest is None:
        standard = jnp.clip((remaining - sums) / jnp.sqrt(noise), -1e9, 1e9)
        density = jnp.exp(0.5 * (jnp.min(standard**2, 0) - standard**2))
        return block.probabilities * (density + ROUNDING_FLOOR)
    number = block.rest.real.shape[0]
    density = block.real_part(block.rest * grid.phase(-remaining, number))
    # Aliasing: keep the alias nearest to the prior mean.
    offset = remaining - block.rest_mean - sums
    nearest = jnp.abs(offset) <= grid.period(number) / 2
    density = jnp.where(nearest, jnp.maximum(density, 0), 0)
    return block.probabilities * (density + TRUNCATION_FLOOR)


def one_hot_pattern(bits: Float[Array, "bits *rows"]) -> Float[Array, "patterns *rows"]:
    """One for the pattern of some bits, zero for all others."""
    numbers = along_first(np.arange(2 ** bits.shape[0]), bits)
    one_hot: Array = jnp.equal(numbers, pattern_number(bits))
    return one_hot.astype(bits.dtype)


def _rest_means(
    effects: Sequence[float], sizes: Sequence[int], probabilities: Float[Array, "bits *rows"]
) -> Float[Array, "blocks *rows"]:
    """Means of the sums of the bits after each block, from their midpoint."""
    after = np.greater_equal.outer(np.arange(len(effects)), np.cumsum(sizes)).T
    return jnp.tensordot((after * effects).astype(probabilities.dtype), probabilities - 0.5, 1)


def _characteristic(phases: Phasor, weights: Float[Array, "blocks patterns *rows"]) -> Phasor:
    """Σ weight · exp(iω·sum) over the patterns of each block."""
    half = phases.real.shape[-1]
    first, complement = weights[:, :half], weights[:, : half - 1 : -1]
    return Phasor(
        _split_product(np.asarray(phases.real), first + complement),
        _split_product(np.asarray(phases.imaginary), first - complement),
    )


def _split_product(
    waves: Float[np.ndarray, "blocks frequencies patterns"],
    weights: Float[Array, "blocks patterns *rows"],
) -> Float[Array, "blocks frequencies *rows"]:
    """A matrix product for each block, in parts small enough for XLA to inline."""
    blocks, number, patterns = waves.shape
    multiplications = number * patterns * math.prod(weights.shape[2:])
    even = (parts for parts in PRODUCT_PARTS if number % parts == 0)
    parts = next((n for n in even if multiplications <= n * MAX_INLINED_PRODUCT), 1)
    result = jnp.einsum(
        "bcwp,bcp...->bcw...",
        waves.reshape(blocks, parts, number // parts, patterns),
        jnp.broadcast_to(weights[:, None], (blocks, parts, *weights.shape[1:])),
    )
    return result.reshape(blocks, number, *weights.shape[2:])


def _pattern_probabilities(
    p: Float[Array, "blocks bits *rows"],
) -> Float[Array, "blocks patterns *rows"]:
    """Probabilities of all patterns of independent bits, the last bit changing fastest."""
    number = p.shape[1]
    if number == 1:
        value = np.arange(2.0).reshape(2, *(1,) * (p.ndim - 2)).astype(p.dtype)
        # Arithmetic vectorises where a select would not.
        either: Array = (1 - value) + (2 * value - 1) * p
        return either
    # Halving takes few operations; XLA would distribute many over threads.
    first, second = (_pattern_probabilities(half) for half in jnp.split(p, [number // 2], 1))
    return (first[:, :, None] * second[:, None]).reshape(p.shape[0], 2**number, *p.shape[2:])
