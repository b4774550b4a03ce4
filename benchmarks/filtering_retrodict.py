"""A saved compiled filter in its own process, for `benchmarks.filtering`.

The arguments are the name of a model in `benchmarks.filtering_runs`, the file of the compiled
model, and the observations as JSON. For every input line with a number of particles, a threshold
and a seed, it prints seconds and log evidence.
"""

import json
import sys
from functools import cache

import numpy as np

import retrodict as rd
from benchmarks import filtering_runs

compiled = rd.load(sys.argv[2], getattr(filtering_runs, sys.argv[1]))
observed = np.array(json.loads(sys.argv[3]))


@cache
def compiled_run(num_particles: int, threshold: float) -> filtering_runs.Run:
    """Compile the filter for a number of particles and a threshold."""
    return filtering_runs.retrodict_run(
        compiled.proposal, compiled.networks, observed, num_particles, threshold
    )


for line in sys.stdin:
    num_particles, threshold, seed = line.split()
    print(*compiled_run(int(num_particles), float(threshold))(int(seed)), flush=True)
