"""Time of a resampling step: ours, BlackJAX's, and a bisection written out, in one run.

Run from the project's root: python -m benchmarks.resampling
Every rule starts from log weights and ends with ancestor indices, under one jit; each time is the
best of several, and rules take turns so that a busy machine is busy for all. A ratio above 1 says
how many times faster ours is.
"""

import argparse
import time
from collections.abc import Callable

import blackjax.smc.resampling as blackjax
import jax
import jax.numpy as jnp
from jax import Array

from retrodict.resampling import RESAMPLERS

Rule = Callable[[Array, Array], Array]


def bisection(name: str, num: int) -> Rule:
    """Points drawn by the rule, each looked up in the cumulative weights."""

    def rule(key: Array, log_weights: Array) -> Array:
        cumulative = jnp.cumsum(jax.nn.softmax(log_weights))
        if name == "multinomial":
            points = jnp.sort(jax.random.uniform(key, (num,)))
        else:
            shape = () if name == "systematic" else (num,)
            points = (jnp.arange(num) + jax.random.uniform(key, shape)) / num
        return jnp.minimum(jnp.searchsorted(cumulative, points), num - 1)

    return rule


def theirs(name: str, num: int) -> Rule:
    """BlackJAX's rule of that name, which takes weights."""
    rule = getattr(blackjax, name)
    return lambda key, log_weights: rule(key, jax.nn.softmax(log_weights), num)


def ours(name: str, num: int) -> Rule:
    """Our rule of that name."""
    rule = RESAMPLERS[name]
    return lambda key, log_weights: rule(key, log_weights, num)


def best_times(rules: dict[str, Rule], num: int, spread: float, seconds: float) -> dict[str, float]:
    """The best time of each rule, taking turns until the time is up."""
    key = jax.random.key(0)
    log_weights = spread * jax.random.normal(key, (num,))
    compiled = {name: jax.jit(rule) for name, rule in rules.items()}
    for rule in compiled.values():
        jax.block_until_ready(rule(key, log_weights))
    best = dict.fromkeys(rules, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, rule in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(rule(key, log_weights))
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    """Print a table of times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--spread", type=float, default=1.0, help="sd of the log weights")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each row")
    options = parser.parse_args()
    print("| rule | particles | ours, µs | BlackJAX / ours | bisection / ours |")
    print("| --- | --- | --- | --- | --- |")
    for name in RESAMPLERS:
        for num in options.sizes:
            rules = {"ours": ours(name, num), "blackjax": theirs(name, num)}
            if name != "residual":
                rules["bisection"] = bisection(name, num)
            best = best_times(rules, num, options.spread, options.seconds)
            ratios = [
                f"{best[other] / best['ours']:.1f}" if other in best else ""
                for other in ("blackjax", "bisection")
            ]
            print(f"| {name} | {num} | {best['ours'] * 1e6:.0f} | {ratios[0]} | {ratios[1]} |")


if __name__ == "__main__":
    main()
