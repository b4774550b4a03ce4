"""A factor and the values of all sites in; what its network draws, and what it sees, out.

Parents aligned with a copy of the factor are plain inputs. Whole plates become sets, plates
within plates sets of sets; observations grouped by a constant index are pooled by group. A whole
series becomes a series. What the steps before hold is the scan's carry. Elements that differ by
constants of the model bring their design. Paige & Wood (2016), sec. 3.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray
from numpyro.distributions import constraints
from scipy.sparse import csr_array

from retrodict.factors import Factor, Input
from retrodict.graph import Graph, Site
from retrodict.meets import NO_AXIS, SAME, Constraint, Table
from retrodict.networks import Latent, Series, Set, Value
from retrodict.relations import Table as IndexTable
from retrodict.relations import Window

Values: TypeAlias = Mapping[str, Array]
Spec: TypeAlias = Value | Set | Series
Nested: TypeAlias = dict[str, Any]


class Group(NamedTuple):
    """An axis that is not looked at element by element: a set, or a series in time."""

    name: str
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

    label: str
    key: str
    support: Any
    shape: tuple[int, ...]  # of the array, without a batch
    picks: Mapping[int, Pick]  # by axis of the array

    def select(
        self, values: Values, index: Sequence[Int[Array, ""]]
    ) -> tuple[Array, list[Group], dict[Group, Array]]:
        """The elements seen by the copy at `index`, the groups of its first axes, their masks."""
        array = jnp.asarray(values[self.key])
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


@dataclass(frozen=True)
class Assembly:
    """How the values of sites become rows for a factor's network.

    Attributes:
        factor: which factor.
        copies: sizes of what it is repeated over: time, if any, then plates.
        latents, inputs: what the network is built for.
        own_axes: for each latent, the axis of its value that each copy axis runs along.
    """

    factor: Factor
    copies: tuple[int, ...]
    latents: tuple[Latent, ...]
    inputs: tuple[Spec, ...]
    own_axes: tuple[tuple[int, ...], ...]
    tree: tuple[Leaf | Branch, ...]

    def x(self, values: Values, index: Sequence[Int[Array, ""]]) -> dict[str, Array]:
        """The latents of one copy, by label."""
        found = {}
        for latent, name, axes in zip(
            self.latents, self.factor.latents, self.own_axes, strict=True
        ):
            array = jnp.asarray(values[name])
            for copy_axis, axis in sorted(enumerate(axes), key=lambda pair: -pair[1]):
                array = jnp.take(array, index[copy_axis], axis)
            found[latent.name] = array
        return found

    def context(
        self, values: Values, index: Sequence[Int[Array, ""]], summaries: Values | None = None
    ) -> Nested:
        """What one copy sees; series may come already summarised."""
        summaries = summaries or {}
        rest = [n for n in self.tree if isinstance(n, Leaf) or n.group.name not in summaries]
        return _nested(rest, values, index, ()) | dict(summaries)

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the inputs that are the rest of a series, from a copy's own step on."""
        return tuple(
            node.group.name
            for node in self.tree
            if isinstance(node, Branch) and node.group.ordered and self.factor.time
        )

    def whole_series(
        self, name: str, values: Values, index: Sequence[Int[Array, ""]], *, masked: bool
    ) -> Nested:
        """One such series; as the copy at `index` sees it, or all of it."""
        branch = next(n for n in self.tree if isinstance(n, Branch) and n.group.name == name)
        found: Nested = _nested((branch,), values, index, ())[name]
        if not masked:
            found.pop("mask", None)
        return found

    def keys(self) -> set[str]:
        """Names of the values that the context is made of."""
        return {leaf.key for leaf in _leaves(self.tree)}

    def gather(self, x: Mapping[str, Array], sites: Mapping[str, Site]) -> dict[str, Array]:
        """Values of the latent sites from those of all copies, copy axes first."""
        found = {}
        for latent, name, axes in zip(
            self.latents, self.factor.latents, self.own_axes, strict=True
        ):
            array = jnp.moveaxis(x[latent.name], range(len(axes)), axes)
            found[name] = array.reshape(sites[name].shape).astype(sites[name].dtype)
        return found


