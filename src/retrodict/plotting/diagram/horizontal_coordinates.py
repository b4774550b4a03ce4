"""Horizontal coordinates of items and boxes, for a given left-to-right order.

A quadratic program: minimise Σ w (x_i − x_j)² over connected pairs, subject to x_j − x_i ≥ d for
neighbours and for the sides of boxes, so that exactly the members of a box lie inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import NamedTuple

import networkx as nx
import numpy as np
from scipy import sparse
from scipy.sparse.linalg import splu

from retrodict.plotting.diagram.bezier import Points
from retrodict.plotting.diagram.labels import CAPTION_SIZE, text_width
from retrodict.plotting.diagram.layers import LayeredGraph

GAP, PADDING = 18.0, 10.0

Pair = tuple[int, int, float]  # unknowns i and j, and the weight or least distance between them


class HorizontalCoordinates(NamedTuple):
    """Centre of every item, left and right side of every box, and the objective's value."""

    x: list[float]
    sides: list[tuple[float, float]]
    energy: float


def horizontal_coordinates(
    graph: LayeredGraph, order: list[int], size: dict[str, tuple[float, float]]
) -> HorizontalCoordinates:
    """Compute horizontal coordinates that respect the order and keep connected items close."""
    constraints = _SeparationConstraints(graph, order, size)
    springs = [*graph.segments, *((i, j, 0.1) for i, j in graph.flat_edges)]
    springs += [(i, j, 0.02) for layer in constraints.layers for i, j in pairwise(layer)]
    sides = list(zip(constraints.left_side, constraints.right_side, strict=True))
    springs += [(left, right, 0.02) for left, right in sides]
    x = _minimise(len(order) + 2 * len(sides), springs, list(constraints.distances()))
    energy = sum(weight * (x[i] - x[j]) ** 2 for i, j, weight in springs)
    return HorizontalCoordinates(
        x[: len(order)], [(x[left], x[right]) for left, right in sides], energy
    )


class _SeparationConstraints:
    """Least distances between the unknowns: the items' centres, then two sides of every box."""

    def __init__(
        self, graph: LayeredGraph, order: list[int], size: dict[str, tuple[float, float]]
    ) -> None:
        boxes, num_items = range(len(graph.boxes)), len(order)
        num_dummies = num_items - len(graph.names)
        self.graph = graph
        self.rank = {i: k for k, i in enumerate(order)}
        self.layers = [sorted(layer, key=self.rank.__getitem__) for layer in graph.layers]
        # Extents of items to the left and right of their centres.
        self.left_extent = [size[name][0] / 2 for name in graph.names] + [1.0] * num_dummies
        margins = graph.right_margin + [0.0] * num_dummies
        self.right_extent = [
            extent + margin for extent, margin in zip(self.left_extent, margins, strict=True)
        ]
        self.left_side = [num_items + 2 * b for b in boxes]
        self.right_side = [num_items + 2 * b + 1 for b in boxes]
        self.caption_width = [text_width(box.name, CAPTION_SIZE) + 16.0 for box in graph.boxes]
        self.members = [[i for i in order if b in graph.boxes_around[i]] for b in boxes]
        self.first = [self.rank[members[0]] for members in self.members]
        self.last = [self.rank[members[-1]] for members in self.members]

    def distances(self) -> Iterator[Pair]:
        """Yield all constraints: unknown i, unknown j, and the least x_j − x_i."""
        for layer in self.layers:
            yield from (
                (i, j, self.right_extent[i] + self.left_extent[j] + GAP) for i, j in pairwise(layer)
            )
        for b in range(len(self.members)):
            yield from self._around_box(b)
        for a, b in combinations(range(len(self.members)), 2):
            yield from self._between_boxes(a, b)

    def _around_box(self, b: int) -> Iterator[Pair]:
        """Keep members inside, other items outside, and room for the caption."""
        graph, rank, left, right = self.graph, self.rank, self.left_side[b], self.right_side[b]
        yield left, right, self.caption_width[b]
        top, bottom = graph.box_layers[b]
        for upper, lower, _ in graph.segments:
            # Edges that leave through the bottom pass to the left of the caption.
            leaves = graph.layer[upper] == bottom and b in graph.boxes_around[upper]
            if leaves and rank[lower] <= self.last[b]:
                yield upper, right, self.caption_width[b]
        for i in self.members[b]:
            yield left, i, self.left_extent[i] + PADDING
            yield i, right, self.right_extent[i] + PADDING
        for i in (i for layer in self.layers[top : bottom + 1] for i in layer):
            if rank[i] < self.first[b]:
                yield i, left, self.right_extent[i] + PADDING
            elif rank[i] > self.last[b]:
                yield right, i, self.left_extent[i] + PADDING

    def _between_boxes(self, a: int, b: int) -> Iterator[Pair]:
        """Separate disjoint boxes, and order the sides of boxes that nest or cross."""
        graph, left, right = self.graph, self.left_side, self.right_side
        leftmost, rightmost = sorted((a, b), key=self.first.__getitem__)
        if self.last[leftmost] < self.first[rightmost]:
            (top_a, bottom_a), (top_b, bottom_b) = graph.box_layers[a], graph.box_layers[b]
            if top_a <= bottom_b and top_b <= bottom_a:
                yield right[leftmost], left[rightmost], PADDING
            return
        # The box that starts first, or is larger, has its side further out.
        outer, inner = sorted((a, b), key=lambda c: (self.first[c], -len(self.members[c]), c))
        yield left[outer], left[inner], PADDING
        outer, inner = sorted((a, b), key=lambda c: (-self.last[c], -len(self.members[c]), c))
        # Captions of crossing boxes must not overlap: the outer one is right of the inner border.
        crosses = graph.boxes[a].crosses(graph.boxes[b])
        yield right[inner], right[outer], self.caption_width[outer] if crosses else PADDING


