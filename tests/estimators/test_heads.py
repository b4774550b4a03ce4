"""Each head against enumeration, quadrature and its own draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from retrodict.estimators.heads import (
    SMALLEST_LOG_SCALE,
    Bernoulli,
    Bits,
    Categorical,
    Count,
    Head,
    Mixture,
    compress,
    patterns,
)
from retrodict.estimators.scalar_bijections import (
    ABOVE,
    BELOW,
    BETWEEN,
    IDENTITY,
    SOFTPLUS,
    Coordinate,
    constrain,
)

LARGEST = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)


def coordinate(
    curve=IDENTITY,
    lower=0.0,
    upper=1.0,
    least=-LARGEST,
    most=LARGEST,
    centre=0.0,
    scale=1.0,
    shift=0.0,
    stretch=1.0,
):
    bounds = (jnp.asarray(v, float) for v in (lower, upper, least, most))
    places = (jnp.asarray(v, float) for v in (centre, scale, shift, stretch))
    return Coordinate(jnp.asarray(curve), *bounds, jnp.asarray(False), *places)


CURVES = {
    "real": coordinate(centre=3.0, scale=2.0),
    "anchored": coordinate(centre=3.0, scale=2.0, shift=0.7, stretch=0.2),
    "positive": coordinate(ABOVE, least=TINY, centre=0.5, scale=0.5),
    "above": coordinate(ABOVE, lower=2.0, least=np.nextafter(np.float32(2), np.float32(3))),
    "below": coordinate(BELOW, upper=-1.0, most=np.nextafter(np.float32(-1), np.float32(-2))),
    "interval": coordinate(BETWEEN, lower=-2.0, upper=5.0, least=-1.9999998, most=4.9999995),
    "softplus": coordinate(SOFTPLUS, least=TINY, centre=1.0),
}


def over(function):
    """Compiled, over a leading axis."""
    return jax.jit(jax.vmap(function))


def random_params(head: Head, seed: int = 0):
    noise = jax.random.normal(jax.random.key(seed), (head.size,))
    return jnp.asarray(head.bias(), float) + 0.5 * noise


def uniforms(number: int, seed: int = 1):
    return jax.random.uniform(jax.random.key(seed), (number, 2), minval=2**-24)


def mass_on_grid(head: Mixture, params, c: Coordinate):
    """Grid over the support and the density's integral up to each point, by the trapezoid rule."""
    # points dense in the middle, and so far out that the Cauchy leaves less than 1e-4 beyond
    z = np.sinh(np.linspace(-6.5, 6.5, 40_001))
    if head.curves != (IDENTITY,):
        z = z[abs(z) < 12]
    x = np.asarray(constrain(jnp.asarray(c.centre + c.scale * z, jnp.float32), c, head.curves))
    x = np.unique(x)
    density = np.exp(over(lambda v: head.log_prob(params, v, c))(jnp.asarray(x)))
    steps = np.diff(x.astype(np.float64)) * (density[1:] + density[:-1]) / 2
    return x, np.concatenate([[0.0], np.cumsum(steps)])


@pytest.mark.parametrize("name", CURVES)
def test_mixture_integrates_to_one_and_draws_follow_it(name):
    c = CURVES[name]
    head = Mixture(components=3, wide=0.01, curves=(int(c.bijection),))
    params = random_params(head)
    x, mass = mass_on_grid(head, params, c)
    # beyond twelve scales the Cauchy keeps 0.01 · 2 / (12 π)
    assert mass[-1] == pytest.approx(1.0, abs=1e-3)

    draws = over(lambda u: head.draw(params, head.chance(u), c))(uniforms(5000))
    result = stats.kstest(np.asarray(draws), lambda v: np.interp(v, x, mass))
    assert result.pvalue > 0.001


