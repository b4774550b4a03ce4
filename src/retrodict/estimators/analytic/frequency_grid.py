"""Fourier series on an even grid of frequencies, for densities of sums of independent terms.

Complex numbers are kept as real and imaginary parts: XLA evaluates its own complex type one number
at a time on the CPU.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._xla.batch_last import along_first

# The largest number of frequencies, and the last frequency in units of 1/σ, at which normal noise
# leaves exp(−3²/2), one hundredth, of the amplitude.
MAX_FREQUENCIES, CUTOFF = 64, 3.0
# The range that a series must cover, in standard deviations of the sum.
RANGE = 7.0


class Phasor(NamedTuple):
    """Complex numbers as real and imaginary parts."""

    real: Float[Array | np.ndarray, "frequencies *rows"]
    imaginary: Float[Array | np.ndarray, "frequencies *rows"]

    def __mul__(self, other: "Phasor") -> "Phasor":  # type: ignore[override]
        return Phasor(
            self.real * other.real - self.imaginary * other.imaginary,
            self.real * other.imaginary + self.imaginary * other.real,
        )

    def first(self, number: int) -> "Phasor":
        """The values at the first `number` frequencies."""
        return Phasor(self.real[:number], self.imaginary[:number])


class FrequencyGrid(NamedTuple):
    """An even grid of frequencies ω, starting at zero.

    The remaining sum after later blocks of terms has a smaller spread, so that a shorter period,
    and every second or fourth frequency, suffices for it. Frequencies are ordered such that these
    come first (bit-reversed order).

    Attributes:
        spacing: between neighbouring frequencies.
        numbers: of frequencies used for the remaining sum after each block but the last.
        blur: variance added to the noise where the grid cannot resolve it.
    """

    spacing: float
    numbers: tuple[int, ...]
    blur: float

    @property
    def parts(self) -> tuple[Int[np.ndarray, " coarse"], Int[np.ndarray, " fine"]]:
        """Every frequency is a sum of one number of each part, in units of the spacing."""
        number = max(self.numbers, default=1)
        low = _low_digits(number)
        fine = _bit_reversed((number - 1).bit_length() - low)
        return _bit_reversed(low), 2**low * fine[fine < -(-number // 2**low)]

    @property
    def multiples(self) -> Int[np.ndarray, " frequencies"]:
        """The frequencies in units of the spacing, in their order."""
        order: np.ndarray = np.add.outer(*self.parts).ravel()
        return order

    @property
    def frequencies(self) -> Float[np.ndarray, " frequencies"]:
        """All frequencies, in their order."""
        return self.spacing * self.multiples

    def period(self, number: int) -> float:
        """The period of a series over the first `number` frequencies."""
        return 2 * np.pi / self.spacing * number / max(self.numbers)

    def phase(self, at: Float[Array, "*rows"], number: int) -> Phasor:
        """exp(iω·at) at the first `number` frequencies.

        Frequencies are sums of two parts: sines are expensive, products are not.
        """
        coarse, fine = self.parts
        coarse = coarse[: -(-number // fine.size)]
        multiples = along_first(np.concatenate([coarse, fine]), at[None])
        circle = _unit_circle(jnp.multiply(multiples, at * (self.spacing / (2 * np.pi))))
        # A product by the identity keeps XLA from recomputing the sines at every use.
        identity = np.eye(multiples.shape[0], dtype=at.dtype)
        parts = [jnp.split(jnp.tensordot(identity, part, 1), [coarse.size]) for part in circle]
        both = Phasor(*(p[:, None] for p, _ in parts)) * Phasor(*(p[None] for _, p in parts))
        return Phasor(*(part.reshape(-1, *at.shape) for part in both)).first(number)

    def damped(self, series: Phasor, noise: Array) -> Phasor:
        """Multiply by the characteristic function of normal noise of variance `noise`.

        Densities are scaled so that the noise has its peak at one.
        """
        multiples = self.multiples[: series.real.shape[0]]
        squares = along_first((self.spacing * multiples).astype(noise.dtype) ** 2, noise[None])
        amplitude = jnp.exp(-0.5 * squares * (noise + self.blur))
        # All frequencies but zero also stand for their negative.
        amplitude = amplitude * along_first(np.where(multiples > 0, 2.0, 1.0), amplitude)
        amplitude = amplitude / jnp.sum(amplitude, 0)
        return Phasor(series.real * amplitude, series.imaginary * amplitude)


def fit_grid(
    effects: Sequence[float], starts: Sequence[int], spreads: Sequence[float], noise: float
) -> FrequencyGrid:
    """Choose a grid for the remaining sum after each block of terms but the last.

    A period must also cover what the block's own patterns may explain: a pattern that is off by
    one period would be mistaken for the right one.

    Args:
        effects: of the terms, in sampling order.
        starts: the first term of each block.
        spreads: typical standard deviations of the sum before each block but the last.
        noise: standard deviation of the noise where it is small.
    """
    ranges = [
        min(float(np.abs(effects[start:]).sum()), RANGE * spread) + RANGE * noise
        for start, spread in zip(starts[:-1], spreads, strict=True)
    ]
    if not ranges:
        return FrequencyGrid(1.0, (), 0.0)
    fewest = min(math.ceil(CUTOFF * ranges[0] / (2 * np.pi * noise)), MAX_FREQUENCIES)
    unit = 2 ** _low_digits(fewest)
    number = -(-fewest // unit) * unit
    period = max(ranges[0], 2 * np.pi * number * noise / CUTOFF)
    resolved = max(noise, CUTOFF * period / (2 * np.pi * number))
    largest_stride = number & -number  # the largest power of two that divides it
    strides = [2 ** int(math.log2(min(period / length, largest_stride))) for length in ranges]
    numbers = tuple(number // stride for stride in strides)
    return FrequencyGrid(2 * np.pi / period, numbers, resolved**2 - noise**2)


def _low_digits(number: int) -> int:
    """Binary digits of the coarse part of `number` frequencies."""
    digits = (number - 1).bit_length()
    return digits - digits // 2


def _bit_reversed(digits: int) -> Int[np.ndarray, " numbers"]:
    """All numbers of so many binary digits, in bit-reversed order."""
    order = np.zeros(1, int)
    for digit in reversed(range(digits)):
        order = np.concatenate([order, order + 2**digit])
    return order


def _unit_circle(turns: Float[Array, "*rows"]) -> Phasor:
    """exp(2πi·turns), eight times faster than XLA's sine, which accepts any angle."""
    # Angles of at most π/4 need few terms of the Taylor series; two doublings complete the turn.
    quarter = (turns - jnp.round(turns)) * (np.pi / 2)
    square = quarter**2
    sine = quarter * (1 - square / 6 * (1 - square / 20 * (1 - square / 42)))
    cosine = 1 - square / 2 * (1 - square / 12 * (1 - square / 30 * (1 - square / 56)))
    for _ in range(2):
        sine, cosine = 2 * sine * cosine, 1 - 2 * sine**2
    return Phasor(cosine, sine)
