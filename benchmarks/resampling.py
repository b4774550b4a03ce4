"""Time of a resampling step: retrodict, BlackJAX, and a plain bisection.

Run as `python -m benchmarks.resampling [--full]`. Each rule computes ancestor indices from log
weights in one jitted function; the rules are measured in turn. A ratio above 1 says how many times
faster retrodict is.
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


def bisection_rule(name: str, num: int) -> Rule:
    """Look up the points of a rule in the cumulative weights by bisection."""

    def rule(key: Array, log_weights: Array) -> Array:
        cumulative = jnp.cumsum(jax.nn.softmax(log_weights))
        if name == "multinomial":
            points = jnp.sort(jax.random.uniform(key, (num,)))
        else:
            shape = () if name == "systematic" else (num,)
            points = (jnp.arange(num) + jax.random.uniform(key, shape)) / num
        return jnp.minimum(jnp.searchsorted(cumulative, points), num - 1)

    return rule


def blackjax_rule(name: str, num: int) -> Rule:
    """BlackJAX's rule of that name; it takes weights instead of log weights."""
    rule = getattr(blackjax, name)
    return lambda key, log_weights: rule(key, jax.nn.softmax(log_weights), num)


def retrodict_rule(name: str, num: int) -> Rule:
    """retrodict's rule of that name."""
    rule = RESAMPLERS[name]
    return lambda key, log_weights: rule(key, log_weights, num)


def measure(rules: dict[str, Rule], num: int, seconds: float) -> dict[str, np.ndarray]:
    """Seconds of each rule, measured in turn until the time is up."""
    key = jax.random.key(0)
    log_weights = jax.random.normal(key, (num,))
    compiled = {name: jax.jit(rule) for name, rule in rules.items()}
    for rule in compiled.values():
        jax.block_until_ready(rule(key, log_weights))
    times: dict[str, list[float]] = {name: [] for name in rules}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["ours"]) < 3:
        for name, rule in compiled.items():
            start_time = time.perf_counter()
            jax.block_until_ready(rule(key, log_weights))
            times[name].append(time.perf_counter() - start_time)
    return {name: np.array(column) for name, column in times.items()}


def main() -> None:
    """Print a table of times and ratios."""
    full = report.parse_full_flag(__doc__)
    sizes = [10**3, 10**4, 10**5, 10**6] if full else [10**3, 10**6]
    rows = []
    for name in RESAMPLERS:
        for num in sizes:
            report.log_progress(f"resampling: {name}, {num}")
            rules = {"ours": retrodict_rule(name, num), "blackjax": blackjax_rule(name, num)}
            if name != "residual":
                rules["bisection"] = bisection_rule(name, num)
            times = measure(rules, num, 3.0 if full else 1.5)
            ratios = [
                report.format_quartiles(times[other] / times["ours"]) if other in times else ""
                for other in ("blackjax", "bisection")
            ]
            rows.append([f"{name}, {num}", report.format_quartiles(times["ours"], 1e6), *ratios])
    header = ["rule, particles", "ours, µs", "BlackJAX / ours", "bisection / ours"]
    report.print_table(header, rows)


if __name__ == "__main__":
    main()