def _minimise(num_unknowns: int, springs: list[Pair], distances: list[Pair]) -> list[float]:
    """Solve the quadratic program by ADMM (as in OSQP), then enforce the constraints exactly."""
    if not distances:
        return [0.0] * num_unknowns
    precedence: nx.DiGraph[int] = nx.DiGraph((i, j) for i, j, _ in distances)
    rank = {i: k for k, i in enumerate(nx.topological_sort(precedence))}
    left_to_right = sorted(distances, key=lambda constraint: rank[constraint[0]])

    def push_apart(x: Points) -> Points:
        for i, j, distance in left_to_right:
            x[j] = max(x[j], x[i] + distance)
        return x

    def difference_matrix(pairs: list[Pair]) -> sparse.csr_matrix:
        columns = [(j, i) for i, j, _ in pairs]
        rows = np.repeat(np.arange(len(pairs)), 2)
        signs = np.tile([1.0, -1.0], len(pairs))
        shape = (len(pairs), num_unknowns)
        return sparse.csr_matrix((signs, (rows, np.ravel(columns))), shape=shape)

    a, bounds = difference_matrix(distances), np.array([distance for *_, distance in distances])
    d = difference_matrix(springs)
    quadratic = d.T @ sparse.diags([weight for *_, weight in springs]) @ d
    rho, sigma = 1.0, 1e-4
    system = quadratic + sigma * sparse.eye(num_unknowns) + rho * a.T @ a
    solve = splu(sparse.csc_matrix(system)).solve
    x = push_apart(np.zeros(num_unknowns))
    z, dual = a @ x, np.zeros(len(distances))
    for _ in range(300):
        previous, x = x, solve(sigma * x + a.T @ (rho * z - dual))
        ax = a @ x
        if np.abs(x - previous).max() < 0.02 and (bounds - ax).max() < 0.02:
            break
        z = np.maximum(ax + dual / rho, bounds)
        dual += rho * (ax - z)
    return [float(value) for value in push_apart(x)]
