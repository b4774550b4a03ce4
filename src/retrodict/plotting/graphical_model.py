"""Pictures of dependency graphs and of their inverses as graphical models.

Latent sites are white and observed ones grey, plates and time are boxes, and the factors of an
inverse are squares: figures 2 to 4 of Paige & Wood (2016).
"""

from collections.abc import Iterable
from typing import Literal

from retrodict.graph.graph import Edge, Graph
from retrodict.graph.index_atoms import Window
from retrodict.inverse.factors import Factor, Input
from retrodict.inverse.inverse import Inverse
from retrodict.plotting.diagram.elements import Box, Diagram, DiagramEdge, DiagramNode
from retrodict.plotting.picture import Picture


def forward_picture(graph: Graph) -> Picture:
    """Draw a model: an arrow from each parent to its child, dashed from other time steps."""
    edges = []
    for edge in graph.edges:
        same_step, other_steps = _parent_steps(graph, edge)
        if same_step:
            edges.append(DiagramEdge(edge.parent, edge.child))
        if other_steps:
            edges.append(DiagramEdge(edge.parent, edge.child, style="dashed", label=other_steps))
    return Picture(Diagram(_site_nodes(graph), tuple(edges), _boxes(graph, {})))


def _parent_steps(graph: Graph, edge: Edge) -> tuple[bool, str]:
    """Return whether a child depends on its own time step, and a label of the other steps."""
    parent, child = graph.sites[edge.parent], graph.sites[edge.child]
    if not (parent.time and child.time and parent.scan == child.scan):
        return True, ""
    offsets = [
        next((a.bounds for a in term if isinstance(a, Window) and a[:2] == (0, 0)), None)
        for term in edge.relation.terms
    ]
    same_step = any(window is None or window[0] <= 0 <= window[1] for window in offsets)
    others = {_step_range(*window) for window in offsets if window not in (None, (0, 0))}
    return same_step, ", ".join(sorted(others))


def _step_range(lo: float, hi: float) -> str:
    """Format offsets from the current step, both included, as time indices: t−1, t…T."""

    def step(offset: float) -> str:
        if offset in (float("inf"), float("-inf")):
            return "T" if offset > 0 else "1"
        return "t" if offset == 0 else f"t{'+' if offset > 0 else '−'}{abs(int(offset))}"

    return step(lo) if lo == hi else f"{step(lo)}…{step(hi)}"


def inverse_picture(inverse: Inverse) -> Picture:
    """Draw an inverse: arrows from the inputs of each factor to its square, and to its latents."""
    graph = inverse.graph
    networks = dict.fromkeys(factor.network for factor in inverse.factors)
    network_numbers = {network: n for n, network in enumerate(networks, start=1)}
    factors: dict[str, Factor] = {}
    squares: list[DiagramNode] = []
    edges: list[DiagramEdge] = []
    for number, factor in enumerate(inverse.factors):
        name = f"factor {number}"
        factors[name] = factor
        symbol = "p" if factor.from_prior else f"φ_{network_numbers[factor.network]}"
        squares.append(DiagramNode(name, symbol, "factor"))
        edges += [_input_edge(entry, name) for entry in factor.inputs]
        edges += [DiagramEdge(name, latent) for latent in factor.latents]
    nodes = (*_site_nodes(graph), *squares)
    return Picture(Diagram(nodes, tuple(edges), _boxes(graph, factors)))


def _input_edge(entry: Input, factor: str) -> DiagramEdge:
    if entry.steps is None or entry.steps == (0, 0):
        return DiagramEdge(entry.site, factor)
    style: Literal["solid", "dashed"] = "solid" if entry.steps[0] == 0 else "dashed"
    return DiagramEdge(entry.site, factor, style, _step_range(*entry.steps))


def _site_nodes(graph: Graph) -> tuple[DiagramNode, ...]:
    return tuple(
        DiagramNode(name, name, "observed" if site.observed else "latent")
        for name, site in graph.sites.items()
    )


def _boxes(graph: Graph, factors: dict[str, Factor]) -> tuple[Box, ...]:
    """Return a box for every plate and every scan, around their sites and factors."""
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
