"""The weights of a population in; a verdict on them, with its reasons, out.

One table of limits, `LIMITS`, decides whether an answer is good, fair or poor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict.weights import drop_nonfinite, ess, lineage_se, num_families, pareto_k

Trust = Literal["good", "fair", "poor"]
GRADES: tuple[Trust, ...] = ("good", "fair", "poor")


class Limit(NamedTuple):
    """How far a measure may go for an answer to be good, or still fair."""

    name: str
    at: Literal["least", "most"]
    good: float
    fair: float
    meaning: str


# An answer's grade is the worst that any one measure gives it. The first three limits are set by
# experiment (tests/test_posterior.py): of the answers called good, at most 2 % may have a posterior
# mean off by more than 3 of its own standard errors + 0.1 posterior standard deviations. For the
# fifth: 1 % of average particles would have to lie 10 standard deviations out to move a mean by
# 0.1. No limit can catch a mode where the proposal never drew: its weights are absent, not large.
LIMITS = (
    Limit("effective sample size", "least", 150.0, 30.0, "means rest on few particles"),
    Limit("share of effective particles", "least", 0.05, 0.01, "the proposal fits badly"),
    Limit("Pareto k̂", "most", 0.5, 0.7, "so few weights carry so much that means converge slowly"),
    Limit("standard error of the log evidence", "most", 0.3, 1.0, "the evidence is uncertain"),
    Limit("share of non-finite weights", "most", 0.01, 0.1, "densities failed, their mass is lost"),
    Limit("number of first ancestors", "least", 50.0, 2.0, "the first draws left few survivors"),
)


class Assessment(NamedTuple):
    """What the weights of one population tell of their own quality."""

    ess: Float[Array, "*datasets"]
    pareto_k: Float[Array, "*datasets"]
    log_evidence_se: Float[Array, "*datasets"]
    measures: Float[Array, "*datasets limits"]
    grade: Int[Array, "*datasets"]


def assess(
    log_weights: Float[Array, " particles"],
    log_evidence_se: Float[Array, ""] | None = None,
    *,
    num_nonfinite: Int[Array, ""] | int = 0,
    eves: Int[Array, " particles"] | None = None,
    resamplings: Int[Array, ""] | int = 0,
    stages: Int[Array, ""] | int = 1,
) -> Assessment:
    """Grade a population (0 good, 1 fair, 2 poor) by its weights and its ancestry; jittable.

    Log weights need not be normalised. Non-finite ones are counted on top of `num_nonfinite`,
    those met at earlier `stages`. `eves` are the particles' ancestors in the first population.
    Without `log_evidence_se` it is estimated from weights and ancestry.
    """
    num = log_weights.shape[0]
    log_weights, broken = drop_nonfinite(log_weights)
    effective, k = ess(log_weights), pareto_k(log_weights)
    families = jnp.asarray(jnp.inf) if eves is None else num_families(eves)
    if log_evidence_se is None:
        origin = jnp.arange(num) if eves is None else eves
        log_evidence_se = lineage_se(log_weights, origin, resamplings)
    measures = jnp.stack(
        [
            effective,
            effective / num,
            k,
            log_evidence_se,
            (num_nonfinite + broken) / (num * stages),
            families.astype(effective.dtype),
        ]
    )
    sign = np.array([1.0 if limit.at == "most" else -1.0 for limit in LIMITS])
    good = np.array([limit.good for limit in LIMITS])
    fair = np.array([limit.fair for limit in LIMITS])
    # a measure that is NaN fails every comparison, and so is poor
    grades = 2 - (sign * measures <= sign * fair) - (sign * measures <= sign * good)
    return Assessment(effective, k, log_evidence_se, measures, jnp.max(grades))


@dataclass(frozen=True)
class Diagnostics:
    """How an answer was found, and why it is to be trusted or not."""

    method: str
    trust: Trust
    reasons: tuple[str, ...]
    num_particles: int
    num_nonfinite: int
    num_stages: int
    num_resamplings: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.trust} ({self.method})\n" + "\n".join(f"- {r}" for r in self.reasons)


def reasons(measures: np.ndarray, num_particles: int) -> tuple[str, ...]:
    """What the verdict rests on, in words with numbers."""
    if measures[0] == 0.0:
        return (f"All {num_particles} weights are zero: no particle could have made these data.",)
    said = []
    for value, limit in zip(measures, LIMITS, strict=True):
        sign = 1.0 if limit.at == "most" else -1.0
        for bound, name in ((limit.fair, "fair"), (limit.good, "good")):
            if not sign * value <= sign * bound:
                side = "above" if limit.at == "most" else "below"
                said.append(
                    f"The {limit.name} is {value:.3g}, {side} the {bound:g} that is needed to be "
                    f"{name}: {limit.meaning}."
                )
                break
    if not said:
        said.append(
            f"All within the limits: effective sample size {measures[0]:.0f} of {num_particles}, "
            f"Pareto k̂ {measures[2]:.2f}, standard error of the log evidence {measures[3]:.2g}."
        )
    return tuple(said)
