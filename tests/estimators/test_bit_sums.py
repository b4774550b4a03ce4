"""The conditional of bits given their noisy sum is compared with enumeration of all states."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

import zoo
from retrodict.estimators.analytic import bit_sums, frequency_grid
from retrodict.estimators.analytic.bit_sums import (
    BLOCK_BITS,
    BitSumParameters,
    BitSums,
    make_blocks,
    one_hot_pattern,
    pattern_weights,
)
from retrodict.estimators.analytic.estimator import AnalyticEstimator
from retrodict.estimators.analytic.family import ConditionalMoments, ConditionalTarget
from retrodict.estimators.analytic.frequency_grid import FrequencyGrid, fit_grid
from retrodict.estimators.bit_patterns import block_sizes
from retrodict.estimators.conditional import Latent

NUMBER, NOISE = 12, 0.8
LATENTS = (Latent("x", constraints.boolean, (NUMBER,)),)


def random_sum(seed=0, number=NUMBER):
    """Effects and probabilities of bits, and an observation, which is unusual for odd seeds."""
    rng = np.random.default_rng(seed)
    effects = rng.normal(size=number) * rng.choice([1, 4], number)
    probabilities = rng.uniform(0.02, 0.98, number)
    bits = rng.random(number) < (probabilities if seed % 2 == 0 else 0.5)
    return effects, probabilities, float(bits @ effects + NOISE * rng.normal())


def make_family(effects, probabilities, order=None):
    """The family with a grid for these probabilities, bits in some sampling order."""
    order = np.arange(effects.size) if order is None else order
    effects, probabilities = effects[order], probabilities[order]
    sizes = block_sizes(effects.size, BLOCK_BITS)
    starts = [int(end) - size for end, size in zip(np.cumsum(sizes), sizes, strict=True)]
    variance = probabilities * (1 - probabilities) * effects**2
    spreads = [np.sqrt(variance[start:].sum()) for start in starts[:-1]]
    grid = fit_grid(list(effects), starts, spreads, NOISE)
    return BitSums(tuple(map(int, order)), tuple(map(float, effects)), grid)


def make_parameters(family, probabilities, y):
    residual = y - 0.5 * sum(family.effects)
    arrays = (probabilities[np.array(family.order)], residual, NOISE**2)
    return BitSumParameters(*(jnp.asarray(a, float) for a in arrays))


def all_states(number):
    return np.array(list(product((0.0, 1.0), repeat=number)))


def exact_log_posterior(effects, probabilities, y):
    states = all_states(len(effects))
    log_p = states @ np.log(probabilities) + (1 - states) @ np.log(1 - probabilities)
    log_p = log_p - 0.5 * ((y - states @ effects) / NOISE) ** 2
    return log_p - float(logsumexp(log_p))


def log_q_of_all(effects, probabilities, y):
    """The family's log density of every state."""
    family = make_family(effects, probabilities)
    parameters = make_parameters(family, probabilities, y)
    estimator = AnalyticEstimator.of(family, LATENTS)
    states = jnp.asarray(all_states(NUMBER))
    return np.asarray(jax.jit(jax.vmap(lambda x: estimator.log_prob(parameters, {"x": x})))(states))


@pytest.mark.parametrize("seed", range(4))
def test_weights_of_patterns_are_their_posterior_given_the_bits_before(seed):
    effects, probabilities, y = random_sum(seed)
    family = make_family(effects, probabilities)
    parameters = make_parameters(family, probabilities, y)
    exact = np.exp(exact_log_posterior(effects, probabilities, y)).reshape((2,) * NUMBER)
    sizes = family.blocks
    row = np.random.default_rng(seed).integers(0, 2, NUMBER)
    likeliest = exact.reshape(2 ** sizes[0], -1).sum(1).argmax()
    row[: sizes[0]] = np.unravel_index(likeliest, (2,) * sizes[0])
    remaining, before = parameters.residual, ()
    for block in make_blocks(family.grid, family.effects, sizes, parameters):
        weights = np.asarray(pattern_weights(family.grid, block, remaining, parameters.noise))
        expected = exact[before].reshape(2**block.size, -1).sum(1)
        # Single precision does not resolve what the bits before all but rule out.
        if expected.sum() > 1e-4:
            np.testing.assert_allclose(
                weights / weights.sum(), expected / expected.sum(), atol=0.01
            )
        bits = row[len(before) : len(before) + block.size]
        chosen, remaining = block.subtract(remaining, one_hot_pattern(jnp.asarray(bits, float)))
        np.testing.assert_array_equal(chosen, bits)
        before += tuple(bits)
    np.testing.assert_allclose(remaining, y - row @ effects, atol=1e-4)


