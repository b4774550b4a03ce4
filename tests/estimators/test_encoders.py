"""Features of values, sets in any order and of any size, series from every step on."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions import constraints
from scipy import special

from retrodict.estimators.conditional import MADE, Latent
from retrodict.estimators.encoders import Embedding, Series, Set, build_encoder, fit_encoder
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
def test_finite_values_stay_finite_and_ordered(support):
    """Whatever the value, the features stay of a size a network can bear."""
    value = encoder(Value("x", support, ()))
    x = jnp.array([0.0, 1e-38, 1.0, 1e3, 1e20, 3e38])
    features = np.asarray(jax.vmap(value)(x))
    assert np.isfinite(features).all() and np.abs(features).max() < 120
    assert (np.diff(features[1:], axis=0) > 0).any(1).all()


def test_scaling_is_robust():
    """A Cauchy has neither mean nor variance; its quartiles are at one scale from its centre."""
    rows = 7 + 3 * jax.random.cauchy(jax.random.key(0), (20_000, 1))
    scaling = Scaling.fit(rows)
    # standard error of the median: π/2 · 3 / √20000
    assert scaling.centre[0] == pytest.approx(7, abs=0.1)
    assert scaling.scale[0] == pytest.approx(2 * 3 / 1.349, rel=0.05)
    there = jnp.arange(20_000) < 10_000
    spoiled = jnp.where(there[:, None], rows, 1e6)
    assert Scaling.fit(spoiled, there).centre[0] == pytest.approx(7, abs=0.15)
    assert Scaling.fit(rows.at[::3].set(jnp.nan)).centre[0] == pytest.approx(7, abs=0.15)


@pytest.mark.parametrize("number", [1, 10, 10_000])
def test_set_ignores_order_at_any_size(number):
    """One set of weights; the same output for the same elements, another for others."""
    encode = compiled(PAIRS)
    given = pairs(number)
    order = jax.random.permutation(jax.random.key(1), number)
    out = encode(given)
    assert out.shape == (encoder(PAIRS).size,) and np.isfinite(out).all()
    shuffled = jax.tree.map(lambda a: a[order], given)
    np.testing.assert_allclose(out, encode(shuffled), rtol=1e-4, atol=1e-5)
    assert np.abs(out - encode(pairs(number, seed=7))).max() > 1e-4


def test_set_knows_its_size():
    """Twice the same elements has the same mean and maximum, and another count."""
    encode = compiled(PAIRS)
    once = pairs(6)
    twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), once)
    difference = encode(twice) - encode(once)
    assert difference[-1] == pytest.approx(np.log(2), abs=1e-5)
    np.testing.assert_allclose(difference[-1 - 16 : -1], 0, atol=1e-5)  # the mean embedding
    assert np.abs(difference[:8]).max() > 1e-3  # the summary has seen the count


@pytest.mark.parametrize("spec", [PAIRS, SCHOOLS, WALK], ids=["flat", "nested", "series"])
def test_masked_elements_leave_no_trace(spec):
    """As if they were not there, NaN included."""
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

    def spoil(a):
        hidden = kept.reshape((number,) + (1,) * (a.ndim - 1))
        return jnp.where(hidden, a, jnp.nan if a.dtype == float else 10**6)

    masked = jax.tree.map(spoil, leaves) | {"mask": kept}
    np.testing.assert_allclose(encode(masked), encode(short), rtol=1e-5, atol=1e-6)
    assert np.abs(encode(masked) - encode(leaves)).max() > 1e-3


def test_ragged_groups_know_who_belongs_to_whom():
    encode = compiled(SCHOOLS)
    score = normals(2, 3)
    mask = jnp.array([[True, True, False], [True, True, True]])
    given = {"size": jnp.ones(2), "pupils": {"score": score, "mask": mask}}
    spoiled = given | {"pupils": {"score": jnp.where(mask, score, 99.0), "mask": mask}}
    np.testing.assert_allclose(encode(given), encode(spoiled), rtol=1e-6)
    swapped = score.at[0, 0].set(score[1, 0]).at[1, 0].set(score[0, 0])
    moved = given | {"pupils": {"score": swapped, "mask": mask}}
    assert np.abs(encode(given) - encode(moved)).max() > 1e-3


def test_series_summaries_are_those_of_its_suffixes():
    walk = encoder(WALK)
    encode = compiled(WALK)
    u = normals(9, 2)
    every = eqx.filter_jit(walk.suffixes)({"u": u})
    assert every.shape == (9, walk.size)
    np.testing.assert_allclose(every[0], encode({"u": u}), rtol=1e-6)
    for t in (3, 8):
        np.testing.assert_allclose(every[t], encode({"u": u[t:]}), rtol=1e-4, atol=1e-5)
    assert np.abs(encode({"u": u}) - encode({"u": u[::-1]})).max() > 1e-3


def test_associative_scan_is_the_recurrence():
    one = Embedding(element=(16, 16), summary=(8,), recurrent=12, recurrences=1)
    encode = build_encoder(np.random.default_rng(3), WALK, one)
    u = normals(8, 2)

    def by_hand(u):
        state, total = jnp.zeros(12), jnp.zeros(12)
        for step in u[::-1]:
            embedded = encode.embed(encode.elements[0](step))
            gate = jax.nn.sigmoid(encode.gates[0](embedded))
            state = (1 - gate) * state + gate * encode.values[0](embedded)
            total += jax.nn.silu(state)
        pooled = [state, total / 8, encode.count(jnp.log(jnp.array([8.0])))]
        return encode.summarise(jnp.concatenate(pooled))

    ours = eqx.filter_jit(encode)({"u": u})
    np.testing.assert_allclose(ours[:-1], jax.jit(by_hand)(u), rtol=1e-4, atol=1e-5)


def test_scalings_inside_sets_are_learned_over_batch_and_plates():
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


def test_a_summary_stands_for_its_set():
    """What draws have in common is encoded once: contexts may hold the summary instead."""
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
    log_prob = eqx.filter_jit(net.log_prob)
    from_two = log_prob(
        summarised | {"walk": jax.jit(lambda u: net.suffixes("walk", {"u": u}))(u)[2]}, x
    )
    whole = {"pairs": pairs(4), "walk": {"u": u[2:]}, "a": jnp.asarray(1.0)}
    assert from_two == pytest.approx(float(log_prob(whole, x)), abs=1e-5)
    with pytest.raises(ValueError, match="'pairs' is a Set, not a Series"):
        net.suffixes("pairs", pairs(4))
    with pytest.raises(ValueError, match="No input 'other'"):
        net.summary("other", pairs(4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (jnp.zeros(4), "'pairs' is a Set: expected a dict"),
        ({"t": jnp.ones(3)}, r"'pairs' needs values for \['t', 'y'\]: \['y'\] missing"),
        ({"t": jnp.ones(3), "y": jnp.ones(4)}, r"'pairs': .* lengths \[3, 4\]"),
        ({"t": jnp.ones((3, 2)), "y": jnp.ones(3)}, r"'t' needs shape \(\), found \(2,\)"),
        (
            {"t": jnp.ones(3), "y": jnp.ones(3), "mask": jnp.ones(2, bool)},
            r"mask needs shape \(3,\)",
        ),
    ],
)
def test_wrong_sets_are_refused(given, message):
    net = MADE(hidden=(16,)).build(
        jax.random.key(0), (Latent("x", constraints.real, ()),), (PAIRS,)
    )
    with pytest.raises(ValueError, match=message):
        net.encode({"pairs": given})


def test_set_without_elements_is_refused():
    with pytest.raises(ValueError, match="'empty' is a Set without elements"):
        encoder(Set("empty", ()))
