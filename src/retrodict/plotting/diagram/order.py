"""A grid goes in; an order of its items from left to right, with few crossings, comes out.

Barycentre sweeps (Sugiyama, Tagawa & Toda 1981) over keys that keep the members of a box together.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from statistics import fmean

from retrodict.plotting.diagram.grid import Grid

SWEEPS = 16


def untangle(grid: Grid) -> list[int]:
    """A left-to-right order of everything, members of a box together, with few crossings."""
    count, groups = len(grid.row), range(len(grid.groups))
    key = [float(i) for i in range(count)]
    middle = [0.0 for _ in groups]
    flip = [1 for _ in groups]  # whether the atoms of a group are read from the left or the right
    members: list[list[int]] = [[] for _ in groups]
    for i, path in enumerate(grid.path):
        for g, _ in path:
            members[g].append(i)
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for upper, lower, _ in grid.links:
        above[lower].append(upper)
        below[upper].append(lower)

    def rank(i: int) -> tuple[tuple[float, int, int], ...]:
        around = tuple((middle[g], g, flip[g] * a) for g, a in grid.path[i])
        return (*around, (key[i], len(groups) + i, 0))

    def centre(some: Iterable[int]) -> None:
        for g in some:
            middle[g] = sum(key[i] for i in members[g]) / len(members[g])
            if last := len(grid.groups[g].atoms) - 1:
                ends = [[key[i] for i in members[g] if (g, a) in grid.path[i]] for a in (0, last)]
                if lean := fmean(ends[1]) - fmean(ends[0]):
                    flip[g] = 1 if lean > 0 else -1

    def spread(row: list[int]) -> None:
        for place, i in enumerate(sorted(row, key=rank)):
            key[i] = place - (len(row) - 1) / 2

    centre(groups)
    for row in grid.rows:
        spread(row)
    orders = [sorted(range(count), key=rank)]
    for sweep in range(SWEEPS):
        near = below if sweep % 2 else above
        for row in reversed(grid.rows) if sweep % 2 else grid.rows:
            for i in row:
                if near[i]:
                    key[i] = sum(key[j] for j in near[i]) / len(near[i])
            centre({g for i in row for g, _ in grid.path[i]})
            spread(row)
        centre(groups)
        orders.append(sorted(range(count), key=rank))
    return min(orders, key=lambda order: crossings(grid, order))


def crossings(grid: Grid, order: list[int]) -> tuple[int, float]:
    """How many edges cross, then how far they lean."""
    place = [0.0] * len(order)
    turn = {i: k for k, i in enumerate(order)}
    for row in grid.rows:
        for k, i in enumerate(sorted(row, key=turn.__getitem__)):
            place[i] = k - (len(row) - 1) / 2
    strips: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for upper, lower, _ in grid.links:
        strips[grid.row[upper]].append((place[upper], place[lower]))
    total = 0
    for strip in strips.values():
        ends: list[float] = []
        for _, end in sorted(strip):
            total += len(ends) - bisect_right(ends, end)
            insort(ends, end)
    return total, sum(abs(a - b) for strip in strips.values() for a, b in strip)


def moves(grid: Grid, order: list[int]) -> Iterator[list[int]]:
    """Orders in which a node or a whole box has been moved left past its neighbour."""
    for depth in range(max(map(len, grid.path), default=0) + 1):

        def unit(i: int, depth: int = depth) -> tuple[object, int, bool]:
            path = grid.path[i]
            single = len(path) <= depth
            return (path[:depth], i if single else path[depth][0], single)

        runs = [(key, list(run)) for key, run in groupby(order, key=unit)]
        rows = [{grid.row[i] for i in run} for _, run in runs]
        for b, ((scope, _, _), run) in enumerate(runs):
            if len(grid.path[run[0]]) < depth:
                continue
            beside = (
                a for a in range(b - 1, -1, -1) if runs[a][0][0] == scope and rows[a] & rows[b]
            )
            if (a := next(beside, None)) is not None:
                moved = [*runs[:a], runs[b], *runs[a:b], *runs[b + 1 :]]
                yield [i for _, members in moved for i in members]
