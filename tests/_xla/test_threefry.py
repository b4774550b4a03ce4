"""Random numbers in one kernel are those of `jax.random`, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._xla import threefry

KEY = jax.random.key(7)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 2), (100_000,)])
def test_numbers_equal_those_of_jax(shape):
    np.testing.assert_array_equal(threefry.uniform(KEY, shape), jax.random.uniform(KEY, shape))


def test_numbers_vectorised_over_keys_equal_those_of_jax():
    keys = jax.random.split(KEY, 4)
    ours, theirs = (
        jax.vmap(lambda key, module=module: module.uniform(key, (6,)))(keys)
        for module in (threefry, jax.random)
    )
    np.testing.assert_array_equal(ours, theirs)


def test_numbers_in_double_precision_equal_those_of_jax():
    with jax.enable_x64(True):
        numbers = threefry.uniform(KEY, (1000,))
        assert numbers.dtype == jnp.float64
        np.testing.assert_array_equal(numbers, jax.random.uniform(KEY, (1000,)))


def test_the_program_has_no_loop():
    def program(module):
        return jax.jit(lambda key: module.uniform(key, (9,))).lower(KEY).as_text()

    assert "stablehlo.while" in program(jax.random)
    assert "stablehlo.while" not in program(threefry)


def test_keys_of_other_generators_are_passed_to_jax():
    key = jax.random.key(3, impl="rbg")
    np.testing.assert_array_equal(threefry.uniform(key, (4,)), jax.random.uniform(key, (4,)))


def test_too_many_numbers_for_one_key_are_refused():
    with pytest.raises(ValueError, match="4294967296 random numbers"):
        jax.jit(lambda: threefry.uniform(KEY, (2**16, 2**16))).lower()
