"""Every support: there and back, the Jacobian against autodiff, and the edges of float32."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

from retrodict.errors import UnsupportedModel
from retrodict.estimators.conditional import MADE
from retrodict.estimators.coordinates import Latent, blocks, flatten

BOUNDS = np.array([-1.0, 0.0, 1e3], np.float32)

CONTINUOUS = {
    "real": (constraints.real, ()),
    "real_vector": (constraints.real_vector, (3,)),
    "positive": (constraints.positive, (2,)),
    "nonnegative": (constraints.nonnegative, ()),
    "softplus_positive": (constraints.softplus_positive, ()),
    "unit_interval": (constraints.unit_interval, (2,)),
    "interval": (constraints.interval(-2.0, 5.0), ()),
    "interval with arrays": (
        constraints.independent(constraints.interval(BOUNDS, BOUNDS + 2), 1),
        (3,),
    ),
    "open_interval": (constraints.open_interval(0.0, 1e-3), ()),
    "circular": (constraints.circular, ()),
    "greater_than": (constraints.greater_than(1e3), ()),
    "less_than": (constraints.less_than(-3.0), ()),
    "simplex": (constraints.simplex, (4,)),
    "rows of simplices": (constraints.independent(constraints.simplex, 1), (2, 3)),
    "ordered_vector": (constraints.ordered_vector, (3,)),
    "positive_ordered_vector": (constraints.positive_ordered_vector, (3,)),
    "lower_cholesky": (constraints.lower_cholesky, (3, 3)),
    "softplus_lower_cholesky": (constraints.softplus_lower_cholesky, (2, 2)),
    "scaled_unit_lower_cholesky": (constraints.scaled_unit_lower_cholesky, (2, 2)),
    "positive_definite": (constraints.positive_definite, (3, 3)),
    "corr_cholesky": (constraints.corr_cholesky, (3, 3)),
    "corr_matrix": (constraints.corr_matrix, (3, 3)),
    "zero_sum": (constraints.zero_sum(1), (3,)),
    "l1_ball": (constraints.l1_ball, (3,)),
}
DISCRETE = {
    "boolean": (constraints.boolean, ()),
    "vector of booleans": (constraints.independent(constraints.boolean, 1), (3,)),
    "integer_interval": (constraints.integer_interval(-2, 5), (2,)),
    "integer_interval with arrays": (
        constraints.integer_interval(np.array([0, 1]), np.array([1, 9])),
        (2,),
    ),
    "wide integer_interval": (constraints.integer_interval(10, 5000), ()),
    "nonnegative_integer": (constraints.nonnegative_integer, (2,)),
    "positive_integer": (constraints.positive_integer, ()),
    "integer_greater_than": (constraints.integer_greater_than(-4), ()),
    "multinomial": (constraints.multinomial(7), (3,)),
    "rows of multinomials": (constraints.multinomial(np.array([0, 7])), (2, 3)),
}
SUPPORTS = CONTINUOUS | DISCRETE


def network(name, **options):
    support, shape = SUPPORTS[name]
    latents = (Latent("x", support, shape),)
    return MADE(hidden=(), components=3, **options).build(jax.random.key(0), latents, ())


@eqx.filter_jit
def draw(net, noise):
    """Draws at many rows of noise, with log q and log q asked for again."""

    def one(noise):
        x, log_q = net.draw(net.encode({}), noise)
        return x["x"], log_q, net.log_prob({}, x)

    return jax.jit(jax.vmap(one))(noise)


@pytest.mark.parametrize("name", SUPPORTS)
def test_draws_are_inside_and_their_density_is_their_own(name):
    """For ordinary noise, for the least and greatest there is, and with scales that overflow."""
    support, shape = SUPPORTS[name]
    net = network(name, wide=0.3)
    rng = np.random.default_rng(1)
    ordinary = rng.uniform(size=(300, net.scaling.centre.size, 2)).astype(np.float32)
    ordinary = np.clip(ordinary, 2.0**-24, 1 - 2.0**-24)
    ends = np.array([2.0**-24, 2.0**-23, 0.5, 1 - 2.0**-23, 1 - 2.0**-24], np.float32)
    corners = rng.choice(ends, ordinary.shape)
    for scale in (1.0, 30.0):
        scaled = eqx.tree_at(lambda m: m.scaling.scale, net, scale * net.scaling.scale)
        for noise in (ordinary, corners):
            x, log_q, again = map(np.asarray, draw(scaled, noise))
            assert x.shape == (300, *shape)
            inside = np.asarray(support.check(x)).reshape(300, -1).all(-1)
            assert inside.all(), x[~inside][:3]
            assert np.isfinite(log_q).all()
            np.testing.assert_allclose(log_q, again, atol=1e-4, rtol=1e-5)


VECTORS = [name for name in CONTINUOUS if not blocks(network(name).latents)[0].elementwise]


@pytest.mark.parametrize("name", VECTORS)
def test_volume_change_of_vectors_against_autodiff(name):
    support, shape = SUPPORTS[name]
    transform = dist.biject_to(support)
    free = transform.inverse_shape(shape)
    z = (0.5 * np.random.default_rng(3).standard_normal(free)).astype(np.float32).reshape(-1)
    latents = (Latent("x", support, shape),)
    there = jax.jit(blocks(latents)[0].unflatten)
    x = there(z)
    again, log_slope = jax.jit(lambda x: flatten(latents, {"x": x}))(x)
    np.testing.assert_allclose(again, z, atol=2e-3)
    np.testing.assert_allclose(x, jax.jit(lambda z: transform(z))(z.reshape(free)), atol=2e-4)

    jacobian = np.asarray(jax.jit(jax.jacobian(lambda z: there(z).reshape(-1)))(z), np.float64)
    if name == "zero_sum":
        # density on the plane itself, not on its shadow on some coordinates
        volume = 0.5 * np.linalg.slogdet(jacobian.T @ jacobian)[1]
    else:
        volume = np.linalg.slogdet(jacobian[free_entries(name, shape)])[1]
    assert log_slope == pytest.approx(volume, abs=2e-3)


def free_entries(name, shape):
    """Where in the flattened value its free entries are."""
    places = np.arange(np.prod(shape)).reshape(shape)
    if len(shape) == 2 and shape[0] == shape[1]:
        below = -1 if "corr" in name else 0
        return places[np.tril_indices(shape[0], below)]
    return places[..., :-1].reshape(-1) if "simpl" in name else places.reshape(-1)


EDGES = {
    "positive": [[0.0, 1.0], [1e-45, 3e38]],
    "nonnegative": [0.0, 3e38],
    "unit_interval": [[0.0, 1.0], [1.0, 0.5]],
    "interval": [-2.0, 5.0],
    "circular": [-np.pi, np.pi],
    "greater_than": [1e3],
    "less_than": [-3.0],
    "simplex": [[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]],
    "ordered_vector": [[1.0, 1.0, 1.0]],
    "real": [3e38, -3e38],
    "corr_cholesky": [[[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]]],
    "lower_cholesky": [[[0.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]]],
    "nonnegative_integer": [[0, 2**31 - 1]],
    "boolean": [True, False, 0, 1],
}


@pytest.mark.parametrize("name", EDGES)
def test_density_is_finite_on_the_edge_of_the_support(name):
    net = network(name)

    @eqx.filter_jit
    def value_and_gradient(net, value):
        return eqx.filter_value_and_grad(lambda net: net.log_prob({}, {"x": value}))(net)

    for x in EDGES[name]:
        log_q, gradient = value_and_gradient(net, jnp.asarray(x))
        assert np.isfinite(log_q), x
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)), x


@pytest.mark.parametrize(
    ("support", "shape", "family", "size"),
    [
        (constraints.simplex, (4,), "mixture", 3),
        (constraints.corr_cholesky, (4, 4), "mixture", 6),
        (constraints.integer_interval(0, 255), (), "categorical", 1),
        (constraints.integer_interval(0, 256), (), "count", 1),
        (constraints.multinomial(9), (2, 3), "count", 4),
    ],
)
def test_coordinates_of_a_support(support, shape, family, size):
    (block,) = blocks((Latent("x", support, shape),))
    assert (block.kind, block.size) == (family, size)


def test_what_cannot_be_drawn_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="at least one latent"):
        blocks(())
    with pytest.raises(UnsupportedModel, match=r"'direction'.*Sphere"):
        blocks((Latent("direction", constraints.sphere, (3,)),))
    with pytest.raises(UnsupportedModel, match=r"'whole'.*nothing to draw"):
        blocks((Latent("whole", constraints.simplex, (1,)),))
    with pytest.raises(UnsupportedModel, match=r"'none'.*nothing to draw"):
        blocks((Latent("none", constraints.real, (0,)),))
    with pytest.raises(UnsupportedModel, match="each latent once"):
        blocks((Latent("a", constraints.real, ()), Latent("a", constraints.real, ())))
    with pytest.raises(UnsupportedModel, match=r"'b'.*shape \(3,\).*\(2,\)"):
        blocks((Latent("b", constraints.interval(0.0, np.ones(3)), (2,)),))
    with pytest.raises(UnsupportedModel, match=r"'e'.*empty"):
        blocks((Latent("e", constraints.interval(1.0, 1.0), ()),))


def test_latents_are_equal_and_hash_by_what_they_say():
    def latent(upper):
        return Latent("x", constraints.interval(0.0, np.array([1.0, upper])), (2,))

    assert latent(2.0) == latent(2.0) and hash(latent(2.0)) == hash(latent(2.0))
    assert latent(2.0) != latent(3.0)
