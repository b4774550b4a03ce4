"""The estimator against enumeration, quadrature, its Jacobian, the naive sampler and conjugacy."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions import constraints
from scipy import stats

from retrodict.estimators import made
from retrodict.estimators.conditional import MADE, GuideSpec, Latent, Set, Value, trainable
from retrodict.estimators.coordinates import flatten, unflatten

REAL = constraints.real
BITS = constraints.independent(constraints.boolean, 1)
MIXED = (
    Latent("rate", constraints.positive, (2,)),
    Latent("on", BITS, (2,)),
    Latent("level", constraints.real, ()),
    Latent("kind", constraints.integer_interval(0, 2), ()),
    Latent("count", constraints.nonnegative_integer, (2,)),
    Latent("split", constraints.multinomial(4), (3,)),
    Latent("weights", constraints.simplex, (3,)),
)
Y = (Value("y", constraints.real_vector, (3,)),)


def build(latents, inputs=Y, seed=0, noisy=True, **options):
    """An untrained network; `noisy` weights make all of its outputs depend on its inputs."""
    net = MADE(**({"hidden": (24, 24), "components": 3} | options)).build(
        jax.random.key(seed), latents, inputs
    )
    if not noisy:
        return net
    weights, rest = eqx.partition(net, trainable(net))
    rng = np.random.default_rng(seed + 1)
    weights = jax.tree.map(
        lambda a: jnp.asarray(np.asarray(a) + 0.05 * rng.standard_normal(a.shape), float), weights
    )
    return eqx.combine(weights, rest)


def context(seed=0):
    return {"y": jnp.asarray(np.random.default_rng(seed).standard_normal(3), float)}


@pytest.mark.parametrize("number", [1, 4])
def test_binary_and_categorical_sum_to_one(number):
    latents = (Latent("b", BITS, (number,)), Latent("k", constraints.integer_interval(-1, 1), ()))
    net = build(latents)
    states = np.array(list(itertools.product(*[[0, 1]] * number, [-1, 0, 1])))
    log_q = over(net.log_prob, None, 0)(context(), {"b": states[:, :-1], "k": states[:, -1]})
    assert np.exp(log_q).sum() == pytest.approx(1, abs=1e-5)

    draws, _ = over(net.sample_and_log_prob, 0, None)(keys(8000), context())
    place = (np.concatenate([draws["b"], draws["k"][:, None] + 1], -1)) @ (
        [*(3 * 2 ** np.arange(number - 1, -1, -1)), 1]
    )
    observed = np.bincount(place, minlength=len(states))
    assert_same_frequencies(observed, 8000 * np.exp(log_q))


def assert_same_frequencies(observed, expected):
    """Pearson's chi-square, with cells too small for it thrown together."""
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum() + 1e-9)
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 0.001


def test_multinomial_sums_to_one_over_its_compositions():
    net = build((Latent("n", constraints.multinomial(5), (3,)),))
    states = np.array([s for s in itertools.product(range(6), repeat=3) if sum(s) == 5])
    log_q = over(net.log_prob, None, 0)(context(), {"n": states})
    assert np.exp(log_q).sum() == pytest.approx(1, abs=1e-5)
    draws, _ = over(net.sample_and_log_prob, 0, None)(keys(8000), context())
    observed = np.array([(np.asarray(draws["n"]) == s).all(-1).sum() for s in states])
    assert observed.sum() == 8000
    assert_same_frequencies(observed, 8000 * np.exp(log_q))


def test_mixed_factor_integrates_to_one():
    """A proportion, a bit that depends on it, a positive that depends on both."""
    latents = (
        Latent("p", constraints.unit_interval, ()),
        Latent("b", constraints.boolean, ()),
        Latent("s", constraints.positive, ()),
    )
    net = build(latents, noisy=False, wide=1e-6)
    z = np.linspace(-11, 11, 301)
    p, s = 1 / (1 + np.exp(-z)), np.exp(z)
    grid_p, grid_s = np.meshgrid(p, s, indexing="ij")
    total = 0.0
    for bit in (0, 1):
        log_q = over(net.log_prob, None, 0)(
            context(),
            {
                "p": jnp.asarray(grid_p.ravel()),
                "b": jnp.full(grid_p.size, bit),
                "s": jnp.asarray(grid_s.ravel()),
            },
        )
        density = np.exp(np.asarray(log_q, np.float64)).reshape(301, 301)
        total += np.trapezoid(np.trapezoid(density, s, axis=1), p)
    assert total == pytest.approx(1, abs=3e-3)


