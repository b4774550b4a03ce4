"""Speed of training: gradient steps per second against PyTorch, and time spent outside of XLA.

Run as `python -m benchmarks.training [--full]`. Both networks are measured in turn.
"""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

import retrodict as rd
from benchmarks import report
from benchmarks.peers import Peer, environment, run_interleaved
from retrodict.demos.models import pumps
from retrodict.estimators.conditional import MADE, Latent, Value, trainable
from retrodict.estimators.encoders import Conditions
from retrodict.proposal.factor_proposals import FactorRow
from retrodict.training import gradient_steps, prefetch, train
from retrodict.training.schedule import StepSettings

TORCH = "2.13.0"
BITS = constraints.independent(constraints.boolean, 1)
BATCH, STEPS = 500, 64


def retrodict_steps() -> Callable[[], float]:
    """Return a function that times `STEPS` gradient steps of the factorial HMM's network."""
    latents, inputs = (Latent("x", BITS, (20,)),), (Value("c", BITS, (41,)),)
    network = MADE(hidden=(300,) * 4, context=()).build(jax.random.key(0), latents, inputs)
    keys = jax.random.split(jax.random.key(1))
    x, c = (
        jax.random.bernoulli(k, 0.5, (STEPS * BATCH, n)) * 1.0
        for k, n in zip(keys, (20, 41), strict=True)
    )
    examples = FactorRow({"x": x}, Conditions({"c": c}))
    weights, fixed = eqx.partition(network, trainable(network))
    state = gradient_steps.TrainingState.initial(weights, 5.0)
    settings = StepSettings(jnp.full(STEPS, 1e-3), jnp.full(STEPS, 0.99))

    def run() -> float:
        start = time.perf_counter()
        new = train.one_pass(jax.random.key(2), state, examples, fixed, settings, 5.0)
        jax.block_until_ready(new)
        return time.perf_counter() - start

    run()
    return run


def compare_with_torch(repeats: int) -> None:
    """Print the steps per second of both, and their ratio."""
    script = Path(__file__).with_name("training_torch.py")
    with Peer(environment(f"torch=={TORCH}", "numpy"), script) as peer:
        version, threads = peer.read()
        ours = retrodict_steps()
        calls = {"ours": lambda _: ours(), "theirs": lambda _: float(peer.ask(STEPS)[0])}
        calls["theirs"](0)
        times = {n: np.array(t) for n, t in run_interleaved(calls, repeats, pause=0.3).items()}
    rows = [
        ["retrodict", report.format_quartiles(STEPS / times["ours"]), ""],
        [
            f"PyTorch {version}, {threads} threads, fused Adam",
            report.format_quartiles(STEPS / times["theirs"]),
            report.format_quartiles(times["theirs"] / times["ours"]),
        ],
    ]
    print(f"Network of the factorial HMM: 4 × 300 units, 41 inputs, batches of {BATCH}.")
    report.print_table(["", "steps a second", "its time / ours"], rows)
    ratio = float(np.median(times["theirs"] / times["ours"]))
    report.print_target(
        "1.3 times as fast as PyTorch", f"{report.format_number(ratio)} times", ratio >= 1.3
    )


class Stopwatch:
    """Adds up the time of calls, until their results are computed."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that its time is added."""

        def timed_call(*args: Any) -> Any:
            start = time.perf_counter()
            result = jax.block_until_ready(call(*args))
            self.seconds += time.perf_counter() - start
            return result

        return timed_call


def measure_time_outside_xla(seconds: float) -> None:
    """Print the shares of training time in compiled code, in waiting for data and in Python."""
    xla_time, waiting_time = Stopwatch(), Stopwatch()
    train.one_pass = xla_time(train.one_pass)
    train._TrainingRun._evaluate = xla_time(train._TrainingRun._evaluate)
    train.wait = xla_time(train.wait)  # for compilation in the background
    # The first data set is simulated before training, the others in another thread.
    prefetch.Prefetcher.next = waiting_time(prefetch.Prefetcher.next)  # type: ignore[method-assign]
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = rd.compile(
            jax.random.key(0),
            pumps,
            ("t", "y"),
            inverse="faithful",
            training=rd.Training(max_seconds=seconds),
            progress_bar=False,
        )
    compile_seconds = time.perf_counter() - start
    training_seconds = sum(history.seconds for history in compiled.history.networks.values())
    python_seconds = training_seconds - xla_time.seconds - waiting_time.seconds
    parts = {
        "jitted calls, with their compilation": xla_time.seconds,
        "awaiting data": waiting_time.seconds,
        "Python": python_seconds,
    }
    rows = [[part, f"{s:.2f}", f"{s / training_seconds:.1%}"] for part, s in parts.items()]
    print(
        f"\nPumps, compiled in {compile_seconds:.1f} s, of which {training_seconds:.1f} s were "
        "training."
    )
    report.print_table(["spent in", "s", "of training"], rows)


def main() -> None:
    """Print both tables."""
    full = report.parse_full_flag(__doc__)
    compare_with_torch(20 if full else 10)
    measure_time_outside_xla(60.0 if full else 20.0)


if __name__ == "__main__":
    main()
