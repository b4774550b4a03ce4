"""What a user waits for before the first answer, by phase, with NUTS beside it.

Run as `python -m benchmarks.firstanswer [--full]`. Each model has its own process, without any
cache of compiled programs; networks are trained for few steps. `--full` runs NUTS as well.
"""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.firstanswer_models import CASES

PAPER = ("pumps", "regression", "factorial HMM")
COMPILE_PHASES = ("trace", "invert", "assemble", "train", "plan", "other")
ANSWER_PHASES = (
    "first infer",
    "second infer",
    "first infer_many",
    "first rescue",
    "second rescue",
)
LIMIT_SECONDS = 1200


def measure(*arguments: str) -> dict[str, Any] | None:
    """Measure in a fresh process without a cache; None if it takes too long."""
    command = [sys.executable, "-m", "benchmarks.firstanswer_worker", *arguments]
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    report.log_progress(f"firstanswer: {' '.join(arguments)}")
    try:
        process = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return None
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def seconds(result: dict[str, Any], phase: str, kind: str = "seconds") -> float:
    """Seconds of a phase, or of one activity in it."""
    return float(result["phases"].get(phase, {}).get(kind, 0.0))


def without_training(result: dict[str, Any]) -> float:
    """Seconds from tracing to the plan, but for training."""
    return sum(seconds(result, phase) for phase in COMPILE_PHASES if phase != "train")


def main() -> None:
    """Measure all models and print the tables."""
    full = report.parse_full_flag(__doc__)
    results = {name: measure(name) for name in CASES}
    finished = {name: result for name, result in results.items() if result is not None}
    for name in results.keys() - finished.keys():
        print(f"{name}: no answer in {LIMIT_SECONDS} s.")
    print("Seconds until the first loss, and by phase; training has few steps.")
    report.print_table(
        ("model", "first loss", *COMPILE_PHASES, "programs", "peak MB"),
        (
            (
                name,
                report.format_number(result["first loss"]),
                *(report.format_number(seconds(result, phase)) for phase in COMPILE_PHASES),
                int(sum(seconds(result, phase, "programs") for phase in COMPILE_PHASES)),
                round(result["memory"]),
            )
            for name, result in finished.items()
        ),
    )
    print("Answers with 1 000 particles, and NUTS with 500 + 1 000 iterations, cold; in seconds.")
    nuts = {name: measure(name, "nuts") for name in finished if full and CASES[name].has_gradient}
    report.print_table(
        ("model", *ANSWER_PHASES, "NUTS"),
        (
            (
                name,
                *(report.format_number(seconds(result, phase)) for phase in ANSWER_PHASES),
                report.format_number((nuts.get(name) or {}).get("nuts", np.nan)),
            )
            for name, result in finished.items()
        ),
    )
    print("Tracing, lowering and XLA in each phase, in seconds, with the number of programs.")
    phases = ("assemble", "train", "plan", "first infer", "first infer_many", "first rescue")
    report.print_table(
        ("model", *phases),
        (
            (
                name,
                *(
                    " / ".join(
                        report.format_number(seconds(result, phase, kind))
                        for kind in ("trace", "lower", "xla")
                    )
                    + f" ({int(seconds(result, phase, 'programs'))})"
                    for phase in phases
                ),
            )
            for name, result in finished.items()
        ),
    )
    print_targets(finished)


def print_targets(results: dict[str, dict[str, Any]]) -> None:
    """Print which targets all models reach."""

    def worst(target: str, limit: float, values: dict[str, float]) -> None:
        name = max(values, key=values.__getitem__)
        measurement = f"at most {report.format_number(values[name])} ({name})"
        report.print_target(target, measurement, values[name] <= limit)

    compiling = {name: without_training(result) for name, result in results.items()}
    worst("all but training takes at most 20 s", 20, compiling)
    paper = {name: value for name, value in compiling.items() if name in PAPER}
    if paper:
        worst("all but training takes at most 10 s for the paper's models", 10, paper)
    worst(
        "first loss within 8 s",
        8,
        {name: np.nan_to_num(r["first loss"]) for name, r in results.items()},
    )
    for phase, limit in {"first infer": 4, "first rescue": 10}.items():
        values = {name: seconds(result, phase) for name, result in results.items()}
        worst(f"{phase} takes at most {limit} s", limit, values)
    worst("peak memory at most 2 000 MB", 2000, {n: r["memory"] for n, r in results.items()})


if __name__ == "__main__":
    main()
