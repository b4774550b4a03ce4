"""The part of arrays of values that one copy of a factor sees, nested as sets and series are.

A `Leaf` is one array with the relation that says which of its elements a copy sees. Where a copy
sees more than one position along an axis, the axis is a group: a set or a series. Leaves that share
a group stand below a `Branch`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from retrodict.estimators.encoders import Context, Elements
from retrodict.graph.index_atoms import Atom, Table, Window, mean_number, satisfied
from retrodict.graph.index_relations import Relation
from retrodict.proposal.scope import Scope, Source

Position: TypeAlias = Int[Array, ""]
Masks: TypeAlias = dict[int, Bool[Array, " positions"]]


def select(relation: Relation, array: Array, index: Sequence[Position]) -> tuple[Array, Masks]:
    """The elements of an array that go with one element of the left array of a relation.

    Args:
        relation: its right axes are the first axes of the array.
        array: the right array.
        index: of the element of the left array.

    Returns:
        The array with axes of one position removed and others cut to positions that may be related;
        and, by axis, which of these are related, unless all are. Where a removed axis or the index
        itself says that nothing is related, the array is zero.
    """
    term = relation.hull
    related = [_holds(atom, index, 0) for atom in term if atom.right is None]
    masks: Masks = {}
    for axis, size in sorted(relation.right.items(), reverse=True):
        atoms = [atom for atom in term if atom.right == axis]
        aligned = next(filter(is_position, atoms), None)
        if aligned is not None:
            position = _position(aligned, index) + int(aligned.lo)
            rest = [atom for atom in atoms if atom != aligned]
            if aligned.lo != 0 or relation.left[aligned.left or 0] > size:
                rest.append(Window(None, axis, 0, size - 1))
            related += [_holds(atom, index, position) for atom in rest]
            array = jnp.take(array, jnp.clip(position, 0, size - 1), axis)
        elif atoms:
            positions, conditions = _candidates(atoms, index, size)
            if len(positions) < size or isinstance(positions, jnp.ndarray):
                array = jnp.take(array, jnp.clip(positions, 0, size - 1), axis)
            if conditions:
                masks[axis] = reduce(and_, conditions)
    return jnp.where(reduce(and_, related), array, 0) if related else array, masks


def is_position(atom: Atom) -> TypeGuard[Window]:
    """Whether an atom leaves one right position for each position along an axis of the left."""
    return isinstance(atom, Window) and atom.left is not None and atom.lo == atom.hi


def _candidates(
    atoms: Sequence[Atom], index: Sequence[Position], size: int
) -> tuple[Array | np.ndarray, list[Bool[Array, " positions"]]]:
    """Positions along an axis among which all related ones are, and conditions that tell which."""
    chosen = min(atoms, key=lambda atom: mean_number(atom, size))
    rest = [atom for atom in atoms if atom != chosen]
    conditions = []
    everywhere = np.arange(size)
    positions: Array | np.ndarray = everywhere
    if chosen.left is None:
        positions = everywhere[satisfied(chosen, np.zeros_like(everywhere), everywhere)]
    elif isinstance(chosen, Table):
        positions, mask = (jnp.asarray(part)[_position(chosen, index)] for part in chosen.padded)
        conditions.append(mask)
    elif mean_number(chosen, size) < size:
        offsets = np.arange(int(chosen.lo), int(chosen.hi) + 1)
        positions = _position(chosen, index) + offsets
        rest.append(Window(None, chosen.right, 0, size - 1))
    else:
        rest.append(chosen)
    return positions, conditions + [_holds(atom, index, positions) for atom in rest]


def _position(atom: Atom, index: Sequence[Position]) -> Position | int:
    """The position along the left axis of an atom."""
    return 0 if atom.left is None else index[atom.left]


def _holds(atom: Atom, index: Sequence[Position], positions: Any) -> Bool[Array, " positions"]:
    """Which right positions go with the position of an element of the left array."""
    here = _position(atom, index)
    if isinstance(atom, Window):
        offsets = jnp.asarray(positions) - here
        return (offsets >= atom.lo) & (offsets <= atom.hi)
    columns, mask = (jnp.asarray(part)[here] for part in atom.padded)
    return jnp.any((jnp.asarray(positions)[..., None] == columns) & mask, -1)


class InputName(NamedTuple):
    """Names an input of a network; no site's name can collide with another kind of input.

    Attributes:
        kind: of the input.
        name: of the site, the leaf of a carry, the covariate, or the plate.
        detail: further distinction: how far in time an entry lies from the copy's own step, or the
            groups that a plate's elements are assigned to.
        number: of inputs that are equal in all of these.
    """

    kind: Literal["site", "carry", "constants", "parents", "plate", "members", "group", "time"]
    name: str
    detail: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name}{self.detail}"


class Group(NamedTuple):
    """An axis along which a copy sees several positions: a set, or a series in time.

    Attributes:
        name: of the input.
        plate: the plate that it runs along, if it is a set.
        ordered: whether it is a series.
    """

    name: InputName
    plate: str | None = None
    ordered: bool = False


class View(NamedTuple):
    """How an axis of an array is presented.

    Attributes:
        groups: none where one position is seen, one group, or an outer and an inner group.
        members: for two groups, the table from the outer group to the positions along the axis.
    """

    groups: tuple[Group, ...] = ()
    members: Table | None = None


@dataclass(frozen=True)
class Leaf:
    """One array of the context.

    Attributes:
        name: of the input.
        source: where the array comes from.
        support: of its elements.
        shape: of the array, without a batch.
        axes: its axes along which elements are selected; the others belong to one element.
        relation: from the copies to these axes: which elements a copy sees.
        views: how each of these axes is presented.
    """

    name: InputName
    source: Source
    support: Any
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    relation: Relation
    views: tuple[View, ...]

    def select(
        self, scope: Scope, index: Sequence[Position]
    ) -> tuple[Array, dict[Group, Bool[Array, "..."]]]:
        """The elements seen by the copy at `index`, with groups as first axes, and their masks."""
        array = jnp.moveaxis(scope.array(self.source), self.axes, range(len(self.axes)))
        array, by_axis = select(self.relation, array, index)
        masks = {self.views[axis].groups[-1]: mask for axis, mask in by_axis.items()}
        position = 0
        for groups, members in self.views:
            if members is not None:
                columns, entries = members.padded
                array = jnp.take(array, columns, position)
                masks[groups[-1]] = jnp.asarray(entries)
            position += len(groups)
        return array, masks

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of one element."""
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.axes)

    @property
    def groups(self) -> list[Group]:
        """The groups of its axes, in the order of the array."""
        return [group for view in self.views for group in view.groups]


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
    index: Sequence[Position],
    above: tuple[Group, ...] = (),
) -> Context:
    """What the copy at `index` sees, by input; `above` are the groups that hold these."""
    inputs: dict[Hashable, Any] = {}
    for node in tree:
        if isinstance(node, Leaf):
            array, _ = node.select(scope, index)
            places = [node.groups.index(group) for group in above]
            inputs[node.name] = jnp.moveaxis(array, places, range(len(places)))
        else:
            inside = (*above, node.group)
            elements = read(node.children, scope, index, inside)
            inputs[node.group.name] = Elements(elements, _mask(node, scope, index, inside))
    return inputs


def _mask(
    branch: Branch, scope: Scope, index: Sequence[Position], above: tuple[Group, ...]
) -> Array | None:
    """Which positions of a group any of its leaves shows; None if all of them."""
    leaves = leaves_of(branch.children)
    selected = [leaf.select(scope, index) for leaf in leaves]
    masks = [masks[branch.group] for _, masks in selected if branch.group in masks]
    if len(masks) < len(leaves):
        return None
    array, groups = selected[0][0], leaves[0].groups
    sizes = tuple(array.shape[groups.index(group)] for group in above)
    return jnp.broadcast_to(reduce(or_, masks), sizes)