@pytest.mark.parametrize("latents", [MIXED[:6], MIXED[2:]], ids=["elementwise", "with a simplex"])
def test_draw_and_density_agree(latents):
    net = build(latents)
    x, log_q = over(net.sample_and_log_prob, 0, None)(keys(500), context())
    np.testing.assert_allclose(
        log_q, over(net.log_prob, None, 0)(context(), x), atol=1e-4, rtol=1e-5
    )
    assert all(latent.support.check(x[latent.name]).all() for latent in latents)


@pytest.mark.parametrize(
    ("latents", "hidden"),
    [
        ((Latent("z", REAL, ()),), (20,)),
        ((Latent("b", BITS, (9,)),), ()),
        ((Latent("b", BITS, (9,)),), (20, 20)),
        (MIXED, (16, 32, 32)),
    ],
)
def test_one_pass_equals_naive_sampler_draw_for_draw(latents, hidden):
    net = build(latents, hidden=hidden)
    size = net.scaling.centre.size
    encoding = eqx.filter_jit(net.encode)(context())

    def naive(noise):
        row = jnp.zeros(size)
        for d in range(size):
            c = net._constants(row)
            params = net.network.params(encoding, row, c)
            for run, rows in zip(net.network.plan, params, strict=True):
                if run.start <= d < run.stop:
                    own = type(c)(*(column[d] for column in c))
                    row = row.at[d].set(run.head.draw(rows[d - run.start], noise[d], own))
        return unflatten(net.latents, row)

    noise = over(net.noise, 0)(keys(50))
    x, _ = over(net.draw, None, 0)(encoding, noise)
    expected = over(naive, 0)(noise)
    for latent in latents:
        ours, theirs = np.asarray(x[latent.name]), np.asarray(expected[latent.name])
        # a count in the millions is the exponential of a float, good to some 1e-5 of itself
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        if latent.support.is_discrete:
            np.testing.assert_array_equal(ours[theirs < 1000], theirs[theirs < 1000])


@pytest.mark.parametrize(
    ("number", "hidden"),
    [(1, (7,)), (2, ()), (2, (16, 32)), (6, ()), (6, (7,)), (6, (16, 32)), (6, (24, 24, 24))],
)
def test_jacobian_is_dense_below_the_diagonal_and_zero_above(number, hidden):
    """Parameters of coordinate d move with the whole context and with exactly those before d."""
    net = build((Latent("x", constraints.real_vector, (number,)),), hidden=hidden)
    x = jnp.asarray(np.random.default_rng(2).standard_normal(number), float)

    def params(y, x):
        row, _ = flatten(net.latents, {"x": x})
        (rows,) = net.network.params(net.encode({"y": y}), row, net._constants(row))
        return rows

    by_y, by_x = jax.jit(jax.jacobian(params, (0, 1)))(context()["y"], x)
    assert (np.abs(by_y).max(1) > 0).all()
    depends = np.abs(by_x).max(1) > 0
    np.testing.assert_array_equal(depends, np.tril(np.ones((number, number), bool), -1))


