"""SVG output of a diagram."""

from __future__ import annotations

from html import escape

from retrodict.plotting.diagram.bezier import Curve
from retrodict.plotting.diagram.elements import Diagram, DiagramNode
from retrodict.plotting.diagram.labels import SMALL_SIZE, printable
from retrodict.plotting.diagram.layout import Frame, Layout, Outline, Route
from retrodict.plotting.diagram.style import (
    BACKGROUND,
    CORNER_RADIUS,
    DASH_PATTERN,
    FILL,
    FRAME_COLOUR,
    HALO_WIDTH,
    LINE_COLOUR,
    SCRIPT_SHIFT,
    TextLine,
    caption_lines,
    node_label_lines,
    outline_insets,
)

FONTS = "'STIX Two Text', 'STIXGeneral', 'Times New Roman', Times, serif"


def svg_document(diagram: Diagram, layout: Layout) -> str:
    """Return a self-contained SVG document."""
    width, height = _number(layout.width), _number(layout.height)
    labels = node_label_lines(diagram, layout)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="{FONTS}" text-anchor="middle">',
        f"<title>Graphical model of {len(diagram.nodes)} nodes</title>",
        f"<desc>{_escape(_description(diagram))}</desc>",
        f'<rect width="{width}" height="{height}" fill="{BACKGROUND}"/>',
        *map(_arrow, layout.routes),
        *map(_text, caption_lines(layout)),
        *map(_frame, layout.frames),
        *(_node(node, layout.outlines[node.name], labels[node.name]) for node in diagram.nodes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _description(diagram: Diagram) -> str:
    """Describe the diagram in words, for screen readers."""
    parts = []
    for kind in FILL:
        if names := [node.name for node in diagram.nodes if node.kind == kind]:
            parts.append(f"{kind}: {', '.join(names)}")
    parts += [f"box {box.name}: {', '.join(box.members)}" for box in diagram.boxes]
    if diagram.edges:
        arrows = (
            f"{edge.source} → {edge.target}{' (dashed)' if edge.style == 'dashed' else ''}"
            for edge in diagram.edges
        )
        parts.append(f"edges: {', '.join(arrows)}")
    return ". ".join(parts)


def _arrow(route: Route) -> str:
    edge = route.edge
    dash = f' stroke-dasharray="{_number(*DASH_PATTERN)}"' if edge.style == "dashed" else ""
    arrowhead = " ".join(_number(*point) for point in route.arrowhead)
    return (
        f"<g><title>{_escape(edge.source)} → {_escape(edge.target)}</title>"
        f'<path d="{_path(route.path)}" fill="none" stroke="{LINE_COLOUR}"{dash}/>'
        f'<polygon points="{arrowhead}" fill="{LINE_COLOUR}"/></g>'
    )


def _path(curve: Curve) -> str:
    text = f"M{_number(*curve[0])}"
    for k in range(1, len(curve), 3):
        text += "C" + " ".join(_number(*point) for point in curve[k : k + 3])
    return text


def _frame(frame: Frame) -> str:
    width, height = frame.right - frame.left, frame.bottom - frame.top
    return (
        f'<g><title>{_escape(frame.box.name)}</title><rect x="{_number(frame.left)}" '
        f'y="{_number(frame.top)}" width="{_number(width)}" height="{_number(height)}" '
        f'rx="{CORNER_RADIUS:g}" fill="none" stroke="{FRAME_COLOUR}"/></g>'
    )


def _node(node: DiagramNode, outline: Outline, label: TextLine) -> str:
    paint = f'fill="{FILL[node.kind]}" stroke="{LINE_COLOUR}"'
    shapes = "".join(_shape(outline, inset, paint) for inset in outline_insets(node))
    return f"<g><title>{_escape(node.name)}</title>{shapes}{_text(label)}</g>"


def _shape(outline: Outline, inset: float, paint: str) -> str:
    a, b = outline.width / 2 - inset, outline.height / 2 - inset
    if outline.rectangular:
        x, y, width, height = map(_number, (outline.x - a, outline.y - b, 2 * a, 2 * b))
        return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {paint}/>'
    x, y, rx, ry = map(_number, (outline.x, outline.y, a, b))
    return f'<ellipse cx="{x}" cy="{y}" rx="{rx}" ry="{ry}" {paint}/>'


def _text(line: TextLine) -> str:
    parts, level = [], 0
    for span in line.spans:
        shift = SCRIPT_SHIFT * (level - span.level)
        style = f' dy="{_number(shift)}"' if shift else ""
        style += f' font-size="{SMALL_SIZE:g}"' if span.level else ""
        style += ' font-style="italic"' if span.italic else ""
        text = escape(span.text, quote=False)
        parts.append(f"<tspan{style}>{text}</tspan>" if style else text)
        level = span.level
    anchor = f' text-anchor="{line.anchor}"' if line.anchor != "middle" else ""
    body = f'x="{_number(line.x)}" y="{_number(line.y)}" font-size="{line.size:g}"{anchor}>'
    body += "".join(parts) + "</text>"
    halo = f'<text stroke="{BACKGROUND}" stroke-width="{HALO_WIDTH:g}" stroke-linejoin="round" '
    return (halo + body if line.halo else "") + f"<text {body}"


def _number(*values: float) -> str:
    return ",".join(f"{round(value, 2):g}" for value in values)


def _escape(text: str) -> str:
    return escape(printable(text), quote=False)
