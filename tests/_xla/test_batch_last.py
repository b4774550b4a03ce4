"""Functions of a batch against the same function of one element, vectorised by `jax.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._xla.batch_last import batch_last, concatenate_features, sum_all, sum_features


def function_of_batch(weight, inputs):
    a, b = inputs["a"], inputs["b"]
    return {
        "product": weight.T @ a + b,
        "sum": sum_features(concatenate_features([2 * a, b])),
    }


def function_of_one(weight, inputs):
    a, b = inputs["a"], inputs["b"]
    return {"product": weight.T @ a + b, "sum": jnp.sum(2 * a) + jnp.sum(b)}


# For each of three nested vmaps, the arguments that it maps over.
NESTED = {
    "both": [("a", "b")] * 3,
    "one constant outside": [("b",), ("b",), ("a", "b")],
    "one constant inside": [("a", "b"), ("b",), ("b",)],
    "alternating": [("a",), ("b",), ("a",)],
}


@pytest.mark.parametrize("sizes", [(2, 4, 5), (2, 3, 5), (1, 2, 3)])
@pytest.mark.parametrize("case", NESTED)
def test_nested_vmaps_give_one_last_axis(case, sizes):
    rng, weight = np.random.default_rng(0), np.random.default_rng(1).normal(size=(3, 2))
    inputs = {}
    for name, features in {"a": 3, "b": 2}.items():
        axes = [size for size, mapped in zip(sizes, NESTED[case], strict=True) if name in mapped]
        inputs[name] = rng.normal(size=(*axes, features))
    batch_sizes = []

    def recorded(weight, inputs):
        batch_sizes.append(max(leaf.shape[-1] for leaf in inputs.values()))
        return function_of_batch(weight, inputs)

    def nested(function):
        for mapped in reversed(NESTED[case]):
            axes = {name: 0 if name in mapped else None for name in ("a", "b")}
            function = jax.vmap(function, (None, axes))
        return jax.jit(function)

    outputs = nested(batch_last(recorded))(weight, inputs)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        outputs,
        nested(function_of_one)(weight, inputs),
    )
    # A batch larger than a vector register is padded to full registers.
    assert batch_sizes[-1] == {40: 40, 30: 32, 6: 6}[np.prod(sizes)]


def test_a_batch_of_networks_is_vectorised_by_jax():
    rng = np.random.default_rng(0)
    weights, inputs = rng.normal(size=(7, 3, 2)), {"a": rng.normal(size=3), "b": rng.normal(size=2)}
    outputs = jax.vmap(batch_last(function_of_batch), (0, None))(weights, inputs)
    expected = jax.vmap(function_of_one, (0, None))(weights, inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), outputs, expected)


def test_sums_equal_those_of_numpy():
    values = np.random.default_rng(0).normal(size=(3, 4))
    np.testing.assert_allclose(sum_features(jnp.asarray(values)), values.sum(0), rtol=1e-5)
    np.testing.assert_allclose(sum_features(jnp.asarray(values[0])), values[0].sum(), rtol=1e-5)
    np.testing.assert_allclose(sum_all(jnp.asarray(values)), values.sum(), rtol=1e-5)


def test_constant_parts_are_repeated_over_the_batch():
    batch, constant = jnp.arange(6.0).reshape(2, 3), jnp.full((1, 1), 7.0)
    expected = np.concatenate([np.arange(6.0).reshape(2, 3), np.full((1, 3), 7.0)])
    np.testing.assert_array_equal(concatenate_features([batch, constant]), expected)
    assert concatenate_features([]).shape == (0,)
