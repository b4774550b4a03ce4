"""Every inference method against exact posteriors, with small networks."""

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
    PARTICLES,
    RUNS,
    SMALL,
    UNTRAINED,
    compiled,
    example_data,
    group,
    method_cases,
    repeat_data,
)
from retrodict.inference import vmap_batches
from retrodict.inference.methods import Inference
from retrodict.inference.planning import PLAN_PARTICLES, Planner, evidence_program
from retrodict.inference.samplers import Settings
from retrodict.inference.smc import SMC
from retrodict.particles.resampling import systematic
from zoo import key

SLOW = pytest.mark.slow


# The weights of this case have a heavy tail, so that its mean evidence takes more runs.
NUM_RUNS = {("pumps", "smc"): 8 * RUNS}
# Largest standard error of the mean of Ẑ / Z: a bias of 6 % cannot pass.
MAX_ERROR = 0.02


@cache
def repeated_runs(name, method):
    """Posteriors of independent runs on one data set."""
    data = repeat_data(example_data(name), NUM_RUNS.get((name, method), RUNS))
    return compiled(name).infer_many(key(12), data, PARTICLES, method=method)


@pytest.mark.parametrize(("name", "method"), method_cases())
def test_evidence_is_unbiased(name, method):
    """The mean of Ẑ / Z over runs is 1 within three standard errors."""
    exact = ORACLES[name].exact(example_data(name))
    ratio = np.exp(repeated_runs(name, method).log_evidence - exact.log_evidence)
    error = ratio.std(ddof=1) / np.sqrt(len(ratio))
    assert error < MAX_ERROR
    assert abs(ratio.mean() - 1) < 3 * error


@pytest.mark.parametrize(("name", "method"), method_cases())
def test_posterior_means_are_exact(name, method):
    """Within four standard errors of the mean over runs, weighted by their evidence.

    Ẑ · mean and Ẑ are both unbiased, so that the bias of their ratio is negligible.
    """
    means = ORACLES[name].exact(example_data(name)).means
    posteriors = repeated_runs(name, method)
    weights = np.exp(posteriors.log_evidence - np.max(posteriors.log_evidence))
    weights /= weights.sum()
    for site, exact in means.items():
        mean = np.asarray(posteriors.mean(site), float)
        by_run = weights.reshape((-1,) + (1,) * (mean.ndim - 1))
        pooled = (by_run * mean).sum(0)
        error = np.sqrt(((by_run * (mean - pooled)) ** 2).sum(0))
        assert np.all(np.abs(pooled - exact) < 4 * error + 1e-4)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param("normal", "importance", marks=group("normal")),
        pytest.param("series", "smc", marks=group("series")),
    ],
)
def test_untrained_networks_give_correct_weights(name, method):
    exact, means, _ = ORACLES[name].exact(example_data(name))
    posterior = compiled(name, UNTRAINED).infer(key(7), example_data(name), 20_000, method=method)
    assert posterior.log_evidence_se < 0.1
    assert abs(posterior.log_evidence - exact) < 5 * float(posterior.log_evidence_se) + 0.02
    for site, value in means.items():
        error = 6 * np.asarray(posterior.sd(site)) / np.sqrt(posterior.ess) + 1e-3
        assert np.all(np.abs(np.asarray(posterior.mean(site)) - value) < error)


@group("series")
def test_networks_serve_plates_and_series_of_other_sizes():
    assert ORACLES["normal"].model.__defaults__ == (4,)
    larger = np.array([0.5, 1.5, 2.5, 0.0, 1.0, 3.0, 2.0])
    exact, *_ = ORACLES["normal"].exact({"y": larger})
    posterior = compiled("normal").infer(key(4), {"y": larger}, 4000, model_kwargs={"n": 7})
    assert posterior.log_evidence_se < 0.01
    assert abs(posterior.log_evidence - exact) < 4 * float(posterior.log_evidence_se) + 0.01
    graph = rd.trace(series, ["y"], model_kwargs={"steps": 20})
    longer = np.asarray(graph.program.simulate(key())["y"])
    exact, *_ = kalman(longer)
    posterior = compiled("series").infer(key(4), {"y": longer}, 4000, model_kwargs={"steps": 20})
    assert posterior.log_evidence_se < 0.1
    assert abs(posterior.log_evidence - exact) < 5 * float(posterior.log_evidence_se) + 0.02


