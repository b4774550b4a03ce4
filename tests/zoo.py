"""Small models of many kinds, as users would write them.

Each `Case` holds the edges of the unrolled graph, written by hand from the model's text.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.reparam import LocScaleReparam

Edges = set[tuple[str, str]]


@dataclass(frozen=True)
class Case:
    model: Callable[..., Any]
    observed: tuple[str, ...]
    edges: Edges
    kwargs: dict[str, Any] = field(default_factory=dict)


def into(child: str, parents: Iterable[str]) -> Edges:
    return {(parent, child) for parent in parents}


CASES: dict[str, Case] = {}


def case(observed: Iterable[str], edges: Iterable[Edges], **kwargs: Any) -> Callable[..., Any]:
    def register(model: Callable[..., Any]) -> Callable[..., Any]:
        CASES[model.__name__] = Case(model, tuple(observed), set().union(*edges), kwargs)
        return model

    return register


@case(["t", "y"], (into(f"theta[{n}]", ["alpha", "beta"]) | into(f"y[{n}]", [f"theta[{n}]", f"t[{n}]"]) for n in range(3)), n=3)  # fmt: skip  # noqa: E501
def pumps(t=None, y=None, n=10):
    alpha = numpyro.sample("alpha", dist.Exponential(1.0))
    beta = numpyro.sample("beta", dist.Gamma(0.1, 1.0))
    with numpyro.plate("pumps", n):
        t = numpyro.sample("t", dist.Exponential(1 / 50), obs=t)
        theta = numpyro.sample("theta", dist.Gamma(alpha, beta))
        numpyro.sample("y", dist.Poisson(theta * t), obs=y)


@case(["y"], (into(f"theta_{n}", ["alpha", "beta"]) | into(f"y[{n}]", [f"theta_{n}"]) for n in range(3)))  # fmt: skip  # noqa: E501
def pumps_loop_then_plate():
    """A Python loop of latents, stacked into a plate of observations; t is a constant."""
    alpha = numpyro.sample("alpha", dist.Exponential(1.0))
    beta = numpyro.sample("beta", dist.Gamma(0.1, 1.0))
    theta = jnp.stack([numpyro.sample(f"theta_{n}", dist.Gamma(alpha, beta)) for n in range(3)])
    with numpyro.plate("pumps", 3):
        numpyro.sample("y", dist.Poisson(theta * jnp.array([94.3, 15.7, 62.9])))


def _curve(w0, w1, w2, z):
    return w0 + w1 * z + w2 * z**2


@case(["z", "t"], (into(f"t[{n}]", ["w0", "w1", "w2", f"z[{n}]"]) for n in range(4)), n=4)
def regression(t=None, z=None, n=10):
    w0 = numpyro.sample("w0", dist.Laplace(0, 10.0))
    w1 = numpyro.sample("w1", dist.Laplace(0, 1.0))
    w2 = numpyro.sample("w2", dist.Laplace(0, 0.1))
    with numpyro.plate("N", n):
        z = numpyro.sample("z", dist.Uniform(-10, 10), obs=z)
        numpyro.sample("t", dist.StudentT(4.0, _curve(w0, w1, w2, z), 1.0), obs=t)


@case(["z", "t"], (into(f"t[{n}]", ["w", f"z[{n}]"]) for n in range(4)), n=4)
def regression_vector(t=None, z=None, n=10):
    w = numpyro.sample("w", dist.Laplace(0, jnp.array([10.0, 1.0, 0.1])))
    with numpyro.plate("N", n):
        z = numpyro.sample("z", dist.Uniform(-10, 10), obs=z)
        numpyro.sample("t", dist.StudentT(4.0, _curve(*w, z), 1.0), obs=t)


@case(["z", "t"], (into(f"t[{n}]", ["w", f"z[{n}]"]) for n in range(4)), n=4)
def regression_event(t=None, z=None, n=10):
    scales = jnp.array([10.0, 1.0, 0.1])
    w = numpyro.sample("w", dist.Laplace(jnp.zeros(3), scales).to_event(1))
    with numpyro.plate("N", n):
        z = numpyro.sample("z", dist.Uniform(-10, 10), obs=z)
        design = jnp.stack([jnp.ones_like(z), z, z**2], -1)
        numpyro.sample("t", dist.StudentT(4.0, design @ w, 1.0), obs=t)


@case(["y"], (
    into(f"y[{t}]", [f"x[{t},{d}]" for d in range(3)])
    | (into(f"x[{t},{d}]", [f"x[{t - 1},{d}]"]) if t else set())
    for t, d in product(range(4), range(3))
), steps=4, devices=3)  # fmt: skip
def fhmm_scan(y=None, steps=4, devices=3):
    power = jnp.arange(1.0, devices + 1) * 10

    def step(on, y_t):
        with numpyro.plate("devices", devices):
            x = numpyro.sample("x", dist.Bernoulli(on))
        numpyro.sample("y", dist.Normal((power * x).sum(), 20.0), obs=y_t)
        return jnp.where(x == 1, 0.95, 0.05), None

    scan(step, jnp.full(devices, 0.1), y, length=steps)


@case(["y"], (
    into(f"y[{t}]", [f"x[{t}]"]) | (into(f"x[{t}]", [f"x[{t - 1}]"]) if t else set())
    for t in range(4)
))  # fmt: skip
def fhmm_scan_vector():
    def step(x, _):
        x = numpyro.sample("x", dist.Bernoulli(jnp.where(x == 1, 0.95, 0.05)).to_event(1))
        numpyro.sample("y", dist.Normal(x @ jnp.arange(1.0, 4.0), 20.0))
        return x, None

    scan(step, jnp.zeros(3, int), None, length=4)


@case(["y_0", "y_1", "y_2", "y_3"], (
    into(f"y_{t}", [f"x_{t}"]) | (into(f"x_{t}", [f"x_{t - 1}"]) if t else set())
    for t in range(4)
))  # fmt: skip
def fhmm_loop():
    on = jnp.full(3, 0.1)
    for t in range(4):
        x = numpyro.sample(f"x_{t}", dist.Bernoulli(on).to_event(1))
        numpyro.sample(f"y_{t}", dist.Normal((jnp.arange(1.0, 4.0) * x).sum(), 20.0))
        on = jnp.where(x == 1, 0.95, 0.05)


@case(["y_0", "y_1", "y_2", "y_3"], (
    into(f"y_{t}", [f"x{d}_{t}"]) | (into(f"x{d}_{t}", [f"x{d}_{t - 1}"]) if t else set())
    for t, d in product(range(4), range(3))
))  # fmt: skip
def fhmm_loop_scalars():
    on = [0.1] * 3
    for t in range(4):
        x = [numpyro.sample(f"x{d}_{t}", dist.Bernoulli(on[d])) for d in range(3)]
        numpyro.sample(f"y_{t}", dist.Normal(sum((d + 1) * x[d] for d in range(3)), 20.0))
        on = [jnp.where(v == 1, 0.95, 0.05) for v in x]


SIGMA = np.array([15.0, 10.0, 16.0, 11.0])


@case(["y"], (into(f"theta[{j}]", ["mu", "tau"]) | into(f"y[{j}]", [f"theta[{j}]"]) for j in range(4)))  # fmt: skip  # noqa: E501
def eight_schools(y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(SIGMA)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, SIGMA), obs=y)


NON_CENTRED = [into(f"y[{j}]", ["mu", "tau", f"theta_decentered[{j}]"]) for j in range(4)]


@case(["y"], NON_CENTRED)
def eight_schools_reparam(y=None):
    with handlers.reparam(config={"theta": LocScaleReparam(centered=0.0)}):
        eight_schools(y)


@case(["y"], (into(f"y[{j}]", ["mu", "tau", f"eta[{j}]"]) for j in range(4)))
def eight_schools_non_centred(y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(SIGMA)):
        eta = numpyro.sample("eta", dist.Normal())
        theta = numpyro.deterministic("theta", mu + tau * eta)
        numpyro.sample("y", dist.Normal(theta, SIGMA), obs=y)


@case(["y"], (
    into(f"a[{s}]", ["mu", "tau"]) | into(f"y[{p},{s}]", [f"a[{s}]", "sigma"])
    for s, p in product(range(3), range(2))
))  # fmt: skip
def nested():
    """Two nested plates; the inner one takes the axis to the left."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("schools", 3):
        a = numpyro.sample("a", dist.Normal(mu, tau))
        with numpyro.plate("pupils", 2):
            numpyro.sample("y", dist.Normal(a, sigma))


