"""Models written as Python loops: what is done with many steps is what is done with few."""

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
    """A first step of its own, a known noise for every step, and covariates."""
    x = numpyro.sample("x_0", dist.Normal(1.0, 3.0))
    numpyro.sample("y_0", dist.Normal(x, 0.3))
    for t in range(1, steps):
        mean = 0.8 * x + DESIGN[t] @ jnp.array([0.5, -0.5]) + DESIGN[t, 1]
        x = numpyro.sample(f"x_{t}", dist.Normal(mean, 0.7))
        numpyro.sample(f"y_{t}", dist.Normal(x, SPREADS[t]))


def unknown_drift(steps=9):
    """Something outside of time, two latents and two observations a step, two steps back."""
    drift = numpyro.sample("drift", dist.Normal(0.5, 0.2))
    x, before = 0.0, 0.0
    for t in range(steps):
        mean = drift * x - 0.2 * before
        x, before = numpyro.sample(f"x_{t}", dist.Normal(mean, 1.0)), x
        z = numpyro.sample(f"z_{t}", dist.Normal(x, 1.0))
        numpyro.sample(f"n_{t}", dist.Bernoulli(logits=z))
        numpyro.sample(f"y_{t}", dist.Normal(x, 1.0))


def halves(steps=7):
    """Every step depends on another distance, so that no two of them are alike."""
    found = [numpyro.sample("x_0", dist.Normal(0.0, 1.0))]
    numpyro.sample("y_0", dist.Normal(found[0], 0.5))
    for t in range(1, steps):
        found.append(numpyro.sample(f"x_{t}", dist.Normal(0.5 * found[t // 2], 1.0)))
        numpyro.sample(f"y_{t}", dist.Normal(found[-1], 0.5))


@cache
def prepared(model, steps):
    """A proposal with untrained networks, and data."""
    sites = rd.trace(model, [f"y_{steps - 1}"], model_args=(steps,)).sites
    observed = [name for name in sites if name[0] in "yn"]
    proposal = Proposal.of(rd.invert(rd.trace(model, observed, model_args=(steps,)), "filter"))
    networks = {
        name: proposal.build(TINY, key(), assemblies)
        for name, assemblies in proposal.networks().items()
    }
    drawn = CompiledFunction(proposal.graph.program.simulate, FAST_COMPILE)(key(1))
    return proposal, networks, {name: drawn[name] for name in observed}


def compiled(proposal, threshold, particles=20):
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
def test_loops_give_what_is_written_out(model, steps, threshold):
    proposal, networks, data = prepared(model, steps)
    run = compiled(proposal, threshold)
    written_out, found = run.unrolled(networks, key(2), data), run(networks, key(2), data)
    assert int(written_out.population.num_resamplings) > 0 or threshold == 0.0
    assert list(found.population.values) == list(written_out.population.values)
    expected = jax.tree.leaves(written_out)
    for one, other in zip(expected, jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "threshold"),
    [(series_loop, 0.5), pytest.param(unknown_drift, 0.5, marks=pytest.mark.slow)],
)
def test_the_program_does_not_grow(model, threshold):
    """Beyond one equation for each value that goes into a stack."""

    def length(steps):
        proposal, networks, data = prepared(model, steps)
        traced = compiled(proposal, threshold).rolled.trace(networks, key(2), data)
        return len(traced.jaxpr.jaxpr.eqns)

    assert length(22) - length(11) <= 11 * 4


def test_a_long_loop_is_a_particle_filter():
    """Evidence, filtered means and the verdict of sixty steps, from networks that know nothing."""
    proposal, networks, data = prepared(series_loop, 60)
    y = np.array([data[f"y_{t}"] for t in range(60)])
    log_evidence, means, variances = kalman(y)
    found = compiled(proposal, 0.5, 2000)(networks, key(3), data)
    error = float(found.log_evidence_se)
    assert error < 1.0
    assert abs(float(found.population.log_evidence.value()) - log_evidence) < 4 * error
    last = np.average(found.population.values["x_59"], weights=np.exp(found.population.log_weights))
    assert abs(last - means[-1]) < 0.2 * np.sqrt(variances[-1])
    assert found.ess_by_stage.shape == (60,)
    assert found.ancestors.shape == (59, 2000)
    # of the first draws few have descendants, of the last nearly all
    left = np.array([found.survivors[f"x_{t}"] for t in range(60)])
    assert left[0] < 0.1 * left[-1]


def test_every_particle_has_its_own_ancestors_values():
    """Values put aside on the way are those of the ancestors that were chosen since."""
    proposal, networks, data = prepared(series_loop, 12)
    found = compiled(proposal, 1.0, 30)(networks, key(4), data)
    values = found.population.values
    for t in range(11):
        line = np.arange(30)
        for chosen in found.ancestors[t:][::-1]:
            line = chosen[line]
        _, counts = np.unique(line, return_counts=True)
        _, copies = np.unique(values[f"x_{t}"], return_counts=True)
        assert sorted(copies) == sorted(counts)


def test_evidence_is_unbiased_where_values_are_put_aside():
    proposal, networks, data = prepared(series_loop, 8)
    y = np.array([data[f"y_{t}"] for t in range(8)])
    engine = SMC(proposal, 200, systematic, 0.5)

    def evidence(rng_key):
        return engine.run(networks, rng_key, data).population.log_evidence

    found = CompiledFunction(jax.vmap(evidence), FAST_COMPILE)(jax.random.split(key(5), 300))
    ratio = np.exp(found.value() - kalman(y)[0])
    error = ratio.std(ddof=1) / np.sqrt(len(ratio))
    assert error < 0.1
    assert abs(ratio.mean() - 1) < 3 * error


@pytest.mark.slow
def test_where_it_fails_is_told():
    """A site that no particle makes possible is known by its name, in a loop as elsewhere."""

    def bounded(steps=9):
        x = 0.0
        for t in range(steps):
            x = numpyro.sample(f"x_{t}", dist.Normal(0.5 * x, 1.0))
            numpyro.sample(f"y_{t}", dist.Uniform(x - 1.0, x + 1.0))

    proposal, networks, data = prepared(bounded, 9)
    found = compiled(proposal, 0.5)(networks, key(6), {**data, "y_5": jnp.array(1e6)})
    assert int(found.population.failed_stage) == 5
    assert [name for name, ok in found.possible.items() if not ok] == ["y_5"]


def test_densities_by_themselves_are_those_of_the_model():
    proposal, _, _ = prepared(unknown_drift, 9)
    program = proposal.graph.program
    values = CompiledFunction(program.simulate, FAST_COMPILE)(key(7))
    whole = CompiledFunction(program.log_density, FAST_COMPILE)(values)
    slices = Slices(proposal.graph)
    for names in (["x_4"], ["z_3", "n_3", "y_3"], ["drift"]):
        needed, evaluate = slices.of(names)
        assert needed == {n for name in names for n in (name, *proposal.graph.parents(name))}
        found = evaluate({name: values[name] for name in needed})
        for name in names:
            np.testing.assert_allclose(found[name], whole[name], rtol=1e-5)
