"""A key, log weights and a number in; that many ancestor indices, in ascending order, out.

Weights are laid end to end on a line of `num` offspring, and points on the line choose who they
fall on. Cumulative weights in single precision are wrong by whole offspring at a million
particles, so positions are integers: 2^b steps to an offspring, num · 2^b below 2³¹. Weights are
accumulated exactly and then cut to the grid, so the ends meet, no particle of zero weight owns a
step, and the expected number of offspring is num · W_k to within one step, whatever the others.

Finding the owner of a point by bisection costs log K passes over the memory. Instead the number of
points below each particle's end is counted, which for one point a stratum is a shift, and counts
turn into ancestors by a scatter and a running sum.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt

from retrodict.particles.weights import normalise

# Positions stay below 2^30, which leaves a factor of two for weights that sum to a little over 1.
POSITION_BITS = 30
# Beyond eight, XLA's CPU backend falls back to slow code for an unrolled loop body.
UNROLL = 4


class Resampler(Protocol):
    """Ancestors A_1 ≤ … ≤ A_num of the next generation, with unbiased numbers of offspring:

        E[ #{j : A_j = k} ] = num · w_k / Σ_i w_i

    Log weights need not be normalised. A weight of zero (-inf) is never chosen, unless all are
    zero, when each particle is as good as another.
    """

    def __call__(
        self, rng_key: PRNGKeyArray, log_weights: Float[Array, " particles"], num: int, /
    ) -> Int[Array, " num"]:
        """Draw the ancestors."""


@partial(jax.jit, static_argnames="num")
def systematic(
    rng_key: PRNGKeyArray, log_weights: Float[Array, " particles"], num: int
) -> Int[Array, " num"]:
    """One random offset for a comb of points j + U (Carpenter, Clifford & Fearnhead 1999).

    Each particle gets ⌊num · W_k⌋ or ⌈num · W_k⌉ offspring.
    """
    bits = _step_bits(num)
    ends = _ends(log_weights, num, bits)
    offset = _random_steps(rng_key, (), bits)
    return _at_or_below((ends - offset + (1 << bits) - 1) >> bits, num)


@partial(jax.jit, static_argnames="num")
def stratified(
    rng_key: PRNGKeyArray, log_weights: Float[Array, " particles"], num: int
) -> Int[Array, " num"]:
    """A point at random in each of num equal strata, j + U_j (Kitagawa 1996).

    The number of offspring is within less than two of num · W_k.
    """
    bits = _step_bits(num)
    ends = _ends(log_weights, num, bits)
    # the last end lies on the upper edge of the last stratum, where no point can follow
    offsets = jnp.append(_random_steps(rng_key, (num,), bits), 0)
    whole, part = ends >> bits, ends & ((1 << bits) - 1)
    return _at_or_below(whole + (offsets[whole] < part), num)


@partial(jax.jit, static_argnames="num")
def multinomial(
    rng_key: PRNGKeyArray, log_weights: Float[Array, " particles"], num: int
) -> Int[Array, " num"]:
    """Independent points, drawn in order by exponential spacings (Devroye 1986, sec. V.3)."""
    bits = _step_bits(num)
    ends = _ends(log_weights, num, bits)
    points = _sorted_points(rng_key, jnp.asarray(num, jnp.int32), num, bits)
    return _owners(ends, points, num, bits)


@partial(jax.jit, static_argnames="num")
def residual(
    rng_key: PRNGKeyArray, log_weights: Float[Array, " particles"], num: int
) -> Int[Array, " num"]:
    """⌊num · W_k⌋ copies of each particle, the rest multinomial (Liu & Chen 1998)."""
    bits = _step_bits(num)
    steps = jnp.diff(_ends(log_weights, num, bits), prepend=0)
    copies = steps >> bits
    ends = _running_sum(steps & ((1 << bits) - 1))
    # steps add up to num · 2^bits exactly, so what remains is a whole number of offspring
    remaining = ends[-1] >> bits
    points = _sorted_points(rng_key, remaining, num, bits)
    owners = _owners(ends, points, num, bits)
    kept = jnp.where(jnp.arange(num) < remaining, owners, log_weights.shape[0])
    return _at_or_below(_running_sum(copies.at[kept].add(1, mode="drop")), num)


RESAMPLERS: Mapping[str, Resampler] = MappingProxyType(
    {
        "systematic": systematic,
        "stratified": stratified,
        "multinomial": multinomial,
        "residual": residual,
    }
)


def resampler(choice: str | Resampler) -> Resampler:
    """The resampling rule of that name; a callable is its own rule."""
    if callable(choice):
        return choice
    if isinstance(choice, str) and choice in RESAMPLERS:
        return RESAMPLERS[choice]
    known = ", ".join(repr(name) for name in RESAMPLERS)
    raise ValueError(
        f"resampling={choice!r} is not known: give one of {known}, or a callable "
        "(rng_key, log_weights, num) -> ancestors"
    )


def _step_bits(num: int) -> int:
    """b, with num · 2^b ≤ 2^30."""
    if not 1 <= num <= 1 << (POSITION_BITS - 8):
        raise ValueError(
            f"cannot resample to {num} particles: give a number from 1 to {1 << POSITION_BITS - 8}"
        )
    return POSITION_BITS - (num - 1).bit_length()


def _random_steps(rng_key: PRNGKeyArray, shape: tuple[int, ...], bits: int) -> Array:
    """Uniform on the steps of one offspring."""
    return (jax.random.bits(rng_key, shape, jnp.uint32) >> (32 - bits)).astype(jnp.int32)


def _ends(log_weights: Array, num: int, bits: int) -> Array:
    """Where each particle's share of the line ends; the last at num · 2^bits."""
    log_normalised, log_mean = normalise(log_weights)
    uniform = jnp.full_like(log_normalised, 1.0 / log_weights.shape[0])
    shares = jnp.where(jnp.isneginf(log_mean), uniform, jnp.exp(log_normalised))
    return _lay(shares, jnp.asarray(num << bits, jnp.int32))


def _lay(shares: Float[Array, " n"], length: Int[Array, ""]) -> Int[Array, " n"]:
    """Cumulative shares, which sum to about 1, on a line of exactly `length` steps."""
    scaled = shares * length.astype(shares.dtype)
    whole = jnp.floor(scaled)
    fraction = ((scaled - whole) * 2.0**32).astype(jnp.uint32)
    ends = _running_sum_with_carry(whole.astype(jnp.int32), fraction)
    # Shares sum to 1 ± rounding. A stretch by so little is far below the precision of a float, but
    # what it adds is not, so that is computed instead; monotone, as it moves an end by less than
    # the end itself moves.
    total = ends[-1]
    excess = (total - length).astype(shares.dtype) / total.astype(shares.dtype)
    stretched = ends - jnp.round(ends.astype(shares.dtype) * excess).astype(jnp.int32)
    return jnp.where(ends == total, length, jnp.minimum(stretched, length))


def _sorted_points(rng_key: PRNGKeyArray, count: Array, num: int, bits: int) -> Array:
    """`count` of `num` uniform points on a line of count · 2^bits steps; the others at its end."""
    spacings = jax.random.exponential(rng_key, (num + 1,))
    spacings = jnp.where(jnp.arange(num + 1) <= count, spacings, 0.0)
    length = count << bits
    return jnp.minimum(_lay(spacings / jnp.sum(spacings), length)[:-1], length - 1)


def _owners(ends: Array, points: Array, num: int, bits: int) -> Array:
    """Whose share each point falls on: the first end beyond it.

    The particles that end in the point's own stratum are looked up, and bisected among; seldom
    more than a few (the guide table of Chen & Asau 1974).
    """
    before = _at_or_below(jnp.minimum(ends >> bits, num), num)
    stratum = jnp.clip(points >> bits, 0, num - 1)
    low = jnp.where(stratum > 0, before[stratum - 1], 0)
    # nobody need look beyond the last particle: some end lies past every point
    high = jnp.minimum(before[stratum], ends.shape[0] - 1)

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) >> 1
        beyond = ends[middle] > points
        open_ = low < high
        return (
            jnp.where(open_ & ~beyond, middle + 1, low),
            jnp.where(open_ & beyond, middle, high),
        )

    return lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))[0]


