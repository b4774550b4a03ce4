"""Models written as Python loops, whose steps are re-rolled into one loop for XLA."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import retrodict as rd
from exact import kalman, series_loop
from retrodict._xla.jit import CompiledFunction
from retrodict._xla.tuning import FAST_COMPILE
from retrodict.graph.site_log_densities import Slices
from retrodict.inference.smc import SMC
from retrodict.particles.resampling import systematic
from retrodict.proposal.proposal import Proposal
from zoo import key

TINY = rd.MADE(hidden=(8,), components=2, context=(4,))
SPREADS = np.linspace(0.5, 2.0, 30).astype(np.float32)
DESIGN = jnp.asarray(np.random.default_rng(0).normal(size=(30, 2)), jnp.float32)


def constants_differ(steps=9):
    """The first step differs; every step has its own noise and covariates."""
    x = numpyro.sample("x_0", dist.Normal(1.0, 3.0))
    numpyro.sample("y_0", dist.Normal(x, 0.3))
    for t in range(1, steps):
        mean = 0.8 * x + DESIGN[t] @ jnp.array([0.5, -0.5]) + DESIGN[t, 1]
        x = numpyro.sample(f"x_{t}", dist.Normal(mean, 0.7))
        numpyro.sample(f"y_{t}", dist.Normal(x, SPREADS[t]))


def unknown_drift(steps=9):
    """A latent outside of time; two latents and two observations per step; order two."""
    drift = numpyro.sample("drift", dist.Normal(0.5, 0.2))
    x, before = 0.0, 0.0
    for t in range(steps):
        mean = drift * x - 0.2 * before
        x, before = numpyro.sample(f"x_{t}", dist.Normal(mean, 1.0)), x
        z = numpyro.sample(f"z_{t}", dist.Normal(x, 1.0))
        numpyro.sample(f"n_{t}", dist.Bernoulli(logits=z))
        numpyro.sample(f"y_{t}", dist.Normal(x, 1.0))


def halves(steps=7):
    """Every step has another lag, so that no two steps are alike."""
    xs = [numpyro.sample("x_0", dist.Normal(0.0, 1.0))]
    numpyro.sample("y_0", dist.Normal(xs[0], 0.5))
    for t in range(1, steps):
        xs.append(numpyro.sample(f"x_{t}", dist.Normal(0.5 * xs[t // 2], 1.0)))
        numpyro.sample(f"y_{t}", dist.Normal(xs[-1], 0.5))


@cache
def untrained_proposal(model, steps):
    """A proposal with untrained networks, and simulated data."""
    sites = rd.trace(model, [f"y_{steps - 1}"], model_args=(steps,)).sites
    observed = [name for name in sites if name[0] in "yn"]
    proposal = Proposal.of(rd.invert(rd.trace(model, observed, model_args=(steps,)), "filter"))
    networks = {
        name: proposal.build(TINY, key(), structures)
        for name, structures in proposal.networks().items()
    }
    values = CompiledFunction(proposal.graph.program.simulate, FAST_COMPILE)(key(1))
    return proposal, networks, {name: values[name] for name in observed}


def compiled_smc(proposal, threshold, particles=20):
    return CompiledFunction(SMC(proposal, particles, systematic, threshold).run, FAST_COMPILE)


@pytest.mark.parametrize(
    ("model", "steps", "threshold"),
    [
        (series_loop, 8, 0.0),
        pytest.param(constants_differ, 7, 1.0, marks=pytest.mark.slow),
        pytest.param(unknown_drift, 6, 1.0, marks=pytest.mark.slow),
        pytest.param(halves, 6, 1.0, marks=pytest.mark.slow),
    ],
)
def test_the_rolled_program_gives_the_same_result(model, steps, threshold):
    proposal, networks, data = untrained_proposal(model, steps)
    run = compiled_smc(proposal, threshold)
    unrolled, rolled = run.unrolled(networks, key(2), data), run(networks, key(2), data)
    assert (int(unrolled[0].num_resamplings) > 0) == (threshold > 0)
    assert list(rolled[0].values) == list(unrolled[0].values)
    for expected, leaf in zip(jax.tree.leaves(unrolled), jax.tree.leaves(rolled), strict=True):
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "threshold"),
    [(series_loop, 0.5), pytest.param(unknown_drift, 0.5, marks=pytest.mark.slow)],
)
def test_the_program_does_not_grow_with_the_steps(model, threshold):
    """Except for one equation for each value that is stacked."""

    def length(steps):
        proposal, networks, data = untrained_proposal(model, steps)
        traced = compiled_smc(proposal, threshold).rolled.trace(networks, key(2), data)
        return len(traced.jaxpr.jaxpr.eqns)

    assert length(22) - length(11) <= 11 * 4


def test_a_long_loop_is_a_particle_filter():
    """Evidence, filtered mean and survivors of sixty steps, with untrained networks."""
    proposal, networks, data = untrained_proposal(series_loop, 60)
    y = np.array([data[f"y_{t}"] for t in range(60)])
    log_evidence, means, variances = kalman(y)
    population, info = compiled_smc(proposal, 0.5, 2000)(networks, key(3), data)
    error = float(info.log_evidence_se)
    assert error < 1.0
    assert abs(float(population.log_evidence.value()) - log_evidence) < 4 * error
    last = np.average(population.values["x_59"], weights=np.exp(population.log_weights))
    assert abs(last - means[-1]) < 0.2 * np.sqrt(variances[-1])
    assert info.ess_by_stage.shape == (60,)
    assert info.ancestors.shape == (59, 2000)
    # Few of the first draws have descendants, and nearly all of the last.
    survivors = np.array([info.survivors[f"x_{t}"] for t in range(60)])
    assert survivors[0] < 0.1 * survivors[-1]


def test_stored_values_are_those_of_the_ancestors():
    """Values of earlier steps are reordered by all later resampling steps."""
    proposal, networks, data = untrained_proposal(series_loop, 12)
    population, info = compiled_smc(proposal, 1.0, 30)(networks, key(4), data)
    values = population.values
    for t in range(11):
        lineage = np.arange(30)
        for ancestors in info.ancestors[t:][::-1]:
            lineage = ancestors[lineage]
        _, counts = np.unique(lineage, return_counts=True)
        _, copies = np.unique(values[f"x_{t}"], return_counts=True)
        assert sorted(copies) == sorted(counts)


def test_evidence_of_a_loop_is_unbiased():
    proposal, networks, data = untrained_proposal(series_loop, 8)
    y = np.array([data[f"y_{t}"] for t in range(8)])
    sampler = SMC(proposal, 200, systematic, 0.5)

    def evidence(rng_key):
        return sampler.run(networks, rng_key, data)[0].log_evidence

    estimates = CompiledFunction(jax.vmap(evidence), FAST_COMPILE)(jax.random.split(key(5), 300))
    ratio = np.exp(estimates.value() - kalman(y)[0])
    error = ratio.std(ddof=1) / np.sqrt(len(ratio))
    assert error < 0.1
    assert abs(ratio.mean() - 1) < 3 * error


@pytest.mark.slow
def test_the_site_that_no_particle_explains_is_named():

    def bounded(steps=9):
        x = 0.0
        for t in range(steps):
            x = numpyro.sample(f"x_{t}", dist.Normal(0.5 * x, 1.0))
            numpyro.sample(f"y_{t}", dist.Uniform(x - 1.0, x + 1.0))

    proposal, networks, data = untrained_proposal(bounded, 9)
    outside = {**data, "y_5": jnp.array(1e6)}
    population, info = compiled_smc(proposal, 0.5)(networks, key(6), outside)
    assert int(population.failed_stage) == 5
    assert [name for name, ok in info.possible.items() if not ok] == ["y_5"]


def test_densities_of_single_sites_are_those_of_the_model():
    proposal, _, _ = untrained_proposal(unknown_drift, 9)
    program = proposal.graph.program
    values = CompiledFunction(program.simulate, FAST_COMPILE)(key(7))
    whole = CompiledFunction(program.log_density, FAST_COMPILE)(values)
    slices = Slices(proposal.graph)
    for names in (["x_4"], ["z_3", "n_3", "y_3"], ["drift"]):
        needed, evaluate = slices.of(names)
        assert needed == {n for name in names for n in (name, *proposal.graph.parents(name))}
        densities = evaluate({name: values[name] for name in needed})
        for name in names:
            np.testing.assert_allclose(densities[name], whole[name], rtol=1e-5)
