"""cuthbert's bootstrap filter, for `benchmarks.filtering`, in an environment of its own.

Takes the observations and the model's numbers as JSON; then, for every line with a number of
particles, a threshold and a seed, writes the seconds taken and the log evidence.
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


def start(key):
    """The state before the first step."""
    return jnp.zeros(())


def move(key, x, _):
    """x_t given x_{t−1}."""
    return model["drift"] * x + model["spread"] * jax.random.normal(key)


def potential(_, x, value):
    """log p(y_t | x_t)."""
    return jax.scipy.stats.norm.logpdf(value, x, model["noise"])


def compiled(num, threshold):
    """A function of a key."""
    choose = ess_decorator(systematic.resampling, threshold)
    built = particle_filter.build_filter(start, move, potential, num, choose)

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
