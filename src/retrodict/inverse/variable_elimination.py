"""Markov blankets, moral graphs and variable elimination on a network of plated nodes.

The methods of inversion use Markov blankets (Paige & Wood 2016, sec. 3.1) and variable elimination
in the moral graph (Webb et al. 2018), here on lifted nodes: a node is a site at one step, with all
of its plate elements, and a relation between the plates of two nodes describes which of their
elements are neighbours.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from retrodict.graph.graph import Edge, Graph, Site
from retrodict.graph.index_atoms import Atom, Sizes, Window
from retrodict.graph.index_relations import NOTHING, Relation, coupled_axes, off_diagonal


class Node(NamedTuple):
    """A site, at one step if it lies in a scan, with all of its plate elements."""

    site: str
    step: int | None = None


@dataclass(frozen=True)
class Network:
    """A graph unrolled in time but not over plates: nodes in program order.

    Attributes:
        sizes: the plate sizes of each node.
        observed: the observed nodes.
        parents: for each node, its parents and which of their elements it depends on.
    """

    sizes: Mapping[Node, tuple[int, ...]]
    observed: frozenset[Node]
    parents: Mapping[Node, Mapping[Node, Relation]]

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
        children: dict[Node, set[Node]] = {node: set() for node in self.sizes}
        for child, parents in self.parents.items():
            for parent in parents:
                children[parent].add(child)
        return children


def unroll_time(graph: Graph, steps: Sequence[int]) -> Network:
    """Unroll every scan, with its number of steps replaced by the one in `steps`."""
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
    parents: dict[Node, dict[Node, Relation]] = {node: {} for node in order}
    for edge in graph.edges:
        _add_edge(graph, edge, steps, parents)
    observed = frozenset(node for node in order if graph.sites[node.site].observed)
    return Network(sizes, observed, parents)


def _plate_sizes(site: Site) -> tuple[int, ...]:
    return site.index_shape[1:] if site.time else site.index_shape


def _add_edge(
    graph: Graph, edge: Edge, steps: Sequence[int], parents: dict[Node, dict[Node, Relation]]
) -> None:
    parent, child = graph.sites[edge.parent], graph.sites[edge.child]
    whole = _shortened(edge.relation, child, parent, steps)
    for child_step in [None] if child.scan is None else range(steps[child.scan]):
        relation = whole.fix(left={} if child_step is None else {0: child_step})
        into = parents[Node(child.name, child_step)]
        if parent.scan is None:
            _add(into, Node(parent.name), relation)
            continue
        for (parent_step,) in relation.move(left={}, right={0: 0}).at(()):
            _add(into, Node(parent.name, parent_step), relation.fix(right={0: parent_step}))


def _shortened(relation: Relation, child: Site, parent: Site, steps: Sequence[int]) -> Relation:
    """The relation in scans with fewer steps, without some in the middle.

    Limits to steps near the end stay there, limits to steps in the middle move to the middle.
    """

    def limit(atom: Atom, site: Site) -> Atom:
        number = steps[site.scan or 0]
        fewer, half = site.shape[0] - number, number // 2
        bounds = (p if p <= half else max(p - fewer, half) for p in atom.bounds)
        return Window(None, 0, *bounds) if fewer else atom

    def shorten(atom: Atom) -> Atom:
        if (atom.left, atom.right) == (None, 0) and parent.time:
            return limit(atom, parent)
        if (atom.left, atom.right) == (0, None) and child.time:
            return limit(atom.transposed, child).transposed
        return atom

    def sizes(whole: Sizes, site: Site) -> Sizes:
        return whole if site.scan is None else {**whole, 0: steps[site.scan]}

    terms = frozenset(tuple(map(shorten, term)) for term in relation.terms)
    return Relation(terms, sizes(relation.left, child), sizes(relation.right, parent))


def _add(relations: dict[Node, Relation], node: Node, relation: Relation) -> None:
    if relation:
        relations[node] = relations.get(node, NOTHING) | relation


@dataclass(frozen=True)
class Draw:
    """One node of an inverse, with its parents.

    Attributes:
        node: the node that is drawn.
        parents: PaH: parents, drawn before it or observed, and which of their elements.
        among: which elements of the node itself, drawn before, an element depends on.
        joint: plate axes along which its elements depend on one another.
        descending: whether its elements are drawn from the last to the first.
        from_prior: whether it is drawn from the model's conditional, because no observation depends
            on it.
    """

    node: Node
    parents: Mapping[Node, Relation]
    among: Relation = NOTHING
    joint: frozenset[int] = frozenset()
    descending: bool = False
    from_prior: bool = False


@dataclass
class MoralGraph:
    """The undirected graph in which parents of a common child are joined.

    Edges between nodes that are conditioned on are not stored.

    Attributes:
        sizes: the plate sizes of each node.
        conditioned: nodes that are conditioned on.
        adjacent: for each node, its neighbours and which of their elements.
    """

    sizes: Mapping[Node, tuple[int, ...]]
    conditioned: frozenset[Node]
    adjacent: defaultdict[Node, dict[Node, Relation]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    @staticmethod
    def of(
        network: Network, families: Iterable[Node], conditioned: Collection[Node]
    ) -> "MoralGraph":
        """Join every node of `families` with its parents, and its parents with each other."""
        moral = MoralGraph(network.sizes, frozenset(conditioned))
        for child in families:
            moral._marry(network.parents[child])
            for parent, relation in network.parents[child].items():
                moral._connect(child, parent, relation)
        return moral

    def _marry(self, around: Mapping[Node, Relation]) -> None:
        """Join the neighbours of one node with each other, and each with itself."""
        for u, v, relation in self._joins(around):
            self._connect(u, v, relation)

    def _joins(self, around: Mapping[Node, Relation]) -> Iterable[tuple[Node, Node, Relation]]:
        """Pairs of neighbours of a node, not both conditioned on, and which elements share it."""
        nodes = list(around)
        for number, u in enumerate(nodes):
            for v in nodes[number:]:
                if not self.conditioned.issuperset((u, v)):
                    relation = around[u].transpose().compose(around[v])
                    yield u, v, off_diagonal(relation) if u == v else relation

    def _connect(self, u: Node, v: Node, relation: Relation) -> None:
        if relation and not self.conditioned.issuperset((u, v)):
            self.adjacent[u][v] = self.adjacent[u].get(v, NOTHING) | relation
            if u != v:
                self.adjacent[v][u] = self.adjacent[u][v].transpose()

    def fill(self, node: Node) -> float:
        """The number of pairs of variables that eliminating one element of a node would join."""
        around, _ = self._around(node)
        total = 0.0
        for u, v, relation in self._joins(around):
            if not relation <= self.adjacent[u].get(v, NOTHING):
                many = around[u].multiplicity
                total += many * ((many - 1) / 2 if u == v else around[v].multiplicity)
        return total

    def _around(self, node: Node) -> tuple[dict[Node, Relation], frozenset[int]]:
        """The neighbours of a node, whose coupled elements go together, and the coupled axes."""
        coupled = coupled_axes(self.adjacent[node].get(node, NOTHING))
        around = {
            other: relation.free(left=coupled)
            for other, relation in self.adjacent[node].items()
            if other != node
        }
        return around, coupled

    def eliminate(self, node: Node) -> Draw:
        """Remove a node and join its neighbours, which become its parents in the inverse.

        Elements that are coupled along an axis are eliminated one after the other, the last first,
        so that each depends on all before it.
        """
        around, coupled = self._around(node)
        self._marry(around)
        itself = self.adjacent[node].get(node, NOTHING)
        for other in around:
            del self.adjacent[other][node]
        del self.adjacent[node]
        return Draw(node, around, among=itself.free(coupled, coupled), joint=coupled)


def eliminate_all(
    moral: MoralGraph,
    latents: Sequence[Node],
    blockers: Mapping[Node, set[Node]],
) -> list[Draw]:
    """Eliminate the latents greedily by fewest fill-in edges (min-fill; Webb et al. 2018).

    Args:
        moral: the moral graph, which is emptied.
        latents: latents in program order; of equals the last is eliminated first, so that they
            are drawn in program order.
        blockers: for each latent, those that must be eliminated before it: its children.

    Returns:
        The latents with their parents, in sampling order: the reverse of the elimination order.
    """
    remaining = list(latents)
    draws: list[Draw] = []
    # A node's fill changes only when its neighbourhood does.
    fills: dict[Node, float] = {}
    while remaining:
        ready = [n for n in remaining if blockers[n].isdisjoint(remaining)]
        fills |= {node: moral.fill(node) for node in ready if node not in fills}
        chosen = min(reversed(ready), key=fills.__getitem__)
        touched = set(moral.adjacent[chosen])
        draws.append(moral.eliminate(chosen))
        remaining.remove(chosen)
        for node in touched:
            fills.pop(node, None)
            for other in moral.adjacent.get(node, {}):
                fills.pop(other, None)
    return draws[::-1]


def markov_blanket(network: Network, node: Node) -> dict[Node, Relation]:
    """MB(x): parents, children, and parents of children, with the elements of each.

    The node itself is among them where its elements share a child.
    """
    blanket = dict(network.parents[node])
    for child in network.children[node]:
        to_child = network.parents[child][node].transpose()
        _add(blanket, child, to_child)
        for parent, relation in network.parents[child].items():
            shared = to_child.compose(relation)
            _add(blanket, parent, off_diagonal(shared) if parent == node else shared)
    return blanket
