"""Cubic Bézier curves: construction, evaluation and subdivision.

A curve of k segments has 3k + 1 control points and a parameter that runs from 0 to k.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, hypot

import numpy as np
from numpy.typing import NDArray

Point = tuple[float, float]
Points = NDArray[np.float64]
Curve = tuple[Point, ...]


def bent_line(start: Point, stop: Point, offset: float) -> Curve:
    """Return a line whose middle is displaced sideways by `offset`."""
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    length = hypot(dx, dy) or 1.0
    nx, ny = -dy / length * offset * 4 / 3, dx / length * offset * 4 / 3
    return (
        start,
        (start[0] + dx / 3 + nx, start[1] + dy / 3 + ny),
        (start[0] + 2 * dx / 3 + nx, start[1] + 2 * dy / 3 + ny),
        stop,
    )


def catmull_rom(points: list[Point]) -> Curve:
    """Return the Catmull–Rom spline through the points."""
    p = np.array([points[0], *points, points[-1]])
    tangent = (p[2:] - p[:-2]) / 6
    first_control, second_control = p[1:-2] + tangent[:-1], p[2:-1] - tangent[1:]
    controls = np.stack([first_control, second_control, p[2:-1]], axis=1).reshape(-1, 2)
    return (points[0], *((float(x), float(y)) for x, y in controls))


def num_segments(curve: Sequence[Point]) -> int:
    """Return the number of cubic segments."""
    return (len(curve) - 1) // 3


def evaluate(curve: Sequence[Point], t: float) -> Point:
    """Return the point at parameter t."""
    k = min(int(t), num_segments(curve) - 1)
    return _blossom(curve, k, t - k, t - k, t - k)


def sample(curve: Sequence[Point], count: int = 40) -> Points:
    """Return points at evenly spaced parameters, both ends included: `(count, 2)`."""
    t = np.linspace(0, num_segments(curve), count)
    k = np.minimum(t.astype(int), num_segments(curve) - 1)
    u, p = (t - k)[:, None], np.array(curve)
    a, b, c, d = (p[3 * k + j] for j in range(4))
    points: Points = (1 - u) ** 3 * a + 3 * (1 - u) ** 2 * u * b + 3 * (1 - u) * u**2 * c + u**3 * d
    return points


def subcurve(curve: Sequence[Point], start: float, stop: float) -> Curve:
    """Return the part of the curve between two parameters."""
    points = [evaluate(curve, start)]
    for k in range(int(start), max(int(start) + 1, ceil(stop))):
        a, b = max(start - k, 0.0), min(stop - k, 1.0)
        points += [_blossom(curve, k, *ts) for ts in ((a, a, b), (a, b, b), (b, b, b))]
    return tuple(points)


def _blossom(curve: Sequence[Point], k: int, *ts: float) -> Point:
    """Evaluate the blossom (polar form) of segment k by de Casteljau's algorithm.

    With three equal parameters it gives a point; with mixed ones, control points of a subcurve.
    """
    p = list(curve[3 * k : 3 * k + 4])
    for t in ts:
        p = [((1 - t) * a[0] + t * b[0], (1 - t) * a[1] + t * b[1]) for a, b in pairwise(p)]
    return p[0]