@case(["y"], (
    into(f"a[{s}]", ["mu"]) | into(f"b[{p}]", ["mu"]) | into(f"y[{s},{p}]", [f"a[{s}]", f"b[{p}]"])
    for s, p in product(range(3), range(2))
))  # fmt: skip
def crossed():
    """Two crossed plates with explicit dims."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    rows = numpyro.plate("rows", 3, dim=-2)
    columns = numpyro.plate("columns", 2, dim=-1)
    with rows:
        a = numpyro.sample("a", dist.Normal(mu, 1))
    with columns:
        b = numpyro.sample("b", dist.Normal(mu, 1))
    with rows, columns:
        numpyro.sample("y", dist.Normal(a + b, 1))


GROUP = np.array([0, 0, 1, 2, 2])


@case(["y"], (
    into(f"a[{GROUP[n]}]", ["mu", "tau"]) | into(f"y[{n}]", [f"a[{GROUP[n]}]", "b", "sigma"])
    for n in range(5)
))  # fmt: skip
def varying_intercept(x=np.linspace(-1, 1, 5), group=GROUP):  # noqa: B008
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(mu, tau))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(a[group] + b * x, sigma))


@case(["y"], (
    into(f"y[{n}]", [f"a[{GROUP[n]}]", f"b[{(0, 1, 0, 1, 1)[n]}]"]) for n in range(5)
))  # fmt: skip
def crossed_groups():
    with numpyro.plate("a plate", 3):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("b plate", 2):
        b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("data", 5):
        numpyro.sample("y", dist.Normal(a[GROUP] + b[jnp.array([0, 1, 0, 1, 1])], 1))


@case(["y"], (
    {("phi", f"x[{t}]"), (f"x[{t}]", f"y[{t}]"), ("sigma", f"x[{t}]")}
    | ({(f"x[{t - 1}]", f"x[{t}]")} if t > 0 else {("x0", "x[0]")})
    | ({(f"x[{t - 2}]", f"x[{t}]")} if t > 1 else set())
    | ({("x0", "x[1]")} if t == 1 else set())
    | ({("x1", "x[0]")} if t == 0 else set())
    for t in range(5)
))  # fmt: skip
def ar2(steps=5):
    phi = numpyro.sample("phi", dist.Normal(0, 0.3).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    last = numpyro.sample("x0", dist.Normal(0, 1))
    before = numpyro.sample("x1", dist.Normal(0, 1))

    def step(carry, _):
        x = numpyro.sample("x", dist.Normal(phi[0] * carry["last"] + phi[1] * carry["before"], sigma))  # fmt: skip  # noqa: E501
        numpyro.sample("y", dist.Normal(x, 0.5))
        return {"last": x, "before": carry["last"]}, x

    scan(step, {"last": last, "before": before}, None, length=steps)


@case(["y"], (
    into(f"h[{t}]", ["mu", "phi", "sigma"]) | {(f"h[{t}]", f"y[{t}]")}
    | ({(f"h[{t - 1}]", f"h[{t}]")} if t else set())
    for t in range(5)
))  # fmt: skip
def stochastic_volatility(y=None, steps=5):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    phi = numpyro.sample("phi", dist.Uniform(-1, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))

    def step(h, y_t):
        h = numpyro.sample("h", dist.Normal(mu + phi * (h - mu), sigma))
        numpyro.sample("y", dist.Normal(0, jnp.exp(h / 2)), obs=y_t)
        return h, None

    scan(step, mu, y, length=steps)


@case(["xray", "dyspnoea"], [
    into("tuberculosis", ["asia"]), into("cancer", ["smoking"]), into("bronchitis", ["smoking"]),
    into("either", ["tuberculosis", "cancer"]), into("xray", ["either"]),
    into("dyspnoea", ["either", "bronchitis"]),
])  # fmt: skip
def discrete_network():
    asia = numpyro.sample("asia", dist.Bernoulli(0.01))
    smoking = numpyro.sample("smoking", dist.Bernoulli(0.5))
    tuberculosis = numpyro.sample("tuberculosis", dist.Bernoulli(jnp.where(asia == 1, 0.05, 0.01)))
    cancer = numpyro.sample("cancer", dist.Bernoulli(jnp.where(smoking == 1, 0.1, 0.01)))
    bronchitis = numpyro.sample("bronchitis", dist.Bernoulli(jnp.where(smoking == 1, 0.6, 0.3)))
    ill = jnp.maximum(tuberculosis, cancer)
    either = numpyro.sample("either", dist.Bernoulli(jnp.where(ill == 1, 0.99, 0.01)))
    numpyro.sample("xray", dist.Bernoulli(jnp.where(either == 1, 0.98, 0.05)))
    table = jnp.array([[0.1, 0.8], [0.7, 0.9]])
    numpyro.sample("dyspnoea", dist.Bernoulli(table[either, bronchitis]))


@case(["shifted", "summed", "rolled", "reversed", "prefix", "first"], [
    *(into(f"shifted[{n}]", [f"x[{n - 1}]"] if n else ["w[2]"]) for n in range(4)),
    into("summed", [f"x[{m}]" for m in range(4)]),
    *(into(f"rolled[{n}]", [f"x[{(n - 1) % 4}]"]) for n in range(4)),
    *(into(f"reversed[{n}]", [f"x[{3 - n}]"]) for n in range(4)),
    *(into(f"prefix[{n}]", [f"x[{m}]" for m in range(n + 1)]) for n in range(4)),
    *(into(f"first[{n}]", ["x[0]"]) for n in range(4)),
])  # fmt: skip
def misaligned_plate():
    """All sites share one plate, but hardly any element depends on the same element."""
    plate = numpyro.plate("n", 4)
    with plate:
        x = numpyro.sample("x", dist.Normal(0, 1))
        w = numpyro.sample("w", dist.Normal(0, 1))
        numpyro.sample("shifted", dist.Normal(jnp.concatenate([w[2:3], x[:-1]]), 1))
        numpyro.sample("rolled", dist.Normal(jnp.roll(x, 1), 1))
        numpyro.sample("reversed", dist.Normal(x[::-1], 1))
        numpyro.sample("prefix", dist.Normal(jnp.cumsum(x), 1))
        numpyro.sample("first", dist.Normal(x[0], 1))
    numpyro.sample("summed", dist.Normal(x.sum(), 1))


@case(["y"], (
    into(f"y[{n}]", ["weights", f"z[{n}]", "mu[0]", "mu[1]"]) - {("weights", f"y[{n}]")}
    | into(f"z[{n}]", ["weights"])
    for n in range(3)
))  # fmt: skip
def mixture_with_indicators():
    """A latent index selects an element of a plate."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("components", 2):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
    with numpyro.plate("data", 3):
        z = numpyro.sample("z", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(mu[z], 1))


