"""Dependence read off a jaxpr against the sparsity of the Jacobian at a random point."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from retrodict.graph.index_atoms import INF, Window
from retrodict.graph.index_relations import NOTHING, Relation
from retrodict.graph.jaxpr_dependence import dependence_of

INDEX = np.array([2, 0, 0, 4, 1])
SPARSE = np.array([[1.0, 0, 0, 0, 0], [0, 2, 0, 0, 0]])


def running(x):
    return lax.scan(lambda c, v: (0.5 * c + v, c * v), 0.0, x)[1]


def delayed(x):
    return lax.scan(lambda c, v: ((v, c[0]), c[1] + v), (0.0, 0.0), x)[1]


def delayed_backward(x):
    return lax.scan(lambda c, v: (v, c * 2), 0.0, x, reverse=True)[1]


def shift_register(x):
    return lax.scan(lambda c, v: (jnp.append(c[1:], v), c[0]), jnp.zeros(3), x)[1]


# name: (function of one array, its shape, whether the answer is exactly the Jacobian's)
CASES = {
    "elementwise": (lambda x: jnp.exp(x) * 2 + 1, (5,), True),
    "stretch": (lambda x: x[:1] * jnp.ones(4) + x[2], (5,), True),
    "outer": (lambda x: x[:, None] * jnp.ones(3), (5,), True),
    "slice": (lambda x: x[1:4], (5,), True),
    "stride": (lambda x: x[::2], (5,), True),
    "reverse": (lambda x: x[::-1], (5,), True),
    "roll": (lambda x: jnp.roll(x, 2), (5,), True),
    "difference": (lambda x: jnp.diff(x), (5,), True),
    "pad": (lambda x: jnp.pad(x, (2, 1)), (5,), True),
    "interior pad": (lambda x: lax.pad(x, 0.0, [(1, 1, 2)]), (5,), True),
    "concatenate": (lambda x: jnp.concatenate([x[3:], x[:2], x]), (5,), True),
    "stack": (lambda x: jnp.stack([x[0], x[3], x[1]]), (5,), True),
    "tile": (lambda x: jnp.tile(x, 2), (5,), True),
    "repeat": (lambda x: jnp.repeat(x, 3), (5,), True),
    "gather": (lambda x: x[INDEX], (5,), True),
    "gather rows": (lambda x: x[INDEX], (5, 3), True),
    "gather columns": (lambda x: x[:, INDEX[:2] % 3], (5, 3), True),
    "gather pairs": (lambda x: x[INDEX, INDEX % 3], (5, 3), True),
    "gather of gather": (lambda x: x[INDEX][INDEX], (5,), True),
    "one element": (lambda x: x[3], (5,), True),
    "take along": (lambda x: jnp.take_along_axis(x, INDEX[:, None] % 3, 1), (5, 3), False),
    "sum": (lambda x: x.sum(1), (4, 3), True),
    "sum of part": (lambda x: x[1:3].sum(), (5,), True),
    "cumsum": (jnp.cumsum, (5,), True),
    "suffix sums": (lambda x: lax.cumsum(x, reverse=True), (5,), True),
    "transpose": (jnp.transpose, (3, 4), True),
    "flatten": (jnp.ravel, (3, 4), True),
    "unflatten": (lambda x: x.reshape(2, 3), (6,), False),
    "new axes": (lambda x: x.reshape(1, 5, 1), (5,), True),
    "matmul": (lambda x: x @ jnp.ones((3, 2)), (4, 3), True),
    "batched matmul": (lambda x: jnp.einsum("bij,bjk->bik", x, x), (2, 2, 2), True),
    "constant matrix": (lambda x: SPARSE @ x, (5,), False),
    "where": (lambda x: jnp.where(np.arange(5) > 2, x, x[0]), (5,), False),
    "sort": (lambda x: jnp.sort(x, 1), (3, 4), False),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.mT + jnp.eye(2)), (3, 2, 2), False),
    "update": (lambda x: jnp.zeros(6).at[2:4].set(x[:2]), (5,), False),
    "dynamic update": (lambda x: lax.dynamic_update_slice(x, x[:2] * 2, (3,)), (5,), False),
    "dynamic slice": (lambda x: lax.dynamic_slice(x, (3,), (2,)), (5,), True),
    "where to look is data": (
        lambda x: lax.dynamic_slice(x, (jnp.argmax(x),), (2,)), (5,), False,
    ),
    "branch": (lambda x: lax.cond(x[0] > 9, lambda v: v, lambda v: 2 * v, x), (5,), False),
    "while": (lambda x: lax.while_loop(lambda v: v[0] < 9, lambda v: v + 1, x), (5,), False),
    "vmap": (jax.vmap(lambda v: v.sum() * v[0]), (3, 4), True),
    "running": (running, (5,), False),
    "delayed": (delayed, (6,), True),
    "delayed backward": (delayed_backward, (6,), True),
    "shift register": (shift_register, (6,), True),
    "final carry": (lambda x: lax.scan(lambda c, v: (v, None), 0.0, x)[0], (5,), True),
    "custom derivative": (lambda x: jax.nn.relu(x) + jax.nn.silu(x), (5,), True),
    "jit": (jax.jit(lambda x: x + 1), (5,), True),
}  # fmt: skip


def positions(relation, shape, source_shape):
    """All (position, source index) pairs of a relation."""
    table = np.zeros(shape + source_shape, bool)
    for position in np.ndindex(*shape):
        for index in relation.at(position):
            table[position + index] = True
    return table


@pytest.mark.parametrize(("fn", "shape", "exact"), CASES.values(), ids=CASES.keys())
def test_dependence_covers_the_jacobian(fn, shape, exact):
    x = jax.random.normal(jax.random.key(1), shape) + 0.1
    result = dependence_of(lambda inputs: fn(inputs["x"]), {"x": x})
    output = fn(x)
    table = positions(result.dependence.sources.get("x", NOTHING), output.shape, shape)
    jacobian = np.asarray(jax.jacfwd(fn)(x)) != 0
    assert result.shape == output.shape
    assert np.all(table[jacobian]), "a dependence was missed"
    if exact:
        np.testing.assert_array_equal(table, jacobian)


def test_the_index_is_a_parent_too():
    def fn(inputs):
        return inputs["x"][inputs["i"]]

    result = dependence_of(fn, {"x": jnp.zeros(4), "i": jnp.zeros(3, int)})
    sources = result.dependence.sources
    assert sources["i"] == Relation.of([Window(0, 0)], (3,), (3,))
    assert positions(sources["x"], (3,), (4,)).all()


def test_a_carry_that_never_forgets_is_widened_not_followed():
    """A running sum over a thousand steps, found without following a thousand steps."""
    result = dependence_of(
        lambda inputs: lax.scan(lambda c, v: (c + v, c), 0.0, inputs["x"])[1],
        {"x": jax.ShapeDtypeStruct((1000,), jnp.float32)},
    )
    past = Relation.of([Window(0, 0, -INF, -1)], (1000,), (1000,))
    assert result.dependence.sources["x"] == past


def test_a_choice_by_the_step_of_a_scan_limits_what_a_branch_is_read_for():
    """The first step takes a, the others b, though one branch reads both."""

    def fn(inputs):
        def step(carry, form):
            branches = [lambda: inputs["a"], lambda: inputs["b"] + carry, lambda: inputs["b"]]
            value = jax.lax.switch(form, branches)
            return value, value

        forms = np.array([0, 1, 1, 2, 2], np.int32)
        return jax.lax.scan(step, jnp.zeros(()), forms)[1]

    dependence = dependence_of(fn, {"a": jnp.zeros(()), "b": jnp.zeros(())}).dependence
    sources = dependence.sources
    assert [bool(sources["b"].at((t,))) for t in range(5)] == [False, True, True, True, True]
    # The second and third step add to what the first one took.
    assert [bool(sources["a"].at((t,))) for t in range(5)] == [True, True, True, False, False]
