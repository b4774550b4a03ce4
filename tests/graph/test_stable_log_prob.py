"""Log densities in float32 against the same in float64, where textbook formulas lose all digits."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from retrodict.graph.stable_log_prob import log_prob

SIZES = (1.0, 3.0, 15.0, 40.0, 1e3, 1e5, 1e7, 1e9)
AWAY = (-5.0, -1.0, -0.03, 0.0, 0.4, 2.0, 7.0)


def near(size):
    """Values about so large, by standard deviations of a count."""
    return np.maximum(np.round(size + np.array(AWAY) * np.sqrt(size)), 0.0)


def agree(found, wanted, slope=0.0):
    """To half a thousandth of a nat, and a few roundings of the answer itself.

    `slope` is what a relative change of the parameters does, which float32 rounds as well.
    """
    allowed = 5e-4 + 2e-6 * np.abs(wanted) + 2 * 6e-8 * np.abs(slope)
    assert np.all(np.abs(np.asarray(found, float) - wanted) < allowed)


def floats(*values):
    """As float32 holds them, in float64."""
    return [np.asarray(np.asarray(value, np.float32), float) for value in values]


@pytest.mark.parametrize("size", SIZES)
def test_poisson(size):
    k, rate = floats(near(size), size * 1.0003)
    agree(log_prob(dist.Poisson(jnp.float32(rate)), jnp.float32(k)), stats.poisson.logpmf(k, rate))


def test_what_is_gained():
    """The textbook's formula is off by more than ten nats at a hundred million."""
    k, rate = floats(1.0001e8, 1e8)
    fn, wanted = dist.Poisson(jnp.float32(rate)), stats.poisson.logpmf(k, rate)
    assert abs(float(fn.log_prob(jnp.float32(k))) - wanted) > 10
    agree(log_prob(fn, jnp.float32(k)), wanted)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.999])
def test_binomial(size, p):
    n = np.ceil(min(size / p, 2e9))  # SciPy itself is wrong beyond
    k, n, p = floats(n * p + np.array(AWAY) * np.sqrt(n * p * (1 - p)), n, p)
    k = np.clip(np.round(k), 0, n)
    wanted = stats.binom.logpmf(k, n, p)
    found = log_prob(dist.BinomialProbs(jnp.float32(p), jnp.float32(n)), jnp.float32(k))
    agree(found, wanted, slope=k - n * p)


def test_binomial_of_any_logits():
    logits, k = floats(np.array([-300.0, -40.0, -3.0, 0.1, 25.0, 200.0]), [[0.0], [4.0], [1e4]])
    n = 1e4
    # Γ in float64 is good to 1e-11 here
    ways = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    wanted = ways - k * np.logaddexp(0, -logits) - (n - k) * np.logaddexp(0, logits)
    agree(log_prob(dist.BinomialLogits(jnp.float32(logits), n), jnp.float32(k)), wanted)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [0.02, 1.5, 1e4])
def test_negative_binomial(size, shape):
    k, shape, rate = floats(near(size), shape, shape / size)
    found = log_prob(dist.GammaPoisson(jnp.float32(shape), jnp.float32(rate)), jnp.float32(k))
    agree(found, stats.nbinom.logpmf(k, shape, rate / (1 + rate)))


@pytest.mark.parametrize("size", (0.03, *SIZES))
def test_gamma(size):
    x, shape, rate = floats((size + np.array(AWAY[1:]) * np.sqrt(size)) / 7, size, 7.0)
    x = np.maximum(x, 1e-3)
    wanted = stats.gamma.logpdf(*floats(x), shape, scale=1 / rate)
    agree(log_prob(dist.Gamma(jnp.float32(shape), rate), jnp.float32(x)), wanted)


@pytest.mark.parametrize("size", (0.5, *SIZES[:-1]))
def test_beta(size):
    a, b = floats(size, 2 * size)
    centre = a / (a + b)
    x = centre + np.array(AWAY) * np.sqrt(centre * (1 - centre) / (a + b + 1))
    (x,) = floats(np.clip(x, 1e-3, 0.999))
    found = log_prob(dist.Beta(jnp.float32(a), jnp.float32(b)), jnp.float32(x))
    agree(found, stats.beta.logpdf(x, a, b), slope=(a - 1) - (b - 1) * x / (1 - x))


