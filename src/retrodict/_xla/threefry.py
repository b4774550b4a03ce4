"""A key in; the uniform numbers that `jax.random` makes of it, to the bit, in one kernel, out.

On a CPU, JAX writes Threefry down as a loop, for a single number as for a million: five rounds of
three kernels, each of which XLA shares out among threads. Written out it is one kernel, which takes
a third to a half of the time and is compiled sooner. That is for many numbers at a time: keys made
from keys would be merged into what uses them, over and over, and are better left to `jax.random`.
"""

import math
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Float, PRNGKeyArray, UInt

Words = UInt[Array, "..."]

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
# Of the three words that take turns as keys, the third is the parity of the two that are given.
PARITY = 0x1BD11BDA


def uniform(rng_key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
    """As `jax.random.uniform`, which also serves keys of other generators."""
    if jax.random.key_impl(rng_key) == "threefry2x32":
        rng_key = jax.random.wrap_key_data(jax.random.key_data(rng_key), impl=_WRITTEN_OUT)
    return jax.random.uniform(rng_key, shape)


def hashed(key: tuple[Words, Words], counter: tuple[Words, Words]) -> tuple[Words, Words]:
    """Threefry-2x32 in 20 rounds (Salmon et al. 2011, "Parallel random numbers")."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(PARITY))
    a, b = counter[0] + keys[0], counter[1] + keys[1]
    for number in range(5):
        for rotation in ROTATIONS[number % 2]:
            a = a + b
            b = a ^ ((b << rotation) | (b >> (32 - rotation)))
        a = a + keys[(number + 1) % 3]
        b = b + keys[(number + 2) % 3] + jnp.uint32(number + 1)
    return a, b


def _bits(key: Words, width: int, shape: tuple[int, ...]) -> Words:
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"cannot draw {size} random numbers with one key: draw them in parts")
    places = jax.lax.iota(jnp.uint32, size).reshape(shape)
    first, second = hashed((key[0], key[1]), (jnp.zeros_like(places), places))
    if width == 64:
        return (first.astype(jnp.uint64) << 32) | second.astype(jnp.uint64)
    return (first ^ second).astype(f"uint{width}")


def _no_key(*_: object) -> NoReturn:
    raise TypeError("these keys make numbers, and no other keys")


_WRITTEN_OUT = define_prng_impl(
    key_shape=(2,),
    seed=_no_key,
    split=_no_key,
    fold_in=_no_key,
    random_bits=_bits,
    name="threefry2x32, written out",
    tag="fry1",
)