@pytest.mark.parametrize(("inputs", "outputs"), [(40, 40), (13, 40), (40, 13), (3, 40)])
def test_products_by_blocks_are_masked_products(monkeypatch, inputs, outputs):
    """Whatever the labels, and however blocks cut through them."""
    rng = np.random.default_rng(inputs)
    into, out = (np.sort(rng.integers(0, 6, size)) for size in (inputs, outputs))
    state, weight = rng.standard_normal(inputs), rng.standard_normal((inputs, outputs))
    mask = into[:, None] <= out[None, :]
    for block in (1, 4, 7, 100):
        monkeypatch.setattr(made, "BLOCK", block)
        found, slopes = jax.value_and_grad(
            lambda w: jnp.sum(jnp.sin(made.product(jnp.asarray(state), w, into, out)))
        )(jnp.asarray(weight))
        total = state @ (weight * mask)
        assert found == pytest.approx(np.sin(total).sum(), rel=1e-4)
        expected = state[:, None] * np.cos(total) * mask
        np.testing.assert_allclose(slopes, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("widths", [(5,), (8, 8, 8)])
def test_hidden_units_see_what_their_label_says(widths):
    """Units labelled 0 see the context alone, units labelled d the first d coordinates."""
    number = 4
    latents = (Latent("x", constraints.real_vector, (number,)),)
    net = build(latents, hidden=tuple(number * w for w in widths))
    labels = net.network.labels
    reach = np.arange(1, number + 1)[:, None] <= labels.hidden[0][None, :]
    for before, after in itertools.pairwise(labels.hidden):
        reach = reach @ (before[:, None] <= after[None, :])
    expected = np.arange(number)[:, None] < labels.hidden[-1][None, :]
    np.testing.assert_array_equal(reach, expected)
    assert (labels.hidden[-1] == 0).sum() == widths[-1]
    assert not reach[:, labels.hidden[-1] == 0].any()


def test_equal_specs_build_one_compiled_function():
    """Static parts compare by what they say, so a second network does not compile again."""
    traced = []

    @eqx.filter_jit
    def log_prob(net, x):
        traced.append(1)
        return net.log_prob(context(), {"x": x})

    for seed in (0, 1):
        latents = (Latent("x", constraints.interval(np.zeros(2), np.ones(2)), (2,)),)
        log_prob(build(latents, seed=seed), jnp.full(2, 0.5))
    assert len(traced) == 1


def test_scalings_are_fitted_and_not_trained():
    net = build((Latent("s", constraints.positive, ()),), noisy=False)
    s = jnp.exp(5 + 2 * jax.random.normal(jax.random.key(0), (4000,)))
    y = 100 + 10 * jax.random.cauchy(jax.random.key(1), (4000, 3))
    fitted = net.fit_scalings({"y": y}, {"s": s})
    # a sample median of 4000 has standard error 1.25 · 2 / √4000
    assert fitted.scaling.centre[0] == pytest.approx(5, abs=0.16)
    assert fitted.scaling.scale[0] == pytest.approx(2, rel=0.1)
    np.testing.assert_allclose(fitted.encoders[0].scaling.centre, 100, atol=2)
    weights, rest = eqx.partition(fitted, trainable(fitted))
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(rest))
    assert shapes == sorted([(1,), (1,), (6,), (6,)])
    assert all(eqx.is_inexact_array(leaf) for leaf in jax.tree.leaves(weights))
    # the wide component is centred on the prior wherever the network looks
    far = eqx.filter_jit(fitted.log_prob)({"y": y[0]}, {"s": jnp.exp(5.0 + 2 * 40)})
    exact = np.log(MADE().wide) + stats.cauchy.logpdf(40) - np.log(2) - 85
    assert far == pytest.approx(exact, abs=0.3)


def test_degenerate_scales_are_guarded():
    latents = (Latent("x", REAL, ()), Latent("n", constraints.nonnegative_integer, ()))
    net = build(latents, noisy=False)
    n = jnp.zeros(1000, int).at[:10].set(5)
    fitted = net.fit_scalings({"y": jnp.ones((1000, 3))}, {"x": jnp.full(1000, 7.0), "n": n})
    np.testing.assert_allclose(fitted.scaling.centre, [7, np.log(0.5)], rtol=1e-6)
    np.testing.assert_allclose(fitted.scaling.scale, [1, np.log(11)], rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "x", "message"),
    [
        ({}, {"s": 1.0}, "missing"),
        ({"y": jnp.zeros(2)}, {"s": 1.0}, r"'y' needs shape \(3,\), found \(2,\)"),
        ({"y": jnp.zeros(3)}, {}, "'s' is missing"),
        ({"y": jnp.zeros(3)}, {"s": jnp.ones(4)}, r"'s' needs shape \(\), found \(4,\)"),
    ],
)
def test_wrong_shapes_and_names_are_refused(given, x, message):
    net = build((Latent("s", constraints.positive, ()),))
    with pytest.raises(ValueError, match=message):
        net.log_prob(given, x)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="components=0"):
        MADE(components=0)
    with pytest.raises(ValueError, match=r"wide=0\.0"):
        MADE(wide=0.0)


