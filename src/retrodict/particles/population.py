"""A population of weighted particles, and how its weights change."""

from typing import Generic, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict.particles.genealogy import Lineage
from retrodict.particles.weights import LogEvidence, drop_nonfinite, genealogical_se, normalise

ParticleValues = TypeVar("ParticleValues")
NewValues = TypeVar("NewValues")


class Population(NamedTuple, Generic[ParticleValues]):
    """Weighted particles.

    Attributes:
        values: a tree of arrays with the particles on the first axis: latents by site name, or what
            a particle filter carries from step to step.
        log_weights: normalised, so that the weights sum to one.
        log_evidence: log Ẑ of the densities counted so far.
        num_nonfinite: how many weights were NaN or +inf and were set to zero.
        num_resamplings: how often the population was resampled.
        failed_stage: the first stage at which every weight was zero, or −1.
        lineage: ancestors of the particles, for the standard error of the log evidence.
    """

    values: ParticleValues
    log_weights: Float[Array, " particles"]
    log_evidence: LogEvidence
    num_nonfinite: Int[Array, ""]
    num_resamplings: Int[Array, ""]
    failed_stage: Int[Array, ""]
    lineage: Lineage

    def log_evidence_se(self) -> Float[Array, ""]:
        """Standard error of the log evidence, estimated from the genealogy."""
        return genealogical_se(self.log_weights, self.lineage.ancestors, self.lineage.past_variance)

    def with_values(self, values: NewValues) -> "Population[NewValues]":
        """The same weights and genealogy with other values."""
        replaced: Population[NewValues] = self._replace(values=values)  # type: ignore[arg-type, assignment]
        return replaced


def initial_population(num_particles: int) -> Population[dict[str, Array]]:
    """Particles of equal weight that have no values yet."""
    zero = jnp.zeros((), jnp.int32)
    equal = jnp.full(num_particles, -np.log(num_particles), jnp.float32)
    lineage = Lineage.initial(num_particles)
    return Population({}, equal, LogEvidence.zero(), zero, zero, zero - 1, lineage)


def reweight(
    population: Population[ParticleValues], increment: Float[Array, " particles"], stage: int
) -> Population[ParticleValues]:
    """Multiply the weights by increments.

    The weighted mean of the increments is the next factor of the evidence.

    Args:
        population: with normalised weights W.
        increment: log w of each particle; NaN and +inf count as zero weight.
        stage: its number, recorded if it leaves no particle with weight.
    """
    increment, num_nonfinite = drop_nonfinite(increment)
    log_weights, log_mean = normalise(population.log_weights + increment)
    log_factor = log_mean + np.log(log_weights.shape[0])
    failed = jnp.isneginf(log_factor) & (population.failed_stage < 0)
    return population._replace(
        log_weights=log_weights,
        log_evidence=population.log_evidence.add(log_factor),
        num_nonfinite=population.num_nonfinite + num_nonfinite.astype(jnp.int32),
        failed_stage=jnp.where(failed, stage, population.failed_stage),
    )
