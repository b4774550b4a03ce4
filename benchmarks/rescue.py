"""Rescue by tempering: its verdicts over many runs, and its speed against NumPyro's NUTS.

Run as `python -m benchmarks.rescue [--full]`. The first table is of the ten pumps, a hundred times
longer than in training. Both samplers are jitted and warm when the clock runs, and take turns. New
data need NUTS's warm-up anew, and our planned method before the rescue, so both are in the
clock. Effective samples are the least over all scalars: of NUTS ArviZ's, of ours (sd / standard
error)² of the mean, by how islands differ.

The second is of data sets on which importance sampling fails, with networks that have learned
little or nothing (`tests/hard.py`): how often the answer was called good, and how often one that
was called good was wrong, by more than 3 of its own standard errors + 0.1 posterior sd in any mean,
or in the evidence (+ 0.1).
"""

import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np

from benchmarks import report
from benchmarks.inferring import nuts
from benchmarks.peers import in_turn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hard import HARD, compiled_hard, wrong_of

PARTICLES, AGAINST_NUTS = 4000, 2000


def verdicts(runs: int) -> None:
    """Print how often answers are good, and how often wrong."""
    rows: list[list[object]] = []
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
                report.note(f"{name}, seed {seed}: {'; '.join(wrong)}")
            counts[4] += bool(wrong_of(found, exact, 4.0))
        total += counts
        rows.append([name, runs, *counts, report.spread(seconds)])
    rows.append(["all", runs * len(HARD), *total, ""])
    head = ["data", "runs", "good", "fair", "poor", "good and wrong", "beyond 4 errors", "seconds"]
    report.table(head, rows)
    report.target(
        "no wrong posterior is graded good", f"{total[3]} of {rows[-1][1]} runs", total[3] == 0
    )


def against_nuts(repeats: int) -> None:
    """Print seconds for 1 000 effective samples, and their ratio."""
    compiled, data = compiled_hard("pumps"), HARD["pumps"].data

    def ours(seed: int) -> tuple[float, float]:
        begun = time.perf_counter()
        found = compiled.infer(jax.random.key(seed), data, AGAINST_NUTS)
        jax.block_until_ready(found.samples)
        seconds = time.perf_counter() - begun
        sizes = [np.ravel((found.sd(s) / found.mcse(s)) ** 2) for s in found.samples]
        return seconds, float(np.concatenate(sizes).min())

    sampler = nuts(data)
    calls = {"ours": ours, "NUTS": lambda seed: sampler(seed)[3:0:-2]}
    for call in calls.values():
        call(0)
    found = {name: np.array(rows) for name, rows in in_turn(calls, repeats).items()}
    needed, lines = {}, []
    for name, rows in found.items():
        needed[name] = 1000 * rows[:, 0] / np.median(rows[:, 1])
        lines.append(
            [
                name,
                report.spread(rows[:, 0]),
                report.spread(rows[:, 1]),
                report.spread(needed[name]),
            ]
        )
    report.table(["", "seconds", "least effective samples", "seconds for 1 000 of them"], lines)
    ratio = float(np.median(needed["NUTS"]) / np.median(needed["ours"]))
    asked = "tempering on data far outside the training data at least as fast as NUTS"
    report.target(asked, f"NUTS takes {report.short(ratio)} times as long", ratio >= 1)


def main() -> None:
    """Both tables."""
    full = report.full(__doc__)
    warnings.simplefilter("ignore")
    against_nuts(6 if full else 3)
    verdicts(40 if full else 8)


if __name__ == "__main__":
    main()
