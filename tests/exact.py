"""Exact answers: conjugacy, quadrature, Kalman, the forward algorithm, enumeration."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan
from scipy import integrate, special, stats

from zoo import discrete_network

DRIFT, SPREAD, NOISE = 0.9, 1.0, 0.7


def normal(n=4):
    mu = numpyro.sample("mu", dist.Normal(1.0, 2.0))
    with numpyro.plate("n", n):
        numpyro.sample("y", dist.Normal(mu, 1.5))


def normal_exact(y):
    n = len(y)
    cov = 4.0 * np.ones((n, n)) + 2.25 * np.eye(n)
    precision = 1 / 4 + n / 2.25
    mean = (1 / 4 + y.sum() / 2.25) / precision
    return stats.multivariate_normal.logpdf(y, np.ones(n), cov), {"mu": mean}


def coin(n=6):
    p = numpyro.sample("p", dist.Beta(2.0, 3.0))
    with numpyro.plate("n", n):
        numpyro.sample("y", dist.Bernoulli(p))


def coin_exact(y):
    a, b = 2 + y.sum(), 3 + len(y) - y.sum()
    return special.betaln(a, b) - special.betaln(2, 3), {"p": a / (a + b)}


def rates(n=3):
    """A small version of the pumps model, with a prior that quadrature can hold."""
    alpha = numpyro.sample("alpha", dist.Gamma(2.0, 1.0))
    beta = numpyro.sample("beta", dist.Gamma(2.0, 1.0))
    with numpyro.plate("n", n):
        theta = numpyro.sample("theta", dist.Gamma(alpha, beta))
        numpyro.sample("y", dist.Poisson(3.0 * theta))


def rates_exact(y):
    """θ integrated out: negative binomials; (α, β) by quadrature on a grid of logarithms."""
    grid = np.linspace(-6, 4, 801)
    a, b = np.exp(grid)[:, None], np.exp(grid)[None, :]
    log_prior = stats.gamma.logpdf(a, 2) + stats.gamma.logpdf(b, 2) + np.log(a * b)
    log_joint = log_prior + sum(stats.nbinom.logpmf(k, a, b / (b + 3.0)) for k in y)

    def integral(weight):
        values = weight * np.exp(log_joint)
        return integrate.simpson(integrate.simpson(values, x=grid), x=grid)

    z = integral(1.0)
    return np.log(z), {"alpha": integral(a) / z, "beta": integral(b) / z}


def hierarchy(groups=3, members=3):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", groups, dim=-2):
        a = numpyro.sample("a", dist.Normal(mu, 1.0))
        with numpyro.plate("members", members, dim=-1):
            b = numpyro.sample("b", dist.Normal(a, 0.8))
            numpyro.sample("y", dist.Normal(b, 0.5))


def hierarchy_exact(y):
    groups, members = y.shape
    same = np.kron(np.eye(groups), np.ones((members, members)))
    cov = 1.0 + same + (0.64 + 0.25) * np.eye(y.size)
    weights = np.linalg.solve(cov, y.ravel())
    log_z = stats.multivariate_normal.logpdf(y.ravel(), np.zeros(y.size), cov)
    return log_z, {"mu": weights.sum()}


def series(steps=8):
    def step(x, _):
        x = numpyro.sample("x", dist.Normal(DRIFT * x, SPREAD))
        numpyro.sample("y", dist.Normal(x, NOISE))
        return x, None

    scan(step, 0.0, None, length=steps)


def series_loop(steps=8):
    x = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(DRIFT * x, SPREAD))
        numpyro.sample(f"y_{t}", dist.Normal(x, NOISE))


def kalman(y):
    """Log evidence, and mean and variance of the filtering distribution at each step."""
    mean, variance, log_z, means, variances = 0.0, 0.0, 0.0, [], []
    for value in y:
        mean, variance = DRIFT * mean, DRIFT**2 * variance + SPREAD**2
        total = variance + NOISE**2
        log_z += stats.norm.logpdf(value, mean, np.sqrt(total))
        gain = variance / total
        mean, variance = mean + gain * (value - mean), (1 - gain) * variance
        means.append(mean)
        variances.append(variance)
    return log_z, np.array(means), np.array(variances)


def series_exact(y):
    n = len(y)
    lags = np.subtract.outer(np.arange(n), np.arange(n))
    lower = np.where(lags >= 0, DRIFT ** np.maximum(lags, 0), 0.0)
    cov_x = SPREAD**2 * lower @ lower.T
    cov = cov_x + NOISE**2 * np.eye(n)
    log_z = stats.multivariate_normal.logpdf(y, np.zeros(n), cov)
    return log_z, {"x": cov_x @ np.linalg.solve(cov, y)}


STATES = 6
_generator = np.random.default_rng(0)
TRANSITION = _generator.dirichlet(np.ones(STATES), STATES).astype(np.float32)
LEVELS = np.arange(STATES) * 1.5


def chain(steps=7):
    def step(z, _):
        z = numpyro.sample("z", dist.Categorical(jnp.asarray(TRANSITION)[z]))
        numpyro.sample("y", dist.Normal(jnp.asarray(LEVELS)[z], 1.0))
        return z, None

    scan(step, 0, None, length=steps)


def chain_exact(y):
    """The forward algorithm, and backward for the smoothed means."""
    transition = TRANSITION / TRANSITION.sum(1, keepdims=True)
    likelihood = stats.norm.pdf(y[:, None], LEVELS, 1.0)
    forward, alpha = [], np.eye(STATES)[0]
    for row in likelihood:
        alpha = (alpha @ transition) * row
        forward.append(alpha)
    beta, smoothed = np.ones(STATES), []
    for alpha, row in zip(forward[::-1], likelihood[::-1], strict=True):
        weights = alpha * beta
        smoothed.append((weights / weights.sum()) @ np.arange(STATES))
        beta = transition @ (row * beta)
    return np.log(forward[-1].sum()), {"z": np.array(smoothed[::-1])}


def network_exact(xray, dyspnoea):
    """All 2⁶ states of the latents of the eight-node network."""
    names = ("asia", "smoking", "tuberculosis", "cancer", "bronchitis", "either")
    table = np.array([[0.1, 0.8], [0.7, 0.9]])

    def of(value, p):
        return p if value else 1 - p

    total, means = 0.0, dict.fromkeys(names, 0.0)
    for state in product((0, 1), repeat=6):
        a, s, t, c, b, e = state
        weight = of(a, 0.01) * 0.5 * of(t, (0.01, 0.05)[a]) * of(c, (0.01, 0.1)[s])
        weight *= of(b, (0.3, 0.6)[s]) * of(e, (0.01, 0.99)[t | c])
        weight *= of(xray, (0.05, 0.98)[e]) * of(dyspnoea, table[e, b])
        total += weight
        for name, value in zip(names, state, strict=True):
            means[name] += weight * value
    return np.log(total), {name: value / total for name, value in means.items()}


def _of_y(exact: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda data: exact(np.asarray(data["y"], float))


# name: (model, observed, inverse, exact, methods)
Oracle = tuple[Callable[..., Any], Sequence[str], str, Callable[[dict[str, Any]], Any], Sequence[str]]  # fmt: skip  # noqa: E501
ORACLES: dict[str, Oracle] = {
    "normal": (normal, ["y"], "auto", _of_y(normal_exact), ["importance"]),
    "coin": (coin, ["y"], "auto", _of_y(coin_exact), ["importance"]),
    "rates": (rates, ["y"], "blanket", _of_y(rates_exact), ["importance", "divide"]),
    "hierarchy": (hierarchy, ["y"], "blanket", _of_y(hierarchy_exact), ["smc", "divide"]),
    "series": (series, ["y"], "filter", _of_y(series_exact), ["importance", "smc"]),
    "look-ahead": (series, ["y"], "faithful", _of_y(series_exact), ["smc"]),
    "chain": (chain, ["y"], "filter", _of_y(chain_exact), ["smc"]),
    "network": (
        discrete_network,
        ["xray", "dyspnoea"],
        "faithful",
        lambda data: network_exact(int(data["xray"]), int(data["dyspnoea"])),
        ["importance"],
    ),
}
