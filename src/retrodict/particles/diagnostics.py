"""The weights of a population and its ancestry in; a verdict, with its reasons, out.

One table of limits, `LIMITS`, decides whether an answer is good, fair or poor. The verdict is on
all that a `Posterior` holds: the weighted `samples` with their means, and the evidence.

- good: all of it can be relied on.
- fair: to be used with care; the reasons say which part is uncertain.
- poor: not to be used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict.particles.genealogy import surviving_draws
from retrodict.particles.out_of_distribution import PriorPredictiveCheck
from retrodict.particles.weights import (
    drop_nonfinite,
    ess,
    eve_indices,
    genealogical_se,
    normalise,
    pareto_k,
    tail_share,
)
from retrodict.particles.weights import log_evidence_se as importance_se

Trust = Literal["good", "fair", "poor"]
GRADES: tuple[Trust, ...] = ("good", "fair", "poor")

# Key of `survivors` where only the smallest number over all stages is known: it holds for every
# latent.
ANY_LATENT = ""


class Limit(NamedTuple):
    """How far a measure may go for an answer to be good, or still fair."""

    name: str
    at: Literal["least", "most"]
    good: float
    fair: float
    meaning: str


# An answer's grade is the worst that any one measure gives it. The limits are set by experiment
# (tests/test_trust.py): of the answers called good, at most 2 % may have a posterior mean off by
# more than 3 of its own standard errors + 0.1 posterior standard deviations. Two measures have no
# limit for fair, and cannot by themselves make an answer poor:
#
# - The error of the log evidence grows with the length of a series. It is told beside the evidence,
#   and whether it is small enough depends on what the evidence is for.
# - In a long filter all trajectories share their past. Smoothed means of early steps then rest on
#   few draws, or on one, and their own standard errors say so; but filtered marginals, the last
#   states and the evidence are as good as ever. Latents outside of time have no such excuse.
#
# For the share of non-finite weights: 1 % of average particles would have to lie 10 standard
# deviations out to move a mean by 0.1. No limit can catch a mode where the proposal never drew: its
# weights are absent, not large.
LIMITS = (
    Limit("effective sample size", "least", 150.0, 30.0, "means rest on few particles"),
    Limit("share of effective particles", "least", 0.05, 0.01, "the proposal fits badly"),
    Limit("Pareto k̂", "most", 0.5, 0.7, "so few weights carry so much that means converge slowly"),
    Limit("standard error of the log evidence", "most", 0.3, np.inf, "the evidence is uncertain"),
    Limit("share of non-finite weights", "most", 0.01, 0.1, "densities failed, their mass is lost"),
    Limit("worst stage's effective sample size", "least", 50.0, 10.0, "few had any descendants"),
    Limit("number of surviving draws", "least", 100.0, 10.0, "resampling left a latent few values"),
    Limit("number of surviving trajectories", "least", 100.0, 0.0, "early steps share their past"),
)
# k̂ is fitted to how far the largest weights exceed the next, however little that is. As for lost
# mass: a tail of so little weight would have to be all wrong, and far out, to move a mean.
NO_TAIL = 0.02


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
    ess_by_stage: Float[Array, " stages"] | None = None,
    survivors: Mapping[str, Float[Array, "*time"]] = MappingProxyType({}),
) -> Assessment:
    """Grade a population (0 good, 1 fair, 2 poor) by its weights and its ancestry; jittable.

    Args:
        log_weights: need not be normalised; those that are not finite count as zero.
        log_evidence_se: without it, that of importance sampling.
        num_nonfinite: how many were not finite at earlier stages.
        ess_by_stage: before each choice of ancestors, and in the end.
        survivors: by latent, the effective number of its draws that are left; of a series, by step.
    """
    num = log_weights.shape[0]
    log_weights, broken = drop_nonfinite(log_weights)
    effective, k = ess(log_weights), pareto_k(log_weights)
    harmless = tail_share(log_weights) < NO_TAIL
    se = importance_se(log_weights) if log_evidence_se is None else log_evidence_se
    stages = 1 if ess_by_stage is None else ess_by_stage.shape[0]
    unknown = jnp.asarray(jnp.inf)
    measures = jnp.stack(
        [
            effective,
            effective / num,
            jnp.where(harmless, jnp.minimum(k, 0.5), k),
            se,
            (num_nonfinite + broken) / (num * stages),
            unknown if ess_by_stage is None else jnp.min(ess_by_stage),
            *(
                jnp.min(jnp.stack([unknown, *(left.min() for left in of)]))
                for of in split(survivors)
            ),
        ]
    )
    sign = np.array([1.0 if limit.at == "most" else -1.0 for limit in LIMITS])
    good = np.array([limit.good for limit in LIMITS])
    fair = np.array([limit.fair for limit in LIMITS])
    # a measure that is NaN fails every comparison, and so is poor
    grades = 2 - (sign * measures <= sign * fair) - (sign * measures <= sign * good)
    return Assessment(effective, k, se, measures, jnp.max(grades))


class WeightAnalysis(NamedTuple):
    """What is to be read from the weights of a population and its ancestry."""

    log_weights: Float[Array, "*datasets particles"]
    log_mean: Float[Array, "*datasets"]
    assessment: Assessment
    num_nonfinite: Int[Array, "*datasets"]
    eves: Int[Array, "*datasets particles"] | None
    survivors: dict[str, Float[Array, "*rest"]]


def analyse_weights(
    log_weights: Float[Array, " particles"],
    *,
    log_evidence_se: Float[Array, ""] | None = None,
    num_nonfinite: Int[Array, ""] | int = 0,
    ess_by_stage: Float[Array, " stages"] | None = None,
    ancestors: Int[Array, "stages particles"] | None = None,
    eves: Int[Array, " particles"] | None = None,
    survivors: Mapping[str, Float[Array, "*time"]] | None = None,
) -> WeightAnalysis:
    """Normalise and assess one population; jittable. For arguments see `make_posterior`."""
    if eves is None and ancestors is not None:
        eves = eve_indices(ancestors)
    log_normalised, log_mean = normalise(log_weights)
    if survivors is None and ancestors is not None:
        survivors = {ANY_LATENT: jnp.min(surviving_draws(ancestors, log_normalised))}
    if log_evidence_se is None and eves is not None:
        log_evidence_se = genealogical_se(log_weights, eves)
    found = assess(
        log_weights,
        log_evidence_se,
        num_nonfinite=num_nonfinite,
        ess_by_stage=ess_by_stage,
        survivors=survivors or {},
    )
    _, broken = drop_nonfinite(log_weights)
    total = num_nonfinite + broken.astype(jnp.int32)
    return WeightAnalysis(log_normalised, log_mean, found, total, eves, dict(survivors or {}))


def split(survivors: Mapping[str, Array]) -> tuple[list[Array], list[Array]]:
    """Survivors of the latents outside of time, and of series."""
    of_draws = [left for left in survivors.values() if left.ndim == 0]
    return of_draws, [left for left in survivors.values() if left.ndim > 0]


@dataclass(frozen=True)
class TemperingReport:
    """How tempered SMC reached the posterior.

    Attributes:
        temperatures: λ of each stage, ascending; the last is 1 if the posterior was reached.
        acceptance: share of accepted HMC trajectories at the last temperature; None without
            continuous latents.
        discrete_acceptance: share of accepted changes of discrete latents at the last temperature;
            None without discrete latents.
        sweeps: MCMC sweeps over every particle, in all stages.
        seconds: wall-clock time.
        ess_by_islands: effective sample size of the worst coordinate's mean, estimated from the
            spread between independent islands of particles.
        num_draws: draws from proposal and prior that the runs started from.
    """

    temperatures: tuple[float, ...]
    acceptance: float | None
    discrete_acceptance: float | None
    sweeps: int
    seconds: float
    ess_by_islands: float
    num_draws: int


@dataclass(frozen=True)
class Rescue:
    """The planned method that gave a poor posterior before tempering replaced it.

    Attributes:
        planned_method: its name.
        planned_reasons: why its posterior was poor, or the error it raised.
    """

    planned_method: str
    planned_reasons: str


@dataclass(frozen=True)
class Diagnostics:
    """How a posterior was computed, and the reasons for its grade.

    Attributes:
        method: "importance", "smc", "divide" or "temper".
        trust: "good", "fair" or "poor".
        reasons: what the grade rests on, in sentences.
        num_particles: K.
        num_nonfinite: weights that were NaN or +inf and were set to zero, over all stages.
        num_stages: stages of SMC; 1 for importance sampling.
        num_resamplings: how often the particles were resampled.
        tempering: report of tempered SMC; None for other methods.
        rescue: the method that tempering replaced; None if the planned method was kept.
        predictive_check: where the data lie among prior predictive data sets; None if the compiled
            model has no reference for its arguments.
    """

    method: str
    trust: Trust
    reasons: tuple[str, ...]
    num_particles: int
    num_nonfinite: int
    num_stages: int
    num_resamplings: int
    tempering: TemperingReport | None = None
    rescue: Rescue | None = None
    predictive_check: PriorPredictiveCheck | None = None

    def __str__(self) -> str:
        return f"{self.trust} ({self.method})\n" + "\n".join(f"- {r}" for r in self.reasons)


def grade_reasons(
    measures: np.ndarray,
    num_particles: int,
    survivors: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> tuple[str, ...]:
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
                    f"{name}: {limit.meaning}{_where(limit, survivors)}."
                )
                break
    if not said:
        said.append(
            f"All within the limits: effective sample size {measures[0]:.0f} of {num_particles}, "
            f"Pareto k̂ {measures[2]:.2f}, standard error of the log evidence {measures[3]:.2g}."
        )
    return tuple(said)


def _where(limit: Limit, survivors: Mapping[str, np.ndarray]) -> str:
    """Which latents a lack of survivors is about; of a series, which steps."""
    if limit is LIMITS[-2]:
        few = [name for name, left in survivors.items() if left.ndim == 0 and left < limit.good]
        return f" ({', '.join(few)})" if few else ""
    if limit is not LIMITS[-1]:
        return ""
    parts = []
    for name, left in survivors.items():
        if left.ndim and np.any(left < limit.good):
            steps = np.flatnonzero(left < limit.good)
            parts.append(f"steps {steps[0]} to {steps[-1]} of {name}")
    if not parts:
        return ""
    return f" ({', '.join(parts)}). Filtered marginals and last states do not depend on it"
