import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._xla.scan import one_by_one, scan


def step(state, entry):
    """A state of two parts, one of integers, and entries with a key."""
    key, x = entry["key"], entry["x"]
    moved = jnp.tanh(state[0] + x) + 0.1 * jax.random.normal(key, x.shape)
    found = {"moved": moved, "count": state[1], "total": moved.sum(), "high": moved[0] > 0.5}
    return (moved, state[1] + 1), {**found, "nothing": moved[:0], "all": moved > 0}


def entries(length):
    return {
        "key": jax.random.split(jax.random.key(1), length),
        "x": jax.random.normal(jax.random.key(2), (length, 3)),
    }


START = (jnp.zeros(3), jnp.array(5))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_steps_are_those_of_jax(length, reverse):
    ours = jax.jit(lambda e: scan(step, START, e, reverse=reverse))(entries(length))
    theirs = jax.lax.scan(step, START, entries(length), reverse=reverse)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def test_it_can_be_vectorised_and_has_a_gradient():
    x = jax.random.normal(jax.random.key(3), (4, 6, 3))

    def total(loop, x):
        def one(state, entry):
            state = jnp.tanh(state + entry)
            return state, state**2

        return loop(one, jnp.zeros(3), x)[1].sum()

    def slopes(loop):
        return jax.vmap(jax.grad(lambda x: total(loop, x)))(x)

    np.testing.assert_allclose(slopes(scan), slopes(jax.lax.scan), rtol=1e-5)


def test_small_entries_are_handed_on_side_by_side():
    """Each by itself would be copied by itself; large ones are, and keep their types and shapes."""

    def many(state, entry):
        found = [state * entry[f"{n}"].sum() for n in range(6)]
        return state + 1, (found, entry["large"] > 0, [one > 2 for one in found])

    given = {f"{n}": jnp.arange(8.0).reshape(4, 2) + n for n in range(6)}
    given["large"] = jnp.arange(4 * 400).reshape(4, 20, 20) % 3
    traced = jax.make_jaxpr(lambda e: scan(many, jnp.zeros(()), e))(given)
    (loop,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "scan")
    # the state; entries, floats and the large; found, floats, bits and the large; series of those
    assert loop.params["num_carry"] == 1 + 2 + 3 + 3
    ours, theirs = (f(many, jnp.zeros(()), given) for f in (scan, jax.lax.scan))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, ours, theirs))


def test_a_step_is_traced_once():
    seen = []

    def counted(state, entry):
        seen.append(entry)
        return state + entry, state

    scan(counted, jnp.zeros(()), jnp.arange(5.0))
    assert len(seen) == 1


def test_one_by_one_is_a_map():
    x = jnp.arange(12.0).reshape(4, 3)
    found = one_by_one(lambda row: (row.sum(), row[::-1]), x)
    np.testing.assert_array_equal(found[0], x.sum(1))
    np.testing.assert_array_equal(found[1], x[:, ::-1])


def test_entries_are_read_and_written_apart_from_what_is_computed():
    """No computation is merged with a place that is known only when it runs: see `loops`."""

    def heavy(state, entry):
        x, weight = entry
        return jnp.exp(-(state**2)) * x + weight @ state, jnp.log1p(state**2) * x

    start = jnp.ones((8, 500))
    given = (jnp.ones((6, 8, 500)), jnp.ones((6, 8, 8)))

    def merged(loop):
        text = jax.jit(lambda g: loop(heavy, start, g)).lower(given).compile().as_text()
        fused = [part.split("\n}")[0] for part in text.split("%fused_computation")[1:]]
        return [
            part
            for part in fused
            if "dynamic" in part and ("exponential(" in part or "log-plus-one(" in part)
        ]

    assert merged(jax.lax.scan)
    assert not merged(scan)
