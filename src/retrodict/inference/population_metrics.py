"""Covariances and correlations of a population of particles, for the moves of tempering."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict.inference.tempered_target import Particle

# Up to this many real coordinates, metrics are dense.
MAX_DENSE_REALS = 100
# Particles among which neighbours are searched.
NUM_NEIGHBOUR_CANDIDATES = 256


def coordinate_matrix(particles: Particle) -> Float[Array, "particles coordinates"]:
    """All coordinates of particles as real numbers."""
    num_particles = particles.z.shape[0]
    discrete = [v.reshape(num_particles, -1).astype(float) for v in particles.discrete.values()]
    return jnp.concatenate([particles.z, *discrete], 1)


def correlations(
    before: Float[Array, "particles coordinates"], after: Float[Array, "particles coordinates"]
) -> Float[Array, " coordinates"]:
    """Correlation of each coordinate before and after moves.

    It is 0 where nearly all particles have the same value.
    """
    x, y = before - before.mean(0), after - after.mean(0)
    scale = jnp.sqrt(jnp.mean(x**2, 0) * jnp.mean(y**2, 0))
    constant = jnp.mean(before == jnp.median(before, 0), 0) > 0.99
    correlation = jnp.mean(x * y, 0) / jnp.where(scale > 0, scale, 1.0)
    return jnp.where(constant | (scale == 0), 0.0, correlation)


def hmc_metrics(
    z: Float[Array, "particles reals"], weights: Float[Array, " particles"]
) -> Float[Array, "metrics reals *reals"]:
    """Inverse mass matrices from weighted particles.

    The first is the covariance of all particles, the second that of the differences between
    nearest neighbours, which shows the shape of a single mode where there are several.
    """
    alive = weights > 0
    mean = weights @ jnp.where(alive[:, None], z, 0.0)
    centred = jnp.where(alive[:, None], z - mean, 0.0)
    overall = _covariance(centred, weights)
    spread = np.linspace(0, len(z) - 1, min(NUM_NEIGHBOUR_CANDIDATES, len(z))).astype(int)
    some, some_weights = centred[spread], weights[spread]
    scaled = some / jnp.sqrt(_variances(centred, weights))
    squares = jnp.sum(scaled**2, 1)
    distances = squares[:, None] + squares - 2 * scaled @ scaled.T
    # Copies of a particle, and particles without weight, are no neighbours.
    eligible = (distances > 1e-10) & alive[spread]
    nearest = jnp.argmin(jnp.where(eligible, distances, jnp.inf), 1)
    some_weights = jnp.where(jnp.any(eligible, 1), some_weights, 0.0)
    normalised = some_weights / jnp.maximum(some_weights.sum(), 1e-30)
    return jnp.stack([overall, _covariance(some - some[nearest], normalised)])


def _variances(
    centred: Float[Array, "particles reals"], weights: Float[Array, " particles"]
) -> Float[Array, " reals"]:
    return jnp.maximum(weights @ centred**2, 1e-12)


def _covariance(
    centred: Float[Array, "particles reals"], weights: Float[Array, " particles"]
) -> Float[Array, "reals *reals"]:
    """Weighted covariance, or its diagonal if there are many coordinates.

    Correlations are shrunk towards 0 according to the effective number of particles.
    """
    variances, num_reals = _variances(centred, weights), centred.shape[1]
    if num_reals > MAX_DENSE_REALS or num_reals == 0:
        return variances
    scales = jnp.sqrt(variances)
    scaled = centred / scales
    correlation = (weights[:, None] * scaled).T @ scaled
    effective = 1 / jnp.maximum(jnp.sum(weights**2), 1e-30)
    shrunk = correlation * effective / (effective + num_reals)
    correlation = jnp.where(np.eye(num_reals, dtype=bool), 1.0, shrunk)
    return scales[:, None] * correlation * scales
