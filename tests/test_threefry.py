"""Random numbers in one kernel: to the bit those of `jax.random`, vectorised or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict import threefry

KEY = jax.random.key(7)


def words(key):
    return np.asarray(jax.random.key_data(key))


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 2)])
def test_numbers_are_those_of_jax(shape):
    np.testing.assert_array_equal(threefry.bits(KEY, shape), jax.random.bits(KEY, shape))
    np.testing.assert_array_equal(threefry.uniform(KEY, shape), jax.random.uniform(KEY, shape))


@pytest.mark.parametrize("shape", [2, 7, (3, 2)])
def test_keys_are_those_of_jax(shape):
    np.testing.assert_array_equal(
        words(threefry.split(KEY, shape)), words(jax.random.split(KEY, shape))
    )
    for number in (0, 9, 2**31):
        np.testing.assert_array_equal(
            words(threefry.fold_in(KEY, number)), words(jax.random.fold_in(KEY, number))
        )


def test_vectorised_over_keys():
    def of(module):
        return jax.vmap(lambda key: module.uniform(module.split(module.fold_in(key, 3))[1], (6,)))

    keys = jax.random.split(KEY, 4)
    np.testing.assert_array_equal(of(threefry)(keys), of(jax.random)(keys))


def test_in_double_precision():
    with jax.enable_x64(True):
        found = threefry.uniform(KEY, (1000,))
        assert found.dtype == jnp.float64
        np.testing.assert_array_equal(found, jax.random.uniform(KEY, (1000,)))


def test_no_loop_is_left():
    def loops(module):
        text = jax.jit(lambda key: module.uniform(key, (9,))).lower(KEY).as_text()
        return text.count("stablehlo.while")

    assert loops(threefry) == 0 < loops(jax.random)


def test_other_generators_are_left_as_they_are():
    key = jax.random.key(3, impl="rbg")
    assert jax.random.key_impl(threefry.split(key)) == jax.random.key_impl(key)
    np.testing.assert_array_equal(threefry.uniform(key, (4,)), jax.random.uniform(key, (4,)))


def test_too_many_numbers_for_one_key_are_refused():
    with pytest.raises(ValueError, match="4294967296 random numbers"):
        jax.jit(lambda: threefry.bits(KEY, (2**16, 2**16))).lower()
