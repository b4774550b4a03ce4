"""Our compiled filter, for `benchmarks.filtering`, in a process of its own.

Takes the name of a model of `benchmarks.filters`, the file it was saved to, and the
observations as JSON. Then, for every line with a number of particles, a threshold and a seed, it
writes the seconds taken and the log evidence.
"""

import json
import sys
from functools import cache

import numpy as np

import retrodict as rd
from benchmarks import filters

compiled = rd.load(sys.argv[2], getattr(filters, sys.argv[1]))
observed = np.array(json.loads(sys.argv[3]))


@cache
def made(num: int, threshold: float) -> filters.Run:
    """A function of a seed."""
    return filters.ours(compiled.proposal, compiled.networks, observed, num, threshold)


for line in sys.stdin:
    number, part, seed = line.split()
    print(*made(int(number), float(part))(int(seed)), flush=True)
