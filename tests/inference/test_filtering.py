"""Particle filters: against Kalman's, step by step, and over long series."""

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
from oracles import QUICK, SMALL, compiled, data_of, group, repeated, unplanned
from retrodict.inference.filtering import StreamingFilter
from retrodict.inference.smc import Engine
from retrodict.particles.resampling import systematic
from retrodict.proposal.proposal import Proposal
from zoo import key


@group("series")
def test_filtered_means_are_kalmans():
    data = data_of("series")
    _, means, variances = kalman(data["y"])
    answer = compiled("series").infer(key(8), data, 4000, method="smc")
    weights = np.exp(answer.filtered_log_weights)
    assert weights.shape == answer.filtered["x"].shape == (8, 4000)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-4)
    found = (weights * answer.filtered["x"]).sum(1)
    effective = 1 / (weights**2).sum(1)
    # Errors of earlier steps add to a step's own.
    assert np.all(np.abs(found - means) < 6 * np.sqrt(variances / effective))


@group("series")
def test_streaming_is_the_same_filter():
    compiled_series, data = compiled("series"), data_of("series")
    exact, means, variances = kalman(data["y"])
    state = compiled_series.filter_init(key(9), 4000)
    for t, value in enumerate(data["y"]):
        state, info = compiled_series.filter_step(
            jax.random.fold_in(key(10), t), state, {"y": value}
        )
        assert 1 <= info.ess <= 4000
    assert state.samples["x"].shape == (4000,)
    found = np.sum(np.exp(state.log_weights) * state.samples["x"])
    assert abs(found - means[-1]) < 6 * np.sqrt(variances[-1] / 1000)
    assert abs(state.log_evidence - exact) < 0.15
    with pytest.raises(rd.DataError, match=r"site 'y': expected shape \(\), found \(2,\)"):
        compiled_series.filter_step(key(), state, {"y": [1.0, 2.0]})


@group("normal")
def test_streaming_needs_a_filter():
    with pytest.raises(ValueError, match="inverse='filter'"):
        compiled("normal").filter_init(key(), 10)


@pytest.mark.slow
@group("series")
def test_loop_and_scan_are_the_same_model():
    steps = 4
    data = data_of("series")["y"][:steps]
    exact, *_ = kalman(data)
    names = [f"y_{t}" for t in range(steps)]
    with unplanned():
        loop = rd.compile(
            key(), series_loop, names, model_kwargs={"steps": steps}, estimator=SMALL,
            training=QUICK, progress_bar=False,
        )  # fmt: skip
    assert loop.inverse.method == "filter"
    assert len(loop.networks) == 1
    answer = loop.infer(key(1), dict(zip(names, data, strict=True)), 2000, method="smc")
    assert abs(answer.log_evidence - exact) < 5 * float(answer.log_evidence_se)
    scanned = compiled("series").infer(
        key(2), {"y": data}, 2000, method="smc", model_kwargs={"steps": steps}
    )
    error = np.hypot(answer.log_evidence_se, scanned.log_evidence_se)
    assert abs(answer.log_evidence - scanned.log_evidence) < 5 * error


@group("series")
def test_one_particle_of_a_filter_is_one_importance_draw():
    data = data_of("series")
    a = compiled("series").infer(key(2), data, 1, method="smc", ess_threshold=0.0)
    b = compiled("series").infer(key(2), data, 1, method="importance")
    assert a.log_evidence == pytest.approx(b.log_evidence, abs=1e-4)
    assert a.trust == b.trust == "poor"


@group("series")
@pytest.mark.parametrize("rule", ["stratified", "multinomial", "residual"])
def test_resampling_rules_give_the_same_evidence(rule):
    exact, *_ = kalman(data_of("series")["y"])
    answers = compiled("series").infer_many(
        key(3), repeated(data_of("series"), 100), 100, method="smc", resampling=rule,
        ess_threshold=1.0,
    )  # fmt: skip
    ratio = np.exp(answers.log_evidence - exact)
    assert abs(ratio.mean() - 1) < 3 * ratio.std() / 10
    assert np.all(answers.num_resamplings == 7)


TRACES = []


def known_increments(steps=10_000):
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


def test_evidence_of_ten_thousand_steps_has_three_decimals():
    y = np.random.default_rng(0).normal(0.3, 1.7, 10_000).astype(np.float32)
    increments = stats.norm.logpdf(y.astype(float), np.float32(0.3), np.float32(1.7))
    engine = Engine(bootstrap(known_increments), 16, systematic, 0.5)
    outcome = jax.jit(lambda key, data: engine.run({}, key, data))(key(), {"y": y})
    assert abs(outcome.population.log_evidence.value() - increments.sum()) < 1e-3
    # a sum in single precision would not do
    plain = np.cumsum(increments.astype(np.float32), dtype=np.float32)[-1]
    assert abs(plain - increments.sum()) > 1e-3


def test_a_step_costs_the_same_however_late():
    """Nothing is traced again, and the state does not grow."""
    stream = StreamingFilter(bootstrap(known_increments, steps=5))
    rng, state, exact = np.random.default_rng(1), stream.init(key(), 32), 0.0
    seen = {}
    for step in range(300):
        if step == 200:
            state = dataclasses.replace(state, time=jnp.asarray(100_000, jnp.int32))
        y = np.float32(rng.normal())
        exact += stats.norm.logpdf(float(y), 0.3, 1.7)
        state, _ = stream.step({}, jax.random.fold_in(key(), step), state, {"y": y})
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
        seen[step] = (len(TRACES), jax.tree.structure(state), jax.tree.leaves(shapes))
    assert int(state.time) == 100_100
    assert seen[10] == seen[150] == seen[299]
    assert abs(state.log_evidence - exact) < 1e-3


@pytest.mark.slow
@group("series")
def test_a_long_filter_is_trusted_for_what_it_knows():
    """All trajectories share their first steps; the last states and the evidence are right."""
    steps, runs, num = 120, 100, 300
    y = rd.trace(series, ["y"], model_kwargs={"steps": steps}).program.simulate(key(5))["y"]
    log_z, filtered, variances = kalman(np.asarray(y, float))
    smoothed = series_exact(np.asarray(y, float))
    answers = compiled("series").infer_many(
        key(6), repeated({"y": y}, runs), num, method="smc", model_kwargs={"steps": steps}
    )
    assert np.all(np.asarray(answers.survivors["x"])[:, 0] < 20)
    assert np.all(answers.trust == "fair")
    one = answers[0].diagnostics.reasons
    assert any("trajectories" in reason and "steps 0 to" in reason for reason in one)
    # the evidence, by its own error: the median of squares of standard normals is 0.455
    z = (answers.log_evidence - log_z) / answers.log_evidence_se
    assert 0.6 < np.median(z**2) / 0.455 < 1.6
    # filtered means, at all times
    weights = np.exp(answers.filtered_log_weights)
    means = (weights * answers.filtered["x"]).sum(-1)
    spread = means.std(0)
    assert np.all(np.abs(means.mean(0) - filtered) < 5 * spread / np.sqrt(runs))
    assert np.all(spread < 0.25 * np.sqrt(variances))
    # smoothed means say by themselves how far they can be relied on
    off = np.abs(np.asarray(answers.mean("x")) - smoothed.means["x"])
    error = np.asarray(answers.mcse("x"))
    assert np.mean(off > 3 * error + 0.1 * smoothed.sds["x"]) < 0.02
    assert np.median(error[:, 0]) > 3 * np.median(error[:, -1])