def over(function, *axes):
    """Compiled, over a leading axis of the arguments whose place in `axes` is 0."""
    return jax.jit(jax.vmap(function, in_axes=axes))


def keys(number, seed=5):
    return jax.random.split(jax.random.key(seed), number)


def learn(net, simulate, *, steps=700, batch=256, rate=5e-3, seed=0):
    """Fit to fresh draws of `simulate(key) -> context, x, log p(x | context)`; the gap in nats.

    The gap E[log p - log q] is taken on new draws, with its standard error: the exact log p makes
    it a difference of two logarithms at the same draw, which hardly varies.
    """
    many = jax.vmap(simulate)
    contexts, xs, _ = many(keys(4000, seed))
    net = net.fit_scalings(contexts, xs)
    weights, rest = eqx.partition(net, trainable(net))
    optimiser = optax.chain(
        optax.clip_by_global_norm(5.0), optax.adam(optax.cosine_decay_schedule(rate, steps))
    )

    def loss(weights, contexts, xs):
        return -jnp.mean(jax.vmap(eqx.combine(weights, rest).log_prob)(contexts, xs))

    def step(carry, key):
        weights, state = carry
        contexts, xs, _ = many(jax.random.split(key, batch))
        updates, state = optimiser.update(jax.grad(loss)(weights, contexts, xs), state, weights)
        return (optax.apply_updates(weights, updates), state), None

    @jax.jit
    def fit(weights):
        carry, _ = jax.lax.scan(step, (weights, optimiser.init(weights)), keys(steps, seed + 1))
        return carry[0]

    trained = eqx.combine(fit(weights), rest)
    contexts, xs, log_p = many(keys(20_000, seed + 2))
    gap = log_p - jax.jit(jax.vmap(trained.log_prob))(contexts, xs)
    return float(jnp.mean(gap)), float(jnp.std(gap) / np.sqrt(20_000))


SLOW = pytest.mark.slow
SMALL = MADE(hidden=(48, 48), components=4, context=(32,))


@SLOW
def test_learns_a_conjugate_normal():
    """Five observations as a set; the posterior is normal with precision six."""

    def simulate(key):
        mean_key, noise_key = jax.random.split(key)
        mu = jax.random.normal(mean_key)
        y = mu + jax.random.normal(noise_key, (5,))
        return {"obs": {"y": y}}, {"mu": mu}, dist.Normal(y.sum() / 6, 6**-0.5).log_prob(mu)

    inputs = (Set("obs", (Value("y", REAL, ()),)),)
    net = SMALL.build(jax.random.key(0), (Latent("mu", REAL, ()),), inputs)
    gap, se = learn(net, simulate)
    assert -3 * se < gap < 0.02


@pytest.mark.slow
def test_learns_a_beta_posterior_of_bits():
    def simulate(key):
        p_key, bit_key = jax.random.split(key)
        p = jax.random.uniform(p_key)
        bits = jax.random.bernoulli(bit_key, p, (6,))
        posterior = dist.Beta(1.0 + bits.sum(), 7.0 - bits.sum())
        return {"obs": {"bit": bits}}, {"p": p}, posterior.log_prob(p)

    inputs = (Set("obs", (Value("bit", constraints.boolean, ()),)),)
    net = SMALL.build(jax.random.key(0), (Latent("p", constraints.unit_interval, ()),), inputs)
    gap, se = learn(net, simulate)
    assert -3 * se < gap < 0.02


