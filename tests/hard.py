"""Data sets on which importance sampling fails, with exact answers."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import integrate, stats

import retrodict as rd
from exact import Exact, pumps_exact
from oracles import SMALL, UNTRAINED, without_planning
from zoo import SIGMA, eight_schools, key, pumps

BRIEF = rd.Training(max_steps=100, batch_size=256, dataset_size=4096, heldout_size=1024)


class Hard(NamedTuple):
    model: Callable[..., Any]
    observed: tuple[str, ...]
    training: rd.Training
    data: dict[str, Any]
    exact: Callable[[], Exact]


X = np.linspace(-1, 1, 10)
NOISE = 0.003


def line():
    """Prior sd 10, posterior sd 0.001."""
    a = numpyro.sample("a", dist.Normal(0, 10.0))
    b = numpyro.sample("b", dist.Normal(0, 10.0))
    with numpyro.plate("n", len(X)):
        numpyro.sample("y", dist.Normal(a + b * jnp.asarray(X), NOISE))


LINE = {"y": (12.34 - 7.89 * X + NOISE * np.random.default_rng(0).normal(size=10)).astype("f4")}


def line_exact():
    y = LINE["y"].astype(float)
    design = np.stack([np.ones(10), np.asarray(X, "f4").astype(float)], 1)
    cov = np.linalg.inv(np.eye(2) / 100 + design.T @ design / NOISE**2)
    mean = cov @ design.T @ y / NOISE**2
    log_z = stats.multivariate_normal.logpdf(
        y, np.zeros(10), 100 * design @ design.T + NOISE**2 * np.eye(10)
    )
    sds = np.sqrt(np.diag(cov))
    return Exact(log_z, dict(zip("ab", mean, strict=True)), dict(zip("ab", sds, strict=True)))


PREDICTORS = 100 * np.random.default_rng(1).normal(size=(100, 5)).astype("f4")


def coefficients():
    """Prior sd 10, posterior sd 0.001, for each of five coefficients."""
    b = numpyro.sample("b", dist.Normal(0, 10.0).expand([5]).to_event(1))
    with numpyro.plate("n", len(PREDICTORS)):
        numpyro.sample("y", dist.Normal(jnp.asarray(PREDICTORS) @ b, 1.0))


def _coefficients_data():
    rng = np.random.default_rng(2)
    return {"y": (PREDICTORS @ (10 * rng.normal(size=5)) + rng.normal(size=100)).astype("f4")}


COEFFICIENTS = _coefficients_data()


def coefficients_exact():
    """log p(y) = log p(y | m) + log p(m) - log p(m | y) at the posterior mean m."""
    design, y = PREDICTORS.astype(float), COEFFICIENTS["y"].astype(float)
    cov = np.linalg.inv(np.eye(5) / 100 + design.T @ design)
    mean = cov @ design.T @ y
    log_z = stats.norm.logpdf(y, design @ mean).sum() + stats.norm.logpdf(mean, 0, 10).sum()
    log_z -= stats.multivariate_normal.logpdf(mean, mean, cov)
    return Exact(log_z, {"b": mean}, {"b": np.sqrt(np.diag(cov))})


# Running times a hundred times longer than in training, with a hundred times the failures.
PUMPS = {
    "t": 100 * np.array([94.3, 15.7, 62.9, 126, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5], "f4"),
    "y": 100 * np.array([5, 1, 5, 14, 3, 19, 1, 1, 4, 22]),
}


SCHOOLS = {"y": np.array([280.0, 80.0, -30.0, 70.0], "f4")}


def schools_exact():
    """Integrate θ out, so that y_j ~ N(μ, τ² + σ_j²), and use quadrature over (μ, log τ)."""
    grid_mu, grid_tau = np.linspace(-40, 60, 1001), np.linspace(-8, 12, 1001)
    mu, tau = grid_mu[:, None], np.exp(grid_tau)[None, :]
    log_joint = stats.norm.logpdf(mu, 0, 5) + stats.halfcauchy.logpdf(tau, scale=5) + np.log(tau)
    for y, sigma in zip(SCHOOLS["y"].astype(float), SIGMA, strict=True):
        log_joint = log_joint + stats.norm.logpdf(y, mu, np.sqrt(tau**2 + sigma**2))
    # Compare log τ: the tail of τ is as heavy as its half-Cauchy prior's, without a variance.
    log_z, moments = _moments(log_joint, (grid_mu, grid_tau), {"mu": mu, "log tau": np.log(tau)})
    return Exact(log_z, *moments)


def two_modes():
    """The sign of x is not observed, so the posterior has two modes."""
    x = numpyro.sample("x", dist.Normal(0.5, 3.0))
    with numpyro.plate("n", 4):
        numpyro.sample("y", dist.Normal(x**2, 0.1))


MODES = {"y": np.array([30.1, 29.95, 30.02, 30.03], "f4")}


def modes_exact():
    grid = np.sort(np.concatenate([s * np.linspace(5.3, 5.65, 100_001) for s in (-1, 1)]))
    log_joint = stats.norm.logpdf(grid, 0.5, 3.0)
    for y in MODES["y"].astype(float):
        log_joint = log_joint + stats.norm.logpdf(y, grid**2, 0.1)
    shift = log_joint.max()
    weights = np.exp(log_joint - shift)

    def integral(values):
        half = len(grid) // 2
        parts = (slice(None, half), slice(half, None))
        return sum(integrate.simpson((weights * values)[p], x=grid[p]) for p in parts)

    z = integral(1.0)
    mean = integral(grid) / z
    return Exact(np.log(z) + shift, {"x": mean}, {"x": np.sqrt(integral(grid**2) / z - mean**2)})


CAUSES, RARE, LEAK = 16, 0.01, 1e-3


def alarms():
    """Rare causes on a ring; each alarm responds to two neighbouring causes, or is false."""
    with numpyro.plate("ring", CAUSES):
        cause = numpyro.sample("cause", dist.Bernoulli(RARE))
        silent = (1 - LEAK) * jnp.array([1.0, 0.2, 0.04])[cause + jnp.roll(cause, -1)]
        numpyro.sample("alarm", dist.Bernoulli(1 - silent))


ALARMS = {"alarm": (np.arange(CAUSES) < 6).astype(int)}


def alarms_exact():
    """Enumerate all states of the causes."""
    states = np.array(list(product((0, 1), repeat=CAUSES)))
    silent = (1 - LEAK) * 0.2 ** (states + np.roll(states, -1, axis=1))
    weights = np.prod(np.where(states == 1, RARE, 1 - RARE), 1)
    weights = weights * np.prod(np.where(ALARMS["alarm"] == 1, 1 - silent, silent), 1)
    means = weights @ states / weights.sum()
    sds = np.sqrt(means * (1 - means))
    return Exact(float(np.log(weights.sum())), {"cause": means}, {"cause": sds})


def _moments(log_joint, grids, values):
    def integral(weight):
        inner = integrate.simpson(weight * np.exp(log_joint - log_joint.max()), x=grids[1])
        return integrate.simpson(inner, x=grids[0])

    z = integral(1.0)
    means = {name: integral(value) / z for name, value in values.items()}
    sds = {n: np.sqrt(integral(v**2) / z - means[n] ** 2) for n, v in values.items()}
    return float(np.log(z) + log_joint.max()), (means, sds)


HARD = {
    "regression": Hard(line, ("y",), UNTRAINED, LINE, line_exact),
    "coefficients": Hard(coefficients, ("y",), UNTRAINED, COEFFICIENTS, coefficients_exact),
    "pumps": Hard(pumps, ("t", "y"), BRIEF, PUMPS, lambda: pumps_exact(PUMPS)),
    "schools": Hard(eight_schools, ("y",), UNTRAINED, SCHOOLS, schools_exact),
    "two modes": Hard(two_modes, ("y",), UNTRAINED, MODES, modes_exact),
    "alarms": Hard(alarms, ("alarm",), UNTRAINED, ALARMS, alarms_exact),
}


def values_of(posterior, name):
    """The samples of a site; those of its logarithm for "log site"."""
    if name.startswith("log "):
        return jnp.log(posterior.samples[name.removeprefix("log ")])
    return posterior.samples[name]


@cache
def compiled_hard(name):
    """The compiled model, with networks that have learned little or nothing."""
    model, observed, training, *_ = HARD[name]
    with without_planning():
        return rd.compile(
            key(), model, observed, estimator=SMALL, training=training, progress_bar=False
        )


def discrepancies(posterior, exact, errors, sds=0.0):
    """Describe each mean, and the evidence, that is off by more than the tolerance.

    The tolerance is `errors` standard errors plus `sds` posterior standard deviations.
    """
    wrong = []
    for name, mean in exact.means.items():
        values = replace(posterior, samples={name: values_of(posterior, name)})
        off = np.abs(np.asarray(values.mean(name), float) - mean)
        # An event too rare to be among the samples has no spread there. No estimate from K samples
        # is more precise than that of K independent ones.
        smallest_error = np.asarray(exact.sds[name]) / np.sqrt(posterior.num_particles)
        error = np.maximum(np.asarray(values.mcse(name), float), smallest_error)
        allowed = errors * error + sds * np.asarray(exact.sds[name])
        # float32 rounds a mean of 12.3 by a thousandth of a posterior sd of 0.001
        if np.any(off > allowed + 1e-6 * np.abs(mean)):
            wrong.append(f"{name}: off by {off}, allowed {allowed}")
    off = abs(float(posterior.log_evidence) - exact.log_evidence)
    if off > errors * float(posterior.log_evidence_se) + sds:
        wrong.append(f"evidence: off by {off}, standard error {posterior.log_evidence_se}")
    return wrong
