"""Resampling schemes: systematic, stratified, multinomial and residual.

Each particle owns an interval, proportional to its weight, of a line of length `num`. The owners of
`num` sorted points on the line are the ancestors. At a million particles, cumulative weights in
single precision have errors of whole offspring. Positions on the line are therefore integers, 2^b
steps per offspring with num · 2^b below 2³¹. Weights are accumulated exactly and then rounded to
this grid, so that the intervals cover the line, particles of weight zero have empty intervals, and
the expected number of offspring is num · W_k to within one step.

Bisection would take log K passes over the memory. Instead, the points below the end of each
interval are counted, which for one point per stratum is a bit shift, and counts are turned into
ancestors by a scatter and a cumulative sum.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt

from retrodict._xla.tuning import RESAMPLING_UNROLL
from retrodict.particles.weights import normalise

# Positions stay below 2^30, so that weights whose sum exceeds 1 by rounding do not overflow.
POSITION_BITS = 30


class Resampler(Protocol):
    """Draws ancestors A_1 ≤ … ≤ A_num with unbiased numbers of offspring:

        E[ #{j : A_j = k} ] = num · w_k / Σ_i w_i

    Log weights need not be normalised. A particle of weight zero is never chosen, unless all
    weights are zero: then all particles are equally probable.
    """

    def __call__(
        self, rng_key: PRNGKeyArray, log_weights: Float[Array, " particles"], num: int, /
    ) -> Int[Array, " num"]:
        """Draw the ancestors."""


@partial(jax.jit, static_argnames="num")
def systematic(
    rng_key: PRNGKeyArray, log_weights: Float[Array, " particles"], num: int
) -> Int[Array, " num"]:
    """Systematic resampling: points j + U with one U (Carpenter, Clifford & Fearnhead 1999).

    Each particle has ⌊num · W_k⌋ or ⌈num · W_k⌉ offspring.
    """
    bits = _step_bits(num)
    ends = _interval_ends(log_weights, num, bits)
    offset = _random_steps(rng_key, (), bits)
    return _count_at_most((ends - offset + (1 << bits) - 1) >> bits, num)


@partial(jax.jit, static_argnames="num")
def stratified(
    rng_key: PRNGKeyArray, log_weights: Float[Array, " particles"], num: int
) -> Int[Array, " num"]:
    """Stratified resampling: one uniform point in each of num strata, j + U_j (Kitagawa 1996).

    The number of offspring differs from num · W_k by less than two.
    """
    bits = _step_bits(num)
    ends = _interval_ends(log_weights, num, bits)
    # The last interval ends where the last stratum does: stratum `num` contains no point.
    offsets = jnp.append(_random_steps(rng_key, (num,), bits), 0)
    stratum, remainder = ends >> bits, ends & ((1 << bits) - 1)
    return _count_at_most(stratum + (offsets[stratum] < remainder), num)


@partial(jax.jit, static_argnames="num")
def multinomial(
    rng_key: PRNGKeyArray, log_weights: Float[Array, " particles"], num: int
) -> Int[Array, " num"]:
    """Multinomial resampling: independent points, sorted by construction.

    They are drawn by exponential spacings (Devroye 1986, sec. V.3).
    """
    bits = _step_bits(num)
    ends = _interval_ends(log_weights, num, bits)
    points = _sorted_points(rng_key, jnp.asarray(num, jnp.int32), num, bits)
    return _owners(ends, points, num, bits)


@partial(jax.jit, static_argnames="num")
def residual(
    rng_key: PRNGKeyArray, log_weights: Float[Array, " particles"], num: int
) -> Int[Array, " num"]:
    """Residual resampling: ⌊num · W_k⌋ copies, the rest multinomial (Liu & Chen 1998)."""
    bits = _step_bits(num)
    steps = jnp.diff(_interval_ends(log_weights, num, bits), prepend=0)
    copies = steps >> bits
    ends = _cumulative_sum(steps & ((1 << bits) - 1))
    # The steps sum to num · 2^bits exactly, so the residuals sum to whole offspring.
    remaining = ends[-1] >> bits
    points = _sorted_points(rng_key, remaining, num, bits)
    extra = _owners(ends, points, num, bits)
    out_of_range = log_weights.shape[0]
    extra = jnp.where(jnp.arange(num) < remaining, extra, out_of_range)
    return _count_at_most(_cumulative_sum(copies.at[extra].add(1, mode="drop")), num)


RESAMPLERS: Mapping[str, Resampler] = MappingProxyType(
    {
        "systematic": systematic,
        "stratified": stratified,
        "multinomial": multinomial,
        "residual": residual,
    }
)


def resampler(choice: str | Resampler) -> Resampler:
    """Look up a resampling scheme by name; a callable is returned as it is."""
    if callable(choice):
        return choice
    if isinstance(choice, str) and choice in RESAMPLERS:
        return RESAMPLERS[choice]
    names = ", ".join(repr(name) for name in RESAMPLERS)
    raise ValueError(
        f"resampling={choice!r} is not a resampling scheme: use one of {names}, or a callable "
        "(rng_key, log_weights, num) -> ancestors"
    )


def _step_bits(num: int) -> int:
    """The largest b with num · 2^b ≤ 2^30."""
    if not 1 <= num <= 1 << (POSITION_BITS - 8):
        raise ValueError(
            f"cannot resample to {num} particles: use a number from 1 to {1 << POSITION_BITS - 8}"
        )
    return POSITION_BITS - (num - 1).bit_length()


def _random_steps(rng_key: PRNGKeyArray, shape: tuple[int, ...], bits: int) -> Array:
    """Uniform integers below 2^bits, the steps of one offspring."""
    return (jax.random.bits(rng_key, shape, jnp.uint32) >> (32 - bits)).astype(jnp.int32)


def _interval_ends(log_weights: Array, num: int, bits: int) -> Array:
    """End of each particle's interval on the line; the last is num · 2^bits."""
    log_normalised, log_mean = normalise(log_weights)
    uniform = jnp.full_like(log_normalised, 1.0 / log_weights.shape[0])
    shares = jnp.where(jnp.isneginf(log_mean), uniform, jnp.exp(log_normalised))
    return _cumulative_steps(shares, jnp.asarray(num << bits, jnp.int32))


def _cumulative_steps(shares: Float[Array, " n"], length: Int[Array, ""]) -> Int[Array, " n"]:
    """Cumulative shares, whose sum is about 1, as integers that end at exactly `length`."""
    scaled = shares * length.astype(shares.dtype)
    whole = jnp.floor(scaled)
    fraction = ((scaled - whole) * 2.0**32).astype(jnp.uint32)
    ends = _cumulative_sum_with_carry(whole.astype(jnp.int32), fraction)
    # Shares sum to 1 up to rounding. The factor that rescales them differs from 1 by less than the
    # precision of a float, so the correction is computed instead. It grows more slowly than the
    # ends, which therefore stay sorted.
    total = ends[-1]
    excess = (total - length).astype(shares.dtype) / total.astype(shares.dtype)
    rescaled = ends - jnp.round(ends.astype(shares.dtype) * excess).astype(jnp.int32)
    return jnp.where(ends == total, length, jnp.minimum(rescaled, length))


def _sorted_points(rng_key: PRNGKeyArray, count: Array, num: int, bits: int) -> Array:
    """`num` sorted points on a line of count · 2^bits steps: `count` uniform, others at its end."""
    spacings = jax.random.exponential(rng_key, (num + 1,))
    spacings = jnp.where(jnp.arange(num + 1) <= count, spacings, 0.0)
    length = count << bits
    return jnp.minimum(_cumulative_steps(spacings / jnp.sum(spacings), length)[:-1], length - 1)


def _owners(ends: Array, points: Array, num: int, bits: int) -> Array:
    """Index of the particle in whose interval each point lies: the first that ends beyond it.

    A table gives the particles whose intervals end in the point's stratum, seldom more than a few;
    bisection finds the one (guide table method, Chen & Asau 1974).
    """
    table = _count_at_most(jnp.minimum(ends >> bits, num), num)
    stratum = jnp.clip(points >> bits, 0, num - 1)
    low = jnp.where(stratum > 0, table[stratum - 1], 0)
    # The last interval ends beyond every point.
    high = jnp.minimum(table[stratum], ends.shape[0] - 1)

    def bisect(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) >> 1
        beyond = ends[middle] > points
        active = low < high
        return (
            jnp.where(active & ~beyond, middle + 1, low),
            jnp.where(active & beyond, middle, high),
        )

    return lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), bisect, (low, high))[0]


