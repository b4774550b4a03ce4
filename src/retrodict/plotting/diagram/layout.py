"""Positions of a diagram's nodes, edges and boxes on a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from retrodict.plotting.diagram.bezier import Curve, Point, Points, sample
from retrodict.plotting.diagram.elements import Box, DiagramEdge
from retrodict.plotting.diagram.labels import CAPTION_SIZE, SMALL_SIZE, text_width

MARGIN = 10.0

Side = Literal["left", "right"]


class Outline(NamedTuple):
    """An ellipse or rectangle, given by its centre and size."""

    x: float
    y: float
    width: float
    height: float
    rectangular: bool

    def gauge(self, points: Points | Point) -> Points:
        """Return the Minkowski gauge of each point: below 1 inside, 1 on the border."""
        offset = np.abs(np.asarray(points) - (self.x, self.y)) * 2 / (self.width, self.height)
        dx, dy = offset[..., 0], offset[..., 1]
        return np.maximum(dx, dy) if self.rectangular else np.hypot(dx, dy)


class Route(NamedTuple):
    """The curve of an edge. `path` ends at the base of the arrowhead, the arrowhead at `tip`."""

    edge: DiagramEdge
    path: Curve
    tip: Point
    label_position: Point

    @property
    def arrowhead(self) -> tuple[Point, Point, Point]:
        """The corners of the arrowhead: its tip and the two ends of its base."""
        (x, y), (a, b) = self.tip, self.path[-1]
        dx, dy = 0.4 * (x - a), 0.4 * (y - b)
        return (x, y), (a - dy, b + dx), (a + dy, b - dx)


class Frame(NamedTuple):
    """The border of a box, with the caption in its lower left or lower right corner."""

    box: Box
    left: float
    top: float
    right: float
    bottom: float
    caption_side: Side = "right"

    @property
    def caption_outline(self) -> Outline:
        """The rectangle around the caption."""
        width = text_width(self.box.name, CAPTION_SIZE)
        inset = 7.0 + width / 2
        x = self.left + inset if self.caption_side == "left" else self.right - inset
        return Outline(x, self.bottom - 8.0, max(width, 1.0), CAPTION_SIZE, rectangular=True)


class Layout(NamedTuple):
    """A page: x points to the right, y down, and the origin is the upper left corner."""

    width: float
    height: float
    outlines: dict[str, Outline]
    routes: tuple[Route, ...]
    frames: tuple[Frame, ...]


def fit_to_page(outlines: dict[str, Outline], routes: list[Route], frames: list[Frame]) -> Layout:
    """Translate everything onto a page that just contains it, and choose the sides of captions.

    Coordinates are rounded, so that equal diagrams give equal files.
    """
    lines = np.vstack([np.empty((0, 2)), *(sample(route.path) for route in routes)])
    corners = list(_corners(outlines.values(), routes, frames)) or [(0.0, 0.0)]
    points = np.vstack([np.array(corners), lines])
    (left, top), (right, bottom) = points.min(axis=0) - MARGIN, points.max(axis=0) + MARGIN

    def move(x: float, y: float) -> Point:
        return round(float(x - left), 2), round(float(y - top), 2)

    def move_curve(curve: Curve) -> Curve:
        return tuple(move(*point) for point in curve)

    return Layout(
        *move(right, bottom),
        {
            name: Outline(*move(o.x, o.y), o.width, o.height, o.rectangular)
            for name, o in outlines.items()
        },
        tuple(
            Route(r.edge, move_curve(r.path), move(*r.tip), move(*r.label_position)) for r in routes
        ),
        tuple(
            Frame(
                f.box,
                *move(f.left, f.top),
                *move(f.right, f.bottom),
                _caption_side(f, frames, lines),
            )
            for f in frames
        ),
    )


def _corners(
    outlines: Iterable[Outline], routes: Iterable[Route], frames: Iterable[Frame]
) -> Iterable[Point]:
    """Yield the extreme points of outlines, frames and edge labels."""
    for o in outlines:
        yield o.x - o.width / 2, o.y - o.height / 2
        yield o.x + o.width / 2, o.y + o.height / 2
    for f in frames:
        yield f.left, f.top
        yield f.right, f.bottom
    for r in routes:
        if r.edge.label:
            (x, y), half_width = r.label_position, text_width(r.edge.label, SMALL_SIZE) / 2
            yield x - half_width, y
            yield x + half_width, y


def _caption_side(frame: Frame, frames: list[Frame], lines: Points) -> Side:
    """Return "right", unless only the left corner is free of edges and of other frames' sides."""

    def is_occupied(side: Side) -> bool:
        caption = frame._replace(caption_side=side).caption_outline
        sides = [
            x
            for other in frames
            if other is not frame and other.top < caption.y < other.bottom
            for x in (other.left, other.right)
        ]
        crosses_side = any(abs(x - caption.x) < caption.width / 2 + 2.0 for x in sides)
        return crosses_side or bool((caption.gauge(lines) < 1).any())

    return "left" if is_occupied("right") and not is_occupied("left") else "right"
