"""The stages of SMC: what each counts, resamples and reports."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from scipy import stats

import retrodict as rd
from retrodict._xla.jit import CompiledFunction
from retrodict._xla.tuning import FAST_COMPILE
from retrodict.inference.adaptive_resampling import AdaptiveResampling
from retrodict.inference.divide_conquer import DivideAndConquer
from retrodict.inference.latent_archive import LatentArchive
from retrodict.inference.methods import Inference
from retrodict.inference.samplers import Settings
from retrodict.inference.smc import SMC
from retrodict.particles.genealogy import surviving_draws
from retrodict.particles.population import initial_population, reweight
from retrodict.particles.resampling import systematic
from retrodict.proposal.proposal import Proposal
from zoo import CASES, key

TINY = rd.MADE(hidden=(8,), components=2, context=(4,))


@cache
def untrained(model, observed, method, **kwargs):
    """A proposal with untrained networks, and data from the model."""
    graph = rd.trace(model, observed, model_kwargs=kwargs)
    proposal = Proposal.of(rd.invert(graph, method))
    networks = {
        name: proposal.build(TINY, key(), structures)
        for name, structures in proposal.networks().items()
    }
    values = CompiledFunction(proposal.graph.program.simulate, FAST_COMPILE)(key(1))
    return proposal, networks, {name: values[name] for name in proposal.graph.observed}


def series_with_side_latent(steps=4):
    """The latent z of each step is sampled from its own conditional, inside of the scan."""

    def step(x, _):
        x = numpyro.sample("x", dist.Normal(0.9 * x, 1.0))
        numpyro.sample("z", dist.Normal(x, 1.0))
        numpyro.sample("y", dist.Normal(x, 0.7))
        return x, None

    scan(step, 0.0, None, length=steps)


def untrained_case(name, method):
    if name == "series_with_side_latent":
        return untrained(series_with_side_latent, ("y",), method)
    case = CASES[name]
    return untrained(case.model, case.observed, method, **case.kwargs)


# Parameters before a series, a density outside of the scan that closes with it, latents from their
# own conditional, a loop, a reversed scan, a series sampled against time, plates, nested plates.
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("stochastic_volatility", "filter"),
        ("running_sum", "filter"),
        ("series_with_side_latent", "filter"),
        pytest.param("backward_scan", "filter", marks=pytest.mark.slow),
        pytest.param("observed_after_scan", "faithful", marks=pytest.mark.slow),
        ("masks_and_counts", "faithful"),
        ("fhmm_loop", "filter"),
        pytest.param("fhmm_scan", "blanket", marks=pytest.mark.slow),
        pytest.param("ar2", "faithful", marks=pytest.mark.slow),
        pytest.param("pumps", "blanket", marks=pytest.mark.slow),
        ("nested", "blanket"),
    ],
)
def test_increments_of_all_stages_add_up_to_the_joint_density_over_q(name, method):
    """With one particle log Ẑ is the sum of the increments of the log weight."""
    proposal, networks, data = untrained_case(name, method)
    runs = [SMC(proposal, 1, systematic, threshold).run for threshold in (0.0, 1.0)]
    if name in ("pumps", "nested"):
        runs.append(DivideAndConquer(proposal, 1, systematic).run)
    for number, run in enumerate(runs):
        population, info = CompiledFunction(run, FAST_COMPILE)(networks, key(number), data)
        values = {**data, **{n: v[0] for n, v in population.values.items()}}
        densities = jax.jit(proposal.graph.program.log_density)(values)
        log_joint = sum(float(density.sum()) for density in densities.values())
        log_q = float(jax.jit(proposal.log_prob)(networks, values))
        log_weight = float(population.log_evidence.value())
        assert log_weight == pytest.approx(log_joint - log_q, rel=1e-4, abs=5e-3)
        assert set(population.values) == set(proposal.graph.latent)
        assert set(info.possible) == set(SMC(proposal, 1, systematic, 0.0).schedule.counted)


@pytest.mark.parametrize("name", ["stochastic_volatility", "ar2"])
def test_every_stage_and_step_after_the_first_has_a_resampling_decision(name):
    """Parameters are the first generation, and each step of the series is one more."""
    proposal, networks, data = untrained_case(name, "filter")
    series = next(stage for stage in proposal.stages if stage.scan is not None)
    steps = proposal.graph.scan_lengths[series.scan]
    sampler = SMC(proposal, 30, systematic, 1.0)
    population, info = CompiledFunction(sampler.run, FAST_COMPILE)(networks, key(3), data)
    assert info.ancestors.shape == (steps, 30)
    assert info.ess_by_stage.shape == (steps + 1,)
    expected = surviving_draws(info.ancestors, population.log_weights)
    for stage in proposal.stages:
        of_stage = expected[1:] if stage is series else expected[0]
        for factor in stage.factors:
            for latent in factor.latents:
                np.testing.assert_allclose(info.survivors[latent], of_stage, rtol=1e-5)


def test_a_series_with_parameters_has_standard_errors_for_every_step():
    proposal, networks, data = untrained_case("stochastic_volatility", "filter")
    settings = Settings(50, "smc", ess_threshold=1.0)
    posterior = Inference(proposal).one(networks, key(), data, settings)
    assert posterior.mcse("h").shape == (5,)
    assert np.all(np.isfinite(posterior.summary()["mean"]))


def drift(steps=6):
    """A linear-Gaussian series with an unknown drift."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))

    def step(x, _):
        x = numpyro.sample("x", dist.Normal(0.9 * x + mu, 0.5))
        numpyro.sample("y", dist.Normal(x, 0.7))
        return x, None

    scan(step, 0.0, None, length=steps)


