"""Measure time and peak memory for one kind of model and one size; print them as JSON.

`python -m benchmarks.growth_worker KIND SIZE`, for `benchmarks.growth`. Each measurement has its
own process because a process's peak memory never falls. The networks are small and untrained, which
does not change the times.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import retrodict as rd
from benchmarks.filtering_runs import DRIFT, NOISE, SPREAD, series
from retrodict._xla.jit import low_latency_jit
from retrodict.demos.models import pumps, regression
from retrodict.estimators.conditional import MADE
from retrodict.inference.filtering import StreamingFilter
from retrodict.inference.smc import SMC
from retrodict.particles.resampling import systematic
from retrodict.proposal.proposal import Proposal

SMALL = MADE(hidden=(16,), components=3, context=(8,))
PARTICLES, STREAM_PARTICLES = 10, 100
# Memory and time per step of a stream should be constant after these steps. As many of the last
# steps are timed separately.
WARMUP_STEPS = 100


def peak_memory() -> float:
    """Peak memory of this process in MB.

    `getrusage` is unsuitable: a process inherits its parent's peak.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)[1]) / 1024


def prepare(model: Any, observed: tuple[str, ...], *args: Any) -> tuple[Proposal, Any, float]:
    """Trace and invert a model and build its networks; return the seconds as well."""
    start_time = time.perf_counter()
    graph = rd.trace(model, observed, model_args=args)
    proposal = Proposal.of(rd.invert(graph))
    networks = {
        name: proposal.build(SMALL, jax.random.key(0), structures)
        for name, structures in proposal.networks().items()
    }
    return proposal, networks, time.perf_counter() - start_time


def time_repeatedly(
    call: Callable[[int], Any], min_seconds: float = 0.5, max_calls: int = 20
) -> list[float]:
    """Seconds of repeated calls with different seeds."""
    times: list[float] = []
    while len(times) < 3 or (sum(times) < min_seconds and len(times) < max_calls):
        start_time = time.perf_counter()
        jax.block_until_ready(call(len(times)))
        times.append(time.perf_counter() - start_time)
    return times


def simulate_and_infer(
    proposal: Proposal, networks: Any, particles: int, trace_seconds: float, threshold: float = 0.0
) -> dict[str, Any]:
    """Simulate data and infer from them: the first time, and with compiled programs."""
    simulate = low_latency_jit(proposal.graph.program.simulate)
    start_time = time.perf_counter()
    draws = jax.block_until_ready(simulate(jax.random.key(1)))
    simulate_seconds = time.perf_counter() - start_time
    data = {name: draws[name] for name in proposal.graph.observed}
    run = low_latency_jit(SMC(proposal, particles, systematic, threshold).run)
    start_time = time.perf_counter()
    jax.block_until_ready(run(networks, jax.random.key(2), data))
    first_seconds = time.perf_counter() - start_time
    warm_seconds = time_repeatedly(lambda seed: run(networks, jax.random.key(seed), data))
    return {
        "read": trace_seconds,
        "simulated": simulate_seconds,
        "first": first_seconds,
        "warm": warm_seconds,
    }


def elements(size: int) -> dict[str, Any]:
    """A plate of `size` pumps."""

    def model() -> None:
        pumps(n=size)

    proposal, networks, trace_seconds = prepare(model, ("t", "y"))
    return simulate_and_infer(proposal, networks, PARTICLES, trace_seconds)


def particles(size: int) -> dict[str, Any]:
    """The regression with `size` particles."""
    proposal, networks, trace_seconds = prepare(regression, ("z", "t"))
    return simulate_and_infer(proposal, networks, size, trace_seconds)


def factors(size: int, threshold: float = 0.0) -> dict[str, Any]:
    """A loop over `size` numbered latents, each with an observation."""

    def model() -> None:
        x = jnp.zeros(())
        for number in range(size):
            x = numpyro.sample(f"x_{number}", dist.Normal(0.9 * x, 1.0))
            numpyro.sample(f"y_{number}", dist.Normal(x, 1.0))

    observed = tuple(f"y_{number}" for number in range(size))
    proposal, networks, trace_seconds = prepare(model, observed)
    measurements = simulate_and_infer(proposal, networks, PARTICLES, trace_seconds, threshold)
    return measurements | {"networks": len(networks)}


def stages(size: int) -> dict[str, Any]:
    """The same, with resampling between factors when the ESS falls below half the particles."""
    return factors(size, 0.5)


def steps(size: int) -> dict[str, Any]:
    """A streaming filter over `size` steps."""
    start_time = time.perf_counter()
    proposal = Proposal.bootstrap(rd.invert(rd.trace(series, ["y"]), "filter"))
    stream, key = StreamingFilter(proposal), jax.random.key(0)
    state = stream.init(key, STREAM_PARTICLES)
    trace_seconds = time.perf_counter() - start_time
    rng, x = np.random.default_rng(0), 0.0
    noise = rng.standard_normal((size + 1, 2)).astype(np.float32)
    state, _ = stream.step({}, key, state, {"y": np.float32(0.0)})
    start_time = time.perf_counter()
    late_start, early_peak = start_time, peak_memory()
    for number in range(size):
        x = DRIFT * x + SPREAD * noise[number, 0]
        data = {"y": np.float32(x + NOISE * noise[number, 1])}
        state, _ = stream.step({}, jax.random.fold_in(key, number), state, data)
        if number == min(size, WARMUP_STEPS) - 1:
            early_peak = peak_memory()
        if number == size - min(size, WARMUP_STEPS) - 1:
            late_start = time.perf_counter()
    end_time = time.perf_counter()
    leaves = jax.tree.leaves(state)
    return {
        "read": trace_seconds,
        "warm": [end_time - start_time],
        "late": (end_time - late_start) / min(size, WARMUP_STEPS),
        "grown": peak_memory() - early_peak,
        "bytes": sum(leaf.nbytes for leaf in leaves),
    }


KINDS = {
    "elements": elements,
    "particles": particles,
    "factors": factors,
    "stages": stages,
    "steps": steps,
}


def main() -> None:
    """Measure, and print the measurements."""
    kind, size = sys.argv[1], int(sys.argv[2])
    before = peak_memory()
    measurements = KINDS[kind](size)
    print(json.dumps({**measurements, "peak": peak_memory(), "added": peak_memory() - before}))


if __name__ == "__main__":
    main()
