"""Masked sites: observed elements that are no data, latent elements that count nowhere."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.util import log_density

import retrodict as rd
from zoo import key

SHORT = {"training": rd.Training(max_steps=500), "progress_bar": False}
MASK = np.array([True, False, True, False])


def masked_data(y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("n", 4), handlers.mask(mask=MASK):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def imputed(y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("n", 4):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y, obs_mask=MASK)


def series(y=None):
    """Series of two lengths, padded."""

    def step(x, inputs):
        time, current = inputs
        with numpyro.plate("series", 2), handlers.mask(mask=time < jnp.array([4, 2])):
            x = numpyro.sample("x", dist.Normal(x, 1))
            numpyro.sample("y", dist.Normal(x, 1), obs=current)
        return x, None

    scan(step, jnp.zeros(2), (jnp.arange(4), y))


def loop():
    x = 0.0
    for t in range(4):
        with handlers.mask(mask=np.arange(4)[t] < 2):
            x = numpyro.sample(f"x_{t}", dist.Normal(x, 1))
            numpyro.sample(f"y_{t}", dist.Normal(x, 1))


@pytest.mark.parametrize(("model", "site"), [(masked_data, "y"), (imputed, "y_observed")])
def test_masked_data_change_nothing(model, site):
    """The posterior, the evidence and the grade are those of the two values that count."""
    compiled = rd.compile(key(), model, [site], **SHORT)
    y = np.array([1.0, np.nan, 2.0, 1e6])
    posterior = compiled.infer(key(1), {site: y}, 4000)
    precision = 1 / 4 + 2
    assert abs(posterior.mean("mu") - 3 / precision) < 4 / np.sqrt(precision * posterior.ess)
    covariance = 4 * np.ones((2, 2)) + np.eye(2)
    exact = dist.MultivariateNormal(jnp.zeros(2), covariance).log_prob(jnp.array([1.0, 2.0]))
    assert abs(posterior.log_evidence - exact) < 4 * posterior.log_evidence_se + 1e-4
    assert posterior.trust == "good"
    if model is imputed:
        missing = posterior.samples["y"][:, ~MASK]
        mean = np.sum(np.exp(posterior.log_weights)[:, None] * missing, 0)
        error = 4 * np.sqrt((1 + 1 / precision) / posterior.ess)
        assert np.all(np.abs(mean - 3 / precision) < error)
        np.testing.assert_allclose(posterior.samples["y"][:, MASK], np.tile([1, 2], (4000, 1)))


def test_masked_entries_are_constant_in_simulations():
    draw = rd.trace(masked_data, ["y"]).program.simulate(key())["y"]
    np.testing.assert_array_equal(draw[~MASK], 0)
    assert np.all(draw[MASK] != 0)


def test_masked_entries_with_children_keep_their_values():
    def model():
        x = numpyro.sample("x", dist.Normal(0, 1))
        y = numpyro.sample("y", dist.Normal(x, 1).mask(False))
        numpyro.sample("z", dist.Normal(x + y, 1))

    graph = rd.trace(model, ["y", "z"])
    assert graph.sites["y"].mask is None
    assert graph.program.simulate(key())["y"] != 0


def test_masked_steps_of_a_series_are_drawn_from_the_prior():
    """The evidence is that of the present steps of two random walks with noise."""
    compiled = rd.compile(key(), series, ["y"], inverse="filter", **SHORT)
    y = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    y[2:, 1] = np.nan
    posterior = compiled.infer(key(1), {"y": y}, 4000, method="smc")
    exact = 0.0
    for number, length in enumerate((4, 2)):
        times = np.arange(1, length + 1)
        covariance = np.minimum(times[:, None], times) + np.eye(length)
        normal = dist.MultivariateNormal(jnp.zeros(length), covariance)
        exact += float(normal.log_prob(y[:length, number]))
    assert abs(posterior.log_evidence - exact) < 4 * posterior.log_evidence_se + 1e-3
    variance = np.var(posterior.samples["x"][:, 3, 1] - posterior.samples["x"][:, 2, 1])
    assert abs(variance - 1) < 0.2


@pytest.mark.parametrize(("model", "observed"), [(masked_data, ["y"]), (series, ["y"])])
def test_densities_are_numpyros_but_for_masked_latents(model, observed):
    graph = rd.trace(model, observed)
    values = graph.program.simulate(key())
    ours = graph.program.log_density(values)
    data = (values["y"],)
    latents = {name: values[name] for name in graph.latent}
    theirs, _ = log_density(model, data, {}, latents)
    if "x" in ours:
        present = np.arange(4)[:, None] < np.array([4, 2])
        assert np.all(ours["x"][~present] != 0)
        ours["x"] = np.where(present, ours["x"], 0)
    np.testing.assert_allclose(sum(d.sum() for d in ours.values()), theirs, rtol=1e-5)


def test_loops_with_masked_steps():
    graph = rd.trace(loop, [f"y_{t}" for t in range(4)])
    assert [bool(graph.sites[f"y_{t}"].mask) for t in range(4)] == [True, True, False, False]
    (name,) = [n for n, site in graph.lifted.sites.items() if site.observed]
    np.testing.assert_array_equal(graph.lifted.program.simulate(key())[name][2:], 0)


def flat_prior():
    mu = numpyro.sample("mu", dist.Normal(0, 1).mask(False))
    numpyro.sample("y", dist.Normal(mu, 1))


def flat_by_handler():
    with handlers.mask(mask=False), numpyro.plate("n", 3):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("n", 3):
        numpyro.sample("y", dist.Normal(mu, 1))


def flat_past():
    def step(x, time):
        with handlers.mask(mask=time > 1):
            x = numpyro.sample("mu", dist.Normal(x, 1))
        numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    scan(step, 0.0, jnp.arange(3))


@pytest.mark.parametrize("model", [flat_prior, flat_by_handler, flat_past])
def test_improper_priors_by_masks_are_refused(model):
    with pytest.raises(rd.UnsupportedModel, match=r"'mu' is masked.*depends on masked"):
        rd.trace(model, ["y"])
