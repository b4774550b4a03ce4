"""How the context of a factor is read from the values of sites (Paige & Wood 2016, sec. 3.3).

Parents aligned with a copy of the factor are plain inputs. Whole plates are sets, plates within
plates sets of sets; observations grouped by a constant index are pooled by group. A whole series is
a series; earlier steps are represented by the scan's carry. Elements that differ by constants of
the model have these as covariates.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jaxtyping import Array, Int
from numpyro.distributions import constraints

from retrodict.estimators.coordinates import widest_support
from retrodict.estimators.encoders import Context, Series, Set
from retrodict.estimators.features import Value
from retrodict.graph.element_covariates import CovariateKey
from retrodict.graph.graph import Graph, Site
from retrodict.graph.index_atoms import INF, Table, Window, renamed
from retrodict.graph.index_relations import Relation
from retrodict.graph.index_terms import Term
from retrodict.inverse.factors import Factor, Input
from retrodict.proposal.context_views import (
    Branch,
    Group,
    InputName,
    Leaf,
    View,
    is_position,
    leaves_of,
    read,
)
from retrodict.proposal.copies import Copies, copy_axes
from retrodict.proposal.scope import Scope

Spec: TypeAlias = Value | Set | Series
# By the input and the atoms that say which of its positions a copy sees.
Groups: TypeAlias = dict[tuple[InputName, Term], Group]


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
        """The inputs that are the rest of a series, from a copy's step on."""
        return tuple(
            node
            for node in self.tree
            if isinstance(node, Branch) and node.group.ordered and self.factor.time
        )

    @property
    def sites(self) -> frozenset[str]:
        """The sites whose values the context is made of."""
        sources = (leaf.source for leaf in leaves_of(self.tree))
        return frozenset(source for source in sources if isinstance(source, str))


def context_tree(
    graph: Graph, factor: Factor, covariates: Mapping[CovariateKey, Array]
) -> ContextTree:
    """Work out how a factor's network gets its inputs.

    Args:
        graph: the model's.
        factor: one of its inverse.
        covariates: see `retrodict.graph.element_covariates`.
    """
    sizes = Copies.of(graph, factor).sizes
    groups: Groups = {}
    leaves = [
        leaf for entry in factor.inputs for leaf in _site_leaves(graph, factor, entry, groups)
    ]
    leaves += _carry_leaves(graph, factor, sizes)
    leaves += _covariate_leaves(graph, factor, sizes, leaves, covariates)
    tree = _branches(graph, [(leaf, leaf.groups) for leaf in leaves])
    return ContextTree(factor, tuple(map(_spec, tree)), tree)


def _spec(node: Leaf | Branch) -> Spec:
    if isinstance(node, Leaf):
        return Value(node.name, node.support, node.event_shape)
    elements: tuple[Any, ...] = tuple(map(_spec, node.children))
    return (Series if node.group.ordered else Set)(node.group.name, elements)


def _branches(
    graph: Graph, leaves: Sequence[tuple[Leaf, list[Group]]]
) -> tuple[Leaf | Branch, ...]:
    """Put leaves that share a group below it; the plate that holds more sites is further out.

    Each leaf comes with its groups that are not above it yet.
    """
    tree: list[Leaf | Branch] = [leaf for leaf, groups in leaves if not groups]
    rest = [(leaf, groups) for leaf, groups in leaves if groups]
    while rest:
        candidates = dict.fromkeys(group for _, groups in rest for group in groups)
        outer = max(candidates, key=lambda group: _breadth(graph, group))
        below = [
            (leaf, [g for g in groups if g != outer]) for leaf, groups in rest if outer in groups
        ]
        tree.append(Branch(outer, _branches(graph, below)))
        rest = [(leaf, groups) for leaf, groups in rest if outer not in groups]
    return tuple(tree)


def _breadth(graph: Graph, group: Group) -> float:
    if group.ordered:
        return float("inf")
    return sum(group.plate in site.plates for site in graph.sites.values())


def _site_leaves(graph: Graph, factor: Factor, entry: Input, groups: Groups) -> list[Leaf]:
    """A site of the context, as one array or, in time, as one for each step that is entry."""
    site = graph.sites[entry.site]
    # Elements that are drawn jointly are entries of one vector, and so are the values of this site
    # that belong to each of them.
    plates = {plate for name in factor.latents for plate in graph.sites[name].plates}
    joint = plates - set(factor.plates)
    names = ["", *site.plates] if site.time else site.plates
    selected = [axis for axis, plate in enumerate(names) if plate not in joint]
    axes = tuple(site.axes[axis] for axis in selected)
    support = widest_support(site.support, site.shape, axes)
    whole = entry.relation.move(right={axis: number for number, axis in enumerate(selected)})
    scans = [_scan_along(graph, site, axis) for axis in selected]
    leaves = []
    for name, relation in _parts_in_time(graph, factor, entry, whole, scans):
        term = relation.hull
        views = tuple(
            _view(graph, site, axis, scan, tuple(a for a in term if a.right == number), groups)
            for number, (axis, scan) in enumerate(zip(selected, scans, strict=True))
        )
        leaves.append(Leaf(name, site.name, support, site.shape, axes, relation, views))
    return leaves


