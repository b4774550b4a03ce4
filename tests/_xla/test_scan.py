"""The scan against `jax.lax.scan`, and how it arranges reads and writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._xla.scan import scan, sequential_map


def step(state, entry):
    """A state of a float and an integer array; entries with a random key; results of all dtypes."""
    key, x = entry["key"], entry["x"]
    moved = jnp.tanh(state[0] + x) + 0.1 * jax.random.normal(key, x.shape)
    result = {"moved": moved, "count": state[1], "total": moved.sum(), "high": moved[0] > 0.5}
    return (moved, state[1] + 1), {**result, "empty": moved[:0], "positive": moved > 0}


def entries(length):
    return {
        "key": jax.random.split(jax.random.key(1), length),
        "x": jax.random.normal(jax.random.key(2), (length, 3)),
    }


START = (jnp.zeros(3), jnp.array(5))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_results_equal_those_of_jax(length, reverse):
    ours = jax.jit(lambda e: scan(step, START, e, reverse=reverse))(entries(length))
    theirs = jax.lax.scan(step, START, entries(length), reverse=reverse)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def test_gradients_under_vmap_equal_those_of_jax():
    x = jax.random.normal(jax.random.key(3), (4, 6, 3))

    def sum_of_squares(loop, x):
        def one(state, entry):
            state = jnp.tanh(state + entry)
            return state, state**2

        return loop(one, jnp.zeros(3), x)[1].sum()

    def gradients(loop):
        return jax.vmap(jax.grad(lambda x: sum_of_squares(loop, x)))(x)

    np.testing.assert_allclose(gradients(scan), gradients(jax.lax.scan), rtol=1e-5)


def test_small_entries_are_packed_and_large_ones_keep_shape_and_dtype():
    def many(state, entry):
        products = [state * entry[f"{n}"].sum() for n in range(6)]
        return state + 1, (products, entry["large"] > 0, [one > 2 for one in products])

    inputs = {f"{n}": jnp.arange(8.0).reshape(4, 2) + n for n in range(6)}
    inputs["large"] = jnp.arange(4 * 400).reshape(4, 20, 20) % 3
    traced = jax.make_jaxpr(lambda e: scan(many, jnp.zeros(()), e))(inputs)
    (loop,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "scan")
    # The state; the entry's floats and large array; the result's floats, booleans and large array;
    # and the series of those three.
    assert loop.params["num_carry"] == 1 + 2 + 3 + 3
    ours, theirs = (f(many, jnp.zeros(()), inputs) for f in (scan, jax.lax.scan))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, ours, theirs))


def test_a_step_is_traced_once():
    calls = []

    def counted(state, entry):
        calls.append(entry)
        return state + entry, state

    scan(counted, jnp.zeros(()), jnp.arange(5.0))
    assert len(calls) == 1


def test_sequential_map_applies_the_function_to_every_entry():
    x = jnp.arange(12.0).reshape(4, 3)
    sums, reversals = sequential_map(lambda row: (row.sum(), row[::-1]), x)
    np.testing.assert_array_equal(sums, x.sum(1))
    np.testing.assert_array_equal(reversals, x[:, ::-1])


def test_computation_is_not_fused_with_reads_and_writes_at_dynamic_indices():
    def expensive(state, entry):
        x, weight = entry
        return jnp.exp(-(state**2)) * x + weight @ state, jnp.log1p(state**2) * x

    start = jnp.ones((8, 500))
    inputs = (jnp.ones((6, 8, 500)), jnp.ones((6, 8, 8)))

    def mixed_fusions(loop):
        text = jax.jit(lambda g: loop(expensive, start, g)).lower(inputs).compile().as_text()
        fusions = [part.split("\n}")[0] for part in text.split("%fused_computation")[1:]]
        return [
            fusion
            for fusion in fusions
            if "dynamic" in fusion and ("exponential(" in fusion or "log-plus-one(" in fusion)
        ]

    assert mixed_fusions(jax.lax.scan)
    assert not mixed_fusions(scan)
