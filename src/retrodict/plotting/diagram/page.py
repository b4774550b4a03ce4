"""Nodes, arrows and frames anywhere in the plane go in; a page that just holds them comes out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from retrodict.plotting.diagram.bezier import Curve, Point, Points, sample
from retrodict.plotting.diagram.drawing import Box, Edge
from retrodict.plotting.diagram.labels import CAPTION, SMALL, text_width

MARGIN = 10.0

Side = Literal["left", "right"]


class Place(NamedTuple):
    """The centre and size of a node."""

    x: float
    y: float
    width: float
    height: float
    square: bool

    def gauge(self, points: Points | Point) -> Points:
        """For every point: less than 1 inside the node, 1 on its border."""
        off = np.abs(np.asarray(points) - (self.x, self.y)) * 2 / (self.width, self.height)
        across, down = off[..., 0], off[..., 1]
        return np.maximum(across, down) if self.square else np.hypot(across, down)


class Route(NamedTuple):
    """An edge: cubic Bézier curves as far as the arrowhead, which ends in `tip`."""

    edge: Edge
    path: Curve
    tip: Point
    label: Point

    @property
    def head(self) -> tuple[Point, Point, Point]:
        """The arrowhead: its tip and the two ends of its base, where the line stops."""
        (x, y), (a, b) = self.tip, self.path[-1]
        dx, dy = 0.4 * (x - a), 0.4 * (y - b)
        return (x, y), (a - dy, b + dx), (a + dy, b - dx)


class Frame(NamedTuple):
    """A box on the page; the caption stands in its lower left or right corner."""

    box: Box
    left: float
    top: float
    right: float
    bottom: float
    caption: Side = "right"

    @property
    def caption_place(self) -> Place:
        """Where the caption stands."""
        width = text_width(self.box.name, CAPTION)
        inset = 7.0 + width / 2
        x = self.left + inset if self.caption == "left" else self.right - inset
        return Place(x, self.bottom - 8.0, max(width, 1.0), CAPTION, square=True)


class Layout(NamedTuple):
    """A page: x to the right, y down, origin in the upper left corner."""

    width: float
    height: float
    places: dict[str, Place]
    routes: tuple[Route, ...]
    frames: tuple[Frame, ...]


def fit(places: dict[str, Place], routes: list[Route], frames: list[Frame]) -> Layout:
    """Move everything into the page and round, so that the same drawing gives the same bytes."""
    lines = np.vstack([np.empty((0, 2)), *(sample(route.path) for route in routes)])
    corners = list(_corners(places.values(), routes, frames)) or [(0.0, 0.0)]
    spots = np.vstack([np.array(corners), lines])
    (left, top), (right, bottom) = spots.min(axis=0) - MARGIN, spots.max(axis=0) + MARGIN

    def move(x: float, y: float) -> Point:
        return round(float(x - left), 2), round(float(y - top), 2)

    def moved(points: Curve) -> Curve:
        return tuple(move(*point) for point in points)

    return Layout(
        *move(right, bottom),
        {name: Place(*move(p.x, p.y), p.width, p.height, p.square) for name, p in places.items()},
        tuple(Route(r.edge, moved(r.path), move(*r.tip), move(*r.label)) for r in routes),
        tuple(
            Frame(f.box, *move(f.left, f.top), *move(f.right, f.bottom), _side(f, frames, lines))
            for f in frames
        ),
    )


def _corners(
    places: Iterable[Place], routes: Iterable[Route], frames: Iterable[Frame]
) -> Iterable[Point]:
    """The outermost points of all but the lines."""
    for p in places:
        yield p.x - p.width / 2, p.y - p.height / 2
        yield p.x + p.width / 2, p.y + p.height / 2
    for f in frames:
        yield f.left, f.top
        yield f.right, f.bottom
    for r in routes:
        if r.edge.label:
            (x, y), half = r.label, text_width(r.edge.label, SMALL) / 2
            yield x - half, y
            yield x + half, y


def _side(frame: Frame, frames: list[Frame], lines: Points) -> Side:
    """The right, unless an edge or the corner of a crossing box is there and not on the left."""

    def taken(side: Side) -> bool:
        spot = frame._replace(caption=side).caption_place
        ends = [(o.left, o.right) for o in frames if o is not frame and o.top < spot.y < o.bottom]
        crossed = any(abs(x - spot.x) < spot.width / 2 + 2.0 for pair in ends for x in pair)
        return crossed or bool((spot.gauge(lines) < 1).any())

    return "left" if taken("right") and not taken("left") else "right"
