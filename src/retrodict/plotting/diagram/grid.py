"""A drawing goes in; its nodes in layers come out, with a stand-in wherever an edge passes one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, takewhile

import networkx as nx

from retrodict.plotting.diagram.drawing import Drawing
from retrodict.plotting.diagram.labels import SMALL, text_width
from retrodict.plotting.diagram.plates import arrange

MAX_STAND_INS = 800  # edges along a series pass hundreds of layers: the longest go unguided
STRAIGHT = (8.0, 2.0, 1.0)  # a link pulls by how many of its ends are nodes: long edges bend least

Step = tuple[int, int]  # a group of boxes, and the atom of it


def loop_room(label: str) -> float:
    """How far an edge from a node to itself reaches beyond the node."""
    return 28.0 + (text_width(label, SMALL) + 4.0 if label else 0.0)


class Grid:
    """Items in layers: first the nodes, then the stand-ins; each knows the boxes it belongs in."""

    def __init__(self, drawing: Drawing) -> None:
        layer = _layers(drawing)
        self.boxes, self.groups = arrange(drawing)
        self.names = [node.name for node in drawing.nodes]
        self.row = [layer[name] for name in self.names]  # of every item
        # The first and the last row of every box.
        spans = [[layer[m] for m in box.members] for box in self.boxes]
        self.reach = [(min(span), max(span)) for span in spans]
        atoms = {
            (g, a): x for g, group in enumerate(self.groups) for a, x in enumerate(group.atoms)
        }
        self.around = {
            step: [b for b in self.groups[step[0]].boxes if atom <= set(self.boxes[b].members)]
            for step, atom in atoms.items()
        }
        # Of every item, the groups around it, from the outermost inward.
        hull = [sum(map(len, group.atoms)) for group in self.groups]
        steps = sorted(atoms, key=lambda step: -hull[step[0]])
        self.path = [tuple(step for step in steps if name in atoms[step]) for name in self.names]
        self.links: list[tuple[int, int, float]] = []  # upper, lower, and how straight between them
        self.flat: list[tuple[int, int]] = []  # edges that only pull sideways
        self.chains: dict[int, list[int]] = {}  # the stand-ins of an edge, from its source on
        self.room = [0.0] * len(self.names)  # on the right, for edges that bend there
        self._connect(drawing, layer)
        self.inside = [{b for step in path for b in self.around[step]} for path in self.path]
        self.rows: list[list[int]] = [[] for _ in range(max(self.row, default=-1) + 1)]
        for i, row in enumerate(self.row):
            self.rows[row].append(i)

    def _connect(self, drawing: Drawing, layer: dict[str, int]) -> None:
        """Short edges first: they have the first claim on the stand-ins."""
        index = {name: i for i, name in enumerate(self.names)}
        pairs = Counter(frozenset((edge.source, edge.target)) for edge in drawing.edges)
        length = [abs(layer[edge.source] - layer[edge.target]) for edge in drawing.edges]
        spare = MAX_STAND_INS
        for number in sorted(range(len(length)), key=length.__getitem__):
            edge = drawing.edges[number]
            a, b = index[edge.source], index[edge.target]
            spare -= max(length[number] - 1, 0)
            if edge.style == "dashed" and pairs[frozenset((edge.source, edge.target))] > 1:
                self.room[a] = max(self.room[a], 24.0)  # it bends beside the other edge
            if a == b:
                self.room[a] = max(self.room[a], loop_room(edge.label))
            elif length[number] == 0 or spare < 0:
                self.flat.append((a, b))
            else:
                self._link(number, a, b, 1.0 if edge.style == "solid" else 0.3)

    def _link(self, number: int, a: int, b: int, weight: float) -> None:
        step = 1 if self.row[b] > self.row[a] else -1
        passed = range(self.row[a] + step, self.row[b], step)
        chain = [len(self.row) + k for k in range(len(passed))]
        if chain:
            self.chains[number] = chain
        self.row += passed
        self.path += [max(self._within(a, row), self._within(b, row), key=len) for row in passed]
        for upper, lower in pairwise([a, *chain, b][::step]):
            ends = (upper < len(self.names)) + (lower < len(self.names))
            self.links.append((upper, lower, weight * STRAIGHT[ends]))

    def _within(self, i: int, row: int) -> tuple[Step, ...]:
        """The path of node i as far as the boxes along it reach to this row."""

        def reaches(step: Step) -> bool:
            return all(self.reach[b][0] <= row <= self.reach[b][1] for b in self.around[step])

        return tuple(takewhile(reaches, self.path[i]))


def _layers(drawing: Drawing) -> dict[str, int]:
    """Longest paths over the solid edges; then sources come down to the children they feed."""
    solid: nx.DiGraph[str] = nx.DiGraph()
    solid.add_nodes_from(node.name for node in drawing.nodes)
    solid.add_edges_from((e.source, e.target) for e in drawing.edges if e.style == "solid")
    if not nx.is_directed_acyclic_graph(solid):
        order = {node.name: i for i, node in enumerate(drawing.nodes)}
        solid.remove_edges_from([(a, b) for a, b in solid.edges if order[a] >= order[b]])
    generations = list(nx.topological_generations(solid))
    layer = {name: depth for depth, names in enumerate(generations) for name in names}
    for name in reversed(list(layer)):
        if solid.out_degree(name) > solid.in_degree(name):
            layer[name] = min(layer[child] for child in solid.successors(name)) - 1
    used = {value: rank for rank, value in enumerate(sorted(set(layer.values())))}
    return {name: used[value] for name, value in layer.items()}
