"""Network inputs and anchors from the linear estimate of a step given the steps before.

A network sees the model's linear estimate (see `linear_estimate`) step by step: the mean and scale
of the coordinate that is drawn, and the innovations, which are the observations minus their
predictive means. Half of a mixture's components are placed relative to the estimate; the logits of
patterns of bits start from those that the estimate gives. The network learns to correct the
estimate, and the importance weights correct the network.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.batch_last import along_first, concatenate_features
from retrodict.estimators.bit_patterns import patterns
from retrodict.estimators.heads import compress
from retrodict.estimators.linear_estimate import (
    CoordinateView,
    GuideState,
    LinearEstimate,
    Position,
    condition_all,
    slice_span,
)
from retrodict.estimators.scalar_bijections import Coordinate, match_gaussian

# Innovations are also given as sines and cosines of these wavelengths, in standard deviations of
# the observation's noise, each half of the one before: which of many discrete causes explain an
# innovation depends on its fine structure.
LONGEST_WAVELENGTH, NUM_WAVELENGTHS = 64.0, 5
# Innovations are inputs if there are no more observations than this.
MAX_CHANNELS = 4
# The number of bits drawn at once if innovations are inputs.
BITS_PER_STEP = 4
# Inputs of a step besides innovations: four for a coordinate, one for each of a few bits.
NUM_STEP_INPUTS = 4
# The smallest logit of a pattern of bits, relative to the largest.
MIN_LOGIT = -15.0


def anchor(mean: Array, scale: Array, c: Coordinate[Array]) -> Coordinate[Array]:
    """The constants of coordinates with the anchors that a normal estimate of them gives."""
    mean, scale = match_gaussian(mean, scale, c)
    shift = jnp.clip((mean - c.centre) / c.scale, -1e6, 1e6)
    return c._replace(shift=shift, stretch=jnp.clip(scale / c.scale, 1e-5, 10.0))


def num_inputs(channels: int) -> int:
    """The number of inputs of a step."""
    return NUM_STEP_INPUTS + channels * (2 + 2 * NUM_WAVELENGTHS)


def coordinate_inputs(view: CoordinateView, c: Coordinate[Array]) -> Float[Array, "inputs *rows"]:
    """Inputs of the step that draws a coordinate, whose constants hold its anchor."""
    ratio, prior = _log_odds(view)
    parts = [compress(c.shift), 0.3 * jnp.log(c.stretch), jnp.tanh(ratio / 8) * 2, prior / 4]
    innovations = _innovations(view.residual, view.innovation_variance, view.noise_variance)
    return _stack([*parts, *innovations])


def marginal_inputs(estimate: LinearEstimate, c: Coordinate[Array]) -> Float[Array, " features"]:
    """Anchors of all coordinates before any is drawn, if there are no channels."""
    marginal_scale = jnp.sqrt(jnp.sum(estimate.root**2, 1))
    c = anchor(estimate.mean, marginal_scale, c)
    return jnp.concatenate([compress(c.shift), 0.3 * jnp.log(c.stretch)])


def num_marginal_inputs(coordinates: int) -> int:
    """The number of features of `marginal_inputs`."""
    return 2 * coordinates


def _innovations(
    residual: Array, innovation_variance: Array, noise_variance: Array
) -> list[Float[Array, "*rows"]]:
    """Residuals of the observations on several scales."""
    sd = jnp.sqrt(noise_variance)
    by_scale = [compress(residual / jnp.sqrt(innovation_variance)), jnp.arcsinh(residual / sd) / 2]
    by_scale += [wave for waves in _fourier_features(residual / sd) for wave in waves]
    return [channel for channels in by_scale for channel in channels]


def _stack(parts: list[Array]) -> Array:
    return concatenate_features([part[None] for part in parts])


def _fourier_features(x: Array) -> tuple[list[Array], list[Array]]:
    """Sines and cosines, shortest wavelength first, by the formulas for twice an angle."""
    angle = 2 * np.pi / LONGEST_WAVELENGTH * x
    sines, cosines = [jnp.sin(angle)], [jnp.cos(angle)]
    for _ in range(NUM_WAVELENGTHS - 1):
        sine, cosine = sines[0], cosines[0]
        sines.insert(0, 2 * sine * cosine)
        cosines.insert(0, 1 - 2 * sine**2)
    return sines, cosines


def _log_odds(view: CoordinateView) -> tuple[Array, Array]:
    """For a binary coordinate, the log likelihood ratio of 1 against 0, and the prior log odds.

    The likelihood is approximated by the Gaussian that turns the prior into the estimate.
    """
    prior = jnp.clip(view.prior_mean, 1e-4, 1 - 1e-4)
    prior_precision = 1 / jnp.maximum(view.prior_variance, 1e-4)
    precision = 1 / jnp.maximum(view.scale**2, 1e-8)
    ratio = view.mean * precision - view.prior_mean * prior_precision
    ratio = ratio - 0.5 * (precision - prior_precision)
    log_odds = jnp.log(prior) - jnp.log1p(-prior)
    return jnp.clip(ratio, -1e3, 1e3), jnp.clip(log_odds, -8, 8)


class PatternView(NamedTuple):
    """The estimate of a few bits given the coordinates before them.

    Attributes:
        logits: of all patterns of the bits.
        inputs: of the step that draws them.
    """

    logits: Float[Array, "patterns *rows"]
    inputs: Float[Array, "inputs *rows"]


def condition_bits(
    estimate: LinearEstimate,
    innovation_variance: Array,
    state: GuideState,
    position: Position,
    span: int,
) -> PatternView:
    """The `span` bits from `position` on given the coordinates before, if there are channels."""
    slope = jax.lax.dynamic_slice_in_dim(estimate.slope, position, span, 1)
    prior_mean = slice_span(estimate.prior_mean, position, span)
    prior_variance = slice_span(estimate.prior_variance, position, span)
    return _view_patterns(
        state.residual,
        slope,
        prior_mean,
        prior_variance,
        innovation_variance[position],
        estimate.noise_variance,
    )


def condition_all_bits(
    estimate: LinearEstimate, row: Float[Array, " coordinates"], at: slice, span: int
) -> PatternView:
    """Bits in blocks of `span`, each given all coordinates before; blocks are the last axis."""
    view = condition_all(estimate, row)

    def by_block(leaf: Array) -> Array:
        part = leaf[..., at]
        return jnp.moveaxis(part.reshape(*part.shape[:-1], -1, span), -1, -2)

    residual, variance = (
        by_block(leaf)[:, 0] for leaf in (view.residual, view.innovation_variance)
    )
    slope, prior_mean, prior_variance = map(
        by_block, (estimate.slope, estimate.prior_mean, estimate.prior_variance)
    )
    return _view_patterns(
        residual, slope, prior_mean, prior_variance, variance, view.noise_variance
    )


def _view_patterns(
    residual: Array,
    slope: Array,
    prior_mean: Array,
    prior_variance: Array,
    innovation_variance: Array,
    noise_variance: Array,
) -> PatternView:
    span, channels = prior_mean.shape[0], residual.shape[0]
    probability = jnp.clip(prior_mean, 1e-4, 1 - 1e-4)
    log_odds = jnp.log(probability) - jnp.log1p(-probability)
    remaining = jnp.maximum(
        innovation_variance - jnp.sum(slope**2 * prior_variance, 1), 1e-6 * innovation_variance
    )
    residual_at_zero = residual + jnp.sum(slope * prior_mean, 1)
    bits = [along_first(column, residual_at_zero) for column in patterns(span).T]

    def sum_of_ones(terms: Array) -> Array:
        """For every pattern, the sum of the terms of those bits that are one."""
        products = [terms[i] * bit for i, bit in enumerate(bits)]
        return sum(products[1:], products[0])

    logits = sum_of_ones(log_odds)
    for channel in range(channels):
        gap = residual_at_zero[channel] - sum_of_ones(slope[channel])
        gap = gap / jnp.sqrt(remaining[channel])
        # Student's t with four degrees of freedom: the later bits' sum is not normal, and light
        # tails of a proposal mean heavy tails of the weights.
        logits = logits - 2.5 * jnp.log1p(jnp.clip(gap / 2, -1e9, 1e9) ** 2)
    # The network must be able to correct patterns that the estimate rules out.
    logits = jnp.maximum(logits - jnp.max(logits, 0), MIN_LOGIT)
    parts = [jnp.clip(odds, -8, 8) / 4 for odds in log_odds]
    parts += [jnp.zeros_like(parts[0])] * (NUM_STEP_INPUTS - span)
    innovations = _innovations(residual, innovation_variance, noise_variance)
    return PatternView(logits, _stack([*parts, *innovations]))
