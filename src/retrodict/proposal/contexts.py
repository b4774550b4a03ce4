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
from jaxtyping import Array, Int
from numpyro.distributions import constraints

from retrodict.estimators.analytic.families import BitSums, Family
from retrodict.estimators.conditional import EXPECTED, Guided, Latent, Series, Set, Value
from retrodict.estimators.coordinates import widened
from retrodict.estimators.guide_inputs import BITS
from retrodict.graph.graph import Graph, Site
from retrodict.graph.index_atoms import INF, Table, Window, renamed
from retrodict.graph.index_relations import Relation, Term
from retrodict.graph.prior_draws import Draws
from retrodict.inverse.factors import Factor, Input
from retrodict.proposal.conjugacy import Conditional, find_conditional
from retrodict.proposal.context_views import (
    Branch,
    Group,
    Leaf,
    Nested,
    View,
    is_position,
    leaves_of,
    nested,
)
from retrodict.proposal.guide_search import blank_guide, find_guide
from retrodict.proposal.linear_guide import Facts, Guide
from retrodict.types import Values

Spec: TypeAlias = Value | Set | Series
# By what is grouped and by the atoms that say which positions a copy sees.
Groups: TypeAlias = dict[tuple[str, Term], Group]


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
    for name, label in zip(factor.latents, factor.labels, strict=True):
        site = graph.sites[name]
        axes = _own_axes(site, factor)
        shape = tuple(n for axis, n in enumerate(site.shape) if axis not in axes)
        latents.append(Latent(label, site.support, shape))
        own_axes.append(axes)

    groups: Groups = {}
    leaves = [leaf for seen in factor.inputs for leaf in _site_leaves(graph, factor, seen, groups)]
    leaves += _carry_leaves(graph, factor, copies)
    leaves += _design_leaves(graph, factor, copies, leaves, designs)
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
    return sum(group.name in site.plates for site in graph.sites.values())


def _site_leaves(graph: Graph, factor: Factor, seen: Input, groups: Groups) -> list[Leaf]:
    """A site of the context, as one array or, in time, as one for each step that is seen."""
    site = graph.sites[seen.site]
    # Elements drawn together are positions of one vector, and so is what belongs to each of them.
    together = {plate for name in factor.latents for plate in graph.sites[name].plates} - set(
        factor.plates
    )
    names = ["", *site.plates] if site.time else site.plates
    looked_at = [axis for axis, plate in enumerate(names) if plate not in together]
    axes = tuple(site.axes[axis] for axis in looked_at)
    support = widened(site.support, site.shape, axes)
    whole = seen.relation.move(right={axis: number for number, axis in enumerate(looked_at)})
    scans = [_scan_along(graph, site, axis) for axis in looked_at]
    leaves = []
    for label, relation in _parts_in_time(graph, factor, seen, whole, scans):
        term = relation.hull
        views = tuple(
            _view(graph, site, axis, scan, tuple(a for a in term if a.right == number), groups)
            for number, (axis, scan) in enumerate(zip(looked_at, scans, strict=True))
        )
        leaves.append(Leaf(label, site.name, support, site.shape, axes, relation, views))
    return leaves


def _parts_in_time(
    graph: Graph, factor: Factor, seen: Input, relation: Relation, scans: Sequence[int | None]
) -> list[tuple[str, Relation]]:
    """A site as one series, or as each of the steps that are seen, with labels.

    A factor that is drawn in the direction of time sees the past in the carry.
    """
    scan = follows_time(graph, factor)
    backward = scan is not None and graph.reversed_scans[scan]
    bounds = (-INF, 0.0) if backward else (0.0, INF)
    if not seen.same_scan:
        for number, along in enumerate(scans):
            free = all(atom.right != number for atom in relation.hull)
            if scan is not None and along == scan and free:
                relation = relation.restrict(Window(0, number, *bounds))
        return [(seen.label, relation)]
    if scan is not None:
        relation = relation.restrict(Window(0, 0, *bounds))
    lo, hi = relation.window(0, 0)
    if not relation:
        return []
    if INF in (-lo, hi):
        if scan is not None:
            # Summaries of what is to come include the step itself.
            relation = relation.free(right=[0]).restrict(Window(0, 0, *bounds))
        return [(seen.label, relation)]
    reverse = graph.reversed_scans[graph.sites[seen.site].scan or 0]
    parts = []
    for step in sorted(range(int(lo), int(hi) + 1), reverse=reverse):
        # Labels count in the direction of time.
        label = f"{seen.label}{-step if reverse else step:+d}" if step else seen.label
        parts.append((label, relation.restrict(Window(0, 0, step, step))))
    return parts


