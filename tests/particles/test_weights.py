"""Functions of weights against double precision, ArviZ, and distributions with known moments."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from retrodict.particles import weights

INF = np.inf
pareto_k = jax.jit(weights.pareto_k)


def log_weights(seed, num, spread=1.0):
    return np.random.default_rng(seed).normal(scale=spread, size=num).astype(np.float32)


@pytest.mark.parametrize("shift", [0.0, -1e4, 3e4])
def test_normalise_with_large_offsets(shift):
    lw = log_weights(0, 1000, 2.0) + np.float32(shift)
    normalised, log_mean = weights.normalise(jnp.asarray(lw))
    exact = lw.astype(float)
    np.testing.assert_allclose(normalised, exact - logsumexp(exact), atol=2e-6)
    # Adjacent single-precision numbers of this size differ by as much.
    atol = 1e-6 + np.spacing(np.float32(abs(shift)))
    np.testing.assert_allclose(log_mean, logsumexp(exact) - np.log(1000), atol=atol, rtol=0)
    assert abs(logsumexp(np.asarray(normalised, float))) < 1e-6


def test_nonfinite_weights_are_set_to_zero_and_counted():
    lw = jnp.array([0.0, np.nan, INF, -INF, np.log(3.0)])
    finite, num_nonfinite = weights.drop_nonfinite(lw)
    np.testing.assert_array_equal(finite, [0.0, -INF, -INF, -INF, np.float32(np.log(3.0))])
    assert num_nonfinite == 2  # -inf is a weight of zero
    normalised, log_mean = weights.normalise(lw)
    np.testing.assert_allclose(jnp.exp(normalised), [0.25, 0, 0, 0, 0.75], rtol=1e-6)
    np.testing.assert_allclose(log_mean, np.log(4 / 5), rtol=1e-6)
    np.testing.assert_allclose(weights.ess(lw), 16 / 10, rtol=1e-6)


def test_weights_that_are_all_zero_never_give_nan():
    lw = jnp.full(30, -INF)
    normalised, log_mean = weights.normalise(lw)
    assert np.all(np.isneginf(normalised)) and np.isneginf(log_mean)
    assert weights.ess(lw) == 0.0
    assert np.isposinf(weights.log_evidence_se(lw))
    assert np.isposinf(pareto_k(lw))
    evidence = weights.LogEvidence.zero().add(log_mean).add(jnp.asarray(-3.0))
    assert np.isneginf(evidence.value())


def test_ess_is_between_one_and_the_number_of_particles():
    assert weights.ess(jnp.zeros(7)) == pytest.approx(7)
    assert weights.ess(jnp.array([5.0, -INF, -INF])) == pytest.approx(1)
    lw = log_weights(1, 500)
    w = np.exp(lw.astype(float))
    np.testing.assert_allclose(weights.ess(jnp.asarray(lw)), w.sum() ** 2 / (w**2).sum(), rtol=1e-5)


@pytest.mark.parametrize("steps", [10_000, 1_000_000])
def test_log_evidence_of_many_steps_keeps_its_precision(steps):
    increments = (-3 + np.random.default_rng(0).normal(size=steps)).astype(np.float32)

    @jax.jit
    def both(x):
        start = (weights.LogEvidence.zero(), jnp.zeros(()))
        add = lambda s, i: ((s[0].add(i), s[1] + i), None)  # noqa: E731
        return jax.lax.scan(add, start, x)[0]

    compensated, plain = both(increments)
    exact = increments.astype(np.float64).sum()
    assert abs(compensated.value() - exact) < 1e-5
    assert compensated.value().dtype == np.float64
    # A sum in single precision is worse.
    assert abs(float(plain) - exact) > 1e-3


def test_log_evidence_se_is_that_of_the_mean_weight():
    lw = log_weights(2, 400)
    w = np.exp(lw.astype(float))
    expected = w.std(ddof=1) / w.mean() / np.sqrt(400)
    np.testing.assert_allclose(weights.log_evidence_se(jnp.asarray(lw)), expected, rtol=1e-5)
    assert weights.log_evidence_se(jnp.zeros(50)) < 1e-6
    assert np.isposinf(weights.log_evidence_se(jnp.zeros(1)))


def test_log_evidence_se_equals_the_spread_over_runs():
    lw = 0.5 * jax.random.normal(jax.random.key(0), (4000, 1000))
    _, log_means = jax.jit(jax.vmap(weights.normalise))(lw)
    typical = np.sqrt(np.mean(np.square(jax.jit(jax.vmap(weights.log_evidence_se))(lw))))
    # The relative standard error of the sd of 4000 runs is 1 / √8000.
    np.testing.assert_allclose(np.std(log_means), typical, rtol=4 / np.sqrt(8000))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ 0.23 announces ArviZ 1 on import
    arviz = pytest.importorskip("arviz")
OLD_ARVIZ = hasattr(arviz, "psislw")


def arviz_k(lw):
    """k̂ by the installed version of ArviZ."""
    lw = np.array(lw, np.float64)
    with np.errstate(over="ignore"):
        if OLD_ARVIZ:
            return float(arviz.psislw(lw)[1])
        from arviz_stats.base import array_stats

        return float(array_stats.psislw(-lw)[1])  # ArviZ 1 takes log likelihoods


# For these sizes the tail size is a whole number. Otherwise ArviZ 0.23 and retrodict round it up,
# and ArviZ 1 rounds it down.
@pytest.mark.parametrize("num", [40, 100, 400, 22_500])
@pytest.mark.parametrize("spread", [0.01, 0.5, 1.0, 2.0, 8.0, 40.0])
def test_pareto_k_equals_that_of_arviz(num, spread):
    lw = log_weights(int(num + 10 * spread), num, spread)
    np.testing.assert_allclose(pareto_k(jnp.asarray(lw)), arviz_k(lw), atol=1e-3, rtol=1e-3)


def test_pareto_k_equals_that_of_arviz_with_ties_zeros_and_long_tails():
    rng = np.random.default_rng(5)
    tied = np.round(rng.normal(size=900), 1).astype(np.float32)
    zeros = np.where(rng.uniform(size=900) < 0.5, -INF, rng.normal(size=900)).astype(np.float32)
    long = (-(rng.exponential(size=900) ** 3)).astype(np.float32)
    # ArviZ 1 includes weights equal to the cutoff in the tail.
    for lw in (zeros, long, tied) if OLD_ARVIZ else (zeros, long):
        np.testing.assert_allclose(pareto_k(jnp.asarray(lw)), arviz_k(lw), atol=1e-3)


@pytest.mark.parametrize("k", [0.1, 0.4, 0.7, 1.0])
def test_pareto_k_of_generalised_pareto_weights(k):
    num, runs = 20_000, 64
    tail = np.ceil(3 * np.sqrt(num))
    w = stats.genpareto(k).rvs((runs, num), random_state=np.random.default_rng(int(10 * k)))
    estimates = jax.jit(jax.vmap(weights.pareto_k))(jnp.log(w))
    expected = (tail * k + 10 * 0.5) / (tail + 10)  # shrunk by the prior
    # The asymptotic sd of a fitted shape is (1 + k) / √M.
    np.testing.assert_allclose(np.std(estimates), (1 + k) / np.sqrt(tail), rtol=0.35)
    error = (1 + k) / np.sqrt(tail * runs)
    # The posterior mean differs from the maximum likelihood estimate by O(1/M).
    np.testing.assert_allclose(np.mean(estimates), expected, atol=4 * error + 1 / tail)


def test_pareto_k_of_few_or_equal_weights():
    for num in (1, 2, 20):
        assert np.isposinf(pareto_k(jnp.asarray(log_weights(0, num))))
    assert np.isfinite(pareto_k(jnp.asarray(log_weights(0, 21))))
    four_positive = jnp.full(1000, -INF).at[:4].set(jnp.arange(4.0))
    assert np.isposinf(pareto_k(four_positive))
    assert pareto_k(jnp.zeros(1000)) == 0.5
    assert pareto_k(jnp.zeros(1000).at[:3].set(0.1)) == 0.5


def test_pareto_k_is_invariant_to_an_offset_and_vmaps():
    lw = np.stack([log_weights(seed, 300, 1.5) for seed in range(5)])
    one_by_one = [float(pareto_k(jnp.asarray(row))) for row in lw]
    np.testing.assert_allclose(
        jax.jit(jax.vmap(weights.pareto_k))(jnp.asarray(lw)), one_by_one, rtol=1e-5
    )
    np.testing.assert_allclose(pareto_k(jnp.asarray(lw[0]) + 64.0), one_by_one[0], atol=1e-3)


def test_moments_ignore_particles_of_weight_zero():
    lw, _ = weights.normalise(jnp.array([0.0, np.log(3.0), -INF, -INF]))
    values = jnp.array([[1.0, 2.0], [5.0, 2.0], [np.nan, 7.0], [INF, -INF]])
    np.testing.assert_allclose(weights.weighted_mean(lw, values), [4.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(
        weights.weighted_sd(lw, values), [np.sqrt(0.25 * 9 + 0.75), 0.0], rtol=1e-6
    )
    errors = weights.weighted_mcse(lw, values, jnp.arange(4))
    np.testing.assert_allclose(errors, [np.sqrt(0.75**2 + 0.75**2), 0.0], rtol=1e-6)


def test_mean_of_a_narrow_posterior_far_from_zero():
    """The error is a small part of the standard deviation, though float32 rounds the weights."""
    x = (14.0 + 1e-3 * np.random.default_rng(0).normal(size=4000)).astype("f4")
    lw, _ = weights.normalise(jnp.zeros(4000))
    mean = float(weights.weighted_mean(lw, jnp.asarray(x)))
    assert abs(mean - x.astype(float).mean()) < 2e-6


def test_mcse_equals_the_spread_over_runs():
    keys = jax.random.split(jax.random.key(1), 3000)

    def run(key):
        x = 1.5 * jax.random.normal(key, (300,))
        lw, _ = weights.normalise(-0.5 * (x - 0.5) ** 2 + 0.5 * (x / 1.5) ** 2)
        return weights.weighted_mean(lw, x), weights.weighted_mcse(lw, x, jnp.arange(300))

    means, errors = jax.jit(jax.vmap(run))(keys)
    typical = np.sqrt(np.mean(np.square(errors)))
    # The variance of a ratio estimator has a bias of O(1/K).
    np.testing.assert_allclose(np.std(means), typical, rtol=4 / np.sqrt(6000) + 5 / 300)


def test_mcse_counts_copies_of_a_draw_once():
    x = jax.random.normal(jax.random.key(0), (100,))
    flat = jnp.full(100, -np.log(100.0))
    distinct = weights.weighted_mcse(flat, x, jnp.arange(100))
    copies = weights.weighted_mcse(flat, jnp.repeat(x[:10], 10), jnp.arange(100))
    np.testing.assert_allclose(distinct, np.std(x) / 10, rtol=1e-5)
    np.testing.assert_allclose(copies, np.std(x[:10]) / np.sqrt(10), rtol=1e-5)
    # Ten ancestors with ten identical descendants each.
    eves = jnp.repeat(jnp.arange(10), 10)
    integers = (jnp.repeat(x[:10], 10) > 0).astype(jnp.int32)
    by_ancestor = weights.weighted_mcse(flat, integers, eves)
    np.testing.assert_allclose(by_ancestor, np.std(integers) / np.sqrt(10), rtol=1e-5)


def test_hdi_is_the_narrowest_interval():
    rng = np.random.default_rng(0)
    x = rng.gamma(2.0, size=2000)
    flat = np.zeros(2000)
    low, high = weights.weighted_hdi(x, flat - np.log(2000), 0.94)
    assert np.mean((x >= low) & (x <= high)) >= 0.94
    order = np.sort(x)
    reach = int(np.ceil(0.94 * 2000)) - 1
    assert high - low == pytest.approx((order[reach:] - order[: 2000 - reach]).min())
    # Weighted: importance sampling of a gamma(2) from an exponential.
    y = rng.exponential(2.0, size=200_000)
    lw = np.log(y) - y + y / 2
    ends = weights.weighted_hdi(y, lw - logsumexp(lw), 0.94)
    density = stats.gamma(2.0).pdf(np.array(ends))
    mass = np.diff(stats.gamma(2.0).cdf(np.array(ends)))[0]
    assert mass == pytest.approx(0.94, abs=0.005)
    assert density[0] == pytest.approx(density[1], abs=0.02)
    assert weights.weighted_hdi(np.array([0, 1, 1]), np.log([0.05, 0.45, 0.5]), 0.94) == (1, 1)
