"""Models written as Python loops over numbered sites, each with what becomes of its loops."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

SPREADS = np.linspace(0.5, 2.0, 30).astype(np.float32)
DESIGN = jnp.asarray(np.random.default_rng(0).normal(size=(30, 2)), jnp.float32)


class LoopCase(NamedTuple):
    """A model, its observed sites, and how often a site stands for steps in time or in a plate."""

    model: Callable[..., Any]
    in_time: int
    in_plates: int

    @property
    def observed(self):
        """Sites whose names begin with y or n."""
        return [name for name in site_values(self.model) if name[0] in "yn"]


CASES: dict[str, LoopCase] = {}


def case(in_time=0, in_plates=0):
    def register(model):
        CASES[model.__name__] = LoopCase(model, in_time, in_plates)
        return model

    return register


def site_values(model, seed=0):
    """A draw of all sample sites, by NumPyro's own handlers."""
    sites = handlers.trace(handlers.seed(model, seed)).get_trace()
    return {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}


@case(in_time=2)
def first_step_has_a_prior_of_its_own(steps=6):
    x = numpyro.sample("x_0", dist.Normal(1.0, 3.0))
    numpyro.sample("y_0", dist.Normal(x, 0.3))
    for t in range(1, steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.8 * x, 0.7))
        numpyro.sample(f"y_{t}", dist.Normal(x, 0.3))


@case(in_time=2)
def starts_from_a_number(steps=6):
    x = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.9 * x, 1.0))
        numpyro.sample(f"y_{t}", dist.Normal(x, 0.7))


@case(in_time=1)
def only_the_first_step_has_parents_outside(steps=5):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    drift = numpyro.sample("drift", dist.Normal(0.0, 1.0))
    x = numpyro.sample("x_0", dist.Normal(mean, 1.0))
    for t in range(1, steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(drift * x, 1.0))
    numpyro.sample("y", dist.Normal(x, 1.0))


@case(in_time=4)
def two_steps_back(steps=7):
    drift = numpyro.sample("drift", dist.Normal(0.5, 0.2))
    x, before = 0.0, 0.0
    for t in range(steps):
        mean = drift * x - 0.2 * before
        x, before = numpyro.sample(f"x_{t}", dist.Normal(mean, 1.0)), x
        z = numpyro.sample(f"z_{t}", dist.Normal(x, 1.0))
        numpyro.sample(f"n_{t}", dist.Bernoulli(logits=z))
        numpyro.sample(f"y_{t}", dist.Normal(x, 1.0))


@case(in_time=1)
def two_steps_back_from_sites_outside(steps=6):
    """The first two steps have other names, and stay as they are."""
    x, before = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("b", "a"))
    for t in range(steps):
        x, before = numpyro.sample(f"x_{t}", dist.Normal(0.5 * x + 0.2 * before, 1.0)), x
    numpyro.sample("y", dist.Normal(x + before, 1.0))


@case(in_time=2)
def covariates(steps=9):
    """Constants of NumPy and JAX, and elements of a site, one for each step."""
    z = numpyro.sample("z", dist.Normal(jnp.zeros(steps), 1.0).to_event(1))
    w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    x = numpyro.sample("x_0", dist.Normal(1.0, 3.0))
    numpyro.sample("y_0", dist.Normal(x, 0.3))
    for t in range(1, steps):
        mean = 0.8 * x + DESIGN[t] @ w + DESIGN[t, 1] + z[t]
        x = numpyro.sample(f"x_{t}", dist.Normal(mean, 0.7))
        numpyro.sample(f"y_{t}", dist.Normal(x, SPREADS[t]))


@case(in_time=2)
def elements_of_a_plate(steps=5):
    """Taken from the last to the first, and two at a time."""
    with numpyro.plate("elements", steps + 1):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    x = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.5 * x + z[steps - 1 - t], 1.0))
        numpyro.sample(f"y_{t}", dist.Normal(x + z[t : t + 2].sum(), 1.0))


@case(in_time=2)
def running_sum(steps=6):
    """Carried in a variable of Python, and used after the loop."""
    total, x = 0.0, numpyro.sample("x_0", dist.Normal(0.0, 1.0))
    numpyro.sample("y_0", dist.Normal(x, 0.3))
    for t in range(1, steps):
        total = total + x
        x = numpyro.sample(f"x_{t}", dist.Normal(0.1 * total, 0.7))
        numpyro.sample(f"y_{t}", dist.Normal(x + total, 0.3))
    numpyro.sample("y_end", dist.Normal(total, 1.0))


@case(in_time=2)
def plates_masks_and_deterministic_sites(steps=5):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    x = jnp.zeros(3)
    for t in range(steps):
        with numpyro.plate("n", 3):
            x = numpyro.sample(f"x[{t}]", dist.Normal(mu + 0.5 * x, 1.0))
            with handlers.mask(mask=jnp.array([True, t % 2 == 0, False])):
                numpyro.sample(f"y[{t}]", dist.Normal(x, 1.0))
        numpyro.deterministic(f"d[{t}]", x.sum())
    numpyro.deterministic("after", x * 2)


@case(in_time=2)
def states(steps=6):
    table = numpyro.sample("table", dist.Dirichlet(jnp.ones((3, 3))).to_event(1))
    z = numpyro.sample("z_0", dist.Categorical(jnp.ones(3) / 3))
    numpyro.sample("y_0", dist.Normal(jnp.arange(3.0)[z], 1.0))
    for t in range(1, steps):
        z = numpyro.sample(f"z_{t}", dist.Categorical(table[z]))
        numpyro.sample(f"y_{t}", dist.Normal(jnp.arange(3.0)[z], 1.0))


