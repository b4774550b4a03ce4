"""How fast is training: steps a second against PyTorch, and time spent outside of XLA.

Run as `python -m benchmarks.training`. PyTorch gets an environment of its own, made in the user's
cache folder on the first run. Both networks take turns in processes that stay alive, and the best
of several repeats counts, so that a busy machine weighs on both alike.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from numpyro.distributions import constraints

import retrodict as rd
from benchmarks.peers import Peer, environment, in_turn
from retrodict import synthetic, train
from retrodict.networks import MADE, Latent, Value, trainable

TORCH = "2.13.0"
BITS = constraints.independent(constraints.boolean, 1)
BATCH, STEPS, REPEATS = 500, 64, 12


def our_passes() -> Callable[[], float]:
    """Makes `STEPS` steps of the factorial HMM's network, and gives the seconds."""
    latents, inputs = (Latent("x", BITS, (20,)),), (Value("c", BITS, (41,)),)
    net = MADE(hidden=(300,) * 4, context=()).build(jax.random.key(0), latents, inputs)
    keys = jax.random.split(jax.random.key(1))
    x, c = (
        jax.random.bernoulli(k, 0.5, (STEPS * BATCH, n)) * 1.0
        for k, n in zip(keys, (20, 41), strict=True)
    )
    weights, fixed = eqx.partition(net, trainable(net))
    state = train.State.start(weights, 5.0)
    pace = train.Pace(jnp.full(STEPS, 1e-3), jnp.full(STEPS, 0.99))

    def run() -> float:
        start = time.perf_counter()
        new = train.one_pass(jax.random.key(2), state, ({"x": x}, {"c": c}), fixed, pace, 5.0)
        jax.block_until_ready(new)
        return time.perf_counter() - start

    run()
    return run


def against_torch() -> None:
    """Print steps a second of both, and their ratio."""
    script = Path(__file__).with_name("training_torch.py")
    with Peer(environment(f"torch=={TORCH}", "numpy"), script) as peer:
        version, threads = peer.read()
        ours = our_passes()
        calls = {"ours": lambda _: ours(), "theirs": lambda _: float(peer.ask(STEPS)[0])}
        calls["theirs"](0)
        times = in_turn(calls, REPEATS, pause=0.3)
    best = [STEPS / min(column) for column in times.values()]
    print(f"| steps/s, 4×300, 41 inputs, batch {BATCH} | ratio |\n| --- | ---: |")
    print(f"| PyTorch {version}, {threads} threads, fused Adam: {best[1]:.0f} | |")
    print(f"| retrodict: {best[0]:.0f} | {best[0] / best[1]:.2f} |")


class Stopwatch:
    """Adds up the time that calls take, including their results."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, timed."""

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = jax.block_until_ready(call(*args))
            self.seconds += time.perf_counter() - start
            return result

        return timed


def outside_xla(seconds: float = 60.0) -> None:
    """Print how much of a training's time is spent outside of compiled code and of compiling."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.zoo import pumps

    inside, waiting = Stopwatch(), Stopwatch()
    train.one_pass = inside(train.one_pass)
    train.heldout_loss = inside(train.heldout_loss)
    # The first set is made before training, all others in another thread meanwhile.
    synthetic.Sets.next = waiting(synthetic.Sets.next)  # type: ignore[method-assign]
    start = time.perf_counter()
    compiled = rd.compile(
        jax.random.key(0),
        pumps,
        ("t", "y"),
        inverse="faithful",
        training=rd.Training(max_seconds=seconds),
        progress_bar=False,
    )
    histories = compiled.history.networks.values()
    total = sum(h.seconds for h in histories)
    print(f"\ncompiling took {time.perf_counter() - start:.1f} s, of which {total:.1f} s training")
    print(f"in jitted calls: {inside.seconds:.1f} s; awaiting data: {waiting.seconds:.1f} s")
    rest = total - inside.seconds - waiting.seconds
    print(f"outside: {rest:.2f} s, {rest / total:.1%} of training")


if __name__ == "__main__":
    against_torch()
    outside_xla()
