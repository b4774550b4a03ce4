"""Divide and conquer: merges, marginals, and evidence against linear algebra."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import retrodict as rd
from exact import hierarchy, hierarchy_exact
from retrodict._xla.jit import CompiledFunction
from retrodict._xla.tuning import FAST_COMPILE
from retrodict.inference.divide_conquer import (
    DivideAndConquer,
    ResamplingCost,
    Subtree,
    _sum_over_plates,
)
from retrodict.particles.resampling import systematic
from retrodict.proposal.proposal import Proposal
from zoo import key

TINY = rd.MADE(hidden=(8,), components=2, context=(4,))
NO_COST = ResamplingCost(jnp.zeros(()), {}, ())


def two_levels(n=3):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", n):
        theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(theta, 0.5))


def joint_leaf(n=3):
    """Of the joint leaf (a, b), the prior of a depends on nothing, that of b on mu."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", n):
        b = numpyro.sample("b", dist.Normal(mu, 0.8))
        a = numpyro.sample("a", dist.Normal(0.0, 0.6))
        numpyro.sample("y", dist.Normal(a + b, 0.5))


def scalar_covariate(n=3):
    """An observed covariate outside of the plate."""
    z = numpyro.sample("z", dist.Normal(0.0, 2.0))
    mu = numpyro.sample("mu", dist.Normal(z, 1.0))
    with numpyro.plate("n", n):
        theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(theta, 0.5))


class Case(NamedTuple):
    model: Callable[..., Any]
    data: dict[str, np.ndarray]
    log_evidence: float
    mean_of_mu: float
    kwargs: dict[str, int]


def one_plate(model, variance, **covariates):
    """Three observations with means mu + noise; the prior mean of mu is the covariate, if any."""
    y, prior_mean = np.array([0.3, -1.0, 1.5]), float(covariates.get("z", 0.0))
    cov = np.ones((3, 3)) + variance * np.eye(3)
    log_evidence = stats.multivariate_normal.logpdf(y, np.full(3, prior_mean), cov)
    log_evidence += sum(stats.norm.logpdf(z, 0.0, 2.0) for z in covariates.values())
    mean = prior_mean + np.ones(3) @ np.linalg.solve(cov, y - prior_mean)
    return Case(model, {**covariates, "y": y}, log_evidence, mean, {})


