"""An order from left to right goes in; where everything stands across the page comes out.

A quadratic program: minimise Σ w (x_i − x_j)² over linked pairs, with x_j − x_i ≥ s for neighbours
and for the sides of the boxes, so that every stranger stays out of every box.
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
from retrodict.plotting.diagram.grid import Grid
from retrodict.plotting.diagram.labels import CAPTION, text_width

GAP, PAD = 18.0, 10.0

Pair = tuple[int, int, float]  # two places i and j, and the weight or distance between them


class Columns(NamedTuple):
    """The middle of every item, left and right side of every box, and what the edges cost."""

    x: list[float]
    sides: list[tuple[float, float]]
    energy: float


def columns(grid: Grid, order: list[int], size: dict[str, tuple[float, float]]) -> Columns:
    """Where everything stands from left to right."""
    line = _Line(grid, order, size)
    pulls = [*grid.links, *((i, j, 0.1) for i, j in grid.flat)]
    pulls += [(i, j, 0.02) for row in line.rows for i, j in pairwise(row)]
    sides = list(zip(line.low, line.high, strict=True))
    pulls += [(low, high, 0.02) for low, high in sides]
    x = _separate(len(order) + 2 * len(sides), pulls, list(line.rules()))
    energy = sum(weight * (x[i] - x[j]) ** 2 for i, j, weight in pulls)
    return Columns(x[: len(order)], [(x[low], x[high]) for low, high in sides], energy)


class _Line:
    """The unknowns, which are the items and then two sides for every box, and what parts them."""

    def __init__(self, grid: Grid, order: list[int], size: dict[str, tuple[float, float]]) -> None:
        boxes, count, stand_ins = range(len(grid.boxes)), len(order), len(order) - len(grid.names)
        self.grid = grid
        self.turn = {i: k for k, i in enumerate(order)}
        self.rows = [sorted(row, key=self.turn.__getitem__) for row in grid.rows]
        self.left = [size[name][0] / 2 for name in grid.names] + [1.0] * stand_ins
        room = grid.room + [0.0] * stand_ins
        self.right = [half + more for half, more in zip(self.left, room, strict=True)]
        self.low = [count + 2 * b for b in boxes]
        self.high = [count + 2 * b + 1 for b in boxes]
        self.wide = [text_width(box.name, CAPTION) + 16.0 for box in grid.boxes]
        self.members = [[i for i in order if b in grid.inside[i]] for b in boxes]
        self.first = [self.turn[members[0]] for members in self.members]
        self.last = [self.turn[members[-1]] for members in self.members]

    def rules(self) -> Iterator[Pair]:
        """Which places stand left of which, and how far at least."""
        for row in self.rows:
            yield from ((i, j, self.right[i] + self.left[j] + GAP) for i, j in pairwise(row))
        for b in range(len(self.members)):
            yield from self._around(b)
        for a, b in combinations(range(len(self.members)), 2):
            yield from self._between(a, b)

    def _around(self, b: int) -> Iterator[Pair]:
        """Members of a box inside its sides, strangers beside it, and room for its caption."""
        grid, turn, low, high = self.grid, self.turn, self.low[b], self.high[b]
        yield low, high, self.wide[b]
        top, bottom = grid.reach[b]
        for u, v, _ in grid.links:
            # Edges that leave through the bottom pass the caption on its left.
            if grid.row[u] == bottom and b in grid.inside[u] and turn[v] <= self.last[b]:
                yield u, high, self.wide[b]
        for i in self.members[b]:
            yield low, i, self.left[i] + PAD
            yield i, high, self.right[i] + PAD
        for i in (i for row in self.rows[top : bottom + 1] for i in row):
            if turn[i] < self.first[b]:
                yield i, low, self.right[i] + PAD
            elif turn[i] > self.last[b]:
                yield high, i, self.left[i] + PAD

    def _between(self, a: int, b: int) -> Iterator[Pair]:
        """Two boxes beside one another, or the sides of one outside those of the other."""
        boxes, reach, low, high = self.grid.boxes, self.grid.reach, self.low, self.high
        one, two = sorted((a, b), key=self.first.__getitem__)
        if self.last[one] < self.first[two]:
            if reach[a][0] <= reach[b][1] and reach[b][0] <= reach[a][1]:
                yield high[one], low[two], PAD
            return
        # The box that starts first, or is larger, has its side further out.
        outer, inner = sorted((a, b), key=lambda c: (self.first[c], -len(self.members[c]), c))
        yield low[outer], low[inner], PAD
        outer, inner = sorted((a, b), key=lambda c: (-self.last[c], -len(self.members[c]), c))
        # A crossing box has its caption to itself, right of the other's border.
        room = self.wide[outer] if boxes[a].crosses(boxes[b]) else PAD
        yield high[inner], high[outer], room


def _separate(size: int, pulls: list[Pair], apart: list[Pair]) -> list[float]:
    """The quadratic program, by ADMM (as in OSQP); then a push until all constraints hold."""
    if not apart:
        return [0.0] * size
    graph: nx.DiGraph[int] = nx.DiGraph((i, j) for i, j, _ in apart)
    turn = {i: k for k, i in enumerate(nx.topological_sort(graph))}
    in_turn = sorted(apart, key=lambda rule: turn[rule[0]])

    def push(x: Points) -> Points:
        for i, j, distance in in_turn:
            x[j] = max(x[j], x[i] + distance)
        return x

    def differences(pairs: list[Pair]) -> sparse.csr_matrix:
        ends = [(j, i) for i, j, _ in pairs]
        rows = np.repeat(np.arange(len(pairs)), 2)
        signs = np.tile([1.0, -1.0], len(pairs))
        return sparse.csr_matrix((signs, (rows, np.ravel(ends))), shape=(len(pairs), size))

    rules, bounds = differences(apart), np.array([distance for *_, distance in apart])
    springs = differences(pulls)
    stiff = springs.T @ sparse.diags([weight for *_, weight in pulls]) @ springs
    rho, sigma = 1.0, 1e-4
    solve = splu(sparse.csc_matrix(stiff + sigma * sparse.eye(size) + rho * rules.T @ rules)).solve
    x = push(np.zeros(size))
    z, dual = rules @ x, np.zeros(len(apart))
    for _ in range(300):
        last, x = x, solve(sigma * x + rules.T @ (rho * z - dual))
        reached = rules @ x
        if np.abs(x - last).max() < 0.02 and (bounds - reached).max() < 0.02:
            break
        z = np.maximum(reached + dual / rho, bounds)
        dual += rho * (reached - z)
    return [float(value) for value in push(x)]
