"""What is put into loops gives the same as what is written out, and is as long whatever the number
of steps; what cannot be put into one is left as it is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._xla.jit import CompiledFunction
from retrodict._xla.output_packing import Packed
from retrodict._xla.reroll import Rolled
from retrodict._xla.stacked import Row, concatenated, stacked
from retrodict._xla.tuning import FAST_COMPILE

ROLLED = {}
LEFT = {}


def rolls(fn):
    ROLLED[fn.__name__] = fn
    return fn


def stays(fn):
    LEFT[fn.__name__] = fn
    return fn


def busy(x):
    """Enough to do for a loop to be worthwhile."""
    for _ in range(8):
        x = jnp.sin(x) + 0.1 * jnp.cos(x)
    return x


@rolls
def chain(y, steps):
    x, found = jnp.zeros(3), []
    for t in range(steps):
        x = busy(0.9 * x + y[t])
        found.append(x)
    return found


@rolls
def constants_differ(y, steps):
    x, found = 0.0, {}
    for t in range(steps):
        x = busy(x * (0.5 + 0.01 * t) + y[t] / np.float32(t + 1))
        found[f"x_{t}"] = x
    return found


@rolls
def first_step_differs(y, steps):
    x = jnp.exp(y[0]) * jnp.arange(3.0)
    found = [x]
    for t in range(1, steps):
        x = busy(x + y[t])
        found.append(x)
    return found, x


@rolls
def looks_two_steps_back(y, steps):
    found = [y[0], y[1]]
    for t in range(2, steps):
        found.append(busy(0.6 * found[-1] + 0.3 * found[-2] + y[t]))
    return found


@rolls
def shares_what_came_before(y, steps):
    scale, x, total = busy(y[0]), 0.0, 0.0
    for t in range(steps):
        x = busy(x * scale)
        total = total + x * y[t]
    return total


@rolls
def places_of_arrays(y, steps):
    fixed = jnp.arange(2.0 * steps).reshape(steps, 2)
    x, grid = 0.0, jnp.cumsum(jnp.stack(y))
    for t in range(steps):
        x = busy(x + fixed[t, 1] + fixed[t].sum() + grid[t])
    return x


@rolls
def keys_are_handed_on(y, steps):
    rng_key, x, found = jax.random.key(1), 0.0, []
    for t in range(steps):
        rng_key, draw_key = jax.random.split(rng_key)
        x = busy(
            x + jax.random.normal(draw_key) + jax.random.uniform(jax.random.fold_in(rng_key, t))
        )
        found.append(x)
    return found


@rolls
def taken_from_last_to_first(y, steps):
    x, found = 0.0, []
    for t in range(steps):
        x = busy(x + y[t])
        found.append((x, busy(2 * x)))
    code = 0.0
    for one, other in reversed(found):  # two turns of this loop for one of that
        for value in (one, other):
            code = jnp.where(value > 0.1, busy(code + value), code)
    return code, jnp.stack([one for one, _ in found])


@rolls
def independent(y, steps):
    return {f"z_{t}": busy(y[t] * t) for t in range(steps)}


@rolls
def choices(y, steps):
    x = jnp.zeros(2)
    for t in range(steps):
        x = jax.lax.cond(y[t] > 0, lambda x: busy(x + 1), lambda x: busy(x - 1), x)
        x = jax.nn.relu(x) + jax.nn.logsumexp(x)  # with a rule for its derivative
    return x


@stays
def takes_all_of_the_past(y, steps):
    found = [y[0]]
    for t in range(1, steps):
        found.append(busy(sum(found) + y[t]))
    return found


@stays
def shapes_grow(y, steps):
    x = jnp.zeros(1)
    for t in range(steps):
        x = jnp.append(busy(x), y[t])
    return x


def arguments(steps):
    return [jnp.asarray(np.sin(t), jnp.float32) for t in range(steps)]


def length(fn, steps):
    """Equations of what is compiled."""
    compiled = CompiledFunction(lambda y: fn(y, steps), FAST_COMPILE)
    return len(compiled.rolled.trace(arguments(steps)).jaxpr.jaxpr.eqns)


@pytest.mark.parametrize("fn", [*ROLLED.values(), *LEFT.values()], ids=lambda fn: fn.__name__)
def test_loops_give_what_is_written_out(fn):
    y = arguments(19)
    compiled = CompiledFunction(lambda y: fn(y, 19), FAST_COMPILE)
    written_out, found = compiled.unrolled(y), compiled(y)
    assert jax.tree.structure(written_out) == jax.tree.structure(found)
    for expected, leaf in zip(jax.tree.leaves(written_out), jax.tree.leaves(found), strict=True):
        assert expected.shape == leaf.shape
        assert expected.dtype == leaf.dtype
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fn", ROLLED.values(), ids=ROLLED)
def test_the_number_of_equations_does_not_grow(fn):
    # what puts arguments, and entries of arrays, into a stack is one equation each
    assert length(fn, 60) - length(fn, 30) <= 2 * 30
    assert length(fn, 60) < 60 * 20


@pytest.mark.parametrize("fn", LEFT.values(), ids=LEFT)
def test_what_cannot_be_rolled_is_left(fn):
    closed = jax.make_jaxpr(lambda y: fn(y, 12))(arguments(12))
    assert not Rolled.of(closed).repeats


def test_short_loops_stay_written_out():
    closed = jax.make_jaxpr(lambda y: [jnp.sin(value) for value in y])(arguments(20))
    assert not Rolled.of(closed).repeats


def test_a_loop_may_change_on_the_way():
    """Both halves are loops, and the second goes on from where the first ended."""

    def fn(y):
        x, found = 0.0, []
        for t in range(40):
            x = busy(x + y[t]) if t < 20 else busy(x * y[t])
            found.append(x)
        return found

    y = arguments(40)
    compiled = CompiledFunction(fn, FAST_COMPILE)
    assert len(Rolled.of(jax.make_jaxpr(fn)(y)).repeats) == 2
    np.testing.assert_allclose(compiled(y), compiled.unrolled(y), rtol=1e-4, atol=1e-5)


def test_other_shapes_are_compiled_anew():
    compiled = CompiledFunction(lambda y: chain(y, len(y)), FAST_COMPILE)
    for steps in (12, 20):
        assert len(compiled(arguments(steps))) == steps


def test_it_can_be_called_while_another_is_traced():
    # with an option that every XLA knows: tests may clear FAST_COMPILE
    options = {"xla_backend_optimization_level": "1"}
    compiled = CompiledFunction(lambda y: chain(y, 15), options)
    shapes = jax.eval_shape(compiled, arguments(15))
    assert [leaf.shape for leaf in shapes] == [(3,)] * 15
    found = jax.jit(compiled)(arguments(15))
    np.testing.assert_allclose(found, compiled(arguments(15)), rtol=1e-5)


ENTRIES = jnp.arange(12.0).reshape(6, 2)
OTHERS = -jnp.arange(12.0).reshape(6, 2)


@pytest.mark.parametrize(
    "entries",
    [
        [Row(ENTRIES, n) for n in range(6)],
        [Row(ENTRIES, n) for n in (4, 3, 2)],
        [ENTRIES[3], Row(ENTRIES, 0), Row(ENTRIES, 1), ENTRIES[0] * 2],
        [Row(stack, n) for n in range(6) for stack in (ENTRIES, OTHERS)],
        [ENTRIES[5], *(Row(stack, n) for n in range(6) for stack in (OTHERS, ENTRIES))],
        [Row(ENTRIES, 5), Row(ENTRIES, 5), Row(ENTRIES, 2)],
        [Row(ENTRIES, n, kept=True) for n in range(2, 5)],
    ],
)
def test_entries_are_put_together_in_their_order(entries):
    arrays = [entry.array() if isinstance(entry, Row) else entry for entry in entries]
    np.testing.assert_array_equal(stacked(entries), jnp.stack(arrays))
    joined = jnp.concatenate(arrays)
    if all(isinstance(entry, Row) for entry in entries):
        np.testing.assert_array_equal(concatenated(entries, joined.shape), joined)


def test_stacks_leave_a_program_whole():
    @jax.jit
    def program(stack):
        stack = 2 * stack
        leaves = [Row(stack, 1), stack.sum(), Row(stack, 0, kept=True)]
        return Packed.of(leaves, jax.tree.structure([0, 0, 0]))

    packed = program(ENTRIES)
    assert [leaf.shape for leaf in packed.arrays] == [(6, 2), ()]
    one, total, other = packed.unpacked()
    np.testing.assert_array_equal(one, 2 * ENTRIES[1])
    np.testing.assert_array_equal(other, 2 * ENTRIES[:1])
    assert float(total) == float(2 * ENTRIES.sum())