@pytest.mark.slow
def test_learns_a_gamma_posterior_of_a_count():
    def simulate(key):
        rate_key, count_key = jax.random.split(key)
        rate = jax.random.gamma(rate_key, 2.0)
        y = jax.random.poisson(count_key, 3 * rate)
        return {"y": y}, {"rate": rate}, dist.Gamma(2.0 + y, 4.0).log_prob(rate)

    inputs = (Value("y", constraints.nonnegative_integer, ()),)
    net = SMALL.build(jax.random.key(0), (Latent("rate", constraints.positive, ()),), inputs)
    gap, se = learn(net, simulate)
    assert -3 * se < gap < 0.02


def test_learns_correlated_bits():
    """A Boltzmann distribution over five bits, by enumeration."""
    states = jnp.asarray(list(itertools.product([0, 1], repeat=5)))
    signs = 2.0 * states - 1
    couplings = jax.random.normal(jax.random.key(9), (5, 5))
    log_p = jax.nn.log_softmax(jnp.einsum("si,ij,sj->s", signs, couplings, signs) / 2)

    def simulate(key):
        place = jax.random.categorical(key, log_p)
        return {}, {"bits": states[place]}, log_p[place]

    net = SMALL.build(jax.random.key(0), (Latent("bits", BITS, (5,)),), ())
    gap, se = learn(net, simulate)
    assert -3 * se < gap < 0.02


def test_learns_a_count_posterior():
    """Of N ~ Poisson(10) individuals each was seen with chance 0.6: the rest is Poisson(4)."""

    def simulate(key):
        n_key, seen_key = jax.random.split(key)
        n = jax.random.poisson(n_key, 10.0)
        seen = jax.random.binomial(seen_key, n, 0.6).astype(int)
        return {"seen": seen}, {"n": n}, dist.Poisson(4.0).log_prob(n - seen)

    inputs = (Value("seen", constraints.nonnegative_integer, ()),)
    net = SMALL.build(
        jax.random.key(0), (Latent("n", constraints.nonnegative_integer, ()),), inputs
    )
    gap, se = learn(net, simulate)
    assert -3 * se < gap < 0.03


@SLOW
@pytest.mark.parametrize("sigma_is", ["constant", "site", "unknown"])
def test_elements_that_differ_by_constants_train_through_their_design(sigma_is):
    """Eight schools: sigma as constants of the elements trains as well as sigma as a site.

    With the spread between schools fixed at τ the posterior of the mean is normal. A set that is
    not told the constants can only take the plain mean, which costs some 0.06 nats.
    """
    constants = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    tau = 8.0

    def simulate(key):
        mu_key, y_key, order_key = jax.random.split(key, 3)
        mu = 10 * jax.random.normal(mu_key)
        sigma = jax.random.permutation(order_key, constants) if sigma_is == "site" else constants
        spread = jnp.sqrt(tau**2 + sigma**2)
        y = mu + spread * jax.random.normal(y_key, (8,))
        precision = 1 / 100 + jnp.sum(spread**-2)
        posterior = dist.Normal(jnp.sum(y / spread**2) / precision, precision**-0.5)
        return {"schools": {"y": y, "sigma": sigma}}, {"mu": mu}, posterior.log_prob(mu)

    elements = (Value("y", REAL, ()), Value("sigma", constraints.positive, ()))
    known = elements[:1] if sigma_is == "unknown" else elements
    net = SMALL.build(jax.random.key(0), (Latent("mu", REAL, ()),), (Set("schools", known),))
    gap, se = learn(net, simulate)
    assert gap > 0.04 if sigma_is == "unknown" else -3 * se < gap < 0.02


@pytest.mark.parametrize(
    ("coordinates", "copies", "guided", "width"),
    [
        (1, 10, False, 64),
        (4, 2, False, 64),
        (4, 2, True, 32),
        (5, 10, True, 128),
        (1, 1, True, 128),
    ],
)
def test_small_repeated_factors_have_small_networks(coordinates, copies, guided, width):
    guide = GuideSpec(tuple(range(coordinates)), 0) if guided else None
    sizes = MADE().sized(coordinates, copies, guide)
    assert sizes.hidden == (width, width) and sizes.context == (width // 2,)
    asked = MADE(hidden=(7,), context=()).sized(coordinates, copies, guide)
    assert asked.hidden == (7,) and asked.context == ()
