"""A kind of model and its size in; time and peak memory of working with it out, as JSON.

`python -m benchmarks.growing KIND SIZE`, for `benchmarks.growth`: each measurement has a process of
its own, because a process never gives back its peak. Networks are small and untrained, which take
as long as trained ones of their size.
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
from benchmarks.filters import DRIFT, NOISE, SPREAD, series
from retrodict._xla.jit import low_latency_jit
from retrodict.demos.models import pumps, regression
from retrodict.estimators.conditional import MADE
from retrodict.inference.filtering import StreamingFilter
from retrodict.inference.smc import Engine
from retrodict.particles.resampling import systematic
from retrodict.proposal.proposal import Proposal

SMALL = MADE(hidden=(16,), components=3, context=(8,))
PARTICLES, STREAMED = 10, 100
# Steps of a stream after which nothing should change any more, and over which the last are timed.
WARM = 100


def peak() -> float:
    """Most memory that this process has held, in MB.

    `getrusage` would not do: a process inherits that of the one which started it.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)[1]) / 1024


def prepared(model: Any, observed: tuple[str, ...], *args: Any) -> tuple[Proposal, Any, float]:
    """The model traced, inverted and given networks, and the seconds that took."""
    begun = time.perf_counter()
    graph = rd.trace(model, observed, model_args=args)
    proposal = Proposal.of(rd.invert(graph))
    networks = {
        name: proposal.build(SMALL, jax.random.key(0), assemblies)
        for name, assemblies in proposal.networks().items()
    }
    return proposal, networks, time.perf_counter() - begun


def best_of(call: Callable[[int], Any], least: float = 0.5, most: int = 20) -> list[float]:
    """Seconds of calls with several seeds, until there are enough."""
    times: list[float] = []
    while len(times) < 3 or (sum(times) < least and len(times) < most):
        begun = time.perf_counter()
        jax.block_until_ready(call(len(times)))
        times.append(time.perf_counter() - begun)
    return times


def answered(
    proposal: Proposal, networks: Any, particles: int, read: float, threshold: float = 0.0
) -> dict[str, Any]:
    """Data simulated, then answered: the first time, and warm."""
    simulate = low_latency_jit(proposal.graph.program.simulate)
    begun = time.perf_counter()
    drawn = jax.block_until_ready(simulate(jax.random.key(1)))
    simulated = time.perf_counter() - begun
    data = {name: drawn[name] for name in proposal.graph.observed}
    run = low_latency_jit(Engine(proposal, particles, systematic, threshold).run)
    begun = time.perf_counter()
    jax.block_until_ready(run(networks, jax.random.key(2), data))
    first = time.perf_counter() - begun
    warm = best_of(lambda seed: run(networks, jax.random.key(seed), data))
    return {"read": read, "simulated": simulated, "first": first, "warm": warm}


def elements(size: int) -> dict[str, Any]:
    """A plate of so many pumps."""

    def model() -> None:
        pumps(n=size)

    proposal, networks, read = prepared(model, ("t", "y"))
    return answered(proposal, networks, PARTICLES, read)


def particles(size: int) -> dict[str, Any]:
    """So many particles for the regression."""
    proposal, networks, read = prepared(regression, ("z", "t"))
    return answered(proposal, networks, size, read)


def factors(size: int, threshold: float = 0.0) -> dict[str, Any]:
    """A loop over so many numbered latents, each seen by an observation of its own."""

    def model() -> None:
        x = jnp.zeros(())
        for number in range(size):
            x = numpyro.sample(f"x_{number}", dist.Normal(0.9 * x, 1.0))
            numpyro.sample(f"y_{number}", dist.Normal(x, 1.0))

    observed = tuple(f"y_{number}" for number in range(size))
    proposal, networks, read = prepared(model, observed)
    found = answered(proposal, networks, PARTICLES, read, threshold)
    return found | {"networks": len(networks)}


def stages(size: int) -> dict[str, Any]:
    """The same, resampled between factors when the effective sample size has halved."""
    return factors(size, 0.5)


def steps(size: int) -> dict[str, Any]:
    """A stream of so many steps, at a constant cost for each."""
    begun = time.perf_counter()
    proposal = Proposal.bootstrap(rd.invert(rd.trace(series, ["y"]), "filter"))
    stream, key = StreamingFilter(proposal), jax.random.key(0)
    state = stream.init(key, STREAMED)
    read = time.perf_counter() - begun
    rng, x = np.random.default_rng(0), 0.0
    noise = rng.standard_normal((size + 1, 2)).astype(np.float32)
    state, _ = stream.step({}, key, state, {"y": np.float32(0.0)})
    begun = time.perf_counter()
    last, early = begun, peak()
    for number in range(size):
        x = DRIFT * x + SPREAD * noise[number, 0]
        data = {"y": np.float32(x + NOISE * noise[number, 1])}
        state, _ = stream.step({}, jax.random.fold_in(key, number), state, data)
        if number == min(size, WARM) - 1:
            early = peak()
        if number == size - min(size, WARM) - 1:
            last = time.perf_counter()
    ended = time.perf_counter()
    leaves = jax.tree.leaves(state)
    return {
        "read": read,
        "warm": [ended - begun],
        "late": (ended - last) / min(size, WARM),
        "grown": peak() - early,
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
    """Measure, and write what was found."""
    kind, size = sys.argv[1], int(sys.argv[2])
    before = peak()
    found = KINDS[kind](size)
    print(json.dumps({**found, "peak": peak(), "added": peak() - before}))


if __name__ == "__main__":
    main()
