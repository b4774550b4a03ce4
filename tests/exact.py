"""Exact posteriors by conjugacy, quadrature, Kalman filter, forward-backward, enumeration."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan
from scipy import special, stats

from zoo import discrete_network, pumps

DRIFT, SPREAD, NOISE = 0.9, 1.0, 0.7


class Exact(NamedTuple):
    """Log evidence, and mean and standard deviation of every latent."""

    log_evidence: float
    means: dict[str, Any]
    sds: dict[str, Any]


def gaussian(y, mean, cov, sites):
    """Condition Gaussian sites on y; `sites` has each one's mean, variance, covariance with y."""
    weights = np.linalg.solve(cov, y - mean)
    means, sds = {}, {}
    for name, (prior_mean, variance, cross) in sites.items():
        cross = np.atleast_2d(cross)
        means[name] = prior_mean + np.squeeze(cross @ weights)
        explained = np.einsum("ij,ji->i", cross, np.linalg.solve(cov, cross.T))
        sds[name] = np.squeeze(np.sqrt(variance - explained))
    return Exact(stats.multivariate_normal.logpdf(y, mean, cov), means, sds)


def normal(n=4):
    mu = numpyro.sample("mu", dist.Normal(1.0, 2.0))
    with numpyro.plate("n", n):
        numpyro.sample("y", dist.Normal(mu, 1.5))


def normal_exact(y):
    n = len(y)
    cov = 4.0 * np.ones((n, n)) + 2.25 * np.eye(n)
    return gaussian(y, np.ones(n), cov, {"mu": (1.0, 4.0, np.full(n, 4.0))})


def coin(n=6):
    p = numpyro.sample("p", dist.Beta(2.0, 3.0))
    with numpyro.plate("n", n):
        numpyro.sample("y", dist.Bernoulli(p))


def coin_exact(y):
    a, b = 2 + y.sum(), 3 + len(y) - y.sum()
    posterior, log_z = stats.beta(a, b), special.betaln(a, b) - special.betaln(2, 3)
    return Exact(log_z, {"p": posterior.mean()}, {"p": posterior.std()})


def rates(n=3):
    """A small version of the pumps model, whose prior has lighter tails."""
    alpha = numpyro.sample("alpha", dist.Gamma(2.0, 1.0))
    beta = numpyro.sample("beta", dist.Gamma(2.0, 1.0))
    with numpyro.plate("n", n):
        theta = numpyro.sample("theta", dist.Gamma(alpha, beta))
        numpyro.sample("y", dist.Poisson(3.0 * theta))


def gamma_poisson_exact(y, t, log_prior, log_alpha, log_beta):
    """Counts y in times t with rates θ_n ~ Gamma(α, β): integrate θ out, quadrature over (α, β).

    `log_alpha` and `log_beta` are the ends of a first, coarse grid, which shows where the posterior
    lies; the second grid covers that range only. `log_prior` returns the densities of α and of β.
    """
    for size in (401, 601):
        grid_a, grid_b = np.linspace(*log_alpha, size), np.linspace(*log_beta, size)
        a, b = np.exp(grid_a), np.exp(grid_b)
        of_a, of_b = (
            log + grid for log, grid in zip(log_prior(a, b), (grid_a, grid_b), strict=True)
        )
        of_a = of_a + sum(special.gammaln(k + a) - special.gammaln(a) for k in y)
        of_b = of_b + sum(k * np.log(time / (b + time)) for k, time in zip(y, t, strict=True))
        of_both = sum(np.log(b / (b + time)) for time in t)
        log_joint = of_a[:, None] + of_b + a[:, None] * of_both
        highest = log_joint.max()
        covered = log_joint > highest - 35
        log_alpha, log_beta = (
            (grid[max(where.min() - 1, 0)], grid[min(where.max() + 1, size - 1)])
            for grid, where in zip((grid_a, grid_b), np.nonzero(covered), strict=True)
        )
    joint = np.exp(log_joint - highest)
    joint *= _simpson(grid_a)[:, None] * _simpson(grid_b)
    z = joint.sum()

    def expected(of_a, of_b):
        return of_a @ joint @ of_b / z

    one = np.ones(size)
    means = {"alpha": expected(a, one), "beta": expected(one, b)}
    squares = {"alpha": expected(a**2, one), "beta": expected(one, b**2)}
    rates = list(zip(y, t, strict=True))
    means["theta"] = np.array([expected(a + k, 1 / (b + time)) for k, time in rates])
    squares["theta"] = np.array(
        [expected((a + k) * (a + k + 1), 1 / (b + time) ** 2) for k, time in rates]
    )
    sds = {name: np.sqrt(squares[name] - means[name] ** 2) for name in means}
    return Exact(np.log(z) + highest - special.gammaln(y + 1).sum(), means, sds)


