"""Functions of many rows against the same function of one row, vectorised by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._xla.batch_last import by_rows, side_by_side, total


def of_rows(weight, given):
    a, b = given["a"], given["b"]
    return {"product": weight.T @ a + b, "sum": total(side_by_side([2 * a, b]))}


def of_one(weight, given):
    a, b = given["a"], given["b"]
    return {"product": weight.T @ a + b, "sum": jnp.sum(2 * a) + jnp.sum(b)}


# Of each of three nested axes, which of the arguments have it.
NESTED = {
    "both": [("a", "b")] * 3,
    "one shared by all but the last": [("b",), ("b",), ("a", "b")],
    "one shared within": [("a", "b"), ("b",), ("b",)],
    "taking turns": [("a",), ("b",), ("a",)],
}


@pytest.mark.parametrize("sizes", [(2, 4, 5), (2, 3, 5), (1, 2, 3)])
@pytest.mark.parametrize("kind", NESTED)
def test_however_often_vectorised_there_is_one_axis_of_rows(kind, sizes):
    rng, weight = np.random.default_rng(0), np.random.default_rng(1).normal(size=(3, 2))
    given = {}
    for name, last in {"a": 3, "b": 2}.items():
        axes = [size for size, has in zip(sizes, NESTED[kind], strict=True) if name in has]
        given[name] = rng.normal(size=(*axes, last))
    seen = []

    def noted(weight, given):
        seen.append(max(leaf.shape[-1] for leaf in given.values()))
        return of_rows(weight, given)

    def nested(function):
        for has in reversed(NESTED[kind]):
            axes = {name: 0 if name in has else None for name in ("a", "b")}
            function = jax.vmap(function, (None, axes))
        return jax.jit(function)

    found = nested(by_rows(noted))(weight, given)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        found,
        nested(of_one)(weight, given),
    )
    # filled up, where there are more than go abreast
    assert seen[-1] == {40: 40, 30: 32, 6: 6}[np.prod(sizes)]


def test_rows_of_different_networks_are_vectorised_as_usual():
    rng = np.random.default_rng(0)
    weights, given = rng.normal(size=(7, 3, 2)), {"a": rng.normal(size=3), "b": rng.normal(size=2)}
    found = jax.vmap(by_rows(of_rows), (0, None))(weights, given)
    expected = jax.vmap(of_one, (0, None))(weights, given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, expected)
