"""Summary and grade of a posterior found by tempered SMC.

After the last resampling all weights are equal, so that they show nothing of the error. The grade
rests on the islands of `tempered_smc` instead. They share the path but no draw, so the spread of
their means is the error of the mean, and the spread of their evidences that of the evidence,
whether it comes from weights, from moves that do not mix, or from modes that few draws found. A
mode that all islands miss remains undetected.
"""

from typing import Any, NamedTuple

import numpy as np

from retrodict.inference.population_metrics import coordinate_matrix
from retrodict.inference.tempered_smc import TemperingRun
from retrodict.particles.diagnostics import Limit

Vector = np.ndarray[Any, Any]

# If moves at the last temperature leave no coordinate more correlated with its value before them
# than this, they have mixed the islands, and particles of all islands have equal weight.
MAX_MIXED_CORRELATION = 0.3
# Islands share the path, and with it some of their error: on data sets with exact answers, 40 runs
# each, the error of the evidence was up to this many times what their spread showed.
SHARED_PATH_INFLATION = 1.25

LIMITS = (
    Limit("last temperature λ", "least", 1.0, 1.0, "the path did not end at the posterior"),
    Limit("effective sample size by islands", "least", 150.0, 30.0, "islands disagree on means"),
    Limit("standard error of the log evidence", "most", 0.15, 1.0, "islands disagree on it"),
    Limit("acceptance of trajectories", "least", 0.3, 0.05, "most moves are rejected"),
)