def _parts_in_time(
    graph: Graph, factor: Factor, entry: Input, relation: Relation, scans: Sequence[int | None]
) -> list[tuple[InputName, Relation]]:
    """A site as one series, or as each of the steps that are entry.

    A factor that is drawn in the direction of time sees the past in the carry.
    """
    scan = follows_time(graph, factor)
    backward = scan is not None and graph.reversed_scans[scan]
    bounds = (-INF, 0.0) if backward else (0.0, INF)
    if not entry.same_scan:
        for number, along in enumerate(scans):
            free = all(atom.right != number for atom in relation.hull)
            if scan is not None and along == scan and free:
                relation = relation.restrict(Window(0, number, *bounds))
        return [(InputName("site", entry.site), relation)]
    if scan is not None:
        relation = relation.restrict(Window(0, 0, *bounds))
    lo, hi = relation.window(0, 0)
    if not relation:
        return []
    if INF in (-lo, hi):
        if scan is not None:
            # Summaries of the future include the step itself.
            relation = relation.free(right=[0]).restrict(Window(0, 0, *bounds))
        return [(InputName("site", entry.site), relation)]
    reverse = graph.reversed_scans[graph.sites[entry.site].scan or 0]
    parts = []
    for step in sorted(range(int(lo), int(hi) + 1), reverse=reverse):
        # Steps are counted in the direction of time.
        detail = f"{-step if reverse else step:+d}" if step else ""
        name = InputName("site", entry.site, detail)
        parts.append((name, relation.restrict(Window(0, 0, step, step))))
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

    def group(name: InputName, plate: str | None = None, ordered: bool = False) -> Group:
        others = sum(other == name for other, _ in groups)
        new = Group(name._replace(number=others), plate if others == 0 else None, ordered)
        return groups.setdefault((name, tuple(renamed(a, a.left, 0) for a in atoms)), new)

    if any(is_position(atom) for atom in atoms):
        return View()
    if scan is not None and all(INF in (-atom.bounds[0], atom.bounds[1]) for atom in atoms):
        return View((group(InputName("time", str(scan)), ordered=True),))
    plate = site.plates[axis - int(site.time)]
    if atoms:
        return View((group(InputName("members", plate)),))
    grouping = _grouping(graph, site, plate)
    if grouping is not None:
        outer, table = grouping
        inner = group(InputName("group", plate, outer))
        return View((group(InputName("plate", outer), outer), inner), table)
    return View((group(InputName("plate", plate), plate),))


def _grouping(graph: Graph, site: Site, plate: str) -> tuple[str, Table] | None:
    """The plate whose elements a constant index assigns this plate's to, if there is just one.

    Also returns the table from the elements of that plate to those of this.
    """
    axis = site.plates.index(plate) + int(site.time)
    tables: dict[str, Table] = {}
    for child in graph.sites.values():
        if child.plates != site.plates or child.time != site.time:
            continue
        for edge in graph.parents(child.name).values():
            parent = graph.sites[edge.parent]
            if len(edge.relation.terms) != 1 or parent.time:
                continue
            for atom in edge.relation.hull:
                if isinstance(atom, Table) and atom.left == axis and atom.right is not None:
                    tables[parent.plates[atom.right]] = atom
    outer = [name for name in tables if name not in site.plates]
    if len(outer) != 1 or not tables[outer[0]].is_function:
        return None
    return outer[0], tables[outer[0]].transposed


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
        if carry.key.scan != scan:
            continue
        axes, atoms = [0], [Window(0, 0)]
        for axis, plate in enumerate(carry.plates, 1):
            if plate is not None and plate in factor.plates:
                atoms.append(Window(1 + factor.plates.index(plate), len(axes)))
                axes.append(axis)
        shape = (graph.scan_lengths[carry.key.scan], *carry.shape)
        relation = Relation.of(atoms, copies, [shape[axis] for axis in axes])
        views = (View(),) * len(axes)
        name = InputName("carry", str(carry.key.leaf))
        leaves.append(Leaf(name, carry.key, constraints.real, shape, tuple(axes), relation, views))
    return leaves


def _covariate_leaves(
    graph: Graph,
    factor: Factor,
    sizes: tuple[int, ...],
    leaves: Sequence[Leaf],
    covariates: Mapping[CovariateKey, Array],
) -> list[Leaf]:
    """Covariates of every site that runs along the same axes as one of the context or a latent.

    The parents of an element are needed only where it is an element of a whole set: elsewhere the
    alignment implies them.
    """
    chosen: dict[CovariateKey, Leaf] = {}
    for leaf in [*_latent_leaves(graph, factor, sizes), *leaves]:
        if not isinstance(leaf.source, str):
            continue
        like = graph.sites[leaf.source]
        numbers = tuple(map(like.axes.index, leaf.axes))
        as_set = any(g.plate in like.plates for view in leaf.views for g in view.groups)
        for key, array in covariates.items():
            site = graph.sites[key.site]
            same = (site.plates, site.time) == (like.plates, like.time)
            if same and numbers and key not in chosen and (key.kind == "constants" or as_set):
                chosen[key] = replace(
                    leaf,
                    name=InputName(key.kind, key.site),
                    source=key,
                    support=constraints.real,
                    shape=array.shape,
                    axes=numbers,
                )
    return list(chosen.values())


def _latent_leaves(graph: Graph, factor: Factor, sizes: tuple[int, ...]) -> list[Leaf]:
    """The factor's latents, each copy with its elements."""
    relation, leaves = Relation.identity(sizes), []
    for name in factor.latents:
        site = graph.sites[name]
        axes, label = copy_axes(site, factor), InputName("site", name)
        views = (View(),) * len(axes)
        leaves.append(Leaf(label, name, site.support, site.shape, axes, relation, views))
    return leaves
