"""Nodes on the page go in; for every edge a curve that goes round the others comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import dist

import numpy as np

from retrodict.plotting.diagram.bezier import (
    Curve,
    Point,
    Points,
    at,
    bow,
    part,
    pieces,
    sample,
    through,
)
from retrodict.plotting.diagram.drawing import Drawing, Edge
from retrodict.plotting.diagram.grid import loop_room
from retrodict.plotting.diagram.labels import SMALL, text_width
from retrodict.plotting.diagram.page import Place, Route

HEAD = 8.0
CLEAR = 4.0  # between an edge and the nodes that it passes


def routed(
    drawing: Drawing, places: dict[str, Place], bends: dict[int, list[Point]]
) -> list[Route]:
    """Every edge straight if nothing is in its way, else the first curve that goes round."""
    index = {name: i for i, name in enumerate(places)}
    everything = _obstacles(drawing, places)
    axis = float(everything[:, 0].mean()) if places else 0.0
    drawn: Counter[frozenset[str]] = Counter()
    result = []
    for number, edge in enumerate(drawing.edges):
        source, target = places[edge.source], places[edge.target]
        start, stop = (source.x, source.y), (target.x, target.y)
        if edge.source == edge.target:
            best = _loop(source)
        else:
            pair = frozenset((edge.source, edge.target))
            choices = _choices(start, stop, bends.get(number), drawn[pair], axis)
            drawn[pair] += 1
            others = np.delete(everything, [index[edge.source], index[edge.target]], axis=0)
            best = _freest(choices, others)
        result.append(_clip(edge, best, source, target))
    return result


def _obstacles(drawing: Drawing, places: dict[str, Place]) -> Points:
    """Centre and size of all that edges should miss: nodes, then edges from a node to itself."""
    rooms = [(place.x, place.y, place.width, place.height) for place in places.values()]
    for edge in drawing.edges:
        if edge.source == edge.target:
            place, room = places[edge.source], loop_room(edge.label)
            rooms.append((place.x + (place.width + room) / 2, place.y, room, 20.0))
    return np.array(rooms).reshape(-1, 4)


def _freest(choices: list[Curve], obstacles: Points) -> Curve:
    """The first curve that hits nothing, else the first of those that hit least."""
    counts = []
    for curve in choices:
        counts.append(_hits(curve, obstacles))
        if not counts[-1]:
            return curve
    return choices[counts.index(min(counts))]


def _hits(curve: Curve, obstacles: Points) -> int:
    points = sample(curve)
    centre, reach = obstacles[:, :2], obstacles[:, 2:] / 2 + CLEAR
    # Most obstacles are far from most curves; the exact test is only for the rest.
    close = (centre + reach > points.min(axis=0)) & (centre - reach < points.max(axis=0))
    beside = close.all(axis=1)
    off = np.abs(points[:, None] - centre[None, beside]) / reach[beside]
    return int((np.hypot(off[..., 0], off[..., 1]) < 1).any(axis=0).sum())


def _loop(place: Place) -> Curve:
    """From a node out to its right and back."""
    out, centre = place.x + place.width / 2 + 32.0, (place.x, place.y)
    return centre, (out, place.y - place.height), (out, place.y + place.height), centre


def _choices(
    start: Point, stop: Point, bends: list[Point] | None, drawn: int, axis: float
) -> list[Curve]:
    """Curves from centre to centre, the best first, where `drawn` edges join the two already."""
    down = stop[1] > start[1] or (stop[1] == start[1] and stop[0] < start[0])
    outward = (-1 if down else 1) * (1 if start[0] + stop[0] >= 2 * axis - 2.0 else -1)
    # A second edge between two nodes bends outward, a third inward, and so on.
    bend = 22.0 * ((drawn + 1) // 2) * (1 if drawn % 2 else -1) * outward
    choices = [bow(start, stop, bend)]
    if bends:
        choices.append(through([start, *bends, stop]))
    elif start[1] != stop[1]:
        middle = (start[1] + stop[1]) / 2
        choices.append((start, (start[0], middle), (stop[0], middle), stop))
    for aside in (24.0, 48.0, 72.0):
        choices += [bow(start, stop, bend + side * outward * aside) for side in (1, -1)]
    return choices


def _clip(edge: Edge, curve: Curve, source: Place, target: Place) -> Route:
    """From centre to centre becomes from border to border, with room for the arrowhead."""
    end = float(pieces(curve))
    steps, points = np.linspace(0, end, 60), sample(curve, 60)
    away = float(steps[np.argmax(source.gauge(points) >= 1)])
    near = float(steps[::-1][np.argmax(target.gauge(points[::-1]) >= 1)])
    start = _root(lambda t: bool(source.gauge(at(curve, t)) >= 1), 0.0, away)
    stop = _root(lambda t: bool(target.gauge(at(curve, t)) >= 1), end, near)
    tip = at(curve, stop)

    def clear(t: float) -> bool:
        return dist(at(curve, t), tip) >= HEAD

    base = _root(clear, stop, start) if clear(start) else start
    if edge.source == edge.target:
        x, y = at(curve, end / 2)
        label = (x + 4.0 + text_width(edge.label, SMALL) / 2, y)
    else:
        # Off the middle: edges that meet in one node are further apart at their other ends.
        label = at(curve, start + 0.4 * (stop - start))
    return Route(edge, part(curve, start, base), tip, label)


def _root(outside: Callable[[float], bool], low: float, high: float) -> float:
    """Where `outside` turns true between low (false) and high (true)."""
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if outside(middle) else (middle, high)
    return high
