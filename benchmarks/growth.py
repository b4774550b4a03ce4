"""Growth of time and memory with the size of the problem, and the time of a cold start.

Run as `python -m benchmarks.growth [--full]`. Each size is measured in its own process, whose peak
memory is recorded. Exponents are fitted by least squares of logarithms over the upper half of the
sizes, where fixed costs matter less. "Read" is tracing, inverting and building networks; "first" is
the first inference, with XLA's compilation; "warm" is a later one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import retrodict as rd
from benchmarks import report
from benchmarks.growth_worker import WARMUP_STEPS
from benchmarks.peers import run_interleaved
from retrodict.demos.models import pumps

DESCRIPTIONS = {
    "elements": "pumps in a plate, 10 particles",
    "steps": "steps of a stream, 100 particles, bootstrap",
    "factors": "factors of a loop over sites, 10 particles",
    "stages": "stages of a loop over sites, with resampling, 10 particles",
    "particles": "particles, regression",
}
# Caches and memory allocation make the measured exponent of a linear cost exceed one a little.
MAX_LINEAR_EXPONENT = 1.15
# Allowed growth of peak memory during a stream, in MB.
MAX_STREAM_GROWTH_MB = 1.0


def measure(kind: str, sizes: Sequence[int], limit: float) -> dict[int, dict[str, Any]]:
    """Measure all sizes, until one takes longer than the limit in seconds."""
    results = {}
    for size in sizes:
        report.log_progress(f"growth: {size} {kind}")
        command = [sys.executable, "-m", "benchmarks.growth_worker", kind, str(size)]
        start_time = time.perf_counter()
        try:
            process = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, timeout=10 * limit
            )
        except subprocess.TimeoutExpired:
            print(f"\nStopped: {size} {kind} took more than {10 * limit:.0f} s.")
            break
        results[size] = json.loads(process.stdout)
        if time.perf_counter() - start_time > limit and size != sizes[-1]:
            remaining = ", ".join(map(str, sizes[sizes.index(size) + 1 :]))
            print(f"\nStopped at {size} {kind}, past {limit:.0f} s; not tried: {remaining}.")
            break
    return results


def section(kind: str, sizes: Sequence[int], limit: float) -> None:
    """Print the table and the growth exponents of one kind."""
    print(f"\n### {DESCRIPTIONS[kind].capitalize()}")
    results = measure(kind, sizes, limit)
    if kind == "steps":
        print_stream_table(results)
    else:
        print_table(results)
    if len(results) < 3:
        print("Too few sizes for exponents.")
        return
    columns = {
        "warm": [np.median(result["warm"]) for result in results.values()],
        "read": [result["read"] for result in results.values()],
        "memory": [max(result["added"], 1.0) for result in results.values()],
    }
    if kind != "steps":
        columns["first"] = [result["first"] for result in results.values()]
    exponents = {name: report.growth_exponent(list(results), c) for name, c in columns.items()}
    text = ", ".join(f"{name} {exponent:.2f}" for name, exponent in exponents.items())
    report.print_target(
        f"at most linear growth with {kind} (exponents up to {MAX_LINEAR_EXPONENT} count as "
        "linear)",
        f"exponents: {text}",
        max(exponents.values()) <= MAX_LINEAR_EXPONENT,
    )
    if kind == "steps":
        print_stream_verdict(results)


def print_table(results: dict[int, dict[str, Any]]) -> None:
    """Print times and memory by size."""
    rows = [
        [
            size,
            report.format_number(result["read"]),
            report.format_number(result["first"]),
            report.format_quartiles(result["warm"], 1e3),
            report.format_number(result["peak"]),
            report.format_number(result["added"]),
        ]
        for size, result in results.items()
    ]
    report.print_table(["", "read, s", "first, s", "warm, ms", "peak, MB", "added, MB"], rows)


def print_stream_table(results: dict[int, dict[str, Any]]) -> None:
    """Print times and memory of a stream by its number of steps."""
    rows = [
        [
            size,
            report.format_number(result["read"]),
            report.format_number(result["warm"][0]),
            report.format_number(1e6 * result["late"]),
            result["bytes"],
            report.format_number(result["peak"]),
            report.format_number(result["added"]),
        ]
        for size, result in results.items()
    ]
    header = ["", "read, s", "all steps, s", "last steps, µs", "bytes of state"]
    report.print_table([*header, "peak, MB", "added, MB"], rows)


def print_stream_verdict(results: dict[int, dict[str, Any]]) -> None:
    """Print whether a stream uses constant memory."""
    state_sizes = {result["bytes"] for result in results.values()}
    growth = max(result["grown"] for result in results.values())
    report.print_target(
        "streaming uses constant memory",
        f"the state has {max(state_sizes)} bytes throughout, and the peak memory of the process "
        f"grows by at most {growth:.2f} MB from step {WARMUP_STEPS} to step {max(results)}",
        len(state_sizes) == 1 and growth < MAX_STREAM_GROWTH_MB,
    )


def compare_imports(repeats: int) -> None:
    """Print the time of a fresh process with one import, for retrodict and NumPyro.

    Both have cached bytecode, as installed packages do. The cache is written here because retrodict
    may be imported from a source folder, with PYTHONDONTWRITEBYTECODE set.
    """
    report.log_progress("growth: imports")
    names = ("retrodict", "numpyro")
    with tempfile.TemporaryDirectory() as cache:
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environ["PYTHONPYCACHEPREFIX"] = cache

        def start(module: str) -> float:
            start_time = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=environ)
            return time.perf_counter() - start_time

        calls = {name: (lambda _, name=name: start(name)) for name in names}
        for call in calls.values():
            call(0)
        times = {name: np.array(rows) for name, rows in run_interleaved(calls, repeats).items()}
    print("\n### Cold start")
    rows = [[f"`import {name}`", report.format_quartiles(times[name])] for name in names]
    report.print_table(["a fresh process, bytecode cached", "s"], rows)
    ratio = float(np.median(times["retrodict"]) / np.median(times["numpyro"]))
    report.print_target(
        "`import retrodict` takes at most 1.5 times as long as `import numpyro`",
        f"{ratio:.2f} times",
        ratio <= 1.5,
    )


FIRST_INFERENCE_SCRIPT = """
import json, sys, time
import jax
import retrodict as rd
from benchmarks.newdata_worker import CASES
case = CASES["pumps"]
start_time = time.perf_counter()
compiled = rd.load(sys.argv[1], case.model)
load_time = time.perf_counter()
jax.block_until_ready(compiled.infer(jax.random.key(1), case.data, rescue=False).samples)
print(json.dumps([load_time - start_time, time.perf_counter() - load_time]))
"""


def time_first_inference(repeats: int) -> None:
    """Print times of `load` and the first `infer`, with and without JAX's persistent cache."""
    report.log_progress("growth: first inference")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "pumps.rd"
        training = rd.Training(max_steps=200)
        rd.compile(
            jax.random.key(0), pumps, ("t", "y"), training=training, progress_bar=False
        ).save(path)
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

        def start(extra: dict[str, str]) -> list[float]:
            process = subprocess.run(
                [sys.executable, "-c", FIRST_INFERENCE_SCRIPT, str(path)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **extra},
            )
            return json.loads(process.stdout)

        calls = {"without": lambda _: start({}), "with": lambda _: start(cache)}
        calls["with"](0)
        results = {name: np.array(rows) for name, rows in run_interleaved(calls, repeats).items()}
    print("\nFirst inference with a saved model, 1 000 particles, after imports.")
    header = ["JAX's persistent cache", "`load`, s", "first `infer`, s", "both, s"]
    rows = [
        [
            name,
            report.format_quartiles(r[:, 0]),
            report.format_quartiles(r[:, 1]),
            report.format_quartiles(r.sum(1)),
        ]
        for name, r in results.items()
    ]
    report.print_table(header, rows)


def main() -> None:
    """Print all sections."""
    full = report.parse_full_flag(__doc__)
    limit = 300.0 if full else 120.0
    compare_imports(15 if full else 7)
    time_first_inference(5 if full else 3)
    section("elements", (10, 100, 1000, 10_000, 100_000), limit)
    section("particles", (100, 1000, 10_000, 100_000, 1_000_000), limit)
    largest = (100_000, 1_000_000) if full else (30_000,)
    section("steps", (100, 1000, 10_000, *largest), limit)
    section("factors", (1, 3, 10, 30, 100, 300, 1000), limit)
    section("stages", (1, 3, 10, 30, 100, 300, 1000), limit)


if __name__ == "__main__":
    main()
