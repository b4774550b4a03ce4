"""Models for `benchmarks.firstanswer`, as users write them: the largest shapes that are common."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan

from retrodict.demos import models

STEPS, GROUPS, ROWS, NODES = 100, 20, 200, 40


class Case(NamedTuple):
    """A model and the names of its observed sites."""

    model: Callable[..., Any]
    observed: tuple[str, ...]
    has_gradient: bool = True  # all latents are continuous, so that NUTS applies


def volatility_loop() -> None:
    """Stochastic volatility with three parameters, as a loop over numbered sites."""
    phi = numpyro.sample("phi", dist.Beta(20.0, 1.5))
    sigma = numpyro.sample("sigma", dist.Gamma(2.0, 10.0))
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    state = mu
    for step in range(STEPS):
        state = numpyro.sample(f"h_{step}", dist.Normal(mu + phi * (state - mu), sigma))
        numpyro.sample(f"y_{step}", dist.Normal(0.0, jnp.exp(state / 2)))


def volatility_scan() -> None:
    """The same, as a scan."""
    phi = numpyro.sample("phi", dist.Beta(20.0, 1.5))
    sigma = numpyro.sample("sigma", dist.Gamma(2.0, 10.0))
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def step(state: Any, _: Any) -> tuple[Any, None]:
        state = numpyro.sample("h", dist.Normal(mu + phi * (state - mu), sigma))
        numpyro.sample("y", dist.Normal(0.0, jnp.exp(state / 2)))
        return state, None

    scan(step, mu, None, length=STEPS)


def hidden_markov() -> None:
    """A two-state hidden Markov model with unknown rows and emissions."""
    rows = numpyro.sample("rows", dist.Dirichlet(jnp.ones((2, 2))).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(jnp.array([-1.0, 1.0]), 1.0).to_event(1))

    def step(state: Any, _: Any) -> tuple[Any, None]:
        state = numpyro.sample("state", dist.Categorical(rows[state]))
        numpyro.sample("y", dist.Normal(mean[state], 1.0))
        return state, None

    scan(step, jnp.asarray(0), None, length=STEPS)


def linear_series_loop() -> None:
    """A two-dimensional linear-Gaussian series with two parameters, as a loop."""
    decay = numpyro.sample("decay", dist.Uniform(0.5, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    rotation = jnp.array([[0.95, 0.3], [-0.3, 0.95]])
    state = jnp.zeros(2)
    for step in range(STEPS):
        mean = decay * rotation @ state
        state = numpyro.sample(f"x_{step}", dist.Normal(mean, 0.5).to_event(1))
        numpyro.sample(f"y_{step}", dist.Normal(state[0], noise))


def _random_network() -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Parents and conditional probabilities of each node of a random discrete network."""
    rng = np.random.default_rng(0)
    nodes = []
    for node in range(NODES):
        number = min(node, int(rng.integers(0, 4)))
        parents = tuple(int(p) for p in rng.choice(node, number, replace=False)) if node else ()
        nodes.append((parents, rng.beta(0.5, 0.5, (2,) * len(parents)).astype(np.float32)))
    return nodes


NETWORK = _random_network()


def discrete_network() -> None:
    """Forty binary nodes with up to three parents each; every third is observed."""
    values: list[Any] = []
    for node, (parents, table) in enumerate(NETWORK):
        index = tuple(values[parent] for parent in parents)
        values.append(numpyro.sample(f"node_{node}_", dist.Bernoulli(jnp.asarray(table)[index])))


def nested_plates() -> None:
    """Pupils in classes in schools."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
    between = numpyro.sample("between", dist.HalfNormal(1.0))
    within = numpyro.sample("within", dist.HalfNormal(1.0))
    with numpyro.plate("schools", 8, dim=-2):
        school = numpyro.sample("school", dist.Normal(mu, between))
        with numpyro.plate("pupils", 12, dim=-1):
            numpyro.sample("y", dist.StudentT(4.0, school, within))


def varying_intercepts() -> None:
    """A regression with an intercept for each group; the group of each row is constant."""
    group = np.arange(ROWS) % GROUPS
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("groups", GROUPS):
        intercept = numpyro.sample("intercept", dist.Normal(mu, tau))
    with numpyro.plate("rows", ROWS):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(intercept[group] + slope * x, sigma))


def logistic() -> None:
    """A logistic regression with thirty coefficients and fixed predictors."""
    predictors = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, 30)), jnp.float32)
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([30]).to_event(1))
    with numpyro.plate("rows", ROWS):
        numpyro.sample("y", dist.Bernoulli(logits=predictors @ beta))


def mixture() -> None:
    """A mixture of two normals with a thousand rows."""
    weight = numpyro.sample("weight", dist.Beta(2.0, 2.0))
    mean = numpyro.sample("mean", dist.Normal(jnp.array([-2.0, 2.0]), 1.0).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    with numpyro.plate("rows", 1000):
        components = dist.Normal(mean, sd)
        weights = dist.Categorical(jnp.stack([weight, 1 - weight], axis=-1))
        numpyro.sample("y", dist.MixtureSameFamily(weights, components))


CASES = {
    "volatility, loop": Case(volatility_loop, tuple(f"y_{step}" for step in range(STEPS))),
    "volatility, scan": Case(volatility_scan, ("y",)),
    "hidden Markov": Case(hidden_markov, ("y",), has_gradient=False),
    "linear series, loop": Case(linear_series_loop, tuple(f"y_{t}" for t in range(STEPS))),
    "discrete network": Case(
        discrete_network, tuple(f"node_{node}_" for node in range(2, NODES, 3)), has_gradient=False
    ),
    "nested plates": Case(nested_plates, ("y",)),
    "varying intercepts": Case(varying_intercepts, ("x", "y")),
    "logistic regression": Case(logistic, ("y",)),
    "mixture": Case(mixture, ("y",)),
    "pumps": Case(models.pumps, ("t", "y")),
    "regression": Case(models.regression, ("z", "t")),
    "factorial HMM": Case(models.fhmm, ("y",), has_gradient=False),
}


def simulate(case: Case, seed: int) -> dict[str, Any]:
    """One data set from the prior predictive distribution."""
    seeded = numpyro.handlers.seed(case.model, jax.random.key(seed))
    trace = numpyro.handlers.trace(seeded).get_trace()
    return {name: np.asarray(trace[name]["value"]) for name in case.observed}
