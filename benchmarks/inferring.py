"""A data set in; time and effective samples of its answer out: by `infer`, and by NumPyro's NUTS.

For `benchmarks.newdata`, in processes that stay alive: `python -m benchmarks.inferring ours MODEL
FILE` loads a compiled model, `… nuts MODEL` runs NUTS. Every line asks for a number of particles
and a seed; the answer is the seconds taken, the least and the mean effective samples over all
scalars, the seconds with all that a new data set needs, and the scalars' means. The first answer
includes what is compiled for it. From then on `infer` is called a few times in a row, and the
middle one of their times is given: a call is short, and the first after another process had the
machine finds its caches empty.

Effective samples of a mean are (sd / standard error)²: of NUTS ArviZ's, of ours by the weights.
"""

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam

import retrodict as rd
from retrodict.demos.models import pumps
from retrodict.demos.reference_answers import load_reference
from retrodict.graph.prior_draws import joint_draws
from retrodict.training.prior_datasets import simulate_datasets

WARMUP, SAMPLES, CHAINS = 500, 1000, 4
IN_A_ROW = 5  # as in newdata_sbi.py
SCORES = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(y: Any = None, sigma: Any = ERRORS) -> None:
    """Effects of coaching in eight schools, each estimated with a known error (Rubin 1981)."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(sigma)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def pumps_data() -> dict[str, np.ndarray]:
    """The ten pumps of George, Makov & Smith (1993)."""
    known = load_reference("pumps")
    return {"t": np.array(known["t"]), "y": np.array(known["y"])}


class Case(NamedTuple):
    """A model with its data.

    Attributes:
        sites: latents in the order in which means are given.
        for_nuts: the model as NUTS likes it: a scale that may be near zero is taken out.
    """

    model: Callable[..., Any]
    data: Mapping[str, np.ndarray]
    sites: tuple[str, ...]
    for_nuts: Callable[..., Any]


CASES = {
    "pumps": Case(pumps, pumps_data(), ("alpha", "beta", "theta"), pumps),
    "schools": Case(
        schools,
        {"y": SCORES},
        ("mu", "tau", "theta"),
        reparam(schools, config={"theta": LocScaleReparam(centered=0)}),
    ),
}


def _flat(values: Mapping[str, Any], sites: Sequence[str]) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(values[site])) for site in sites])


def ours(
    case: Case, compiled: rd.Compiled, num: int, seed: int, times: int = IN_A_ROW
) -> tuple[float, ...]:
    """Calls of `infer`, as anyone would write them."""
    taken = []
    for number in range(times):
        begun = time.perf_counter()
        found = compiled.infer(jax.random.key(100 * seed + number), case.data, num)
        jax.block_until_ready(found.samples)
        taken.append(time.perf_counter() - begun)
    seconds = float(np.median(taken))
    sizes = _flat({s: (found.sd(s) / found.mcse(s)) ** 2 for s in case.sites}, case.sites)
    means = _flat({site: found.mean(site) for site in case.sites}, case.sites)
    return seconds, sizes.min(), sizes.mean(), seconds, *means


def ours_many(
    case: Case, compiled: rd.Compiled, data: Mapping[str, Any], num: int, seed: int
) -> tuple[float, ...]:
    """One call of `infer_many`: seconds, effective samples over all data sets, share called poor.

    The effective samples are sums: of the least over scalars, and of the mean over scalars.
    """
    begun = time.perf_counter()
    found = compiled.infer_many(jax.random.key(seed), data, num, rescue=False)
    jax.block_until_ready(found.samples)
    seconds = time.perf_counter() - begun
    number = len(found)
    sizes = np.concatenate(
        [
            np.asarray((found.sd(site) / found.mcse(site)) ** 2).reshape(number, -1)
            for site in case.sites
        ],
        1,
    )
    sizes = np.nan_to_num(sizes)
    poor = float(np.mean(np.asarray(found.grade) == 2))
    return seconds, sizes.min(1).sum(), sizes.mean(1).sum(), poor


def nuts(
    values: Mapping[str, Any], case: Case = CASES["pumps"]
) -> Callable[[int], tuple[float, ...]]:
    """Seconds without warm-up, least and mean effective samples, seconds with warm-up, means."""
    import arviz

    mcmc = MCMC(
        NUTS(case.for_nuts),
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
        kept = {site: np.asarray(draws[site]) for site in case.sites}
        found: Any = arviz.ess(kept, method="mean")
        sizes = _flat({site: found[site].values for site in case.sites}, case.sites)
        means = _flat({site: value.mean((0, 1)) for site, value in kept.items()}, case.sites)
        return ended - warm, sizes.min(), sizes.mean(), ended - begun, *means

    return call


def synthetic(compiled: rd.Compiled, number: int) -> dict[str, np.ndarray]:
    """Data sets from the model itself."""
    graph = compiled.graph
    draws, _ = simulate_datasets(graph, joint_draws(graph), jax.random.key(5), number)
    return {name: draws[name] for name in graph.observed}


def main() -> None:
    """Answer requests."""
    warnings.simplefilter("ignore")
    kind, name, *path = sys.argv[1:]
    case = CASES[name]
    if kind == "nuts":
        sampler = nuts(case.data, case)
        calls: dict[str, Callable[[int, int], tuple[float, ...]]] = {
            "one": lambda _, seed: sampler(seed)
        }
    else:
        begun = time.perf_counter()
        compiled = rd.load(path[0], case.model)
        print(time.perf_counter() - begun, flush=True)
        calls = {
            "one": partial(ours, case, compiled),
            "first": partial(ours, case, compiled, times=1),
        }
    for line in sys.stdin:
        what, num, seed = line.split()
        if what not in calls:
            data = synthetic(compiled, int(what.removeprefix("many-")))
            calls[what] = partial(ours_many, case, compiled, data)
        print(*calls[what](int(num), int(seed)), flush=True)


if __name__ == "__main__":
    main()
