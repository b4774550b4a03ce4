"""Assignment of nodes to layers, with dummy items where an edge spans several layers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, takewhile
from typing import NamedTuple

import networkx as nx

from retrodict.plotting.diagram.box_groups import group_boxes
from retrodict.plotting.diagram.elements import Diagram
from retrodict.plotting.diagram.labels import EDGE_LABEL_SIZE, text_width

# A parameter of a long series has edges across hundreds of layers: the longest get no dummies.
MAX_DUMMIES = 800
# Weight of a segment by how many of its ends are nodes: long edges should bend least.
STRAIGHTNESS = (8.0, 2.0, 1.0)


class AtomKey(NamedTuple):
    """An atom of a group of boxes, by the indices of both."""

    group: int
    atom: int


def loop_width(label: str) -> float:
    """Return how far an edge from a node to itself extends beyond the node."""
    return 28.0 + (text_width(label, EDGE_LABEL_SIZE) + 4.0 if label else 0.0)


class LayeredGraph:
    """A diagram's nodes and dummies (together: items) in layers from top to bottom.

    Items are numbered, first the nodes and then the dummies.

    Attributes:
        boxes: Boxes, after splitting those that admit no contiguous order.
        groups: Groups of crossing boxes.
        names: Names of the nodes.
        layer: Layer of every item.
        layers: Items of every layer.
        box_layers: First and last layer of every box.
        atom_boxes: Boxes that contain an atom.
        atoms: Atoms around every item, from the outermost group inward.
        boxes_around: Boxes around every item.
        segments: Upper item, lower item and weight of every part of an edge between two layers.
        flat_edges: Edges without segments, which only attract their ends horizontally.
        dummies: Dummies of an edge by its index, from source to target.
        right_margin: Space that every node needs on its right for edges that bend there.
    """

    def __init__(self, diagram: Diagram) -> None:
        layer = _assign_layers(diagram)
        self.boxes, self.groups = group_boxes(diagram)
        self.names = [node.name for node in diagram.nodes]
        self.layer = [layer[name] for name in self.names]
        member_layers = [[layer[m] for m in box.members] for box in self.boxes]
        self.box_layers = [(min(numbers), max(numbers)) for numbers in member_layers]
        members = {
            AtomKey(g, a): names
            for g, group in enumerate(self.groups)
            for a, names in enumerate(group.atoms)
        }
        self.atom_boxes = {
            key: [b for b in self.groups[key.group].boxes if names <= set(self.boxes[b].members)]
            for key, names in members.items()
        }
        group_sizes = [sum(map(len, group.atoms)) for group in self.groups]
        outermost_first = sorted(members, key=lambda key: -group_sizes[key.group])
        self.atoms = [
            tuple(key for key in outermost_first if name in members[key]) for name in self.names
        ]
        self.segments: list[tuple[int, int, float]] = []
        self.flat_edges: list[tuple[int, int]] = []
        self.dummies: dict[int, list[int]] = {}
        self.right_margin = [0.0] * len(self.names)
        self._add_edges(diagram, layer)
        self.boxes_around = [
            {b for key in keys for b in self.atom_boxes[key]} for keys in self.atoms
        ]
        self.layers: list[list[int]] = [[] for _ in range(max(self.layer, default=-1) + 1)]
        for i, number in enumerate(self.layer):
            self.layers[number].append(i)

    def _add_edges(self, diagram: Diagram, layer: dict[str, int]) -> None:
        """Add short edges first, so that the longest go without dummies if there are too many."""
        index = {name: i for i, name in enumerate(self.names)}
        pairs = Counter(frozenset((edge.source, edge.target)) for edge in diagram.edges)
        length = [abs(layer[edge.source] - layer[edge.target]) for edge in diagram.edges]
        dummies_left = MAX_DUMMIES
        for number in sorted(range(len(length)), key=length.__getitem__):
            edge = diagram.edges[number]
            a, b = index[edge.source], index[edge.target]
            dummies_left -= max(length[number] - 1, 0)
            if edge.style == "dashed" and pairs[frozenset((edge.source, edge.target))] > 1:
                # The dashed edge bends beside the other edge.
                self.right_margin[a] = max(self.right_margin[a], 24.0)
            if a == b:
                self.right_margin[a] = max(self.right_margin[a], loop_width(edge.label))
            elif length[number] == 0 or dummies_left < 0:
                self.flat_edges.append((a, b))
            else:
                self._add_segments(number, a, b, 1.0 if edge.style == "solid" else 0.3)

    def _add_segments(self, number: int, a: int, b: int, weight: float) -> None:
        step = 1 if self.layer[b] > self.layer[a] else -1
        between = range(self.layer[a] + step, self.layer[b], step)
        dummies = [len(self.layer) + k for k in range(len(between))]
        if dummies:
            self.dummies[number] = dummies
        self.layer += between
        self.atoms += [
            max(self._atoms_in_layer(a, layer), self._atoms_in_layer(b, layer), key=len)
            for layer in between
        ]
        for upper, lower in pairwise([a, *dummies, b][::step]):
            num_nodes = (upper < len(self.names)) + (lower < len(self.names))
            self.segments.append((upper, lower, weight * STRAIGHTNESS[num_nodes]))

    def _atoms_in_layer(self, i: int, layer: int) -> tuple[AtomKey, ...]:
        """Return the atoms around node i, inward until a box does not extend to this layer."""

        def extends_to_layer(key: AtomKey) -> bool:
            ends = (self.box_layers[b] for b in self.atom_boxes[key])
            return all(first <= layer <= last for first, last in ends)

        return tuple(takewhile(extends_to_layer, self.atoms[i]))


def _assign_layers(diagram: Diagram) -> dict[str, int]:
    """Assign layers by longest paths over the solid edges, then move sources to their children."""
    solid: nx.DiGraph[str] = nx.DiGraph()
    solid.add_nodes_from(node.name for node in diagram.nodes)
    solid.add_edges_from((e.source, e.target) for e in diagram.edges if e.style == "solid")
    if not nx.is_directed_acyclic_graph(solid):
        order = {node.name: i for i, node in enumerate(diagram.nodes)}
        solid.remove_edges_from([(a, b) for a, b in solid.edges if order[a] >= order[b]])
    generations = list(nx.topological_generations(solid))
    layer = {name: depth for depth, names in enumerate(generations) for name in names}
    for name in reversed(list(layer)):
        if solid.out_degree(name) > solid.in_degree(name):
            layer[name] = min(layer[child] for child in solid.successors(name)) - 1
    # Number the layers that are in use consecutively from 0.
    rank = {number: k for k, number in enumerate(sorted(set(layer.values())))}
    return {name: rank[number] for name, number in layer.items()}
