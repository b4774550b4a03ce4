"""How do time and memory grow with the problem, and how long is a start: nothing above linear.

Run as `python -m benchmarks.growth [--full]`. Every size is measured in a process of its own, whose
peak memory is taken. Exponents are fitted by least squares to the logarithms over the upper half of
the sizes, where fixed costs no longer hide them. "Read" is tracing, inverting and building
networks; "first" is a first answer, compiled by XLA; "warm" one after that.
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
from benchmarks.growing import WARM
from benchmarks.peers import in_turn
from retrodict.demos.models import pumps

ABOUT = {
    "elements": "pumps in a plate, 10 particles",
    "steps": "steps of a stream, 100 particles, bootstrap",
    "factors": "factors of a loop over sites, 10 particles",
    "stages": "stages of a loop over sites, with resampling, 10 particles",
    "particles": "particles, regression",
}
# A little above one is what caches and memory allocation do to a linear cost.
LINEAR = 1.15
# In MB, what a process may take more in the course of a stream.
FLAT = 1.0


def measured(kind: str, sizes: Sequence[int], limit: float) -> dict[int, dict[str, Any]]:
    """By size, until one takes longer than the limit."""
    found = {}
    for size in sizes:
        report.note(f"growth: {size} {kind}")
        command = [sys.executable, "-m", "benchmarks.growing", kind, str(size)]
        begun = time.perf_counter()
        try:
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, timeout=10 * limit
            )
        except subprocess.TimeoutExpired:
            print(f"\nStopped: {size} {kind} took more than {10 * limit:.0f} s.")
            break
        found[size] = json.loads(done.stdout)
        if time.perf_counter() - begun > limit and size != sizes[-1]:
            left = ", ".join(map(str, sizes[sizes.index(size) + 1 :]))
            print(f"\nStopped at {size} {kind}, past {limit:.0f} s; not tried: {left}.")
            break
    return found


def section(kind: str, sizes: Sequence[int], limit: float) -> None:
    """A table of one kind, and the exponents."""
    print(f"\n### {ABOUT[kind].capitalize()}")
    found = measured(kind, sizes, limit)
    rows = [
        [
            size,
            report.short(seen["read"]),
            *([report.short(seen["first"])] if "first" in seen else []),
            report.spread(seen["warm"], 1e3) if kind != "steps" else report.short(seen["warm"][0]),
            *([report.short(1e6 * seen["late"]), seen["bytes"]] if "late" in seen else []),
            report.short(seen["peak"]),
            report.short(seen["added"]),
        ]
        for size, seen in found.items()
    ]
    header = ["", "read, s", "first, s", "warm, ms", "peak, MB", "added, MB"]
    if kind == "steps":
        header = ["", "read, s", "all steps, s", "last steps, µs", "bytes of state", "peak, MB", "added, MB"]  # fmt: skip  # noqa: E501
    report.table(header, rows)
    if len(found) < 3:
        print("Too few sizes for exponents.")
        return
    tried = list(found)
    exponents = {
        "warm": report.exponent(tried, [np.median(seen["warm"]) for seen in found.values()]),
        "read": report.exponent(tried, [seen["read"] for seen in found.values()]),
        "memory": report.exponent(tried, [max(seen["added"], 1.0) for seen in found.values()]),
    }
    if kind != "steps":
        first = [seen["first"] for seen in found.values()]
        exponents["first"] = report.exponent(tried, first)
    said = ", ".join(f"{name} {value:.2f}" for name, value in exponents.items())
    worst = max(exponents.values())
    report.target(
        f"at most linear growth with {kind} (exponents up to {LINEAR} count as linear)",
        f"exponents: {said}",
        worst <= LINEAR,
    )
    if kind == "steps":
        sizes_of_state = {seen["bytes"] for seen in found.values()}
        grown = max(seen["grown"] for seen in found.values())
        report.target(
            "streaming uses constant memory",
            f"the state has {max(sizes_of_state)} bytes throughout, and the peak memory of the "
            f"process grows by at most {grown:.2f} MB from step {WARM} to step {tried[-1]}",
            len(sizes_of_state) == 1 and grown < FLAT,
        )


def imports(repeats: int) -> None:
    """Cold starts of Python with one import, against NumPyro's.

    Both find their bytecode in a cache, as packages that are installed do; ours, imported from the
    sources, has none where Python is told not to write it.
    """
    report.note("growth: imports")
    names = ("retrodict", "numpyro")
    with tempfile.TemporaryDirectory() as cache:
        written = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        written["PYTHONPYCACHEPREFIX"] = cache

        def start(module: str) -> float:
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=written)
            return time.perf_counter() - begun

        calls = {name: (lambda _, name=name: start(name)) for name in names}
        for call in calls.values():
            call(0)
        times = {name: np.array(rows) for name, rows in in_turn(calls, repeats).items()}
    print("\n### Cold start")
    rows = [[f"`import {name}`", report.spread(times[name])] for name in names]
    report.table(["a fresh process, bytecode cached", "s"], rows)
    ratio = float(np.median(times["retrodict"]) / np.median(times["numpyro"]))
    report.target(
        "`import retrodict` takes at most 1.5 times as long as `import numpyro`",
        f"{ratio:.2f} times",
        ratio <= 1.5,
    )


FIRST = """
import json, sys, time
import jax
import retrodict as rd
from benchmarks.inferring import CASES
case = CASES["pumps"]
begun = time.perf_counter()
compiled = rd.load(sys.argv[1], case.model)
loaded = time.perf_counter()
jax.block_until_ready(compiled.infer(jax.random.key(1), case.data, rescue=False).samples)
print(json.dumps([loaded - begun, time.perf_counter() - loaded]))
"""


def first_answers(repeats: int) -> None:
    """`load` and the first `infer`, with JAX's persistent compilation cache and without."""
    report.note("growth: first answers")
    with tempfile.TemporaryDirectory() as text, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(text) / "pumps.rd"
        training = rd.Training(max_steps=200)
        rd.compile(
            jax.random.key(0), pumps, ("t", "y"), training=training, progress_bar=False
        ).save(path)
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(Path(text) / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

        def start(extra: dict[str, str]) -> list[float]:
            done = subprocess.run(
                [sys.executable, "-c", FIRST, str(path)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **extra},
            )
            return json.loads(done.stdout)

        calls = {"without": lambda _: start({}), "with": lambda _: start(cache)}
        calls["with"](0)
        found = {name: np.array(rows) for name, rows in in_turn(calls, repeats).items()}
    print("\nFirst inference with a saved model, 1 000 particles, after imports.")
    header = ["JAX's persistent cache", "`load`, s", "first `infer`, s", "both, s"]
    rows = [
        [name, report.spread(r[:, 0]), report.spread(r[:, 1]), report.spread(r.sum(1))]
        for name, r in found.items()
    ]
    report.table(header, rows)


def main() -> None:
    """All sections."""
    full = report.full(__doc__)
    limit = 300.0 if full else 120.0
    imports(15 if full else 7)
    first_answers(5 if full else 3)
    section("elements", (10, 100, 1000, 10_000, 100_000), limit)
    section("particles", (100, 1000, 10_000, 100_000, 1_000_000), limit)
    most = (100_000, 1_000_000) if full else (30_000,)
    section("steps", (100, 1000, 10_000, *most), limit)
    section("factors", (1, 3, 10, 30, 100, 300, 1000), limit)
    section("stages", (1, 3, 10, 30, 100, 300, 1000), limit)


if __name__ == "__main__":
    main()
