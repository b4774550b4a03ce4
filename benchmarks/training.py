"""Speed of training: steps per second compared with PyTorch, and time spent outside of XLA.

Run as `python -m benchmarks.training [--full]`. Both networks take turns in processes that stay
alive, so that other load on the machine affects both equally.
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
from benchmarks.peers import Peer, environment, in_turn
from retrodict.demos.models import pumps
from retrodict.estimators.conditional import MADE, Latent, Value, trainable
from retrodict.estimators.encoders import Conditions
from retrodict.proposal.factor_proposals import FactorRow
from retrodict.training import gradient_steps, prefetch, train
from retrodict.training.schedule import StepSettings

TORCH = "2.13.0"
BITS = constraints.independent(constraints.boolean, 1)
BATCH, STEPS = 500, 64


def our_passes() -> Callable[[], float]:
    """A function that trains the factorial HMM's network for `STEPS` steps and returns the time."""
    latents, inputs = (Latent("x", BITS, (20,)),), (Value("c", BITS, (41,)),)
    net = MADE(hidden=(300,) * 4, context=()).build(jax.random.key(0), latents, inputs)
    keys = jax.random.split(jax.random.key(1))
    x, c = (
        jax.random.bernoulli(k, 0.5, (STEPS * BATCH, n)) * 1.0
        for k, n in zip(keys, (20, 41), strict=True)
    )
    examples = FactorRow({"x": x}, Conditions({"c": c}))
    weights, fixed = eqx.partition(net, trainable(net))
    state = gradient_steps.TrainingState.initial(weights, 5.0)
    settings = StepSettings(jnp.full(STEPS, 1e-3), jnp.full(STEPS, 0.99))

    def run() -> float:
        start = time.perf_counter()
        new = train.one_pass(jax.random.key(2), state, examples, fixed, settings, 5.0)
        jax.block_until_ready(new)
        return time.perf_counter() - start

    run()
    return run


def against_torch(repeats: int) -> None:
    """Print steps per second of both, and the ratio of their times."""
    script = Path(__file__).with_name("training_torch.py")
    with Peer(environment(f"torch=={TORCH}", "numpy"), script) as peer:
        version, threads = peer.read()
        ours = our_passes()
        calls = {"ours": lambda _: ours(), "theirs": lambda _: float(peer.ask(STEPS)[0])}
        calls["theirs"](0)
        times = {n: np.array(t) for n, t in in_turn(calls, repeats, pause=0.3).items()}
    rows = [
        ["retrodict", report.spread(STEPS / times["ours"]), ""],
        [
            f"PyTorch {version}, {threads} threads, fused Adam",
            report.spread(STEPS / times["theirs"]),
            report.spread(times["theirs"] / times["ours"]),
        ],
    ]
    print(f"The factorial HMM's network, 4 × 300 units, 41 inputs, batches of {BATCH}.")
    report.table(["", "steps per second", "its time / ours"], rows)
    ratio = float(np.median(times["theirs"] / times["ours"]))
    report.target("1.3 times as fast as PyTorch", f"{report.short(ratio)} times", ratio >= 1.3)


class Stopwatch:
    """Measures the total time of calls until their results are ready."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call with its time added to the total."""

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = jax.block_until_ready(call(*args))
            self.seconds += time.perf_counter() - start
            return result

        return timed


def outside_xla(seconds: float) -> None:
    """Print the share of training time that is spent outside of compiled code and compilation."""
    inside, waiting = Stopwatch(), Stopwatch()
    train.one_pass = inside(train.one_pass)
    train.heldout_loss = inside(train.heldout_loss)
    # The first set is simulated before training, all others by another thread during training.
    prefetch.Prefetcher.next = waiting(prefetch.Prefetcher.next)  # type: ignore[method-assign]
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
    whole = time.perf_counter() - start
    total = sum(history.seconds for history in compiled.history.networks.values())
    rest = total - inside.seconds - waiting.seconds
    parts = {
        "jitted calls, with their compilation": inside.seconds,
        "awaiting data": waiting.seconds,
        "Python": rest,
    }
    rows = [[what, f"{spent:.2f}", f"{spent / total:.1%}"] for what, spent in parts.items()]
    print(f"\nPumps, compiled in {whole:.1f} s, of which {total:.1f} s were training.")
    report.table(["spent in", "s", "of training"], rows)


def main() -> None:
    """Print both tables."""
    full = report.full(__doc__)
    against_torch(20 if full else 10)
    outside_xla(60.0 if full else 20.0)


if __name__ == "__main__":
    main()
