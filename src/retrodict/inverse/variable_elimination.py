"""A directed network of plated nodes in; its moral neighbourhoods, and variables eliminated, out.

The two constructions that turn a graph round stand on these: Markov blankets (Paige & Wood 2016,
sec. 3.1) and variable elimination in the moral graph (Webb et al. 2018). Both work on lifted nodes:
a node is a site at one step, with all of its plate elements, and `retrodict.meets` says which
elements are neighbours.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from retrodict.graph.graph import Edge, Graph, Site, related
from retrodict.graph.index_relations import EVERYTHING, INF, Link, Relation, Window, array_axis
from retrodict.graph.index_relations import Table as IndexTable
from retrodict.inverse.plate_relations import (
    NO_AXIS,
    Constraint,
    Meet,
    Meets,
    Table,
    compose,
    constraint_places,
    contains,
    coupled_axes,
    flip,
    forget,
    join,
    multiplicity,
)


class Node(NamedTuple):
    """A site, at one step if it lies in a scan, with all of its plate elements."""

    site: str
    step: int | None = None


@dataclass(frozen=True)
class Network:
    """A graph written out in time but not over plates: nodes in program order.

    Attributes:
        sizes: the plate sizes of each node.
        observed: the observed nodes.
        parents: for each node, its parents and which of their elements it depends on.
    """

    sizes: Mapping[Node, tuple[int, ...]]
    observed: frozenset[Node]
    parents: Mapping[Node, Mapping[Node, Meets]]

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes in program order."""
        return list(self.sizes)

    @cached_property
    def place(self) -> Mapping[Node, int]:
        """The number of each node in program order."""
        return {node: number for number, node in enumerate(self.sizes)}

    @cached_property
    def children(self) -> Mapping[Node, set[Node]]:
        """The nodes that depend on each node."""
        found: dict[Node, set[Node]] = {node: set() for node in self.sizes}
        for child, parents in self.parents.items():
            for parent in parents:
                found[parent].add(child)
        return found


def unroll_time(graph: Graph, steps: Sequence[int]) -> Network:
    """Write out the first steps of every scan; `steps` says how many of each."""
    order: list[Node] = []
    scans_done: set[int] = set()
    for name, site in graph.sites.items():
        if site.scan is None:
            order.append(Node(name))
        elif site.scan not in scans_done:
            scans_done.add(site.scan)
            inside = [s.name for s in graph.sites.values() if s.scan == site.scan]
            times: Iterable[int] = range(steps[site.scan])
            if graph.reversed_scans[site.scan]:
                times = reversed(range(steps[site.scan]))
            order.extend(Node(inner, t) for t in times for inner in inside)
    sizes = {node: _plate_sizes(graph.sites[node.site]) for node in order}
    parents: dict[Node, dict[Node, Meets]] = {node: {} for node in order}
    for edge in graph.edges:
        _add_edge(graph, edge, steps, parents)
    observed = frozenset(node for node in order if graph.sites[node.site].observed)
    return Network(sizes, observed, parents)


def _plate_sizes(site: Site) -> tuple[int, ...]:
    return site.index_shape[1:] if site.time else site.index_shape


def _add_edge(
    graph: Graph, edge: Edge, steps: Sequence[int], parents: dict[Node, dict[Node, Meets]]
) -> None:
    parent, child = graph.sites[edge.parent], graph.sites[edge.child]
    child_times = [None] if child.scan is None else range(steps[child.scan])
    relations = [_shortened(relation, child, parent, steps) for relation in edge.relations]
    for child_time in child_times:
        mine = parents[Node(child.name, child_time)]
        for relation in relations:
            if child_time is not None and any(
                axis == 0 and not start <= child_time < stop
                for axis, start, stop in relation.present
            ):
                continue
            for parent_time, meet in _parent_meets(relation, child, parent, child_time, steps):
                node = Node(parent.name, parent_time)
                mine[node] = join(mine.get(node, frozenset()), {meet})


def _shorter(index: float, site: Site, steps: Sequence[int]) -> float:
    """A step of a site where fewer steps are written out: counted from the nearer end."""
    if site.scan is None or abs(index) == INF:
        return index
    kept = steps[site.scan]
    return index if index <= kept // 2 else max(index - (site.shape[0] - kept), kept // 2)


def _shortened(relation: Relation, child: Site, parent: Site, steps: Sequence[int]) -> Relation:
    """A relation where fewer steps are written out: what is said of the ends stays true."""
    present = tuple(
        (axis, int(_shorter(start, child, steps)), int(_shorter(stop, child, steps)))
        if child.time and axis == 0
        else (axis, start, stop)
        for axis, start, stop in relation.present
    )
    links = relation.links
    if parent.time and isinstance(links[0], Window) and links[0].axis is None:
        ends = (_shorter(end, parent, steps) for end in links[0][1:])
        links = (Window(None, *ends), *links[1:])
    return Relation(links, present)


