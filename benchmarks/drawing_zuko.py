"""Time of sampling from zuko's masked autoregressive flow, for `benchmarks.drawing`.

Runs in its own environment. For every input line with a number of dimensions, a number of draws and
a seed, it prints the seconds for the draws and their log densities, given one context.
"""

import json
import sys
import time

import torch
import zuko

sizes = json.loads(sys.argv[1])
context = torch.linspace(-1.0, 1.0, sizes["context"])
flows = {}


def draw(flow, number):
    """Sample, with log densities."""
    with torch.no_grad():
        return flow(context).rsample_and_log_prob((number,))


for line in sys.stdin:
    dimensions, number, seed = map(int, line.split())
    if dimensions not in flows:
        hidden = [sizes["width"]] * sizes["depth"]
        flows[dimensions] = zuko.flows.MAF(
            dimensions, sizes["context"], transforms=1, hidden_features=hidden
        )
        draw(flows[dimensions], number)
    torch.manual_seed(seed)
    start_time = time.perf_counter()
    draw(flows[dimensions], number)
    print(time.perf_counter() - start_time, flush=True)
