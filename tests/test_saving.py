"""A compiled model, saved and loaded again: bit for bit the same, or refused with the reason."""

from functools import cache

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import retrodict as rd
from zoo import key


def rates(scale, n=3):
    """A plate whose elements differ by an argument that is an array."""
    alpha = numpyro.sample("alpha", dist.Gamma(2.0, 1.0))
    with numpyro.plate("n", n):
        theta = numpyro.sample("theta", dist.Gamma(alpha, 1.0))
        numpyro.sample("y", dist.Poisson(theta * scale))


@cache
def compiled():
    return rd.compile(
        key(),
        rates,
        ["y"],
        model_args=(np.array([1.0, 2.0, 5.0]),),
        model_kwargs={"n": 3},
        estimator=rd.MADE(hidden=(8,), components=2, context=(4,)),
        training=rd.Training(max_steps=8, batch_size=64, dataset_size=512, heldout_size=256),
        progress_bar=False,
    )


@pytest.fixture
def path(tmp_path):
    return compiled().save(tmp_path / "rates.rd")


def test_answers_are_bit_identical(path):
    loaded = rd.load(path, rates)
    data = {"y": [1, 4, 9]}
    before, log_q = compiled().propose(key(1), data, 50)
    after, log_q_after = loaded.propose(key(1), data, 50)
    np.testing.assert_array_equal(log_q, log_q_after)
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])
    a, b = compiled().infer(key(2), data, 50), loaded.infer(key(2), data, 50)
    assert a.log_evidence == b.log_evidence
    np.testing.assert_array_equal(a.log_weights, b.log_weights)


def test_plan_history_and_options_come_back(path):
    loaded = rd.load(path, rates)
    assert loaded.plan == compiled().plan
    assert loaded.estimator == compiled().estimator
    assert loaded.history.networks == compiled().history.networks
    assert loaded.history.simulated > 0


def other_name(scale, n=3):
    alpha = numpyro.sample("a", dist.Gamma(2.0, 1.0))
    with numpyro.plate("n", n):
        theta = numpyro.sample("theta", dist.Gamma(alpha, 1.0))
        numpyro.sample("y", dist.Poisson(theta * scale))


def other_distribution(scale, n=3):
    alpha = numpyro.sample("alpha", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("n", n):
        theta = numpyro.sample("theta", dist.Gamma(alpha, 1.0))
        numpyro.sample("y", dist.Poisson(theta * scale))


def other_dependence(scale, n=3):
    alpha = numpyro.sample("alpha", dist.Gamma(2.0, 1.0))
    with numpyro.plate("n", n):
        theta = numpyro.sample("theta", dist.Gamma(2.0, 1.0))
        numpyro.sample("y", dist.Poisson(theta * scale * alpha))


def other_shape(scale, n=3):
    alpha = numpyro.sample("alpha", dist.Gamma(2.0, 1.0).expand([2]))
    with numpyro.plate("n", n):
        theta = numpyro.sample("theta", dist.Gamma(alpha[0], 1.0))
        numpyro.sample("y", dist.Poisson(theta * scale))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (other_name, "it has the sites alpha, theta, y; the model given has a, theta, y"),
        (other_distribution, "the distribution of site 'alpha' was Gamma"),
        (other_dependence, r"how '(theta|y)' depends on 'alpha' has changed"),
        (other_shape, r"the shape of site 'alpha' was \[\]"),
    ],
)
def test_another_model_is_refused(path, model, message):
    with pytest.raises(rd.WrongModel, match=message):
        rd.load(path, model)


def test_damage_is_refused(path, tmp_path):
    """Truncated at every 1000th byte, and with 200 random bits flipped one at a time."""
    whole = path.read_bytes()
    broken = tmp_path / "broken.rd"
    for length in range(0, len(whole), 1000):
        broken.write_bytes(whole[:length])
        with pytest.raises(rd.DamagedFile):
            rd.load(broken, rates)
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(whole), 200):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(generator.integers(8))
        broken.write_bytes(damaged)
        with pytest.raises(rd.DamagedFile):
            rd.load(broken, rates)


def test_arguments_that_cannot_be_saved_are_named(tmp_path):
    def model(link):
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(link(x), 1))

    made = rd.compile(
        key(),
        model,
        ["y"],
        model_args=(lambda v: v,),
        estimator=rd.MADE(hidden=(8,), components=2),
        training=rd.Training(max_steps=0, batch_size=32, dataset_size=64, heldout_size=32),
        progress_bar=False,
    )
    with pytest.raises(TypeError, match=r"cannot save model_args\[0\].*functools.partial"):
        made.save(tmp_path / "model.rd")
    assert not list(tmp_path.iterdir())
