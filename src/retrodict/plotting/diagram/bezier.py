"""Points go in; cubic Bézier curves through or beside them, and parts of curves, come out.

A curve is a run of 3k + 1 points; its parameter goes from 0 to k, one unit a piece.
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


def bow(start: Point, stop: Point, aside: float) -> Curve:
    """A straight line, or one bent to its side."""
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    length = hypot(dx, dy) or 1.0
    nx, ny = -dy / length * aside * 4 / 3, dx / length * aside * 4 / 3
    return (
        start,
        (start[0] + dx / 3 + nx, start[1] + dy / 3 + ny),
        (start[0] + 2 * dx / 3 + nx, start[1] + 2 * dy / 3 + ny),
        stop,
    )


def through(points: list[Point]) -> Curve:
    """A smooth curve through points (Catmull and Rom)."""
    p = np.array([points[0], *points, points[-1]])
    slope = (p[2:] - p[:-2]) / 6
    leave, arrive = p[1:-2] + slope[:-1], p[2:-1] - slope[1:]
    bends = np.stack([leave, arrive, p[2:-1]], axis=1).reshape(-1, 2)
    return (points[0], *((float(x), float(y)) for x, y in bends))


def pieces(curve: Sequence[Point]) -> int:
    """How many cubics the curve is made of."""
    return (len(curve) - 1) // 3


def at(curve: Sequence[Point], t: float) -> Point:
    """The point at parameter t."""
    k = min(int(t), pieces(curve) - 1)
    return _blossom(curve, k, t - k, t - k, t - k)


def sample(curve: Sequence[Point], count: int = 40) -> Points:
    """Points at evenly spaced parameters, both ends among them."""
    t = np.linspace(0, pieces(curve), count)
    k = np.minimum(t.astype(int), pieces(curve) - 1)
    u, p = (t - k)[:, None], np.array(curve)
    a, b, c, d = (p[3 * k + j] for j in range(4))
    points: Points = (1 - u) ** 3 * a + 3 * (1 - u) ** 2 * u * b + 3 * (1 - u) * u**2 * c + u**3 * d
    return points


def part(curve: Sequence[Point], start: float, stop: float) -> Curve:
    """The curve between two of its parameters."""
    points = [at(curve, start)]
    for k in range(int(start), max(int(start) + 1, ceil(stop))):
        a, b = max(start - k, 0.0), min(stop - k, 1.0)
        points += [_blossom(curve, k, *ts) for ts in ((a, a, b), (a, b, b), (b, b, b))]
    return tuple(points)


def _blossom(curve: Sequence[Point], k: int, *ts: float) -> Point:
    """Piece k by de Casteljau, a parameter a round: what splits a curve, not only evaluates it."""
    p = list(curve[3 * k : 3 * k + 4])
    for t in ts:
        p = [((1 - t) * a[0] + t * b[0], (1 - t) * a[1] + t * b[1]) for a, b in pairwise(p)]
    return p[0]
