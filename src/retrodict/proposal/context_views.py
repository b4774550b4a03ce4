"""Arrays of values in; the part that one copy of a factor sees out, nested as sets and series are.

A `Leaf` is one array with a way of looking at each of its index axes: at the copy's own element, at
a group of elements, at all of them. Leaves that share a group stand below a `Branch`.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray
from scipy.sparse import csr_array

from retrodict.estimators.encoders import Context, Elements
from retrodict.graph.element_covariates import CovariateKey
from retrodict.proposal.scope import Scope


class InputName(NamedTuple):
    """Names an input of a network; no site's name can collide with another kind of input.

    Attributes:
        kind: of the input.
        name: of the site, the leaf of a carry, the covariate, or the plate.
        detail: further distinction: how far in time an entry lies from the copy's own step, or the
            groups that a plate's elements are assigned to.
    """

    kind: Literal["site", "carry", "constants", "parents", "plate", "members", "group", "time"]
    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}{self.detail}"


class SiteSource(NamedTuple):
    """An array of the context that is a site's value."""

    site: str

    def get(self, scope: Scope) -> Array:
        """The array."""
        return jnp.asarray(scope.values[self.site])


class CarrySource(NamedTuple):
    """An array of the context that is a leaf of a scan's carry."""

    key: str

    def get(self, scope: Scope) -> Array:
        """The array."""
        return scope.carries[self.key]


class CovariateSource(NamedTuple):
    """An array of the context that distinguishes elements."""

    key: CovariateKey

    def get(self, scope: Scope) -> Array:
        """The array."""
        return scope.covariates[self.key]


Source: TypeAlias = SiteSource | CarrySource | CovariateSource


class Group(NamedTuple):
    """An axis that is not looked at element by element: a set, or a series in time.

    Attributes:
        name: of the input.
        plate: the plate that it runs along, if it is a set.
        ordered: whether it is a series.
    """

    name: InputName
    plate: str | None = None
    ordered: bool = False


class Aligned(NamedTuple):
    """Take the element at the copy's own index, or at a distance from it."""

    copy_axis: int
    offset: int = 0


class Whole(NamedTuple):
    """Keep all elements; of a series, those at a distance of at least `since` from one's own step.

    `since` counts in the direction of time, which runs from the last element to the first where
    `reverse` is set.
    """

    group: Group
    since: int | None = None
    reverse: bool = False


class Members:
    """Keep the elements that belong to the copy, by a constant table with a row for each copy."""

    def __init__(self, group: Group, copy_axis: int | None, matrix: csr_array) -> None:
        self.group, self.copy_axis = group, copy_axis
        self.table, self.mask = _padded(matrix)


class Grouped:
    """Replace an axis by two: the groups that a constant index makes, and their members."""

    def __init__(self, outer: Group, inner: Group, matrix: csr_array) -> None:
        self.outer, self.inner = outer, inner
        self.table, self.mask = _padded(matrix)


Pick: TypeAlias = Aligned | Whole | Members | Grouped


def membership(owner: NDArray[np.int64], number: int) -> csr_array:
    """A row for each of `number` groups, true at the elements that it owns; −1 owns none."""
    owned = owner >= 0
    ones = np.ones(int(owned.sum()), bool)
    return csr_array((ones, (owner[owned], np.flatnonzero(owned))), shape=(number, len(owner)))


def _padded(matrix: csr_array) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The columns of each row's nonzeros, filled up to equal length."""
    counts = np.diff(matrix.indptr)
    width = max(int(counts.max(initial=0)), 1)
    place = np.arange(width) < counts[:, None]
    table = np.zeros((len(counts), width), np.int32)
    table[place] = matrix.indices
    return table, place


