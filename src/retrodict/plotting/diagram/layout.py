"""Positions of a diagram's nodes, edges and boxes: x points to the right and y down, in points."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrodict.plotting.diagram.elements import Box, DiagramEdge

Point = tuple[float, float]
Points = NDArray[np.float64]


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
    """The curve of an edge: control points of cubic Bézier segments, `(3 * segments + 1, 2)`."""

    edge: DiagramEdge
    curve: Points
    label_position: Point


class Frame(NamedTuple):
    """The border of a box."""

    box: Box
    left: float
    top: float
    right: float
    bottom: float


class Layout(NamedTuple):
    """The outline of every node, the route of every edge and the frames of boxes."""

    outlines: dict[str, Outline]
    routes: tuple[Route, ...]
    frames: tuple[Frame, ...]
