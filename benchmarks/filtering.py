"""How fast is a particle filter, and how long until its evidence is precise: ours and the peers'.

Run as `python -m benchmarks.filtering [--full]`. First the engine: ours, cuthbert's and that of
`particles` run the bootstrap filter of one scalar linear-Gaussian model with systematic resampling
below the same effective sample size. Ours keeps draws, weights and ancestors of all steps, and
follows every trajectory back; cuthbert keeps all steps; `particles` keeps the last.

Then what counts: the time to reach a standard deviation of 0.5, and of 0.2, in the log evidence, by
the bootstrap filter of each and by the filter that we compile. Standard deviations are measured at
several numbers of particles, and a power of that number is fitted to those that are not so large
that the filter has lost its way; times are interpolated. Compiling is not part of these times, and
is given beside them, with how training ended: where the model's densities show
p(x_t | x_{t-1}, y_t), nothing is learned.

XLA's programs use as many threads as there are cores, and in small ones to wake a thread takes
longer than what it is to do; so what uses XLA also runs in a process where it has one (`NPROC=1`).
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.filters import (
    NOISE,
    PEERS,
    STEPS,
    Problem,
    Run,
    alone,
    asked,
    bootstrap,
    compiled_alone,
    compiled_for,
    devices,
    linear,
    ours,
    started,
)
from benchmarks.peers import in_turn

PRECISE_NOISE = 0.1  # far narrower than what the model expects, so that a proposal matters
WANTED = (0.5, 0.2)
TURNS = 3  # of what is compiled, in a round: it takes little time, and all ratios hang on its own
LOST = 2.0


def engines(sizes: list[int], repeats: int) -> None:
    """The first table: the same filter by three engines."""
    problem = linear(NOISE)
    proposal, rows, ratios = bootstrap(problem), [], []
    with ExitStack() as stack:
        peers = started(stack, problem)
        for num in sizes:
            for threshold in (1.0, 0.5):
                report.note(f"bootstrap filters, {num} particles, threshold {threshold}")
                calls = {"ours": ours(proposal, {}, problem.y, num, threshold)}
                calls |= {name: asked(peer, num, threshold) for name, peer in peers.items()}
                for call in calls.values():
                    call(0)
                found = {n: np.array(rows) for n, rows in in_turn(calls, repeats).items()}
                seconds = {name: rows[:, 0] for name, rows in found.items()}
                ratio = {name: np.median(seconds[name] / seconds["ours"]) for name in PEERS}
                ratios.append(ratio)
                rate = report.short(num * STEPS / float(np.median(seconds["ours"])) / 1e6)
                rows.append(
                    [
                        f"{num}, below {threshold:g} K",
                        report.spread(seconds["ours"], 1e3),
                        rate,
                        *(report.spread(seconds[name] / seconds["ours"]) for name in PEERS),
                        *(f"{r[:, 1].mean():.2f} ± {r[:, 1].std():.2f}" for r in found.values()),
                    ]
                )
    print(f"Bootstrap filter, {STEPS} steps; the exact log evidence is {problem.exact:.3f}.")
    header = ["particles, resampled", "ours, ms", "million particle steps a second"]
    header += [f"{name} / ours" for name in PEERS]
    header += [f"log evidence: {name}" for name in ("ours", *PEERS)]
    report.table(header, rows)
    slowest = min(float(ratio["cuthbert"]) for ratio in ratios)
    report.target(
        "the bootstrap filter is at least as fast as cuthbert's",
        f"cuthbert takes {slowest:.2f} times as long in its best case",
        slowest >= 1,
    )


class Precision(NamedTuple):
    """Of one filter at one problem: particles and seconds until the evidence is precise."""

    particles: float
    seconds: float
    beyond: bool  # outside of the numbers of particles that were tried


def interpolated(sizes: list[int], runs: list[np.ndarray], sd: float) -> Precision:
    """Where the fitted power of the number of particles passes a standard deviation."""
    log_k = np.log(sizes)
    log_sd = np.log([rows[:, 1].std(ddof=1) for rows in runs])
    usable = log_sd < np.log(LOST)
    if usable.sum() < 2:
        return Precision(float("inf"), float("inf"), True)
    log_seconds = np.log([np.median(rows[:, 0]) for rows in runs])
    slope, level = np.polyfit(log_k[usable], log_sd[usable], 1)
    wanted = (np.log(sd) - level) / slope
    seconds = np.interp(wanted, log_k, log_seconds)
    if wanted > log_k[-1]:
        rise = (log_seconds[-1] - log_seconds[-2]) / (log_k[-1] - log_k[-2])
        seconds = log_seconds[-1] + rise * (wanted - log_k[-1])
    beyond = not log_k[0] <= wanted <= log_k[-1]
    return Precision(float(np.exp(wanted)), float(np.exp(seconds)), beyond)


def precise(
    title: str, problem: Problem, compiled: Any, few: list[int], blind: list[int], repeats: int
) -> dict[str, list[Precision]]:
    """A table of standard deviations and times, and what they come to."""
    proposal, rows, found = bootstrap(problem), [], {}
    with ExitStack() as stack:
        peers = started(stack, problem) | alone(stack, problem)
        makers: dict[str, tuple[list[int], Callable[[int], Run]]] = {
            "compiled": (
                few,
                lambda k: ours(compiled.proposal, compiled.networks, problem.y, k, 0.5),
            ),
            "compiled, one thread": (
                few,
                partial(asked, compiled_alone(stack, problem, compiled), threshold=0.5),
            ),
            "bootstrap, ours": (blind, lambda k: ours(proposal, {}, problem.y, k, 0.5)),
        }
        for name, peer in peers.items():
            makers[f"bootstrap, {name}"] = (blind, partial(asked, peer, threshold=0.5))
        turns = {name: TURNS if name.startswith("compiled") else 1 for name in makers}
        calls: dict[tuple[str, int, int], Run] = {}
        for name, (sizes, make) in makers.items():
            for size in sizes:
                report.note(f"{title}: {name}, {size} particles")
                call = make(size)
                call(turns[name] * repeats)
                for turn in range(turns[name]):
                    calls[name, size, turn] = lambda number, call=call, first=turn * repeats: call(
                        first + number
                    )
        report.note(f"{title}: {repeats} rounds")
        taken = in_turn(calls, repeats, 0.05)
        for name, (sizes, _) in makers.items():
            runs = [
                np.concatenate([taken[name, size, turn] for turn in range(turns[name])])
                for size in sizes
            ]
            found[name] = [interpolated(sizes, runs, sd) for sd in WANTED]
            seen = (
                f"{size}: {rows_[:, 1].std(ddof=1):.2f}, {report.spread(rows_[:, 0], 1e3)} ms"
                for size, rows_ in zip(sizes, runs, strict=True)
            )
            row = [name, "; ".join(seen)]
            for at, best in zip(found[name], found["compiled"], strict=True):
                row += [
                    f"{report.short(at.particles)}{' (extrapolated)' if at.beyond else ''}",
                    report.short(1e3 * at.seconds),
                    report.short(at.seconds / best.seconds),
                ]
            rows.append(row)
    print(f"\n### {title}: time to a standard deviation of the log evidence")
    print(
        f"\nExact log evidence {problem.exact:.3f}; {repeats} runs for each number of particles, "
        f"{TURNS * repeats} of the compiled filters."
    )
    header = ["filter", "particles: sd of log Ẑ, time"]
    for sd in WANTED:
        header += [f"sd {sd}: particles", "ms", "times compiled"]
    report.table(header, rows)
    return found


def main() -> None:
    """All tables."""
    full = report.full(__doc__)
    engines([10**4, 10**5] if full else [10**4], 15 if full else 7)
    repeats = 200 if full else 80
    problem = linear(PRECISE_NOISE)
    made = compiled_for(problem, 120 if full else 30)
    blind = [300, 1000, 3000, 10_000]
    precise("Linear-Gaussian", problem, made, [3, 10, 30, 100], blind, repeats)
    problem = devices()
    made = compiled_for(problem, 600 if full else 90, training={"batch_size": 500})
    blind = [1000, 3000, 10_000, 30_000, *([100_000] if full else [])]
    found = precise("Factorial HMM", problem, made, [20, 40, 80, 160, 320], blind, repeats)
    for name, how in {
        "compiled": "",
        "compiled, one thread": ", with XLA restricted to one thread,",
    }.items():
        verdict(name, how, found)


def verdict(own: str, how: str, found: dict[str, list[Precision]]) -> None:
    """Whether one of the compiled filters is far enough ahead of every peer's, at its best."""
    peers = {
        name.removeprefix("bootstrap, "): at
        for name, at in found.items()
        if name.startswith("bootstrap") and "ours" not in name
    }
    ratios = [
        {name: at[place].seconds / found[own][place].seconds for name, at in peers.items()}
        for place in range(len(WANTED))
    ]
    said = (
        f"for {sd:g}, {report.short(min(ratio.values()))} times as fast as "
        f"{min(ratio, key=ratio.__getitem__)}"
        for sd, ratio in zip(WANTED, ratios, strict=True)
    )
    report.target(
        f"on the factorial HMM the compiled filter{how} is at least 10 times as fast as the "
        "bootstrap filter of any peer for the same standard deviation of log Ẑ",
        "; ".join(said),
        min(min(ratio.values()) for ratio in ratios) >= 10,
    )


if __name__ == "__main__":
    main()
