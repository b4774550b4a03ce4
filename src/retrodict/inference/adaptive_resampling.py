"""Resampling of a population when its effective sample size has become small."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from retrodict.particles.genealogy import Lineage
from retrodict.particles.population import ParticleValues, Population
from retrodict.particles.resampling import Resampler
from retrodict.particles.weights import ess


class ResamplingInfo(NamedTuple):
    """A resampling decision.

    Attributes:
        ess: the effective sample size before it.
        ancestors: index of each particle's ancestor; the identity if there was no resampling.
    """

    ess: Float[Array, "*steps"]
    ancestors: Int[Array, "*steps particles"]


@dataclass(frozen=True)
class AdaptiveResampling:
    """Resamples when the effective sample size falls below a share of the particles.

    Attributes:
        resampler: the scheme that chooses ancestors.
        threshold: the share, from 0 (never) to 1. It may be a traced array, so that one program
            serves several thresholds.
    """

    resampler: Resampler
    threshold: float | Float[Array, ""]

    @property
    def never(self) -> bool:
        """Whether the threshold is known to be zero."""
        return isinstance(self.threshold, float | int) and self.threshold <= 0

    def __call__(
        self, rng_key: PRNGKeyArray, population: Population[ParticleValues]
    ) -> tuple[Population[ParticleValues], ResamplingInfo]:
        """Resample the population if its weights are too unequal."""
        num_particles = population.log_weights.shape[0]
        size = ess(population.log_weights)
        identity = jnp.arange(num_particles, dtype=jnp.int32)
        if self.never:
            return population, ResamplingInfo(size, identity)

        def choose() -> tuple[ParticleValues, Lineage, Array]:
            ancestors = self.resampler(rng_key, population.log_weights, num_particles)
            ancestors = ancestors.astype(jnp.int32)
            values = jax.tree.map(lambda leaf: leaf[ancestors], population.values)
            lineage = population.lineage.resample(population.log_weights, size, ancestors)
            return values, lineage, ancestors

        needed = size < self.threshold * num_particles
        values, lineage, ancestors = jax.lax.cond(
            needed, choose, lambda: (population.values, population.lineage, identity)
        )
        equal = jnp.full(num_particles, -np.log(num_particles), jnp.float32)
        resampled = population._replace(
            values=values,
            log_weights=jnp.where(needed, equal, population.log_weights),
            num_resamplings=population.num_resamplings + needed,
            lineage=lineage,
        )
        return resampled, ResamplingInfo(size, ancestors)
