"""A layout goes in; its lines of text come out, with the colours and pens all writers share.

Drawn as in figures 2 to 4 of Paige & Wood (2016).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from retrodict.plotting.diagram.drawing import Drawing, Node
from retrodict.plotting.diagram.labels import CAPTION, SMALL, Spans, font_size, plain, typeset
from retrodict.plotting.diagram.page import Layout

INK, RULE, PAPER = "#000000", "#555555", "#ffffff"
FILL = {"latent": PAPER, "observed": "#d4d4d4", "factor": PAPER, "deterministic": PAPER}
DASH, ROUND, HALO = (4.0, 3.0), 7.0, 4.0
RING = 3.0  # between the two outlines of a deterministic node
RAISE = 4.5  # scripts above and below the line


class Text(NamedTuple):
    """A line of text on its baseline; a halo keeps it readable where lines pass behind it."""

    x: float
    y: float
    spans: Spans
    size: float
    anchor: Literal["start", "middle", "end"] = "middle"
    halo: bool = False


def captions(page: Layout) -> list[Text]:
    """The names of boxes and edges, which lie over the lines."""
    result = []
    for frame in page.frames:
        spot, words = frame.caption_place, plain(frame.box.name)
        x, y = spot.width / 2, spot.y + 4.0
        if frame.caption == "left":
            result.append(Text(spot.x - x, y, words, CAPTION, "start", halo=True))
        else:
            result.append(Text(spot.x + x, y, words, CAPTION, "end", halo=True))
    for route in page.routes:
        if route.edge.label:
            x, y = route.label
            result.append(Text(x, y + 3.5, plain(route.edge.label), SMALL, halo=True))
    return result


def labels(drawing: Drawing, page: Layout) -> dict[str, Text]:
    """What is written in the nodes."""
    result = {}
    for name, spans in typeset(drawing).items():
        place, size = page.places[name], font_size(spans)
        result[name] = Text(place.x, place.y + 0.32 * size, spans, size)
    return result


def insets(node: Node) -> tuple[float, ...]:
    """How far inside the border of a node its outlines lie."""
    return (0.0, RING) if node.kind == "deterministic" else (0.0,)
