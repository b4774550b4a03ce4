"""A drawing and its layout go in; a self-contained SVG document comes out."""

from __future__ import annotations

from html import escape

from retrodict.plotting.diagram.bezier import Curve
from retrodict.plotting.diagram.drawing import Drawing, Node
from retrodict.plotting.diagram.ink import (
    DASH,
    FILL,
    HALO,
    INK,
    PAPER,
    RAISE,
    ROUND,
    RULE,
    Text,
    captions,
    insets,
    labels,
)
from retrodict.plotting.diagram.labels import SMALL, printable
from retrodict.plotting.diagram.page import Frame, Layout, Place, Route

FONTS = "'STIX Two Text', 'STIXGeneral', 'Times New Roman', Times, serif"


def svg(drawing: Drawing, page: Layout) -> str:
    """The picture as text."""
    width, height = _n(page.width), _n(page.height)
    texts = labels(drawing, page)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="{FONTS}" text-anchor="middle">',
        f"<title>Graphical model of {len(drawing.nodes)} nodes</title>",
        f"<desc>{_xml(_describe(drawing))}</desc>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        *map(_arrow, page.routes),
        *map(_text, captions(page)),
        *map(_frame, page.frames),
        *(_node(node, page.places[node.name], texts[node.name]) for node in drawing.nodes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _describe(drawing: Drawing) -> str:
    """The drawing in words, for those who cannot see it."""
    parts = []
    for kind in FILL:
        if names := [node.name for node in drawing.nodes if node.kind == kind]:
            parts.append(f"{kind}: {', '.join(names)}")
    parts += [f"box {box.name}: {', '.join(box.members)}" for box in drawing.boxes]
    if drawing.edges:
        arrows = (
            f"{edge.source} → {edge.target}{' (dashed)' if edge.style == 'dashed' else ''}"
            for edge in drawing.edges
        )
        parts.append(f"edges: {', '.join(arrows)}")
    return ". ".join(parts)


def _arrow(route: Route) -> str:
    edge = route.edge
    dash = f' stroke-dasharray="{_n(*DASH)}"' if edge.style == "dashed" else ""
    head = " ".join(_n(*point) for point in route.head)
    return (
        f"<g><title>{_xml(edge.source)} → {_xml(edge.target)}</title>"
        f'<path d="{_path(route.path)}" fill="none" stroke="{INK}"{dash}/>'
        f'<polygon points="{head}" fill="{INK}"/></g>'
    )


def _path(curve: Curve) -> str:
    text = f"M{_n(*curve[0])}"
    for k in range(1, len(curve), 3):
        text += "C" + " ".join(_n(*point) for point in curve[k : k + 3])
    return text


def _frame(frame: Frame) -> str:
    wide, tall = frame.right - frame.left, frame.bottom - frame.top
    return (
        f'<g><title>{_xml(frame.box.name)}</title><rect x="{_n(frame.left)}" '
        f'y="{_n(frame.top)}" width="{_n(wide)}" height="{_n(tall)}" rx="{ROUND:g}" '
        f'fill="none" stroke="{RULE}"/></g>'
    )


def _node(node: Node, place: Place, text: Text) -> str:
    paint = f'fill="{FILL[node.kind]}" stroke="{INK}"'
    shapes = "".join(_outline(place, inset, paint) for inset in insets(node))
    return f"<g><title>{_xml(node.name)}</title>{shapes}{_text(text)}</g>"


def _outline(place: Place, inset: float, paint: str) -> str:
    a, b = place.width / 2 - inset, place.height / 2 - inset
    if place.square:
        x, y, wide, tall = map(_n, (place.x - a, place.y - b, 2 * a, 2 * b))
        return f'<rect x="{x}" y="{y}" width="{wide}" height="{tall}" {paint}/>'
    x, y, across, down = map(_n, (place.x, place.y, a, b))
    return f'<ellipse cx="{x}" cy="{y}" rx="{across}" ry="{down}" {paint}/>'


def _text(text: Text) -> str:
    parts, level = [], 0
    for span in text.spans:
        style = f' dy="{_n(RAISE * (level - span.level))}"' if level != span.level else ""
        style += f' font-size="{SMALL:g}"' if span.level else ""
        style += ' font-style="italic"' if span.italic else ""
        words = escape(span.text, quote=False)
        parts.append(f"<tspan{style}>{words}</tspan>" if style else words)
        level = span.level
    anchor = f' text-anchor="{text.anchor}"' if text.anchor != "middle" else ""
    line = f'x="{_n(text.x)}" y="{_n(text.y)}" font-size="{text.size:g}"{anchor}>'
    line += "".join(parts) + "</text>"
    under = f'<text stroke="{PAPER}" stroke-width="{HALO:g}" stroke-linejoin="round" {line}'
    return (under if text.halo else "") + f"<text {line}"


def _n(*values: float) -> str:
    return ",".join(f"{round(value, 2):g}" for value in values)


def _xml(text: str) -> str:
    return escape(printable(text), quote=False)
