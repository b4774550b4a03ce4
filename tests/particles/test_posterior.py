"""The `Posterior` class, its grades, and the experiment behind the limits of the grades."""

import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot
from scipy import stats

from retrodict.particles.diagnostics import LIMITS, assess
from retrodict.particles.make_posterior import make_posterior
from retrodict.particles.posterior import Posterior
from retrodict.particles.weights import LogEvidence, normalise, weighted_mcse, weighted_mean

NUM = 4000


def gaussian(num=NUM, seed=0, shift=0.0, **fields):
    """Importance sampling of a standard normal from a wider one, with sites of several types."""
    rng = np.random.default_rng(seed)
    x = 1.4 * rng.normal(size=num)
    samples = {
        "x": x + shift,
        "theta": rng.normal(size=(num, 2, 3)),
        "count": np.floor(np.abs(x)).astype(np.int32),
        "positive": x > 0,
    }
    samples = {name: jnp.asarray(value, jnp.result_type(value)) for name, value in samples.items()}
    lw = stats.norm.logpdf(x) - stats.norm.logpdf(x, scale=1.4) - 7.0
    return make_posterior(samples, jnp.asarray(lw), **fields)


def test_moments_and_evidence():
    p = gaussian()
    assert isinstance(p, Posterior)
    assert p.num_particles == NUM and p.log_weights.shape == (NUM,)
    assert abs(jax.nn.logsumexp(p.log_weights)) < 1e-5
    assert abs(p.log_evidence + 7.0) < 4 * p.log_evidence_se
    assert 0.003 < p.log_evidence_se < 0.02
    assert abs(p.mean("x")) < 4 * p.mcse("x")
    # Var(x²) = 2 for a standard normal x.
    assert abs(p.sd("x") - 1) < 4 / np.sqrt(2 * p.ess)
    assert p.mean("theta").shape == p.sd("theta").shape == p.mcse("theta").shape == (2, 3)
    assert abs(p.mean("positive") - 0.5) < 4 * p.mcse("positive")
    exact = sum(k * 2 * (stats.norm.cdf(k + 1) - stats.norm.cdf(k)) for k in range(6))
    assert abs(p.mean("count") - exact) < 4 * p.mcse("count")
    with pytest.raises(KeyError, match=r"'mu'.*x, theta, count, positive"):
        p.mean("mu")


