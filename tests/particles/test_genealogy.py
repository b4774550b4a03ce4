"""What ancestry tells of errors, against the spread over many runs, and by hand."""

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
    """log Ẑ, its standard error, last log weights, ancestors.

    A state x_t = 0.9 x_{t-1} + N(0, 1), seen with noise; the series is repeated to its length.
    """
    series = jnp.asarray(np.resize(SERIES, length))

    def step(carry, inputs):
        x, lw, total, lineage = carry
        key, y = inputs
        key_choose, key_move = jax.random.split(key)
        needed = weights.ess(lw) < threshold * NUM
        everyone = jnp.arange(NUM, dtype=jnp.int32)
        ancestors = jnp.where(needed, rule(key_choose, lw, NUM), everyone)
        chosen = lineage.resample(lw, weights.ess(lw), ancestors)
        lineage = jax.tree.map(partial(jnp.where, needed), chosen, lineage)
        x = 0.9 * x[ancestors] + jax.random.normal(key_move, (NUM,))
        lw = jnp.where(needed, -np.log(NUM), lw) + jax.scipy.stats.norm.logpdf(y, x, SIGMA)
        lw, log_mean = weights.normalise(lw)
        return (x, lw, total + log_mean + np.log(NUM), lineage), ancestors

    key_first, *keys = jax.random.split(rng_key, length)
    x = jax.random.normal(key_first, (NUM,))
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


def test_lineage_error_is_the_spread_over_runs():
    """With the default rule; no smaller with one that leaves more to chance."""
    total, se, lw, ancestors = filters(2000)
    ratio = np.exp(np.asarray(total, float) - kalman_log_evidence())
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(2000)
    # the sd of 2000 runs is known to 1 part in √4000
    typical = np.sqrt(np.mean(np.square(se)))
    assert typical == pytest.approx(np.std(total), rel=0.1)
    # so few steps are all seen from the start
    eves = jax.jit(jax.vmap(weights.eve_indices))(ancestors)
    np.testing.assert_allclose(se, jax.jit(jax.vmap(weights.genealogical_se))(lw, eves), rtol=0.15)
    # without ancestry it is far too small
    alone = np.sqrt(np.mean(np.square(jax.jit(jax.vmap(weights.log_evidence_se))(lw))))
    assert alone < 0.7 * typical
    total, se, *_ = filters(1000, rule=multinomial)
    assert 0.95 < np.sqrt(np.mean(np.square(se))) / np.std(total) < 1.5


@pytest.mark.parametrize("threshold", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_lineage_error_of_a_long_series_outlives_its_first_ancestors(threshold):
    total, se, _, ancestors = filters(400, length=200, threshold=threshold)
    eves = jax.jit(jax.vmap(weights.eve_indices))(ancestors)
    assert np.all(np.asarray(jax.jit(jax.vmap(weights.num_families))(eves)) <= 4)
    # the sd of 400 runs is known to 1 part in √800, and log Ẑ is off by more than its first order
    assert np.sqrt(np.mean(np.square(se))) == pytest.approx(np.std(total), rel=0.2)
    assert np.std(se) < 0.1 * np.mean(se)


def test_lineages_by_hand():
    ancestors = jnp.array([[0, 0, 2, 3], [1, 1, 2, 2], [0, 1, 2, 3]])
    eves = weights.eve_indices(ancestors)
    np.testing.assert_array_equal(eves, [0, 0, 2, 2])
    assert weights.num_families(eves) == 2
    # families of weight 1/2 each: 4/3 (1/2 - 1/4)
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
    # of the first draws two families are left, of the second too, of the last all
    left = surviving_draws(ancestors, uneven)
    squares = [0.9**2 + 0.1**2] * 2 + [0.6**2 + 0.3**2 + 2 * 0.05**2] * 2
    np.testing.assert_allclose(left, 1 / np.array(squares), rtol=1e-5)


def test_trajectories_by_hand():
    drawn = {"x": jnp.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]])}
    parents = jnp.array([[0, 1, 2], [0, 0, 2], [1, 2, 2]])
    # the last particles descend from 1, 2, 2, and those from 0, 2, 2
    expected = np.array([[10, 21, 30], [12, 22, 31], [12, 22, 32]])
    np.testing.assert_array_equal(trace_trajectories(drawn, parents, backward=False)["x"], expected)
    turned = {"x": drawn["x"][::-1]}
    np.testing.assert_array_equal(
        trace_trajectories(turned, parents, backward=True)["x"], expected[:, ::-1]
    )
