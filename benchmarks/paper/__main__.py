"""Run the paper's experiments in full: `python -m benchmarks.paper [name …]`.

Prints a table for each of pumps, regression and fhmm that compares the results with exact answers.
`--minutes` changes the time limit of the training.
"""

import argparse
import time
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

import retrodict as rd
from benchmarks.paper import exact, optimal_filter, reference
from retrodict.demos import fhmm as fhmm_demo
from retrodict.demos import models

MINUTES = {"pumps": 4.0, "regression": 4.0, "fhmm": 12.0}


def timed_compile(
    model: Any, observed: tuple[str, ...], minutes: float, *, batch_size: int = 256, **options: Any
) -> tuple[rd.Compiled, float]:
    """Compile a model; return it with the seconds that it took."""
    training = rd.Training(max_steps=1_000_000, max_seconds=60 * minutes, batch_size=batch_size)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = rd.compile(jax.random.key(0), model, observed, training=training, **options)
    return compiled, time.perf_counter() - start


def print_table(title: str, rows: list[tuple[str, str, str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n### {title}\n\n| | measured | target |\n| --- | ---: | ---: |")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def pumps(minutes: float) -> None:
    """Sec. 5.2: faithful inverse by importance sampling, blanket by divide and conquer."""
    answer = reference.pumps()
    t = np.array(answer["t"])
    data = {"t": t, "y": np.array(answer["y"])}
    log_density_t = float(np.sum(np.log(1 / 50) - t / 50))
    faithful, seconds = timed_compile(models.pumps, ("t", "y"), minutes, inverse="faithful")
    posterior = faithful.infer(jax.random.key(1), data, 10_000, method="importance", rescue=False)
    errors = [
        abs(float(posterior.mean(site)) - answer["mean"][n]) / answer["sd"][n]
        for n, site in enumerate(("alpha", "beta"))
    ]
    means, sds = exact.pump_rates(t, data["y"])
    errors += list(np.abs(np.asarray(posterior.mean("theta"), float) - means) / sds)
    evidence_error = abs(posterior.log_evidence - log_density_t - answer["log_evidence"])
    rows = [
        ("compile time", f"{seconds:.0f} s", "≤ 300 s"),
        ("effective of 10 000", f"{posterior.ess / 10_000:.1%}", "≥ 80 %"),
        ("error of the log evidence", f"{evidence_error:.4f}", "≤ 0.02"),
        ("largest error of a mean, in sd", f"{max(errors):.3f}", "≤ 0.05"),
    ]
    blanket, seconds = timed_compile(models.pumps, ("t", "y"), minutes / 4, inverse="blanket")
    repeated = {name: np.repeat(value[None], 50, 0) for name, value in data.items()}
    for method in ("divide", "importance"):
        runs = blanket.infer_many(jax.random.key(2), repeated, 5, method=method, rescue=False)
        log_evidences = np.asarray(runs.log_evidence) - log_density_t
        text = f"{log_evidences.mean():.2f} ± {log_evidences.std(ddof=1):.2f}"
        rows.append((f"blanket, {method}, 5 particles: log evidence", text, "−36.58"))
    print_table("Pumps", rows)


def regression(minutes: float) -> None:
    """Sec. 5.1: effective sample size over synthetic data sets, and exact answers for four."""
    compiled, seconds = timed_compile(models.regression, ("z", "t"), minutes)
    draws = jax.vmap(compiled.graph.program.simulate)(jax.random.split(jax.random.key(200), 200))
    data = {name: draws[name] for name in compiled.graph.observed}
    runs = compiled.infer_many(jax.random.key(201), data, 1000, method="importance", rescue=False)
    low, median = np.percentile(np.asarray(runs.ess) / 1000, [10, 50])
    rng = np.random.default_rng(7)
    evidence_errors, mean_errors = [], []
    for _ in range(4):
        answer = reference.simulate_regression(rng)
        dataset = {"z": np.array(answer["z"]), "t": np.array(answer["t"])}
        posterior = compiled.infer(
            jax.random.key(3), dataset, 10_000, method="importance", rescue=False
        )
        log_evidence = posterior.log_evidence + 10 * np.log(20)  # of t given z
        evidence_errors.append(abs(log_evidence - answer["log_evidence"]))
        mean_errors += [
            abs(float(posterior.mean(f"w{n}")) - answer["mean"][n]) / answer["sd"][n]
            for n in range(3)
        ]
    print_table(
        "Regression",
        [
            ("compile time", f"{seconds:.0f} s", "≤ 600 s"),
            ("effective of 1 000, median", f"{median:.1%}", "≥ 80 %"),
            ("effective of 1 000, tenth percentile", f"{low:.1%}", "≥ 45 %"),
            ("largest error of log evidence, 10 000 particles", f"{max(evidence_errors):.4f}", ""),
            ("largest error of a mean, in sd, 10 000 particles", f"{max(mean_errors):.3f}", ""),
        ],
    )


class FilterQuality(NamedTuple):
    """Quality of a proposal over repeated runs on one series.

    Attributes:
        ess: mean effective sample size.
        survivors: mean number of surviving ancestors of the first step.
        sd: standard deviation of the log evidence.
        log_ratio: log of the mean of Ẑ / Z.
    """

    ess: float
    survivors: float
    sd: float
    log_ratio: float


def filter_quality(runs: fhmm_demo.FilterRuns, log_evidence: float) -> FilterQuality:
    """Measure the quality of runs against the exact log evidence."""
    return FilterQuality(
        float(runs.ess.mean()),
        float(fhmm_demo.surviving_ancestors(runs)[:, 0].mean()),
        float(runs.log_evidence.std(ddof=1)),
        float(np.log(np.mean(np.exp(runs.log_evidence - log_evidence)))),
    )


def fhmm(minutes: float) -> None:
    """Sec. 5.3: ten series, ten runs each, with four proposals.

    "Analytic" is the default, which trains nothing; "learned" is a network, as in the paper.
    """
    analytic, analytic_seconds = timed_compile(models.fhmm, ("y",), minutes, batch_size=500)
    learned, learned_seconds = timed_compile(
        models.fhmm, ("y",), minutes, batch_size=500, estimator=rd.MADE(hidden=(300, 300, 300))
    )
    rng = np.random.default_rng(5)
    model = exact.FactorialHMM(models.POWER)
    qualities: dict[str, list[FilterQuality]] = {
        "analytic": [],
        "learned": [],
        "optimal": [],
        "bootstrap": [],
    }
    for number in range(10):
        y = reference.simulate_meter(rng)
        key, log_evidence = jax.random.key(number), model.log_evidence(y)
        optimal = [optimal_filter.run_filter(rng, model, y, 100) for _ in range(10)]
        runs_by_proposal = {
            "analytic": fhmm_demo.compiled_filter(analytic, key, y),
            "learned": fhmm_demo.compiled_filter(learned, key, y),
            "optimal": fhmm_demo.FilterRuns(*map(np.stack, zip(*optimal, strict=True))),
            "bootstrap": fhmm_demo.bootstrap_filter(analytic, key, y),
        }
        for proposal, runs in runs_by_proposal.items():
            qualities[proposal].append(filter_quality(runs, log_evidence))
    means = {proposal: FilterQuality(*np.mean(rows, 0)) for proposal, rows in qualities.items()}
    rows = [
        ("compile time, analytic", f"{analytic_seconds:.0f} s", "≤ 900 s"),
        ("compile time, learned", f"{learned_seconds:.0f} s", "≤ 900 s"),
    ]
    for proposal, mean in means.items():
        is_compiled = proposal in ("analytic", "learned")
        targets = ("≥ 92 %", "≥ 13", "≤ 0.5") if is_compiled else ("", "", "")
        fraction = mean.ess / means["optimal"].ess
        rows += [
            (f"{proposal}: mean ESS of 100", f"{mean.ess:.1f}", ""),
            (f"{proposal}: the same, as a share of optimal", f"{fraction:.1%}", targets[0]),
            (f"{proposal}: surviving ancestors of step 1", f"{mean.survivors:.1f}", targets[1]),
            (f"{proposal}: sd of the log evidence", f"{mean.sd:.2f}", targets[2]),
        ]
        if is_compiled:
            rows.append((f"{proposal}: log of the mean of Ẑ/Z", f"{mean.log_ratio:.3f}", ""))
    print_table("Factorial HMM", rows)


EXPERIMENTS = {"pumps": pumps, "regression": regression, "fhmm": fhmm}


def main() -> None:
    """Run the experiments named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(EXPERIMENTS), metavar="name")
    parser.add_argument("--minutes", type=float, default=None)
    options = parser.parse_args()
    for name in options.names:
        EXPERIMENTS[name](options.minutes or MINUTES[name])


if __name__ == "__main__":
    main()
