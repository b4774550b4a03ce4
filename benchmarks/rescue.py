"""Rescue by tempering: its verdicts over many runs, and its speed against NumPyro's NUTS.

Run as `python -m benchmarks.rescue`. The first table is of data sets on which importance sampling
fails, with networks that have learned little or nothing (`tests/hard.py`): how often the answer was
called good, and how often one that was called good was wrong, by more than 3 of its own standard
errors + 0.1 posterior sd in any mean, or in the evidence (+ 0.1).

The second is of the ten pumps, a hundred times longer than in training. Both samplers are jitted
and warm when the clock runs, and take turns. A new data set needs NUTS's warm-up anew, and our
planned method before the rescue, so both are in the clock. Effective samples are the least over all
scalars: of NUTS ArviZ's, of ours (sd / standard error)² of the mean, by how islands differ.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np

from benchmarks.inferring import nuts
from benchmarks.peers import in_turn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hard import HARD, compiled_hard, wrong_of

PARTICLES = 1000


def verdicts(runs: int) -> None:
    """Print how often answers are good, and how often wrong."""
    print("| data | runs | good | fair | poor | good and wrong | beyond 4 errors | median s |")
    print("| --- " + "| ---: " * 7 + "|")
    total = np.zeros(5, int)
    for name, case in HARD.items():
        exact, compiled = case.exact(), compiled_hard(name)
        counts, seconds = np.zeros(5, int), []
        for seed in range(runs):
            begun = time.perf_counter()
            found = compiled.infer(jax.random.key(seed), case.data, PARTICLES)
            seconds.append(time.perf_counter() - begun)
            counts[int(found.grade)] += 1
            wrong = wrong_of(found, exact, 3.0, 0.1)
            if wrong and found.trust == "good":
                counts[3] += 1
                print(f"{name}, seed {seed}: {'; '.join(wrong)}", file=sys.stderr)
            counts[4] += bool(wrong_of(found, exact, 4.0))
        total += counts
        cells = [name, runs, *counts, f"{np.median(seconds):.2f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print(f"| all | {runs * len(HARD)} | {' | '.join(map(str, total))} | |")


def against_nuts(repeats: int, particles: int) -> None:
    """Print seconds for 1 000 effective samples, and their ratio."""
    compiled, data = compiled_hard("pumps"), HARD["pumps"].data

    def ours(seed: int) -> tuple[float, float]:
        begun = time.perf_counter()
        found = compiled.infer(jax.random.key(seed), data, particles)
        jax.block_until_ready(found.samples)
        seconds = time.perf_counter() - begun
        sizes = [np.ravel((found.sd(s) / found.mcse(s)) ** 2) for s in found.samples]
        return seconds, float(np.concatenate(sizes).min())

    sampler = nuts(data)
    calls = {"ours": ours, "NUTS": lambda seed: sampler(seed)[3:0:-2]}
    for call in calls.values():
        call(0)
    found = {name: np.array(rows) for name, rows in in_turn(calls, repeats).items()}
    print("\n| | seconds | least effective samples | seconds for 1 000 of them |")
    print("| --- | ---: | ---: | ---: |")
    needed = {}
    for name, rows in found.items():
        seconds, size = rows[:, 0].min(), np.median(rows[:, 1])
        needed[name] = 1000 * seconds / size
        print(f"| {name} | {seconds:.3f} | {size:.0f} | {needed[name]:.3f} |")
    print(f"\nNUTS takes {needed['NUTS'] / needed['ours']:.2f} times as long as a rescue.")


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40, help="of each kind of data")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--particles", type=int, default=2000, help="against NUTS")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    against_nuts(options.repeats, options.particles)
    verdicts(options.runs)


if __name__ == "__main__":
    main()
