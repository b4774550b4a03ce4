"""What an array depends on: relations of its elements to those of the inputs of a function."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from retrodict.graph.index_atoms import Atom, Window
from retrodict.graph.index_relations import Relation


@dataclass(frozen=True)
class Dependence:
    """The relations of one array to every source that it depends on."""

    sources: Mapping[Hashable, Relation]

    @staticmethod
    def nothing() -> "Dependence":
        """The dependence of an array that depends on no source."""
        return Dependence({})

    def __or__(self, other: "Dependence") -> "Dependence":
        if not other.sources:
            return self
        merged = dict(self.sources)
        for source, relation in other.sources.items():
            merged[source] = merged[source] | relation if source in merged else relation
        return Dependence(merged)

    def through(self, relation: Relation) -> "Dependence":
        """The dependence of a result that is related to this array."""
        composed = {name: relation.compose(source) for name, source in self.sources.items()}
        return Dependence({name: source for name, source in composed.items() if source})


@dataclass(frozen=True)
class Abstract:
    """An array of which only the dependence and the shape are computed.

    Attributes:
        dependence: what the array depends on.
        shape: the shape of the array.
        constant: the array itself, if it is a constant.
        by_step: inside of a scan, the axis of its steps and the values at all steps, if they are
            constants.
    """

    dependence: Dependence
    shape: tuple[int, ...]
    constant: "Lazy | None" = None
    by_step: "tuple[int, Lazy] | None" = None

    @property
    def value(self) -> NDArray[Any] | None:
        """The array itself, if it is a constant."""
        return None if self.constant is None else self.constant.value

    def take(self, atoms: Iterable[Atom], shape: Sequence[int]) -> Dependence:
        """The dependence of a result of this shape that atoms relate to the array."""
        if not self.dependence.sources:
            return self.dependence
        return self.dependence.through(Relation.of(atoms, shape, self.shape))

    def keep(self, axes: Mapping[int, int], shape: Sequence[int]) -> Dependence:
        """The dependence of a result of this shape with axes kept whole: old axis → new axis."""
        return self.take([Window(new, old) for old, new in axes.items()], shape)


class Lazy:
    """A constant that is computed on first use."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute

    @cached_property
    def value(self) -> NDArray[Any]:
        """The constant."""
        with jax.ensure_compile_time_eval():
            return np.asarray(self._compute())


def together(parts: Iterable[Dependence]) -> Dependence:
    """The dependence on everything that any of the parts depends on."""
    return reduce(or_, parts, Dependence.nothing())
