"""The models of Paige & Wood (2016), sec. 5, in plain NumPyro."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan


def pumps(t: Any = None, y: Any = None, n: int = 10) -> None:
    """Failures y of n pumps in t thousand hours each; the rates theta share a gamma prior."""
    alpha = numpyro.sample("alpha", dist.Exponential(1.0))
    beta = numpyro.sample("beta", dist.Gamma(0.1, 1.0))
    with numpyro.plate("pumps", n):
        t = numpyro.sample("t", dist.Exponential(1 / 50), obs=t)
        theta = numpyro.sample("theta", dist.Gamma(alpha, beta))
        numpyro.sample("y", dist.Poisson(theta * t), obs=y)


def regression(t: Any = None, z: Any = None, n: int = 10) -> None:
    """Quadratic regression with Laplace priors on the weights and Student-t noise."""
    w0 = numpyro.sample("w0", dist.Laplace(0, 10.0))
    w1 = numpyro.sample("w1", dist.Laplace(0, 1.0))
    w2 = numpyro.sample("w2", dist.Laplace(0, 0.1))
    with numpyro.plate("points", n):
        z = numpyro.sample("z", dist.Uniform(-10, 10), obs=z)
        numpyro.sample("t", dist.StudentT(4.0, w0 + w1 * z + w2 * z**2, 1.0), obs=t)


# Power of each device in watts: multiples of 10 from 30 to 500, in random order.
POWER = np.random.default_rng(0).permutation(np.round(np.linspace(3, 50, 20)) * 10)


def fhmm(y: Any = None, steps: int = 30) -> None:
    """Devices that switch on and off; only their noisy total power is observed."""

    def step(on: Any, y_t: Any) -> tuple[Any, None]:
        with numpyro.plate("devices", len(POWER)):
            x = numpyro.sample("x", dist.Bernoulli(on))
        numpyro.sample("y", dist.Normal(jnp.sum(POWER * x), 20.0), obs=y_t)
        return jnp.where(x == 1, 0.95, 0.05), None

    scan(step, jnp.full(len(POWER), 0.1), y, length=steps)
