"""Every method against exact answers, with small networks: the weights correct them."""

from functools import cache

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import retrodict as rd
from exact import ORACLES, kalman, series, series_loop
from zoo import key

SMALL = rd.MADE(hidden=(24,), components=3, context=(16,))
QUICK = rd.Training(max_steps=250, batch_size=256, dataset_size=8192, heldout_size=2048)
NOTHING = rd.Training(max_steps=0, batch_size=256, dataset_size=2048, heldout_size=512)


@cache
def compiled(name, training=QUICK):
    model, observed, inverse, _, _ = ORACLES[name]
    return rd.compile(
        key(), model, observed, inverse=inverse, estimator=SMALL, training=training,
        progress_bar=False,
    )  # fmt: skip


@cache
def data_of(name):
    graph = compiled(name).graph
    values = graph.program.simulate(key(11))
    return {site: np.asarray(values[site]) for site in graph.observed}


def repeated(data, times):
    return {site: np.repeat(np.asarray(value)[None], times, 0) for site, value in data.items()}


def runs():
    return [(name, method) for name, oracle in ORACLES.items() for method in oracle[-1]]


@cache
def many_answers(name, method):
    """Two hundred independent runs on one data set."""
    return compiled(name).infer_many(key(12), repeated(data_of(name), 200), 200, method=method)


@pytest.mark.parametrize(("name", "method"), runs())
def test_evidence_is_unbiased(name, method):
    """The mean of Ẑ / Z over 200 runs is 1, within three standard errors."""
    exact, _ = ORACLES[name][3](data_of(name))
    ratio = np.exp(many_answers(name, method).log_evidence - exact)
    error = ratio.std(ddof=1) / np.sqrt(len(ratio))
    assert error < 0.1
    assert abs(ratio.mean() - 1) < 3 * error


@pytest.mark.parametrize(("name", "method"), runs())
def test_posterior_means_are_exact(name, method):
    """Within four standard errors of the mean over runs, weighted by their evidence.

    Ẑ · mean and Ẑ are both unbiased, so their ratio has no bias that 200 runs could show.
    """
    _, means = ORACLES[name][3](data_of(name))
    answers = many_answers(name, method)
    weights = np.exp(answers.log_evidence - np.max(answers.log_evidence))
    weights /= weights.sum()
    for site, exact in means.items():
        found = np.asarray(answers.mean(site), float)
        shape = (-1,) + (1,) * (found.ndim - 1)
        pooled = (weights.reshape(shape) * found).sum(0)
        error = np.sqrt(((weights.reshape(shape) * (found - pooled)) ** 2).sum(0))
        assert np.all(np.abs(pooled - exact) < 4 * error + 1e-4)


@pytest.mark.parametrize("name", ["normal", "series"])
def test_untrained_networks_cost_particles_not_correctness(name):
    exact, means = ORACLES[name][3](data_of(name))
    answer = compiled(name, NOTHING).infer(key(7), data_of(name), 20_000)
    assert abs(answer.log_evidence - exact) < 5 * float(answer.log_evidence_se) + 0.02
    for site, value in means.items():
        error = 6 * np.asarray(answer.sd(site)) / np.sqrt(answer.ess) + 1e-3
        assert np.all(np.abs(np.asarray(answer.mean(site)) - value) < error)


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


def test_streaming_needs_a_filter():
    with pytest.raises(ValueError, match="inverse='filter'"):
        compiled("normal").filter_init(key(), 10)


def test_loop_and_scan_are_the_same_model():
    data = data_of("series")["y"]
    exact, *_ = kalman(data)
    loop = rd.compile(
        key(), series_loop, [f"y_{t}" for t in range(8)], model_kwargs={"steps": 8},
        estimator=SMALL, training=QUICK, progress_bar=False,
    )  # fmt: skip
    assert loop.inverse.method == "filter"
    assert len(loop.networks) == 2  # the first step has no past
    answer = loop.infer(key(1), {f"y_{t}": data[t] for t in range(8)}, 2000, method="smc")
    assert abs(answer.log_evidence - exact) < 5 * float(answer.log_evidence_se) + 0.02


def test_one_particle_of_a_filter_is_one_importance_draw():
    data = data_of("series")
    a = compiled("series").infer(key(2), data, 1, method="smc", ess_threshold=0.0)
    b = compiled("series").infer(key(2), data, 1, method="importance")
    assert a.log_evidence == pytest.approx(b.log_evidence, abs=1e-4)
    assert a.trust == b.trust == "poor"


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


def test_another_size_needs_no_other_networks():
    """Networks know nothing of the size of a plate, or of the length of a series."""
    y = np.asarray(ORACLES["normal"][0].__defaults__)  # n = 4 when compiled
    assert y.tolist() == [4]
    larger = np.array([0.5, 1.5, 2.5, 0.0, 1.0, 3.0, 2.0])
    exact, _ = ORACLES["normal"][3]({"y": larger})
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
    model.infer(key(), {"y": [0.0, 1.0, 2.0]}, 100)
    before = len(traces)
    for number in range(3):
        model.infer(key(number), {"y": np.full(3, number, float)}, 100)
    assert len(traces) == before


def test_plan_measures_every_candidate():
    plan = compiled("hierarchy").plan
    assert set(plan.ess) == {"importance", "smc", "divide"}
    assert plan.method == max(plan.ess, key=plan.ess.get)
    assert compiled("normal").plan.method == "importance"


def test_answers_carry_names_and_verdict():
    answer = compiled("hierarchy").infer(key(), data_of("hierarchy"), 500)
    table = answer.summary()
    assert "b[2, 1]" in table.index or "b[2,1]" in table.index
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
    assert np.isfinite(model.infer(key(), {"y": [0.5, 1.2]}, 500).log_evidence)
    with pytest.raises(rd.DataError, match=r"weight zero since stage 1 of 1.*high.*'y'"):
        model.infer(key(), {"y": [0.5, 7.0]}, 100)


def test_data_far_outside_the_prior_are_answered_and_not_trusted():
    answer = compiled("normal").infer(key(), {"y": [400.0, 401.0, 402.0, 399.0]}, 200)
    assert np.isfinite(answer.log_evidence)
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


@pytest.mark.parametrize(("data", "message"), BAD_DATA.values(), ids=BAD_DATA.keys())
def test_bad_data_are_explained(data, message):
    with pytest.raises(rd.DataError, match=message):
        compiled("coin").infer(key(), data, 10)


def test_bad_settings_are_explained():
    data = data_of("coin")
    with pytest.raises(ValueError, match="'divide'; for this model there are 'auto'"):
        compiled("coin").infer(key(), data, 10, method="divide")
    with pytest.raises(ValueError, match="at least one"):
        compiled("coin").infer(key(), data, 0)
    with pytest.raises(ValueError, match="ess_threshold"):
        compiled("coin").infer(key(), data, 10, ess_threshold=2.0)


def test_raw_proposals_agree_with_their_density():
    samples, log_q = compiled("rates").propose(key(), data_of("rates"), 64)
    again = compiled("rates").log_prob(samples, data_of("rates"))
    np.testing.assert_allclose(log_q, again, atol=2e-3)