def test_curves_are_told_apart_within_one_run():
    mixed = Mixture(components=3, wide=0.01, curves=(IDENTITY, ABOVE, BELOW, BETWEEN, SOFTPLUS))
    params = random_params(mixed)
    for c in CURVES.values():
        alone = Mixture(components=3, wide=0.01, curves=(int(c.bijection),))
        u = uniforms(20)
        draws = over(lambda n, c=c: mixed.draw(params, mixed.chance(n), c))(u)
        np.testing.assert_array_equal(
            draws, over(lambda n, c=c, a=alone: a.draw(params, a.chance(n), c))(u)
        )
        log_q = over(lambda v, c=c: mixed.log_prob(params, v, c))(draws)
        expected = over(lambda v, c=c, a=alone: a.log_prob(params, v, c))(draws)
        np.testing.assert_allclose(log_q, expected, rtol=1e-6)


@pytest.mark.parametrize("curves", [(BETWEEN,), (IDENTITY, ABOVE, BELOW, BETWEEN, SOFTPLUS)])
def test_gradients_are_finite_at_the_edges(curves):
    head = Mixture(components=3, wide=0.01, curves=curves)
    params = random_params(head)
    for x in (-2.0, 5.0, 0.0):
        gradient = jax.grad(lambda p, x=x: head.log_prob(p, jnp.asarray(x), CURVES["interval"]))
        assert np.isfinite(gradient(params)).all()
    slope = jax.grad(lambda x: head.log_prob(params, x, CURVES["interval"]))(0.5)
    assert np.isfinite(slope)


def test_wide_component_stays_whatever_the_parameters():
    """Sixty prior scales away, the density is the Cauchy's share and no less."""
    head = Mixture(components=2, wide=0.01, curves=(IDENTITY,))
    params = jnp.array([50.0, -50.0, 0.0, 0.0, -100.0, -100.0])
    log_q = head.log_prob(params, jnp.asarray(60.0), coordinate())
    assert log_q == pytest.approx(np.log(0.01) + stats.cauchy.logpdf(60.0), abs=1e-4)


@pytest.mark.parametrize("span", [2, 5])
def test_patterns_of_bits_sum_to_one_above_their_floor_and_draws_follow_them(span):
    head, c = Bits(span, floor=0.01), coordinate()
    for params in (random_params(head), 100 * random_params(head)):
        rows = jnp.asarray(patterns(span))
        each = np.exp([head.log_prob(params, row, c) for row in rows])
        assert each.sum() == pytest.approx(1, abs=1e-5)
        assert each.min() >= 0.01 / 2**span * (1 - 1e-4)
        drawn = over(lambda u, params=params: head.draw(params, head.chance(u), c))(
            uniforms(20_000)
        )
        seen = np.array([(np.asarray(drawn) == row).all(1).mean() for row in patterns(span)])
        assert np.all(np.abs(seen - each) < 4.5 * np.sqrt(each * (1 - each) / 20_000) + 1e-4)


def test_heads_take_many_rows_behind_the_first_axis():
    c = coordinate()
    for head in (
        *(Mixture(3, 0.01, (IDENTITY,)), Bernoulli(0.01), Bits(3, 0.01)),
        *(Categorical(4, 0.01), Count(3, 0.01)),
    ):
        params = jnp.stack([random_params(head), 0.5 * random_params(head)], -1)
        wide = c._replace(upper=jnp.asarray(3.0))
        noise = uniforms(2).T
        value = head.draw(params, head.chance(noise), wide)
        log_q = head.log_prob(params, value, wide)
        for row in range(2):
            one = head.draw(params[:, row], head.chance(noise[:, row]), wide)
            np.testing.assert_allclose(value[..., row], one, rtol=1e-5)
            np.testing.assert_allclose(
                log_q[row], head.log_prob(params[:, row], one, wide), rtol=1e-4, atol=1e-5
            )
            np.testing.assert_allclose(
                head.feature(value, wide)[..., row], head.feature(one, wide), rtol=1e-5
            )


def test_bernoulli_sums_to_one_above_its_floor():
    head = Bernoulli(floor=0.001)
    c = coordinate()
    for logit in (-200.0, -1.0, 0.3, 200.0):
        log_q = [head.log_prob(jnp.array([logit]), jnp.asarray(v), c) for v in (0.0, 1.0)]
        assert np.exp(log_q).sum() == pytest.approx(1, abs=1e-6)
        assert np.exp(min(log_q)) >= 0.0005 * (1 - 1e-4)
    draws = over(lambda u: head.draw(jnp.array([0.3]), head.chance(u), c))(uniforms(10_000))
    p = float(np.exp(head.log_prob(jnp.array([0.3]), jnp.asarray(1.0), c)))
    assert stats.binomtest(int(draws.sum()), 10_000, p).pvalue > 0.001


