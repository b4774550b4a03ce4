"""Time of a draw: in one pass, in one pass for each coordinate, and with other libraries.

Run as `python -m benchmarks.drawing [--full]`. A draw includes its log density. Networks have the
same hidden layers, real coordinates and a context of the same size, the same for all draws. flowjax
and zuko read a shift and a scale from their last layer, in one transformation: one Gaussian for
each coordinate. Ours is measured with one Gaussian and the defensive component, and with the ten
Gaussians that are its default.
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
from retrodict.estimators.encoders import Conditions

BITS = constraints.independent(constraints.boolean, 1)
CONTEXT, WIDTH, DEPTH = 21, 300, 4
INPUTS = (Value("y", constraints.real_vector, (CONTEXT,)),)
COMPONENTS = (1, 10)
PEERS = {
    "flowjax": ("flowjax==19.1.2", f"jax=={jax.__version__}"),
    "zuko": ("zuko==1.6.0", "torch==2.13.0", "numpy"),
}


def real(number: int) -> tuple[Latent, ...]:
    """Latents of `number` real coordinates."""
    return (Latent("x", constraints.real_vector, (number,)),)


def binary(number: int) -> tuple[Latent, ...]:
    """Latents of `number` binary coordinates."""
    return (Latent("x", BITS, (number,)),)


def sample_one(net: ConditionalMADE, key: Any, encoding: Any) -> Any:
    """A draw and its log density."""
    return net.sample(encoding, net.noise(key))


def sample_shared(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Draws given one context."""
    encoding = net.encode(Conditions({"y": y}))
    return jax.vmap(lambda key: sample_one(net, key, encoding))(keys)


sample = low_latency_jit(sample_shared)  # as for `infer`


@eqx.filter_jit
def density(net: ConditionalMADE, x: Any, y: Any) -> Any:
    """Densities given one context."""
    encoding = net.encode(Conditions({"y": y}))
    return jax.vmap(lambda x: net.log_prob(encoding, x))(x)


@eqx.filter_jit
def sample_each(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Draws, each given its own context."""
    return jax.vmap(lambda key, y: sample_one(net, key, net.encode(Conditions({"y": y}))))(keys, y)


@eqx.filter_jit
def density_each(net: ConditionalMADE, x: Any, y: Any) -> Any:
    """Densities, each given its own context."""
    return jax.vmap(lambda x, y: net.log_prob(net.encode(Conditions({"y": y})), x))(x, y)


@eqx.filter_jit
def naive(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Draws by a whole pass for each coordinate, as is usual."""
    encoding = net.encode(Conditions({"y": y}))
    (segment,) = net.network.segments

    def one(key: Any) -> Any:
        noise = net.noise(key)

        def sample_coordinate(d: Any, row: Any) -> Any:
            c = net._constants(row)
            (params,) = net.network.params(encoding, row, c)
            constants = type(c)(*(column[d] for column in c))
            return row.at[d].set(segment.head.sample(params[d], noise[d], constants))

        number = noise.shape[0]
        row = jax.lax.fori_loop(0, number, sample_coordinate, jnp.zeros(number))
        x = unflatten(net.latents, row)
        return x, net.log_prob(encoding, x)

    return jax.vmap(one)(keys)


def timed(call: Callable[[], Any]) -> Callable[[int], float]:
    """A function that runs the compiled call and returns the seconds it takes."""
    jax.block_until_ready(call())

    def run(_: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start

    return run


def network(latents: tuple[Latent, ...], components: int = 10) -> ConditionalMADE:
    """An untrained network, which takes as long as a trained one."""
    options = MADE(hidden=(WIDTH,) * DEPTH, components=components, context=())
    return options.build(jax.random.key(0), latents, INPUTS)


def against_density(numbers: Sequence[int], repeats: int) -> None:
    """Print times of draws in units of the time of a density."""
    rows = []
    for name, latents in {"20 binary": binary(20), "10 real": real(10)}.items():
        net = network(latents)
        y = jax.random.normal(jax.random.key(1), (max(numbers), CONTEXT))
        for number in numbers:
            report.note(f"draws of {name}: {number}")
            keys = jax.random.split(jax.random.key(2), number)
            x, _ = sample(net, keys, y[0])
            calls = {
                "density": timed(partial(density, net, x, y[0])),
                "one pass": timed(partial(sample, net, keys, y[0])),
                "naive": timed(partial(naive, net, keys, y[0])),
                "density each": timed(partial(density_each, net, x, y[:number])),
                "each": timed(partial(sample_each, net, keys, y[:number])),
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
    print("Draws in units of the time of `log_prob` of as many.")
    header = ["latents", "log_prob, ms", "one pass", "a pass for each coordinate", "own contexts"]
    report.table(header, rows)


def against_peers(dimensions: Sequence[int], number: int, repeats: int) -> None:
    """Print times of draws by dimension, and whether the target is reached."""
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
        compare(times, components)


def compare(times: Mapping[int, Mapping[str, np.ndarray]], components: int) -> None:
    """Print the comparison of ours with so many Gaussians for each coordinate."""
    description = f"{components} Gaussian{'s' * (components > 1)} for each coordinate"
    others = {"MADE, N passes": f"N passes {components}", **{name: name for name in PEERS}}
    ratios = {
        size: {name: seconds[key] / seconds[f"ours {components}"] for name, key in others.items()}
        for size, seconds in times.items()
    }
    rows = [
        [size, report.spread(seconds[f"ours {components}"], 1e3)]
        + [report.spread(ratio) for ratio in ratios[size].values()]
        for size, seconds in times.items()
    ]
    print(f"\nOurs with {description}.")
    report.table(["dimensions", "ours, ms", *(f"{name} / ours" for name in others)], rows)
    at_20 = {name: float(np.median(ratio)) for name, ratio in ratios[20].items()}
    speedups = ", ".join(f"{report.short(ratio)} of {name}" for name, ratio in at_20.items())
    report.target(
        "at 20 dimensions at least 5 times faster than N passes, flowjax and zuko, "
        f"ours with {description}",
        f"times faster: {speedups}",
        min(at_20.values()) >= 5,
    )


def compile_times() -> None:
    """Print times to trace and compile the sampler."""
    rows = []
    for number in (20, 200):
        net = network(binary(number))
        keys = jax.random.split(jax.random.key(2), 1_000)
        start = time.perf_counter()
        lowered = jax.jit(partial(sample_shared, net)).lower(keys, jnp.zeros(CONTEXT))
        traced = time.perf_counter()
        lowered.compile()
        compiled = time.perf_counter()
        rows.append([f"{number} binary", f"{traced - start:.2f}", f"{compiled - traced:.2f}"])
    print("\n### Compiling the sampler")
    report.table(["latents", "trace, s", "compile, s"], rows)


def main() -> None:
    """Print all tables."""
    full = report.full(__doc__)
    against_density((100, 1_000, 10_000) if full else (1_000,), 15 if full else 7)
    against_peers((5, 10, 20, 40), 1_000, 15 if full else 5)
    compile_times()


if __name__ == "__main__":
    main()
