"""The boxes of a drawing go in; groups of crossing boxes, in an order that can be drawn, come out.

Boxes may nest or cross. All that is asked of the left-to-right order is that the members of a box
stand next to one another; where crossing boxes admit no such order, one of them is cut up.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, permutations
from typing import NamedTuple

import networkx as nx

from retrodict.plotting.diagram.drawing import Box, Drawing

MAX_ATOMS = 7  # crossing boxes are put in order by trying all orders of their pieces

Names = frozenset[str]


class Group(NamedTuple):
    """Boxes that cross (most often a single box), and the atoms they cut one another into."""

    atoms: tuple[Names, ...]
    boxes: tuple[int, ...]


def arrange(drawing: Drawing) -> tuple[list[Box], list[Group]]:
    """Group crossing boxes. A box for which no order exists is drawn in several pieces."""
    names = [node.name for node in drawing.nodes]
    boxes = [box for box in drawing.boxes if box.members]
    while True:
        touching: nx.Graph[int] = nx.empty_graph(len(boxes))
        pairs = combinations(range(len(boxes)), 2)
        touching.add_edges_from((a, b) for a, b in pairs if boxes[a].crosses(boxes[b]))
        groups = []
        for inside in map(sorted, nx.connected_components(touching)):
            atoms = _in_order([boxes[i] for i in inside], names)
            if atoms is None:
                others = [boxes[i] for i in inside[:-1]]
                boxes += _cut(boxes.pop(inside[-1]), others, names)
                break
            groups.append(Group(atoms, tuple(inside)))
        else:
            return boxes, groups


def _cut(box: Box, others: list[Box], names: list[str]) -> list[Box]:
    """The box in pieces that cross none of the others."""
    atoms = list(_atoms(others, names).values())
    atoms.append(frozenset(box.members).difference(*atoms))
    pieces = [tuple(m for m in box.members if m in atom) for atom in atoms]
    return [Box(box.name, piece) for piece in pieces if piece]


def _in_order(boxes: list[Box], names: list[str]) -> tuple[Names, ...] | None:
    """Atoms in an order in which those of each box stand together."""
    atoms = _atoms(boxes, names)
    for order in permutations(atoms) if len(atoms) <= MAX_ATOMS else ():
        runs = [[k for k, marks in enumerate(order) if b in marks] for b in range(len(boxes))]
        if all(run[-1] - run[0] + 1 == len(run) for run in runs):
            return tuple(atoms[marks] for marks in order)
    return None


def _atoms(boxes: list[Box], names: list[str]) -> dict[tuple[int, ...], Names]:
    """The names that lie in exactly the same boxes, by which boxes these are."""
    pieces: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in names:
        pieces[tuple(b for b, box in enumerate(boxes) if name in box.members)].append(name)
    return {marks: frozenset(piece) for marks, piece in pieces.items() if marks}
