"""cuthbert's bootstrap filter, for `benchmarks.filtering`.

Runs in its own environment. The argument is a JSON object with the observations and the model's
parameters: a factorial HMM if it has `power`, else a scalar linear-Gaussian model. For every input
line with a number of particles, a threshold and a seed, it prints seconds and log evidence.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
from cuthbert import filter as run_filter
from cuthbert.smc import particle_filter
from cuthbertlib.resampling import systematic
from cuthbertlib.resampling.adaptive import ess_decorator

model = json.loads(sys.argv[1])
y = jnp.asarray(model["y"])


def linear_initial(key):
    """State before the first step."""
    return jnp.zeros(())


def linear_propagate(key, x, _):
    """Sample x_t given x_{t−1}."""
    return model["drift"] * x + model["spread"] * jax.random.normal(key)


def linear_potential(_, x, y_t):
    """log p(y_t | x_t)."""
    return jax.scipy.stats.norm.logpdf(y_t, x, model["noise"])


def devices_initial(key):
    """Probability that each device is on at the first step."""
    return jnp.full(len(model["power"]), model["initial"])


def devices_propagate(key, chance_on, _):
    """Sample x_t; return the probability of x_{t+1} = 1, which determines x_t."""
    x = jax.random.bernoulli(key, chance_on)
    return jnp.where(x, 1 - model["switch"], model["switch"])


def devices_potential(_, chance_on, y_t):
    """log p(y_t | x_t)."""
    total = jnp.sum(jnp.where(chance_on > 0.5, jnp.asarray(model["power"]), 0.0))
    return jax.scipy.stats.norm.logpdf(y_t, total, model["noise"])


LINEAR = (linear_initial, linear_propagate, linear_potential)
DEVICES = (devices_initial, devices_propagate, devices_potential)


def build_filter(num_particles, threshold):
    """Compile the filter, a function of a key."""
    resampling = ess_decorator(systematic.resampling, threshold)
    model_functions = DEVICES if "power" in model else LINEAR
    bootstrap = particle_filter.build_filter(*model_functions, num_particles, resampling)

    @jax.jit
    def run(key):
        first, rest = jax.random.split(key)
        return run_filter(bootstrap, y, bootstrap.init_prepare(key=first), key=rest)

    jax.block_until_ready(run(jax.random.key(0)))
    return run


filters = {}
for line in sys.stdin:
    num_particles, threshold, seed = line.split()
    setting = int(num_particles), float(threshold)
    if setting not in filters:
        filters[setting] = build_filter(*setting)
    key = jax.random.key(int(seed))
    start_time = time.perf_counter()
    states = jax.block_until_ready(filters[setting](key))
    print(time.perf_counter() - start_time, float(states.log_normalizing_constant[-1]), flush=True)
