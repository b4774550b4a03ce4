"""Enumeration of the patterns of a few bits, and division of many bits into blocks."""

from itertools import product

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def patterns(span: int) -> Float[np.ndarray, "patterns bits"]:
    """All values of `span` bits, the last bit changing fastest."""
    return np.array(list(product((0.0, 1.0), repeat=span)))


def pattern_number(bits: Float[Array, "bits *rows"]) -> Float[Array, "*rows"]:
    """The position of the pattern of some bits in `patterns`."""
    return jnp.tensordot(2.0 ** np.arange(bits.shape[0])[::-1], bits, 1)


def block_sizes(bits: int, largest: int) -> tuple[int, ...]:
    """Divide bits into blocks of at most `largest`, none of a single bit if there are others."""
    rest = bits % largest
    if rest == 1 < bits:
        rest += largest
        return (largest,) * ((bits - rest) // largest) + (rest - rest // 2, rest // 2)
    return (largest,) * (bits // largest) + (rest,) * (rest > 0)