def drift_log_evidence(y):
    y, steps = np.asarray(y, float), len(y)
    lags = np.subtract.outer(np.arange(steps), np.arange(steps))
    lower = np.where(lags >= 0, 0.9 ** np.maximum(lags, 0), 0.0)
    of_mu = lower.sum(1)
    cov = np.outer(of_mu, of_mu) + 0.25 * lower @ lower.T + 0.49 * np.eye(steps)
    return stats.multivariate_normal.logpdf(y, np.zeros(steps), cov)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_evidence_is_unbiased_where_weights_of_parameters_are_deferred(threshold):
    """The mean of Ẑ / Z over 400 runs is 1 within 3 standard errors, each below 4 %."""
    proposal, networks, data = untrained(drift, ("y",), "filter")
    sampler = SMC(proposal, 500, systematic, threshold)

    def log_evidence(networks, rng_key):
        return sampler.run(networks, rng_key, data)[0].log_evidence

    run = CompiledFunction(jax.vmap(log_evidence, (None, 0)), FAST_COMPILE)
    log_ratio = run(networks, jax.random.split(key(5), 400)).value() - drift_log_evidence(data["y"])
    ratio = np.exp(log_ratio)
    error = ratio.std(ddof=1) / np.sqrt(len(ratio))
    assert error < 0.04
    assert abs(ratio.mean() - 1) < 3 * error


def test_adaptive_resampling_happens_below_the_threshold_only():
    log_weights = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))  # effective sample size 2.9
    population = reweight(initial_population(4).with_values(jnp.arange(4.0)), log_weights, 0)
    before = float(population.log_evidence.value())
    for threshold, expected in ((0.0, False), (0.7, False), (0.75, True), (1.0, True)):
        for form in (float, jnp.asarray):
            resampling = AdaptiveResampling(systematic, form(threshold))
            resampled, info = jax.jit(resampling.__call__)(key(), population)
            assert float(info.ess) == pytest.approx(1 / (0.25 + 0.0625 + 0.0225 + 0.01), rel=1e-5)
            np.testing.assert_array_equal(resampled.values, info.ancestors)
            assert int(resampled.num_resamplings) == expected
            weights = np.full(4, 0.25) if expected else np.exp(log_weights)
            np.testing.assert_allclose(np.exp(resampled.log_weights), weights, rtol=1e-5)
            assert float(resampled.log_evidence.value()) == pytest.approx(before)
            if not expected:
                np.testing.assert_array_equal(info.ancestors, np.arange(4))
    assert AdaptiveResampling(systematic, 0.0).never
    assert not AdaptiveResampling(systematic, jnp.asarray(0.0)).never


def test_archived_latents_follow_the_ancestors_chosen_since():
    """As if every latent had been gathered at every resampling."""
    rng = np.random.default_rng(0)
    archive, expected = LatentArchive(), {}
    for stage in range(5):
        ancestors = jnp.asarray(rng.integers(0, 7, 7))
        new = {f"x_{stage}": jnp.asarray(rng.normal(size=(7, 2)))} if stage != 2 else {}
        archive = archive.add(new, ancestors)
        expected = {name: value[ancestors] for name, value in {**expected, **new}.items()}
    values = archive.values()
    assert set(values) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(values[name], value)


def test_resampling_before_any_latent_is_archived_is_not_recorded():
    assert LatentArchive().add({}, jnp.arange(3)) == LatentArchive()