def follows_time(graph: Graph, factor: Factor) -> int | None:
    """The scan that a factor is drawn along in the direction of time, so that it sees a carry."""
    if not factor.time:
        return None
    scan = graph.sites[factor.latents[0]].scan
    assert scan is not None
    return scan if factor.backward == graph.reversed_scans[scan] else None


def _view(
    graph: Graph, site: Site, axis: int, scan: int | None, atoms: Term, groups: Groups
) -> View:
    """How an axis of a site is presented, of which a copy sees the positions that atoms allow."""

    def group(name: str, ordered: bool = False) -> Group:
        others = sum(other == name for other, _ in groups)
        new = Group(f"{name} {others + 1}" if others else name, ordered)
        return groups.setdefault((name, tuple(renamed(a, a.left, 0) for a in atoms)), new)

    if any(is_position(atom) for atom in atoms):
        return View()
    if scan is not None and all(INF in (-atom.bounds[0], atom.bounds[1]) for atom in atoms):
        return View((group(f"time {scan}", ordered=True),))
    plate = site.plates[axis - int(site.time)]
    if atoms:
        return View((group(f"{plate} members"),))
    grouping = _grouping(graph, site, plate)
    if grouping is not None:
        outer, table = grouping
        return View((group(outer), group(f"{plate} by {outer}")), table)
    return View((group(plate),))


def _grouping(graph: Graph, site: Site, plate: str) -> tuple[str, Table] | None:
    """The plate whose elements a constant index assigns this plate's to, if there is just one.

    With it comes the table from the elements of that plate to those of this.
    """
    axis = site.plates.index(plate) + int(site.time)
    found: dict[str, Table] = {}
    for child in graph.sites.values():
        if child.plates != site.plates or child.time != site.time:
            continue
        for edge in graph.parents(child.name).values():
            parent = graph.sites[edge.parent]
            if len(edge.relation.terms) != 1 or parent.time:
                continue
            for atom in edge.relation.hull:
                if isinstance(atom, Table) and atom.left == axis and atom.right is not None:
                    found[parent.plates[atom.right]] = atom
    outer = [name for name in found if name not in site.plates]
    if len(outer) != 1 or not found[outer[0]].is_function:
        return None
    return outer[0], found[outer[0]].transposed


def _scan_along(graph: Graph, site: Site, axis: int) -> int | None:
    """The scan along whose steps an index axis runs: in the scan, or of a plate outside of it."""
    if site.time:
        return site.scan if axis == 0 else None
    for edge in graph.parents(site.name).values():
        parent = graph.sites[edge.parent]
        if parent.time and any(Window(axis, 0) in term for term in edge.relation.terms):
            return parent.scan
    return None


def _carry_leaves(graph: Graph, factor: Factor, copies: tuple[int, ...]) -> list[Leaf]:
    scan = follows_time(graph, factor)
    leaves = []
    for carry in graph.carries:
        if carry.scan != scan:
            continue
        axes, atoms = [0], [Window(0, 0)]
        for axis, plate in enumerate(carry.plates, 1):
            if plate is not None and plate in factor.plates:
                atoms.append(Window(1 + factor.plates.index(plate), len(axes)))
                axes.append(axis)
        shape = (graph.scan_lengths[carry.scan], *carry.shape)
        relation = Relation.of(atoms, copies, [shape[axis] for axis in axes])
        views = (View(),) * len(axes)
        leaves.append(
            Leaf(carry.name, carry.name, constraints.real, shape, tuple(axes), relation, views)
        )
    return leaves


def _design_leaves(
    graph: Graph, factor: Factor, copies: tuple[int, ...], leaves: Sequence[Leaf], designs: Values
) -> list[Leaf]:
    """What tells elements apart, for every site that runs along the same axes as one that is seen.

    A site's `place`, which elements of others it depends on, is needed only where it is seen as
    one of a whole set: elsewhere the alignment says it.
    """
    aligned = []
    for name in factor.latents:
        site = graph.sites[name]
        axes = _own_axes(site, factor)
        relation, views = Relation.identity(copies), (View(),) * len(axes)
        aligned.append(Leaf(name, name, site.support, site.shape, axes, relation, views))
    found: dict[str, Leaf] = {}
    for leaf in [*aligned, *(leaf for leaf in leaves if leaf.key in graph.sites)]:
        like = graph.sites[leaf.key]
        numbers = tuple(map(like.axes.index, leaf.axes))
        as_set = any(View((Group(plate),)) in leaf.views for plate in like.plates)
        for key, design in designs.items():
            name, _, kind = key.rpartition(" ")
            site = graph.sites[name]
            same = (site.plates, site.time) == (like.plates, like.time)
            if same and numbers and key not in found and (kind != "place" or as_set):
                support, shape = constraints.real, design.shape
                found[key] = Leaf(key, key, support, shape, numbers, leaf.relation, leaf.views)
    return list(found.values())
