"""Cost of sampling: in one pass, with a pass for each coordinate, and in other libraries.

Run as `python -m benchmarks.drawing [--full]`. Draws come with their log densities. All networks
have the same hidden layers, real coordinates and one context of the same size for all draws.
flowjax and zuko use one transformation with a shift and a scale from the last layer: one Gaussian
for each coordinate. retrodict is measured with one Gaussian and its defensive component, and with
ten Gaussians, its default.
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
from benchmarks.peers import Peer, environment, run_interleaved
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
    """A latent vector of real coordinates."""
    return (Latent("x", constraints.real_vector, (number,)),)


def binary(number: int) -> tuple[Latent, ...]:
    """A latent vector of binary coordinates."""
    return (Latent("x", BITS, (number,)),)


def encode(net: ConditionalMADE, y: Any) -> Any:
    """Encode one context."""
    return net.encode(Conditions({"y": y}))


def sample_one(net: ConditionalMADE, key: Any, encoding: Any) -> Any:
    """Sample once, with the log density."""
    return net.sample(encoding, net.noise(key))


def draw_shared_context(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Sample given one context."""
    return jax.vmap(partial(sample_one, net), (0, None))(keys, encode(net, y))


sample_shared = low_latency_jit(draw_shared_context)  # jitted as in `infer`


@eqx.filter_jit
def density_shared(net: ConditionalMADE, x: Any, y: Any) -> Any:
    """Log densities given one context."""
    return jax.vmap(net.log_prob, (None, 0))(encode(net, y), x)