@case(["y"], (into(f"y[{n}]", ["weights", "mu"]) for n in range(3)))
def mixture_collapsed():
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    ordered = dist.TransformedDistribution(
        dist.Normal(0, 1).expand([2]).to_event(1), dist.transforms.OrderedTransform()
    )
    mu = numpyro.sample("mu", ordered)
    with numpyro.plate("data", 3):
        mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(mu, 1))
        numpyro.sample("y", mixture)


@case(["y"], [into("y[0]", ["scale", "corr", "mu"]), into("y[1]", ["scale", "corr", "mu"])])
def covariance():
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([3]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfCauchy(jnp.ones(3)).to_event(1))
    corr = numpyro.sample("corr", dist.LKJCholesky(3, 2.0))
    with numpyro.plate("data", 2):
        numpyro.sample("y", dist.MultivariateNormal(mu, scale_tril=scale[:, None] * corr))


@case(["y", "total"], (
    {(f"x[{t}]", f"y[{t}]"), (f"x[{t}]", "total"), ("x[0]", "total")}
    | {(f"x[{s}]", f"x[{t}]") for s in range(t)}
    for t in range(4)
))  # fmt: skip
def running_sum():
    """The carry accumulates and is used after the scan."""

    def step(carry, _):
        x = numpyro.sample("x", dist.Normal(0.1 * carry, 1))
        numpyro.sample("y", dist.Normal(x, 1))
        return carry + x, x

    final, _ = scan(step, 0.0, None, length=4)
    numpyro.sample("total", dist.Normal(final, 1))


