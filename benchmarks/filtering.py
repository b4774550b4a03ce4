"""Speed of particle filters, and time until their evidence is precise: retrodict and its peers.

Run as `python -m benchmarks.filtering [--full]`. The first table compares implementations of the
bootstrap filter: retrodict, cuthbert and `particles` filter a scalar linear-Gaussian model with
systematic resampling below the same effective sample size. retrodict stores draws, weights and
ancestors of all steps and traces every trajectory back; cuthbert stores all steps; `particles`
stores the last one.

The other tables give the time to reach a standard deviation of 0.5, and of 0.2, in the log
evidence, for the bootstrap filter of each package and for the compiled filter. Standard deviations
are measured at several numbers of particles. A power law is fitted to those small enough that the
filter has not lost track of the state; times are interpolated. Compile times are not included, but
printed together with the reason why training stopped: where p(x_t | x_{t−1}, y_t) is recognised in
closed form, nothing is trained.

XLA uses one thread per core. In small programs waking a thread takes longer than its work, so all
methods that use XLA are also measured in a process with one thread (`NPROC=1`).
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.filtering_runs import (
    NOISE,
    PEERS,
    STEPS,
    Problem,
    Run,
    bootstrap_proposal,
    compile_problem,
    devices_problem,
    linear_problem,
    peer_run,
    retrodict_run,
    start_peers,
    start_single_threaded_compiled,
    start_single_threaded_peers,
)
from benchmarks.peers import run_interleaved

PRECISE_NOISE = 0.1  # small compared with the state's spread, so that the proposal matters
TARGET_SDS = (0.5, 0.2)
# Runs of the compiled filters in a round: they are fast, and all ratios depend on their time.
COMPILED_RUNS_PER_ROUND = 3
# Larger standard deviations are left out of the fit.
MAX_FITTED_SD = 2.0


def compare_bootstrap_filters(sizes: list[int], repeats: int) -> None:
    """Print times of the same filter by three implementations."""
    problem = linear_problem(NOISE)
    proposal, rows, cuthbert_ratios = bootstrap_proposal(problem), [], []
    with ExitStack() as stack:
        peers = start_peers(stack, problem)
        for size in sizes:
            for threshold in (1.0, 0.5):
                report.log_progress(f"bootstrap filters, {size} particles, threshold {threshold}")
                calls = {"ours": retrodict_run(proposal, {}, problem.y, size, threshold)}
                calls |= {name: peer_run(peer, size, threshold) for name, peer in peers.items()}
                for call in calls.values():
                    call(0)
                runs = {n: np.array(rows) for n, rows in run_interleaved(calls, repeats).items()}
                seconds = {name: results[:, 0] for name, results in runs.items()}
                ratios = {name: seconds[name] / seconds["ours"] for name in PEERS}
                cuthbert_ratios.append(float(np.median(ratios["cuthbert"])))
                rate = size * STEPS / float(np.median(seconds["ours"])) / 1e6
                rows.append(
                    [
                        f"{size}, below {threshold:g} K",
                        report.format_quartiles(seconds["ours"], 1e3),
                        report.format_number(rate),
                        *map(report.format_quartiles, ratios.values()),
                        *(f"{r[:, 1].mean():.2f} ± {r[:, 1].std():.2f}" for r in runs.values()),
                    ]
                )
    print(f"Bootstrap filter, {STEPS} steps; the exact log evidence is {problem.exact:.3f}.")
    header = ["particles, resampled", "ours, ms", "million particle steps a second"]
    header += [f"{name} / ours" for name in PEERS]
    header += [f"log evidence: {name}" for name in ("ours", *PEERS)]
    report.print_table(header, rows)
    report.print_target(
        "the bootstrap filter is at least as fast as cuthbert's",
        f"cuthbert takes {min(cuthbert_ratios):.2f} times as long in its best case",
        min(cuthbert_ratios) >= 1,
    )


class Precision(NamedTuple):
    """Particles and seconds that a filter needs for a standard deviation of the log evidence."""

    particles: float
    seconds: float
    extrapolated: bool  # beyond the measured numbers of particles


def interpolate_precision(sizes: list[int], runs: list[np.ndarray], sd: float) -> Precision:
    """Fit a power law of the number of particles to the standard deviations, and solve for `sd`.

    Args:
        sizes: numbers of particles.
        runs: for each size, seconds and log evidence of all runs, (runs, 2).
        sd: the target.
    """
    log_k = np.log(sizes)
    log_sd = np.log([results[:, 1].std(ddof=1) for results in runs])
    usable = log_sd < np.log(MAX_FITTED_SD)
    if usable.sum() < 2:
        return Precision(float("inf"), float("inf"), True)
    log_seconds = np.log([np.median(results[:, 0]) for results in runs])
    slope, intercept = np.polyfit(log_k[usable], log_sd[usable], 1)
    target_log_k = (np.log(sd) - intercept) / slope
    target_log_seconds = np.interp(target_log_k, log_k, log_seconds)
    if target_log_k > log_k[-1]:
        time_slope = (log_seconds[-1] - log_seconds[-2]) / (log_k[-1] - log_k[-2])
        target_log_seconds = log_seconds[-1] + time_slope * (target_log_k - log_k[-1])
    extrapolated = not log_k[0] <= target_log_k <= log_k[-1]
    return Precision(float(np.exp(target_log_k)), float(np.exp(target_log_seconds)), extrapolated)


class Filter(NamedTuple):
    """A filter to measure: its numbers of particles, and how to make a run for each of them."""

    sizes: list[int]
    make_run: Callable[[int], Run]
    runs_per_round: int = 1


def filters_for(
    stack: ExitStack,
    problem: Problem,
    compiled: Any,
    compiled_sizes: list[int],
    bootstrap_sizes: list[int],
) -> dict[str, Filter]:
    """The filters of a problem by name: two compiled ones, and all bootstrap filters."""
    peers = start_peers(stack, problem) | start_single_threaded_peers(stack, problem)
    single = start_single_threaded_compiled(stack, problem, compiled)
    proposal = bootstrap_proposal(problem)
    filters = {
        "compiled": Filter(
            compiled_sizes,
            lambda k: retrodict_run(compiled.proposal, compiled.networks, problem.y, k, 0.5),
            COMPILED_RUNS_PER_ROUND,
        ),
        "compiled, one thread": Filter(
            compiled_sizes, partial(peer_run, single, threshold=0.5), COMPILED_RUNS_PER_ROUND
        ),
        "bootstrap, ours": Filter(
            bootstrap_sizes, lambda k: retrodict_run(proposal, {}, problem.y, k, 0.5)
        ),
    }
    for name, peer in peers.items():
        run = partial(peer_run, peer, threshold=0.5)
        filters[f"bootstrap, {name}"] = Filter(bootstrap_sizes, run)
    return filters


def measure_filters(
    title: str, filters: dict[str, Filter], repeats: int
) -> dict[str, list[np.ndarray]]:
    """Run all filters in turn.

    Returns:
        Name → for each number of particles, seconds and log evidence of all runs, (runs, 2).
    """
    calls: dict[tuple[str, int, int], Run] = {}
    for name, measured in filters.items():
        for size in measured.sizes:
            report.log_progress(f"{title}: {name}, {size} particles")
            call = measured.make_run(size)
            call(measured.runs_per_round * repeats)
            for index in range(measured.runs_per_round):
                calls[name, size, index] = lambda number, call=call, first=index * repeats: call(
                    first + number
                )
    report.log_progress(f"{title}: {repeats} rounds")
    results = run_interleaved(calls, repeats, 0.05)
    return {
        name: [
            np.concatenate([results[name, size, i] for i in range(measured.runs_per_round)])
            for size in measured.sizes
        ]
        for name, measured in filters.items()
    }


def compare_precision(
    title: str,
    problem: Problem,
    compiled: Any,
    compiled_sizes: list[int],
    bootstrap_sizes: list[int],
    repeats: int,
) -> dict[str, list[Precision]]:
    """Print standard deviations and times; return each filter's precision for `TARGET_SDS`."""
    with ExitStack() as stack:
        filters = filters_for(stack, problem, compiled, compiled_sizes, bootstrap_sizes)
        runs = measure_filters(title, filters, repeats)
    precisions = {
        name: [interpolate_precision(filters[name].sizes, runs[name], sd) for sd in TARGET_SDS]
        for name in filters
    }
    rows = []
    for name, measured in filters.items():
        measurements = (
            f"{size}: {results[:, 1].std(ddof=1):.2f}, "
            f"{report.format_quartiles(results[:, 0], 1e3)} ms"
            for size, results in zip(measured.sizes, runs[name], strict=True)
        )
        row = [name, "; ".join(measurements)]
        for precision, best in zip(precisions[name], precisions["compiled"], strict=True):
            suffix = " (extrapolated)" if precision.extrapolated else ""
            row += [
                f"{report.format_number(precision.particles)}{suffix}",
                report.format_number(1e3 * precision.seconds),
                report.format_number(precision.seconds / best.seconds),
            ]
        rows.append(row)
    print(f"\n### {title}: time to a standard deviation of the log evidence")
    print(
        f"\nExact log evidence {problem.exact:.3f}; {repeats} runs for each number of particles, "
        f"{COMPILED_RUNS_PER_ROUND * repeats} of the compiled filters."
    )
    header = ["filter", "particles: sd of log Ẑ, time"]
    for sd in TARGET_SDS:
        header += [f"sd {sd}: particles", "ms", "times compiled"]
    report.print_table(header, rows)
    return precisions


