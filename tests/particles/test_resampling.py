"""Resampling schemes: expected offspring, guarantees of each scheme, and single precision."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from retrodict.particles import resampling
from retrodict.particles.resampling import RESAMPLERS, multinomial, residual, stratified, systematic

SCHEMES = pytest.mark.parametrize("scheme", RESAMPLERS.values(), ids=RESAMPLERS.keys())
RUNS = 20_000


def case(num, spread=2.0, seed=0):
    """Log weights with zeros at both ends and in the middle, and the exact weights."""
    lw = np.random.default_rng(seed).normal(scale=spread, size=num).astype(np.float32)
    lw[[0, num // 2, num - 1]] = -np.inf
    w = np.exp(lw.astype(float))
    return jnp.asarray(lw), w / w.sum()


def offspring(scheme, lw, num, runs=RUNS, seed=0):
    keys = jax.random.split(jax.random.key(seed), runs)
    ancestors = jax.jit(jax.vmap(lambda key: scheme(key, lw, num)))(keys)
    counts = jax.vmap(lambda a: jnp.zeros(lw.shape[0], jnp.int32).at[a].add(1))(ancestors)
    return np.asarray(ancestors), np.asarray(counts)


@SCHEMES
@pytest.mark.parametrize("num", [40, 7, 300])
def test_offspring_are_unbiased_and_sorted_and_have_positive_weight(scheme, num):
    lw, w = case(40)
    ancestors, counts = offspring(scheme, lw, num)
    assert ancestors.dtype == np.int32 and ancestors.shape == (RUNS, num)
    assert np.all(np.diff(ancestors, axis=1) >= 0)
    assert np.all(counts[:, w == 0.0] == 0)
    # The variance of each scheme is at most the multinomial one, and for a particle that is hardly
    # ever chosen that of a Poisson count.
    error = np.sqrt(np.maximum(num * w * (1 - w), 1.0 / RUNS) / RUNS)
    assert np.all(np.abs(counts.mean(0) - num * w) < 4.5 * error + 1e-6)


@SCHEMES
def test_variance_is_at_most_the_multinomial_variance(scheme):
    lw, w = case(40)
    _, counts = offspring(scheme, lw, 40)
    bound = 40 * w * (1 - w)
    assert np.all(counts.var(0) < bound * (1 + 6 / np.sqrt(RUNS)) + 6 / np.sqrt(RUNS))
    if scheme is systematic:
        fraction = (40 * w) % 1.0
        np.testing.assert_allclose(
            counts.var(0), fraction * (1 - fraction), atol=5 * 0.25 / np.sqrt(RUNS)
        )


def test_multinomial_counts_are_binomial():
    lw, w = case(12, spread=1.0)
    _, counts = offspring(multinomial, lw, 20)
    for k in np.flatnonzero(w):
        expected = RUNS * stats.binom(20, w[k]).pmf(np.arange(21))
        observed = np.bincount(counts[:, k], minlength=21)
        common = expected > 10
        expected = np.append(expected[common], expected[~common].sum())
        observed = np.append(observed[common], observed[~common].sum())
        assert stats.chisquare(observed, expected * RUNS / expected.sum()).pvalue > 1e-4
    covariance = np.cov(counts.T)[np.ix_(w > 0, w > 0)]
    positive = w[w > 0]
    expected = 20 * (np.diag(positive) - np.outer(positive, positive))
    np.testing.assert_allclose(covariance, expected, atol=6 * expected.max() * np.sqrt(2 / RUNS))


def test_points_of_different_strata_are_independent():
    # Each particle owns 3/2 strata.
    lw = jnp.zeros(2)
    _, counts = offspring(stratified, lw, 3)
    assert set(counts[:, 0]) == {1, 2}
    three = jnp.log(jnp.array([1.5, 1.0, 1.5]))
    for scheme, expected in ((systematic, -0.25), (stratified, 0.0)):
        _, counts = offspring(scheme, three, 4)
        # Stratum 1 is shared by the first two particles, stratum 2 by the last two.
        covariance = np.cov(counts[:, 0], counts[:, 2])[0, 1]
        assert covariance == pytest.approx(expected, abs=4.5 * 0.25 / np.sqrt(RUNS))


@pytest.mark.parametrize("num", [40, 1000])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_bounds_on_the_number_of_offspring(num, spread):
    lw, w = case(num, spread)
    share, slack = num * w, 1e-3
    low, high = np.floor(share - slack), np.ceil(share + slack)
    _, counts = offspring(systematic, lw, num, runs=500)
    assert np.all((counts >= low) & (counts <= high))
    _, counts = offspring(stratified, lw, num, runs=500)
    assert np.all(np.abs(counts - share) < 2 + slack)
    assert np.any(counts > high)  # unlike systematic resampling
    _, counts = offspring(residual, lw, num, runs=500)
    assert np.all(counts >= low)
    assert np.any(counts > high)


@SCHEMES
@pytest.mark.parametrize("num", [100_000, 1_000_000])
@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
def test_a_million_particles_in_single_precision(scheme, num, skewed):
    lw, w = case(num, 1.0)
    if skewed:  # an early particle has half of the weight
        lw = lw.at[10].set(np.float32(np.log(np.exp(np.asarray(lw, float)).sum())))
        w = np.exp(np.asarray(lw, float))
        w /= w.sum()
    ancestors = np.asarray(scheme(jax.random.key(1), lw, num))
    counts = np.bincount(ancestors, minlength=num)
    share = num * w
    assert ancestors.shape == (num,) and np.all(np.diff(ancestors) >= 0)
    assert counts.sum() == num and len(counts) == num
    assert not counts[w == 0.0].any()
    # Rounding errors in offspring: of exp, and of the grid.
    slack = 2e-6 * share + 2.0 * num / 2**30
    if scheme is systematic:
        assert np.all(counts >= np.floor(share - slack))
        assert np.all(counts <= np.ceil(share + slack))
    if scheme is residual:
        assert np.all(counts >= np.floor(share - slack))
    # The number of offspring of each hundredth of the particles.
    errors = np.add.reduceat(counts - share, np.arange(0, num, num // 100))
    bound = {systematic: 1.0, stratified: 2.0}.get(scheme, 5 * np.sqrt(num / 100))
    if skewed and scheme not in (systematic, stratified):
        bound = max(bound, 5 * np.sqrt(num) / 2)
    assert np.abs(errors).max() <= bound + 2e-6 * num


@SCHEMES
def test_all_weight_on_one_particle(scheme):
    key = jax.random.key(0)
    for index in (0, 3, 6):
        lw = jnp.full(7, -np.inf).at[index].set(-4.0)
        np.testing.assert_array_equal(scheme(key, lw, 50), np.full(50, index))
    np.testing.assert_array_equal(scheme(key, jnp.array([-3.0]), 5), np.zeros(5))
    assert scheme(key, jnp.zeros(9), 1).shape == (1,)


@SCHEMES
def test_weights_that_are_all_zero_give_uniform_offspring(scheme):
    _, counts = offspring(scheme, jnp.full(8, -np.inf), 8, runs=4000)
    np.testing.assert_allclose(counts.mean(0), 1.0, atol=4.5 / np.sqrt(4000))


@SCHEMES
def test_nonfinite_weights_are_never_chosen(scheme):
    _, counts = offspring(scheme, jnp.array([0.0, np.nan, 1.0, np.inf]), 10, runs=200)
    assert not counts[:, [1, 3]].any() and counts[:, [0, 2]].all(axis=0).any()


@SCHEMES
def test_vmap_and_jit_give_the_same_ancestors(scheme):
    lw = jnp.stack([case(33, seed=s)[0] for s in range(4)])
    keys = jax.random.split(jax.random.key(2), 4)
    together = jax.jit(jax.vmap(lambda k, w: scheme(k, w, 20)))(keys, lw)
    for one, key, row in zip(together, keys, lw, strict=True):
        np.testing.assert_array_equal(one, scheme(key, row, 20))


@pytest.mark.parametrize("num", [1, 2, 3, 1000, 4097])
def test_sequential_and_parallel_cumulative_sums_are_exact(num):
    rng = np.random.default_rng(num)
    whole = jnp.asarray(rng.integers(0, 1000, num), jnp.int32)
    fraction = jnp.asarray(rng.integers(0, 2**32, num), jnp.uint32)
    exact = (np.asarray(whole, object) * 2**32 + np.asarray(fraction, object)).cumsum() // 2**32
    sequential = jax.jit(resampling._cumulative_sum_with_carry)(whole, fraction)
    np.testing.assert_array_equal(sequential, exact.astype(np.int64))
    parallel = partial(jax.lax.associative_scan, resampling._add_with_carry)
    np.testing.assert_array_equal(jax.jit(parallel)((whole, fraction))[0], exact.astype(np.int64))


@pytest.mark.parametrize("total", [0.9999, 1.0, 1.00005])
def test_shares_that_do_not_sum_to_one_are_rescaled(total):
    shares = np.random.default_rng(0).exponential(size=50_000)
    shares = jnp.asarray(total * shares / shares.sum(), jnp.float32)
    length = 50_000 << resampling._step_bits(50_000)
    ends = np.asarray(jax.jit(resampling._cumulative_steps)(shares, jnp.asarray(length, jnp.int32)))
    exact = np.cumsum(np.asarray(shares, float))
    # One step of the grid for rounding, and one for rescaling.
    assert np.abs(ends - exact / exact[-1] * length).max() <= 2.0
    assert ends[-1] == length and np.all(np.diff(ends) >= 0)


def test_resampler_looks_up_names_and_keeps_callables():
    assert resampling.resampler("residual") is residual

    def first(rng_key, log_weights, num):
        return jnp.zeros(num, jnp.int32)

    assert resampling.resampler(first) is first
    with pytest.raises(ValueError, match=r"'sytematic'.*'systematic', 'stratified', 'multinomial'"):
        resampling.resampler("sytematic")
    with pytest.raises(ValueError, match="from 1 to"):
        systematic(jax.random.key(0), jnp.zeros(3), 0)
