"""Coordinates of items, layers and boxes, for a given left-to-right order of the items.

Both axes are quadratic programs: minimise Σ w (x_i − x_j)² over connected pairs, subject to
x_j − x_i ≥ d for neighbours and for the sides of boxes, so that exactly the members of a box lie
inside it. The unknowns are the items or layers, then two sides of every box.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

import networkx as nx
import numpy as np
from scipy import sparse
from scipy.sparse.linalg import splu

from retrodict.plotting.diagram.labels import CAPTION_SIZE, text_width
from retrodict.plotting.diagram.layers import LayeredGraph
from retrodict.plotting.diagram.layout import Points

GAP, PADDING, LAYER_GAP, CAPTION_HEIGHT = 18.0, 10.0, 32.0, 16.0

Pair = tuple[int, int, float]  # unknowns i and j, and the weight or least distance between them
Sizes = dict[str, tuple[float, float]]


def horizontal_coordinates(
    graph: LayeredGraph, order: list[int], size: Sizes
) -> tuple[float, Points, Points]:
    """Return the objective, the centre of every item, and the left and right side of every box."""
    separation = _HorizontalSeparation(graph, order, size)
    springs = [*graph.segments, *((i, j, 0.1) for i, j in graph.flat_edges)]
    springs += [(i, j, 0.02) for layer in separation.layers for i, j in pairwise(layer)]
    springs += [(left, right, 0.02) for left, right in separation.sides]
    x = _minimise(len(order) + 2 * len(graph.boxes), springs, list(separation.distances()))
    energy = sum(weight * (x[i] - x[j]) ** 2 for i, j, weight in springs)
    return energy, x[: len(order)], x[len(order) :].reshape(-1, 2)


class _HorizontalSeparation:
    """Least horizontal distances between the items and the sides of boxes."""

    def __init__(self, graph: LayeredGraph, order: list[int], size: Sizes) -> None:
        boxes, num_items = range(len(graph.boxes)), len(order)
        num_dummies = num_items - len(graph.names)
        self.graph = graph
        self.rank = {i: k for k, i in enumerate(order)}
        self.layers = [sorted(layer, key=self.rank.__getitem__) for layer in graph.layers]
        self.left_extent = [size[name][0] / 2 for name in graph.names] + [1.0] * num_dummies
        margins = graph.right_margin + [0.0] * num_dummies
        self.right_extent = [sum(pair) for pair in zip(self.left_extent, margins, strict=True)]
        self.sides = [(num_items + 2 * b, num_items + 2 * b + 1) for b in boxes]
        self.caption_width = [text_width(box.name, CAPTION_SIZE) + 16.0 for box in graph.boxes]
        self.members = [[i for i in order if b in graph.boxes_around[i]] for b in boxes]
        self.first = [self.rank[members[0]] for members in self.members]
        self.last = [self.rank[members[-1]] for members in self.members]

    def distances(self) -> Iterator[Pair]:
        """Yield all constraints: unknown i, unknown j, and the least x_j − x_i."""
        for layer in self.layers:
            for i, j in pairwise(layer):
                yield i, j, self.right_extent[i] + self.left_extent[j] + GAP
        for b in range(len(self.members)):
            yield from self._around_box(b)
        for a, b in combinations(range(len(self.members)), 2):
            yield from self._between_boxes(a, b)

    def _around_box(self, b: int) -> Iterator[Pair]:
        """Keep members inside, other items outside, and room for the caption."""
        graph, rank, (left, right) = self.graph, self.rank, self.sides[b]
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
        graph, sides = self.graph, self.sides
        leftmost, rightmost = sorted((a, b), key=self.first.__getitem__)
        if self.last[leftmost] < self.first[rightmost]:
            (top_a, bottom_a), (top_b, bottom_b) = graph.box_layers[a], graph.box_layers[b]
            if top_a <= bottom_b and top_b <= bottom_a:
                yield sides[leftmost][1], sides[rightmost][0], PADDING
            return
        # The box that starts first, or is larger, has its side further out.
        outer, inner = sorted((a, b), key=lambda c: (self.first[c], -len(self.members[c]), c))
        yield sides[outer][0], sides[inner][0], PADDING
        outer, inner = sorted((a, b), key=lambda c: (-self.last[c], -len(self.members[c]), c))
        yield sides[inner][1], sides[outer][1], PADDING
        if graph.boxes[a].crosses(graph.boxes[b]):
            # No caption crosses the other box's border.
            yield sides[inner][1], sides[outer][1], self.caption_width[outer]
            yield sides[outer][0], sides[inner][1], self.caption_width[inner]


def vertical_coordinates(graph: LayeredGraph, x: Points, size: Sizes) -> tuple[Points, Points]:
    """Return the centre of every layer, and the top and bottom of every box."""
    num_layers = len(graph.layers)
    distances = list(_vertical_distances(graph, x, size))
    springs = [(i, j, 1.0) for i, j, _ in distances]
    y = _minimise(num_layers + 2 * len(graph.boxes), springs, distances)
    return y[:num_layers], y[num_layers:].reshape(-1, 2)


def _vertical_distances(graph: LayeredGraph, x: Points, size: Sizes) -> Iterator[Pair]:
    num_layers = len(graph.layers)
    half_height, max_shift = np.zeros(num_layers), np.zeros(num_layers)
    for name, layer in zip(graph.names, graph.layer, strict=False):  # dummies have no height
        half_height[layer] = max(half_height[layer], size[name][1] / 2)
    for upper, lower, _ in graph.segments:
        layer = graph.layer[lower]
        max_shift[layer] = max(max_shift[layer], abs(x[upper] - x[lower]))
    # Nearly horizontal edges would touch the neighbours of the nodes that they connect.
    gap = LAYER_GAP + np.minimum(60.0, 0.1 * max_shift)
    for k in range(1, num_layers):
        yield k - 1, k, half_height[k - 1] + gap[k] + half_height[k]
    sides = [(num_layers + 2 * b, num_layers + 2 * b + 1) for b in range(len(graph.boxes))]
    for (top, bottom), (first, last) in zip(sides, graph.box_layers, strict=True):
        yield top, first, half_height[first] + PADDING
        yield last, bottom, half_height[last] + CAPTION_HEIGHT + 4.0
        if first > 0:
            yield first - 1, top, half_height[first - 1] + gap[first]
        if last + 1 < num_layers:
            yield bottom, last + 1, gap[last + 1] + half_height[last + 1]
    members = [set(box.members) for box in graph.boxes]
    for a, b in permutations(range(len(members)), 2):
        (first_a, last_a), (first_b, last_b) = graph.box_layers[a], graph.box_layers[b]
        if last_a + 1 == first_b:
            yield sides[a][1], sides[b][0], gap[first_b]
        # Of two boxes that nest or cross, the smaller one is the inner one.
        if members[a] & members[b] and (len(members[a]), -a) < (len(members[b]), -b):
            if first_a == first_b:
                yield sides[b][0], sides[a][0], PADDING
            if last_a == last_b:
                yield sides[a][1], sides[b][1], CAPTION_HEIGHT


def _minimise(num_unknowns: int, springs: list[Pair], distances: list[Pair]) -> Points:
    """Solve the quadratic program by ADMM (as in OSQP), then enforce the constraints exactly."""
    x = np.zeros(num_unknowns)
    if not distances:
        return x
    precedence: nx.DiGraph[int] = nx.DiGraph((i, j) for i, j, _ in distances)
    rank = {i: k for k, i in enumerate(nx.topological_sort(precedence))}
    distances.sort(key=lambda constraint: rank[constraint[0]])

    def push_apart(x: Points) -> Points:
        for i, j, distance in distances:
            x[j] = max(x[j], x[i] + distance)
        return x

    def difference_matrix(pairs: list[Pair]) -> sparse.csr_matrix:
        columns = np.array([(j, i) for i, j, _ in pairs])
        signs, rows = np.tile([1.0, -1.0], len(pairs)), np.repeat(np.arange(len(pairs)), 2)
        return sparse.csr_matrix((signs, (rows, columns.ravel())), (len(pairs), num_unknowns))

    a, bounds = difference_matrix(distances), np.array([distance for *_, distance in distances])
    d = difference_matrix(springs)
    quadratic = d.T @ sparse.diags([weight for *_, weight in springs]) @ d
    sigma = 1e-4
    solve = splu(sparse.csc_matrix(quadratic + sigma * sparse.eye(num_unknowns) + a.T @ a)).solve
    x = push_apart(x)
    z, dual = a @ x, np.zeros(len(distances))
    for _ in range(300):
        previous, x = x, solve(sigma * x + a.T @ (z - dual))
        ax = a @ x
        if np.abs(x - previous).max() < 0.02 and (bounds - ax).max() < 0.02:
            break
        z = np.maximum(ax + dual, bounds)
        dual += ax - z
    return push_apart(x)
