"""Recognise bits whose weighted sum is observed with normal noise.

The latents must be bits, independent given their parents, and have a single observation each copy,
whose mean they shift by constant amounts and whose variance they leave alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict.estimators.analytic.bit_sums import BLOCK_BITS, BitSums
from retrodict.estimators.analytic.frequency_grid import FrequencyGrid, fit_grid
from retrodict.estimators.coordinates import blocks
from retrodict.estimators.heads import block_sizes
from retrodict.graph.prior_draws import PriorSampler
from retrodict.proposal.factor_model import FactorModel
from retrodict.proposal.guide_search import median_gain, sampling_order
from retrodict.proposal.reference_draws import at_references, pick, reference_draws
from retrodict.proposal.scope import Scope

# The largest number of bits: all patterns of each block are evaluated.
MAX_BITS = 60
# The largest deviation, in standard deviations or nats, that counts as rounding error.
TOLERANCE = 3e-3


class _Examined(NamedTuple):
    """Moments of one copy in one reference draw.

    Attributes:
        prior: probabilities of the bits.
        slope: by how much each bit shifts the observation.
        noise: variance of the observation.
        deviation: the largest difference between the moments at the drawn bits and those foreseen.
    """

    prior: Float[Array, " bits"]
    slope: Float[Array, " bits"]
    noise: Float[Array, ""]
    deviation: Float[Array, ""]


def find_bit_sum(model: FactorModel, sample_prior: PriorSampler) -> BitSums | None:
    """The family of a closed conditional if it is a sum of bits."""
    latents = model.copies.latents
    number = sum(block.size for block in blocks(latents))
    binary = all(block.kind == "bernoulli" for block in blocks(latents))
    single = model.num_observations == 1 and model.children[0].scalar
    if not (binary and single and 1 < number <= MAX_BITS):
        return None
    references = reference_draws(model, sample_prior)
    examined = at_references(model, lambda *at: _examine(model, *at), references)
    slopes = np.asarray(examined.slope, float)
    constant = np.ptp(slopes, 0).max() <= 1e-4 * np.abs(slopes).max()
    if not constant or not np.all(np.asarray(examined.deviation) < TOLERANCE):
        return None
    prior, noise = np.asarray(examined.prior, float), np.asarray(examined.noise, float)
    variance = prior * (1 - prior)
    gain = median_gain(variance * slopes**2 / noise[:, None])
    order = sampling_order(latents, gain)
    effects = np.median(slopes, 0)[list(order)]
    return BitSums(order, tuple(map(float, effects)), _grid(effects, variance[:, order], noise))


def bit_sum_constants(family: BitSums) -> tuple[float, ...]:
    """The family as numbers, see `restore_bit_sum`."""
    grid = family.grid
    numbers = (len(family.order), *family.order, *family.effects)
    return tuple(map(float, (*numbers, grid.spacing, grid.blur, *grid.numbers)))


def restore_bit_sum(constants: Sequence[float]) -> BitSums:
    """The family from its numbers: bits, order, effects, the grid's spacing, blur and sizes."""
    bits, *rest = constants
    order, effects = rest[: int(bits)], rest[int(bits) : 2 * int(bits)]
    spacing, blur, *numbers = rest[2 * int(bits) :]
    grid = FrequencyGrid(spacing, tuple(map(int, numbers)), blur)
    return BitSums(tuple(map(int, order)), tuple(effects), grid)


def _examine(model: FactorModel, scope: Scope, index: tuple[Array, ...], draw: Array) -> _Examined:
    moments = model.target(scope).moments
    names = model.factor.latents
    values = scope.values if model.scan is None else scope.step_values(names)
    x = model.copies.rows({name: values[name] for name in names})
    at_zero, at_draw = moments(jnp.zeros_like(x)), moments(x)

    def mean_with(bit: Array) -> Array:
        return moments(jnp.broadcast_to(bit, x.shape)).mean

    means = jax.vmap(mean_with)(jnp.eye(x.shape[-1]))
    slopes = jnp.moveaxis(means[..., 0], 0, -1) - at_zero.mean
    zero, drawn, slope, bits = pick(index, (at_zero, at_draw, slopes, x))
    sd = jnp.sqrt(drawn.variance)
    residual = drawn.observed - drawn.mean
    normal = -0.5 * (residual**2 / drawn.variance + jnp.log(2 * jnp.pi * drawn.variance))
    differences = [
        (drawn.mean - zero.mean - slope @ bits) / sd,
        jnp.log(drawn.variance / zero.variance),
        drawn.prior_mean - zero.prior_mean,
        drawn.log_density - normal,
    ]
    largest = jnp.max(jnp.abs(jnp.concatenate(differences)))
    deviation = jnp.where(jnp.isnan(largest), jnp.inf, largest)
    return _Examined(zero.prior_mean, slope, zero.variance[0], deviation)


def _grid(
    effects: np.ndarray,
    variance: Float[np.ndarray, "draws bits"],
    noise: Float[np.ndarray, " draws"],
) -> FrequencyGrid:
    """A grid that resolves the sums of typical draws."""
    sizes = block_sizes(effects.size, BLOCK_BITS)
    starts = [int(end) - size for end, size in zip(np.cumsum(sizes), sizes, strict=True)]
    spreads = [
        float(np.sqrt(np.median(variance[:, start:] @ effects[start:] ** 2)))
        for start in starts[:-1]
    ]
    # Where the noise differs between draws, small noise must be resolved as well.
    smallest = float(np.sqrt(np.quantile(noise, 0.1)))
    return fit_grid(list(effects), starts, spreads, smallest)
