"""Encoders of values, of sets of any order and size, and of series and their suffixes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions import constraints
from scipy import special

from retrodict.estimators.conditional import MADE, Latent
from retrodict.estimators.encoders import (
    Conditions,
    Elements,
    Embedding,
    Series,
    Set,
    build_encoder,
    fit_encoder,
)
from retrodict.estimators.features import Scaling, Value, value_columns

SIZES = Embedding(element=(16, 16), summary=(8,), recurrent=12)
PAIRS = Set(
    "pairs",
    (Value("t", constraints.positive, ()), Value("y", constraints.nonnegative_integer, ())),
)
SCHOOLS = Set(
    "schools",
    (
        Value("size", constraints.positive, ()),
        Set("pupils", (Value("score", constraints.real, ()),)),
    ),
)
WALK = Series("walk", (Value("u", constraints.real, (2,)),))


def encoder(spec):
    return build_encoder(np.random.default_rng(0), spec, SIZES)


def compiled(spec):
    """The encoder as a compiled function."""
    return eqx.filter_jit(encoder(spec))


def pairs(number, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "t": jnp.asarray(rng.exponential(size=number), float),
        "y": jnp.asarray(rng.poisson(3.0, number)),
    }


def normals(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), float)


@pytest.mark.parametrize(
    ("support", "shape", "x", "expected"),
    [
        (constraints.real, (), 3.0, [3, 3]),
        (constraints.positive, (2,), [1.0, np.e], [0, 1, 1, np.e]),
        (constraints.greater_than(2.0), (), 3.0, [0, 3]),
        (constraints.less_than(2.0), (), 1.0, [0, 1]),
        (constraints.nonnegative_integer, (), 5, [np.log(6), 5]),
        (constraints.unit_interval, (), 0.9, [special.logit(0.9), 0.9]),
        (constraints.interval(np.zeros(2), np.array([2.0, 4.0])), (2,), [1.0, 2.0], [0, 0, 1, 2]),
        (constraints.circular, (), 1.0, [np.sin(1), np.cos(1)]),
        (constraints.boolean, (2,), [True, False], [1, -1]),
        (constraints.integer_interval(1, 3), (2,), [1, 3], [1, 0, 0, 0, 0, 1]),
        (constraints.integer_interval(0, 99), (), 0, [-np.log(100), 0]),
        (constraints.simplex, (2,), [0.5, 0.5], [np.log(0.5)] * 2 + [0.5] * 2),
        (constraints.multinomial(3), (2,), [1, 2], [np.log(2), np.log(3), 1, 2]),
        (constraints.lower_cholesky, (1, 1), [[np.e]], [1, np.e]),
        (constraints.sphere, (2,), [0.6, 0.8], [0.6, 0.8, 0.6, 0.8]),
    ],
)
def test_features_by_support(support, shape, x, expected):
    raw, columns = value_columns(Value("x", support, shape), jnp.asarray(x))
    np.testing.assert_allclose(raw, expected, rtol=1e-5, atol=1e-6)
    assert len(columns) == len(expected)


@pytest.mark.parametrize("support", [constraints.real, constraints.positive])
def test_features_of_finite_values_are_finite_moderate_and_ordered(support):
    value = encoder(Value("x", support, ()))
    x = jnp.array([0.0, 1e-38, 1.0, 1e3, 1e20, 3e38])
    features = np.asarray(jax.vmap(value)(x))
    assert np.isfinite(features).all() and np.abs(features).max() < 120
    assert (np.diff(features[1:], axis=0) > 0).any(1).all()


def test_scaling_is_robust():
    """A Cauchy has neither mean nor variance; its quartiles are at one scale from its centre."""
    rows = 7 + 3 * jax.random.cauchy(jax.random.key(0), (20_000, 1))
    scaling = Scaling.fit(rows)
    # Standard error of the median: π/2 · 3 / √20000.
    assert scaling.centre[0] == pytest.approx(7, abs=0.1)
    assert scaling.scale[0] == pytest.approx(2 * 3 / 1.349, rel=0.05)
    exists = jnp.arange(20_000) < 10_000
    partly_invalid = jnp.where(exists[:, None], rows, 1e6)
    assert Scaling.fit(partly_invalid, exists).centre[0] == pytest.approx(7, abs=0.15)
    assert Scaling.fit(rows.at[::3].set(jnp.nan)).centre[0] == pytest.approx(7, abs=0.15)


@pytest.mark.parametrize("number", [1, 10, 10_000])
def test_set_encoder_ignores_order_at_any_size(number):
    """One set of weights gives the same features for the same elements, and others for others."""
    encode = compiled(PAIRS)
    elements = pairs(number)
    order = jax.random.permutation(jax.random.key(1), number)
    out = encode(elements)
    assert out.shape == (encoder(PAIRS).size,) and np.isfinite(out).all()
    shuffled = jax.tree.map(lambda a: a[order], elements)
    np.testing.assert_allclose(out, encode(shuffled), rtol=1e-4, atol=1e-5)
    assert np.abs(out - encode(pairs(number, seed=7))).max() > 1e-4


def test_set_encoder_depends_on_the_number_of_elements():
    """Twice the same elements have the same mean and maximum, and another number."""
    encode = compiled(PAIRS)
    once = pairs(6)
    twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), once)
    difference = encode(twice) - encode(once)
    assert difference[-1] == pytest.approx(np.log(2), abs=1e-5)
    np.testing.assert_allclose(difference[-1 - 16 : -1], 0, atol=1e-5)  # mean embedding
    assert np.abs(difference[:8]).max() > 1e-3  # summary, which depends on the number


@pytest.mark.parametrize("spec", [PAIRS, SCHOOLS, WALK], ids=["flat", "nested", "series"])
def test_masked_elements_have_no_effect(spec):
    """Even if their values are NaN."""
    encode = compiled(spec)
    number, kept = 7, jnp.array([True, False, True, True, False, False, True])
    leaves = {
        "pairs": pairs(number),
        "schools": {
            "size": jnp.arange(1.0, 8),
            "pupils": {"score": normals(number, 4)},
        },
        "walk": {"u": normals(number, 2)},
    }[spec.name]
    short = jax.tree.map(lambda a: a[kept], leaves)

    def invalidate(a):
        exists = kept.reshape((number,) + (1,) * (a.ndim - 1))
        return jnp.where(exists, a, jnp.nan if a.dtype == float else 10**6)

    masked = Elements(jax.tree.map(invalidate, leaves), kept)
    np.testing.assert_allclose(encode(masked), encode(short), rtol=1e-5, atol=1e-6)
    assert np.abs(encode(masked) - encode(leaves)).max() > 1e-3


def test_ragged_groups_are_encoded_group_by_group():
    encode = compiled(SCHOOLS)
    score = normals(2, 3)
    mask = jnp.array([[True, True, False], [True, True, True]])

    def features(score):
        return encode({"size": jnp.ones(2), "pupils": Elements({"score": score}, mask)})

    padded = jnp.where(mask, score, 99.0)
    np.testing.assert_allclose(features(score), features(padded), rtol=1e-6)
    swapped = score.at[0, 0].set(score[1, 0]).at[1, 0].set(score[0, 0])
    assert np.abs(features(score) - features(swapped)).max() > 1e-3


def test_suffixes_of_a_series_are_encoded_as_series():
    walk = encoder(WALK)
    encode = compiled(WALK)
    u = normals(9, 2)
    suffixes = eqx.filter_jit(walk.suffixes)({"u": u})
    assert suffixes.shape == (9, walk.size)
    np.testing.assert_allclose(suffixes[0], encode({"u": u}), rtol=1e-6)
    for t in (3, 8):
        np.testing.assert_allclose(suffixes[t], encode({"u": u[t:]}), rtol=1e-4, atol=1e-5)
    assert np.abs(encode({"u": u}) - encode({"u": u[::-1]})).max() > 1e-3


def test_associative_scan_is_the_recurrence():
    sizes = Embedding(element=(16, 16), summary=(8,), recurrent=12, recurrences=1)
    encode = build_encoder(np.random.default_rng(3), WALK, sizes)
    u = normals(8, 2)

    def sequential(u):
        state, total = jnp.zeros(12), jnp.zeros(12)
        for step in u[::-1]:
            embedded = encode.embed(encode.elements[0](step))
            gate = jax.nn.sigmoid(encode.gates[0](embedded))
            state = (1 - gate) * state + gate * encode.values[0](embedded)
            total += jax.nn.silu(state)
        pooled = [state, total / 8, encode.count(jnp.log(jnp.array([8.0])))]
        return encode.summarise(jnp.concatenate(pooled))

    features = eqx.filter_jit(encode)({"u": u})
    np.testing.assert_allclose(features[:-1], jax.jit(sequential)(u), rtol=1e-4, atol=1e-5)


def test_scalings_inside_sets_are_fitted_over_batch_and_plates():
    fitted = fit_encoder(
        encoder(SCHOOLS),
        {
            "size": jnp.full((50, 4), 7.0),
            "pupils": {"score": 3 + 2 * normals(50, 4, 25)},
        },
        None,
    )
    inner = fitted.elements[1]
    np.testing.assert_allclose(inner.elements[0].scaling.centre, 3, atol=0.1)
    np.testing.assert_allclose(inner.elements[0].scaling.scale, 2, rtol=0.05)
    assert fitted.count.centre[0] == pytest.approx(np.log(4), rel=1e-5)
    assert inner.count.centre[0] == pytest.approx(np.log(25), rel=1e-5)


def test_summaries_may_replace_sets_and_series():
    """Inputs that draws share are encoded once."""
    net = MADE(hidden=(16,), embedding=SIZES).build(
        jax.random.key(0),
        (Latent("x", constraints.real, ()),),
        (PAIRS, WALK, Value("a", constraints.real, ())),
    )
    u = normals(5, 2)
    x = {"x": jnp.asarray(0.3)}
    summarised = {
        "pairs": jax.jit(lambda p: net.summary("pairs", p))(pairs(4)),
        "a": jnp.asarray(1.0),
    }

    @eqx.filter_jit
    def log_prob(inputs):
        return net.log_prob(net.encode(Conditions(inputs)), x)

    suffixes = jax.jit(lambda u: net.suffixes("walk", {"u": u}))(u)
    whole = {"pairs": pairs(4), "walk": {"u": u[2:]}, "a": jnp.asarray(1.0)}
    expected = float(log_prob(whole))
    assert log_prob(summarised | {"walk": suffixes[2]}) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="'pairs' is a Set, not a Series"):
        net.suffixes("pairs", pairs(4))
    with pytest.raises(ValueError, match="No input 'other'"):
        net.summary("other", pairs(4))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jnp.zeros(4), "'pairs' is a Set: expected a dict"),
        ({"t": jnp.ones(3)}, r"'pairs' needs values for \['t', 'y'\]: \['y'\] missing"),
        ({"t": jnp.ones(3), "y": jnp.ones(4)}, r"'pairs': .* lengths \[3, 4\]"),
        ({"t": jnp.ones((3, 2)), "y": jnp.ones(3)}, r"'t' needs shape \(\), found \(2,\)"),
        (
            Elements({"t": jnp.ones(3), "y": jnp.ones(3)}, jnp.ones(2, bool)),
            r"mask needs shape \(3,\)",
        ),
    ],
)
def test_wrong_sets_are_refused(value, message):
    net = MADE(hidden=(16,)).build(
        jax.random.key(0), (Latent("x", constraints.real, ()),), (PAIRS,)
    )
    with pytest.raises(ValueError, match=message):
        net.encode(Conditions({"pairs": value}))


def test_set_without_elements_is_refused():
    with pytest.raises(ValueError, match="'empty' is a Set without elements"):
        encoder(Set("empty", ()))
