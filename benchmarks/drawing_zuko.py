"""zuko's masked autoregressive flow, for `benchmarks.drawing`, in an environment of its own.

For every line with a number of dimensions and of draws, writes the seconds that the draws and their
log densities took, given one context.
"""

import json
import sys
import time

import torch
import zuko

sizes = json.loads(sys.argv[1])
context = torch.linspace(-1.0, 1.0, sizes["context"])
made = {}


def draw(flow, number):
    """Draws and their log densities."""
    with torch.no_grad():
        return flow(context).rsample_and_log_prob((number,))


for line in sys.stdin:
    dimensions, number, seed = map(int, line.split())
    if dimensions not in made:
        hidden = [sizes["width"]] * sizes["depth"]
        made[dimensions] = zuko.flows.MAF(
            dimensions, sizes["context"], transforms=1, hidden_features=hidden
        )
        draw(made[dimensions], number)
    torch.manual_seed(seed)
    begun = time.perf_counter()
    draw(made[dimensions], number)
    print(time.perf_counter() - begun, flush=True)