@eqx.filter_jit
def sample_each(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Sample, each draw given its own context."""
    return jax.vmap(lambda key, y: sample_one(net, key, encode(net, y)))(keys, y)


@eqx.filter_jit
def density_each(net: ConditionalMADE, x: Any, y: Any) -> Any:
    """Log densities, each given its own context."""
    return jax.vmap(lambda x, y: net.log_prob(encode(net, y), x))(x, y)


@eqx.filter_jit
def sample_sequentially(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Sample with a complete pass for each coordinate, as is usual."""
    encoding = encode(net, y)
    (segment,) = net.network.segments

    def one(key: Any) -> Any:
        noise = net.noise(key)

        def draw(d: Any, row: Any) -> Any:
            c = net._constants(row)
            (params,) = net.network.params(encoding, row, c)
            constants_d = type(c)(*(column[d] for column in c))
            return row.at[d].set(segment.head.sample(params[d], noise[d], constants_d))

        row = jax.lax.fori_loop(0, noise.shape[0], draw, jnp.zeros(noise.shape[0]))
        x = unflatten(net.latents, row)
        return x, net.log_prob(encoding, x)

    return jax.vmap(one)(keys)


def time_call(call: Callable[[], Any]) -> Callable[[int], float]:
    """Compile a call; return a function that measures its seconds."""
    jax.block_until_ready(call())

    def run(_: int) -> float:
        start_time = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start_time

    return run


def network(latents: tuple[Latent, ...], components: int = 10) -> ConditionalMADE:
    """An untrained network, which is as fast as a trained one."""
    options = MADE(hidden=(WIDTH,) * DEPTH, components=components, context=())
    return options.build(jax.random.key(0), latents, INPUTS)


def compare_with_density(numbers: Sequence[int], repeats: int) -> None:
    """Print the time of sampling relative to that of the log density."""
    rows = []
    for name, latents in {"20 binary": binary(20), "10 real": real(10)}.items():
        net = network(latents)
        y = jax.random.normal(jax.random.key(1), (max(numbers), CONTEXT))
        for number in numbers:
            report.log_progress(f"draws of {name}: {number}")
            keys, own_contexts = jax.random.split(jax.random.key(2), number), y[:number]
            x, _ = sample_shared(net, keys, y[0])
            calls = {
                "density": time_call(partial(density_shared, net, x, y[0])),
                "one pass": time_call(partial(sample_shared, net, keys, y[0])),
                "naive": time_call(partial(sample_sequentially, net, keys, y[0])),
                "density each": time_call(partial(density_each, net, x, own_contexts)),
                "each": time_call(partial(sample_each, net, keys, own_contexts)),
            }
            results = run_interleaved(calls, repeats, pause=0.05)
            times = {call: np.array(seconds) for call, seconds in results.items()}
            rows.append(
                [
                    f"{name}, {number} draws",
                    report.format_quartiles(times["density"], 1e3),
                    report.format_quartiles(times["one pass"] / times["density"]),
                    report.format_quartiles(times["naive"] / times["density"]),
                    report.format_quartiles(times["each"] / times["density each"]),
                ]
            )
    print("Time to sample, relative to the time of `log_prob` for the same number of draws.")
    header = ["latents", "log_prob, ms", "one pass", "a pass for each coordinate", "own contexts"]
    report.print_table(header, rows)


def compare_with_peers(dimensions: Sequence[int], number: int, repeats: int) -> None:
    """Print times of sampling by dimension, and whether the target is reached."""
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
            report.log_progress(f"draws of {size} real coordinates")
            calls: dict[str, Callable[[int], float]] = {}
            for components in COMPONENTS:
                net = network(real(size), components)
                calls[f"ours {components}"] = time_call(partial(sample_shared, net, keys, y))
                sequentially = partial(sample_sequentially, net, keys, y)
                calls[f"N passes {components}"] = time_call(sequentially)
            for name, peer in peers.items():
                calls[name] = lambda seed, peer=peer, size=size: float(
                    peer.ask(size, number, seed)[0]
                )
                calls[name](0)
            times[size] = {n: np.array(t) for n, t in run_interleaved(calls, repeats).items()}
    print(f"\n### {number} draws with their log densities, by dimension")
    for components in COMPONENTS:
        print_comparison(times, components)


def print_comparison(times: Mapping[int, Mapping[str, np.ndarray]], components: int) -> None:
    """Print the table for one number of Gaussians per coordinate."""
    mixture = f"{components} Gaussian{'s' * (components > 1)} per coordinate"
    others = {"MADE, N passes": f"N passes {components}", **{name: name for name in PEERS}}
    ratios = {
        size: {name: seconds[key] / seconds[f"ours {components}"] for name, key in others.items()}
        for size, seconds in times.items()
    }
    rows = [
        [size, report.format_quartiles(seconds[f"ours {components}"], 1e3)]
        + [report.format_quartiles(ratio) for ratio in ratios[size].values()]
        for size, seconds in times.items()
    ]
    print(f"\nretrodict with {mixture}.")
    report.print_table(["dimensions", "ours, ms", *(f"{name} / ours" for name in others)], rows)
    at_20 = {name: float(np.median(ratio)) for name, ratio in ratios[20].items()}
    speedups = ", ".join(f"{report.format_number(x)} ({name})" for name, x in at_20.items())
    report.print_target(
        "at 20 dimensions at least 5 times faster than N passes, flowjax and zuko, "
        f"retrodict with {mixture}",
        f"speed-up: {speedups}",
        min(at_20.values()) >= 5,
    )


def compile_times() -> None:
    """Print the times to trace and compile the sampler."""
    rows = []
    for number in (20, 200):
        net = network(binary(number))
        keys = jax.random.split(jax.random.key(2), 1_000)
        start_time = time.perf_counter()
        lowered = jax.jit(partial(draw_shared_context, net)).lower(keys, jnp.zeros(CONTEXT))
        trace_seconds = time.perf_counter() - start_time
        lowered.compile()
        compile_seconds = time.perf_counter() - start_time - trace_seconds
        rows.append([f"{number} binary", f"{trace_seconds:.2f}", f"{compile_seconds:.2f}"])
    print("\n### Compiling the sampler")
    report.print_table(["latents", "trace, s", "compile, s"], rows)


def main() -> None:
    """Print all tables."""
    full = report.parse_full_flag(__doc__)
    compare_with_density((100, 1_000, 10_000) if full else (1_000,), 15 if full else 7)
    compare_with_peers((5, 10, 20, 40), 1_000, 15 if full else 5)
    compile_times()


if __name__ == "__main__":
    main()
