"""Keys in; keys and random numbers out: the same as from `jax.random`, in one kernel each.

On a CPU, JAX writes Threefry down as a loop, which is soon compiled: five rounds of three kernels
and as many copies as the state has parts, for a single number as for a million, each of them shared
out among threads. Written out it is one kernel. For programs that answer, which are compiled once
and run often; elsewhere `jax.random` will do. Keys of other generators are handed to it as well.
"""

import math

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Float, PRNGKeyArray, UInt

Words = UInt[Array, "..."]

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
# Of the three words that take turns as keys, the parity of the two that are given.
PARITY = 0x1BD11BDA


def split(rng_key: PRNGKeyArray, shape: int | tuple[int, ...] = 2) -> PRNGKeyArray:
    """As `jax.random.split`."""
    return _like(rng_key, jax.random.split(_written_out(rng_key), shape))


def fold_in(rng_key: PRNGKeyArray, number: int | Array) -> PRNGKeyArray:
    """As `jax.random.fold_in`."""
    return _like(rng_key, jax.random.fold_in(_written_out(rng_key), number))


def bits(rng_key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> UInt[Array, "..."]:
    """As `jax.random.bits`."""
    return jax.random.bits(_written_out(rng_key), shape, jnp.uint32)


def uniform(rng_key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
    """As `jax.random.uniform`."""
    return jax.random.uniform(_written_out(rng_key), shape)


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


def _numbered(key: Words, shape: tuple[int, ...]) -> tuple[Words, Words]:
    """Two words for every place."""
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"cannot draw {size} random numbers with one key: draw them in parts")
    places = jax.lax.iota(jnp.uint32, size).reshape(shape)
    return hashed((key[0], key[1]), (jnp.zeros_like(places), places))


def _bits(key: Words, width: int, shape: tuple[int, ...]) -> Words:
    first, second = _numbered(key, shape)
    if width == 64:
        return (first.astype(jnp.uint64) << 32) | second.astype(jnp.uint64)
    return (first ^ second).astype(f"uint{width}")


def _split(key: Words, shape: tuple[int, ...]) -> Words:
    return jnp.stack(_numbered(key, shape), -1)


def _fold_in(key: Words, number: int | Array) -> Words:
    word = jnp.asarray(number, jnp.uint32)
    return jnp.stack(hashed((key[0], key[1]), (jnp.zeros_like(word), word)))


def _seed(seed: Array) -> Words:
    raise TypeError("these keys are made from others, not from a seed")


_WRITTEN_OUT = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_bits,
    fold_in=_fold_in,
    name="threefry2x32, written out",
    tag="fry1",
)


def _written_out(rng_key: PRNGKeyArray) -> PRNGKeyArray:
    if jax.random.key_impl(rng_key) != "threefry2x32":
        return rng_key
    made: PRNGKeyArray = jax.random.wrap_key_data(jax.random.key_data(rng_key), impl=_WRITTEN_OUT)
    return made


def _like(rng_key: PRNGKeyArray, made: PRNGKeyArray) -> PRNGKeyArray:
    """With the generator of another key."""
    found: PRNGKeyArray = jax.random.wrap_key_data(
        jax.random.key_data(made), impl=jax.random.key_impl(rng_key)
    )
    return found
