"""Particle filters against the Kalman filter: whole series, streams, and long series."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from scipy import stats

import retrodict as rd
from exact import kalman, series, series_exact, series_loop
from oracles import QUICK, SMALL, compiled, example_data, group, repeat_data, without_planning
from retrodict.inference.filtering import StreamingFilter
from retrodict.inference.smc import SMC
from retrodict.particles.resampling import systematic
from retrodict.proposal.proposal import Proposal
from zoo import key


@group("series")
def test_filtered_means_equal_those_of_the_kalman_filter():
    data = example_data("series")
    _, means, variances = kalman(data["y"])
    posterior = compiled("series").infer(key(8), data, 4000, method="smc")
    weights = np.exp(posterior.filtered_log_weights)
    assert weights.shape == posterior.filtered["x"].shape == (8, 4000)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-4)
    filtered_means = (weights * posterior.filtered["x"]).sum(1)
    effective = 1 / (weights**2).sum(1)
    # Errors of earlier steps add to those of a step.
    assert np.all(np.abs(filtered_means - means) < 6 * np.sqrt(variances / effective))


@group("series")
def test_streaming_equals_the_kalman_filter():
    compiled_series, data = compiled("series"), example_data("series")
    exact, means, variances = kalman(data["y"])
    state = compiled_series.filter_init(key(9), 4000)
    for t, value in enumerate(data["y"]):
        ess = 1 / np.sum(np.exp(2 * np.asarray(state.log_weights, float)))
        state, info = compiled_series.filter_step(
            jax.random.fold_in(key(10), t), state, {"y": value}
        )
        assert info.ess == pytest.approx(ess, rel=1e-4)
        assert info.resampled == (ess < 2000)
    assert state.samples["x"].shape == (4000,)
    last_mean = np.sum(np.exp(state.log_weights) * state.samples["x"])
    assert abs(last_mean - means[-1]) < 6 * np.sqrt(variances[-1] / 1000)
    assert abs(state.log_evidence - exact) < 0.15
    with pytest.raises(rd.DataError, match=r"site 'y': expected shape \(\), found \(2,\)"):
        compiled_series.filter_step(key(), state, {"y": [1.0, 2.0]})


@group("normal")
def test_streaming_a_model_without_time_is_an_error():
    with pytest.raises(ValueError, match="inverse='filter'"):
        compiled("normal").filter_init(key(), 10)


@pytest.mark.slow
@group("series")
def test_loop_and_scan_give_the_same_evidence():
    steps = 4
    data = example_data("series")["y"][:steps]
    exact, *_ = kalman(data)
    names = [f"y_{t}" for t in range(steps)]
    with without_planning():
        loop = rd.compile(
            key(), series_loop, names, model_kwargs={"steps": steps}, estimator=SMALL,
            training=QUICK, progress_bar=False,
        )  # fmt: skip
    assert loop.inverse.method == "filter"
    assert len(loop.networks) == 1
    posterior = loop.infer(key(1), dict(zip(names, data, strict=True)), 2000, method="smc")
    assert abs(posterior.log_evidence - exact) < 5 * float(posterior.log_evidence_se)
    scanned = compiled("series").infer(
        key(2), {"y": data}, 2000, method="smc", model_kwargs={"steps": steps}
    )
    error = np.hypot(posterior.log_evidence_se, scanned.log_evidence_se)
    assert abs(posterior.log_evidence - scanned.log_evidence) < 5 * error


@group("series")
def test_a_filter_with_one_particle_is_importance_sampling():
    data = example_data("series")
    smc = compiled("series").infer(key(2), data, 1, method="smc", ess_threshold=0.0)
    importance = compiled("series").infer(key(2), data, 1, method="importance")
    assert smc.log_evidence == pytest.approx(importance.log_evidence, abs=1e-4)
    assert smc.trust == importance.trust == "poor"


@group("series")
@pytest.mark.parametrize("scheme", ["stratified", "multinomial", "residual"])
def test_evidence_is_unbiased_for_every_resampling_scheme(scheme):
    exact, *_ = kalman(example_data("series")["y"])
    posteriors = compiled("series").infer_many(
        key(3), repeat_data(example_data("series"), 100), 100, method="smc", resampling=scheme,
        ess_threshold=1.0,
    )  # fmt: skip
    ratio = np.exp(posteriors.log_evidence - exact)
    assert ratio.std() < 0.2
    assert abs(ratio.mean() - 1) < 3 * ratio.std() / 10
    assert np.all(posteriors.num_resamplings == 7)


TRACES = []


def irrelevant_state(steps=10_000):
    """A state that the observations do not depend on, so that the evidence is known exactly."""

    def step(x, _):
        TRACES.append(0)
        x = numpyro.sample("x", dist.Normal(0.9 * x, 1.0))
        numpyro.sample("y", dist.Normal(0.3, 1.7))
        return x, None

    scan(step, 0.0, None, length=steps)


def bootstrap(model, **kwargs):
    graph = rd.trace(model, ["y"], model_kwargs=kwargs)
    return Proposal.bootstrap(rd.invert(graph, "filter"))


def test_evidence_of_ten_thousand_steps_is_exact_to_three_decimals():
    y = np.random.default_rng(0).normal(0.3, 1.7, 10_000).astype(np.float32)
    increments = stats.norm.logpdf(y.astype(float), np.float32(0.3), np.float32(1.7))
    sampler = SMC(bootstrap(irrelevant_state), 16, systematic, 0.5)
    population, _ = jax.jit(lambda key, data: sampler.run({}, key, data))(key(), {"y": y})
    assert abs(population.log_evidence.value() - increments.sum()) < 1e-3
    # A sum in single precision is less exact.
    plain = np.cumsum(increments.astype(np.float32), dtype=np.float32)[-1]
    assert abs(plain - increments.sum()) > 1e-3


def test_late_steps_of_a_stream_trace_nothing_and_the_state_does_not_grow():
    stream = StreamingFilter(bootstrap(irrelevant_state, steps=5))
    rng, state, exact = np.random.default_rng(1), stream.init(key(), 32), 0.0
    record = {}
    for step in range(300):
        if step == 200:
            state = dataclasses.replace(state, time=jnp.asarray(100_000, jnp.int32))
        y = np.float32(rng.normal())
        exact += stats.norm.logpdf(float(y), 0.3, 1.7)
        state, _ = stream.step({}, jax.random.fold_in(key(), step), state, {"y": y})
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
        record[step] = (len(TRACES), jax.tree.structure(state), jax.tree.leaves(shapes))
    assert int(state.time) == 100_100
    assert record[10] == record[150] == record[299]
    assert abs(state.log_evidence - exact) < 1e-3


@pytest.mark.slow
@group("series")
def test_a_long_filter_is_fair_in_spite_of_path_degeneracy():
    """All trajectories share their first steps; the last states and the evidence are right."""
    steps, runs, num = 120, 100, 300
    y = rd.trace(series, ["y"], model_kwargs={"steps": steps}).program.simulate(key(5))["y"]
    log_z, filtered, variances = kalman(np.asarray(y, float))
    smoothed = series_exact(np.asarray(y, float))
    posteriors = compiled("series").infer_many(
        key(6), repeat_data({"y": y}, runs), num, method="smc", model_kwargs={"steps": steps}
    )
    assert np.all(np.asarray(posteriors.survivors["x"])[:, 0] < 20)
    assert np.all(posteriors.trust == "fair")
    reasons = posteriors[0].diagnostics.reasons
    assert any("trajectories" in reason and "steps 0 to" in reason for reason in reasons)
    # The evidence in units of its standard error: the median of χ² with one degree is 0.455.
    z = (posteriors.log_evidence - log_z) / posteriors.log_evidence_se
    assert 0.6 < np.median(z**2) / 0.455 < 1.6
    # Filtered means of all steps.
    weights = np.exp(posteriors.filtered_log_weights)
    means = (weights * posteriors.filtered["x"]).sum(-1)
    spread = means.std(0)
    assert np.all(np.abs(means.mean(0) - filtered) < 5 * spread / np.sqrt(runs))
    assert np.all(spread < 0.25 * np.sqrt(variances))
    # Standard errors of the smoothed means cover their deviations, and grow towards the past.
    deviation = np.abs(np.asarray(posteriors.mean("x")) - smoothed.means["x"])
    error = np.asarray(posteriors.mcse("x"))
    assert np.mean(deviation > 3 * error + 0.1 * smoothed.sds["x"]) < 0.02
    assert np.median(error[:, 0]) > 3 * np.median(error[:, -1])