def test_other_values_need_no_other_program():
    traces = []

    def counting(n=3):
        traces.append(0)
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("n", n):
            numpyro.sample("y", dist.Normal(mu, 1))

    model = rd.compile(
        key(), counting, ["y"], estimator=SMALL, training=UNTRAINED, progress_bar=False
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
def test_batches_of_particles_give_the_same_posterior(monkeypatch, name, method):
    """Four batches of 14 and a rest of 3 for one data set, and three data sets one by one."""
    model, data = compiled(name), example_data(name)
    settings, three = Settings(59, method), repeat_data(data, 3)
    together = Inference(model.proposal).many(model.networks, key(5), three, settings, 2**28)
    whole = Inference(model.proposal).one(model.networks, key(5), data, settings)
    bytes_each = max(model.proposal.working_bytes(model.networks, s) for s in model.proposal.stages)
    assert bytes_each > 0
    monkeypatch.setattr(vmap_batches, "WORKING_BYTES", 17 * bytes_each)
    inference = Inference(model.proposal)
    batched = inference.one(model.networks, key(5), data, settings)
    for site, values in whole.samples.items():
        np.testing.assert_allclose(batched.samples[site], values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batched.log_weights, whole.log_weights, atol=1e-3)
    many = inference.many(model.networks, key(5), three, settings, 2**20)
    np.testing.assert_allclose(many.log_evidence, together.log_evidence, atol=1e-3)


@SLOW
@group("rates")
def test_plan_measures_every_candidate():
    model = compiled("rates")
    plan = Planner(model.proposal, model.networks).plan(model.networks, key())
    assert set(plan.ess) == {"importance", "smc", "divide"}
    assert plan.method == max(plan.ess, key=plan.ess.get)


@SLOW
@group("rates")
@pytest.mark.parametrize(("method", "threshold"), [("importance", 0.0), ("smc", 0.9)])
def test_planning_gives_the_evidence_of_the_method(method, threshold):
    """A traced threshold gives the same evidence as one that is part of the program."""
    model = compiled("rates")
    data = {site: jnp.asarray(value) for site, value in example_data("rates").items()}
    inference = Inference(model.proposal)
    settings = Settings(PLAN_PARTICLES, method, ess_threshold=threshold)
    expected = inference.one(model.networks, key(3), data, settings).log_evidence
    log_evidence = evidence_program(model.proposal, "smc", PLAN_PARTICLES)(
        model.networks, jnp.asarray(threshold), key(3)[None], {n: v[None] for n, v in data.items()}
    )
    assert log_evidence.value()[0] == pytest.approx(float(expected), abs=1e-3)


@SLOW
@group("rates")
def test_importance_sampling_in_one_go_equals_stages_without_resampling():
    """A threshold known to be zero evaluates the model once, a traced one at every stage."""
    model = compiled("rates")
    data = {site: jnp.asarray(value) for site, value in example_data("rates").items()}
    (population, info), (staged_population, staged_info) = (
        jax.jit(SMC(model.proposal, 50, systematic, threshold).run)(model.networks, key(4), data)
        for threshold in (0.0, jnp.asarray(0.0))
    )
    assert len(info.ess_by_stage) > 1
    once = jax.tree.leaves((population, info._replace(survivors={})))
    staged = jax.tree.leaves((staged_population, staged_info._replace(survivors={})))
    for leaf, staged_leaf in zip(once, staged, strict=True):
        np.testing.assert_allclose(leaf, staged_leaf, rtol=1e-4, atol=1e-4)


@group("rates")
def test_prepared_programs_are_those_that_the_plan_runs():
    """With trained networks, whose arrays must have the shapes and types of untrained ones."""
    model = compiled("rates")
    untrained = {
        name: model.proposal.build(SMALL, key(), structures)
        for name, structures in model.proposal.networks().items()
    }
    planner = Planner(model.proposal, untrained)
    for compile_program in planner.lower():
        compile_program()
    compiled_names = []

    def listen(event, duration, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            compiled_names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    planner.plan(model.networks, key())
    number = len(compiled_names)
    assert not any("log_evidences" in name for name in compiled_names)
    for compile_program in Planner(model.proposal, untrained).lower():
        compile_program()
    # The name is that of the programs of the plan.
    assert sum("log_evidences" in name for name in compiled_names[number:]) == 2


@group("series")
def test_a_plan_for_a_long_series_uses_fewer_particles():
    short = compiled("series")
    inference = Inference(short.proposal)
    assert Planner(short.proposal, short.networks).num_particles == PLAN_PARTICLES
    long = inference.called_with(None, {"steps": 50_000})
    assert Planner(long.proposal, short.networks).num_particles == 50


@group("normal")
def test_a_model_of_one_stage_needs_no_comparison():
    normal = compiled("normal")
    plan = Planner(normal.proposal, normal.networks).plan(normal.networks, key())
    assert plan.method == "importance" and not plan.ess


@group("rates")
def test_posteriors_have_labels_and_a_grade():
    posterior = compiled("rates").infer(key(), example_data("rates"), 500, rescue=False)
    assert list(posterior.summary().index) == ["alpha", "beta", "theta[0]", "theta[1]", "theta[2]"]
    assert posterior.trust == posterior.diagnostics.trust == "good"
    assert f"effective sample size {posterior.ess:.0f} of 500" in posterior.diagnostics.reasons[0]
    assert posterior.log_weights.shape == (500,)
    assert np.log(np.exp(np.asarray(posterior.log_weights, float)).sum()) == pytest.approx(
        0, abs=1e-4
    )


def test_errors_for_impossible_data_name_stage_and_site():
    def bounded():
        high = numpyro.sample("high", dist.Uniform(1.0, 2.0))
        with numpyro.plate("n", 2):
            numpyro.sample("y", dist.Uniform(0.0, high))

    model = rd.compile(
        key(), bounded, ["y"], estimator=SMALL, training=UNTRAINED, progress_bar=False
    )
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
def test_data_far_outside_the_prior_give_a_finite_but_poor_posterior(name, method, y):
    posterior = compiled(name).infer(key(), {"y": y}, PARTICLES, method=method)
    assert np.isfinite(posterior.log_evidence)
    assert np.all(np.isfinite(np.concatenate([np.ravel(v) for v in posterior.samples.values()])))
    assert posterior.trust == "poor"


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
def test_errors_for_unsuitable_data_say_what_is_wrong(data, message):
    with pytest.raises(rd.DataError, match=message):
        compiled("coin", UNTRAINED).infer(key(), data, 10)


@group("coin")
def test_errors_for_unsuitable_settings_say_what_is_wrong():
    data = example_data("coin", UNTRAINED)
    with pytest.raises(ValueError, match="'divide'; for this model there are 'auto'"):
        compiled("coin", UNTRAINED).infer(key(), data, 10, method="divide")
    with pytest.raises(ValueError, match="at least one"):
        compiled("coin", UNTRAINED).infer(key(), data, 0)
    with pytest.raises(ValueError, match="ess_threshold"):
        compiled("coin", UNTRAINED).infer(key(), data, 10, ess_threshold=2.0)


@group("rates")
def test_log_q_of_proposed_samples_equals_log_prob():
    samples, log_q = compiled("rates").propose(key(), example_data("rates"), 64)
    log_prob = compiled("rates").log_prob(samples, example_data("rates"))
    # In single precision, bijections and their inverses differ in the tails.
    np.testing.assert_allclose(log_q, log_prob, rtol=2e-4, atol=2e-3)
