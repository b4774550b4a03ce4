"""Groups of crossing boxes, each with a left-to-right order of its parts.

Boxes may nest or cross. In the left-to-right order of a layout, the members of a box must be
contiguous. If crossing boxes admit no such order, one of them is split into several boxes.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, permutations
from typing import NamedTuple

import networkx as nx

from retrodict.plotting.diagram.elements import Box, Diagram

MAX_ATOMS = 7  # the order of the atoms is found by enumerating all permutations

Names = frozenset[str]


class BoxGroup(NamedTuple):
    """Boxes connected by crossings (most often a single box), and their atoms in order.

    An atom is the set of all nodes that lie in exactly the same boxes of the group.
    """

    atoms: tuple[Names, ...]
    boxes: tuple[int, ...]


def group_boxes(diagram: Diagram) -> tuple[list[Box], list[BoxGroup]]:
    """Group crossing boxes, and split boxes that admit no contiguous order.

    Returns:
        The non-empty boxes, after splitting, and the groups, which index into them.
    """
    names = [node.name for node in diagram.nodes]
    boxes = [box for box in diagram.boxes if box.members]
    while True:
        crossings: nx.Graph[int] = nx.empty_graph(len(boxes))
        pairs = combinations(range(len(boxes)), 2)
        crossings.add_edges_from((a, b) for a, b in pairs if boxes[a].crosses(boxes[b]))
        groups = []
        for component in map(sorted, nx.connected_components(crossings)):
            atoms = _contiguous_order([boxes[i] for i in component], names)
            if atoms is None:
                others = [boxes[i] for i in component[:-1]]
                boxes += _split(boxes.pop(component[-1]), others, names)
                break
            groups.append(BoxGroup(atoms, tuple(component)))
        else:
            return boxes, groups


def _split(box: Box, others: list[Box], names: list[str]) -> list[Box]:
    """Split a box into parts that cross none of the others."""
    atoms = list(_atoms(others, names).values())
    atoms.append(frozenset(box.members).difference(*atoms))
    parts = [tuple(m for m in box.members if m in atom) for atom in atoms]
    return [Box(box.name, part) for part in parts if part]


def _contiguous_order(boxes: list[Box], names: list[str]) -> tuple[Names, ...] | None:
    """Return the atoms in an order in which those of each box are contiguous, if there is one."""
    atoms = _atoms(boxes, names)
    for order in permutations(atoms) if len(atoms) <= MAX_ATOMS else ():
        positions = [[k for k, atom in enumerate(order) if b in atom] for b in range(len(boxes))]
        if all(run[-1] - run[0] + 1 == len(run) for run in positions):
            return tuple(atoms[atom] for atom in order)
    return None


def _atoms(boxes: list[Box], names: list[str]) -> dict[tuple[int, ...], Names]:
    """Map the indices of boxes to the names that lie in exactly these boxes."""
    atoms: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in names:
        atoms[tuple(b for b, box in enumerate(boxes) if name in box.members)].append(name)
    return {indices: frozenset(members) for indices, members in atoms.items() if indices}
