"""A factor and the values of all sites in; what its network draws, and what it sees, out.

Parents aligned with a copy of the factor are plain inputs. Whole plates become sets, plates
within plates sets of sets; observations grouped by a constant index are pooled by group. A whole
series becomes a series. What the steps before hold is the scan's carry. Elements that differ by
constants of the model bring their design. Paige & Wood (2016), sec. 3.3.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Array, Int
from numpyro.distributions import constraints
from scipy.sparse import csr_array

from retrodict.estimators.coordinates import widest_support
from retrodict.estimators.encoders import Context, Series, Set
from retrodict.estimators.features import Value
from retrodict.graph.element_covariates import CovariateKey
from retrodict.graph.graph import Graph, Site
from retrodict.graph.index_relations import Table as IndexTable
from retrodict.graph.index_relations import Window
from retrodict.inverse.factors import Factor, Input
from retrodict.inverse.plate_relations import NO_AXIS, SAME, Constraint, Table
from retrodict.proposal.context_views import (
    Aligned,
    Branch,
    CarrySource,
    CovariateSource,
    Group,
    Grouped,
    InputName,
    Leaf,
    Members,
    Pick,
    SiteSource,
    Whole,
    leaves_of,
    membership,
    read,
)
from retrodict.proposal.copies import copy_axes
from retrodict.proposal.scope import Scope

Spec: TypeAlias = Value | Set | Series


@dataclass(frozen=True)
class ContextTree:
    """How a factor's context is read from the values of sites.

    Attributes:
        factor: which factor.
        inputs: what its network is built for.
        tree: where each input comes from.
    """

    factor: Factor
    inputs: tuple[Spec, ...] = ()
    tree: tuple[Leaf | Branch, ...] = ()

    def read(
        self,
        scope: Scope,
        index: Sequence[Int[Array, ""]],
        summaries: Mapping[InputName, Array] | None = None,
    ) -> Context:
        """What the copy at `index` sees; series may come already summarised."""
        summaries = summaries or {}
        rest = [n for n in self.tree if isinstance(n, Leaf) or n.group.name not in summaries]
        inputs: dict[Hashable, Any] = dict(read(rest, scope, index))
        inputs.update(summaries.items())
        return inputs

    @property
    def series(self) -> tuple[Branch, ...]:
        """The inputs that are the rest of a series, from a copy's own step on."""
        return tuple(
            node
            for node in self.tree
            if isinstance(node, Branch) and node.group.ordered and self.factor.time
        )

    @property
    def sites(self) -> frozenset[str]:
        """The sites whose values the context is made of."""
        sources = (leaf.source for leaf in leaves_of(self.tree))
        return frozenset(source.site for source in sources if isinstance(source, SiteSource))


def context_tree(
    graph: Graph, factor: Factor, covariates: Mapping[CovariateKey, Array]
) -> ContextTree:
    """Work out how a factor's network gets its inputs.

    Args:
        graph: the model's.
        factor: one of its inverse.
        covariates: see `retrodict.graph.element_covariates`.
    """
    leaves = [leaf for seen in factor.inputs for leaf in _site_leaves(graph, factor, seen)]
    leaves += _carry_leaves(graph, factor)
    leaves += _covariate_leaves(graph, factor, leaves, covariates)
    tree = _branches(graph, leaves, [leaf.groups for leaf in leaves])
    return ContextTree(factor, tuple(map(_spec, tree)), tree)


def _spec(node: Leaf | Branch) -> Spec:
    if isinstance(node, Leaf):
        return Value(node.name, node.support, node.event_shape)
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
    return sum(group.plate in site.plates for site in graph.sites.values())


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
            group = _series_group(series)
            onward = follows_time(graph, factor) == series
            reverse = graph.reversed_scans[series]
            picks[axis] = Whole(group, 0 if onward else None, reverse)
    if not site.time:
        support = widest_support(site.support, site.shape, picks)
        name = InputName("site", seen.label)
        return [Leaf(name, SiteSource(site.name), support, site.shape, picks)]
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

    def leaf(pick: Pick, step: int = 0) -> Leaf:
        looked_at = {0: pick, **picks}
        support = widest_support(site.support, site.shape, looked_at)
        name = InputName("site", seen.label, f"{step:+d}" if step else "")
        return Leaf(name, SiteSource(site.name), support, site.shape, looked_at)

    series = _series_group(site.scan)
    if seen.steps is None:
        return [leaf(Whole(series))]
    reverse = graph.reversed_scans[site.scan]
    # As distances in the direction of time, of which the negative ones are the past.
    lo, hi = (-seen.steps[1], -seen.steps[0]) if reverse else seen.steps
    if follows_time(graph, factor) is not None:
        lo = max(lo, 0)  # the past is in the carry
    if hi < lo:
        return []
    if np.isinf(hi) or np.isinf(lo):
        return [leaf(Whole(series, int(lo) if np.isfinite(lo) else None, reverse))]
    return [
        leaf(Aligned(0, -step if reverse else step), step) for step in range(int(lo), int(hi) + 1)
    ]


def _series_group(scan: int) -> Group:
    return Group(InputName("time", str(scan)), ordered=True)


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
        return Members(Group(InputName("members", plate)), copy_axis, chosen.places.matrix)  # type: ignore[union-attr]
    grouping = _grouping(graph, site, number)
    if grouping is not None:
        outer, matrix = grouping
        inner = Group(InputName("group", plate, outer))
        return Grouped(Group(InputName("plate", outer), outer), inner, matrix)
    return Whole(Group(InputName("plate", plate), plate))


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
        name, source = InputName("carry", carry.name), CarrySource(carry.name)
        leaves.append(Leaf(name, source, constraints.real, (steps, *carry.shape), picks))
    return leaves


def _covariate_leaves(
    graph: Graph, factor: Factor, leaves: Sequence[Leaf], covariates: Mapping[CovariateKey, Array]
) -> list[Leaf]:
    """Covariates of every site that runs along the same axes as one that is seen.

    On which parents an element depends is needed only where it is seen as one of a whole set:
    elsewhere the alignment says it.
    """
    found: dict[CovariateKey, Leaf] = {}
    shapes: list[tuple[Site, dict[int, Pick]]] = []
    for name in factor.latents:
        axes = copy_axes(graph.sites[name], factor)
        if axes:
            picks: dict[int, Pick] = {axis: Aligned(copy) for copy, axis in enumerate(axes)}
            shapes.append((graph.sites[name], picks))
    shapes += [
        (graph.sites[leaf.source.site], dict(leaf.picks))
        for leaf in leaves
        if isinstance(leaf.source, SiteSource)
    ]
    for like, picks in shapes:
        as_set = any(isinstance(p, Whole) and not p.group.ordered for p in picks.values())
        for key, array in covariates.items():
            site = graph.sites[key.site]
            same = (site.plates, site.time) == (like.plates, like.time)
            if not same or key in found or not picks or (key.kind == "parents" and not as_set):
                continue
            by_number = {i: picks[axis] for i, axis in enumerate(like.axes) if axis in picks}
            label, source = InputName(key.kind, key.site), CovariateSource(key)
            found[key] = Leaf(label, source, constraints.real, array.shape, by_number)
    return list(found.values())
