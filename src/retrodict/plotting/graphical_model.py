"""A graph or an inverse in; its picture out, drawn as graphical models are drawn on paper.

Latent sites are white, observed ones grey, plates and time are boxes, the networks of an inverse
are squares: figures 2 to 4 of Paige & Wood (2016).
"""

from collections.abc import Iterable
from typing import Literal

from retrodict.graph.graph import Edge as GraphEdge
from retrodict.graph.graph import Graph
from retrodict.graph.index_atoms import Window
from retrodict.inverse.factors import Factor, Input
from retrodict.inverse.inverse import Inverse
from retrodict.plotting.picture import Box, Drawing, Edge, Node, Picture


def forward_picture(graph: Graph) -> Picture:
    """The model: an arrow from each parent to its child, dashed from an earlier step."""
    edges = []
    for edge in graph.edges:
        now, before = _moments(graph, edge)
        if now:
            edges.append(Edge(edge.parent, edge.child))
        if before:
            edges.append(Edge(edge.parent, edge.child, style="dashed", label=before))
    return Picture(Drawing(_site_nodes(graph), tuple(edges), _boxes(graph, {})))


def _moments(graph: Graph, edge: GraphEdge) -> tuple[bool, str]:
    """Whether a parent of the same step is among those of an edge, and which earlier ones are."""
    parent, child = graph.sites[edge.parent], graph.sites[edge.child]
    if not (parent.time and child.time and parent.scan == child.scan):
        return True, ""
    steps = [
        next((a.bounds for a in term if isinstance(a, Window) and a[:2] == (0, 0)), None)
        for term in edge.relation.terms
    ]
    now = any(window is None or window[0] <= 0 <= window[1] for window in steps)
    others = {_words(*window) for window in steps if window not in (None, (0, 0))}
    return now, ", ".join(sorted(others))


def _words(lo: float, hi: float) -> str:
    """Steps relative to the present one, as an index: t−1, t…T."""

    def one(offset: float) -> str:
        if offset in (float("inf"), float("-inf")):
            return "T" if offset > 0 else "1"
        return "t" if offset == 0 else f"t{'+' if offset > 0 else '−'}{abs(int(offset))}"

    return one(lo) if lo == hi else f"{one(lo)}…{one(hi)}"


def inverse_picture(inverse: Inverse) -> Picture:
    """The inverse: from what a network sees into its square, and from there to what it draws."""
    graph = inverse.graph
    numbers = {network: n for n, network in enumerate({f.network: 0 for f in inverse.factors})}
    squares: list[Node] = []
    edges: list[Edge] = []
    inside: dict[str, Factor] = {}
    for number, factor in enumerate(inverse.factors):
        name = f"factor {number}"
        inside[name] = factor
        mark = "p" if factor.own else _subscript("φ", numbers[factor.network] + 1)
        squares.append(Node(name, mark, "factor"))
        edges += [_input_edge(seen, name) for seen in factor.inputs]
        edges += [Edge(name, latent) for latent in factor.latents]
    nodes = (*_site_nodes(graph), *squares)
    return Picture(Drawing(nodes, tuple(edges), _boxes(graph, inside)))


def _input_edge(seen: Input, factor: str) -> Edge:
    if seen.steps is None or seen.steps == (0, 0):
        return Edge(seen.site, factor)
    style: Literal["solid", "dashed"] = "solid" if seen.steps[0] == 0 else "dashed"
    return Edge(seen.site, factor, style, _words(*seen.steps))


def _subscript(symbol: str, number: int) -> str:
    return symbol + str(number).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def _site_nodes(graph: Graph) -> tuple[Node, ...]:
    return tuple(
        Node(name, name, "observed" if site.observed else "latent")
        for name, site in graph.sites.items()
    )


def _boxes(graph: Graph, factors: dict[str, Factor]) -> tuple[Box, ...]:
    boxes: list[Box] = []

    def add(caption: str, sites: Iterable[str], squares: Iterable[str]) -> None:
        boxes.append(Box(caption, (*sites, *squares)))

    for plate, size in graph.plates.items():
        add(
            f"{plate}: {size}",
            (name for name, site in graph.sites.items() if plate in site.plates),
            (name for name, factor in factors.items() if plate in factor.plates),
        )
    for scan, length in enumerate(graph.scan_lengths):
        add(
            f"time: {length}",
            (name for name, site in graph.sites.items() if site.scan == scan),
            (
                name
                for name, factor in factors.items()
                if factor.time and graph.sites[factor.latents[0]].scan == scan
            ),
        )
    return tuple(boxes)
