"""Effective samples a second: a compiled model's `infer` against NumPyro's NUTS, on the ten pumps.

Run as `python -m benchmarks.inferring`. The faithful inverse is trained for a minute first. Both
are jitted and warm when the clock runs, they take turns, and the best of several repeats counts.
NUTS runs 4 vectorised chains; its clock runs without its warm-up, and in a row of its own with it,
for a new data set needs it anew. Effective samples are by site: of NUTS ArviZ's, of ours (sd /
standard error)² of the weighted mean; the least and the mean over sites.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC, NUTS

import retrodict as rd
from benchmarks.peers import in_turn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from exact import PUMPS, pumps_exact
from zoo import pumps

WARMUP, SAMPLES, CHAINS = 500, 1000, 4


def ours(compiled: rd.Compiled, num: int, method: str) -> Callable[[int], tuple[float, ...]]:
    """Seconds, least and mean effective samples, and the effective sample size of the weights."""

    def call(seed: int) -> tuple[float, ...]:
        key = jax.random.key(seed)
        begun = time.perf_counter()
        posterior = compiled.infer(key, PUMPS, num, method=method)  # type: ignore[arg-type]
        jax.block_until_ready(posterior.samples)
        seconds = time.perf_counter() - begun
        sizes = [np.ravel((posterior.sd(s) / posterior.mcse(s)) ** 2) for s in posterior.samples]
        by_site = np.concatenate(sizes)
        return seconds, by_site.min(), by_site.mean(), float(posterior.ess)

    return call


def nuts(values: Mapping[str, Any]) -> Callable[[int], tuple[float, ...]]:
    """Seconds without warm-up, least and mean effective samples, seconds with warm-up."""
    import arviz

    mcmc = MCMC(
        NUTS(pumps),
        num_warmup=WARMUP,
        num_samples=SAMPLES,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    data = {name: jax.numpy.asarray(value) for name, value in values.items()}

    def call(seed: int) -> tuple[float, ...]:
        begun = time.perf_counter()
        mcmc.warmup(jax.random.key(seed), **data)
        jax.block_until_ready(mcmc.last_state)
        warm = time.perf_counter()
        mcmc.run(mcmc.post_warmup_state.rng_key, **data)
        draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
        ended = time.perf_counter()
        found: Any = arviz.ess({name: np.asarray(value) for name, value in draws.items()})
        by_site = np.concatenate([np.ravel(found[name].values) for name in found.data_vars])
        return ended - warm, by_site.min(), by_site.mean(), ended - begun

    return call


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--particles", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    begun = time.perf_counter()
    compiled = rd.compile(
        jax.random.key(0),
        pumps,
        ("t", "y"),
        inverse="faithful",
        training=rd.Training(max_seconds=options.seconds),
        progress_bar=False,
    )
    print(f"compiled in {time.perf_counter() - begun:.0f} s")
    posterior = compiled.infer(jax.random.key(0), PUMPS, options.particles, method="importance")
    exact = pumps_exact(PUMPS)
    print(f"{posterior}; the exact log evidence is {exact.log_evidence:.3f}")
    calls = {"infer": ours(compiled, options.particles, "importance"), "NUTS": nuts(PUMPS)}
    for call in calls.values():
        call(0)
    # one call of ours is too short to be timed between two of NUTS's
    many = {"infer": lambda seed: min(calls["infer"](100 * seed + i) for i in range(30))}
    found = in_turn({**calls, **many}, options.repeats)
    ours_, theirs = np.array(found["infer"]), np.array(found["NUTS"])
    print("| | seconds | effective samples: least | mean | a second: least | mean |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    rates = {}
    for name, seconds, rows in (
        (f"infer, {options.particles} particles", ours_[:, 0].min(), ours_),
        (f"NUTS, {CHAINS} × {SAMPLES}", theirs[:, 0].min(), theirs),
        ("NUTS, warm-up included", theirs[:, 3].min(), theirs),
    ):
        least, mean = rows[:, 1].mean(), rows[:, 2].mean()
        rates[name] = np.array([least, mean]) / seconds
        print(
            f"| {name} | {seconds:.4f} | {least:.0f} | {mean:.0f} "
            f"| {rates[name][0]:.0f} | {rates[name][1]:.0f} |"
        )
    mine, *others = rates.values()
    for name, other in zip(list(rates)[1:], others, strict=True):
        print(f"infer / {name}: least {mine[0] / other[0]:.0f}, mean {mine[1] / other[1]:.0f}")


if __name__ == "__main__":
    main()
