"""flowjax's masked autoregressive flow, for `benchmarks.drawing`, in an environment of its own.

For every line with a number of dimensions and of draws, writes the seconds that the draws and their
log densities took, given one context.
"""

import json
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow

sizes = json.loads(sys.argv[1])
context = jnp.linspace(-1.0, 1.0, sizes["context"])
made = {}


@eqx.filter_jit
def draw(flow, key, number):
    """Draws and their log densities."""
    return flow.sample_and_log_prob(key, (number,), condition=context)


def compiled(dimensions, number):
    """A function of a key."""
    flow = masked_autoregressive_flow(
        jax.random.key(0),
        base_dist=Normal(jnp.zeros(dimensions)),
        cond_dim=sizes["context"],
        flow_layers=1,
        nn_width=sizes["width"],
        nn_depth=sizes["depth"],
    )
    jax.block_until_ready(draw(flow, jax.random.key(0), number))
    return flow


for line in sys.stdin:
    dimensions, number, seed = map(int, line.split())
    if (dimensions, number) not in made:
        made[dimensions, number] = compiled(dimensions, number)
    key = jax.random.key(seed)
    begun = time.perf_counter()
    jax.block_until_ready(draw(made[dimensions, number], key, number))
    print(time.perf_counter() - begun, flush=True)
