"""Standard errors from the genealogy against the spread over runs; lineages by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from retrodict.particles import weights
from retrodict.particles.genealogy import Lineage, surviving_draws, trace_trajectories
from retrodict.particles.resampling import multinomial, systematic

SIGMA, NUM, STEPS = 0.7, 100, 6
SERIES = np.array([0.4, 1.1, 0.9, 2.0, 1.2, 0.3])


def kalman_log_evidence():
    mean, var, total = 0.0, 1.0, 0.0
    for t, y in enumerate(SERIES):
        if t:
            mean, var = 0.9 * mean, 0.81 * var + 1.0
        total += stats.norm.logpdf(y, mean, np.sqrt(var + SIGMA**2))
        gain = var / (var + SIGMA**2)
        mean, var = mean + gain * (y - mean), (1 - gain) * var
    return total


def bootstrap_filter(rng_key, rule=systematic, length=STEPS, threshold=1.0):
    """Bootstrap particle filter: log Ẑ, its standard error, last log weights, ancestors.

    The state x_t = 0.9 x_{t-1} + N(0, 1) is observed with noise; `SERIES` is repeated to `length`.
    """
    series = jnp.asarray(np.resize(SERIES, length))

    def step(carry, inputs):
        x, lw, total, lineage = carry
        key, y = inputs
        resample_key, propagate_key = jax.random.split(key)
        is_low = weights.ess(lw) < threshold * NUM
        identity = jnp.arange(NUM, dtype=jnp.int32)
        ancestors = jnp.where(is_low, rule(resample_key, lw, NUM), identity)
        new_lineage = lineage.resample(lw, weights.ess(lw), ancestors)
        lineage = jax.tree.map(partial(jnp.where, is_low), new_lineage, lineage)
        x = 0.9 * x[ancestors] + jax.random.normal(propagate_key, (NUM,))
        lw = jnp.where(is_low, -np.log(NUM), lw) + jax.scipy.stats.norm.logpdf(y, x, SIGMA)
        lw, log_mean = weights.normalise(lw)
        return (x, lw, total + log_mean + np.log(NUM), lineage), ancestors

    first_key, *keys = jax.random.split(rng_key, length)
    x = jax.random.normal(first_key, (NUM,))
    lw, log_mean = weights.normalise(jax.scipy.stats.norm.logpdf(series[0], x, SIGMA))
    start = (x, lw, log_mean, Lineage.initial(NUM))
    (_, lw, total, lineage), ancestors = jax.lax.scan(step, start, (jnp.stack(keys), series[1:]))
    return (
        total,
        weights.genealogical_se(lw, lineage.ancestors, lineage.past_variance),
        lw,
        ancestors,
    )


def filters(runs, **options):
    keys = jax.random.split(jax.random.key(3), runs)
    return map(np.asarray, jax.jit(jax.vmap(partial(bootstrap_filter, **options)))(keys))


def test_genealogical_se_equals_the_spread_over_runs():
    """With systematic resampling; with multinomial resampling it is not too small."""
    total, se, lw, ancestors = filters(2000)
    ratio = np.exp(np.asarray(total, float) - kalman_log_evidence())
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(2000)
    # The relative standard error of the sd of 2000 runs is 1 / √4000.
    typical = np.sqrt(np.mean(np.square(se)))
    assert typical == pytest.approx(np.std(total), rel=0.1)
    # So few steps need no reference generation but the first.
    eves = jax.jit(jax.vmap(weights.eve_indices))(ancestors)
    np.testing.assert_allclose(se, jax.jit(jax.vmap(weights.genealogical_se))(lw, eves), rtol=0.15)
    # Without the genealogy it is far too small.
    ignoring_genealogy = np.sqrt(np.mean(np.square(jax.jit(jax.vmap(weights.log_evidence_se))(lw))))
    assert ignoring_genealogy < 0.7 * typical
    total, se, *_ = filters(1000, rule=multinomial)
    assert 0.95 < np.sqrt(np.mean(np.square(se))) / np.std(total) < 1.5


@pytest.mark.parametrize("threshold", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_genealogical_se_of_a_long_series_whose_first_ancestors_have_coalesced(threshold):
    total, se, _, ancestors = filters(400, length=200, threshold=threshold)
    eves = jax.jit(jax.vmap(weights.eve_indices))(ancestors)
    assert max(len(np.unique(run)) for run in np.asarray(eves)) <= 4
    # The sd of 400 runs has a relative standard error of 1 / √800, and the estimate of its variance
    # is of first order only.
    assert np.sqrt(np.mean(np.square(se))) == pytest.approx(np.std(total), rel=0.2)
    assert np.std(se) < 0.1 * np.mean(se)


def test_eves_and_surviving_draws_by_hand():
    ancestors = jnp.array([[0, 0, 2, 3], [1, 1, 2, 2], [0, 1, 2, 3]])
    eves = weights.eve_indices(ancestors)
    np.testing.assert_array_equal(eves, [0, 0, 2, 2])
    assert len(np.unique(eves)) == 2
    # Two ancestors, whose descendants have weight 1/2 each: 4/3 (1/2 - 1/4).
    np.testing.assert_allclose(
        weights.genealogical_se(jnp.zeros(4), eves), np.sqrt(1 / 3), rtol=1e-5
    )
    uneven = jnp.log(jnp.array([0.6, 0.3, 0.05, 0.05]))
    expected = np.sqrt(4 / 3 * (0.25 + 0.9**2 + 0.1**2 - 1 / 4))
    np.testing.assert_allclose(weights.genealogical_se(uneven, eves, 0.25), expected, rtol=1e-5)
    assert np.isposinf(weights.genealogical_se(uneven, jnp.zeros(4, int)))
    np.testing.assert_allclose(
        weights.descendant_weights(uneven, eves), [0.9, 0, 0.1, 0], rtol=1e-5
    )
    # Of the first and second generation two draws survive, of the last two all.
    number = surviving_draws(ancestors, uneven)
    squares = [0.9**2 + 0.1**2] * 2 + [0.6**2 + 0.3**2 + 2 * 0.05**2] * 2
    np.testing.assert_allclose(number, 1 / np.array(squares), rtol=1e-5)


def test_trajectories_by_hand():
    draws = {"x": jnp.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]])}
    parents = jnp.array([[0, 1, 2], [0, 0, 2], [1, 2, 2]])
    # The last particles descend from 1, 2, 2, and these from 0, 2, 2.
    expected = np.array([[10, 21, 30], [12, 22, 31], [12, 22, 32]])
    np.testing.assert_array_equal(trace_trajectories(draws, parents, backward=False)["x"], expected)
    reversed_draws = {"x": draws["x"][::-1]}
    np.testing.assert_array_equal(
        trace_trajectories(reversed_draws, parents, backward=True)["x"], expected[:, ::-1]
    )