def _count_at_most(values: Int[Array, " particles"], num: int) -> Int[Array, " num"]:
    """Number of values that are at most j, for j = 0 … num - 1; values lie in 0 … num.

    If the values are the numbers of points below the end of each particle's interval, the result is
    the index of the particle that owns the j-th point.
    """
    histogram = jnp.zeros(num + 1, jnp.int32).at[values].add(1, mode="promise_in_bounds")
    return _cumulative_sum(histogram[:-1])


def _cumulative_sum(x: Int[Array, " n"]) -> Int[Array, " n"]:
    """Cumulative sum; on a CPU sequential, eight times as fast there as XLA's parallel scan."""

    def sequential(x: Array) -> Array:
        def step(total: Array, item: Array) -> tuple[Array, Array]:
            return total + item, total + item

        return lax.scan(step, jnp.zeros((), x.dtype), x, unroll=RESAMPLING_UNROLL)[1]

    total: Array = lax.platform_dependent(x, cpu=sequential, default=jnp.cumsum)
    return total


def _add_with_carry(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Sum of two fixed-point numbers, each a signed whole part and an unsigned 32-bit fraction."""
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.int32), low


def _cumulative_sum_with_carry(
    whole: Int[Array, " n"], fraction: UInt[Array, " n"]
) -> Int[Array, " n"]:
    """Exact whole part of the cumulative sum of whole + fraction / 2^32."""

    def sequential(whole: Array, fraction: Array) -> Array:
        def step(
            total: tuple[Array, Array], item: tuple[Array, Array]
        ) -> tuple[tuple[Array, Array], Array]:
            total = _add_with_carry(total, item)
            return total, total[0]

        start = (jnp.zeros((), jnp.int32), jnp.zeros((), jnp.uint32))
        ends: Array = lax.scan(step, start, (whole, fraction), unroll=RESAMPLING_UNROLL)[1]
        return ends

    def parallel(whole: Array, fraction: Array) -> Array:
        ends: Array = lax.associative_scan(_add_with_carry, (whole, fraction))[0]
        return ends

    total: Array = lax.platform_dependent(whole, fraction, cpu=sequential, default=parallel)
    return total
