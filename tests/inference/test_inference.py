"""Every method against exact answers, with small networks: the weights correct them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import retrodict as rd
from exact import ORACLES, kalman, series
from oracles import (
    NOTHING,
    PARTICLES,
    RUNS,
    SMALL,
    compiled,
    data_of,
    group,
    repeated,
    runs,
)
from retrodict.inference import batched_vmap
from retrodict.inference.methods import Inference
from retrodict.inference.planning import PLAN_PARTICLES, Planner, evidence_program
from retrodict.inference.samplers import Settings
from retrodict.inference.smc import SMC
from retrodict.particles.resampling import systematic
from zoo import key

SLOW = pytest.mark.slow


@cache
def many_answers(name, method):
    """Two hundred independent runs on one data set."""
    data = repeated(data_of(name), RUNS)
    return compiled(name).infer_many(key(12), data, PARTICLES, method=method)


@pytest.mark.parametrize(("name", "method"), runs())
def test_evidence_is_unbiased(name, method):
    """The mean of Ẑ / Z over 200 runs is 1, within three standard errors."""
    exact = ORACLES[name].exact(data_of(name))
    ratio = np.exp(many_answers(name, method).log_evidence - exact.log_evidence)
    error = ratio.std(ddof=1) / np.sqrt(len(ratio))
    assert error < 0.1
    assert abs(ratio.mean() - 1) < 3 * error


@pytest.mark.parametrize(("name", "method"), runs())
def test_posterior_means_are_exact(name, method):
    """Within four standard errors of the mean over runs, weighted by their evidence.

    Ẑ · mean and Ẑ are both unbiased, so their ratio has no bias that 200 runs could show.
    """
    means = ORACLES[name].exact(data_of(name)).means
    answers = many_answers(name, method)
    weights = np.exp(answers.log_evidence - np.max(answers.log_evidence))
    weights /= weights.sum()
    for site, exact in means.items():
        found = np.asarray(answers.mean(site), float)
        shape = (-1,) + (1,) * (found.ndim - 1)
        pooled = (weights.reshape(shape) * found).sum(0)
        error = np.sqrt(((weights.reshape(shape) * (found - pooled)) ** 2).sum(0))
        assert np.all(np.abs(pooled - exact) < 4 * error + 1e-4)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param("normal", "importance", marks=group("normal")),
        pytest.param("series", "smc", marks=group("series")),
    ],
)
def test_untrained_networks_cost_particles_not_correctness(name, method):
    exact, means, _ = ORACLES[name].exact(data_of(name))
    answer = compiled(name, NOTHING).infer(key(7), data_of(name), 20_000, method=method)
    assert abs(answer.log_evidence - exact) < 5 * float(answer.log_evidence_se) + 0.02
    for site, value in means.items():
        error = 6 * np.asarray(answer.sd(site)) / np.sqrt(answer.ess) + 1e-3
        assert np.all(np.abs(np.asarray(answer.mean(site)) - value) < error)


@group("series")
def test_another_size_needs_no_other_networks():
    """Networks know nothing of the size of a plate, or of the length of a series."""
    y = np.asarray(ORACLES["normal"].model.__defaults__)  # n = 4 when compiled
    assert y.tolist() == [4]
    larger = np.array([0.5, 1.5, 2.5, 0.0, 1.0, 3.0, 2.0])
    exact, *_ = ORACLES["normal"].exact({"y": larger})
    answer = compiled("normal").infer(key(4), {"y": larger}, 4000, model_kwargs={"n": 7})
    assert abs(answer.log_evidence - exact) < 4 * float(answer.log_evidence_se) + 0.01
    longer = np.asarray(rd.trace(series, ["y"], model_kwargs={"steps": 20}).program.simulate(key())["y"])  # fmt: skip  # noqa: E501
    exact, *_ = kalman(longer)
    answer = compiled("series").infer(key(4), {"y": longer}, 4000, model_kwargs={"steps": 20})
    assert abs(answer.log_evidence - exact) < 5 * float(answer.log_evidence_se) + 0.02


def test_only_values_change_nothing_is_compiled_again():
    traces = []

    def counting(n=3):
        traces.append(0)
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("n", n):
            numpyro.sample("y", dist.Normal(mu, 1))

    model = rd.compile(
        key(), counting, ["y"], estimator=SMALL, training=NOTHING, progress_bar=False
    )
    model.infer(key(), {"y": [0.0, 1.0, 2.0]}, 100, rescue=False)
    before = len(traces)
    for number in range(3):
        model.infer(key(number), {"y": np.full(3, number, float)}, 100, rescue=False)
    assert len(traces) == before


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param("rates", "importance", marks=[group("rates"), SLOW]),
        pytest.param("series", "smc", marks=[group("series"), SLOW]),
    ],
)
def test_particles_drawn_by_parts_are_the_same(monkeypatch, name, method):
    """Four parts of 14 and a rest of 3 for one data set, three data sets by themselves."""
    model, data = compiled(name), data_of(name)
    settings = Settings(59, method)
    whole = Inference(model.proposal).one(model.networks, key(5), data, settings)
    each = max(model.proposal.working_bytes(model.networks, s) for s in model.proposal.stages)
    assert each > 0
    monkeypatch.setattr(batched_vmap, "WORKING_BYTES", 17 * each)
    inference = Inference(model.proposal)
    apart = inference.one(model.networks, key(5), data, settings)
    for site, values in whole.samples.items():
        np.testing.assert_allclose(apart.samples[site], values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(apart.log_weights, whole.log_weights, atol=1e-3)
    many = inference.many(model.networks, key(5), repeated(data, 3), settings, 2**20)
    assert many.log_evidence.shape == (3,)
    assert abs(many.log_evidence.mean() - whole.log_evidence) < 1


@SLOW
@group("rates")
def test_plan_measures_every_candidate():
    model = compiled("rates")
    plan = Inference(model.proposal).plan(model.networks, key())
    assert set(plan.ess) == {"importance", "smc", "divide"}
    assert plan.method == max(plan.ess, key=plan.ess.get)


@SLOW
@group("rates")
@pytest.mark.parametrize(("method", "threshold"), [("importance", 0.0), ("smc", 0.9)])
def test_planning_runs_the_methods_themselves(method, threshold):
    """With a threshold that is known only when it runs, as with one that is part of the program."""
    model = compiled("rates")
    data = {site: jnp.asarray(value) for site, value in data_of("rates").items()}
    inference = Inference(model.proposal)
    own = Settings(PLAN_PARTICLES, method, ess_threshold=threshold)
    expected = inference.one(model.networks, key(3), data, own).log_evidence
    found = evidence_program(model.proposal, "smc", PLAN_PARTICLES)(
        model.networks, jnp.asarray(threshold), key(3)[None], {n: v[None] for n, v in data.items()}
    )
    assert found.value()[0] == pytest.approx(float(expected), abs=1e-3)


@SLOW
@group("rates")
def test_densities_counted_at_once_are_those_counted_by_stage():
    """Where nothing is resampled: known beforehand, the model is run once, else for each stage."""
    model = compiled("rates")
    data = {site: jnp.asarray(value) for site, value in data_of("rates").items()}
    outcomes = [
        jax.jit(SMC(model.proposal, 50, systematic, threshold).run)(model.networks, key(4), data)
        for threshold in (0.0, jnp.asarray(0.0))
    ]
    assert len(outcomes[0][1].ess_by_stage) > 1
    for once, staged in zip(
        *(jax.tree.leaves((p, i._replace(survivors={}))) for p, i in outcomes), strict=True
    ):
        np.testing.assert_allclose(once, staged, rtol=1e-4, atol=1e-4)


@group("series")
def test_a_plan_for_a_long_series_takes_fewer_particles():
    short = compiled("series")
    inference = Inference(short.proposal)
    assert Planner(short.proposal, short.networks).num_particles == PLAN_PARTICLES
    long = inference.called_with(None, {"steps": 50_000})
    assert Planner(long.proposal, short.networks).num_particles == 50


@group("normal")
def test_nothing_to_plan_where_there_is_one_stage():
    normal = compiled("normal")
    plan = Inference(normal.proposal).plan(normal.networks, key())
    assert plan.method == "importance" and not plan.ess


@group("rates")
def test_answers_carry_names_and_verdict():
    answer = compiled("rates").infer(key(), data_of("rates"), 500, rescue=False)
    assert list(answer.summary().index) == ["alpha", "beta", "theta[0]", "theta[1]", "theta[2]"]
    assert answer.trust in ("good", "fair", "poor")
    assert answer.diagnostics.reasons
    assert answer.log_weights.shape == (500,)
    assert np.log(np.exp(np.asarray(answer.log_weights, float)).sum()) == pytest.approx(0, abs=1e-4)


def test_impossible_data_name_stage_and_site():
    def bounded():
        high = numpyro.sample("high", dist.Uniform(1.0, 2.0))
        with numpyro.plate("n", 2):
            numpyro.sample("y", dist.Uniform(0.0, high))

    model = rd.compile(key(), bounded, ["y"], estimator=SMALL, training=NOTHING, progress_bar=False)
    assert np.isfinite(model.infer(key(), {"y": [0.5, 1.2]}, 500, rescue=False).log_evidence)
    with pytest.raises(rd.DataError, match=r"weight zero since stage 1 of 1.*high.*'y'"):
        model.infer(key(), {"y": [0.5, 7.0]}, 100, rescue=False)
    with pytest.raises(rd.DataError, match=r"none of \d+ draws.*'y'"):
        model.infer(key(), {"y": [0.5, 7.0]}, 100)


@pytest.mark.parametrize(
    ("name", "method", "y"),
    [
        pytest.param("rates", "importance", [10**6] * 3, marks=group("rates")),
        pytest.param("rates", "divide", [10**5, 1, 10**5], marks=[group("rates"), SLOW]),
        pytest.param("series", "smc", [100.0] * 8, marks=group("series")),
    ],
)
def test_data_far_outside_the_prior_are_answered_and_not_trusted(name, method, y):
    answer = compiled(name).infer(key(), {"y": y}, PARTICLES, method=method)
    assert np.isfinite(answer.log_evidence)
    assert np.all(np.isfinite(np.concatenate([np.ravel(v) for v in answer.samples.values()])))
    assert answer.trust == "poor"


BAD_DATA = {
    "unknown site": ({"y": np.zeros(6), "z": 1.0}, "'z', which is not an observed site"),
    "latent site": ({"y": np.zeros(6), "p": 0.5}, "it is a latent site"),
    "missing site": ({}, "lacks site 'y'"),
    "wrong shape": ({"y": np.zeros(5)}, r"expected shape \(6,\), found \(5,\)"),
    "outside": ({"y": [0, 1, 0, 2, 0, 0]}, r"the value at \[3\] is 2, outside the support"),
    "negative": ({"y": [0, -1, 0, 1, 0, 0]}, r"the value at \[1\] is -1, outside"),
    "fraction": ({"y": [0, 1, 0.5, 1, 0, 0]}, "expected integers"),
    "NaN": ({"y": [0, 1, np.nan, 1, 0, 0]}, r"the value at \[2\] is nan"),
    "words": ({"y": ["a"] * 6}, "expected numbers"),
    "ragged": ({"y": [[0, 1], [1]]}, "unequal lengths"),
    "no dict": ([1, 2], "data must be a dict"),
}  # fmt: skip


@group("coin")
@pytest.mark.parametrize(("data", "message"), BAD_DATA.values(), ids=BAD_DATA.keys())
def test_bad_data_are_explained(data, message):
    with pytest.raises(rd.DataError, match=message):
        compiled("coin", NOTHING).infer(key(), data, 10)


@group("coin")
def test_bad_settings_are_explained():
    data = data_of("coin", NOTHING)
    with pytest.raises(ValueError, match="'divide'; for this model there are 'auto'"):
        compiled("coin", NOTHING).infer(key(), data, 10, method="divide")
    with pytest.raises(ValueError, match="at least one"):
        compiled("coin", NOTHING).infer(key(), data, 0)
    with pytest.raises(ValueError, match="ess_threshold"):
        compiled("coin", NOTHING).infer(key(), data, 10, ess_threshold=2.0)


@group("rates")
def test_raw_proposals_agree_with_their_density():
    samples, log_q = compiled("rates").propose(key(), data_of("rates"), 64)
    again = compiled("rates").log_prob(samples, data_of("rates"))
    # in single precision, and far out a value does not come back from its bijection as it went
    np.testing.assert_allclose(log_q, again, rtol=2e-4, atol=2e-3)
