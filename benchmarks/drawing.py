"""How much dearer is a draw than a density? Times of `sample_and_log_prob` over `log_prob`.

Run as `python -m benchmarks.drawing`. Ratios are of times measured in turn in one process, the
best of several repeats each, so that a busy machine weighs on both alike.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from numpyro.distributions import constraints

from retrodict.coordinates import unflatten
from retrodict.networks import MADE, ConditionalMADE, Latent, Value

BITS = constraints.independent(constraints.boolean, 1)
CASES = {
    "20 binary": (Latent("x", BITS, (20,)),),
    "10 real, 10 components": (Latent("x", constraints.real_vector, (10,)),),
}
INPUTS = (Value("y", constraints.real_vector, (21,)),)
OPTIONS = MADE(hidden=(300, 300, 300, 300), components=10)


def sample(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Draws given one context."""
    return jax.vmap(net.sample_and_log_prob_encoded, (0, None))(keys, net.encode({"y": y}))


def density(net: ConditionalMADE, x: Any, y: Any) -> Any:
    """Densities given one context."""
    return jax.vmap(net.log_prob_encoded, (None, 0))(net.encode({"y": y}), x)


def sample_each(net: ConditionalMADE, keys: Any, y: Any) -> Any:
    """Draws, each with a context of its own."""
    return jax.vmap(lambda key, y: net.sample_and_log_prob(key, {"y": y}))(keys, y)


def density_each(net: ConditionalMADE, x: Any, y: Any) -> Any:
    """Densities, each with a context of its own."""
    return jax.vmap(lambda x, y: net.log_prob({"y": y}, x))(x, y)


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


def best(repeats: int, *calls: Callable[[], Any]) -> list[float]:
    """Least time of each call in seconds, the calls taking turns."""
    times = [float("inf")] * len(calls)
    for call in calls:
        jax.block_until_ready(call())
    for _ in range(repeats):
        for place, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[place] = min(times[place], time.perf_counter() - start)
    return times


def ratios() -> None:
    """Print the table of times and ratios."""
    print("| latents | draws | log_prob, ms | one pass | naive | one pass, own contexts |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    jitted = [eqx.filter_jit(f) for f in (sample, density, sample_each, density_each, naive)]
    draw, log_prob, draw_each, log_prob_each, draw_naively = jitted
    for name, latents in CASES.items():
        net = OPTIONS.build(jax.random.key(0), latents, INPUTS)
        y = jax.random.normal(jax.random.key(1), (10_000, 21))
        for number in (100, 1_000, 10_000):
            keys = jax.random.split(jax.random.key(2), number)
            x, _ = draw(net, keys, y[0])
            own = y[:number]
            one_pass, dense, each, dense_each = best(
                20 if number < 10_000 else 7,
                partial(draw, net, keys, y[0]),
                partial(log_prob, net, x, y[0]),
                partial(draw_each, net, keys, own),
                partial(log_prob_each, net, x, own),
            )
            (many_passes,) = best(2, partial(draw_naively, net, keys, y[0]))
            print(
                f"| {name} | {number} | {1e3 * dense:.2f} | {one_pass / dense:.2f} "
                f"| {many_passes / dense:.1f} | {each / dense_each:.2f} |",
                flush=True,
            )


def compile_times() -> None:
    """Print the table of times to trace and compile the sampler."""
    print("\n| latents | trace, s | compile, s |")
    print("| --- | ---: | ---: |")
    for number in (20, 200):
        latents = (Latent("x", BITS, (number,)),)
        net = OPTIONS.build(jax.random.key(0), latents, INPUTS)
        keys = jax.random.split(jax.random.key(2), 1_000)
        start = time.perf_counter()
        lowered = jax.jit(partial(sample, net)).lower(keys, jnp.zeros(21))
        traced = time.perf_counter()
        lowered.compile()
        done = time.perf_counter()
        print(f"| {number} binary | {traced - start:.2f} | {done - traced:.2f} |", flush=True)


if __name__ == "__main__":
    ratios()
    compile_times()
