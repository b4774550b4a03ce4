"""Resampling rules: expected offspring, the guarantees of each, and single precision's limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from retrodict.particles import resampling
from retrodict.particles.resampling import RESAMPLERS, multinomial, residual, stratified, systematic

RULES = pytest.mark.parametrize("rule", RESAMPLERS.values(), ids=RESAMPLERS.keys())
RUNS = 20_000


def case(num, spread=2.0, seed=0):
    """Log weights with zeros first, last and in between, and the exact weights."""
    lw = np.random.default_rng(seed).normal(scale=spread, size=num).astype(np.float32)
    lw[[0, num // 2, num - 1]] = -np.inf
    w = np.exp(lw.astype(float))
    return jnp.asarray(lw), w / w.sum()


def offspring(rule, lw, num, runs=RUNS, seed=0):
    keys = jax.random.split(jax.random.key(seed), runs)
    ancestors = jax.jit(jax.vmap(lambda key: rule(key, lw, num)))(keys)
    counts = jax.vmap(lambda a: jnp.zeros(lw.shape[0], jnp.int32).at[a].add(1))(ancestors)
    return np.asarray(ancestors), np.asarray(counts)


@RULES
@pytest.mark.parametrize("num", [40, 7, 300])
def test_offspring_are_unbiased_sorted_and_never_of_weight_zero(rule, num):
    lw, w = case(40)
    ancestors, counts = offspring(rule, lw, num)
    assert ancestors.dtype == np.int32 and ancestors.shape == (RUNS, num)
    assert np.all(np.diff(ancestors, axis=1) >= 0)
    assert np.all(counts[:, w == 0.0] == 0)
    # A rule's variance is at most the multinomial's, which bounds the error of the mean, and for
    # a particle hardly ever chosen that of a Poisson count.
    error = np.sqrt(np.maximum(num * w * (1 - w), 1.0 / RUNS) / RUNS)
    assert np.all(np.abs(counts.mean(0) - num * w) < 4.5 * error + 1e-6)


@RULES
def test_variance_is_no_more_than_multinomial(rule):
    lw, w = case(40)
    _, counts = offspring(rule, lw, 40)
    allowed = 40 * w * (1 - w)
    assert np.all(counts.var(0) < allowed * (1 + 6 / np.sqrt(RUNS)) + 6 / np.sqrt(RUNS))
    if rule is systematic:
        part = (40 * w) % 1.0
        np.testing.assert_allclose(counts.var(0), part * (1 - part), atol=5 * 0.25 / np.sqrt(RUNS))


def test_multinomial_counts_are_binomial():
    lw, w = case(12, spread=1.0)
    _, counts = offspring(multinomial, lw, 20)
    for k in np.flatnonzero(w):
        expected = RUNS * stats.binom(20, w[k]).pmf(np.arange(21))
        seen = np.bincount(counts[:, k], minlength=21)
        common = expected > 10
        expected = np.append(expected[common], expected[~common].sum())
        seen = np.append(seen[common], seen[~common].sum())
        assert stats.chisquare(seen, expected * RUNS / expected.sum()).pvalue > 1e-4
    pairs = np.cov(counts.T)[np.ix_(w > 0, w > 0)]
    alive = w[w > 0]
    expected = 20 * (np.diag(alive) - np.outer(alive, alive))
    np.testing.assert_allclose(pairs, expected, atol=6 * expected.max() * np.sqrt(2 / RUNS))


def test_points_of_different_strata_are_independent():
    # particle k owns 3/2 strata: systematic counts are perfectly dependent, stratified ones not
    lw = jnp.zeros(2)
    _, counts = offspring(stratified, lw, 3)
    assert set(counts[:, 0]) == {1, 2}
    wide = jnp.log(jnp.array([1.5, 1.0, 1.5]))
    for rule, expected in ((systematic, -0.25), (stratified, 0.0)):
        _, counts = offspring(rule, wide, 4)
        # stratum 1 is shared by the first two, stratum 2 by the last two
        found = np.cov(counts[:, 0], counts[:, 2])[0, 1]
        assert found == pytest.approx(expected, abs=4.5 * 0.25 / np.sqrt(RUNS))


@pytest.mark.parametrize("num", [40, 1000])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_guarantees(num, spread):
    lw, w = case(num, spread)
    share, slack = num * w, 1e-3
    low, high = np.floor(share - slack), np.ceil(share + slack)
    _, counts = offspring(systematic, lw, num, runs=500)
    assert np.all((counts >= low) & (counts <= high))
    _, counts = offspring(stratified, lw, num, runs=500)
    assert np.all(np.abs(counts - share) < 2 + slack)
    assert np.any(counts > high)  # and it does go beyond systematic
    _, counts = offspring(residual, lw, num, runs=500)
    assert np.all(counts >= low)
    assert np.any(counts > high)


@RULES
@pytest.mark.parametrize("num", [100_000, 1_000_000])
@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
def test_a_million_particles_in_single_precision(rule, num, skewed):
    lw, w = case(num, 1.0)
    if skewed:  # one particle has half the weight, and comes early
        lw = lw.at[10].set(np.float32(np.log(np.exp(np.asarray(lw, float)).sum())))
        w = np.exp(np.asarray(lw, float))
        w /= w.sum()
    ancestors = np.asarray(rule(jax.random.key(1), lw, num))
    counts = np.bincount(ancestors, minlength=num)
    share = num * w
    assert ancestors.shape == (num,) and np.all(np.diff(ancestors) >= 0)
    assert counts.sum() == num and len(counts) == num
    assert not counts[w == 0.0].any()
    # what is lost to rounding, in offspring: of a weight by exp, and of a step of the grid
    slack = 2e-6 * share + 2.0 * num / 2**30
    if rule is systematic:
        assert np.all(counts >= np.floor(share - slack))
        assert np.all(counts <= np.ceil(share + slack))
    if rule is residual:
        assert np.all(counts >= np.floor(share - slack))
    # long stretches get their share: the sum over a hundredth is off by a few points at most
    pieces = np.add.reduceat(counts - share, np.arange(0, num, num // 100))
    even = {systematic: 1.0, stratified: 2.0}.get(rule, 5 * np.sqrt(num / 100))
    even = (
        max(even, 5 * np.sqrt(num) / 2) if skewed and rule not in (systematic, stratified) else even
    )
    assert np.abs(pieces).max() <= even + 2e-6 * num


@RULES
def test_ends_of_the_line(rule):
    key = jax.random.key(0)
    for place in (0, 3, 6):
        lw = jnp.full(7, -np.inf).at[place].set(-4.0)
        np.testing.assert_array_equal(rule(key, lw, 50), np.full(50, place))
    np.testing.assert_array_equal(rule(key, jnp.array([-3.0]), 5), np.zeros(5))
    assert rule(key, jnp.zeros(9), 1).shape == (1,)


@RULES
def test_all_weights_zero_leaves_everyone_alike(rule):
    _, counts = offspring(rule, jnp.full(8, -np.inf), 8, runs=4000)
    np.testing.assert_allclose(counts.mean(0), 1.0, atol=4.5 / np.sqrt(4000))


@RULES
def test_broken_weights_are_never_chosen(rule):
    _, counts = offspring(rule, jnp.array([0.0, np.nan, 1.0, np.inf]), 10, runs=200)
    assert not counts[:, [1, 3]].any() and counts[:, [0, 2]].all(axis=0).any()


@RULES
def test_alike_under_vmap_and_inside_jit(rule):
    lw = jnp.stack([case(33, seed=s)[0] for s in range(4)])
    keys = jax.random.split(jax.random.key(2), 4)
    together = jax.jit(jax.vmap(lambda k, w: rule(k, w, 20)))(keys, lw)
    for one, key, row in zip(together, keys, lw, strict=True):
        np.testing.assert_array_equal(one, rule(key, row, 20))


@pytest.mark.parametrize("num", [1, 2, 3, 1000, 4097])
def test_parallel_sums_are_the_sequential_ones(num):
    rng = np.random.default_rng(num)
    whole = jnp.asarray(rng.integers(0, 1000, num), jnp.int32)
    fraction = jnp.asarray(rng.integers(0, 2**32, num), jnp.uint32)
    exact = (np.asarray(whole, object) * 2**32 + np.asarray(fraction, object)).cumsum() // 2**32
    found = jax.jit(resampling._running_sum_with_carry)(whole, fraction)
    np.testing.assert_array_equal(found, exact.astype(np.int64))
    in_parallel = partial(jax.lax.associative_scan, resampling._add_with_carry)
    np.testing.assert_array_equal(
        jax.jit(in_parallel)((whole, fraction))[0], exact.astype(np.int64)
    )


@pytest.mark.parametrize("total", [0.9999, 1.0, 1.00005])
def test_shares_that_miss_one_are_stretched_evenly(total):
    shares = np.random.default_rng(0).exponential(size=50_000)
    shares = jnp.asarray(total * shares / shares.sum(), jnp.float32)
    length = 50_000 << resampling._step_bits(50_000)
    ends = np.asarray(jax.jit(resampling._lay)(shares, jnp.asarray(length, jnp.int32)))
    exact = np.cumsum(np.asarray(shares, float))
    # to within a step of the grid for the cut and one for the stretch
    assert np.abs(ends - exact / exact[-1] * length).max() <= 2.0
    assert ends[-1] == length and np.all(np.diff(ends) >= 0)


def test_names_and_callables():
    assert resampling.resampler("residual") is residual

    def first(rng_key, log_weights, num):
        return jnp.zeros(num, jnp.int32)

    assert resampling.resampler(first) is first
    with pytest.raises(ValueError, match=r"'sytematic'.*'systematic', 'stratified', 'multinomial'"):
        resampling.resampler("sytematic")
    with pytest.raises(ValueError, match="from 1 to"):
        systematic(jax.random.key(0), jnp.zeros(3), 0)
