"""Linear-Gaussian estimates of latents, conditioned on coordinates as they are drawn.

The model's own moments give a linear-Gaussian estimate of a factor's latents (see
`retrodict.proposal.linear_guide`), which is approximate for most models. A sampler conditions it on
one coordinate after another, as a Kalman filter does on observations; a density conditions it on
all coordinates at once.

Arrays may have a last axis of rows, see `retrodict._xla.batch_last`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Position = Int[Array, ""] | int  # of a coordinate, in sampling order


class LinearEstimate(NamedTuple):
    """Latents x ~ N(mean, root rootᵀ) given all that is known, coordinates in sampling order.

    If there are channels, the estimate is that of independent latents and of these channels, and is
    conditioned on the channels as coordinates are drawn; `root` and `whitening` are then empty.

    Attributes:
        mean: of the coordinates.
        root: lower triangular, so that its rows condition on the coordinates before.
        whitening: the inverse of `root`.
        prior_mean, prior_variance: of the coordinates before observations are taken into account.
        residual: the observations minus their means with all coordinates at `prior_mean`.
        slope: derivatives of these means.
        noise_variance: variances of the observations given the latents.
    """

    mean: Float[Array, "coordinates *rows"]
    root: Float[Array, "coordinates coordinates *rows"]
    whitening: Float[Array, "coordinates coordinates *rows"]
    prior_mean: Float[Array, "coordinates *rows"]
    prior_variance: Float[Array, "coordinates *rows"]
    residual: Float[Array, "channels *rows"]
    slope: Float[Array, "channels coordinates *rows"]
    noise_variance: Float[Array, "channels *rows"]

    @property
    def innovation_variance(self) -> Float[Array, "coordinates channels *rows"]:
        """Variances of the observations given the coordinates before each."""
        explained = jnp.swapaxes(self.slope**2 * self.prior_variance, 0, 1)
        # A short cumulative sum is faster as a matrix product than as a scan.
        later = np.triu(np.ones((explained.shape[0],) * 2, explained.dtype))
        return self.noise_variance + jnp.tensordot(later, explained, 1)


class GuideState(NamedTuple):
    """What the coordinates drawn so far change in the estimate.

    Attributes:
        whitened: root⁻¹ (x − mean), zero for coordinates that are not drawn yet; unused if there
            are channels.
        residual: the observations minus their means given the coordinates drawn so far.
    """

    whitened: Float[Array, "coordinates *rows"]
    residual: Float[Array, "channels *rows"]


class CoordinateView(NamedTuple):
    """The estimate of one coordinate given those before it, and the observations' residuals."""

    mean: Float[Array, "*rows"]
    scale: Float[Array, "*rows"]
    prior_mean: Float[Array, "*rows"]
    prior_variance: Float[Array, "*rows"]
    residual: Float[Array, "channels *rows"]
    innovation_variance: Float[Array, "channels *rows"]
    noise_variance: Float[Array, "channels *rows"]


def initial_state(estimate: LinearEstimate) -> GuideState:
    """The state before any coordinate is drawn."""
    return GuideState(jnp.zeros_like(estimate.mean), estimate.residual)


def condition(
    estimate: LinearEstimate, innovation_variance: Array, state: GuideState, position: Position
) -> CoordinateView:
    """One coordinate given those before it."""
    prior_mean, prior_variance = estimate.prior_mean[position], estimate.prior_variance[position]
    variance = innovation_variance[position]
    if estimate.residual.shape[0]:
        slope = estimate.slope[:, position]
        mean, scale = _linear_update(prior_mean, prior_variance, state.residual, slope, variance)
    else:
        row = estimate.root[position]
        mean = estimate.mean[position] + jnp.sum(row * state.whitened, 0)
        scale = row[position]
    return CoordinateView(
        mean, scale, prior_mean, prior_variance, state.residual, variance, estimate.noise_variance
    )


def update(
    estimate: LinearEstimate,
    state: GuideState,
    view: CoordinateView,
    position: Position,
    value: Array,
) -> GuideState:
    """The state once a coordinate is drawn."""
    if estimate.residual.shape[0]:
        shift = estimate.slope[:, position] * (value - estimate.prior_mean[position])
        return state._replace(residual=state.residual - shift)
    whitened = state.whitened.at[position].set((value - view.mean) / view.scale)
    return state._replace(whitened=whitened)


def condition_all(estimate: LinearEstimate, row: Float[Array, " coordinates"]) -> CoordinateView:
    """All coordinates, each given those before it, along the last axis of the view."""
    prior_mean, prior_variance = estimate.prior_mean, estimate.prior_variance
    channels, number = estimate.slope.shape
    residual, variance = jnp.zeros((0, number)), jnp.zeros((0, number))
    if channels:
        shifts = estimate.slope * (row - prior_mean)
        before = np.triu(np.ones((number, number), shifts.dtype), 1)
        residual = estimate.residual[:, None] - shifts @ before
        variance = estimate.innovation_variance.T
        mean, scale = _linear_update(prior_mean, prior_variance, residual, estimate.slope, variance)
    else:
        whitened = estimate.whitening @ (row - estimate.mean)
        scale = jnp.diagonal(estimate.root)
        mean = estimate.mean + estimate.root @ whitened - scale * whitened
    noise_variance = estimate.noise_variance[:, None]
    return CoordinateView(
        mean, scale, prior_mean, prior_variance, residual, variance, noise_variance
    )


def _linear_update(
    prior_mean: Array, prior_variance: Array, residual: Array, slope: Array, variance: Array
) -> tuple[Array, Array]:
    """Mean and scale of a coordinate given each channel by itself; exact if there is one.

    `variance` is that of the observations given the coordinates before.
    """
    remaining = jnp.maximum(variance - slope**2 * prior_variance, 1e-6 * variance)
    precision = 1 / jnp.maximum(prior_variance, 1e-12) + jnp.sum(slope**2 / remaining, 0)
    mean = prior_mean + jnp.sum(slope * residual / remaining, 0) / precision
    return mean, 1 / jnp.sqrt(precision)


def update_bits(
    estimate: LinearEstimate, state: GuideState, position: Position, values: Array
) -> GuideState:
    """The state once the bits from `position` on are drawn."""
    slope = jax.lax.dynamic_slice_in_dim(estimate.slope, position, values.shape[0], 1)
    shifts = slope * (values - slice_span(estimate.prior_mean, position, values.shape[0]))
    return state._replace(residual=state.residual - jnp.sum(shifts, 1))


def slice_span(values: Array, position: Position, span: int) -> Array:
    """The entries of `span` coordinates from `position` on."""
    part: Array = jax.lax.dynamic_slice_in_dim(values, position, span)
    return part
