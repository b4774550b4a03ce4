"""A particle filter with the optimal proposal: an upper bound on what a learned proposal can do."""

from typing import NamedTuple

import numpy as np

from benchmarks.paper.exact import FactorialHMM


class FilterRun(NamedTuple):
    """One run of a filter.

    Attributes:
        ess: effective sample size after each step, (steps,).
        ancestors: index of each particle's parent in the step before, (steps − 1, particles).
        log_evidence: estimate of log p(y).
    """

    ess: np.ndarray
    ancestors: np.ndarray
    log_evidence: float


def run_filter(
    rng: np.random.Generator, model: FactorialHMM, y: np.ndarray, num_particles: int
) -> FilterRun:
    """Filter a series; resample systematically when the ESS falls below half the particles."""
    equal_log_weights = np.full(num_particles, -np.log(num_particles))
    chance_on = np.full((num_particles, len(model.power)), model.initial)
    log_weights = equal_log_weights
    sizes, ancestors, log_evidence = [], [], 0.0
    for step, y_t in enumerate(y):
        # Resample
        parents = np.arange(num_particles)
        if step and sizes[-1] < 0.5 * num_particles:
            points = (np.arange(num_particles) + rng.uniform()) / num_particles
            parents = np.searchsorted(np.cumsum(np.exp(log_weights)), points)
            parents = np.minimum(parents, num_particles - 1)
            log_weights = equal_log_weights
        # Propagate
        x, log_predictive = model.sample_optimal(rng, chance_on[parents], float(y_t))
        chance_on = np.where(x == 1, 1 - model.switch, model.switch)
        # Reweight
        log_weights = log_weights + log_predictive
        log_total = np.logaddexp.reduce(log_weights)
        log_evidence += log_total
        log_weights = log_weights - log_total
        sizes.append(1 / np.sum(np.exp(2 * log_weights)))
        if step:
            ancestors.append(parents)
    return FilterRun(np.array(sizes), np.stack(ancestors), float(log_evidence))
