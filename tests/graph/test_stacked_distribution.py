"""Copies as one distribution are what they are one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from retrodict.graph.moments import moments
from retrodict.graph.stable_log_prob import log_prob
from retrodict.graph.stacked_distribution import Stacked
from zoo import key

COPIES = {
    "numbers": [dist.Normal(float(n), 1.0 + n) for n in range(3)],
    "uneven parameters": [dist.Normal(float(n), jnp.ones(2)) for n in range(3)],
    "vectors": [dist.Dirichlet(jnp.arange(1.0, 4.0) + n) for n in range(3)],
    "events": [dist.Normal(jnp.full(2, n), 1.0).to_event(1) for n in range(3)],
    "expanded": [dist.Gamma(1.0 + n, 2.0).expand([2]) for n in range(3)],
    "masked": [dist.Poisson(1.0 + n).expand([2]).mask(jnp.array([n > 0, True])) for n in range(3)],
    "bounds": [dist.Uniform(-1.0 * n, jnp.array([1.0, 2.0])) for n in range(3)],
    "mixtures": [
        dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), dist.Normal(jnp.arange(2.0), n))
        for n in range(1, 4)
    ],
}
copies = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)


def stacked(copies):
    tree = jax.tree.structure(copies[0])
    columns = list(zip(*map(jax.tree.leaves, copies), strict=True))
    apart = tuple(not all(np.array_equal(leaf, c[0]) for leaf in c) for c in columns)
    leaves = tuple(jnp.stack(c) if a else c[0] for c, a in zip(columns, apart, strict=True))
    return Stacked(leaves, apart, tree, len(copies))


@copies
def test_shapes_and_densities(copies):
    fn = stacked(copies)
    assert fn.batch_shape == (3, *copies[0].batch_shape)
    assert fn.event_shape == copies[0].event_shape
    value = fn.sample(key(), ())
    assert value.shape == (3, *copies[0].shape())
    for density in (fn.log_prob(value), log_prob(fn, value)):
        expected = [one.log_prob(v) for one, v in zip(copies, value, strict=True)]
        np.testing.assert_allclose(density, np.stack(expected), rtol=1e-4, atol=1e-5)


@copies
def test_moments(copies):
    found, expected = moments(stacked(copies)), [moments(one) for one in copies]
    np.testing.assert_allclose(found.mean, np.stack([m.mean for m in expected]), rtol=1e-5)
    variances = np.stack([m.variance for m in expected])
    np.testing.assert_allclose(found.variance, variances, rtol=1e-4)


@copies
def test_values_lie_in_the_support_where_they_do_for_each_copy(copies):
    fn = stacked(copies)
    value = fn.sample(key(1), ()) * jnp.array([1.0, 3.0])[jnp.arange(3) % 2].reshape(
        3, *(1 for _ in copies[0].shape())
    )
    expected = [one.support(v) for one, v in zip(copies, value, strict=True)]
    np.testing.assert_array_equal(fn.support(value), np.stack(expected))


def test_copies_are_drawn_independently():
    fn = stacked([dist.Normal(0.0, 1.0 + n) for n in range(2)])
    draws = np.asarray(fn.sample(key(2), (20_000,)))
    assert draws.shape == (20_000, 2)
    np.testing.assert_allclose(draws.std(0), [1.0, 2.0], rtol=0.03)
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.03