@case(in_time=2)
def moving_support(steps=5):
    x = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.5 * x, 1.0))
        numpyro.sample(f"y_{t}", dist.Uniform(x - 1.0, x + 1.0))


@case(in_time=2)
def numbered_backwards(steps=6):
    x = 0.0
    for t in reversed(range(steps)):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.9 * x, 1.0))
        numpyro.sample(f"y_{t}", dist.Normal(x, 0.7))


@case(in_time=1, in_plates=1)
def one_loop_after_the_other(steps=6):
    x, values = 0.0, []
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.9 * x, 1.0))
        values.append(x)
    for t in range(steps):
        numpyro.sample(f"y_{t}", dist.Normal(values[t], 0.7))


@case(in_time=3)
def starts_from_the_end_of_another_loop(steps=5):
    """The first step alone depends on the last site of the loop before."""
    x = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.9 * x, 1.0))
    z = jnp.tanh(x)
    for t in range(steps):
        z = numpyro.sample(f"z_{t}", dist.Normal(0.5 * z if t else z, 1.0))
        numpyro.sample(f"y_{t}", dist.Normal(z, 0.7))


@case(in_time=2)
def carry_computed_for_the_observation(steps=6):
    """A result that the observation needs first, and the next step after it."""
    m = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.5 * m, 1.0))
        m = jnp.sin(x) + m
        numpyro.sample(f"y_{t}", dist.Normal(m, 0.7))


@case(in_time=2)
def scale_computed_once(steps=5):
    """Before the loop, but needed from the second step on."""
    log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 1.0))
    scale = jnp.exp(log_scale)
    x = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(x, scale if t else 1.0))
        numpyro.sample(f"y_{t}", dist.Normal(x, 1.0))


@case(in_time=2)
def ends_differently(steps=7):
    """The last step stays as it is."""
    x = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.5 * x, 1.0))
        numpyro.sample(f"y_{t}", dist.Normal(x if t < steps - 1 else jnp.tanh(x), 1.0))


@case(in_time=2)
def first_observation_looks_elsewhere(steps=6):
    """At another element than all others do."""
    z = numpyro.sample("z", dist.Normal(jnp.zeros(6), 1.0).to_event(1))
    x = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.5 * x, 1.0))
        numpyro.sample(f"y_{t}", dist.Normal(x + (z[1] if t else z[0]), 1.0))


@case(in_plates=2)
def independent_copies(copies=5):
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    for i in range(copies):
        theta = numpyro.sample(f"theta_{i}", dist.Normal(mu, SPREADS[i]))
        numpyro.deterministic(f"twice_{i}", theta * 2)
        with numpyro.plate("m", 3):
            numpyro.sample(f"y_{i}", dist.StudentT(4.0, theta, jnp.ones(3)))


@case(in_plates=1)
def copies_stacked_into_a_plate(copies=5):
    a = numpyro.sample("a", dist.Exponential(1.0))
    rates = [numpyro.sample(f"rate_{i}", dist.Gamma(1 + a, 1.0)) for i in range(copies)]
    with numpyro.plate("p", copies):
        numpyro.sample("y", dist.Poisson(jnp.stack(rates) * jnp.arange(1.0, copies + 1)))


@case(in_plates=1)
def vectors_joined(copies=4):
    """Copies with a vector each, bounds of their own, and an array made of lists."""
    parts = [numpyro.sample(f"u_{i}", dist.Uniform(jnp.zeros(2), i + 1.0)) for i in range(copies)]
    numpyro.sample("y", dist.Normal(jnp.array(parts), 1.0).to_event(2))


@case()
def copies_used_one_by_one():
    w = [numpyro.sample(f"w_{i}", dist.Normal(0.0, 1.0)) for i in range(3)]
    numpyro.sample("y", dist.Normal(w[0] + 2.0 * w[1] * w[2], 1.0))


@case()
def every_step_looks_elsewhere(steps=7):
    values = [numpyro.sample("x_0", dist.Normal(0.0, 1.0))]
    numpyro.sample("y_0", dist.Normal(values[0], 0.5))
    for t in range(1, steps):
        values.append(numpyro.sample(f"x_{t}", dist.Normal(0.5 * values[t // 2], 1.0)))
        numpyro.sample(f"y_{t}", dist.Normal(values[-1], 0.5))


@case()
def every_second_element(steps=6):
    """From another place in each step."""
    z = numpyro.sample("z", dist.Normal(jnp.zeros(6), 1.0).to_event(1))
    x = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.5 * x + z[t % 2 :: 2].sum(), 1.0))
    numpyro.sample("y", dist.Normal(x, 1.0))


@case()
def kinds_alternate(steps=6):
    x = 0.0
    for t in range(steps):
        kind = dist.Normal if t % 2 else dist.Laplace
        x = numpyro.sample(f"x_{t}", kind(0.5 * x, 1.0))
    numpyro.sample("y", dist.Normal(x, 1.0))


class Shifted(dist.Normal):
    """Keeps something that is neither a parameter nor known to NumPyro."""

    def __init__(self, loc, scale, shift):
        self.shift = shift
        super().__init__(loc, scale)

    def log_prob(self, value, intermediates=None):
        return super().log_prob(value - self.shift)


@case()
def distribution_with_more_than_parameters(steps=5):
    x = 0.0
    for t in range(steps):
        x = numpyro.sample(f"x_{t}", Shifted(0.5 * x, 1.0, 2.0))
        numpyro.sample(f"y_{t}", dist.Normal(x, 1.0))
