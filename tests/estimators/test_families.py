"""Families of closed-form conditionals: densities by quadrature, draws by weighted moments."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions import constraints
from scipy import special, stats

import zoo
from retrodict.estimators.analytic.estimator import AnalyticEstimator
from retrodict.estimators.analytic.family import ConditionalTarget
from retrodict.estimators.analytic.finite import Finite
from retrodict.estimators.analytic.gamma_beta import Beta, BetaParameters, Gamma, GammaParameters
from retrodict.estimators.analytic.normal import Normal
from retrodict.estimators.conditional import Latent

POSITIVE = (Latent("x", constraints.positive, ()),)


def log_probs(estimator, parameters, xs):
    """Log densities of many values."""
    return jax.jit(jax.vmap(lambda x: estimator.log_prob(parameters, x)))(xs)


def samples(estimator, parameters, key, number=20_000):
    """Draws, and their log densities."""
    noise = estimator.noise(key, (number,))
    return jax.jit(jax.vmap(lambda noise: estimator.sample(parameters, noise)))(noise)


def target(log_density):
    """A target without moments."""
    return ConditionalTarget(log_density, lambda x: None)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 1.9, 2.1, 40.0])
def test_approximate_gammas_are_normalised_and_close(shape, inverse):
    estimator = AnalyticEstimator.of(Gamma(inverse), POSITIVE, 1e-3)
    parameters = GammaParameters(jnp.array(shape), jnp.log(jnp.array(3.0)))
    z = np.linspace(-60 / min(shape, 1.0), 8, 60_001) - np.log(3.0)
    z = z[np.abs(z) < 80]
    z = np.sort(-z) if inverse else z
    x = np.exp(z)
    log_q = log_probs(estimator, parameters, {"x": x})
    q = np.exp(np.asarray(log_q, float)) * x  # density of z
    # The tails beyond the grid, of the gamma and of the defensive component, are left out.
    assert abs(np.trapezoid(q, z) - 1) < (0.03 if shape < 0.1 else 3e-3)
    exact = stats.invgamma(shape, scale=3.0) if inverse else stats.gamma(shape, scale=1 / 3.0)
    p = exact.pdf(x) * x
    second_moment = np.trapezoid(np.where(p > 0, p**2 / q, 0.0), z)
    assert 1 / second_moment > 0.99


@pytest.mark.parametrize("shape", [0.3, 1.5, 6.0])
def test_weighted_draws_of_a_gamma_have_its_moments(shape):
    estimator = AnalyticEstimator.of(Gamma(), POSITIVE, 1e-2)
    parameters = GammaParameters(jnp.array(shape), jnp.log(jnp.array(2.0)))
    x, log_q = samples(estimator, parameters, zoo.key(1))
    np.testing.assert_allclose(log_q, log_probs(estimator, parameters, x), atol=1e-4)
    x = np.asarray(x["x"], float)
    w = np.exp(stats.gamma(shape, scale=0.5).logpdf(x) - np.asarray(log_q))
    for fn, expected in ((np.ones_like, 1.0), (lambda x: x, shape / 2)):
        weighted = w * fn(np.minimum(x, 1e6))
        assert abs(weighted.mean() - expected) < 4.5 * weighted.std() / np.sqrt(weighted.size)


SHAPES = [(0.7, 0.8), (0.5, 4.0), (9.0, 0.8), (2.0, 2.0), (4.0, 4.0), (19.0, 5.0), (50.0, 60.0)]
UNIT = (Latent("x", constraints.unit_interval, ()),)


@pytest.mark.parametrize("shapes", SHAPES)
def test_approximate_betas_are_normalised_and_close(shapes):
    estimator = AnalyticEstimator.of(Beta(), UNIT, 1e-3)
    parameters = BetaParameters(*map(jnp.asarray, shapes))
    z = np.linspace(-30 / min(*shapes, 1), 16, 60_001)
    log_q = log_probs(estimator, parameters, {"x": special.expit(z)})
    log_slope = special.log_expit(z) + special.log_expit(-z)
    q, p = np.exp(np.asarray(log_q, float) + log_slope), stats.beta(*shapes)
    # The tails beyond the grid are left out: floats near one are too few to integrate over.
    beyond = p.sf(special.expit(z[-1])) + p.cdf(special.expit(z[0]))
    assert abs(np.trapezoid(q, z) - 1) < 3e-3 + 2 * beyond
    exact = np.exp(p.logpdf(special.expit(z)) + log_slope)
    second_moment = np.trapezoid(exact**2 / q, z)
    assert (1 - beyond) ** 2 / second_moment > 0.98
    x, log_q = samples(estimator, parameters, zoo.key(1))
    np.testing.assert_allclose(log_q, log_probs(estimator, parameters, x), atol=1e-3)
    x = np.asarray(x["x"], float)
    w = np.exp(p.logpdf(x) - np.asarray(log_q, float))
    for weighted, expected in ((w, 1.0), (w * x, p.mean())):
        error = weighted.std() / np.sqrt(weighted.size)
        assert abs(weighted.mean() - expected) < 4.5 * error + 1e-4


def test_parameters_of_a_normal_are_found_from_gradient_and_curvature():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(3, 3))
    precision, mean = root @ root.T + np.eye(3), np.array([300.0, -2.0, 0.1])
    covariance = np.linalg.inv(precision)

    def log_density(x):
        gap = x - mean
        return -0.5 * jnp.einsum("...i,ij,...j->...", gap, jnp.asarray(precision), gap)

    found = Normal().parameters(target(log_density), jnp.zeros((2, 3)))
    np.testing.assert_allclose(found.mean[1], mean, atol=1e-3)
    np.testing.assert_allclose(found.root[0] @ found.root[0].T, covariance, atol=1e-4)
    np.testing.assert_allclose(found.whitening[0] @ found.root[0], np.eye(3), atol=1e-4)
    latents = (Latent("x", constraints.real_vector, (3,)),)
    estimator = AnalyticEstimator.of(Normal(), latents)
    parameters = jax.tree.map(lambda leaf: leaf[0], found)
    x, log_q = estimator.sample(parameters, estimator.noise(zoo.key(0)))
    expected = stats.multivariate_normal(mean, covariance).logpdf(np.asarray(x["x"]))
    np.testing.assert_allclose(log_q, expected, atol=1e-2)


@pytest.mark.parametrize(
    ("family", "exact", "expected"),
    [
        (Gamma(), stats.gamma(2.5, scale=1 / 3.0), (2.5, np.log(3.0))),
        (Gamma(inverse=True), stats.invgamma(2.5, scale=3.0), (2.5, np.log(3.0))),
    ],
    ids=["gamma", "inverse gamma"],
)
def test_parameters_of_a_gamma_are_found_from_gradients(family, exact, expected):
    shape, sign = exact.args[0], -1 if family.inverse else 1

    def log_density(x):
        z = jnp.log(x[..., 0])
        return sign * shape * z - z - 3.0 * jnp.exp(sign * z)

    grid = np.linspace(0.5, 3, 7)
    differences = np.asarray(log_density(jnp.asarray(grid)[:, None])) - exact.logpdf(grid)
    np.testing.assert_allclose(differences, differences[0], atol=1e-4)
    found = family.parameters(target(log_density), jnp.full((2, 1), 0.7))
    np.testing.assert_allclose(np.stack(found), np.stack([expected] * 2, 1), rtol=1e-3)


def test_parameters_of_a_beta_are_found_from_gradients():
    a, b = 2.5, 0.7

    def log_density(x):
        return (a - 1) * jnp.log(x[..., 0]) + (b - 1) * jnp.log1p(-x[..., 0])

    found = Beta().parameters(target(log_density), jnp.full((2, 1), 0.3))
    np.testing.assert_allclose(np.stack(found), [[a, a], [b, b]], rtol=1e-3)


@pytest.mark.parametrize("sizes", [(2,), (3, 2), (2, 2, 4)])
def test_finite_states_have_their_probabilities(sizes):
    latents = tuple(
        Latent(f"x{i}", constraints.integer_interval(1, size), ()) for i, size in enumerate(sizes)
    )
    estimator = AnalyticEstimator.of(Finite(sizes), latents)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=np.prod(sizes))).at[1].set(-jnp.inf)
    x, log_q = samples(estimator, logits, zoo.key(2))
    states = np.array(list(product(*map(range, sizes)))) + 1
    rows = np.stack([np.asarray(x[latent.name]) for latent in latents], -1)
    position = np.array([np.flatnonzero((states == row).all(1))[0] for row in rows])
    probabilities = np.asarray(jax.nn.softmax(logits))
    counts = np.bincount(position, minlength=len(states))
    assert counts[1] == 0
    error = np.sqrt(probabilities * (1 - probabilities) / position.size)
    shares = counts / position.size
    np.testing.assert_array_less(np.abs(shares - probabilities), 4.5 * error + 1e-9)
    np.testing.assert_allclose(np.exp(log_q), probabilities[position], rtol=1e-3)
    np.testing.assert_allclose(log_q, log_probs(estimator, logits, x), atol=1e-3)


def test_parameters_of_a_finite_family_are_the_densities_of_all_states():
    table = np.array([[0.1, 0.3], [0.0, 0.2], [0.25, np.nan]])

    def log_density(x):
        return jnp.log(jnp.asarray(table))[x[..., 0].astype(int), x[..., 1].astype(int)]

    logits = Finite((3, 2)).parameters(target(log_density), jnp.zeros((2, 2)))
    expected = np.nan_to_num(table).ravel()
    np.testing.assert_allclose(np.exp(logits), [expected, expected], rtol=1e-5)