@case(["y"], (
    {(f"x[{t}]", f"y[{t}]"), ("rate", f"x[{t}]")}
    | ({(f"x[{t + 1}]", f"x[{t}]")} if t < 3 else set())
    for t in range(4)
))  # fmt: skip
def backward_scan():
    rate = numpyro.sample("rate", dist.Beta(2, 2))

    def step(x, scale):
        x = numpyro.sample("x", dist.Normal(rate * x, scale))
        numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    scan(step, 0.0, jnp.linspace(1.0, 2.0, 4), reverse=True)


@case(["y"], (
    ({(f"x[{t - 1}]", f"x[{t}]")} if t else {("x_init", "x[0]")}) | {(f"x[{t}]", f"y[{t}]")}
    for t in range(4)
))  # fmt: skip
def observed_after_scan():
    """Latents in a scan; observations in a plate over the same steps, outside the scan."""
    x_init = numpyro.sample("x_init", dist.Normal(0, 1))

    def step(x, _):
        x = numpyro.sample("x", dist.Normal(x, 1))
        return x, x

    _, x = scan(step, x_init, None, length=4)
    with numpyro.plate("times", 4):
        numpyro.sample("y", dist.Normal(x, 1))


@case(["y"], [into("width", ["high"]), into("y[0]", ["width"]), into("y[1]", ["width"])])
def moving_support():
    """Supports whose bounds are other sites."""
    high = numpyro.sample("high", dist.Gamma(2.0, 1.0))
    width = numpyro.sample("width", dist.Uniform(0.0, high))
    with numpyro.plate("data", 2):
        numpyro.sample("y", dist.Uniform(0.0, width))


@case(["y_observed", "n"], [
    into("y_observed[0]", ["mu"]), into("y_observed[1]", ["mu"]), into("n", ["size", "p"]),
    into("y_unobserved[0]", ["mu"]), into("y_unobserved[1]", ["mu"]),
])  # fmt: skip
def masks_and_counts():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    size = numpyro.sample("size", dist.Poisson(5.0))
    p = numpyro.sample("p", dist.Beta(1, 1))
    numpyro.sample("fixed", dist.Delta(3.0))
    with numpyro.plate("data", 2), handlers.mask(mask=jnp.array([True, True])):
        numpyro.sample("y", dist.Normal(mu, 1), obs_mask=jnp.array([True, False]))
    numpyro.sample("n", dist.Binomial(size, p))


def key(number: int = 0) -> jax.Array:
    return jax.random.key(number)
