"""A factor and the values of all sites in; what its network draws, and what it sees, out.

Parents aligned with a copy of the factor are plain inputs. Whole plates become sets, plates
within plates sets of sets; observations grouped by a constant index are pooled by group. A whole
series becomes a series. What the steps before hold is the scan's carry. Elements that differ by
constants of the model bring their design. Paige & Wood (2016), sec. 3.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpyro.distributions import constraints
from scipy.sparse import csr_array

from retrodict.estimators.analytic.families import BitSums, Family
from retrodict.estimators.conditional import EXPECTED, Guided, Latent, Series, Set, Value
from retrodict.estimators.coordinates import widened
from retrodict.estimators.guide_inputs import BITS
from retrodict.graph.graph import Graph, Site
from retrodict.graph.index_relations import Table as IndexTable
from retrodict.graph.index_relations import Window
from retrodict.graph.prior_draws import Draws
from retrodict.inverse.factors import Factor, Input
from retrodict.inverse.plate_relations import NO_AXIS, SAME, Constraint, Table
from retrodict.proposal.conjugacy import Conditional, find_conditional
from retrodict.proposal.context_views import (
    Aligned,
    Branch,
    Group,
    Grouped,
    Leaf,
    Members,
    Nested,
    Pick,
    Whole,
    leaves_of,
    membership,
    nested,
)
from retrodict.proposal.guide_search import blank_guide, find_guide
from retrodict.proposal.linear_guide import Facts, Guide
from retrodict.types import Values

Spec: TypeAlias = Value | Set | Series


@dataclass(frozen=True)
class Assembly:
    """How the values of sites become rows for a factor's network.

    Attributes:
        factor: which factor.
        copies: sizes of what it is repeated over: time, if any, then plates.
        latents, inputs: what the network is built for.
        own_axes: for each latent, the axis of its value that each copy axis runs along.
        tree: where the inputs come from.
        guide: says what the model expects of the latents, where it can; or all there is to say, and
            then there are no inputs.
    """

    factor: Factor
    copies: tuple[int, ...]
    latents: tuple[Latent, ...]
    inputs: tuple[Spec, ...]
    own_axes: tuple[tuple[int, ...], ...]
    tree: tuple[Leaf | Branch, ...]
    guide: Guide | Conditional | None = None

    @property
    def guided(self) -> Guided | Family | None:
        """What the network must know of the guide."""
        guide = self.guide
        if isinstance(guide, Conditional):
            return guide.family
        if guide is not None and guide.facts.family and guide.waves is not None:
            return BitSums(guide.facts.order, guide.waves, BITS)
        return None if guide is None else Guided(guide.facts.order, guide.channels, guide.waves)

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
        self,
        values: Values,
        index: Sequence[Int[Array, ""]],
        summaries: Values | None = None,
        expected: Any = None,
    ) -> Nested:
        """What one copy sees; series may come already summarised, expectations worked out."""
        summaries = summaries or {}
        rest = [n for n in self.tree if isinstance(n, Leaf) or n.group.name not in summaries]
        found = nested(rest, values, index, ()) | dict(summaries)
        if self.guide is not None:
            found[EXPECTED] = self.guide.at(values, index) if expected is None else expected
        return found

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
        found: Nested = nested((branch,), values, index, ())[name]
        if not masked:
            found.pop("mask", None)
        return found

    def keys(self) -> set[str]:
        """Names of the values that the context is made of."""
        return {leaf.key for leaf in leaves_of(self.tree)}

    def gather(self, x: Mapping[str, Array], sites: Mapping[str, Site]) -> dict[str, Array]:
        """Values of the latent sites from those of all copies, copy axes first."""
        found = {}
        for latent, name, axes in zip(
            self.latents, self.factor.latents, self.own_axes, strict=True
        ):
            array = jnp.moveaxis(x[latent.name], range(len(axes)), axes)
            found[name] = array.reshape(sites[name].shape).astype(sites[name].dtype)
        return found


def assemble(
    graph: Graph,
    factor: Factor,
    designs: Values,
    draws: Draws | None = None,
    facts: Facts | None = None,
    exact: bool = False,
) -> Assembly:
    """Work out how a factor's network gets its inputs.

    Args:
        graph: the model's.
        factor: one of its inverse.
        designs: for sites whose elements differ by constants, what tells them apart.
        draws: joint draws of the model, if a guide is to be looked for.
        facts: what is known of the guide, if it was found before.
        exact: whether there need be no network where the conditional is known without.
    """
    first = graph.sites[factor.latents[0]]
    free = [axis for axis, plate in enumerate(first.plates) if plate in factor.plates]
    plate_axes = first.axes[1:] if first.time else first.axes
    copy_axes = ((0,) if factor.time else ()) + tuple(plate_axes[axis] for axis in free)
    copies = tuple(first.shape[axis] for axis in copy_axes)

    latents, own_axes = [], []
    for name in factor.latents:
        site = graph.sites[name]
        axes = _own_axes(site, factor)
        shape = tuple(n for axis, n in enumerate(site.shape) if axis not in axes)
        latents.append(Latent(name, site.support, shape))
        own_axes.append(axes)

    leaves = [leaf for seen in factor.inputs for leaf in _site_leaves(graph, factor, seen)]
    leaves += _carry_leaves(graph, factor)
    leaves += _design_leaves(graph, factor, leaves, designs)
    tree = _branches(graph, leaves, [leaf.groups for leaf in leaves])
    made = Assembly(factor, copies, tuple(latents), tuple(map(_spec, tree)), tuple(own_axes), tree)
    if draws is None:
        return made
    scan, known = follows_time(graph, factor), facts is not None
    blank = blank_guide(graph, factor, made.latents, made.own_axes, scan, facts)
    if blank is None:
        return made
    # bits that add up have a guide, and a family all the same
    closed = exact and not made.series if facts is None else facts.family and not facts.waves
    if closed and (found := find_conditional(blank, draws, known=known)) is not None:
        return replace(made, guide=found, inputs=(), tree=())
    guide = find_guide(blank, draws, known=known)
    if guide is None:
        return made
    if exact and not known and guide.waves is not None and guide.waves.exact:
        guide = replace(guide, facts=guide.facts._replace(family=(BitSums.name,)))
    if guide.facts.family:
        return replace(made, guide=guide, inputs=(), tree=())
    return replace(made, guide=guide)


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
        support = widened(site.support, site.shape, picks)
        return [Leaf(seen.site, site.name, support, site.shape, picks)]
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
        looked_at = {0: pick, **picks}
        support = widened(site.support, site.shape, looked_at)
        return Leaf(label, site.name, support, site.shape, looked_at)

    series = Group(f"time {site.scan}", ordered=True)
    if seen.steps is None:
        return [leaf(seen.site, Whole(series))]
    reverse = graph.reversed_scans[site.scan]
    # As distances in the direction of time, of which the negative ones are the past.
    lo, hi = (-seen.steps[1], -seen.steps[0]) if reverse else seen.steps
    if follows_time(graph, factor) is not None:
        lo = max(lo, 0)  # the past is in the carry
    if hi < lo:
        return []
    if np.isinf(hi) or np.isinf(lo):
        return [leaf(seen.site, Whole(series, int(lo) if np.isfinite(lo) else None, reverse))]
    return [
        leaf(f"{seen.site}{step:+d}" if step else seen.site, Aligned(0, -step if reverse else step))
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
    return plate, membership(link.indices, graph.plates[plate])


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
