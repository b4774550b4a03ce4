"""Which runs of numbered sites are loops, and where the operands of their steps come from."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from loop_models import CASES
from retrodict.graph.loops.matching import find_loops, numbered
from retrodict.graph.loops.recording import record
from retrodict.graph.loops.steps import Past, PerStep, Result, Shared, SiteValue, Slices, Stack
from retrodict.graph.program import Program


def loops_of(model, observed=()):
    program, structure = Program(model, observed=frozenset(observed)).inspect()
    return find_loops(record(program, structure.shapes))


def only(model):
    (loop,) = loops_of(model)
    return loop


def names(loop):
    return [[block.statement.name for block in step] for step in loop.steps]


def sample(name, mean=0.0):
    return numpyro.sample(name, dist.Normal(mean, 1.0))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("x_3", ("x_", 3, "")),
        ("x[12]", ("x[", 12, "]")),
        ("x0_1", ("x0_", 1, "")),
        ("w2", ("w", 2, "")),
        ("x", None),
        ("x_3a", None),
        ("7", None),
    ],
)
def test_numbers_are_read_from_the_end_of_names(name, parts):
    assert numbered(name) == parts


def test_a_step_is_all_sites_up_to_the_next_number():
    def model():
        x = 0.0
        for t in range(3, 7):
            a = sample(f"a{t}", x)
            x = sample(f"b_{t}", a)

    assert names(only(model)) == [[f"a{t}", f"b_{t}"] for t in range(3, 7)]


def test_numbers_may_go_backwards_and_in_strides():
    def model():
        x = 0.0
        for t in range(20, 0, -5):
            x = sample(f"x_{t}", x)

    assert names(only(model)) == [["x_20"], ["x_15"], ["x_10"], ["x_5"]]


def test_a_site_of_another_name_in_between_ends_a_loop():
    def model():
        x = 0.0
        for t in range(8):
            x = sample(f"x_{t}", x)
            if t == 3:
                sample("other", x)

    assert [names(loop)[0] for loop in loops_of(model)] == [["x_0"], ["x_4"]]


def test_inner_loops_are_loops_of_their_own():
    def model():
        for g in range(2):
            mean = sample(f"mean_{g}")
            for n in range(3):
                sample(f"y_{g}_{n}", mean)

    found = [[n for step in names(loop) for n in step] for loop in loops_of(model)]
    assert found == [[f"y_{g}_{n}" for n in range(3)] for g in range(2)]


def test_sites_of_one_name_must_be_of_one_kind():
    def model():
        for n in range(4):
            with numpyro.plate("a", 2 if n < 2 else 3):
                sample(f"y_{n}")

    assert [len(loop.steps) for loop in loops_of(model)] == [2, 2]

    def model_with_data():
        for n in range(4):
            sample(f"y_{n}")

    assert [len(loop.steps) for loop in loops_of(model_with_data, ["y_0", "y_1"])] == [2, 2]


def test_a_loop_may_change_on_the_way():
    """Both halves are loops, and the second goes on from where the first ended."""

    def model():
        x = 0.0
        for t in range(12):
            x = sample(f"x_{t}", 0.5 * x if t < 6 else jnp.tanh(x))

    first, second = loops_of(model)
    assert (names(first)[0], names(second)[0]) == (["x_0"], ["x_6"])
    (register,) = second.registers
    assert register.early == {-1: first.steps[-1][0].statement.value}


def test_first_steps_are_special_only_where_they_differ():
    loop = only(CASES["first_step_has_a_prior_of_its_own"].model)
    assert loop.special == (1, 0)
    loop = only(CASES["two_steps_back"].model)
    assert loop.special == (2, 0, 0, 0)
    loop = only(CASES["first_observation_looks_elsewhere"].model)
    assert loop.special == (1, 0)  # z[0] and z[1] are both slices of z

    def starts_from_an_array():
        x = jnp.zeros(())
        for t in range(4):
            x = sample(f"x_{t}", 0.5 * x)

    assert only(starts_from_an_array).special == (0,)


def test_registers_reach_as_far_back_as_steps_look():
    (register,) = only(CASES["two_steps_back"].model).registers
    assert (register.quantity, register.depth, register.early) == (SiteValue(0), 2, {})
    value, total = only(CASES["running_sum"].model).registers
    quantities = {type(value.quantity), type(total.quantity)}
    assert quantities == {SiteValue, Result}
    (register,) = only(CASES["two_steps_back_from_sites_outside"].model).registers
    assert (register.depth, set(register.early)) == (2, {-1, -2})


def test_what_steps_take_from_outside_is_shared_or_one_for_each():
    loop = only(CASES["covariates"].model)
    slices = [each for each in loop.inputs if isinstance(each, Slices)]
    (spreads,) = [each for each in loop.inputs if isinstance(each, Stack)]
    assert [each.sizes for each in slices] == [(1, 2), (1, 1), (1,)]
    assert [each.entries[1:] for each in slices] == [
        [(t, 0) for t in range(1, 9)],
        [(t, 1) for t in range(1, 9)],
        [(t,) for t in range(1, 9)],
    ]
    assert len(spreads.entries) == 9
    sources = [source for rows in loop.sources for row in rows for source in row]
    assert {type(source) for source in sources} >= {Past, PerStep, Shared}


def test_equal_numbers_are_one():
    def model():
        x = 0.0
        for t in range(5):
            x = sample(f"x_{t}", 0.5 * x + (t + 1) * 2.0)
            sample(f"y_{t}", x * ((t + 1) * 2.0))

    loop = only(model)
    assert len(loop.inputs) == 1


def test_what_is_computed_once_is_no_part_of_a_step():
    """Though it is needed by the second step first, and by all after it."""
    loop = only(CASES["scale_computed_once"].model)
    assert all(block.eqns == () for step in loop.steps for block in step)


def test_a_model_whose_distributions_cannot_be_rebuilt_is_not_recorded():
    model = CASES["distribution_with_more_than_parameters"].model
    program, structure = Program(model).inspect()
    assert record(program, structure.shapes) is None
