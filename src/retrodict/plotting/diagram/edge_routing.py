"""Edge routing: a curve for every edge that avoids the other nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.bezier import BezierSegment, split_de_casteljau, split_path_inout
from matplotlib.path import Path
from scipy.spatial import KDTree

from retrodict.plotting.diagram.elements import Diagram
from retrodict.plotting.diagram.labels import EDGE_LABEL_SIZE, text_width
from retrodict.plotting.diagram.layers import loop_width
from retrodict.plotting.diagram.layout import Outline, Point, Points, Route

CLEARANCE = 4.0  # between an edge and the nodes that it passes


def route_edges(
    diagram: Diagram, outlines: dict[str, Outline], bends: dict[int, list[Point]]
) -> tuple[Route, ...]:
    """Route every edge: straight if possible, otherwise along the curve with fewest collisions.

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
        if edge.source == edge.target:
            curve = _outside(_outside(_loop(source), source), source)
            x, y = curve[len(curve) // 2]
            label_position = (x + 4.0 + text_width(edge.label, EDGE_LABEL_SIZE) / 2, y)
        else:
            pair = frozenset((edge.source, edge.target))
            candidates = _candidates(source, target, bends.get(number), num_parallel[pair], axis)
            num_parallel[pair] += 1
            others = np.delete(obstacles, [index[edge.source], index[edge.target]], axis=0)
            curve = _fewest_collisions(candidates, others)
            curve = _outside(_outside(curve, source), target)
            # Nearer to the source: edges into the same node are further apart there.
            points = sample(curve)
            x, y = points[int(0.4 * len(points))]
            label_position = (x, y)
        routes.append(Route(edge, curve, label_position))
    return tuple(routes)


def _obstacles(diagram: Diagram, outlines: dict[str, Outline]) -> Points:
    """Return centre and size of every node and then of every loop: `(obstacles, 4)`."""
    obstacles = [(o.x, o.y, o.width, o.height) for o in outlines.values()]
    for edge in diagram.edges:
        if edge.source == edge.target:
            outline, width = outlines[edge.source], loop_width(edge.label)
            obstacles.append((outline.x + (outline.width + width) / 2, outline.y, width, 20.0))
    return np.array(obstacles).reshape(-1, 4)


def sample(curve: Points) -> Points:
    """Return points along a curve of cubic Bézier segments, about 10 apart."""
    segments = [curve[k : k + 4] for k in range(0, len(curve) - 1, 3)]
    lengths = [np.hypot(*np.diff(segment, axis=0).T).sum() for segment in segments]
    return np.vstack(
        [
            BezierSegment(segment)(np.linspace(0, 1, 8 + int(length / 10)))
            for segment, length in zip(segments, lengths, strict=True)
        ]
    )


def _fewest_collisions(candidates: list[Points], obstacles: Points) -> Points:
    """Return the first curve without collisions, or the first with the fewest."""
    counts = []
    for curve in candidates:
        counts.append(_num_collisions(curve, obstacles))
        if not counts[-1]:
            return curve
    return candidates[counts.index(min(counts))]


def _num_collisions(curve: Points, obstacles: Points) -> int:
    """Count the obstacles that a curve touches, and twice those that it passes through."""
    points = sample(curve)
    centre, extent = obstacles[:, :2], obstacles[:, 2:] / 2 + CLEARANCE
    # Most obstacles are farther from the curve than their size.
    near = KDTree(points).query(centre)[0] < extent.max(axis=1)
    offset = np.abs(points[:, None] - centre[near])
    gauges = [
        np.hypot(*np.moveaxis(offset / (extent[near] - inset), -1, 0)) for inset in (0.0, CLEARANCE)
    ]
    return int(sum((gauge < 1).any(axis=0).sum() for gauge in gauges))


def _outside(curve: Points, outline: Outline) -> Points:
    """Cut off the start of a curve that lies inside an outline, and reverse the rest."""
    path = Path(curve, [Path.MOVETO, *[Path.CURVE4] * (len(curve) - 1)])
    _, outside = split_path_inout(path, lambda point: bool(outline.gauge(point) < 1))
    return np.asarray(outside.vertices)[::-1]


def _loop(outline: Outline) -> Points:
    """Return a loop from the centre of a node out to its right and back."""
    x, centre = outline.x + outline.width / 2 + 32.0, (outline.x, outline.y)
    control = [(x, outline.y - outline.height), (x, outline.y + outline.height)]
    out, back = split_de_casteljau([centre, *control, centre], 0.5)
    return np.vstack([out, back[1:]])


def _candidates(
    source: Outline,
    target: Outline,
    bends: list[Point] | None,
    num_parallel: int,
    axis: float,
) -> list[Points]:
    """Return curves from centre to centre in order of preference.

    Args:
        source: Outline of the source.
        target: Outline of the target.
        bends: Points that the edge should pass through.
        num_parallel: How many edges between the two nodes are routed already.
        axis: Mean horizontal coordinate of the diagram: curves bend away from it first.
    """
    start, stop = np.array([source[:2], target[:2]])
    down = stop[1] > start[1] or (stop[1] == start[1] and stop[0] < start[0])
    outward = (-1 if down else 1) * (1 if start[0] + stop[0] >= 2 * axis - 2.0 else -1)
    # A second edge between two nodes bends outward, a third inward, and so on.
    bend = 22.0 * ((num_parallel + 1) // 2) * (1 if num_parallel % 2 else -1) * outward
    candidates = [_bent_line(start, stop, bend)]
    if bends:
        candidates.append(_catmull_rom([start, *bends, stop]))
    else:
        middle = (start[1] + stop[1]) / 2
        candidates.append(np.array([start, (start[0], middle), (stop[0], middle), stop]))
    for offset in (12.0, 24.0, 36.0, 48.0, 72.0, 96.0):
        candidates += [_bent_line(start, stop, bend + side * outward * offset) for side in (1, -1)]
    if bends:
        # Vertical through the layers, the curve cannot touch the neighbours of its bends.
        ends = (-14.0, 14.0) if down else (14.0, -14.0)
        candidates.append(
            _catmull_rom([start, *((x, y + dy) for x, y in bends for dy in ends), stop])
        )
    return candidates


def _bent_line(start: Points, stop: Points, offset: float) -> Points:
    """Return a line whose middle is displaced sideways by `offset`."""
    dx, dy = stop - start
    sideways = np.array([-dy, dx]) * offset * 4 / 3 / np.hypot(dx, dy)
    third = (stop - start) / 3
    return np.array([start, start + third + sideways, stop - third + sideways, stop])


def _catmull_rom(points: Sequence[Points | Point]) -> Points:
    """Return the Catmull–Rom spline through the points."""
    p = np.array([points[0], *points, points[-1]])
    tangent = (p[2:] - p[:-2]) / 6
    first_control, second_control = p[1:-2] + tangent[:-1], p[2:-1] - tangent[1:]
    controls = np.stack([first_control, second_control, p[2:-1]], axis=1)
    return np.vstack([p[:1], controls.reshape(-1, 2)])
