"""Time and effective samples of inference from a data set, by `infer` and by NumPyro's NUTS.

For `benchmarks.newdata`, in processes that stay alive: `python -m benchmarks.newdata_worker ours
MODEL FILE` loads a compiled model, `… nuts MODEL` runs NUTS. Every input line has a number of
particles and a seed. The answer is the seconds, the minimum and the mean of the effective samples
over all scalars, the seconds including everything that a new data set requires, and the means of
the scalars. The first answer includes compilation. Later, `infer` is called several times in a row
and the median time is given: calls are short, and the first one after another process has run finds
empty caches.

Effective samples of a mean are (sd / standard error)²: ArviZ's for NUTS, from the weights for
`infer`.
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
from retrodict.graph.prior_draws import prior_sampler
from retrodict.training.prior_datasets import simulate_datasets

WARMUP, SAMPLES, CHAINS = 500, 1000, 4
CALLS_IN_A_ROW = 5  # as in newdata_sbi.py
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
    reference = load_reference("pumps")
    return {"t": np.array(reference["t"]), "y": np.array(reference["y"])}


class Case(NamedTuple):
    """A model with its data.

    Attributes:
        model: the NumPyro model.
        data: site → values.
        sites: latents, in the order in which means are printed.
        for_nuts: the model for NUTS; non-centred where a scale may be near zero.
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


def _flatten(values: Mapping[str, Any], sites: Sequence[str]) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(values[site])) for site in sites])


def _effective_samples(posterior: rd.Posterior, site: str) -> np.ndarray:
    return np.asarray((posterior.sd(site) / posterior.mcse(site)) ** 2)


def time_infer(
    case: Case, compiled: rd.Compiled, num_particles: int, seed: int, calls: int = CALLS_IN_A_ROW
) -> tuple[float, ...]:
    """Time calls of `infer`, as a user would write them."""
    times = []
    for number in range(calls):
        start_time = time.perf_counter()
        key = jax.random.key(100 * seed + number)
        posterior = compiled.infer(key, case.data, num_particles)
        jax.block_until_ready(posterior.samples)
        times.append(time.perf_counter() - start_time)
    seconds = float(np.median(times))
    sizes = _flatten({s: _effective_samples(posterior, s) for s in case.sites}, case.sites)
    means = _flatten({site: posterior.mean(site) for site in case.sites}, case.sites)
    return seconds, sizes.min(), sizes.mean(), seconds, *means


def time_infer_many(
    case: Case, compiled: rd.Compiled, data: Mapping[str, Any], num_particles: int, seed: int
) -> tuple[float, ...]:
    """Time one call of `infer_many`.

    Returns:
        Seconds; sums over data sets of the minimum and of the mean of the effective samples over
        scalars; the share of posteriors graded poor.
    """
    start_time = time.perf_counter()
    posteriors = compiled.infer_many(jax.random.key(seed), data, num_particles, rescue=False)
    jax.block_until_ready(posteriors.samples)
    seconds = time.perf_counter() - start_time
    columns = [
        _effective_samples(posteriors, site).reshape(len(posteriors), -1) for site in case.sites
    ]
    sizes = np.nan_to_num(np.concatenate(columns, 1))
    poor = float(np.mean(np.asarray(posteriors.grade) == 2))
    return seconds, sizes.min(1).sum(), sizes.mean(1).sum(), poor


def nuts_runner(
    values: Mapping[str, Any], case: Case = CASES["pumps"]
) -> Callable[[int], tuple[float, ...]]:
    """Return a function that runs NUTS with a seed.

    Its results are the seconds without warm-up, the minimum and mean of the effective samples, the
    seconds with warm-up, and the means.
    """
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
        start_time = time.perf_counter()
        mcmc.warmup(jax.random.key(seed), **data)
        jax.block_until_ready(mcmc.last_state)
        warmup_end = time.perf_counter()
        mcmc.run(mcmc.post_warmup_state.rng_key, **data)
        draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
        end_time = time.perf_counter()
        chains = {site: np.asarray(draws[site]) for site in case.sites}
        ess: Any = arviz.ess(chains, method="mean")
        sizes = _flatten({site: ess[site].values for site in case.sites}, case.sites)
        means = _flatten({site: chains[site].mean((0, 1)) for site in case.sites}, case.sites)
        return end_time - warmup_end, sizes.min(), sizes.mean(), end_time - start_time, *means

    return call


def simulate_data(compiled: rd.Compiled, num_datasets: int) -> dict[str, np.ndarray]:
    """Simulate data sets from the model."""
    graph = compiled.graph
    draws, _ = simulate_datasets(graph, prior_sampler(graph), jax.random.key(5), num_datasets)
    return {name: draws[name] for name in graph.observed}


def main() -> None:
    """Answer requests."""
    warnings.simplefilter("ignore")
    method, name, *path = sys.argv[1:]
    case = CASES[name]
    if method == "nuts":
        sampler = nuts_runner(case.data, case)
        calls: dict[str, Callable[[int, int], tuple[float, ...]]] = {
            "one": lambda _, seed: sampler(seed)
        }
    else:
        start_time = time.perf_counter()
        compiled = rd.load(path[0], case.model)
        print(time.perf_counter() - start_time, flush=True)
        calls = {
            "one": partial(time_infer, case, compiled),
            "first": partial(time_infer, case, compiled, calls=1),
        }
    for line in sys.stdin:
        request, num_particles, seed = line.split()
        if request not in calls:
            data = simulate_data(compiled, int(request.removeprefix("many-")))
            calls[request] = partial(time_infer_many, case, compiled, data)
        print(*calls[request](int(num_particles), int(seed)), flush=True)


if __name__ == "__main__":
    main()
