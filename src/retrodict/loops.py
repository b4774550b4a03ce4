"""A step and what it takes each time in; all steps, one after the other, out.

XLA merges the reading of an entry from a series, and the writing of one into another, with whatever
is computed from the entry or for it; and what reads or writes at a place that is known only when it
runs is worked out one number at a time instead of in vectors. So entries are handed
from step to step as they are: read at the end of the step before, and written in the step after.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, PyTree

State = TypeVar("State")


def scan(
    step: Callable[[State, Any], tuple[State, Any]],
    start: State,
    entries: PyTree,
    *,
    reverse: bool = False,
) -> tuple[State, Any]:
    """As `jax.lax.scan`; faster where what is computed from an entry is more than products."""
    length = jax.tree.leaves(entries)[0].shape[0]
    if length < 2:
        return jax.lax.scan(step, start, entries, reverse=reverse)

    def at(place: Array | int) -> PyTree:
        def entry(leaf: Array) -> Array:
            found: Array = jax.lax.dynamic_index_in_dim(leaf, place, 0, keepdims=False)
            return found

        return jax.tree.map(entry, entries)

    first = at(length - 1 if reverse else 0)
    # traced once, though what it finds has to be known before
    traced, (_, shapes) = jax.make_jaxpr(step, return_shape=True)(start, first)
    again = jaxpr_as_fun(traced)
    form = jax.tree.structure((start, shapes))

    # the step after a place in time, and the one before; beyond the ends it does not matter which
    after, before = (-1, 1) if reverse else (1, -1)

    def written(series: PyTree, found: PyTree, place: Array | int) -> PyTree:
        def put(leaf: Array, entry: Array) -> Array:
            done: Array = jax.lax.dynamic_update_index_in_dim(leaf, entry, place, 0)
            return done

        return jax.tree.map(put, series, found)

    def handing_on(held: Any, place: Array) -> tuple[Any, None]:
        state, entry, found, series = held
        state, new = jax.tree.unflatten(form, again(*jax.tree.leaves((state, entry))))
        series = written(series, found, jnp.clip(place + before, 0, length - 1))
        return (state, at(jnp.clip(place + after, 0, length - 1)), new, series), None

    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    series = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape), leaf.dtype), shapes)
    (state, _, last, series), _ = jax.lax.scan(
        handing_on, (start, first, blank, series), jnp.arange(length), reverse=reverse
    )
    return state, written(series, last, 0 if reverse else length - 1)


def one_by_one(fn: Callable[[Any], Any], entries: PyTree) -> Any:
    """As `jax.lax.map`."""
    return scan(lambda state, entry: (state, fn(entry)), (), entries)[1]
