"""Calibration: passes where answers are right, and fails, loudly, where they are not."""

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
    """A continuous latent, and a discrete one for each element of a plate."""
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
def checked():
    return rd.calibrate(zoo.key(1), compiled(), 200, 300)


def tampered(by):
    """The same artefact with all weights disturbed."""
    networks = {}
    for name, network in compiled().networks.items():
        weights, rest = eqx.partition(network, trainable(network))
        networks[name] = eqx.combine(jax.tree.map(by, weights), rest)
    return replace(compiled(), networks=networks)


def test_right_answers_pass():
    found = checked()
    assert found.passed, found.faults
    assert set(found.ranks) == {"mu", "k"}
    assert found.ranks["k"].shape == (200, 3)
    table = found.summary()
    assert table["uniform"].all()
    # Of 200, a share has standard error below 0.036.
    assert table.loc["mu", "coverage 50%"] == pytest.approx(0.5, abs=4 * 0.036)
    assert str(found).startswith("Passed on 200 data sets, 300 particles")


def test_tampered_weights_do_not_pass():
    found = rd.calibrate(zoo.key(1), tampered(lambda w: 3 * w + 1), 100, 300)
    assert not found.passed
    assert "NOT PASSED" in str(found)


def test_networks_that_have_learned_nothing_do_not_pass_by_themselves():
    found = rd.calibrate(zoo.key(1), compiled(0), 200, 300, weighted=False)
    assert not found.passed
    assert any("not uniform" in fault for fault in found.faults)


def test_ranks_of_exact_draws_are_uniform_however_few():
    """Draws from the posterior itself, by rejection in one's head: prior draws without data."""
    number, particles = 4000, 3
    keys = jax.random.split(zoo.key(3), 2)
    truth = {"x": np.asarray(jax.random.poisson(keys[0], 2.0, (number,)))}
    drawn = {"x": jax.random.poisson(keys[1], 2.0, (number, particles))}
    weights = jnp.full((number, particles), 1 / particles)
    ranks = module._ranks(zoo.key(4), truth, drawn, weights)["x"]
    assert stats.kstest(ranks, "uniform").pvalue > 0.01


@pytest.mark.parametrize(
    ("u", "words"),
    [
        (np.random.default_rng(0).beta(0.5, 0.5, 200), "too narrow"),
        (np.random.default_rng(0).beta(4, 4, 200), "too wide"),
        (np.random.default_rng(0).beta(1, 2, 200), "below the draws"),
        (np.random.default_rng(0).beta(2, 1, 200), "above the draws"),
    ],
)
def test_faults_are_found_and_named(u, words):
    good = np.ones(200) * 100.0
    trust = np.full(200, "good")
    found = module.Calibration(compiled(), {"x": u}, good, 0 * good, trust, 300)
    assert not found.passed
    assert words in found.faults[0]


def test_false_alarms_are_as_rare_as_said():
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(300):
        good = np.full(100, 50.0)
        ranks = {"a": rng.uniform(size=(100, 2)), "b": rng.uniform(size=100)}
        found = module.Calibration(compiled(), ranks, good, good, np.full(100, "good"), 100)
        alarms += not found.passed
    # One in a hundred, and the chance of more than nine in three hundred is one in a thousand.
    assert alarms <= 9


def test_answers_that_call_themselves_poor_are_a_fault():
    good = np.full(100, 50.0)
    ranks = {"a": np.linspace(0.005, 0.995, 100)}
    trust = np.where(np.arange(100) < 30, "poor", "good")
    found = module.Calibration(compiled(), ranks, good, good, trust, 100)
    assert found.faults == (
        "30% of the answers call themselves poor, more than 20%: the networks propose badly. Train "
        "longer",
    )


@pytest.mark.slow
def test_data_sets_are_worked_on_in_parts(monkeypatch):
    monkeypatch.setattr(module, "MEMORY", 4 * 300 * 4 * 30)
    found = rd.calibrate(zoo.key(1), compiled(), 70, 300)
    assert found.num_datasets == 70 and found.ranks["mu"].shape == (70,)


def test_it_is_drawn(tmp_path):
    import matplotlib.pyplot as plt

    figure = checked().plot()
    assert [axes.get_title() for axes in figure.axes] == [
        "Ranks of the truth", "Coverage", "Effective particles",
    ]  # fmt: skip
    figure.savefig(tmp_path / "calibration.png")
    plt.close(figure)
    page = checked().save_html(tmp_path / "report.html")
    assert "<svg" in page.read_text("utf-8")


def test_too_few_are_refused():
    with pytest.raises(ValueError, match="two data sets and two particles"):
        rd.calibrate(zoo.key(0), compiled(), 1, 100)
