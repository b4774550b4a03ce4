"""Left-to-right order of the items of a layered graph, with few edge crossings.

Barycentre sweeps (Sugiyama, Tagawa & Toda 1981) with sort keys that keep the members of a box
contiguous.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from retrodict.plotting.diagram.layers import LayeredGraph

NUM_SWEEPS = 16
MAX_STARTS, MAX_WORK = 40, 1500  # restarts, and items times restarts: long series take seconds


def barycentre_orders(graph: LayeredGraph) -> list[list[int]]:
    """Return sorted orders with equally few crossings, the members of every box contiguous."""
    rng, count = np.random.default_rng(0), len(graph.layer)
    num_starts = min(MAX_STARTS, 1 + MAX_WORK // max(count, 1))
    starts = [np.arange(count), *(rng.permutation(count) for _ in range(num_starts - 1))]
    orders = [tuple(order) for start in starts for order in _Barycentres(graph, start).sweep()]
    costs = {order: crossing_cost(graph, order) for order in dict.fromkeys(orders)}
    best = sorted(costs, key=costs.__getitem__)[:num_starts]
    return sorted(list(order) for order in best if costs[order][0] == costs[best[0]][0])


class _Barycentres:
    """Horizontal positions of items and of groups of boxes, updated by sweeps over the layers."""

    def __init__(self, graph: LayeredGraph, start: NDArray[np.int_]) -> None:
        count, num_groups = len(graph.layer), len(graph.groups)
        self.graph = graph
        self.position = [float(x) for x in start]
        self.group_position = [0.0] * num_groups
        self.direction = [1] * num_groups  # 1 or −1: atoms of a group run rightward or leftward
        self.members: list[list[int]] = [[] for _ in range(num_groups)]
        for i, keys in enumerate(graph.atoms):
            for key in keys:
                self.members[key.group].append(i)
        self.above: list[list[int]] = [[] for _ in range(count)]
        self.below: list[list[int]] = [[] for _ in range(count)]
        for upper, lower, _ in graph.segments:
            self.above[lower].append(upper)
            self.below[upper].append(lower)

    def sweep(self) -> Iterator[list[int]]:
        """Yield the initial order, and the order after each downward or upward sweep."""
        all_groups = range(len(self.members))
        self._update_groups(all_groups)
        for layer in self.graph.layers:
            self._spread(layer)
        yield self._order()
        for number in range(NUM_SWEEPS):
            upward = number % 2
            neighbours = self.below if upward else self.above
            for layer in reversed(self.graph.layers) if upward else self.graph.layers:
                for i in layer:
                    if neighbours[i]:
                        total = sum(self.position[j] for j in neighbours[i])
                        self.position[i] = total / len(neighbours[i])
                self._update_groups({key.group for i in layer for key in self.graph.atoms[i]})
                self._spread(layer)
            self._update_groups(all_groups)
            yield self._order()

    def _order(self) -> list[int]:
        return sorted(range(len(self.position)), key=self._sort_key)

    def _sort_key(self, i: int) -> tuple[tuple[float, int, int], ...]:
        around = tuple(
            (self.group_position[g], g, self.direction[g] * a) for g, a in self.graph.atoms[i]
        )
        return (*around, (self.position[i], len(self.members) + i, 0))

    def _spread(self, layer: list[int]) -> None:
        """Set the positions in a layer to consecutive integers around 0, in the current order."""
        for k, i in enumerate(sorted(layer, key=self._sort_key)):
            self.position[i] = k - (len(layer) - 1) / 2

    def _update_groups(self, groups: Iterable[int]) -> None:
        """Recompute the mean position and the direction of some groups."""
        for g in groups:
            members = self.members[g]
            self.group_position[g] = sum(self.position[i] for i in members) / len(members)
            if last := len(self.graph.groups[g].atoms) - 1:
                first_mean, last_mean = (
                    fmean(self.position[i] for i in members if (g, a) in self.graph.atoms[i])
                    for a in (0, last)
                )
                if difference := last_mean - first_mean:
                    self.direction[g] = 1 if difference > 0 else -1


def crossing_cost(graph: LayeredGraph, order: Sequence[int]) -> tuple[int, float]:
    """Return the number of edge crossings and the total horizontal length of the edges."""
    position, rank = np.zeros(len(order)), np.argsort(order)
    for layer in graph.layers:
        sorted_layer = sorted(layer, key=rank.__getitem__)
        position[sorted_layer] = np.arange(len(layer)) - (len(layer) - 1) / 2
    segments_by_layer = defaultdict(list)
    for upper, lower, _ in graph.segments:
        segments_by_layer[graph.layer[upper]].append((position[upper], position[lower]))
    num_crossings, length = 0, 0.0
    for segments in segments_by_layer.values():
        upper_ends, lower_ends = np.array(segments).T
        left_above = upper_ends[:, None] < upper_ends
        num_crossings += int(np.sum(left_above & (lower_ends[:, None] > lower_ends)))
        length += float(np.abs(upper_ends - lower_ends).sum())
    return num_crossings, length