Y_NESTED = np.array([[0.3, -0.5], [1.2, 0.4]])
NESTED = hierarchy_exact(Y_NESTED)
MODELS = {
    "two levels": one_plate(two_levels, 1.0 + 0.25),
    "joint leaf": one_plate(joint_leaf, 0.64 + 0.36 + 0.25),
    "scalar covariate": one_plate(scalar_covariate, 1.0 + 0.25, z=np.array(0.7)),
    "nested plates": Case(
        hierarchy,
        {"y": Y_NESTED},
        NESTED.log_evidence,
        float(NESTED.means["mu"]),
        {"groups": 2, "members": 2},
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


@cache
def untrained(name):
    """A proposal with untrained marginals; other conditionals are known in closed form."""
    model, data, *_, kwargs = MODELS[name]
    graph = rd.trace(model, tuple(data), model_kwargs=kwargs)
    proposal = Proposal.of(rd.invert(graph, "blanket"))
    networks = {
        name: proposal.build(TINY, key(), structures)
        for name, structures in proposal.networks().items()
    }
    arrays = {site: jnp.asarray(value, jnp.float32) for site, value in data.items()}
    return proposal, networks, arrays


@cache
def repeated_runs(name):
    """Ẑ / Z and the posterior mean of mu, of 400 runs."""
    proposal, networks, data = untrained(name)
    sampler = DivideAndConquer(proposal, 200, systematic)

    def run(networks, rng_key):
        population, _ = sampler.run(networks, rng_key, data)
        mean = jnp.exp(population.log_weights) @ population.values["mu"]
        return population.log_evidence, mean

    run_all = CompiledFunction(jax.vmap(run, (None, 0)), FAST_COMPILE)
    log_evidence, means = run_all(networks, jax.random.split(key(1), 400))
    ratio = np.exp(log_evidence.value() - MODELS[name].log_evidence)
    return ratio, np.asarray(means, float)


@every_model
def test_evidence_is_unbiased(name):
    """The mean of Ẑ / Z is 1 within 3 standard errors."""
    ratio, _ = repeated_runs(name)
    error = ratio.std(ddof=1) / np.sqrt(len(ratio))
    assert error < 0.05
    assert abs(ratio.mean() - 1) < 3 * error


@every_model
def test_posterior_means_are_those_of_linear_algebra(name):
    """Within 4 standard errors of the mean over runs, each weighted by its evidence."""
    weights, means = repeated_runs(name)
    weights = weights / weights.sum()
    pooled = weights @ means
    error = np.sqrt(weights**2 @ (means - pooled) ** 2)
    assert error < 0.05
    assert abs(pooled - MODELS[name].mean_of_mu) < 4 * error


@every_model
def test_changes_of_the_target_add_up_to_the_joint_density(name):
    """Over all stages and the root, at any latents: every marginal is divided out again."""
    proposal, networks, data = untrained(name)
    sampler = DivideAndConquer(proposal, 5, systematic)
    assert sampler.schedule.marginal_stages
    keys = jax.random.split(key(2), 5)
    values = jax.jit(jax.vmap(lambda k: proposal.graph.program.run(k, data).values))(keys)
    latents = {site: values[site] for site in proposal.graph.latent}

    def total_change(latents):
        num_factors = len(proposal.inverse.factors)
        changes = [
            sampler._log_target_change(networks, number, latents, data)[0]
            for number in range(num_factors + 1)
        ]
        return sum(change.reshape(-1, 5).sum(0) for change in changes)

    def log_joint(latents):
        densities = proposal.graph.program.log_density({**data, **latents})
        return sum(density.sum() for density in densities.values())

    expected = jax.jit(jax.vmap(log_joint))(latents)
    np.testing.assert_allclose(jax.jit(total_change)(latents), expected, rtol=1e-4, atol=1e-3)


def test_a_merge_resamples_every_element_by_itself():
    """Two elements whose weights lie on different particles, and a latent that is not merged."""
    proposal, *_ = untrained("two levels")
    sampler = DivideAndConquer(proposal, 4, systematic)
    weights = np.array([[4.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    theta = jnp.arange(12.0).reshape(4, 3)
    latents = {"theta": theta, "mu": jnp.arange(4.0)}
    before = jnp.array([0.1, 0.2, 0.3])
    tree = Subtree(("theta",), ("n",), jnp.log(weights), before)
    merged, log_evidence, cost = sampler._merge(key(), latents, [tree], (), NO_COST)
    np.testing.assert_array_equal(merged["mu"], latents["mu"])
    assert set(np.asarray(merged["theta"][:, 0])) == {0.0}
    assert sorted(np.asarray(merged["theta"][:, 1])) == [4.0, 4.0, 10.0, 10.0]
    assert sorted(np.asarray(merged["theta"][:, 2])) == [2.0, 5.0, 8.0, 11.0]
    # every mean weight is 1, so that only the evidence of the elements is left
    assert float(log_evidence) == pytest.approx(0.6, abs=1e-5)
    copies = 1 / np.array([1.0, 2.0, 4.0]) - 0.25
    assert float(cost.log_evidence_variance) == pytest.approx(copies.sum(), rel=1e-5)
    assert float(cost.duplication["theta"]) == pytest.approx(copies.max(), rel=1e-5)
    assert [float(size) for size in cost.smallest_ess] == pytest.approx([1.0])


def test_a_merge_into_an_outer_plate_sums_the_evidence_over_the_inner_one():
    proposal, *_ = untrained("nested plates")
    sampler = DivideAndConquer(proposal, 4, systematic)
    log_weights = jnp.log(jnp.arange(1.0, 5.0).reshape(2, 2, 1) * jnp.ones(4))
    tree = Subtree(("b",), ("groups", "members"), log_weights, jnp.ones((2, 2)))
    latents = {"b": jnp.arange(16.0).reshape(4, 2, 2)}
    merged, log_evidence, _ = sampler._merge(key(), latents, [tree], ("groups",), NO_COST)
    expected = np.log(np.arange(1.0, 5.0)).reshape(2, 2).sum(1) + 2
    np.testing.assert_allclose(log_evidence, expected, rtol=1e-5)
    # equal weights: every element keeps its particles, in an order of its own
    for index in np.ndindex(2, 2):
        column = np.asarray(merged["b"])[:, *index]
        assert sorted(column) == sorted(np.asarray(latents["b"])[:, *index])
    assert not np.array_equal(np.argsort(merged["b"][:, 0, 0]), np.argsort(merged["b"][:, 1, 1]))


@pytest.mark.parametrize("kept", [(), ("a",), ("b",), ("a", "b"), ("b", "a")])
def test_sums_over_plates_keep_the_plates_asked_for(kept):
    values = np.random.default_rng(0).normal(size=(5, 2, 3))
    letters = "".join(kept) + "k"
    expected = np.einsum(f"kab->{letters}", values)
    found = _sum_over_plates(jnp.asarray(values), ("a", "b"), kept)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
