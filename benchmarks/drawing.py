"""How much does a draw cost: in one pass, in one pass for each coordinate, and in other libraries.

Run as `python -m benchmarks.drawing [--full]`. A draw comes with its log density. Networks have the
same hidden layers, real coordinates and a context of the same size, the same for all draws. flowjax
and zuko read a shift and a scale from their last layer, in one transformation: one Gaussian for
each coordinate. Ours is measured with that, beside its wide component, and with the ten Gaussians
that are its default.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from benchmarks import report
from benchmarks.peers import Peer, environment, in_turn
from retrodict._xla.jit import low_latency_jit
from retrodict.estimators.conditional import MADE, ConditionalMADE, Latent, Value
from retrodict.estimators.coordinates import unflatten

BITS = constraints.independent(constraints.boolean, 1)
CONTEXT, WIDTH, DEPTH = 21, 300, 4
INPUTS = (Value("y", constraints.real_vector, (CONTEXT,)),)
COMPONENTS = (1, 10)
PEERS = {
    "flowjax": ("flowjax==19.1.2", f"jax=={jax.__version__}"),
    "zuko": ("zuko==1.6.0", "torch==2.13.0", "numpy"),
}


def real(number: int) -> tuple[Latent, ...]:
    """So many real coordinates."""
    return (Latent("x", constraints.real_vector, (number,)),)


def binary(number: int) -> tuple[Latent, ...]:
    """So many binary coordinates."""
    return (Latent("x", BITS, (number,)),)


def drawn(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Draws given one context."""
    return jax.vmap(net.sample_and_log_prob_encoded, (0, None))(keys, net.encode({"y": y}))


sample = low_latency_jit(drawn)  # as for `infer`


@eqx.filter_jit
def density(net: ConditionalMADE, x: Any, y: Any) -> Any:
    """Densities given one context."""
    return jax.vmap(net.log_prob_encoded, (None, 0))(net.encode({"y": y}), x)


