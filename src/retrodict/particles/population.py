"""The population of weighted particles that SMC carries from one stage to the next."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict.particles.genealogy import Lineage
from retrodict.particles.weights import LogEvidence, drop_nonfinite, genealogical_se, normalise


class Population(NamedTuple):
    """Weighted particles, the state of SMC.

    Attributes:
        values: site → latents drawn so far, `(particles, *shape)`.
        log_weights: normalised.
        log_evidence: log of the product of the mean incremental weights so far.
        num_nonfinite: weights that were NaN or +inf and were set to zero.
        num_resamplings: how often the particles were resampled.
        failed_stage: the first stage at which every weight was zero, or -1.
        lineage: ancestors of the particles.
    """

    values: dict[str, Array]
    log_weights: Float[Array, " particles"]
    log_evidence: LogEvidence
    num_nonfinite: Int[Array, ""]
    num_resamplings: Int[Array, ""]
    failed_stage: Int[Array, ""]
    lineage: Lineage

    def log_evidence_se(self) -> Float[Array, ""]:
        """Standard error of the log evidence, estimated from the genealogy."""
        return genealogical_se(self.log_weights, self.lineage.ancestors, self.lineage.past_variance)


def initial_population(num_particles: int) -> Population:
    """Equally weighted particles without any latents."""
    zero = jnp.zeros((), jnp.int32)
    uniform = jnp.full(num_particles, -np.log(num_particles), jnp.float32)
    lineage = Lineage.initial(num_particles)
    return Population({}, uniform, LogEvidence.zero(), zero, zero, zero - 1, lineage)


def reweight(
    particles: Population, increment: Float[Array, " particles"], stage: int
) -> Population:
    """Add increments to the log weights; the mean of their exp is a factor of the evidence."""
    increment, num_nonfinite = drop_nonfinite(increment)
    log_weights, log_mean = normalise(particles.log_weights + increment)
    log_factor = log_mean + np.log(log_weights.shape[0])
    all_zero = jnp.isneginf(log_factor)
    return particles._replace(
        log_weights=log_weights,
        log_evidence=particles.log_evidence.add(log_factor),
        num_nonfinite=particles.num_nonfinite + num_nonfinite.astype(jnp.int32),
        failed_stage=jnp.where(
            all_zero & (particles.failed_stage < 0), stage, particles.failed_stage
        ),
    )


def impossible_sites(possible: Mapping[str, Any]) -> str:
    """Names of the sites whose density is zero under every particle, for an error message."""
    return ", ".join(f"'{name}'" for name, ok in possible.items() if not bool(ok)) or "none alone"