@pytest.mark.parametrize("upper", [1, 3, 6])
def test_categorical_sums_to_one_over_the_values_there_are(upper):
    head = Categorical(size=7, floor=0.001)
    params, c = 3 * random_params(head), coordinate(upper=upper)
    values = jnp.arange(7.0)
    probabilities = np.exp(over(lambda v: head.log_prob(params, v, c))(values))
    assert probabilities.sum() == pytest.approx(1, abs=1e-6)
    assert (probabilities[upper + 1 :] == 0).all()
    assert probabilities[: upper + 1].min() >= 0.001 / (upper + 1) * (1 - 1e-4)
    draws = np.asarray(over(lambda u: head.draw(params, head.chance(u), c))(uniforms(10_000)))
    observed = np.bincount(draws.astype(int), minlength=7)[: upper + 1]
    expected = probabilities[: upper + 1] * 10_000 / probabilities.sum()
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 0.001


@pytest.mark.parametrize("upper", [0.0, 1.0, 30.0, np.inf])
def test_count_sums_to_one(upper):
    head = Count(components=3, wide=0.01)
    c = coordinate(upper=upper, least=0.0, most=min(upper, 2.0**31 - 128), centre=1.0, scale=0.5)
    params = random_params(head)
    last = int(upper) if np.isfinite(upper) else 200_000
    values = jnp.arange(last + 1.0)
    probabilities = np.exp(over(lambda v: head.log_prob(params, v, c))(values))
    # a logistic of scale ½ on the logarithm has tail mass about n^-2; float sums add 1e-5
    assert probabilities.astype(np.float64).sum() == pytest.approx(1, abs=3e-5)

    draws = np.asarray(over(lambda u: head.draw(params, head.chance(u), c))(uniforms(10_000)))
    assert draws.min() >= 0 and draws.max() <= upper
    cells = min(last, 12)
    observed = np.bincount(np.minimum(draws, cells).astype(int), minlength=cells + 1)
    expected = np.append(probabilities[:cells], 1 - probabilities[:cells].sum()) * 10_000
    assert cells == 0 or stats.chisquare(observed, expected, sum_check=False).pvalue > 0.001


def test_count_is_exact_far_out():
    """At a million with a standard deviation of a thousand: cells are far below float spacing."""
    head = Count(components=1, wide=1e-6)
    centre = np.log(1e6)
    c = coordinate(upper=np.inf, least=0.0, most=2.0**31 - 128, centre=centre, scale=1.0)
    above_least = np.log(1e-3) - SMALLEST_LOG_SCALE
    params = jnp.array([0.0, 0.0, SMALLEST_LOG_SCALE + np.log(np.expm1(above_least))])
    values = jnp.arange(999_000.0, 1_001_000.0)
    log_q = np.asarray(over(lambda v: head.log_prob(params, v, c))(values))
    edges = np.log(np.arange(999_000, 1_001_001) - 0.5)
    exact = np.log(np.diff(stats.logistic.cdf(edges, centre, 1e-3)))
    np.testing.assert_allclose(log_q, exact, atol=3e-3)
    draws = over(lambda u: head.draw(params, head.chance(u), c))(uniforms(5000))
    assert stats.kstest(np.log(draws), stats.logistic(centre, 1e-3).cdf).pvalue > 0.001
    for extreme in (0.0, 2e9):
        assert np.isfinite(head.log_prob(params, jnp.asarray(extreme), c))


def test_compress_keeps_order_and_small_values():
    u = jnp.array([-LARGEST, -1e3, -5.0, -1.0, 0.0, 4.9, 5.1, 1e10, LARGEST])
    squashed = np.asarray(compress(u))
    assert (np.diff(squashed) > 0).all()
    np.testing.assert_array_equal(squashed[2:6], u[2:6])
    assert abs(squashed).max() < 500
