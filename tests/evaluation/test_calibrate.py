"""Calibration passes for correct posteriors and fails for wrong ones."""

from dataclasses import replace
from functools import cache
from importlib import import_module

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import retrodict as rd
import zoo
from retrodict.estimators.conditional import trainable
from retrodict.estimators.encoders import Embedding

module = import_module("retrodict.evaluation.calibrate")  # the package has a function of that name
SMALL = rd.MADE((24,), 3, (16,), Embedding((16,), (16,), 16, 1))


def model(y=None):
    """A model with a continuous latent, and a discrete one for each element of a plate."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("n", 3):
        k = numpyro.sample("k", dist.Bernoulli(jax.nn.sigmoid(mu)))
        numpyro.sample("y", dist.Normal(2 * k, 1), obs=y)


@cache
def compiled(steps=400):
    training = rd.Training(max_steps=steps, batch_size=128, dataset_size=4096, heldout_size=512)
    return rd.compile(
        zoo.key(0), model, ("y",), estimator=SMALL, training=training, progress_bar=False
    )


@cache
def calibration():
    return rd.calibrate(zoo.key(1), compiled(), 200, 300)


def disturbed(change):
    """The compiled model with all weights changed."""
    networks = {}
    for name, network in compiled().networks.items():
        weights, rest = eqx.partition(network, trainable(network))
        networks[name] = eqx.combine(jax.tree.map(change, weights), rest)
    return replace(compiled(), networks=networks)


def test_trained_model_passes():
    result = calibration()
    assert result.passed, result.failures
    assert set(result.ranks) == {"mu", "k"}
    assert result.ranks["k"].shape == (200, 3)
    table = result.summary()
    assert table["uniform"].all()
    # Of 200, a share has standard error below 0.036.
    assert table.loc["mu", "coverage 50%"] == pytest.approx(0.5, abs=4 * 0.036)
    assert str(result).startswith("Passed on 200 data sets, 300 particles")


def test_disturbed_weights_fail():
    result = rd.calibrate(zoo.key(1), disturbed(lambda w: 3 * w + 1), 100, 300)
    assert not result.passed
    assert "NOT PASSED" in str(result)


def test_untrained_networks_without_weights_fail():
    result = rd.calibrate(zoo.key(1), compiled(0), 200, 300, weighted=False)
    assert not result.passed
    assert any("not uniform" in failure for failure in result.failures)


def test_ranks_of_exact_draws_are_uniform_for_few_draws():
    """Without data the posterior is the prior, from which both truth and draws are sampled."""
    num_datasets, num_draws = 4000, 3
    keys = jax.random.split(zoo.key(3), 2)
    truth = {"x": np.asarray(jax.random.poisson(keys[0], 2.0, (num_datasets,)))}
    draws = {"x": jax.random.poisson(keys[1], 2.0, (num_datasets, num_draws))}
    weights = jnp.full((num_datasets, num_draws), 1 / num_draws)
    ranks = module._ranks(zoo.key(4), truth, draws, weights)["x"]
    assert stats.kstest(ranks, "uniform").pvalue > 0.01


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (np.random.default_rng(0).beta(0.5, 0.5, 200), "too narrow"),
        (np.random.default_rng(0).beta(4, 4, 200), "too wide"),
        (np.random.default_rng(0).beta(1, 2, 200), "below the draws"),
        (np.random.default_rng(0).beta(2, 1, 200), "above the draws"),
    ],
)
def test_failures_describe_the_deviation(ranks, words):
    ess = np.full(200, 100.0)
    trust = np.full(200, "good")
    result = module.Calibration(compiled(), {"x": ranks}, ess, np.zeros(200), trust, 300)
    assert not result.passed
    assert words in result.failures[0]


def test_false_alarm_rate_is_one_per_cent():
    rng = np.random.default_rng(0)
    num_failed = 0
    for _ in range(300):
        ess = np.full(100, 50.0)
        ranks = {"a": rng.uniform(size=(100, 2)), "b": rng.uniform(size=100)}
        result = module.Calibration(compiled(), ranks, ess, ess, np.full(100, "good"), 100)
        num_failed += not result.passed
    # More than nine of 300 have probability 0.001 if the rate is 0.01.
    assert num_failed <= 9


def test_many_poor_posteriors_fail():
    ess = np.full(100, 50.0)
    ranks = {"a": np.linspace(0.005, 0.995, 100)}
    trust = np.where(np.arange(100) < 30, "poor", "good")
    result = module.Calibration(compiled(), ranks, ess, ess, trust, 100)
    assert result.failures == (
        "30% of the posteriors have trust 'poor', more than 20%: the proposal is far from the "
        "posterior. Train longer",
    )


@pytest.mark.slow
def test_data_sets_are_processed_in_chunks(monkeypatch):
    monkeypatch.setattr(module, "MEMORY", 4 * 300 * 4 * 30)
    original, sizes = module._calibrate_chunk, []

    def record_size(infer_key, tie_key, compiled, truth, *options):
        sizes.append(len(truth["mu"]))
        return original(infer_key, tie_key, compiled, truth, *options)

    monkeypatch.setattr(module, "_calibrate_chunk", record_size)
    result = rd.calibrate(zoo.key(1), compiled(), 70, 300)
    assert sizes == [30, 30, 30]
    assert result.num_datasets == 70 and result.ranks["mu"].shape == (70,)
    assert stats.kstest(result.ranks["mu"], "uniform").pvalue > 0.01


def test_plot_and_html_report_are_written(tmp_path):
    import matplotlib.pyplot as plt

    figure = calibration().plot()
    assert [axes.get_title() for axes in figure.axes] == [
        "Ranks of the true values", "Coverage", "Effective sample size",
    ]  # fmt: skip
    figure.savefig(tmp_path / "calibration.png")
    plt.close(figure)
    page = calibration().save_html(tmp_path / "report.html")
    assert "<svg" in page.read_text("utf-8")


def test_fewer_than_two_data_sets_are_refused():
    with pytest.raises(ValueError, match="at least two data sets and two particles"):
        rd.calibrate(zoo.key(0), compiled(), 1, 100)
