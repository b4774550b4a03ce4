"""What is to be drawn goes in (nodes, edges, boxes); a checked description of it comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Literal


@dataclass(frozen=True)
class Node:
    """A variable (circle) or a factor (square)."""

    name: str
    label: str
    kind: Literal["latent", "observed", "factor", "deterministic"]


@dataclass(frozen=True)
class Edge:
    """An arrow; dashed where it comes from the previous time step."""

    source: str
    target: str
    style: Literal["solid", "dashed"] = "solid"
    label: str = ""


@dataclass(frozen=True)
class Box:
    """A plate around its members; `name` is the caption."""

    name: str
    members: tuple[str, ...]

    def crosses(self, other: Box) -> bool:
        """Whether the two share members and neither holds the other."""
        ours, theirs = set(self.members), set(other.members)
        return bool(ours & theirs) and not ours <= theirs and not theirs <= ours


def nested(boxes: Iterable[Box]) -> bool:
    """Whether no two boxes cross."""
    return not any(a.crosses(b) for a, b in combinations(boxes, 2))


@dataclass(frozen=True)
class Drawing:
    """What is to be drawn. Order counts only where nothing else decides."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        counts = Counter(node.name for node in self.nodes)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"node names must differ; more than once: {twice}")
        used = [name for edge in self.edges for name in (edge.source, edge.target)]
        used += [name for box in self.boxes for name in box.members]
        if unknown := [name for name in dict.fromkeys(used) if name not in counts]:
            raise ValueError(f"edges or boxes name no node: {unknown}; nodes are {list(counts)}")