@dataclass(frozen=True)
class Leaf:
    """One array of the context: which values, and how each of its index axes is looked at."""

    name: InputName
    source: Source
    support: Any
    shape: tuple[int, ...]  # of the array, without a batch
    picks: Mapping[int, Pick]  # by axis of the array

    def select(
        self, scope: Scope, index: Sequence[Int[Array, ""]]
    ) -> tuple[Array, list[Group], dict[Group, Array]]:
        """The elements seen by the copy at `index`, the groups of its first axes, their masks."""
        array = self.source.get(scope)
        kept: dict[int, list[Group]] = {}
        masks: dict[Group, Array] = {}
        for axis in sorted(self.picks, reverse=True):
            match self.picks[axis]:
                case Aligned(copy_axis, offset):
                    place = index[copy_axis] + offset
                    inside = (place >= 0) & (place < array.shape[axis])
                    taken = jnp.take(array, jnp.clip(place, 0, array.shape[axis] - 1), axis)
                    array = taken if offset == 0 else jnp.where(inside, taken, 0)
                case Whole(group, since, reverse):
                    kept[axis] = [group]
                    if since is not None:
                        distance = jnp.arange(array.shape[axis]) - index[0]
                        masks[group] = (-distance if reverse else distance) >= since
                case Members() as members:
                    row = 0 if members.copy_axis is None else index[members.copy_axis]
                    array = jnp.take(array, jnp.asarray(members.table)[row], axis)
                    kept[axis] = [members.group]
                    masks[members.group] = jnp.asarray(members.mask)[row]
                case Grouped() as grouped:
                    array = jnp.take(array, grouped.table, axis)
                    kept[axis] = [grouped.outer, grouped.inner]
                    masks[grouped.inner] = jnp.asarray(grouped.mask)
        groups: list[Group] = []
        places: list[int] = []
        position = 0
        for axis in range(len(self.shape)):
            if axis in kept:
                for group in kept[axis]:
                    groups.append(group)
                    places.append(position)
                    position += 1
            elif axis not in self.picks:
                position += 1
        return jnp.moveaxis(array, places, range(len(places))), groups, masks

    @property
    def event_shape(self) -> tuple[int, ...]:
        """What is left when every index axis has been looked at."""
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.picks)

    @property
    def groups(self) -> list[Group]:
        """The groups of its axes, in the order of the array."""
        found: list[Group] = []
        for axis in sorted(self.picks):
            pick = self.picks[axis]
            if isinstance(pick, Whole | Members):
                found.append(pick.group)
            elif isinstance(pick, Grouped):
                found += [pick.outer, pick.inner]
        return found


@dataclass(frozen=True)
class Branch:
    """Leaves that share a group, below it."""

    group: Group
    children: tuple["Leaf | Branch", ...]


def leaves_of(tree: Sequence[Leaf | Branch]) -> list[Leaf]:
    """All leaves, in order."""
    return [
        leaf
        for node in tree
        for leaf in ([node] if isinstance(node, Leaf) else leaves_of(node.children))
    ]


def read(
    tree: Sequence[Leaf | Branch],
    scope: Scope,
    index: Sequence[Int[Array, ""]],
    above: tuple[Group, ...] = (),
) -> Context:
    """What the copy at `index` sees, by input; `above` are the groups that hold these."""
    inputs: dict[Hashable, Any] = {}
    for node in tree:
        if isinstance(node, Leaf):
            array, groups, _ = node.select(scope, index)
            places = [groups.index(group) for group in above]
            inputs[node.name] = jnp.moveaxis(array, places, range(len(places)))
        else:
            inside = (*above, node.group)
            elements = read(node.children, scope, index, inside)
            inputs[node.group.name] = Elements(elements, _mask(node, scope, index, inside))
    return inputs


def _mask(
    branch: Branch, scope: Scope, index: Sequence[Int[Array, ""]], above: tuple[Group, ...]
) -> Array | None:
    array, groups, masks = leaves_of(branch.children)[0].select(scope, index)
    mask = masks.get(branch.group)
    if mask is None:
        return None
    sizes = tuple(array.shape[groups.index(group)] for group in above)
    return jnp.broadcast_to(mask, sizes)