def _leaves(tree: Sequence[Leaf | Branch]) -> list[Leaf]:
    return [
        leaf
        for node in tree
        for leaf in ([node] if isinstance(node, Leaf) else _leaves(node.children))
    ]


def _nested(
    tree: Sequence[Leaf | Branch],
    values: Values,
    index: Sequence[Int[Array, ""]],
    above: tuple[Group, ...],
) -> Nested:
    found: Nested = {}
    for node in tree:
        if isinstance(node, Leaf):
            array, groups, _ = node.select(values, index)
            places = [groups.index(group) for group in above]
            found[node.label] = jnp.moveaxis(array, places, range(len(places)))
            continue
        inner = _nested(node.children, values, index, (*above, node.group))
        mask = _mask(node, values, index, (*above, node.group))
        if mask is not None:
            inner["mask"] = mask
        found[node.group.name] = inner
    return found


def _mask(
    branch: Branch, values: Values, index: Sequence[Int[Array, ""]], above: tuple[Group, ...]
) -> Array | None:
    array, groups, masks = _leaves(branch.children)[0].select(values, index)
    mask = masks.get(branch.group)
    if mask is None:
        return None
    sizes = tuple(array.shape[groups.index(group)] for group in above)
    return jnp.broadcast_to(mask, sizes)


def assemble(graph: Graph, factor: Factor, designs: Values) -> Assembly:
    """Work out how a factor's network gets its inputs.

    Args:
        graph: the model's.
        factor: one of its inverse.
        designs: for sites whose elements differ by constants, what tells them apart.
    """
    first = graph.sites[factor.latents[0]]
    free = [axis for axis, plate in enumerate(first.plates) if plate in factor.plates]
    plate_axes = first.axes[1:] if first.time else first.axes
    copy_axes = ((0,) if factor.time else ()) + tuple(plate_axes[axis] for axis in free)
    copies = tuple(first.shape[axis] for axis in copy_axes)

    latents, own_axes = [], []
    for name, label in zip(factor.latents, factor.labels, strict=True):
        site = graph.sites[name]
        axes = _own_axes(site, factor)
        shape = tuple(n for axis, n in enumerate(site.shape) if axis not in axes)
        latents.append(Latent(label, site.support, shape))
        own_axes.append(axes)

    leaves = [leaf for seen in factor.inputs for leaf in _site_leaves(graph, factor, seen)]
    leaves += _carry_leaves(graph, factor)
    leaves += _design_leaves(graph, factor, leaves, designs)
    tree = _branches(graph, leaves, [leaf.groups for leaf in leaves])
    return Assembly(factor, copies, tuple(latents), tuple(map(_spec, tree)), tuple(own_axes), tree)


def _own_axes(site: Site, factor: Factor) -> tuple[int, ...]:
    plate_axes = site.axes[1:] if site.time else site.axes
    by_plate = dict(zip(site.plates, plate_axes, strict=True))
    return ((0,) if factor.time else ()) + tuple(by_plate[plate] for plate in factor.plates)


def _spec(node: Leaf | Branch) -> Spec:
    if isinstance(node, Leaf):
        return Value(node.label, node.support, node.event_shape)
    elements: tuple[Any, ...] = tuple(map(_spec, node.children))
    return (Series if node.group.ordered else Set)(node.group.name, elements)


def _branches(
    graph: Graph, leaves: Sequence[Leaf], left: Sequence[list[Group]]
) -> tuple[Leaf | Branch, ...]:
    """Put leaves that share a group below it; the plate that holds more sites is further out."""
    tree: list[Leaf | Branch] = [
        leaf for leaf, groups in zip(leaves, left, strict=True) if not groups
    ]
    rest = [(leaf, groups) for leaf, groups in zip(leaves, left, strict=True) if groups]
    while rest:
        everywhere = list(dict.fromkeys(group for _, groups in rest for group in groups))
        outer = max(everywhere, key=lambda group: _breadth(graph, group))
        inside = [
            (leaf, [g for g in groups if g != outer]) for leaf, groups in rest if outer in groups
        ]
        below = _branches(graph, [leaf for leaf, _ in inside], [groups for _, groups in inside])
        tree.append(Branch(outer, below))
        rest = [(leaf, groups) for leaf, groups in rest if outer not in groups]
    return tuple(tree)


