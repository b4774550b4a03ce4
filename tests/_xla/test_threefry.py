"""Random numbers in one kernel: to the bit those of `jax.random`, vectorised or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._xla import threefry

KEY = jax.random.key(7)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 2), (100_000,)])
def test_numbers_are_those_of_jax(shape):
    np.testing.assert_array_equal(threefry.uniform(KEY, shape), jax.random.uniform(KEY, shape))


def test_vectorised_over_keys():
    keys = jax.random.split(KEY, 4)
    found, expected = (
        jax.vmap(lambda key, module=module: module.uniform(key, (6,)))(keys)
        for module in (threefry, jax.random)
    )
    np.testing.assert_array_equal(found, expected)


def test_in_double_precision():
    with jax.enable_x64(True):
        found = threefry.uniform(KEY, (1000,))
        assert found.dtype == jnp.float64
        np.testing.assert_array_equal(found, jax.random.uniform(KEY, (1000,)))


def test_no_loop_is_left():
    text = jax.jit(lambda key: threefry.uniform(key, (9,))).lower(KEY).as_text()
    assert "stablehlo.while" not in text


def test_other_generators_are_left_as_they_are():
    key = jax.random.key(3, impl="rbg")
    np.testing.assert_array_equal(threefry.uniform(key, (4,)), jax.random.uniform(key, (4,)))


def test_too_many_numbers_for_one_key_are_refused():
    with pytest.raises(ValueError, match="4294967296 random numbers"):
        jax.jit(lambda: threefry.uniform(KEY, (2**16, 2**16))).lower()
