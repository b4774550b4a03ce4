"""Grade of a weighted population, from its weights and genealogy, with the reasons.

One table of limits, `LIMITS`, decides whether a posterior is good, fair or poor. The grade covers
all that a `Posterior` holds: the weighted `samples` with their means, and the evidence.

- good: means and evidence are reliable.
- fair: to be used with care; the reasons say which part is uncertain.
- poor: not to be used.
"""

from collections.abc import Iterable, Mapping
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
    """Limits of one diagnostic measure for the grades good and fair.

    Attributes:
        name: of the measure.
        at: whether the limits are the smallest ("least") or largest ("most") admissible values.
        good: limit for good.
        fair: limit for fair.
        meaning: what it means if the limit is violated.
    """

    name: str
    at: Literal["least", "most"]
    good: float
    fair: float
    meaning: str

    def check(self, value: float, detail: str = "") -> tuple[int, str]:
        """Grade a value, 0 good to 2 poor, and give the reason if it is not good."""
        sign, side = (1.0, "above") if self.at == "most" else (-1.0, "below")
        for grade, limit, word in ((2, self.fair, "fair"), (1, self.good, "good")):
            # Negated, so that NaN violates every limit.
            if not sign * value <= sign * limit:
                reason = f"The {self.name} is {value:.3g}, {side} the limit of {limit:g} for {word}"
                return grade, f"{reason}: {self.meaning}{detail}."
        return 0, ""


# The grade of a posterior is the worst over all measures. The limits were set by experiment
# (tests/particles/test_posterior.py and test_diagnostics.py): of the posteriors graded good, at
# most 2 % may have a mean whose error exceeds 3 of its own standard errors + 0.1 posterior standard
# deviations. Two measures have no limit for fair, so that they alone cannot make a posterior poor:
#
# - The error of the log evidence grows with the length of a series. It is reported beside the
#   evidence, and whether it is small enough depends on the purpose.
# - In a long series all trajectories share their early steps (path degeneracy). Smoothed means of
#   early steps then rest on few draws, which their standard errors show; filtered marginals, last
#   states and the evidence are not affected. Latents outside of time have a limit for fair.
#
# On the share of non-finite weights: 1 % of average particles would have to lie 10 standard
# deviations away to change a mean by 0.1. No limit can detect a mode in which the proposal never
# drew: it leaves no trace in the weights.
_SURVIVING_DRAWS = Limit(
    "number of surviving draws", "least", 100.0, 10.0, "resampling left a latent few values"
)
_SURVIVING_TRAJECTORIES = Limit(
    "number of surviving trajectories", "least", 100.0, 0.0, "early steps share their ancestors"
)
LIMITS = (
    Limit("effective sample size", "least", 150.0, 30.0, "means rest on few particles"),
    Limit("share of effective particles", "least", 0.05, 0.01, "the proposal fits badly"),
    Limit("Pareto k̂", "most", 0.5, 0.7, "weights have a heavy tail, so means converge slowly"),
    Limit("standard error of the log evidence", "most", 0.3, np.inf, "the evidence is uncertain"),
    Limit("share of non-finite weights", "most", 0.01, 0.1, "arithmetic of densities failed"),
    Limit(
        "worst stage's effective sample size", "least", 50.0, 10.0, "few particles had descendants"
    ),
    _SURVIVING_DRAWS,
    _SURVIVING_TRAJECTORIES,
)
# k̂ describes the shape of the tail of the weights, however little weight the tail has. A tail below
# this share of the weight cannot change a mean noticeably, so its k̂ does not count.
NEGLIGIBLE_TAIL = 0.02


