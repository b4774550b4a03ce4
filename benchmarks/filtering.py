"""How fast is a particle filter: against cuthbert's and that of `particles`, and step by step.

Run as `python -m benchmarks.filtering`. All three run the bootstrap filter of the same scalar
linear-Gaussian model with systematic resampling below the same effective sample size. Each is in a
process of its own that stays alive, they take turns, and the best of several repeats counts. Ours
keeps draws, weights and ancestors of all steps, and follows every trajectory back; cuthbert keeps
all steps; `particles` keeps the last.

The second table is the time of one `filter_step` early in a stream and late.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.contrib.control_flow import scan
from scipy import stats

import retrodict as rd
from benchmarks.peers import Peer, environment, in_turn
from retrodict.filtering import StreamingFilter
from retrodict.proposal import Proposal
from retrodict.resampling import systematic
from retrodict.smc import Engine

DRIFT, SPREAD, NOISE, STEPS = 0.9, 1.0, 0.7, 100
PEERS = {
    "cuthbert": ("cuthbert==0.1.1", f"jax=={jax.__version__}"),
    "particles": ("particles==0.4",),
}


def series(steps: int = STEPS) -> None:
    """A scalar state, seen with noise."""

    def step(x: Array, _: None) -> tuple[Array, None]:
        x = numpyro.sample("x", dist.Normal(DRIFT * x, SPREAD))
        numpyro.sample("y", dist.Normal(x, NOISE))
        return x, None

    scan(step, 0.0, None, length=steps)


def kalman(y: np.ndarray) -> float:
    """The exact log evidence."""
    mean, variance, log_z = 0.0, 0.0, 0.0
    for value in y:
        mean, variance = DRIFT * mean, DRIFT**2 * variance + SPREAD**2
        total = variance + NOISE**2
        log_z += stats.norm.logpdf(value, mean, np.sqrt(total))
        mean, variance = mean + variance / total * (value - mean), variance * NOISE**2 / total
    return log_z


def ours(
    proposal: Proposal, y: np.ndarray, num: int, threshold: float
) -> Callable[[int], tuple[float, float]]:
    """A run of our engine: seconds, and the log evidence."""
    engine, data = Engine(proposal, num, systematic, threshold), {"y": jnp.asarray(y)}
    # survivors are a diagnostic of `infer`, which neither peer has
    run = jax.jit(lambda key: engine.run({}, key, data)._replace(survivors={}))
    jax.block_until_ready(run(jax.random.key(0)))

    def call(seed: int) -> tuple[float, float]:
        key = jax.random.key(seed)
        begun = time.perf_counter()
        outcome = jax.block_until_ready(run(key))
        seconds = time.perf_counter() - begun
        return seconds, float(outcome.population.log_evidence.value())

    return call


def against_peers(sizes: list[int], thresholds: list[float], repeats: int) -> None:
    """Print the table of times and ratios, and whether all agree."""
    graph = rd.trace(series, ["y"])
    y = np.asarray(graph.program.simulate(jax.random.key(3))["y"])
    numbers = {"y": y.tolist(), "drift": DRIFT, "spread": SPREAD, "noise": NOISE}
    proposal = Proposal.bootstrap(rd.invert(graph, "filter"))
    folder = Path(__file__).parent
    peers = {
        name: Peer(environment(*packages), folder / f"filtering_{name}.py", json.dumps(numbers))
        for name, packages in PEERS.items()
    }

    def asked(peer: Peer, num: int, threshold: float) -> Callable[[int], list[float]]:
        return lambda seed: [float(word) for word in peer.ask(num, threshold, seed)]

    print(f"bootstrap filter, {STEPS} steps; the exact log evidence is {kalman(y):.3f}")
    print("| particles | resampled below | ours, ms | cuthbert / ours | particles / ours |", end="")
    print(" log evidence: ours | cuthbert | particles |")
    print("| --- " * 8 + "|")
    for num in sizes:
        for threshold in thresholds:
            calls = {"ours": ours(proposal, y, num, threshold)}
            calls |= {name: asked(peer, num, threshold) for name, peer in peers.items()}
            for call in calls.values():
                call(0)
            found = {name: np.array(rows) for name, rows in in_turn(calls, repeats).items()}
            best = {name: rows[:, 0].min() for name, rows in found.items()}
            ratios = [f"{best[name] / best['ours']:.2f}" for name in PEERS]
            evidence = [f"{rows[:, 1].mean():.2f} ± {rows[:, 1].std():.2f}" for rows in found.values()]  # fmt: skip  # noqa: E501
            cells = [num, f"{threshold:g} K", f"{best['ours'] * 1e3:.1f}", *ratios, *evidence]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    for peer in peers.values():
        with peer:
            pass


def streaming(num: int, late: int, repeats: int = 200) -> None:
    """Print the time of a step, early and late in a stream, and the size of its state."""
    proposal = Proposal.bootstrap(rd.invert(rd.trace(series, ["y"]), "filter"))
    stream, key = StreamingFilter(proposal), jax.random.key(0)
    state = stream.init(key, num)
    rng, x = np.random.default_rng(0), 0.0
    print(f"\nstreaming, {num} particles\n| steps taken | median, µs a step | bytes of state |")
    print("| ---: | ---: | ---: |")
    times: list[float] = []
    for step in range(late + repeats):
        x = DRIFT * x + SPREAD * rng.normal()
        data = {"y": np.float32(x + NOISE * rng.normal())}
        begun = time.perf_counter()
        state, _ = stream.step({}, jax.random.fold_in(key, step), state, data)
        times.append(time.perf_counter() - begun)
        if step in (9 + repeats, late + repeats - 1):
            leaves = jax.tree.leaves(state)
            size = sum(leaf.nbytes for leaf in leaves)
            median = np.median(times[-repeats:]) * 1e6
            print(f"| {step + 1 - repeats} | {median:.0f} | {size} |", flush=True)


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5])
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--late", type=int, default=100_000, help="steps of the stream; 0: none")
    options = parser.parse_args()
    against_peers(options.sizes, options.thresholds, options.repeats)
    if options.late:
        streaming(1000, options.late)


if __name__ == "__main__":
    main()
