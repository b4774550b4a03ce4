"""Models with time in; bootstrap and compiled filters that run by seed, ours and the peers', out.

For `benchmarks.filtering`: a scalar linear-Gaussian model and the paper's factorial HMM, each with
a series and the exact log evidence. A run gives the seconds it took and its log evidence.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.contrib.control_flow import scan
from scipy import stats

import retrodict as rd
from benchmarks import report
from benchmarks.paper.exact import FactorialHMM
from benchmarks.peers import Peer, environment
from retrodict._xla.jit import low_latency_jit
from retrodict.demos.models import POWER, fhmm
from retrodict.demos.reference_answers import load_reference
from retrodict.inference.smc import Engine
from retrodict.particles.resampling import systematic
from retrodict.proposal.proposal import Proposal

DRIFT, SPREAD, NOISE, STEPS = 0.9, 1.0, 0.7, 100
ALONE = {"NPROC": "1"}  # XLA, which else has a thread for every core, then has one
PEERS = {
    "cuthbert": ("cuthbert==0.1.1", f"jax=={jax.__version__}"),
    "particles": ("particles==0.4",),
}
Run = Callable[[int], tuple[float, float]]  # of a seed: seconds, and the log evidence


def series(noise: float = NOISE, steps: int = STEPS) -> None:
    """A scalar state, seen with noise."""

    def step(x: Array, _: None) -> tuple[Array, None]:
        x = numpyro.sample("x", dist.Normal(DRIFT * x, SPREAD))
        numpyro.sample("y", dist.Normal(x, noise))
        return x, None

    scan(step, 0.0, None, length=steps)


def kalman(y: np.ndarray, noise: float) -> float:
    """The exact log evidence of a series."""
    mean, variance, log_z = 0.0, 0.0, 0.0
    for value in y:
        mean, variance = DRIFT * mean, DRIFT**2 * variance + SPREAD**2
        total = variance + noise**2
        log_z += stats.norm.logpdf(value, mean, np.sqrt(total))
        mean, variance = mean + variance / total * (value - mean), variance * noise**2 / total
    return log_z


class Problem(NamedTuple):
    """A model with a series, its numbers for the peers, and the exact log evidence."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    y: np.ndarray
    numbers: Mapping[str, Any]
    exact: float


def linear(noise: float) -> Problem:
    """The linear-Gaussian model."""
    graph = rd.trace(series, ["y"], model_args=(noise,))
    y = np.asarray(graph.program.simulate(jax.random.key(3))["y"])
    numbers = {"y": y.tolist(), "drift": DRIFT, "spread": SPREAD, "noise": noise}
    return Problem(series, (noise,), y, numbers, kalman(y, noise))


def devices() -> Problem:
    """The factorial HMM."""
    y, known = np.array(load_reference("fhmm")["y"]), FactorialHMM(POWER)
    numbers = {"y": y.tolist(), "power": POWER.tolist(), "noise": known.sd}
    numbers |= {"initial": known.initial, "switch": known.switch}
    return Problem(fhmm, (), y, numbers, load_reference("fhmm")["log_evidence"])


def ours(proposal: Proposal, networks: Any, y: np.ndarray, num: int, threshold: float) -> Run:
    """Our engine."""
    engine, data = Engine(proposal, num, systematic, threshold), {"y": jnp.asarray(y)}
    # survivors are a diagnostic of `infer`, which neither peer has
    run = low_latency_jit(lambda nets, key: engine.run(nets, key, data)._replace(survivors={}))
    jax.block_until_ready(run(networks, jax.random.key(0)))

    def call(seed: int) -> tuple[float, float]:
        key = jax.random.key(seed)
        begun = time.perf_counter()
        outcome = jax.block_until_ready(run(networks, key))
        seconds = time.perf_counter() - begun
        return seconds, float(outcome.population.log_evidence.value())

    return call


def asked(peer: Peer, num: int, threshold: float) -> Run:
    """A peer's filter."""

    def call(seed: int) -> tuple[float, float]:
        seconds, log_evidence = peer.ask(num, threshold, seed)
        return float(seconds), float(log_evidence)

    return call


def started(stack: ExitStack, problem: Problem) -> dict[str, Peer]:
    """The peers, with the problem, until the stack is left."""
    return {name: _peer(stack, problem, name) for name in PEERS}


def alone(stack: ExitStack, problem: Problem) -> dict[str, Peer]:
    """Those of the peers that use XLA, which keeps to one thread."""
    return {"cuthbert, one thread": _peer(stack, problem, "cuthbert", **ALONE)}


def _peer(stack: ExitStack, problem: Problem, name: str, **settings: str) -> Peer:
    script = Path(__file__).parent / f"filtering_{name}.py"
    python = environment(*PEERS[name])
    return stack.enter_context(Peer(python, script, json.dumps(problem.numbers), **settings))


def compiled_alone(stack: ExitStack, problem: Problem, compiled: Any) -> Peer:
    """The filter that is compiled, in a process in which XLA keeps to one thread."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    path = compiled.save(folder / "filter.rd")
    script, root = Path(__file__).with_name("filtering_ours.py"), Path(__file__).parents[1]
    arguments = (problem.model.__name__, str(path), json.dumps(problem.y.tolist()))
    settings = {"PYTHONPATH": str(root), **ALONE}
    return stack.enter_context(Peer(Path(sys.executable), script, *arguments, **settings))


def bootstrap(problem: Problem) -> Proposal:
    """Draws from the model itself."""
    graph = rd.trace(problem.model, ["y"], model_args=problem.args)
    return Proposal.bootstrap(rd.invert(graph, "filter"))


def compiled_for(problem: Problem, seconds: float, **options: Any) -> Any:
    """The filter that is compiled."""
    report.note(f"compiling {problem.model.__name__} for {seconds:.0f} s")
    training = {"max_steps": 1_000_000, **options.pop("training", {})}
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = rd.compile(
            jax.random.key(0),
            problem.model,
            ("y",),
            model_args=problem.args,
            training=rd.Training(max_seconds=seconds, **training),
            progress_bar=False,
            **options,
        )
    ended = ", ".join(network.stopped for network in made.history.networks.values())
    seconds = time.perf_counter() - begun
    print(
        f"\nCompiling `{problem.model.__name__}` took {seconds:.0f} s; training stopped: {ended}."
    )
    return made