def _at_or_below(values: Int[Array, " particles"], num: int) -> Int[Array, " num"]:
    """How many values are at most j, for j = 0 … num - 1; values lie in 0 … num.

    Given the number of points below each particle's end, that is the owner of the j-th point.
    """
    histogram = jnp.zeros(num + 1, jnp.int32).at[values].add(1, mode="promise_in_bounds")
    return _running_sum(histogram[:-1])


def _running_sum(x: Int[Array, " n"]) -> Int[Array, " n"]:
    """Cumulative sum; on a CPU one pass, eight times faster there than XLA's parallel one."""

    def one_pass(x: Array) -> Array:
        def step(total: Array, item: Array) -> tuple[Array, Array]:
            return total + item, total + item

        return lax.scan(step, jnp.zeros((), x.dtype), x, unroll=UNROLL)[1]

    total: Array = lax.platform_dependent(x, cpu=one_pass, default=jnp.cumsum)
    return total


def _add_with_carry(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.int32), low


def _running_sum_with_carry(
    whole: Int[Array, " n"], fraction: UInt[Array, " n"]
) -> Int[Array, " n"]:
    """The whole part of the cumulative sum of whole + fraction / 2^32, exactly."""

    def one_pass(whole: Array, fraction: Array) -> Array:
        def step(
            total: tuple[Array, Array], item: tuple[Array, Array]
        ) -> tuple[tuple[Array, Array], Array]:
            total = _add_with_carry(total, item)
            return total, total[0]

        start = (jnp.zeros((), jnp.int32), jnp.zeros((), jnp.uint32))
        ends: Array = lax.scan(step, start, (whole, fraction), unroll=UNROLL)[1]
        return ends

    def in_parallel(whole: Array, fraction: Array) -> Array:
        ends: Array = lax.associative_scan(_add_with_carry, (whole, fraction))[0]
        return ends

    total: Array = lax.platform_dependent(whole, fraction, cpu=one_pass, default=in_parallel)
    return total