def test_density_sums_to_one_and_is_the_posterior():
    effects, probabilities, y = random_sum(2)
    log_q = log_q_of_all(effects, probabilities, y)
    np.testing.assert_allclose(np.exp(log_q).sum(), 1, rtol=1e-4)
    log_p = exact_log_posterior(effects, probabilities, y)
    divergence = np.sum(np.exp(log_p) * (log_p - log_q))
    assert 0 < divergence < 0.01


@pytest.mark.parametrize("seed", [3, 5, 15])
def test_aliases_of_unusual_observations_are_not_mistaken_for_them(seed):
    # Four of the bits differ from their likely values: the sum is far from its mean, and an alias
    # one period away is close to the mean.
    rng = np.random.default_rng(seed)
    effects, before = np.linspace(24, 4, NUMBER), rng.integers(0, 2, NUMBER)
    probabilities = np.where(before == 1, 0.95, 0.05)
    after = before.copy()
    after[rng.choice(NUMBER, 4, replace=False)] ^= 1
    y = float(after @ effects + NOISE * rng.normal())
    log_q = log_q_of_all(effects, probabilities, y)
    log_p = exact_log_posterior(effects, probabilities, y)
    # The mean weight of draws from p: one if q = p, thousands if aliases are mistaken.
    assert np.sum(np.exp(2 * log_p - log_q)) < 30


def test_draws_have_the_density_reported_and_the_posterior_frequencies():
    effects, probabilities, y = random_sum(4)
    family = make_family(effects, probabilities, np.argsort(-np.abs(effects)))
    estimator = AnalyticEstimator.of(family, LATENTS)
    parameters = make_parameters(family, probabilities, y)
    # Every draw has its own observation, as particles have.
    shifts = jnp.linspace(-1.0, 1.0, 300)

    def shifted(shift):
        return parameters._replace(residual=parameters.residual + shift)

    def sample(noise, shift):
        return estimator.sample(shifted(shift), noise)

    x, log_q = jax.jit(jax.vmap(sample))(estimator.noise(zoo.key(1), (300,)), shifts)
    expected = jax.jit(jax.vmap(lambda x, s: estimator.log_prob(shifted(s), x)))(x, shifts)
    np.testing.assert_allclose(log_q, expected, atol=2e-3)
    number = 4000
    noise = estimator.noise(zoo.key(2), (number,))
    x, _ = jax.jit(jax.vmap(lambda noise: estimator.sample(parameters, noise)))(noise)
    posterior = np.exp(exact_log_posterior(effects, probabilities, y)) @ all_states(NUMBER)
    error = np.sqrt(posterior * (1 - posterior) / number)
    np.testing.assert_array_less(np.abs(np.mean(x["x"], 0) - posterior), 4.5 * error + 0.01)


@pytest.mark.parametrize(
    "y", [-1e15, *(pytest.param(y, marks=pytest.mark.slow) for y in (300.0, 1e15))]
)
def test_bits_are_drawn_with_finite_density_for_any_observation(y):
    effects, probabilities, _ = random_sum(4)
    family = make_family(effects, probabilities)
    estimator = AnalyticEstimator.of(family, LATENTS)
    parameters = make_parameters(family, probabilities, y)
    noise = estimator.noise(zoo.key(0), (50,))
    x, log_q = jax.jit(jax.vmap(lambda noise: estimator.sample(parameters, noise)))(noise)
    assert np.isfinite(log_q).all() and set(np.unique(x["x"])) <= {0, 1}


