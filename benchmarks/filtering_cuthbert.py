"""cuthbert's bootstrap filter, for `benchmarks.filtering`, in an environment of its own.

Takes the observations and the model's numbers as JSON: a factorial HMM if there are powers among
them, else a scalar linear-Gaussian model. Then, for every line with a number of particles, a
threshold and a seed, it writes the seconds taken and the log evidence.
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


def linear_start(key):
    """The state before the first step."""
    return jnp.zeros(())


def linear_move(key, x, _):
    """x_t given x_{t−1}."""
    return model["drift"] * x + model["spread"] * jax.random.normal(key)


def linear_potential(_, x, value):
    """log p(y_t | x_t)."""
    return jax.scipy.stats.norm.logpdf(value, x, model["noise"])


def devices_start(key):
    """Chances to be on at the first step, for each device."""
    return jnp.full(len(model["power"]), model["initial"])


def devices_move(key, on, _):
    """Chances to be on after the step, which tell the devices' states."""
    x = jax.random.bernoulli(key, on)
    return jnp.where(x, 1 - model["switch"], model["switch"])


def devices_potential(_, on, value):
    """log p(y_t | x_t)."""
    total = jnp.sum(jnp.where(on > 0.5, jnp.asarray(model["power"]), 0.0))
    return jax.scipy.stats.norm.logpdf(value, total, model["noise"])


LINEAR = (linear_start, linear_move, linear_potential)
DEVICES = (devices_start, devices_move, devices_potential)


def compiled(num, threshold):
    """A function of a key."""
    choose = ess_decorator(systematic.resampling, threshold)
    parts = DEVICES if "power" in model else LINEAR
    built = particle_filter.build_filter(*parts, num, choose)

    @jax.jit
    def run(key):
        first, rest = jax.random.split(key)
        return run_filter(built, y, built.init_prepare(key=first), key=rest)

    jax.block_until_ready(run(jax.random.key(0)))
    return run


made = {}
for line in sys.stdin:
    num, threshold, seed = line.split()
    setting = int(num), float(threshold)
    if setting not in made:
        made[setting] = compiled(*setting)
    key = jax.random.key(int(seed))
    begun = time.perf_counter()
    states = jax.block_until_ready(made[setting](key))
    print(time.perf_counter() - begun, float(states.log_normalizing_constant[-1]), flush=True)