def _breadth(graph: Graph, group: Group) -> float:
    if group.ordered:
        return float("inf")
    return sum(group.name.split(" of ")[-1] in site.plates for site in graph.sites.values())


def _site_leaves(graph: Graph, factor: Factor, seen: Input) -> list[Leaf]:
    """A site of the context, as one array or, in time, as one for each step that is seen."""
    site = graph.sites[seen.site]
    meet: frozenset[Constraint] = frozenset.intersection(*seen.meets)
    shift = int(factor.time)
    plate_axes = site.axes[1:] if site.time else site.axes
    picks: dict[int, Pick] = {}
    # Elements drawn together are positions of one vector, and so is what belongs to each of them.
    together = {plate for name in factor.latents for plate in graph.sites[name].plates} - set(
        factor.plates
    )
    for number, (plate, axis) in enumerate(zip(site.plates, plate_axes, strict=True)):
        if plate in together:
            continue
        picks[axis] = _plate_pick(graph, site, number, plate, meet, shift)
        series = _runs_along(graph, site, number)
        if series is not None and isinstance(picks[axis], Whole):
            group = Group(f"time {series}", ordered=True)
            onward = follows_time(graph, factor) == series
            reverse = graph.reversed_scans[series]
            picks[axis] = Whole(group, 0 if onward else None, reverse)
    if not site.time:
        return [Leaf(seen.label, site.name, site.support, site.shape, picks)]
    return _step_leaves(graph, factor, seen, picks)


def follows_time(graph: Graph, factor: Factor) -> int | None:
    """The scan that a factor is drawn along in the direction of time, so that it sees a carry."""
    if not factor.time:
        return None
    scan = graph.sites[factor.latents[0]].scan
    assert scan is not None
    return scan if factor.backward == graph.reversed_scans[scan] else None


def _step_leaves(graph: Graph, factor: Factor, seen: Input, picks: dict[int, Pick]) -> list[Leaf]:
    site = graph.sites[seen.site]
    assert site.scan is not None

    def leaf(label: str, pick: Pick) -> Leaf:
        return Leaf(label, site.name, site.support, site.shape, {0: pick, **picks})

    series = Group(f"time {site.scan}", ordered=True)
    if seen.steps is None:
        return [leaf(seen.label, Whole(series))]
    reverse = graph.reversed_scans[site.scan]
    # As distances in the direction of time, of which the negative ones are the past.
    lo, hi = (-seen.steps[1], -seen.steps[0]) if reverse else seen.steps
    if follows_time(graph, factor) is not None:
        lo = max(lo, 0)  # the past is in the carry
    if hi < lo:
        return []
    if np.isinf(hi) or np.isinf(lo):
        return [leaf(seen.label, Whole(series, int(lo) if np.isfinite(lo) else None, reverse))]
    return [
        leaf(
            f"{seen.label}{step:+d}" if step else seen.label, Aligned(0, -step if reverse else step)
        )
        for step in range(int(lo), int(hi) + 1)
    ]


def _plate_pick(
    graph: Graph,
    site: Site,
    number: int,
    plate: str,
    meet: frozenset[Constraint],
    shift: int,
) -> Pick:
    """How an axis of a plate is looked at: at one element, at a group of them, or whole."""
    here = [c for c in meet if c.theirs == number]
    for constraint in here:
        if constraint.places == SAME:
            return Aligned(constraint.mine + shift)
    tables = [c for c in here if isinstance(c.places, Table)]
    if tables:
        chosen = min(tables, key=lambda c: len(c.places.rows))  # type: ignore[union-attr]
        copy_axis = None if chosen.mine == NO_AXIS else chosen.mine + shift
        return Members(Group(f"{plate} members"), copy_axis, chosen.places.matrix)  # type: ignore[union-attr]
    grouping = _grouping(graph, site, number)
    if grouping is not None:
        outer, matrix = grouping
        return Grouped(Group(outer), Group(f"{plate} by {outer}"), matrix)
    return Whole(Group(plate))


