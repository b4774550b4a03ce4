"""State-space models, and bootstrap and compiled filters of retrodict and its peers for them.

For `benchmarks.filtering`: a scalar linear-Gaussian model and the paper's factorial HMM, each with
a series and the exact log evidence. A run takes a seed and returns seconds and log evidence.
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
from retrodict.inference.smc import SMC
from retrodict.particles.resampling import systematic
from retrodict.proposal.proposal import Proposal

DRIFT, SPREAD, NOISE, STEPS = 0.9, 1.0, 0.7, 100
ONE_THREAD = {"NPROC": "1"}  # restricts XLA, which otherwise uses one thread per core
PEERS = {
    "cuthbert": ("cuthbert==0.1.1", f"jax=={jax.__version__}"),
    "particles": ("particles==0.4",),
}
Run = Callable[[int], tuple[float, float]]  # seed → seconds and log evidence


def series(noise: float = NOISE, steps: int = STEPS) -> None:
    """A scalar linear-Gaussian state-space model."""

    def step(x: Array, _: None) -> tuple[Array, None]:
        x = numpyro.sample("x", dist.Normal(DRIFT * x, SPREAD))
        numpyro.sample("y", dist.Normal(x, noise))
        return x, None

    scan(step, 0.0, None, length=steps)


def kalman_log_evidence(y: np.ndarray, noise: float) -> float:
    """Exact log evidence of the linear-Gaussian model, by the Kalman filter."""
    mean, variance, log_z = 0.0, 0.0, 0.0
    for y_t in y:
        mean, variance = DRIFT * mean, DRIFT**2 * variance + SPREAD**2
        predictive_variance = variance + noise**2
        gain = variance / predictive_variance
        log_z += stats.norm.logpdf(y_t, mean, np.sqrt(predictive_variance))
        mean, variance = mean + gain * (y_t - mean), gain * noise**2
    return log_z


class Problem(NamedTuple):
    """A model with a series, its parameters for the peers, and the exact log evidence."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    y: np.ndarray
    parameters: Mapping[str, Any]
    exact: float


def linear_problem(noise: float) -> Problem:
    """The linear-Gaussian model with a simulated series."""
    graph = rd.trace(series, ["y"], model_args=(noise,))
    y = np.asarray(graph.program.simulate(jax.random.key(3))["y"])
    parameters = {"y": y.tolist(), "drift": DRIFT, "spread": SPREAD, "noise": noise}
    return Problem(series, (noise,), y, parameters, kalman_log_evidence(y, noise))


def devices_problem() -> Problem:
    """The paper's factorial HMM with the demonstration's series."""
    y, hmm = np.array(load_reference("fhmm")["y"]), FactorialHMM(POWER)
    parameters = {"y": y.tolist(), "power": POWER.tolist(), "noise": hmm.sd}
    parameters |= {"initial": hmm.initial, "switch": hmm.switch}
    return Problem(fhmm, (), y, parameters, load_reference("fhmm")["log_evidence"])


def retrodict_run(
    proposal: Proposal, networks: Any, y: np.ndarray, num_particles: int, threshold: float
) -> Run:
    """Compile retrodict's particle filter."""
    sampler, data = SMC(proposal, num_particles, systematic, threshold), {"y": jnp.asarray(y)}

    def filter_series(networks: Any, key: Array) -> Any:
        population, info = sampler.run(networks, key, data)
        # Survivors are a diagnostic of `infer` that the peers do not compute.
        return population, info._replace(survivors={})

    run = low_latency_jit(filter_series)
    jax.block_until_ready(run(networks, jax.random.key(0)))

    def call(seed: int) -> tuple[float, float]:
        key = jax.random.key(seed)
        start_time = time.perf_counter()
        population, _ = jax.block_until_ready(run(networks, key))
        seconds = time.perf_counter() - start_time
        return seconds, float(population.log_evidence.value())

    return call


def peer_run(peer: Peer, num_particles: int, threshold: float) -> Run:
    """A filter in a peer's process."""

    def call(seed: int) -> tuple[float, float]:
        seconds, log_evidence = peer.ask(num_particles, threshold, seed)
        return float(seconds), float(log_evidence)

    return call


def start_peers(stack: ExitStack, problem: Problem) -> dict[str, Peer]:
    """Start the peers' processes for a problem."""
    return {name: _peer(stack, problem, name) for name in PEERS}


def start_single_threaded_peers(stack: ExitStack, problem: Problem) -> dict[str, Peer]:
    """Start the peers that use XLA, restricted to one thread."""
    return {"cuthbert, one thread": _peer(stack, problem, "cuthbert", **ONE_THREAD)}


def _peer(stack: ExitStack, problem: Problem, name: str, **settings: str) -> Peer:
    script = Path(__file__).parent / f"filtering_{name}.py"
    python = environment(*PEERS[name])
    return stack.enter_context(Peer(python, script, json.dumps(problem.parameters), **settings))


def start_single_threaded_compiled(stack: ExitStack, problem: Problem, compiled: Any) -> Peer:
    """Start a process with the compiled filter and XLA restricted to one thread."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    path = compiled.save(folder / "filter.rd")
    script, root = Path(__file__).with_name("filtering_retrodict.py"), Path(__file__).parents[1]
    arguments = (problem.model.__name__, str(path), json.dumps(problem.y.tolist()))
    settings = {"PYTHONPATH": str(root), **ONE_THREAD}
    return stack.enter_context(Peer(Path(sys.executable), script, *arguments, **settings))


def bootstrap_proposal(problem: Problem) -> Proposal:
    """Proposal of the bootstrap filter: the transition prior."""
    graph = rd.trace(problem.model, ["y"], model_args=problem.args)
    return Proposal.bootstrap(rd.invert(graph, "filter"))


def compile_problem(problem: Problem, seconds: float, **options: Any) -> Any:
    """Compile the filter of a problem."""
    report.log_progress(f"compiling {problem.model.__name__} for {seconds:.0f} s")
    training = {"max_steps": 1_000_000, **options.pop("training", {})}
    start_time = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = rd.compile(
            jax.random.key(0),
            problem.model,
            ("y",),
            model_args=problem.args,
            training=rd.Training(max_seconds=seconds, **training),
            progress_bar=False,
            **options,
        )
    reasons = ", ".join(network.stopped for network in compiled.history.networks.values())
    seconds = time.perf_counter() - start_time
    print(
        f"\nCompiling `{problem.model.__name__}` took {seconds:.0f} s; training stopped: {reasons}."
    )
    return compiled