def test_expectation_of_a_pytree():
    p = gaussian()
    expectation = p.expectation(
        lambda draw: {"square": draw["x"] ** 2, "both": (draw["theta"], 1.0)}
    )
    np.testing.assert_allclose(expectation["square"], p.sd("x") ** 2 + p.mean("x") ** 2, rtol=1e-4)
    np.testing.assert_allclose(expectation["both"][0], p.mean("theta"), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(expectation["both"][1], 1.0, rtol=1e-5)


def test_resampled_draws_are_equally_weighted():
    p = gaussian()
    draws = p.resample(jax.random.key(0), 20_000)
    assert draws["theta"].shape == (20_000, 2, 3)
    # Systematic resampling rounds each of NUM shares up or down, with a variance of at most 1/4.
    rounding = 4 * 0.5 * np.sqrt(NUM) / 20_000 * p.samples["x"].std()
    assert abs(draws["x"].mean() - p.mean("x")) < rounding
    # The sites of one draw stay together.
    np.testing.assert_array_equal(draws["positive"], draws["x"] > 0)


def test_log_evidence_has_double_precision():
    total = LogEvidence(jnp.asarray(-3e6), jnp.asarray(0.0625))
    p = gaussian(log_evidence=total)
    assert float(p.log_evidence) == -3e6 + 0.0625


def test_summary_has_the_columns_and_labels_of_arviz():
    p = gaussian()
    table = p.summary(round_to=None)
    assert list(table.columns) == ["mean", "sd", "hdi_3%", "hdi_97%", "mcse_mean", "ess"]
    assert list(table.index) == [
        "x",
        *(f"theta[{i}, {j}]" for i in range(2) for j in range(3)),
        "count",
        "positive",
    ]
    np.testing.assert_allclose(table.loc["theta[1, 2]", "mean"], p.mean("theta")[1, 2], rtol=1e-6)
    np.testing.assert_allclose(table.loc["x", "mcse_mean"], p.mcse("x"), rtol=1e-6)
    np.testing.assert_allclose(table["ess"], (table["sd"] / table["mcse_mean"]) ** 2, rtol=1e-5)
    low, high = table.loc["x", ["hdi_3%", "hdi_97%"]]
    assert stats.norm.cdf(high) - stats.norm.cdf(low) == pytest.approx(0.94, abs=0.02)
    assert tuple(table.loc["count", ["hdi_3%", "hdi_97%"]]) == (0, 1)  # P(|x| < 2) = 0.954
    rounded = p.summary()
    assert np.all(np.abs(rounded["mean"] - table["mean"]) <= 0.06 * table["mcse_mean"])
    assert rounded.loc["x", "ess"] == round(table.loc["x", "ess"])
    np.testing.assert_array_equal(p.summary(round_to=1)["sd"], table["sd"].round(1))


def test_summary_with_equal_weights_equals_that_of_arviz():
    arviz = pytest.importorskip("arviz")
    if not hasattr(arviz, "hdi") or int(arviz.__version__.split(".")[0]) > 0:
        pytest.skip("ArviZ 1 has other columns")
    x = jax.random.normal(jax.random.key(0), (999, 3))
    ours = make_posterior({"x": x}, jnp.zeros(999)).summary(round_to=None)
    theirs = arviz.summary({"x": np.asarray(x)[None]}, round_to="none")
    assert list(ours.index) == list(theirs.index)
    for column in ("mean", "hdi_3%", "hdi_97%"):
        np.testing.assert_allclose(ours[column], theirs[column], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours["sd"], theirs["sd"] * np.sqrt(998 / 999), rtol=1e-4)


def test_to_arviz():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ArviZ 0.23 announces ArviZ 1 on import
        arviz = pytest.importorskip("arviz")
    p = gaussian(
        data={"y": jnp.arange(3.0), "n": jnp.asarray(4)},
        dims={"theta": ("school", "pupil"), "y": ("school_year",)},
        coords={"school": ["a", "b"]},
    )
    tree = p.to_arviz()
    if int(arviz.__version__.split(".")[0]) < 1:
        assert isinstance(tree, arviz.InferenceData)
    else:
        assert type(tree).__name__ == "DataTree"
    assert tree["posterior"]["theta"].dims == ("chain", "draw", "school", "pupil")
    assert list(tree["posterior"]["school"].values) == ["a", "b"]
    assert tree["posterior"]["x"].shape == (1, NUM)
    # Systematic resampling rounds each of NUM shares up or down, with a variance of at most 1/4.
    rounding = 4 * 0.5 * float(p.samples["x"].std()) / np.sqrt(NUM)
    assert abs(float(tree["posterior"]["x"].mean() - p.mean("x"))) < rounding
    sample_stats = tree["sample_stats"]
    np.testing.assert_array_equal(sample_stats["log_weight"][0], p.log_weights)
    particle = np.asarray(sample_stats["particle"][0])
    np.testing.assert_array_equal(np.asarray(p.samples["x"])[particle], tree["posterior"]["x"][0])
    assert float(sample_stats["ess"]) == float(p.ess)
    assert float(sample_stats["log_evidence"]) == float(p.log_evidence)
    assert sample_stats.attrs["trust"] == "good"
    np.testing.assert_array_equal(tree["observed_data"]["y"], [0.0, 1.0, 2.0])
    assert tree["observed_data"]["y"].dims == ("school_year",)
    assert float(tree["observed_data"]["n"].squeeze()) == 4.0  # ArviZ 0.23 gives it an axis
    again = gaussian().to_arviz()["posterior"]["x"]
    np.testing.assert_array_equal(again, tree["posterior"]["x"])


def test_to_arviz_without_arviz(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match="pip install arviz"):
        gaussian().to_arviz()


def test_many_data_sets_give_the_same_as_each_alone():
    alone = [gaussian(500, seed, shift=float(seed)) for seed in range(3)]
    samples = {name: jnp.stack([p.samples[name] for p in alone]) for name in alone[0].samples}
    evidence = np.array([p.log_evidence for p in alone])
    many = make_posterior(
        samples,
        jnp.stack([p.log_weights for p in alone]),
        log_evidence=evidence,
        data={"y": jnp.arange(3.0)},
    )
    assert len(many) == 3 and many.mean("theta").shape == (3, 2, 3)
    assert many.trust.shape == many.ess.shape == (3,)
    assert many.resample(jax.random.key(0), 10)["theta"].shape == (3, 10, 2, 3)
    squares = many.expectation(lambda draw: draw["x"] ** 2)
    for i, p in enumerate(alone):
        one = many[i]
        assert float(one.data["y"]) == i
        assert one.log_evidence == p.log_evidence and one.trust == p.trust
        for from_batch, selected, expected in (
            (many.mean("x"), one.mean("x"), p.mean("x")),
            (many.sd("theta"), one.sd("theta"), p.sd("theta")),
            (many.mcse("x"), one.mcse("x"), p.mcse("x")),
            (many.pareto_k, one.pareto_k, p.pareto_k),
            (many.ess, one.ess, p.ess),
        ):
            np.testing.assert_allclose(from_batch[i], expected, rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(selected, expected, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(squares[i], p.expectation(lambda d: d["x"] ** 2), rtol=1e-4)
        assert list(one.summary().index) == list(p.summary().index)
    assert [p.num_particles for p in many] == [500] * 3
    assert many[-1].log_evidence == evidence[2]
    with pytest.raises(IndexError):
        many[3]
    for method in ("summary", "to_arviz", "plot"):
        with pytest.raises(ValueError, match=rf"holds 3.*posterior\[0\]\.{method}\(\)"):
            getattr(many, method)()
    with pytest.raises(TypeError, match="one data set"):
        len(alone[0])


def test_same_shapes_are_compiled_only_once():
    gaussian(300, 0).mean("theta")
    with jax.log_compiles():
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logger = logging.getLogger("jax._src.interpreters.pxla")
        logger.addHandler(handler)
        try:
            gaussian(300, 1).mean("theta")
            assert not [line for line in messages if "Compiling" in line]
            gaussian(301, 1).mean("theta")
            assert [line for line in messages if "Compiling" in line]  # the handler works
        finally:
            logger.removeHandler(handler)


def test_one_particle_is_graded_poor():
    p = make_posterior({"x": jnp.array([2.0])}, jnp.array([-1.0]))
    assert p.trust == "poor"
    assert p.mean("x") == 2.0 and p.ess == 1.0 and np.isinf(p.log_evidence_se)
    assert float(p.log_evidence) == -1.0
    assert any(
        "sample size is 1, below the limit of 30" in reason for reason in p.diagnostics.reasons
    )
    assert p.summary().loc["x", "mean"] == 2.0


def test_weights_that_are_all_zero_are_graded_poor_with_the_reason():
    p = make_posterior({"x": jnp.ones(100)}, jnp.full(100, -jnp.inf))
    assert p.trust == "poor" and np.isneginf(p.log_evidence)
    assert "All 100 weights are zero" in p.diagnostics.reasons[0]
    assert np.isnan(p.mean("x"))


def test_nonfinite_weights_lower_the_grade():
    lw = jnp.zeros(1000)
    with_nan = lambda n: make_posterior({"x": lw}, lw.at[:n].set(jnp.nan))  # noqa: E731
    assert with_nan(5).trust == "good" and with_nan(5).diagnostics.num_nonfinite == 5
    assert with_nan(50).trust == "fair"
    assert with_nan(200).trust == "poor"
    assert "share of non-finite weights is 0.2" in str(with_nan(200).diagnostics)
    earlier = make_posterior({"x": lw}, lw, num_nonfinite=jnp.asarray(50))
    assert earlier.trust == "fair" and earlier.num_nonfinite == 50
    # 50 of the 10 000 weights of ten stages are few.
    ten_stages = make_posterior(
        {"x": lw}, lw, num_nonfinite=jnp.asarray(50), ess_by_stage=jnp.full(10, 1e3)
    )
    assert ten_stages.trust == "good" and ten_stages.diagnostics.num_stages == 10


def test_few_surviving_draws_lower_the_grade():
    x, lw = jax.random.normal(jax.random.key(0), (1000,)), jnp.zeros(1000)
    make = partial(make_posterior, {"x": x}, lw, log_evidence_se=jnp.asarray(0.05))
    identity = jnp.arange(1000)
    assert make(ancestors=jnp.stack([identity, identity])).trust == "good"
    few = make(ancestors=jnp.stack([identity // 50, identity]))
    assert few.trust == "fair"
    assert few.diagnostics.reasons == (
        "The number of surviving draws is 20, below the limit of 100 for good: "
        "resampling left a latent few values (x).",
    )
    assert make(ancestors=jnp.zeros((1, 1000), int)).trust == "poor"


def test_path_degeneracy_is_graded_fair():
    """Early steps rest on few draws, which their standard errors show; later steps do not."""
    steps, num = 6, 1000
    x = jax.random.normal(jax.random.key(0), (num, steps))
    x = x.at[:, 0].set(x[0, 0]).at[:, 1].set(x[jnp.arange(num) // 50, 1])
    survivors = jnp.array([1.0, 20.0, 150.0, 400.0, 800.0, 1000.0])
    p = make_posterior(
        {"x": x}, jnp.zeros(num), survivors={"x": survivors}, ess_by_stage=survivors + 50
    )
    assert p.trust == "fair"
    assert p.diagnostics.reasons == (
        "The number of surviving trajectories is 1, below the limit of 100 for good: early steps "
        "share their ancestors (steps 0 to 1 of x). Filtered marginals and last states are not "
        "affected.",
    )
    assert np.isposinf(p.mcse("x")[0])
    np.testing.assert_allclose(
        p.mcse("x")[1:], p.sd("x")[1:] / np.sqrt(survivors[1:] - 1), rtol=0.01
    )
    assert p.summary().loc["x[0]", "ess"] == 0
    # Latents outside of time are graded poor.
    outside = make_posterior({"x": x[:, 0]}, jnp.zeros(num), survivors={"x": survivors[0]})
    assert outside.trust == "poor"


def test_a_heavy_tail_of_negligible_weight_is_graded_good():
    """k̂ describes the shape of the tail, not its weight."""
    heavy = jax.random.pareto(jax.random.key(0), 0.8, (2000,))
    p = make_posterior({"x": heavy}, jnp.log1p(1e-4 * heavy))
    assert p.pareto_k > 0.7 and p.ess > 1950
    assert p.trust == "good"
    assert make_posterior({"x": heavy}, jnp.log1p(heavy)).trust == "poor"


def test_reasons_name_the_measure_its_value_and_the_limit():
    p = make_posterior({"x": jnp.zeros(2000)}, 1.5 * jax.random.normal(jax.random.key(0), (2000,)))
    reasons = " ".join(p.diagnostics.reasons)
    assert p.trust != "good"
    assert f"Pareto k̂ is {p.pareto_k:.3g}, above the " in reasons
    good = gaussian()
    assert (
        good.trust == "good" and "All measures are within the limits" in good.diagnostics.reasons[0]
    )
    assert "trust good" in repr(good) and "4000 particles" in repr(good)


@pytest.mark.parametrize("number", range(len(LIMITS)), ids=[limit.name for limit in LIMITS])
def test_the_limit_for_good_is_stricter_than_for_fair(number):
    limit = LIMITS[number]
    sign = 1 if limit.at == "most" else -1
    assert sign * limit.good < sign * limit.fair


def test_plot_shows_every_site_and_closes_its_figure():
    steps, num = 20, 400
    rng = np.random.default_rng(0)
    path = np.cumsum(rng.normal(size=(steps, num)), axis=0)
    base = gaussian(num)
    p = make_posterior(
        {**base.samples, "h": jnp.asarray(path.T), "long": jnp.asarray(rng.normal(size=(num, 9)))},
        base.log_weights,
        filtered={"h": jnp.asarray(path)},
        filtered_log_weights=jnp.full((steps, num), -np.log(num)),
    )
    before = pyplot.get_fignums()
    figure = p.plot()
    assert pyplot.get_fignums() == before
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [
        "x",
        *(f"theta[{i}, {j}]" for i in range(2) for j in range(3)),
        "count",
        "positive",
        "h, filtered",
        "long [9]",
    ]
    bars = next(axes for axes in figure.axes if axes.get_title() == "positive")
    heights = [patch.get_height() for patch in bars.patches]
    np.testing.assert_allclose(heights, [1 - p.mean("positive"), p.mean("positive")], atol=1e-5)
    density = next(axes for axes in figure.axes if axes.get_title() == "x").lines[0]
    x, height = density.get_data()
    area = np.sum(height) * (x[1] - x[0])
    assert area == pytest.approx(1.0, abs=0.02)
    assert np.sum(x * height) / np.sum(height) == pytest.approx(float(p.mean("x")), abs=0.1)
    median = next(axes for axes in figure.axes if axes.get_title() == "h, filtered").lines[0]
    np.testing.assert_allclose(median.get_ydata(), np.quantile(path, 0.5, axis=1), atol=0.1)
    with pytest.raises(KeyError, match="nosuch"):
        p.plot(("nosuch",))


class Product(NamedTuple):
    """Distribution with independent coordinates; `log_prob` is unnormalised."""

    dim: int
    draw_one: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    log_one: Callable[[np.ndarray], np.ndarray]

    def draw(self, rng, shape):
        return self.draw_one(rng, (*shape, self.dim))

    def log_prob(self, x):
        return self.log_one(x).sum(-1)


def normal(dim, loc, scale):
    return Product(
        dim,
        lambda rng, shape: loc + scale * rng.standard_normal(shape),
        lambda x: -0.5 * ((x - loc) / scale) ** 2,
    )


def student(dim, freedom):
    return Product(
        dim,
        lambda rng, shape: rng.standard_t(freedom, shape),
        lambda x: -0.5 * (freedom + 1) * np.log1p(x**2 / freedom),
    )


def gamma(dim):
    return Product(dim, lambda rng, shape: rng.standard_gamma(2.0, shape), lambda x: np.log(x) - x)


def lognormal(dim, spread, scale):
    return Product(
        dim,
        lambda rng, shape: rng.lognormal(np.log(scale), spread, shape),
        lambda x: -0.5 * (np.log(x / scale) / spread) ** 2 - np.log(x),
    )


class TwoModes:
    """Mixture of normals at ±m in every coordinate, the upper one with weight w."""

    def __init__(self, dim, m, w, scale):
        self.w = w
        self.modes = [normal(dim, sign * m, scale) for sign in (-1, 1)]

    def draw(self, rng, shape):
        above = rng.uniform(size=shape)[..., None] < self.w
        low, high = (mode.draw(rng, shape) for mode in self.modes)
        return np.where(above, high, low)

    def log_prob(self, x):
        low, high = (mode.log_prob(x) for mode in self.modes)
        return np.logaddexp(np.log1p(-self.w) + low, np.log(self.w) + high)


def proposals():
    """Yield family, target, its mean and sd, proposal: from nearly exact to very poor."""
    for dim in (1, 3, 10):
        for scale in (0.5, 0.7, 0.9, 1.1, 1.4, 2.0):
            for shift in (0.0, 0.3, 0.6, 1.0, 2.0):
                yield "normal", normal(dim, 0.0, 1.0), 0.0, 1.0, normal(dim, shift, scale)
        for freedom in (3, 6):
            sd = np.sqrt(freedom / (freedom - 2))
            for scale in (0.7, 1.0, 1.5):
                yield "student", student(dim, freedom), 0.0, sd, normal(dim, 0.0, scale)
        for m in (2.0, 6.0):
            for w in (0.5, 0.2, 0.05):
                target = TwoModes(dim, m, 0.5, 1.0)
                yield "modes", target, 0.0, np.sqrt(1 + m**2), TwoModes(dim, m, w, 1.1)
        for spread in (0.6, 1.0, 1.4):
            for scale in (0.7, 1.5, 3.0):
                yield "gamma", gamma(dim), 2.0, np.sqrt(2.0), lognormal(dim, spread, scale)


@jax.jit
@jax.vmap
def grade_mean_and_se(x, lw):
    assessment = assess(lw)
    normalised, _ = normalise(lw)
    mean = weighted_mean(normalised, x)
    # Draws are independent and distinct, so that each particle is a group of its own.
    weights = jnp.exp(normalised)[:, None]
    return assessment.grade, mean, jnp.sqrt(jnp.sum(weights**2 * (x - mean) ** 2, axis=0))


@pytest.mark.slow
def test_at_most_2_percent_of_good_posteriors_are_wrong():
    """Of the posteriors graded good, at most 2 % have a mean whose error exceeds 3 se + 0.1 sd.

    The experiment behind `LIMITS`: importance sampling between distributions of known means.
    """
    rng = np.random.default_rng(0)
    results = []
    for num, runs in ((300, 50), (1000, 30), (4000, 6)):
        for family, target, mean, sd, proposal in proposals():
            x = proposal.draw(rng, (runs, num))
            lw = target.log_prob(x) - proposal.log_prob(x)
            grade, estimate, se = grade_mean_and_se(jnp.asarray(x), jnp.asarray(lw))
            off = np.abs(np.asarray(estimate) - mean) > 3 * np.asarray(se) + 0.1 * sd
            results += [(family, num, g, bool(o)) for g, o in zip(grade, off.any(-1), strict=True)]
    families, nums, grades, wrong = (np.array(column) for column in zip(*results, strict=True))
    good = grades == 0
    assert wrong.mean() > 0.15  # there are errors to detect
    assert wrong[good].mean() < 0.005
    for family in set(families):
        subset = good & (families == family)
        assert subset.sum() > 100 and wrong[subset].mean() <= 0.02, family
    for num in (300, 1000, 4000):
        assert wrong[good & (nums == num)].mean() <= 0.02
    # A grade that is never given would be useless.
    assert (good & ~wrong)[nums == 1000].sum() > 0.4 * (~wrong)[nums == 1000].sum()
    assert wrong[grades == 2].mean() > 5 * wrong[grades == 1].mean() > 0


def test_the_standard_error_of_the_experiment_is_that_of_the_posterior():
    x = jax.random.normal(jax.random.key(0), (1, 200, 3))
    lw = 0.3 * jax.random.normal(jax.random.key(1), (1, 200))
    expected = weighted_mcse(normalise(lw[0])[0], x[0], jnp.arange(200))
    np.testing.assert_allclose(grade_mean_and_se(x, lw)[2][0], expected, rtol=1e-4)