@eqx.filter_jit
def sample_each(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Draws, each with a context of its own."""
    return jax.vmap(lambda key, y: net.sample_and_log_prob(key, {"y": y}))(keys, y)


@eqx.filter_jit
def density_each(net: ConditionalMADE, x: Any, y: Any) -> Any:
    """Densities, each with a context of its own."""
    return jax.vmap(lambda x, y: net.log_prob({"y": y}, x))(x, y)


@eqx.filter_jit
def naive(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Draws by a whole pass for each coordinate, as is usual."""
    encoding = net.encode({"y": y})

    def one(key: Any) -> Any:
        noise = net.noise(key)

        def draw(d: Any, row: Any) -> Any:
            c = net._constants(row)
            (params,) = net.network.params(encoding, row, c)
            (run,) = net.network.plan
            own = type(c)(*(column[d] for column in c))
            return row.at[d].set(run.head.draw(params[d], noise[d], own))

        row = jax.lax.fori_loop(0, noise.shape[0], draw, jnp.zeros(noise.shape[0]))
        x = unflatten(net.latents, row)
        return x, net.log_prob_encoded(encoding, x)

    return jax.vmap(one)(keys)


def timed(call: Callable[[], Any]) -> Callable[[int], float]:
    """The call, compiled; it gives the seconds it takes."""
    jax.block_until_ready(call())

    def run(_: int) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - begun

    return run


def network(latents: tuple[Latent, ...], components: int = 10) -> ConditionalMADE:
    """An untrained network, which takes as long as any."""
    options = MADE(hidden=(WIDTH,) * DEPTH, components=components, context=())
    return options.build(jax.random.key(0), latents, INPUTS)


def against_density(numbers: Sequence[int], repeats: int) -> None:
    """A table of draws in units of a density's time."""
    rows = []
    for name, latents in {"20 binary": binary(20), "10 real": real(10)}.items():
        net = network(latents)
        y = jax.random.normal(jax.random.key(1), (max(numbers), CONTEXT))
        for number in numbers:
            report.note(f"draws of {name}: {number}")
            keys, own = jax.random.split(jax.random.key(2), number), y[:number]
            x, _ = sample(net, keys, y[0])
            calls = {
                "density": timed(partial(density, net, x, y[0])),
                "one pass": timed(partial(sample, net, keys, y[0])),
                "naive": timed(partial(naive, net, keys, y[0])),
                "density each": timed(partial(density_each, net, x, own)),
                "each": timed(partial(sample_each, net, keys, own)),
            }
            times = {n: np.array(t) for n, t in in_turn(calls, repeats, pause=0.05).items()}
            rows.append(
                [
                    f"{name}, {number} draws",
                    report.spread(times["density"], 1e3),
                    report.spread(times["one pass"] / times["density"]),
                    report.spread(times["naive"] / times["density"]),
                    report.spread(times["each"] / times["density each"]),
                ]
            )
    print("Time to sample, relative to the time of `log_prob` for the same number of draws.")
    header = ["latents", "log_prob, ms", "one pass", "a pass for each coordinate", "own contexts"]
    report.table(header, rows)


def against_peers(dimensions: Sequence[int], number: int, repeats: int) -> None:
    """Tables of draws by dimension, and whether the target is reached."""
    sizes = json.dumps({"context": CONTEXT, "width": WIDTH, "depth": DEPTH})
    folder = Path(__file__).parent
    keys, y = jax.random.split(jax.random.key(2), number), jnp.linspace(-1.0, 1.0, CONTEXT)
    times: dict[int, dict[str, np.ndarray]] = {}
    with ExitStack() as stack:
        peers = {
            name: stack.enter_context(
                Peer(environment(*packages), folder / f"drawing_{name}.py", sizes)
            )
            for name, packages in PEERS.items()
        }
        for size in dimensions:
            report.note(f"draws of {size} real coordinates")
            calls: dict[str, Callable[[int], float]] = {}
            for components in COMPONENTS:
                net = network(real(size), components)
                calls[f"ours {components}"] = timed(partial(sample, net, keys, y))
                calls[f"N passes {components}"] = timed(partial(naive, net, keys, y))
            for name, peer in peers.items():
                calls[name] = lambda seed, peer=peer, size=size: float(
                    peer.ask(size, number, seed)[0]
                )
                calls[name](0)
            times[size] = {n: np.array(t) for n, t in in_turn(calls, repeats).items()}
    print(f"\n### {number} draws with their log densities, by dimension")
    for components in COMPONENTS:
        compared(times, components)


def compared(times: Mapping[int, Mapping[str, np.ndarray]], components: int) -> None:
    """The table of ours with so many Gaussians for each coordinate."""
    what = f"{components} Gaussian{'s' * (components > 1)} per coordinate"
    others = {"MADE, N passes": f"N passes {components}", **{name: name for name in PEERS}}
    ratios = {
        size: {name: taken[key] / taken[f"ours {components}"] for name, key in others.items()}
        for size, taken in times.items()
    }
    rows = [
        [size, report.spread(taken[f"ours {components}"], 1e3)]
        + [report.spread(ratio) for ratio in ratios[size].values()]
        for size, taken in times.items()
    ]
    print(f"\nretrodict with {what}.")
    report.table(["dimensions", "ours, ms", *(f"{name} / ours" for name in others)], rows)
    at_20 = {name: float(np.median(ratio)) for name, ratio in ratios[20].items()}
    found = ", ".join(f"{report.short(ratio)} ({name})" for name, ratio in at_20.items())
    report.target(
        "at 20 dimensions at least 5 times faster than N passes, flowjax and zuko, "
        f"retrodict with {what}",
        f"speed-up: {found}",
        min(at_20.values()) >= 5,
    )


def compile_times() -> None:
    """A table of times to trace and compile the sampler."""
    rows = []
    for number in (20, 200):
        net = network(binary(number))
        keys = jax.random.split(jax.random.key(2), 1_000)
        begun = time.perf_counter()
        lowered = jax.jit(partial(drawn, net)).lower(keys, jnp.zeros(CONTEXT))
        traced = time.perf_counter()
        lowered.compile()
        done = time.perf_counter()
        rows.append([f"{number} binary", f"{traced - begun:.2f}", f"{done - traced:.2f}"])
    print("\n### Compiling the sampler")
    report.table(["latents", "trace, s", "compile, s"], rows)


def main() -> None:
    """All tables."""
    full = report.full(__doc__)
    against_density((100, 1_000, 10_000) if full else (1_000,), 15 if full else 7)
    against_peers((5, 10, 20, 40), 1_000, 15 if full else 5)
    compile_times()


if __name__ == "__main__":
    main()