def _parent_meets(
    relation: Relation, child: Site, parent: Site, time: int | None, steps: Sequence[int]
) -> Iterable[tuple[int | None, Meet]]:
    """The parent's steps that a relation reaches from one step of the child, each with its meet."""
    shift = int(child.time)
    fixed = frozenset(
        Constraint(array_axis(axis) - shift, NO_AXIS, places)
        for axis, start, stop in relation.present
        if not (child.time and axis == 0)
        for places in [_range(child.index_shape[array_axis(axis)], start, stop)]
        if places is not None
    )
    plate_links = relation.links[1:] if parent.time else relation.links
    plate_sizes = _plate_sizes(parent)
    constraints = fixed | {
        constraint
        for number, (link, size) in enumerate(zip(plate_links, plate_sizes, strict=True))
        for constraint in _constraint(link, number, size, child, time)
    }
    if not parent.time:
        yield None, frozenset(constraints)
        return
    assert parent.scan is not None
    reach, length = relation.links[0], steps[parent.scan]
    if reach.axis is None or (child.time and reach.axis == 0):
        index = (time or 0,) + (0,) * (len(child.index_shape) - 1)
        for (parent_time,) in related(Relation((reach,)), index, (length,)):
            yield parent_time, frozenset(constraints)
        return
    # A plate of the child runs along the parent's time: only some of its elements meet a step.
    axis = reach.along - shift
    size = _plate_sizes(child)[axis]
    for parent_time in range(length):
        hits = [
            position
            for position in range(size)
            if any(
                _shorter(time, parent, steps) == parent_time
                for (time,) in related(
                    Relation((reach._replace(axis=0),)), (position,), (parent.shape[0],)
                )
            )
        ]
        if hits:
            places = Table.of_places((size, 1), np.array(hits), np.zeros(len(hits), int))
            yield parent_time, frozenset({*constraints, Constraint(axis, NO_AXIS, places)})


def _range(size: int, start: int, stop: int) -> Table | None:
    if (start, stop) == (0, size):
        return None
    rows = np.arange(start, stop)
    return Table.of_places((size, 1), rows, np.zeros(len(rows), int))


def _constraint(
    link: Link, number: int, size: int, child: Site, time: int | None
) -> Iterable[Constraint]:
    """What a link to a plate axis of the parent says, seen from the child."""
    if link == EVERYTHING:
        return
    shift = int(child.time)
    if link.axis is None or (child.time and link.axis == 0):
        index = (time or 0,) + (0,) * (len(child.index_shape) - 1)
        hits = np.array([i for (i,) in related(Relation((link,)), index, (size,))], int)
        if len(hits) < size:
            places = Table.of_places((1, size), np.zeros(len(hits), int), hits)
            yield Constraint(NO_AXIS, number, places)
        return
    axis = link.along - shift
    child_size = _plate_sizes(child)[axis]
    found = constraint_places(_matrix(link, child_size, size))
    if found is not None:
        yield Constraint(axis, number, found)


def _matrix(link: Link, rows: int, columns: int) -> csr_array:
    if isinstance(link, IndexTable):
        index = link.indices
        hit = (index >= 0) & (index < columns)
        places = (np.flatnonzero(hit), index[hit])
    else:
        lo, hi = max(link.lo, -rows), min(link.hi, columns)
        if hi - lo > 64 and rows > 1000:
            return csr_array(np.ones((1, 1), bool))  # as good as everything, and far cheaper
        offsets = np.arange(int(lo), int(hi) + 1)
        row = np.repeat(np.arange(rows), len(offsets))
        column = row + np.tile(offsets, rows)
        hit = (column >= 0) & (column < columns)
        places = (row[hit], column[hit])
    return csr_array((np.ones(len(places[0]), bool), places), shape=(rows, columns))


@dataclass(frozen=True)
class Draw:
    """One node of an inverse, with what it is drawn from.

    Attributes:
        node: what is drawn.
        parents: PaH: the nodes drawn before it or observed, and which of their elements.
        among: which of its own elements, drawn before, an element depends on.
        joint: plate axes along which its elements depend on one another.
        descending: its elements are drawn from the last to the first.
        own: it is drawn from the model's own conditional: nothing observed depends on it.
    """

    node: Node
    parents: Mapping[Node, Meets]
    among: Meets = frozenset()
    joint: frozenset[int] = frozenset()
    descending: bool = False
    own: bool = False


