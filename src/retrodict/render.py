"""A drawing goes in; a picture comes out, as SVG, PNG or DOT text.

Drawn as in figures 2 to 4 of the paper: latent variables are white circles, observed ones grey,
factors squares, plates boxes. There is one layout, that of `layout.py` (for larger drawings that of
the `dot` binary, where there is one), and a writer for each format over it.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import warnings
from collections.abc import Callable
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from matplotlib import patches
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path as Curve
from matplotlib.patheffects import withStroke
from matplotlib.textpath import text_to_path

from retrodict.layout import (
    CAPTION,
    SMALL,
    Box,
    Drawing,
    Edge,
    Frame,
    Layout,
    Node,
    Place,
    Point,
    Route,
    Span,
    caption_place,
    fit,
    layered,
    nested,
    printable,
    sizes,
    span_size,
    typeset,
)

__all__ = ["Box", "Drawing", "Edge", "Node", "Picture"]

INK, RULE = "#000000", "#555555"
FILL = {"latent": "#ffffff", "observed": "#d4d4d4", "factor": "#ffffff", "deterministic": "#ffffff"}
RING = 3.0  # between the two outlines of a deterministic node
DASH, ROUND, HALO = (4.0, 3.0), 7.0, 4.0
RAISE = 4.5  # scripts above and below the line
FONTS = "'STIX Two Text', 'STIXGeneral', 'Times New Roman', Times, serif"
DOT_SECONDS = 5.0
DOT_NODES = range(20, 151)  # fewer: ours are tidier; more: dot may take minutes


class Picture:
    """A drawing on a page: shows in a notebook; `save("x.svg")`, also `.png` and `.dot`."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing

    @cached_property
    def layout(self) -> Layout:
        """Where everything stands."""
        found = from_dot(self.drawing) if _suits_dot(self.drawing) else None
        return found or layered(self.drawing)

    def save(self, path: str | Path) -> Path:
        """Write the picture in the format that the suffix names; gives the path back."""
        path = Path(path)
        writers: dict[str, Callable[[], str | bytes]]
        writers = {".svg": self.to_svg, ".png": self.to_png, ".dot": self.to_dot}
        write = writers.get(path.suffix.lower())
        if write is None:
            known = ", ".join(writers)
            raise ValueError(f"cannot draw {path.name!r}: its suffix must be one of {known}")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot save {path.name!r}: there is no folder {path.parent}")
        content = write()
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def to_svg(self) -> str:
        """The picture as a self-contained SVG document."""
        return _svg(self.drawing, self.layout)

    def to_png(self) -> bytes:
        """The picture as a PNG file."""
        return _png(self.drawing, self.layout)

    def to_dot(self) -> str:
        """The drawing in Graphviz's language; places are left to whoever reads it."""
        return _dot(self.drawing)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def __repr__(self) -> str:
        return f"Picture({len(self.drawing.nodes)} nodes, {len(self.drawing.edges)} edges)"


def _suits_dot(drawing: Drawing) -> bool:
    """Whether `dot` would be better: it has no crossing boxes, and knots edges that go back up."""
    back = any(edge.style == "dashed" and edge.source != edge.target for edge in drawing.edges)
    return len(drawing.nodes) in DOT_NODES and nested(drawing.boxes) and not back


