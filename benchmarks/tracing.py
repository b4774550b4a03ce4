"""Time and memory of tracing and inverting a model, for small and large instances.

Run as `python -m benchmarks.tracing [--full]`. Each measurement has its own process. The table
gives the ratio of 100 000 elements or steps to 100; the target is at most 3.
"""

import json
import resource
import subprocess
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan

import retrodict as rd
from benchmarks import report


def plate(n: int) -> None:
    """A two-level model in one plate, with a constant covariate."""
    alpha = numpyro.sample("alpha", dist.Exponential(1.0))
    with numpyro.plate("n", n):
        theta = numpyro.sample("theta", dist.Gamma(alpha, 1.0))
        numpyro.sample("y", dist.Poisson(theta * np.linspace(1.0, 2.0, n)))


def groups(n: int) -> None:
    """A varying intercept: n observations in n / 10 groups."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("groups", n // 10):
        a = numpyro.sample("a", dist.Normal(mu, 1))
    with numpyro.plate("n", n):
        numpyro.sample("y", dist.Normal(a[np.arange(n) // 10], 1))


def series(n: int) -> None:
    """A state-space model with a global parameter and an input at every step."""
    phi = numpyro.sample("phi", dist.Uniform(-1, 1))

    def step(x, scale):
        x = numpyro.sample("x", dist.Normal(phi * x, scale))
        numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    scan(step, 0.0, jnp.linspace(1.0, 2.0, n), length=n)


MODELS = {"plate": plate, "groups": groups, "series": series}


def measure(name: str, n: int, repeats: int) -> dict[str, Any]:
    """Measure times of tracing and inverting, and the peak memory added, in this process."""
    model = MODELS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rd.invert(rd.trace(model, ["y"], model_args=(n,)))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        rd.invert(rd.trace(model, ["y"], model_args=(n,)))
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "total_mb": after / 1024, "added_mb": (after - before) / 1024}


def main() -> None:
    """Measure each model at both sizes, and print the ratios."""
    if sys.argv[1:2] == ["--one"]:
        name, n, repeats = sys.argv[2:]
        print(json.dumps(measure(name, int(n), int(repeats))))
        return
    repeats = 15 if report.parse_full_flag(__doc__) else 5
    rows, ratios = [], {}
    for name in MODELS:
        measurements = []
        for n in (100, 100_000):
            report.log_progress(f"tracing: {name}, {n}")
            command = [sys.executable, "-m", "benchmarks.tracing", "--one", name, str(n)]
            command.append(str(repeats))
            process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            measurements.append(json.loads(process.stdout))
        small, large = measurements
        ratios[name] = float(np.median(large["seconds"]) / np.median(small["seconds"]))
        rows.append(
            [
                name,
                report.format_quartiles(small["seconds"], 1e3),
                report.format_quartiles(large["seconds"], 1e3),
                f"{ratios[name]:.2f}",
                f"{large['total_mb'] / small['total_mb']:.2f} "
                f"({small['added_mb']:.0f} → {large['added_mb']:.0f} MB added)",
            ]
        )
    header = ["model", "n = 100, ms", "n = 100 000, ms", "ratio", "memory ratio"]
    report.print_table(header, rows)
    worst = max(ratios, key=ratios.__getitem__)
    report.print_target(
        "to read 100 000 elements or steps takes at most 3 times as long as 100",
        f"{ratios[worst]:.2f} times for {worst}",
        ratios[worst] <= 3,
    )


if __name__ == "__main__":
    main()
