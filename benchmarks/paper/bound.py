"""Series in; what a filter with the optimal proposal makes of them out: the bound for any other."""

from typing import NamedTuple

import numpy as np

from benchmarks.paper.exact import FactorialHMM


class Filtered(NamedTuple):
    """Of one run: effective sample size by step, ancestors, and log evidence."""

    ess: np.ndarray
    ancestors: np.ndarray
    log_evidence: float


def run(rng: np.random.Generator, model: FactorialHMM, y: np.ndarray, particles: int) -> Filtered:
    """One run, resampling systematically below half the particles."""
    on = np.full((particles, len(model.power)), model.initial)
    log_weights = np.full(particles, -np.log(particles))
    sizes, ancestors, log_evidence = [], [], 0.0
    for step, value in enumerate(y):
        parents = np.arange(particles)
        if step and sizes[-1] < 0.5 * particles:
            places = (np.arange(particles) + rng.uniform()) / particles
            parents = np.searchsorted(np.cumsum(np.exp(log_weights)), places)
            parents = np.minimum(parents, particles - 1)
            log_weights = np.full(particles, -np.log(particles))
        x, increment = model.optimal(rng, on[parents], float(value))
        on = np.where(x == 1, 1 - model.switch, model.switch)
        log_weights = log_weights + increment
        total = np.logaddexp.reduce(log_weights)
        log_evidence += total
        log_weights -= total
        sizes.append(1 / np.sum(np.exp(2 * log_weights)))
        if step:
            ancestors.append(parents)
    return Filtered(np.array(sizes), np.stack(ancestors), float(log_evidence))