@pytest.mark.parametrize("observed", [2.5, np.nan, np.inf])
def test_parameters_are_the_models_moments_in_sampling_order(observed):
    effects, probabilities, _ = random_sum(1, 5)
    order = np.argsort(-np.abs(effects))
    family = make_family(effects, probabilities, order)

    def moments(x):
        return ConditionalMoments(
            jnp.broadcast_to(jnp.asarray(probabilities), x.shape),
            jnp.broadcast_to(jnp.asarray(probabilities * (1 - probabilities)), x.shape),
            0.3 + x @ jnp.asarray(effects)[:, None],
            jnp.full((*x.shape[:-1], 1), NOISE**2),
            jnp.zeros((*x.shape[:-1], 1)),
            jnp.full((*x.shape[:-1], 1), observed),
        )

    parameters = family.parameters(
        ConditionalTarget(lambda x: jnp.zeros(x.shape[:-1]), moments), jnp.ones((2, 5))
    )
    np.testing.assert_allclose(parameters.probabilities, [probabilities[order]] * 2, rtol=1e-5)
    np.testing.assert_allclose(parameters.noise, [NOISE**2] * 2, rtol=1e-5)
    assert np.isfinite(parameters.residual).all()
    if np.isfinite(observed):
        expected = observed - (0.3 + 0.5 * effects.sum())
        np.testing.assert_allclose(parameters.residual, [expected] * 2, rtol=1e-5)


def test_batches_of_rows_equal_single_rows():
    effects, probabilities, y = random_sum(6)
    family = make_family(effects, probabilities)
    sizes = family.blocks
    bits = jnp.asarray(np.random.default_rng(0).integers(0, 2, (NUMBER, 3)), float)
    rows = [
        make_parameters(family, probabilities * (1 - n / 8), y + shift)
        for n, shift in enumerate((0.0, 0.7, -1.3))
    ]

    def all_weights(parameters, bits):
        remaining, weights, start = parameters.residual, [], 0
        for block in make_blocks(family.grid, family.effects, sizes, parameters):
            weights.append(pattern_weights(family.grid, block, remaining, parameters.noise))
            pattern = one_hot_pattern(bits[start : start + block.size])
            _, remaining = block.subtract(remaining, pattern)
            start += block.size
        return [w / w.sum(0) for w in weights]

    single = [all_weights(parameters, bits[:, n]) for n, parameters in enumerate(rows)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves, -1), *rows)
    for step, weights in enumerate(all_weights(together, bits)):
        for n in range(3):
            np.testing.assert_allclose(weights[:, n], single[n][step], atol=5e-3)


def test_frequencies_that_suffice_for_later_blocks_come_first():
    grid = FrequencyGrid(0.1, (16, 8, 2), 0.0)
    assert sorted(grid.multiples) == list(range(16))
    assert sorted(grid.multiples[:8]) == list(range(0, 16, 2))
    assert sorted(grid.multiples[:2]) == [0, 8]
    grid = FrequencyGrid(0.1, (48, 24, 3), 0.0)
    assert sorted(grid.multiples) == list(range(48))
    assert sorted(grid.multiples[:24]) == list(range(0, 48, 2))
    assert sorted(grid.multiples[:3]) == [0, 16, 32]


@pytest.mark.parametrize("number", [1, 2, 4, 16, 64])
def test_phases_are_complex_exponentials(number):
    angle = np.linspace(-20, 20, 7)
    grid = FrequencyGrid(1.0, (number,), 0.0)
    expected = np.exp(1j * grid.multiples[:, None] * angle)
    for first in {number, -(-number // 2), 1}:
        phase = grid.phase(jnp.asarray(angle), first)
        np.testing.assert_allclose(
            phase.real + 1j * np.asarray(phase.imaginary), expected[:first], atol=1e-4
        )


@pytest.mark.parametrize(("rows", "parts"), [(32, 1), (40, 2), (80, 4), (300, 1)])
def test_products_in_parts_equal_whole_products(rows, parts):
    rng = np.random.default_rng(rows)
    waves, weights = rng.normal(size=(3, 64, 8)), rng.normal(size=(3, 8, rows))
    waves, weights = waves.astype(np.float32), weights.astype(np.float32)
    jaxpr = jax.make_jaxpr(partial(bit_sums._split_product, waves))(weights)
    (matmul,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
    assert matmul.outvars[0].aval.shape[:-2] == (3, parts)
    np.testing.assert_allclose(bit_sums._split_product(waves, weights), waves @ weights, atol=1e-4)


def test_grid_blurs_noise_that_it_does_not_resolve():
    effects = list(np.linspace(10, 1000, 40))
    starts, spreads = (0, 5, 10), [3000.0, 2900.0]
    fine = fit_grid(effects, starts, spreads, 0.1)
    assert max(fine.numbers) == frequency_grid.MAX_FREQUENCIES and fine.blur > 0.1**2
    coarse = fit_grid(effects, starts, spreads, 500.0)
    assert coarse.blur == 0 and max(coarse.numbers) < frequency_grid.MAX_FREQUENCIES