def from_dot(drawing: Drawing) -> Layout | None:
    """The layout that `dot` finds; None without it, if it fails, or if boxes cross."""
    program = shutil.which("dot")
    if program is None:
        return None
    try:
        run = subprocess.run(
            [program, "-Tjson0"],
            input=_dot(drawing).encode(),
            capture_output=True,
            timeout=DOT_SECONDS,
            check=True,
        )
        return _read_dot(drawing, json.loads(run.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
        return None


def _read_dot(drawing: Drawing, found: dict[str, list[dict[str, str]]]) -> Layout:
    def points(text: str) -> list[Point]:
        pairs = (pair.split(",") for pair in text.split())
        return [(float(x), -float(y)) for x, y in pairs]  # dot's y goes up

    objects = {item.get("id", item["name"]): item for item in found["objects"]}
    arcs = {item["id"]: item for item in found.get("edges", [])}
    size = sizes(drawing)
    places = {}
    for i, node in enumerate(drawing.nodes):
        (centre,) = points(objects[f"n{i}"]["pos"])
        places[node.name] = Place(*centre, *size[node.name], node.kind == "factor")
    routes = []
    for i, edge in enumerate(drawing.edges):
        arc = arcs[f"e{i}"]
        end, *path = points(arc["pos"].removeprefix("e,"))
        (label,) = points(arc["lp"]) if "lp" in arc else [path[len(path) // 2]]
        routes.append(Route(edge, tuple(path), end, label))
    frames = []
    for i, box in enumerate(drawing.boxes):
        if box.members:
            left, low, right, high = map(float, objects[f"cluster_{i}"]["bb"].split(","))
            frames.append(Frame(box, left, -high, right, -low))
    return fit(places, routes, frames)


def _quote(text: str) -> str:
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _html(spans: tuple[Span, ...]) -> str:
    """A label in DOT's HTML-like form."""
    parts = []
    for span in spans:
        text = escape(span.text, quote=False)
        text = f"<i>{text}</i>" if span.italic else text
        tag = {-1: "sub", 0: "", 1: "sup"}[span.level]
        parts.append(f"<{tag}>{text}</{tag}>" if tag else text)
    return f"<{''.join(parts)}>" if spans[0].text.strip() else '""'


def _dot(drawing: Drawing) -> str:
    labels, size = typeset(drawing), sizes(drawing)
    lines = [
        "digraph {",
        '  graph [nodesep=0.3, ranksep=0.4, newrank=true, fontname="Times", fontsize=11.5];',
        '  node [fontname="Times", fixedsize=true, style=filled, fillcolor=white];',
        '  edge [arrowsize=0.7, fontname="Times", fontsize=11];',
    ]
    for i, node in enumerate(drawing.nodes):
        spans = labels[node.name]
        double = node.kind == "deterministic"
        # dot draws the second outline around the size given.
        width, height = (side - 8.0 * double for side in size[node.name])
        shape = "box" if node.kind == "factor" else "ellipse"
        more = f', fillcolor="{FILL[node.kind]}"' + (", peripheries=2" if double else "")
        lines.append(
            f"  {_quote(node.name)} [id=n{i}, shape={shape}, width={width / 72:.4f}, "
            f"height={height / 72:.4f}, fontsize={span_size(spans[0], spans):g}, "
            f"label={_html(spans)}{more}];"
        )
    lines += _clusters([(i, box) for i, box in enumerate(drawing.boxes) if box.members])
    for i, edge in enumerate(drawing.edges):
        more = ", style=dashed, constraint=false, weight=0" if edge.style == "dashed" else ""
        # A no-break space keeps the label off the line.
        more += f", label={_html((Span(chr(0xA0) + printable(edge.label)),))}" if edge.label else ""
        lines.append(f"  {_quote(edge.source)} -> {_quote(edge.target)} [id=e{i}{more}];")
    return "\n".join([*lines, "}"]) + "\n"


def _clusters(boxes: list[tuple[int, Box]], indent: str = "  ") -> list[str]:
    """Nested clusters. DOT has no crossing ones: of two such boxes, the smaller is left out."""
    lines = []
    boxes = sorted(boxes, key=lambda item: -len(set(item[1].members)))
    while boxes:
        (i, box), *boxes = boxes
        boxes = [item for item in boxes if nested([box, item[1]])]
        inner = [item for item in boxes if set(item[1].members) <= set(box.members)]
        boxes = [item for item in boxes if item not in inner]
        label = _html((Span(printable(box.name)),))
        lines += [
            f"{indent}subgraph cluster_{i} {{",
            f"{indent}  graph [label={label}, labelloc=b, labeljust=r, style=rounded, margin=10];",
            f"{indent}  {' '.join(_quote(name) + ';' for name in box.members)}",
            *_clusters(inner, indent + "  "),
            f"{indent}}}",
        ]
    return lines


def _head(route: Route) -> tuple[Point, Point, Point]:
    """The arrowhead: its tip and the two ends of its base, where the line stops."""
    (x, y), (a, b) = route.tip, route.path[-1]
    dx, dy = 0.4 * (x - a), 0.4 * (y - b)
    return (x, y), (a - dy, b + dx), (a + dy, b - dx)


class _Text(NamedTuple):
    """A line of text on its baseline; a halo keeps it readable where lines pass behind it."""

    x: float
    y: float
    spans: tuple[Span, ...]
    size: float
    anchor: Literal["start", "middle", "end"] = "middle"
    halo: bool = False


def _texts(drawing: Drawing, page: Layout) -> tuple[list[_Text], dict[str, _Text]]:
    """Captions of boxes and edges, which lie over the lines; and the labels of the nodes."""
    over = []
    for frame in page.frames:
        spot, left = caption_place(frame), frame.caption == "left"
        edge = spot.x - spot.width / 2 if left else spot.x + spot.width / 2
        words = (Span(printable(frame.box.name)),)
        over.append(
            _Text(edge, spot.y + 4.0, words, CAPTION, "start" if left else "end", halo=True)
        )
    for route in page.routes:
        if route.edge.label:
            x, y = route.label
            over.append(_Text(x, y + 3.5, (Span(printable(route.edge.label)),), SMALL, halo=True))
    labels = {}
    for name, spans in typeset(drawing).items():
        size = span_size(spans[0], spans)
        labels[name] = _Text(page.places[name].x, page.places[name].y + 0.32 * size, spans, size)
    return over, labels


def _n(*values: float) -> str:
    return ",".join(f"{round(value, 2):g}" for value in values)


def _xml(text: str) -> str:
    return escape(printable(text), quote=False)


def _svg_path(points: tuple[Point, ...]) -> str:
    text = f"M{_n(*points[0])}"
    for k in range(1, len(points), 3):
        text += "C" + " ".join(_n(*point) for point in points[k : k + 3])
    return text


def _svg_text(text: _Text) -> str:
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
    under = f'<text stroke="#ffffff" stroke-width="{HALO:g}" stroke-linejoin="round" {line}'
    return (under if text.halo else "") + f"<text {line}"


def _svg(drawing: Drawing, page: Layout) -> str:
    over, labels = _texts(drawing, page)
    width, height = _n(page.width), _n(page.height)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="{FONTS}" text-anchor="middle">',
        f"<title>Graphical model of {len(drawing.nodes)} nodes</title>",
        f"<desc>{_xml(_describe(drawing))}</desc>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for route in page.routes:
        edge = route.edge
        dash = f' stroke-dasharray="{_n(*DASH)}"' if edge.style == "dashed" else ""
        head = " ".join(_n(*point) for point in _head(route))
        out.append(
            f"<g><title>{_xml(edge.source)} → {_xml(edge.target)}</title>"
            f'<path d="{_svg_path(route.path)}" fill="none" stroke="{INK}"{dash}/>'
            f'<polygon points="{head}" fill="{INK}"/></g>'
        )
    out += map(_svg_text, over)
    for frame in page.frames:
        wide, tall = frame.right - frame.left, frame.bottom - frame.top
        out.append(
            f'<g><title>{_xml(frame.box.name)}</title><rect x="{_n(frame.left)}" '
            f'y="{_n(frame.top)}" width="{_n(wide)}" height="{_n(tall)}" rx="{ROUND:g}" '
            f'fill="none" stroke="{RULE}"/></g>'
        )
    for node in drawing.nodes:
        paint = f'fill="{FILL[node.kind]}" stroke="{INK}"'
        insets = (0.0, RING) if node.kind == "deterministic" else (0.0,)
        shapes = "".join(_svg_shape(page.places[node.name], inset, paint) for inset in insets)
        text = _svg_text(labels[node.name])
        out.append(f"<g><title>{_xml(node.name)}</title>{shapes}{text}</g>")
    return "\n".join([*out, "</svg>"]) + "\n"


def _svg_shape(place: Place, inset: float, paint: str) -> str:
    a, b = place.width / 2 - inset, place.height / 2 - inset
    if place.square:
        x, y, wide, tall = map(_n, (place.x - a, place.y - b, 2 * a, 2 * b))
        return f'<rect x="{x}" y="{y}" width="{wide}" height="{tall}" {paint}/>'
    x, y, across, down = map(_n, (place.x, place.y, a, b))
    return f'<ellipse cx="{x}" cy="{y}" rx="{across}" ry="{down}" {paint}/>'


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


def _png(drawing: Drawing, page: Layout) -> bytes:
    over, labels = _texts(drawing, page)
    figure = Figure(figsize=(page.width / 72, page.height / 72), facecolor="#ffffff")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, page.width), ylim=(page.height, 0))
    axes.set_axis_off()

    def shape(patch: patches.Patch, order: int, fill: str = "none", line: str = INK) -> None:
        patch.set(facecolor=fill, edgecolor=line, linewidth=1.0, zorder=order)
        axes.add_patch(patch)

    for frame in page.frames:
        wide, tall = frame.right - frame.left, frame.bottom - frame.top
        style = f"round,pad=0,rounding_size={ROUND}"
        shape(patches.FancyBboxPatch((frame.left, frame.top), wide, tall, style), 4, line=RULE)
    for route in page.routes:
        codes = [Curve.MOVETO, *[Curve.CURVE4] * (len(route.path) - 1)]
        line = patches.PathPatch(Curve(np.array(route.path), codes), capstyle="butt")
        if route.edge.style == "dashed":
            line.set_linestyle((0.0, DASH))
        shape(line, 2)
        shape(patches.Polygon(np.array(_head(route)), closed=True), 2, INK, "none")
    for text in over:
        _png_text(axes, text)
    for node in drawing.nodes:
        place = page.places[node.name]
        for inset in (0.0, RING) if node.kind == "deterministic" else (0.0,):
            a, b = place.width - 2 * inset, place.height - 2 * inset
            if place.square:
                outline: patches.Patch = patches.Rectangle((place.x - a / 2, place.y - b / 2), a, b)
            else:
                outline = patches.Ellipse((place.x, place.y), a, b)
            shape(outline, 4, FILL[node.kind])
        _png_text(axes, labels[node.name])
    result = io.BytesIO()
    # Twice the size for sharp screens, but not without bound: large pages are seen from afar.
    scale = min(
        2.0, 20_000 / max(page.width, page.height), (2e7 / (page.width * page.height)) ** 0.5
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Glyph .* missing from")
        figure.savefig(result, format="png", dpi=72 * scale, metadata={"Software": None})
    return result.getvalue()


def _png_text(axes: Axes, text: _Text) -> None:
    pieces = []
    for span in text.spans:
        font = FontProperties(
            family=["STIXGeneral", "DejaVu Serif", "DejaVu Sans"],
            style="italic" if span.italic else "normal",
            size=SMALL if span.level else text.size,
        )
        width, _, _ = text_to_path.get_text_width_height_descent(span.text, font, ismath=False)
        pieces.append((span, font, width))
    x = (
        text.x
        - sum(width for *_, width in pieces)
        * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.anchor]
    )
    for span, font, width in pieces:
        written = axes.text(x, text.y - RAISE * span.level, span.text, font=font, color=INK)
        written.set(ha="left", va="baseline", parse_math=False, zorder=3 if text.halo else 5)
        if text.halo:
            written.set_path_effects([withStroke(linewidth=HALO, foreground="#ffffff")])
        x += width
