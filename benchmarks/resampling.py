"""Time of a resampling step: ours, BlackJAX's, and a bisection written out, in one run.

Run as `python -m benchmarks.resampling [--full]`. Every rule starts from log weights and ends with
ancestor indices, under one jit; rules take turns so that a busy machine is busy for all. A ratio
above 1 says how many times faster ours is.
"""

import time
from collections.abc import Callable

import blackjax.smc.resampling as blackjax
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import report
from retrodict.particles.resampling import RESAMPLERS

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


def times(rules: dict[str, Rule], num: int, seconds: float) -> dict[str, np.ndarray]:
    """Seconds of each rule, taking turns until the time is up."""
    key = jax.random.key(0)
    log_weights = jax.random.normal(key, (num,))
    compiled = {name: jax.jit(rule) for name, rule in rules.items()}
    for rule in compiled.values():
        jax.block_until_ready(rule(key, log_weights))
    found: dict[str, list[float]] = {name: [] for name in rules}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found["ours"]) < 3:
        for name, rule in compiled.items():
            begun = time.perf_counter()
            jax.block_until_ready(rule(key, log_weights))
            found[name].append(time.perf_counter() - begun)
    return {name: np.array(column) for name, column in found.items()}


def main() -> None:
    """Print a table of times and ratios."""
    full = report.full(__doc__)
    sizes = [10**3, 10**4, 10**5, 10**6] if full else [10**3, 10**6]
    rows = []
    for name in RESAMPLERS:
        for num in sizes:
            report.note(f"resampling: {name}, {num}")
            rules = {"ours": ours(name, num), "blackjax": theirs(name, num)}
            if name != "residual":
                rules["bisection"] = bisection(name, num)
            found = times(rules, num, 3.0 if full else 1.5)
            ratios = [
                report.spread(found[other] / found["ours"]) if other in found else ""
                for other in ("blackjax", "bisection")
            ]
            rows.append([f"{name}, {num}", report.spread(found["ours"], 1e6), *ratios])
    header = ["rule, particles", "ours, µs", "BlackJAX / ours", "bisection / ours"]
    report.table(header, rows)


if __name__ == "__main__":
    main()
