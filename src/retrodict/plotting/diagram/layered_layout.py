"""Layered layout of a diagram, from top to bottom (Sugiyama, Tagawa & Toda 1981).

Longest-path layers, barycentre sweeps to reduce crossings, coordinates by quadratic programs, and
curved edges around obstacles.
"""

from __future__ import annotations

import numpy as np

from retrodict.plotting.diagram.coordinates import horizontal_coordinates, vertical_coordinates
from retrodict.plotting.diagram.crossing_reduction import barycentre_orders
from retrodict.plotting.diagram.edge_routing import route_edges
from retrodict.plotting.diagram.elements import Diagram
from retrodict.plotting.diagram.labels import node_sizes
from retrodict.plotting.diagram.layers import LayeredGraph
from retrodict.plotting.diagram.layout import Frame, Layout, Outline


def layered_layout(diagram: Diagram) -> Layout:
    """Compute the layout of a diagram."""
    graph, size = LayeredGraph(diagram), node_sizes(diagram)
    candidates = [horizontal_coordinates(graph, order, size) for order in barycentre_orders(graph)]
    least_energy = min(energy for energy, _, _ in candidates)
    # Of orders that are about as good, the first is nearest to the diagram's order of nodes.
    _, x, horizontal_sides = next(c for c in candidates if c[0] <= 1.01 * least_energy)
    y, vertical_sides = vertical_coordinates(graph, x, size)
    # Rounding makes equal diagrams give equal files.
    centres = np.round(np.stack([x, y[graph.layer]], axis=1), 2).tolist()
    outlines = {
        node.name: Outline(x, y, *size[node.name], node.kind == "factor")
        for node, (x, y) in zip(diagram.nodes, centres, strict=False)
    }
    frames = [
        Frame(box, left, top, right, bottom)
        for box, (left, right), (top, bottom) in zip(
            graph.boxes, horizontal_sides.tolist(), vertical_sides.tolist(), strict=True
        )
    ]
    bends = {number: [centres[i] for i in dummies] for number, dummies in graph.dummies.items()}
    return Layout(outlines, route_edges(diagram, outlines, bends), tuple(frames))
