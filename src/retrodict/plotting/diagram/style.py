"""Colours, line styles and text positions that all output formats share.

The style follows figures 2 to 4 of Paige & Wood (2016).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from retrodict.plotting.diagram.elements import Diagram, DiagramNode
from retrodict.plotting.diagram.labels import (
    CAPTION_SIZE,
    SMALL_SIZE,
    Spans,
    font_size,
    plain_spans,
    typeset_labels,
)
from retrodict.plotting.diagram.layout import Layout

LINE_COLOUR, FRAME_COLOUR, BACKGROUND = "#000000", "#555555", "#ffffff"
FILL = {
    "latent": BACKGROUND,
    "observed": "#d4d4d4",
    "factor": BACKGROUND,
    "deterministic": BACKGROUND,
}
DASH_PATTERN, CORNER_RADIUS, HALO_WIDTH = (4.0, 3.0), 7.0, 4.0
RING_GAP = 3.0  # between the two outlines of a deterministic node
SCRIPT_SHIFT = 4.5  # of subscripts and superscripts from the baseline


class TextLine(NamedTuple):
    """A line of text by its baseline; a halo keeps it readable where edges pass behind it."""

    x: float
    y: float
    spans: Spans
    size: float
    anchor: Literal["start", "middle", "end"] = "middle"
    halo: bool = False


def caption_lines(layout: Layout) -> list[TextLine]:
    """Return the captions of boxes and the labels of edges, which are drawn over the edges."""
    lines = []
    for frame in layout.frames:
        outline, spans = frame.caption_outline, plain_spans(frame.box.name)
        half_width, y = outline.width / 2, outline.y + 4.0
        if frame.caption_side == "left":
            x = outline.x - half_width
            lines.append(TextLine(x, y, spans, CAPTION_SIZE, "start", halo=True))
        else:
            x = outline.x + half_width
            lines.append(TextLine(x, y, spans, CAPTION_SIZE, "end", halo=True))
    for route in layout.routes:
        if route.edge.label:
            x, y = route.label_position
            spans = plain_spans(route.edge.label)
            lines.append(TextLine(x, y + 3.5, spans, SMALL_SIZE, halo=True))
    return lines


def node_label_lines(diagram: Diagram, layout: Layout) -> dict[str, TextLine]:
    """Return the labels of the nodes by node name."""
    lines = {}
    for name, spans in typeset_labels(diagram).items():
        outline, size = layout.outlines[name], font_size(spans)
        lines[name] = TextLine(outline.x, outline.y + 0.32 * size, spans, size)
    return lines


def outline_insets(node: DiagramNode) -> tuple[float, ...]:
    """Return how far inside the node's border each of its outlines is drawn."""
    return (0.0, RING_GAP) if node.kind == "deterministic" else (0.0,)