def print_verdict(name: str, qualifier: str, precisions: dict[str, list[Precision]]) -> None:
    """Print whether a compiled filter reaches the target against every peer."""
    peers = {
        filter_name.removeprefix("bootstrap, "): values
        for filter_name, values in precisions.items()
        if filter_name.startswith("bootstrap") and "ours" not in filter_name
    }
    texts, smallest = [], float("inf")
    for index, sd in enumerate(TARGET_SDS):
        seconds = precisions[name][index].seconds
        ratios = {peer: values[index].seconds / seconds for peer, values in peers.items()}
        closest = min(ratios, key=ratios.__getitem__)
        smallest = min(smallest, ratios[closest])
        texts.append(
            f"for {sd:g}, {report.format_number(ratios[closest])} times as fast as {closest}"
        )
    report.print_target(
        f"on the factorial HMM the compiled filter{qualifier} is at least 10 times as fast as the "
        "bootstrap filter of any peer for the same standard deviation of log Ẑ",
        "; ".join(texts),
        smallest >= 10,
    )


def main() -> None:
    """Print all tables."""
    full = report.parse_full_flag(__doc__)
    compare_bootstrap_filters([10**4, 10**5] if full else [10**4], 15 if full else 7)
    repeats = 200 if full else 80
    problem = linear_problem(PRECISE_NOISE)
    compiled = compile_problem(problem, 120 if full else 30)
    sizes = [300, 1000, 3000, 10_000]
    compare_precision("Linear-Gaussian", problem, compiled, [3, 10, 30, 100], sizes, repeats)
    problem = devices_problem()
    compiled = compile_problem(problem, 600 if full else 90, training={"batch_size": 500})
    sizes = [1000, 3000, 10_000, 30_000, *([100_000] if full else [])]
    precisions = compare_precision(
        "Factorial HMM", problem, compiled, [20, 40, 80, 160, 320], sizes, repeats
    )
    print_verdict("compiled", "", precisions)
    qualifier = ", with XLA restricted to one thread,"
    print_verdict("compiled, one thread", qualifier, precisions)


if __name__ == "__main__":
    main()
