"""The paper's experiments in full, against exact answers: `python -m benchmarks.paper [name …]`.

Prints a table for each of pumps, regression and fhmm; `--minutes` shortens or lengthens training.
"""

import argparse
import time
import warnings
from typing import Any

import jax
import numpy as np

import retrodict as rd
from benchmarks.paper import bound, exact, reference
from retrodict.demos import fhmm as fhmm_demo
from retrodict.demos import models

MINUTES = {"pumps": 4.0, "regression": 4.0, "fhmm": 12.0}


def compiled(model: Any, observed: tuple[str, ...], minutes: float, **options: Any) -> Any:
    """The compiled model, and how long it took."""
    steps = {"max_steps": 1_000_000, **options.pop("steps", {})}
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = rd.Training(max_seconds=60 * minutes, **steps)
        found = rd.compile(jax.random.key(0), model, observed, training=training, **options)
    return found, time.perf_counter() - begun


def show(title: str, rows: list[tuple[str, str, str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n### {title}\n\n| | found | asked for |\n| --- | ---: | ---: |")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def pumps(minutes: float) -> None:
    """Sec. 5.2: faithful by importance sampling, blanket by divide and conquer."""
    known = reference.pumps()
    t = np.array(known["t"])
    data = {"t": t, "y": np.array(known["y"])}
    of_times = float(np.sum(np.log(1 / 50) - t / 50))
    faithful, seconds = compiled(models.pumps, ("t", "y"), minutes, inverse="faithful")
    found = faithful.infer(jax.random.key(1), data, 10_000, method="importance", rescue=False)
    off = [
        abs(float(found.mean(name)) - known["mean"][n]) / known["sd"][n]
        for n, name in enumerate(("alpha", "beta"))
    ]
    means, sds = exact.rates(t, data["y"])
    off += list(np.abs(np.asarray(found.mean("theta"), float) - means) / sds)
    error = abs(found.log_evidence - of_times - known["log_evidence"])
    rows = [
        ("compiled in", f"{seconds:.0f} s", "≤ 300 s"),
        ("effective of 10 000", f"{found.ess / 10_000:.1%}", "≥ 80 %"),
        ("error of the log evidence", f"{error:.4f}", "≤ 0.02"),
        ("worst mean, in sd", f"{max(off):.3f}", "≤ 0.05"),
    ]
    blanket, seconds = compiled(models.pumps, ("t", "y"), minutes / 4, inverse="blanket")
    many = {name: np.repeat(value[None], 50, 0) for name, value in data.items()}
    for method in ("divide", "importance"):
        runs = blanket.infer_many(jax.random.key(2), many, 5, method=method, rescue=False)
        values = np.asarray(runs.log_evidence) - of_times
        text = f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"
        rows.append((f"blanket, {method}, 5 particles: log evidence", text, "−36.58"))
    show("Pumps", rows)


def regression(minutes: float) -> None:
    """Sec. 5.1: effective sample size over synthetic data sets, and exact answers for four."""
    made, seconds = compiled(models.regression, ("z", "t"), minutes)
    draws = jax.vmap(made.graph.program.simulate)(jax.random.split(jax.random.key(200), 200))
    data = {name: draws[name] for name in made.graph.observed}
    runs = made.infer_many(jax.random.key(201), data, 1000, method="importance", rescue=False)
    low, median = np.percentile(np.asarray(runs.ess) / 1000, [10, 50])
    rng = np.random.default_rng(7)
    errors, off = [], []
    for _ in range(4):
        known = reference.curves(rng)
        one = {"z": np.array(known["z"]), "t": np.array(known["t"])}
        found = made.infer(jax.random.key(3), one, 10_000, method="importance", rescue=False)
        errors.append(abs(found.log_evidence + 10 * np.log(20) - known["log_evidence"]))
        off += [
            abs(float(found.mean(f"w{n}")) - known["mean"][n]) / known["sd"][n] for n in range(3)
        ]
    show(
        "Regression",
        [
            ("compiled in", f"{seconds:.0f} s", "≤ 600 s"),
            ("effective of 1 000, median", f"{median:.1%}", "≥ 80 %"),
            ("effective of 1 000, tenth percentile", f"{low:.1%}", "≥ 45 %"),
            ("worst error of the log evidence, 10 000 particles", f"{max(errors):.4f}", ""),
            ("worst mean, in sd, 10 000 particles", f"{max(off):.3f}", ""),
        ],
    )


def fhmm(minutes: float) -> None:
    """Sec. 5.3: ten series, ten runs each, against the optimal proposal and the model's own."""
    made, seconds = compiled(
        models.fhmm,
        ("y",),
        minutes,
        steps={"batch_size": 500},
    )
    rng = np.random.default_rng(5)
    model = exact.FactorialHMM(models.POWER)
    figures: dict[str, list[tuple[float, float, float, float]]] = {}
    for number in range(10):
        y = reference.series(rng)
        truth = model.log_evidence(y)
        many = {"y": np.repeat(y[None], 10, 0)}
        runs = made.infer_many(jax.random.key(number), many, 100, method="smc", rescue=False)
        best = [bound.run(rng, model, y, 100) for _ in range(10)]
        found = {
            "compiled": (runs.ess_by_stage, runs.ancestors, runs.log_evidence),
            "bound": tuple(np.stack(column) for column in zip(*best, strict=True)),
            "bootstrap": fhmm_demo.bootstrap(made, jax.random.key(number), y),
        }
        for name, parts in found.items():
            sizes, ancestors, values = map(np.asarray, parts)
            left = np.mean([len(np.unique(fhmm_demo.lineage(a)[0])) for a in ancestors])
            bias = np.log(np.mean(np.exp(values - truth)))
            row = (float(sizes.mean()), float(left), float(values.std(ddof=1)), float(bias))
            figures.setdefault(name, []).append(row)
    mean = {name: np.mean(rows, 0) for name, rows in figures.items()}
    share = mean["compiled"][0] / mean["bound"][0]
    rows = [
        ("compiled in", f"{seconds:.0f} s", "≤ 900 s"),
        ("mean ESS, as a share of the bound's", f"{share:.1%}", "≥ 92 %"),
    ]
    asked = {"compiled": ("", "≥ 13", "≤ 0.5"), "bound": ("", "", ""), "bootstrap": ("", "", "")}
    for name, (size, left, sd, _) in mean.items():
        goal = asked[name]
        rows += [
            (f"{name}: mean ESS of 100", f"{size:.1f}", goal[0]),
            (f"{name}: surviving ancestors of the first step", f"{left:.1f}", goal[1]),
            (f"{name}: sd of the log evidence", f"{sd:.2f}", goal[2]),
        ]
    rows.append(("compiled: log of the mean of Ẑ/Z, mean", f"{mean['compiled'][3]:.3f}", ""))
    show("Factorial HMM", rows)


RUNS = {"pumps": pumps, "regression": regression, "fhmm": fhmm}


def main() -> None:
    """Run the experiments named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(RUNS), metavar="name")
    parser.add_argument("--minutes", type=float, default=None)
    options = parser.parse_args()
    for name in options.names:
        RUNS[name](options.minutes or MINUTES[name])


if __name__ == "__main__":
    main()