@dataclass
class MoralGraph:
    """The undirected graph in which parents of a common child are joined.

    Joins among `given` nodes, which are conditioned on, are of no interest and are not kept.
    """

    sizes: Mapping[Node, tuple[int, ...]]
    given: frozenset[Node]
    adjacent: defaultdict[Node, dict[Node, Meets]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    @staticmethod
    def of(network: Network, families: Iterable[Node], given: Collection[Node]) -> "MoralGraph":
        """Join every node of `families` with its parents, and these with each other."""
        moral = MoralGraph(network.sizes, frozenset(given))
        for child in families:
            moral._marry(child, network.parents[child], frozenset())
            for parent, meets in network.parents[child].items():
                moral._connect(child, parent, meets)
        return moral

    def _marry(self, middle: Node, around: Mapping[Node, Meets], hidden: frozenset[int]) -> None:
        """Join the neighbours of one node with each other, and each with itself."""
        others = list(around)
        for number, u in enumerate(others):
            for v in others[number:]:
                if not (u in self.given and v in self.given):
                    shared = compose(flip(around[u]), around[v], self.sizes[middle], hidden)
                    self._connect(u, v, shared)

    def _connect(self, u: Node, v: Node, meets: Meets) -> None:
        if u in self.given and v in self.given:
            return
        if u == v:
            # An element is no neighbour of itself.
            meets = frozenset(m for m in meets if coupled_axes(frozenset({m}), len(self.sizes[u])))
        if not meets:
            return
        self.adjacent[u][v] = join(self.adjacent[u].get(v, frozenset()), meets)
        if u != v:
            self.adjacent[v][u] = flip(self.adjacent[u][v])

    def fill(self, node: Node) -> float:
        """How many pairs of variables eliminating one element of a node would join."""
        around, hidden = self._around(node)
        total = 0.0
        others = list(around)
        for number, u in enumerate(others):
            many = multiplicity(around[u], self.sizes[u])
            for v in others[number:]:
                if u in self.given and v in self.given:
                    continue
                shared = compose(flip(around[u]), around[v], self.sizes[node], hidden)
                if u == v:
                    ndim = len(self.sizes[u])
                    shared = frozenset(m for m in shared if coupled_axes(frozenset({m}), ndim))
                known = self.adjacent[u].get(v, frozenset())
                if all(any(contains(k, m) for k in known) for m in shared):
                    continue
                pairs = many * (
                    (many - 1) / 2 if u == v else multiplicity(around[v], self.sizes[v])
                )
                total += pairs
        return total

    def _around(self, node: Node) -> tuple[dict[Node, Meets], frozenset[int]]:
        itself = self.adjacent[node].get(node, frozenset())
        hidden = coupled_axes(itself, len(self.sizes[node]))
        around = {
            other: forget(meets, hidden)
            for other, meets in self.adjacent[node].items()
            if other != node
        }
        return around, hidden

    def eliminate(self, node: Node) -> Draw:
        """Remove a node, joining its neighbours; what is left around it is what it is drawn from.

        Along an axis on which its elements are coupled they go one after the other, the last first,
        and each then meets all of those before it.
        """
        around, hidden = self._around(node)
        self._marry(node, around, hidden)
        itself = self.adjacent[node].get(node, frozenset())
        for other in around:
            del self.adjacent[other][node]
        del self.adjacent[node]
        return Draw(node, around, among=forget_both(itself, hidden), joint=hidden)


def forget_both(meets: Meets, axes: frozenset[int]) -> Meets:
    """Drop the constraints on axes of a node's relation to itself."""
    return join(
        frozenset(c for c in meet if c.mine not in axes and c.theirs not in axes) for meet in meets
    )


def eliminate_all(
    moral: MoralGraph,
    latents: Sequence[Node],
    blockers: Mapping[Node, set[Node]],
) -> list[Draw]:
    """Eliminate the latents one by one by fewest fill-in edges; gives them in the order drawn.

    Args:
        moral: the moral graph, which is used up.
        latents: in program order; of equals the last goes first, so that program order is drawn.
        blockers: the nodes that must be gone before a node may go: its latent children.
    """
    left = list(latents)
    draws: list[Draw] = []
    # A node's fill changes only when its neighbourhood does.
    fills: dict[Node, float] = {}
    while left:
        ready = [n for n in left if not blockers[n] & set(left)]
        for node in ready:
            if node not in fills:
                fills[node] = moral.fill(node)
        chosen = min(reversed(ready), key=fills.__getitem__)
        touched = set(moral.adjacent[chosen])
        draws.append(moral.eliminate(chosen))
        left.remove(chosen)
        for node in touched:
            fills.pop(node, None)
            for other in moral.adjacent.get(node, {}):
                fills.pop(other, None)
    return draws[::-1]


def markov_blanket(network: Network, node: Node, children: Collection[Node]) -> dict[Node, Meets]:
    """MB(x): parents, children, and parents of children, with the elements of each.

    The node itself is among them where its elements share a child.
    """
    blanket: dict[Node, Meets] = dict(network.parents[node])
    for child in children:
        to_child = flip(network.parents[child][node])
        blanket[child] = join(blanket.get(child, frozenset()), to_child)
        for parent, meets in network.parents[child].items():
            shared = compose(to_child, meets, network.sizes[child], frozenset())
            if parent == node:
                ndim = len(network.sizes[node])
                shared = frozenset(m for m in shared if coupled_axes(frozenset({m}), ndim))
            if shared:
                blanket[parent] = join(blanket.get(parent, frozenset()), shared)
    return blanket
