"""Time of sampling from flowjax's masked autoregressive flow, for `benchmarks.drawing`.

Runs in its own environment. For every input line with a number of dimensions, a number of draws and
a seed, it prints the seconds for the draws and their log densities, given one context.
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
flows = {}


@eqx.filter_jit
def draw(flow, key, number):
    """Sample, with log densities."""
    return flow.sample_and_log_prob(key, (number,), condition=context)


def build_flow(dimensions, number):
    """Build a flow and compile its sampler."""
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
    if (dimensions, number) not in flows:
        flows[dimensions, number] = build_flow(dimensions, number)
    key = jax.random.key(seed)
    start_time = time.perf_counter()
    jax.block_until_ready(draw(flows[dimensions, number], key, number))
    print(time.perf_counter() - start_time, flush=True)