class Assessment(NamedTuple):
    """Quality of the weights of one population.

    Attributes:
        ess: effective sample size.
        pareto_k: PSIS k̂.
        log_evidence_se: standard error of the log evidence.
        measures: value for each of `LIMITS`.
        grade: 0 good, 1 fair, 2 poor; the worst over `measures`.
    """

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
    """Grade a population by its weights and genealogy; jittable.

    Args:
        log_weights: need not be normalised; NaN and +inf count as weight zero.
        log_evidence_se: that of importance sampling if None.
        num_nonfinite: number of weights that were NaN or +inf at earlier stages.
        ess_by_stage: effective sample size before each resampling decision and at the end.
        survivors: latent → effective number of its surviving draws, by step for a series.
    """
    num = log_weights.shape[0]
    log_weights, num_dropped = drop_nonfinite(log_weights)
    effective, k = ess(log_weights), pareto_k(log_weights)
    negligible = tail_share(log_weights) < NEGLIGIBLE_TAIL
    se = importance_se(log_weights) if log_evidence_se is None else log_evidence_se
    stages = 1 if ess_by_stage is None else ess_by_stage.shape[0]
    measures = jnp.stack(
        [
            effective,
            effective / num,
            jnp.where(negligible, jnp.minimum(k, 0.5), k),
            se,
            (num_nonfinite + num_dropped) / (num * stages),
            jnp.asarray(jnp.inf) if ess_by_stage is None else jnp.min(ess_by_stage),
            _smallest(number for number in survivors.values() if number.ndim == 0),
            _smallest(number for number in survivors.values() if number.ndim > 0),
        ]
    )
    sign = np.array([1.0 if limit.at == "most" else -1.0 for limit in LIMITS])
    good = np.array([limit.good for limit in LIMITS])
    fair = np.array([limit.fair for limit in LIMITS])
    # NaN fails every comparison, and so is poor.
    grades = 2 - (sign * measures <= sign * fair) - (sign * measures <= sign * good)
    return Assessment(effective, k, se, measures, jnp.max(grades))


def _smallest(numbers: Iterable[Array]) -> Array:
    """The smallest entry of some arrays; inf if there are none."""
    return jnp.min(jnp.stack([jnp.asarray(jnp.inf), *(number.min() for number in numbers)]))


class WeightAnalysis(NamedTuple):
    """Normalised weights of a population, with all that is estimated from weights and genealogy.

    Attributes:
        log_weights: normalised.
        log_mean: log of the mean of the unnormalised weights.
        assessment: quality and grade.
        num_nonfinite: weights that were NaN or +inf, over all stages.
        eves: index of each particle's ancestor in an early generation.
        survivors: latent → effective number of its surviving draws.
    """

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
    """Normalise and assess the weights of one population; jittable. Args as `make_posterior`."""
    if eves is None and ancestors is not None:
        eves = eve_indices(ancestors)
    log_normalised, log_mean = normalise(log_weights)
    if survivors is None and ancestors is not None:
        survivors = {ANY_LATENT: jnp.min(surviving_draws(ancestors, log_normalised))}
    if log_evidence_se is None and eves is not None:
        log_evidence_se = genealogical_se(log_weights, eves)
    assessment = assess(
        log_weights,
        log_evidence_se,
        num_nonfinite=num_nonfinite,
        ess_by_stage=ess_by_stage,
        survivors=survivors or {},
    )
    _, num_dropped = drop_nonfinite(log_weights)
    total = num_nonfinite + num_dropped.astype(jnp.int32)
    return WeightAnalysis(log_normalised, log_mean, assessment, total, eves, dict(survivors or {}))


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
    """Explain a grade: the limits that are violated, or that none is."""
    if measures[0] == 0.0:
        return (f"All {num_particles} weights are zero: no particle can explain these data.",)
    checks = (
        limit.check(value, _affected(limit, survivors))
        for value, limit in zip(measures, LIMITS, strict=True)
    )
    violations = tuple(reason for grade, reason in checks if grade > 0)
    return violations or (
        f"All measures are within the limits: effective sample size {measures[0]:.0f} of "
        f"{num_particles}, Pareto k̂ {measures[2]:.2f}, standard error of the log evidence "
        f"{measures[3]:.2g}.",
    )


def _affected(limit: Limit, survivors: Mapping[str, np.ndarray]) -> str:
    """Name the latents, or the steps of a series, that have too few surviving draws."""
    if limit is _SURVIVING_DRAWS:
        names = [name for name, n in survivors.items() if n.ndim == 0 and n < limit.good]
        return f" ({', '.join(names)})" if names else ""
    if limit is not _SURVIVING_TRAJECTORIES:
        return ""
    parts = []
    for name, number in survivors.items():
        if number.ndim and np.any(number < limit.good):
            steps = np.flatnonzero(number < limit.good)
            parts.append(f"steps {steps[0]} to {steps[-1]} of {name}")
    if not parts:
        return ""
    return f" ({', '.join(parts)}). Filtered marginals and last states are not affected"
