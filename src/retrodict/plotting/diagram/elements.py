"""Description of a diagram: its nodes, edges and boxes, without positions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DiagramNode:
    """A variable (circle) or a factor (square)."""

    name: str
    label: str
    kind: Literal["latent", "observed", "factor"]


@dataclass(frozen=True)
class DiagramEdge:
    """An arrow from source to target; dashed if the source belongs to another time step."""

    source: str
    target: str
    style: Literal["solid", "dashed"] = "solid"
    label: str = ""


@dataclass(frozen=True)
class Box:
    """A plate around its member nodes; `name` is its caption."""

    name: str
    members: tuple[str, ...]

    def crosses(self, other: Box) -> bool:
        """Return whether the two boxes share members but neither contains the other."""
        members, other_members = set(self.members), set(other.members)
        return (
            bool(members & other_members)
            and not members <= other_members
            and not other_members <= members
        )


@dataclass(frozen=True)
class Diagram:
    """Nodes, edges and boxes to draw. Their order only breaks ties in the layout.

    Raises:
        ValueError: If node names repeat, or an edge or box refers to an unknown node.
    """

    nodes: tuple[DiagramNode, ...]
    edges: tuple[DiagramEdge, ...]
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        """Check that node names are unique and that all references resolve."""
        counts = Counter(node.name for node in self.nodes)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"node names must be unique; these are repeated: {repeated}")
        references = [name for edge in self.edges for name in (edge.source, edge.target)]
        references += [name for box in self.boxes for name in box.members]
        if unknown := [name for name in dict.fromkeys(references) if name not in counts]:
            raise ValueError(
                f"edges or boxes refer to unknown nodes: {unknown}; the nodes are {list(counts)}"
            )
