"""`jax.vmap` that holds only a bounded number of rows in memory at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from retrodict._xla.scan import sequential_map
from retrodict._xla.tuning import WORKING_BYTES


def batched_vmap(fn: Callable[..., Any], bytes_per_row: int, *arguments: Any) -> Any:
    """The function of every row of the arguments, for as many rows at a time as memory allows.

    Args:
        fn: function of one row of each argument.
        bytes_per_row: memory that one evaluation takes.
        arguments: trees of arrays with the rows on the first axis.
    """
    num_rows = jax.tree.leaves(arguments)[0].shape[0]
    fewest = min(-(-num_rows * bytes_per_row // WORKING_BYTES), num_rows)
    batched = jax.vmap(fn)
    if fewest <= 1:
        return batched(*arguments)
    # Batches of equal size need to be compiled only once.
    even = (number for number in range(fewest, 2 * fewest) if num_rows % number == 0)
    num_batches = next(even, fewest)
    size = num_rows // num_batches
    in_batches = num_batches * size
    batches = jax.tree.map(
        lambda a: a[:in_batches].reshape(num_batches, size, *a.shape[1:]), arguments
    )
    results = sequential_map(lambda batch: batched(*batch), batches)
    results = jax.tree.map(lambda a: a.reshape(in_batches, *a.shape[2:]), results)
    if in_batches == num_rows:
        return results
    rest = batched(*jax.tree.map(lambda a: a[in_batches:], arguments))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), results, rest)