def _grouping(graph: Graph, site: Site, number: int) -> tuple[str, csr_array] | None:
    """The plate whose elements a constant index assigns this plate's to, if there is just one."""
    axis = number + int(site.time)
    found: dict[str, IndexTable] = {}
    for child in graph.sites.values():
        if child.plates != site.plates or child.time != site.time:
            continue
        for edge in graph.parents(child.name).values():
            parent = graph.sites[edge.parent]
            if len(edge.relations) != 1 or parent.time:
                continue
            (relation,) = edge.relations
            for plate, link in zip(parent.plates, relation.links, strict=True):
                if isinstance(link, IndexTable) and link.axis == axis and plate not in site.plates:
                    found[plate] = link
    if len(found) != 1:
        return None
    ((plate, link),) = found.items()
    members = link.indices
    hit = members >= 0
    shape = (graph.plates[plate], len(members))
    ones = np.ones(int(hit.sum()), bool)
    return plate, csr_array((ones, (members[hit], np.flatnonzero(hit))), shape=shape)


def _runs_along(graph: Graph, site: Site, number: int) -> int | None:
    """The scan whose steps a plate outside of it is aligned with, if any."""
    if site.time:
        return None
    for edge in graph.parents(site.name).values():
        parent = graph.sites[edge.parent]
        if parent.time:
            for relation in edge.relations:
                link = relation.links[0]
                if isinstance(link, Window) and (link.axis, link.lo, link.hi) == (number, 0, 0):
                    return parent.scan
    return None


def _carry_leaves(graph: Graph, factor: Factor) -> list[Leaf]:
    scan = follows_time(graph, factor)
    leaves = []
    for carry in graph.carries:
        if carry.scan != scan:
            continue
        picks: dict[int, Pick] = {0: Aligned(0)}
        for axis, plate in enumerate(carry.plates):
            if plate is not None and plate in factor.plates:
                picks[axis + 1] = Aligned(1 + factor.plates.index(plate))
        steps = graph.scan_lengths[carry.scan]
        leaves.append(Leaf(carry.name, carry.name, constraints.real, (steps, *carry.shape), picks))
    return leaves


def _design_leaves(
    graph: Graph, factor: Factor, leaves: Sequence[Leaf], designs: Values
) -> list[Leaf]:
    """What tells elements apart, for every site that runs along the same axes as one that is seen.

    A site's `place`, which elements of others it depends on, is needed only where it is seen as
    one of a whole set: elsewhere the alignment says it.
    """
    found: dict[str, Leaf] = {}
    shapes: list[tuple[Site, dict[int, Pick]]] = []
    for name in factor.latents:
        axes = _own_axes(graph.sites[name], factor)
        if axes:
            picks: dict[int, Pick] = {axis: Aligned(copy) for copy, axis in enumerate(axes)}
            shapes.append((graph.sites[name], picks))
    shapes += [
        (graph.sites[leaf.key], dict(leaf.picks)) for leaf in leaves if leaf.key in graph.sites
    ]
    for like, picks in shapes:
        as_set = any(isinstance(p, Whole) and not p.group.ordered for p in picks.values())
        for key, design in designs.items():
            name, _, kind = key.rpartition(" ")
            site = graph.sites[name]
            same = (site.plates, site.time) == (like.plates, like.time)
            if not same or key in found or not picks or (kind == "place" and not as_set):
                continue
            by_number = {i: picks[axis] for i, axis in enumerate(like.axes) if axis in picks}
            found[key] = Leaf(key, key, constraints.real, design.shape, by_number)
    return list(found.values())