def _simpson(grid):
    """The weights of Simpson's rule."""
    return np.array([1, *([4, 2] * (len(grid) // 2 - 1)), 4, 1]) * (grid[1] - grid[0]) / 3


def rates_exact(y):
    def log_prior(a, b):
        return stats.gamma.logpdf(a, 2), stats.gamma.logpdf(b, 2)

    return gamma_poisson_exact(y, np.full(len(y), 3.0), log_prior, (-9, 5), (-9, 5))


PUMPS = {
    "t": np.array([94.3, 15.7, 62.9, 126, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5]),
    "y": np.array([5, 1, 5, 14, 3, 19, 1, 1, 4, 22]),
}


def pumps_exact(data):
    """The model of sec. 5.2 of the paper, including the density of the covariate t."""
    t, y = np.asarray(data["t"], float), np.asarray(data["y"], float)

    def log_prior(a, b):
        return stats.expon.logpdf(a), stats.gamma.logpdf(b, 0.1)

    # The prior of β has a pole at 0, so without many failures the range of log β is wide.
    exact = gamma_poisson_exact(y, t, log_prior, (-15, 5), (-87, 6))
    covariates = stats.expon.logpdf(t, scale=50.0).sum()
    return exact._replace(log_evidence=exact.log_evidence + covariates)


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
    cov_b = 1.0 + same + 0.64 * np.eye(y.size)
    cov_a = 1.0 + np.kron(np.eye(groups), np.ones(members))
    sites = {"mu": (0.0, 1.0, np.ones(y.size)), "a": (0.0, 2.0, cov_a), "b": (0.0, 2.64, cov_b)}
    exact = gaussian(y.ravel(), np.zeros(y.size), cov_b + 0.25 * np.eye(y.size), sites)
    shapes = {"mu": (), "a": (groups, 1), "b": (groups, members)}
    return exact._replace(
        means={name: np.reshape(value, shapes[name]) for name, value in exact.means.items()},
        sds={name: np.reshape(value, shapes[name]) for name, value in exact.sds.items()},
    )


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
    return gaussian(y, np.zeros(n), cov, {"x": (0.0, np.diag(cov_x), cov_x)})


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
    """The forward-backward algorithm."""
    transition = TRANSITION / TRANSITION.sum(1, keepdims=True)
    likelihood = stats.norm.pdf(y[:, None], LEVELS, 1.0)
    forward, alpha = [], np.eye(STATES)[0]
    for row in likelihood:
        alpha = (alpha @ transition) * row
        forward.append(alpha)
    beta, smoothed = np.ones(STATES), []
    for alpha, row in zip(forward[::-1], likelihood[::-1], strict=True):
        smoothed.append(alpha * beta / (alpha @ beta))
        beta = transition @ (row * beta)
    probabilities = np.array(smoothed[::-1])
    mean = probabilities @ np.arange(STATES)
    sd = np.sqrt(probabilities @ np.arange(STATES) ** 2 - mean**2)
    return Exact(np.log(forward[-1].sum()), {"z": mean}, {"z": sd})


def network_exact(xray, dyspnoea):
    """Enumerate the 2⁶ states of the latents of the eight-node network."""
    names = ("asia", "smoking", "tuberculosis", "cancer", "bronchitis", "either")
    table = np.array([[0.1, 0.8], [0.7, 0.9]])

    def bernoulli(value, p):
        return p if value else 1 - p

    total, means = 0.0, dict.fromkeys(names, 0.0)
    for state in product((0, 1), repeat=6):
        a, s, t, c, b, e = state
        weight = bernoulli(a, 0.01) * 0.5 * bernoulli(t, (0.01, 0.05)[a])
        weight *= bernoulli(c, (0.01, 0.1)[s]) * bernoulli(b, (0.3, 0.6)[s])
        weight *= bernoulli(e, (0.01, 0.99)[t | c]) * bernoulli(xray, (0.05, 0.98)[e])
        weight *= bernoulli(dyspnoea, table[e, b])
        total += weight
        for name, value in zip(names, state, strict=True):
            means[name] += weight * value
    means = {name: value / total for name, value in means.items()}
    return Exact(np.log(total), means, {name: np.sqrt(p * (1 - p)) for name, p in means.items()})


def _from_y(exact: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda data: exact(np.asarray(data["y"], float))


class Oracle(NamedTuple):
    """A model with an exact posterior, its inversion method, and the inference methods to test."""

    model: Callable[..., Any]
    observed: Sequence[str]
    inverse: str
    exact: Callable[[dict[str, Any]], Exact]
    methods: Sequence[str]


ORACLES = {
    "normal": Oracle(normal, ["y"], "auto", _from_y(normal_exact), ["importance"]),
    "coin": Oracle(coin, ["y"], "auto", _from_y(coin_exact), ["importance"]),
    "rates": Oracle(rates, ["y"], "blanket", _from_y(rates_exact), ["importance", "divide"]),
    "pumps": Oracle(pumps, ["t", "y"], "faithful", pumps_exact, ["importance", "smc"]),
    "hierarchy": Oracle(hierarchy, ["y"], "blanket", _from_y(hierarchy_exact), ["smc", "divide"]),
    "series": Oracle(series, ["y"], "filter", _from_y(series_exact), ["importance", "smc"]),
    "look-ahead": Oracle(series, ["y"], "faithful", _from_y(series_exact), ["smc"]),
    "chain": Oracle(chain, ["y"], "filter", _from_y(chain_exact), ["smc"]),
    "network": Oracle(
        discrete_network,
        ["xray", "dyspnoea"],
        "faithful",
        lambda data: network_exact(int(data["xray"]), int(data["dyspnoea"])),
        ["importance"],
    ),
}
