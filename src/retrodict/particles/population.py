"""Weighted particles between two stages: started, reweighed, and asked for what went wrong."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict.particles.genealogy import Lineage
from retrodict.particles.weights import LogEvidence, drop_nonfinite, lineage_se, normalise


class Population(NamedTuple):
    """Weighted particles: what the next stage needs.

    Attributes:
        values: latents drawn so far, particles first.
        log_weights: normalised, so that they sum to one.
        log_evidence: of what is counted so far.
        num_nonfinite: weights that were NaN or +inf, and were set to zero.
        num_resamplings: how often the population was resampled.
        failed: the first stage at which every weight was zero, or −1.
        lineage: whom they descend from.
    """

    values: dict[str, Array]
    log_weights: Float[Array, " particles"]
    log_evidence: LogEvidence
    num_nonfinite: Int[Array, ""]
    num_resamplings: Int[Array, ""]
    failed: Int[Array, ""]
    lineage: Lineage

    def log_evidence_se(self) -> Float[Array, ""]:
        """Standard error of the log evidence, by what is left of the families."""
        return lineage_se(self.log_weights, self.lineage.old, self.lineage.settled)


def start(num_particles: int) -> Population:
    """Particles of equal weight, of which nothing is known."""
    zero = jnp.zeros((), jnp.int32)
    equal = jnp.full(num_particles, -np.log(num_particles), jnp.float32)
    lineage = Lineage.start(num_particles)
    return Population({}, equal, LogEvidence.zero(), zero, zero, zero - 1, lineage)


def reweigh(particles: Population, increment: Float[Array, " particles"], stage: int) -> Population:
    """Multiply weights by increments; their weighted mean is the next factor of the evidence."""
    increment, broken = drop_nonfinite(increment)
    log_weights, log_mean = normalise(particles.log_weights + increment)
    log_factor = log_mean + np.log(log_weights.shape[0])
    nothing = jnp.isneginf(log_factor)
    return particles._replace(
        log_weights=log_weights,
        log_evidence=particles.log_evidence.add(log_factor),
        num_nonfinite=particles.num_nonfinite + broken.astype(jnp.int32),
        failed=jnp.where(nothing & (particles.failed < 0), stage, particles.failed),
    )


def blame(possible: Mapping[str, Any]) -> str:
    """The sites that no particle made possible, for a message."""
    return ", ".join(f"'{name}'" for name, ok in possible.items() if not np.all(ok)) or "none alone"
