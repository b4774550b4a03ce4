"""A tree of arrays and rows of stacks in; the same, out of a compiled function, out.

To cut a stack into a thousand outputs takes XLA longer than all else: a program for each. So stacks
leave a compiled function whole, and are cut up outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from retrodict._xla.stacked import Row


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Packed:
    """A tree of arrays of which some are rows of the same few stacks.

    Attributes:
        arrays: the stacks, and arrays by themselves.
        places: for each leaf of the tree, which array, and which row of it, if it is one.
        tree: the structure.
    """

    arrays: tuple[Any, ...]
    places: tuple[tuple[int, int | None, bool], ...]
    tree: Any

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """For JAX."""
        return self.arrays, (self.places, self.tree)

    @classmethod
    def tree_unflatten(cls, rest: Any, arrays: tuple[Any, ...]) -> "Packed":
        """For JAX."""
        return cls(tuple(arrays), *rest)

    @staticmethod
    def of(leaves: Sequence["Array | Row"], tree: Any) -> "Packed":
        """What a `Rolled` function has found."""
        arrays: list[Any] = []
        numbers: dict[int, int] = {}
        places: list[tuple[int, int | None, bool]] = []
        for leaf in leaves:
            array = leaf.stack if isinstance(leaf, Row) else leaf
            if id(array) not in numbers:
                numbers[id(array)] = len(arrays)
                arrays.append(array)
            row = (leaf.place, leaf.kept) if isinstance(leaf, Row) else (None, False)
            places.append((numbers[id(array)], *row))
        return Packed(tuple(arrays), tuple(places), tree)

    def unpacked(self) -> Any:
        """The tree."""
        cut = {number for number, row, _ in self.places if row is not None}
        # to cut up what lies in this machine's memory takes no compiling
        rows = {number: np.asarray(self.arrays[number]) for number in cut}

        def leaf(number: int, row: int | None, kept: bool) -> Any:
            if row is None:
                return self.arrays[number]
            return rows[number][row : row + 1] if kept else rows[number][row]

        return jax.tree.unflatten(self.tree, [leaf(*place) for place in self.places])
