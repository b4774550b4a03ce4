"""Models of applied work: densities against NumPyro's, valid inverses, answers against NUTS."""

from dataclasses import replace

import arviz
import jax
import networkx as nx
import numpy as np
import pytest
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs
from numpyro.infer.util import log_density

import retrodict as rd
from corpus import CORPUS
from zoo import key

models = pytest.mark.parametrize("entry", CORPUS.values(), ids=CORPUS)


def finite_draws(program, number):
    """Joint draws with finite densities."""
    draws = []
    for seed in range(50):
        values = program.simulate(key(seed))
        density = sum(d.sum() for d in program.log_density(values).values())
        draws += [values] if np.isfinite(density) else []
        if len(draws) == number:
            return draws
    raise AssertionError("too few finite draws")


@models
def test_log_density_is_numpyros(entry):
    """With masks on latents as NumPyro has them, see `retrodict.graph.masks`."""
    graph = rd.trace(entry.model, entry.observed)
    as_written = replace(graph.program, mask_latents=True)
    for values in finite_draws(graph.program, 3):
        data = {name: values[name] for name in entry.observed}
        latents = {name: values[name] for name in graph.latent}
        scored = values | {name: jax.numpy.asarray(v) for name, v in graph.constant_data.items()}
        ours = sum(d.sum() for d in as_written.log_density(scored).values())
        theirs, _ = log_density(entry.model, (), data, latents)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@models
def test_the_inverse_encodes_no_independence_that_the_model_lacks(entry):
    graph = rd.trace(entry.model, entry.observed)
    forward, inverse = graph.unroll(), rd.invert(graph, "faithful")
    network, order = inverse.unroll(), inverse.order
    assert set(order) == {n for n, node in forward.nodes(data=True) if not node["observed"]}
    before = set(forward) - set(order)
    for variable in order:
        parents = set(network.predecessors(variable))
        assert parents <= before
        others = before - parents
        assert not others or nx.is_d_separator(forward, {variable}, others, parents)
        before.add(variable)


def nuts(entry, data):
    kernel = NUTS(entry.model, target_accept_prob=0.95)
    if entry.discrete:
        kernel = DiscreteHMCGibbs(kernel, modified=True)
    options = {"num_chains": 2, "chain_method": "sequential", "progress_bar": False}
    chains = MCMC(kernel, num_warmup=1000, num_samples=4000, **options)
    chains.run(key(2), **data)
    return arviz.from_numpyro(chains)


@pytest.mark.slow
@models
def test_posterior_means_are_those_of_nuts(entry):
    """Of continuous latents that are not masked, in data drawn from the model."""
    training = rd.Training(max_seconds=30)
    compiled = rd.compile(key(), entry.model, entry.observed, training=training, progress_bar=False)
    values = finite_draws(compiled.graph.program, 1)[0]
    data = {name: values[name] for name in entry.observed}
    posterior = compiled.infer(key(1), data, 4000)
    assert posterior.trust != "poor", posterior.diagnostics
    reference = arviz.summary(nuts(entry, data), var_names=list(compiled.graph.latent))
    for name, site in compiled.graph.sites.items():
        if site.observed or site.time or np.issubdtype(site.dtype, np.integer):
            continue
        rows = reference[reference.index.str.match(rf"{name}(\[|$)")]
        mean, sd = (np.ravel(f(name)) for f in (posterior.mean, posterior.sd))
        error = np.hypot(sd / np.sqrt(posterior.ess), rows["mcse_mean"].astype(float))
        assert np.all(np.abs(mean - rows["mean"].astype(float)) < 5 * error + 1e-3)