class TemperingSummary(NamedTuple):
    """Summary of a run with a fixed path and its pilot; particles of the former come first.

    Attributes:
        temperatures: λ of each stage of the fixed path.
        ess_by_stage: effective sample size of each of these stages.
        log_weights: of the particles, not normalised.
        island: of each particle.
        log_evidence: of the run with the fixed path.
        log_evidence_se: its standard error, estimated from all islands.
        ess_by_islands: (sd / se)² of the worst coordinate's mean, with the standard error
            estimated from the spread between islands.
        trajectory_acceptance: at the last temperature; None without continuous latents.
        change_acceptance: of discrete changes at the last temperature; None without discrete
            latents.
        num_sweeps: sweeps of moves, of both runs.
        last_lam: the temperature that was reached.
    """

    temperatures: tuple[float, ...]
    ess_by_stage: Vector
    log_weights: Vector
    island: Vector
    log_evidence: float
    log_evidence_se: float
    ess_by_islands: float
    trajectory_acceptance: float | None
    change_acceptance: float | None
    num_sweeps: int
    last_lam: float

    @property
    def num_temperatures(self) -> int:
        """The number of stages."""
        return len(self.temperatures)

    @staticmethod
    def of(fixed: TemperingRun, pilot: TemperingRun) -> "TemperingSummary":
        """Summarise the run with the fixed path and its pilot."""
        runs = (fixed, pilot)
        last_lam, last_sweeps = float(fixed.stages[-1].stage.lam), pilot.stages[-1].moves.sweeps
        coordinates = np.concatenate(
            [np.asarray(coordinate_matrix(r.state.particles.particle), np.float64) for r in runs]
        )
        by_run = [r.state.log_evidence.value() for r in runs]
        log_evidence = np.concatenate(by_run)
        island = np.repeat(np.arange(log_evidence.size), len(coordinates) // log_evidence.size)
        correlation = max(np.max(np.abs(r.stages[-1].moves.correlation)) for r in runs)
        mixed = bool(correlation <= MAX_MIXED_CORRELATION and np.all(np.isfinite(log_evidence)))
        island_log_weights = np.zeros(log_evidence.size) if mixed else log_evidence
        variances = [np.asarray(r.state.variance, float) for r in runs]
        error = _log_evidence_se(*by_run, *variances) if last_lam >= 1.0 else float("inf")
        particle = fixed.state.particles.particle
        trajectory = float(last_sweeps.trajectory_acceptance)
        change = float(np.mean(last_sweeps.change_acceptance))
        return TemperingSummary(
            temperatures=tuple(float(info.stage.lam) for info in fixed.stages),
            ess_by_stage=np.array([float(info.ess) for info in fixed.stages]),
            log_weights=island_log_weights[island],
            island=island,
            log_evidence=_log_mean_exp(by_run[0]),
            log_evidence_se=error,
            ess_by_islands=_ess_by_islands(coordinates, island_log_weights),
            trajectory_acceptance=trajectory if particle.z.shape[1] > 0 else None,
            change_acceptance=change if particle.discrete else None,
            num_sweeps=sum(int(info.moves.num_sweeps) for run in runs for info in run.stages),
            last_lam=last_lam,
        )

    def grade(self) -> tuple[int, tuple[str, ...]]:
        """The grade, 0 good to 2 poor, and the reasons for it."""
        acceptance = self.trajectory_acceptance
        measures = (
            self.last_lam,
            self.ess_by_islands,
            self.log_evidence_se,
            1.0 if acceptance is None else acceptance,
        )
        checks = [limit.check(value) for value, limit in zip(measures, LIMITS, strict=True)]
        violations = (reason for grade, reason in checks if grade > 0)
        return max(grade for grade, _ in checks), (self._description(), *violations)

    def _description(self) -> str:
        acceptance = {
            "trajectories": self.trajectory_acceptance,
            "discrete changes": self.change_acceptance,
        }
        parts = [f"{rate:.0%} of {moves}" for moves, rate in acceptance.items() if rate is not None]
        accepted = ""
        if parts:
            accepted = f"; at the last temperature {' and '.join(parts)} were accepted"
        return (
            f"Found by tempering: {self.num_temperatures} temperatures, {self.num_sweeps} sweeps "
            f"of MCMC moves{accepted}."
        )


def _log_mean_exp(values: Vector) -> float:
    if not np.isfinite(values).any():
        return -np.inf
    largest = float(np.max(values))
    return largest + float(np.log(np.mean(np.exp(values - largest))))


def _log_evidence_se(
    fixed: Vector, pilot: Vector, fixed_variance: Vector, pilot_variance: Vector
) -> float:
    """Standard error of log Ẑ of the run with the fixed path.

    It comes from the spread between islands, and is at least that of their weights. Few islands
    rarely contain the rare one with far more evidence, so that the variance of their ratios is too
    small. Their logarithms are nearly normal, and the log-normal variance is a better estimate.

    Args:
        fixed: log Ẑ of the islands of the run with the fixed path.
        pilot: log Ẑ of the islands of its pilot. Their distance from the evidence is reduced as far
            as a divided path reduces the variance of weights.
        fixed_variance: relative variance of Ẑ of each island, from its weights.
        pilot_variance: the same for the pilot.
    """
    centre, from_weights = _log_mean_exp(fixed), float(np.mean(fixed_variance))
    if not np.isfinite(centre):
        return float("inf")
    reduction = min(from_weights / max(float(np.mean(pilot_variance)), 1e-30), 1.0)
    log_evidence = np.append(fixed, centre + np.sqrt(reduction) * (pilot - centre))
    finite = log_evidence[np.isfinite(log_evidence)]
    ratios = np.exp(log_evidence - np.max(log_evidence))
    relative = max(float(np.var(ratios, ddof=1) / np.mean(ratios) ** 2), from_weights)
    if finite.size > 1:
        relative = max(relative, float(np.expm1(min(float(np.var(finite, ddof=1)), 100.0))))
    return SHARED_PATH_INFLATION * float(np.sqrt(relative / fixed.size))


def _ess_by_islands(coordinates: Vector, island_log_weights: Vector) -> float:
    """The number of independent draws that would give the worst coordinate's mean as precisely."""
    weights = np.exp(island_log_weights - np.max(island_log_weights))
    weights = weights / weights.sum()
    alive = weights > 0
    if alive.sum() < 2:
        return 0.0
    by_island = coordinates.reshape(weights.size, -1, coordinates.shape[1])[alive]
    weights, num_alive = weights[alive], int(alive.sum())
    means, squares = by_island.mean(1), (by_island**2).mean(1)
    mean = weights @ means
    variance = weights @ squares - mean**2
    squared_error = num_alive / (num_alive - 1) * (weights**2 @ (means - mean) ** 2)
    varying = variance > 1e-9 * (1e-30 + weights @ squares)
    if not varying.any():
        return float(len(coordinates))
    return float(np.min(variance[varying] / np.maximum(squared_error[varying], 1e-30)))
