"""Edge routing: a curve for every edge that avoids the other nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import dist

import numpy as np

from retrodict.plotting.diagram.bezier import (
    Curve,
    Point,
    Points,
    bent_line,
    catmull_rom,
    evaluate,
    num_segments,
    sample,
    subcurve,
)
from retrodict.plotting.diagram.elements import Diagram, DiagramEdge
from retrodict.plotting.diagram.labels import SMALL_SIZE, text_width
from retrodict.plotting.diagram.layers import loop_width
from retrodict.plotting.diagram.layout import Outline, Route

ARROWHEAD_LENGTH = 8.0
CLEARANCE = 4.0  # between an edge and the nodes that it passes


def route_edges(
    diagram: Diagram, outlines: dict[str, Outline], bends: dict[int, list[Point]]
) -> list[Route]:
    """Route every edge: straight if possible, otherwise along the first curve without collisions.

    Args:
        diagram: The diagram.
        outlines: Outline of every node.
        bends: Points that an edge should pass through, by the index of the edge.
    """
    index = {name: i for i, name in enumerate(outlines)}
    obstacles = _obstacles(diagram, outlines)
    axis = float(obstacles[:, 0].mean()) if outlines else 0.0
    num_parallel: Counter[frozenset[str]] = Counter()
    routes = []
    for number, edge in enumerate(diagram.edges):
        source, target = outlines[edge.source], outlines[edge.target]
        start, stop = (source.x, source.y), (target.x, target.y)
        if edge.source == edge.target:
            curve = _loop(source)
        else:
            pair = frozenset((edge.source, edge.target))
            candidates = _candidates(start, stop, bends.get(number), num_parallel[pair], axis)
            num_parallel[pair] += 1
            others = np.delete(obstacles, [index[edge.source], index[edge.target]], axis=0)
            curve = _fewest_collisions(candidates, others)
        routes.append(_clip(edge, curve, source, target))
    return routes


def _obstacles(diagram: Diagram, outlines: dict[str, Outline]) -> Points:
    """Return centre and size of every node and then of every loop: `(obstacles, 4)`."""
    obstacles = [(o.x, o.y, o.width, o.height) for o in outlines.values()]
    for edge in diagram.edges:
        if edge.source == edge.target:
            outline, width = outlines[edge.source], loop_width(edge.label)
            obstacles.append((outline.x + (outline.width + width) / 2, outline.y, width, 20.0))
    return np.array(obstacles).reshape(-1, 4)


def _fewest_collisions(candidates: list[Curve], obstacles: Points) -> Curve:
    """Return the first curve without collisions, or the first with the fewest."""
    counts = []
    for curve in candidates:
        counts.append(_num_collisions(curve, obstacles))
        if not counts[-1]:
            return curve
    return candidates[counts.index(min(counts))]


def _num_collisions(curve: Curve, obstacles: Points) -> int:
    points = sample(curve)
    centre, extent = obstacles[:, :2], obstacles[:, 2:] / 2 + CLEARANCE
    # Bounding boxes rule out most obstacles before the exact test.
    overlap = (centre + extent > points.min(axis=0)) & (centre - extent < points.max(axis=0))
    near = overlap.all(axis=1)
    offset = np.abs(points[:, None] - centre[None, near]) / extent[near]
    return int((np.hypot(offset[..., 0], offset[..., 1]) < 1).any(axis=0).sum())


def _loop(outline: Outline) -> Curve:
    """Return a loop from the centre of a node out to its right and back."""
    x, centre = outline.x + outline.width / 2 + 32.0, (outline.x, outline.y)
    return centre, (x, outline.y - outline.height), (x, outline.y + outline.height), centre


def _candidates(
    start: Point, stop: Point, bends: list[Point] | None, num_parallel: int, axis: float
) -> list[Curve]:
    """Return curves from centre to centre in order of preference.

    Args:
        start: Centre of the source.
        stop: Centre of the target.
        bends: Points that the edge should pass through.
        num_parallel: How many edges between the two nodes are routed already.
        axis: Mean horizontal coordinate of the diagram: curves bend away from it first.
    """
    down = stop[1] > start[1] or (stop[1] == start[1] and stop[0] < start[0])
    outward = (-1 if down else 1) * (1 if start[0] + stop[0] >= 2 * axis - 2.0 else -1)
    # A second edge between two nodes bends outward, a third inward, and so on.
    bend = 22.0 * ((num_parallel + 1) // 2) * (1 if num_parallel % 2 else -1) * outward
    candidates = [bent_line(start, stop, bend)]
    if bends:
        candidates.append(catmull_rom([start, *bends, stop]))
    elif start[1] != stop[1]:
        middle = (start[1] + stop[1]) / 2
        candidates.append((start, (start[0], middle), (stop[0], middle), stop))
    for offset in (24.0, 48.0, 72.0):
        candidates += [bent_line(start, stop, bend + side * outward * offset) for side in (1, -1)]
    return candidates


def _clip(edge: DiagramEdge, curve: Curve, source: Outline, target: Outline) -> Route:
    """Clip a curve from centre to centre at the borders, and leave room for the arrowhead."""
    end = float(num_segments(curve))
    parameters, points = np.linspace(0, end, 60), sample(curve, 60)
    outside_source = float(parameters[np.argmax(source.gauge(points) >= 1)])
    outside_target = float(parameters[::-1][np.argmax(target.gauge(points[::-1]) >= 1)])
    start = _bisect(lambda t: bool(source.gauge(evaluate(curve, t)) >= 1), 0.0, outside_source)
    stop = _bisect(lambda t: bool(target.gauge(evaluate(curve, t)) >= 1), end, outside_target)
    tip = evaluate(curve, stop)

    def leaves_room(t: float) -> bool:
        return dist(evaluate(curve, t), tip) >= ARROWHEAD_LENGTH

    base = _bisect(leaves_room, stop, start) if leaves_room(start) else start
    if edge.source == edge.target:
        x, y = evaluate(curve, end / 2)
        label_position = (x + 4.0 + text_width(edge.label, SMALL_SIZE) / 2, y)
    else:
        # Nearer to the source: edges into the same node are further apart there.
        label_position = evaluate(curve, start + 0.4 * (stop - start))
    return Route(edge, subcurve(curve, start, base), tip, label_position)


def _bisect(predicate: Callable[[float], bool], low: float, high: float) -> float:
    """Return where the predicate becomes true between low (false) and high (true)."""
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if predicate(middle) else (middle, high)
    return high
