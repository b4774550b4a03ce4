"""Layered layout of a diagram, from top to bottom (Sugiyama, Tagawa & Toda 1981).

Longest-path layers, barycentre sweeps to reduce crossings, horizontal coordinates by a quadratic
program, and curved edges around obstacles.
"""

from __future__ import annotations

from retrodict.plotting.diagram.crossing_reduction import (
    adjacent_moves,
    barycentre_order,
    crossing_cost,
)
from retrodict.plotting.diagram.edge_routing import route_edges
from retrodict.plotting.diagram.elements import Diagram
from retrodict.plotting.diagram.horizontal_coordinates import (
    PADDING,
    HorizontalCoordinates,
    horizontal_coordinates,
)
from retrodict.plotting.diagram.labels import node_sizes
from retrodict.plotting.diagram.layers import LayeredGraph
from retrodict.plotting.diagram.layout import Frame, Layout, Outline, fit_to_page

LAYER_GAP, CAPTION_HEIGHT = 32.0, 16.0
MAX_ITEMS_FOR_LOCAL_SEARCH = 40

Sizes = dict[str, tuple[float, float]]


def layered_layout(diagram: Diagram) -> Layout:
    """Compute the layout of a diagram without Graphviz."""
    graph, size = LayeredGraph(diagram), node_sizes(diagram)
    x, sides, _ = _local_search(graph, barycentre_order(graph), size)
    y, box_ends = _vertical_coordinates(graph, x, size)
    centres = [(x[i], y[layer]) for i, layer in enumerate(graph.layer)]
    outlines = {
        node.name: Outline(*centres[i], *size[node.name], node.kind == "factor")
        for i, node in enumerate(diagram.nodes)
    }
    frames = [
        Frame(box, left, top, right, bottom)
        for box, (left, right), (top, bottom) in zip(graph.boxes, sides, box_ends, strict=True)
    ]
    bends = {number: [centres[i] for i in dummies] for number, dummies in graph.dummies.items()}
    return fit_to_page(outlines, route_edges(diagram, outlines, bends), frames)


def _local_search(graph: LayeredGraph, order: list[int], size: Sizes) -> HorizontalCoordinates:
    """In small diagrams, apply single moves while they reduce crossings or edge lengths."""
    best, fewest = horizontal_coordinates(graph, order, size), crossing_cost(graph, order)[0]
    improved = len(order) <= MAX_ITEMS_FOR_LOCAL_SEARCH
    while improved:
        improved = False
        for candidate in adjacent_moves(graph, order):
            num_crossings = crossing_cost(graph, candidate)[0]
            if num_crossings > fewest:
                continue
            coordinates = horizontal_coordinates(graph, candidate, size)
            if num_crossings < fewest or coordinates.energy < 0.99 * best.energy:
                best, fewest, order, improved = coordinates, num_crossings, candidate, True
                break
    return best


def _vertical_coordinates(
    graph: LayeredGraph, x: list[float], size: Sizes
) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the centre of every layer, and the top and bottom of every box."""
    above, below = _box_margins(graph)
    num_layers = len(graph.layers)
    top_margin, bottom_margin, max_shift, height = ([0.0] * num_layers for _ in range(4))
    for b, (first, last) in enumerate(graph.box_layers):
        top_margin[first] = max(top_margin[first], above[b])
        bottom_margin[last] = max(bottom_margin[last], below[b])
    for upper, lower, _ in graph.segments:
        layer = graph.layer[lower]
        max_shift[layer] = max(max_shift[layer], abs(x[upper] - x[lower]))
    for name, layer in zip(graph.names, graph.layer, strict=False):  # dummies have no height
        height[layer] = max(height[layer], size[name][1])
    centres: list[float] = []
    y = 0.0
    for k in range(num_layers):
        # Nearly horizontal edges would touch the neighbours of the nodes that they connect.
        gap = LAYER_GAP + min(60.0, 0.1 * max_shift[k]) if k else 0.0
        y += top_margin[k] + gap + height[k] / 2
        centres.append(y)
        y += height[k] / 2 + bottom_margin[k]
    box_ends = [
        (centres[first] - height[first] / 2 - above[b], centres[last] + height[last] / 2 + below[b])
        for b, (first, last) in enumerate(graph.box_layers)
    ]
    return centres, box_ends


def _box_margins(graph: LayeredGraph) -> tuple[list[float], list[float]]:
    """Return how far every box extends above its first layer and below its last one."""
    members = [set(box.members) for box in graph.boxes]
    above, below = [0.0] * len(members), [0.0] * len(members)
    innermost_first = sorted(range(len(members)), key=lambda b: (len(members[b]), -b))
    for k, b in enumerate(innermost_first):
        first, last = graph.box_layers[b]
        overlapping = [c for c in innermost_first[:k] if members[b] & members[c]]
        tops = [above[c] for c in overlapping if graph.box_layers[c][0] == first]
        bottoms = [below[c] for c in overlapping if graph.box_layers[c][1] == last]
        above[b] = max(tops, default=0.0) + PADDING
        below[b] = max(bottoms, default=4.0) + CAPTION_HEIGHT
    return above, below
