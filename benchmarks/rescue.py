"""Fallback by tempering: its verdicts over many runs, and its speed against NumPyro's NUTS.

Run as `python -m benchmarks.rescue [--full]`. The first table is of the ten pumps, with operating
times a hundred times longer than in training. Both samplers are compiled before they are timed, and
run in turn. The times include NUTS's warm-up, which new data require, and retrodict's planned
method, which precedes the fallback. Effective samples are the minimum over all scalars: ArviZ's for
NUTS, and (sd / standard error)² of the mean for retrodict, from the differences between islands.

The second table is of data sets on which importance sampling fails, with networks that were hardly
trained (`tests/hard.py`): how often the posterior is graded good, and how often a posterior graded
good is wrong, by more than 3 of its standard errors + 0.1 posterior sd in any mean, or in the
evidence (+ 0.1).
"""

import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np

from benchmarks import report
from benchmarks.newdata_worker import nuts_runner
from benchmarks.peers import run_interleaved

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hard import HARD, compiled_hard, discrepancies

PARTICLES, PARTICLES_AGAINST_NUTS = 4000, 2000


def count_verdicts(runs: int) -> None:
    """Print how often posteriors are graded good, and how often they are wrong."""
    rows: list[list[object]] = []
    total = np.zeros(5, int)
    for name, case in HARD.items():
        exact, compiled = case.exact(), compiled_hard(name)
        counts, seconds = np.zeros(5, int), []
        for seed in range(runs):
            start_time = time.perf_counter()
            posterior = compiled.infer(jax.random.key(seed), case.data, PARTICLES)
            seconds.append(time.perf_counter() - start_time)
            counts[int(posterior.grade)] += 1
            errors = discrepancies(posterior, exact, 3.0, 0.1)
            if errors and posterior.trust == "good":
                counts[3] += 1
                report.log_progress(f"{name}, seed {seed}: {'; '.join(errors)}")
            counts[4] += bool(discrepancies(posterior, exact, 4.0))
        total += counts
        rows.append([name, runs, *counts, report.format_quartiles(seconds)])
    rows.append(["all", runs * len(HARD), *total, ""])
    header = [
        "data",
        "runs",
        "good",
        "fair",
        "poor",
        "good and wrong",
        "beyond 4 errors",
        "seconds",
    ]
    report.print_table(header, rows)
    report.print_target(
        "no wrong posterior is graded good", f"{total[3]} of {rows[-1][1]} runs", total[3] == 0
    )


def compare_with_nuts(repeats: int) -> None:
    """Print the seconds for 1 000 effective samples of both, and their ratio."""
    compiled, data = compiled_hard("pumps"), HARD["pumps"].data

    def ours(seed: int) -> tuple[float, float]:
        start_time = time.perf_counter()
        posterior = compiled.infer(jax.random.key(seed), data, PARTICLES_AGAINST_NUTS)
        jax.block_until_ready(posterior.samples)
        seconds = time.perf_counter() - start_time
        sizes = [np.ravel((posterior.sd(s) / posterior.mcse(s)) ** 2) for s in posterior.samples]
        return seconds, float(np.concatenate(sizes).min())

    sampler = nuts_runner(data)
    calls = {"ours": ours, "NUTS": lambda seed: sampler(seed)[3:0:-2]}
    for call in calls.values():
        call(0)
    results = {name: np.array(runs) for name, runs in run_interleaved(calls, repeats).items()}
    seconds_per_1000, rows = {}, []
    for name, runs in results.items():
        seconds, ess = runs.T
        seconds_per_1000[name] = 1000 * seconds / np.median(ess)
        rows.append([name, *map(report.format_quartiles, (seconds, ess, seconds_per_1000[name]))])
    header = ["", "seconds", "least effective samples", "seconds for 1 000 of them"]
    report.print_table(header, rows)
    ratio = float(np.median(seconds_per_1000["NUTS"]) / np.median(seconds_per_1000["ours"]))
    target = "tempering on data far outside the training data at least as fast as NUTS"
    report.print_target(
        target, f"NUTS takes {report.format_number(ratio)} times as long", ratio >= 1
    )


def main() -> None:
    """Print both tables."""
    full = report.parse_full_flag(__doc__)
    warnings.simplefilter("ignore")
    compare_with_nuts(6 if full else 3)
    count_verdicts(40 if full else 8)


if __name__ == "__main__":
    main()
