"""A function of many rows in; the same of one row, which `jax.vmap` turns back into that, out.

However many times a function is vectorised, over copies, particles and data sets, there is one axis
of rows, and it comes last. Vectorised as usual, rows are outermost, and what lies side by side are
the few parameters of a head or the few units of a label: a step that is to be worked out for a
hundred particles then takes several times as long.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

Shared = TypeVar("Shared")
Given = TypeVar("Given")
Found = TypeVar("Found")

# How many rows go through a processor's vectors abreast. What is left over goes one by one, or
# nearly, which of a few dozen rows can take longer than all the others.
ABREAST = 8


def by_rows(fn: Callable[[Shared, Given], Found]) -> Callable[[Shared, Given], Found]:
    """Make a function of many rows one of a single row.

    Args:
        fn: takes what all rows share, and arrays whose last axis is that of rows, or has size one
            where all rows have it in common; gives arrays whose last axis is that of rows.
    """

    @jax.custom_batching.custom_vmap
    def many(shared: Shared, given: Given) -> Found:
        rows = max(leaf.shape[-1] for leaf in jax.tree.leaves(given))
        beside = -rows % ABREAST if rows > ABREAST else 0

        def filled(leaf: Array) -> Array:
            if leaf.shape[-1] != rows:
                return leaf
            return jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, beside)], mode="edge")

        if not beside:
            return fn(shared, given)
        found: Found = jax.tree.map(
            lambda leaf: leaf[..., :rows], fn(shared, jax.tree.map(filled, given))
        )
        return found

    @many.def_vmap
    def vectorised(
        size: int, batched: tuple[PyTree, PyTree], shared: Shared, given: Given
    ) -> tuple[Found, PyTree]:
        if any(jax.tree.leaves(batched[0])):
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
            found = jax.vmap(fn, axes, axis_size=size)(shared, given)
            return found, jax.tree.map(lambda _: True, found)
        number = max(leaf.shape[-1] for leaf in jax.tree.leaves(given))

        def merged(leaf: Array, is_batched: bool) -> Array:
            if not is_batched and leaf.shape[-1] == 1:
                return leaf
            if not is_batched:
                leaf = jnp.broadcast_to(leaf, (size, *leaf.shape))
            leaf = jnp.moveaxis(leaf, 0, -2)
            leaf = jnp.broadcast_to(leaf, (*leaf.shape[:-1], number))
            return leaf.reshape(*leaf.shape[:-2], size * number)

        def parted(leaf: Array) -> Array:
            return jnp.moveaxis(leaf.reshape(*leaf.shape[:-1], size, number), -2, 0)

        found = jax.tree.map(parted, many(shared, jax.tree.map(merged, given, batched[1])))
        return found, jax.tree.map(lambda _: True, found)

    def one(shared: Shared, given: Given) -> Found:
        found = many(shared, jax.tree.map(lambda leaf: jnp.asarray(leaf)[..., None], given))
        made: Found = jax.tree.map(lambda leaf: leaf[..., 0], found)
        return made

    return one


def side_by_side(parts: Sequence[Array]) -> Array:
    """Arrays one after the other along their first axis; rows that are shared are repeated."""
    if not parts:
        return jnp.zeros(0)
    if parts[0].ndim == 1:
        return jnp.concatenate(parts)
    rows = max(part.shape[-1] for part in parts)
    whole = [jnp.broadcast_to(part, (*part.shape[:-1], rows)) for part in parts]
    return jnp.concatenate(whole)


def total(values: Float[Array, "first *rows"]) -> Float[Array, "*rows"]:
    """The sum over the first axis.

    Of many rows it is written as a product, which the compiler does not merge with what comes
    before: that would be computed inside the sum, one number at a time.
    """
    if values.ndim == 1:
        return jnp.sum(values)
    return jnp.ones(values.shape[0], values.dtype) @ values


def sum_of_all(values: Float[Array, "..."]) -> Float[Array, ""]:
    """The sum over all axes, in a function that is yet to be vectorised; a product as well."""
    return jnp.ravel(values) @ jnp.ones(values.size, values.dtype)