@pytest.mark.parametrize(
    "fn",
    [
        dist.Poisson(40.0),
        dist.BinomialProbs(0.3, 60),
        dist.BinomialLogits(2.0, 60),
        dist.NegativeBinomial2(20.0, 4.0),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_they_sum_to_one(fn):
    values = jnp.arange(61 if hasattr(fn, "total_count") else 300)
    assert float(jnp.sum(jnp.exp(log_prob(fn, values)))) == pytest.approx(1, abs=1e-5)


def test_edges():
    assert float(log_prob(dist.Poisson(0.0), jnp.array(0))) == 0
    assert float(log_prob(dist.Poisson(0.0), jnp.array(3))) == -np.inf
    assert float(log_prob(dist.Poisson(jnp.inf), jnp.array(3))) == -np.inf
    unknown = dist.Poisson(jnp.nan, validate_args=False)
    assert np.isnan(log_prob(unknown, jnp.array(3)))
    assert float(log_prob(dist.Poisson(1e-30), jnp.array(2))) == pytest.approx(
        stats.poisson.logpmf(2, 1e-30), rel=1e-6
    )
    assert float(log_prob(dist.BinomialProbs(0.2, 0), jnp.array(0))) == 0
    assert float(log_prob(dist.BinomialProbs(0.2, 3), jnp.array(3))) == pytest.approx(
        3 * np.log(0.2), rel=1e-6
    )


def test_derivatives():
    """Of the rate, near and far from the count; none is lost where the count is zero."""
    k, rate = floats([0.0, 0.0, 3.0, 1e6, 1e6, 1e8], [0.0, 2.0, 1e-3, 1.0001e6, 3e6, 1.00001e8])
    found = jax.jit(jax.vmap(jax.grad(lambda r, k: log_prob(dist.Poisson(r), k))))(
        jnp.float32(rate), jnp.float32(k)
    )
    wanted = np.where(k > 0, k / np.where(k > 0, rate, 1), 0) - 1
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=1e-6)
    for fn, value in (
        (lambda p: dist.BinomialProbs(p, 1000), 300),
        (lambda p: dist.BinomialLogits(p, 1000), 0),
        (lambda p: dist.GammaPoisson(p, 0.01), 0),
        (lambda p: dist.Gamma(100 * p, 2.0), 20.0),
        (lambda p: dist.Beta(100 * p, 30.0), 0.4),
    ):
        slope = jax.grad(lambda p, fn=fn, value=value: log_prob(fn(p), value))(0.3)
        with jax.enable_x64(True):
            wanted = jax.grad(
                lambda p, fn=fn, value=value: fn(p).log_prob(jnp.asarray(value, float))
            )(jnp.asarray(0.3, float))
        np.testing.assert_allclose(float(slope), float(wanted), rtol=1e-3)


def test_wrappers_have_the_shapes_of_their_own():
    rate, value = jnp.array([1.0, 20.0, 3e5]), jnp.array([[0, 17, 300_100]] * 4)
    base = dist.Poisson(rate)
    one = log_prob(base, value)
    for fn in (
        base.expand((4, 3)),
        base.to_event(1),
        base.expand((4, 3)).to_event(1),
        base.mask(jnp.array([True, False, True])),
        base.mask(False),
        base.mask(True),
    ):
        assert log_prob(fn, value).shape == fn.log_prob(value).shape
    np.testing.assert_array_equal(log_prob(base.expand((4, 3)).to_event(1), value), one.sum(-1))
    np.testing.assert_array_equal(
        log_prob(base.mask(jnp.array([True, False, True])), value),
        one * jnp.array([1.0, 0.0, 1.0]),
    )


def test_a_density_of_one_s_own_is_asked():
    class Own(dist.Poisson):
        def log_prob(self, value):
            return jnp.asarray(-7.0)

    assert float(log_prob(Own(3.0), jnp.array(2))) == -7
