"""A drawing goes in; a picture comes out, as SVG, PNG or DOT text.

Drawn as in figures 2 to 4 of the paper: latent variables are white circles, observed ones grey,
factors squares, plates boxes. There is one layout and a writer for each format over it; where the
`dot` binary is at hand and no boxes cross, the places are its own, else those of `layout.py`.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import warnings
from functools import cached_property
from html import escape
from pathlib import Path

import numpy as np
from matplotlib import font_manager, patches
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path as Curve

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
    sizes,
    span_size,
    typeset,
)

__all__ = ["Box", "Drawing", "Edge", "Node", "Picture"]

INK, RULE = "#000000", "#555555"
FILL = {"latent": "#ffffff", "observed": "#d4d4d4", "factor": "#ffffff", "deterministic": "#ffffff"}
RING = 3.0  # between the two outlines of a deterministic node
DASH = (4.0, 3.0)
FONTS = "'STIX Two Text', 'STIXGeneral', 'Times New Roman', Times, serif"
DOT_SECONDS = 5.0


class Picture:
    """A drawing on a page: shows itself in a notebook, or `save("x.svg")`, also `.png` and `.dot`."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing

    @cached_property
    def layout(self) -> Layout:
        """Where everything stands."""
        return from_dot(self.drawing) or layered(self.drawing)

    def save(self, path: str | Path) -> Path:
        """Write the picture in the format that the suffix names; gives the path back."""
        path = Path(path)
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


def from_dot(drawing: Drawing) -> Layout | None:
    """The layout that `dot` finds; None without it, if it fails, or if boxes cross."""
    program = shutil.which("dot")
    boxes = [box for box in drawing.boxes if box.members]
    if program is None or not drawing.nodes or not nested(boxes):
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
        more = ", style=dashed, constraint=false" if edge.style == "dashed" else ""
        # A no-break space keeps the label off the line.
        more += f", label={_html((Span(chr(0xA0) + edge.label),))}" if edge.label else ""
        lines.append(f"  {_quote(edge.source)} -> {_quote(edge.target)} [id=e{i}{more}];")
    return "\n".join([*lines, "}"]) + "\n"


def _clusters(boxes: list[tuple[int, Box]]) -> list[str]:
    """Nested clusters. DOT has no crossing ones: of two such boxes, the smaller is left out."""
    kept: list[tuple[int, Box]] = []
    for i, box in sorted(boxes, key=lambda item: -len(set(item[1].members))):
        if nested([box, *(other for _, other in kept)]):
            kept.append((i, box))
    lines: list[str] = []
    around: list[tuple[int, set[str]]] = []

    def close(members: set[str]) -> None:
        while around and not members <= around[-1][1]:
            around.pop()
            lines.append("  " * (len(around) + 1) + "}")

    # Depth first over the nesting: a box opens inside the last open one that holds it.
    def depth_first(items: list[tuple[int, Box]]) -> list[tuple[int, Box]]:
        chains = {
            i: [j for j, other in kept if set(box.members) <= set(other.members)] for i, box in items
        }
        rank = {i: k for k, (i, _) in enumerate(items)}
        return sorted(items, key=lambda item: [rank[j] for j in chains[item[0]]])

    for i, box in depth_first(kept):
        members = set(box.members)
        close(members)
        indent = "  " * (len(around) + 1)
        label = _html((Span(box.name),))
        lines.append(f"{indent}subgraph cluster_{i} {{")
        lines.append(f"{indent}  graph [label={label}, labelloc=b, labeljust=r, style=rounded, margin=10];")
        lines.append(f"{indent}  {' '.join(_quote(name) + ';' for name in box.members)}")
        around.append((i, members))
    while around:
        around.pop()
        lines.append("  " * (len(around) + 1) + "}")
    return lines


def _head(route: Route) -> tuple[Point, Point, Point]:
    """The arrowhead: its tip and the two ends of its base, where the line stops."""
    (x, y), (a, b) = route.tip, route.path[-1]
    dx, dy = 0.4 * (x - a), 0.4 * (y - b)
    return (x, y), (a - dy, b + dx), (a + dy, b - dx)


def _n(*values: float) -> str:
    return ",".join(f"{round(value, 2):g}" for value in values)


def _svg_path(points: tuple[Point, ...]) -> str:
    text = f"M{_n(*points[0])}"
    for k in range(1, len(points), 3):
        text += "C" + " ".join(_n(*point) for point in points[k : k + 3])
    return text


def _svg_text(x: float, y: float, spans: tuple[Span, ...], size: float) -> str:
    parts, level = [], 0
    for span in spans:
        shift = _n(0.26 * size * (level - span.level))
        style = (f' dy="{shift}"' if level != span.level else "") + (
            f' font-size="{SMALL:g}"' if span.level else ""
        )
        style += ' font-style="italic"' if span.italic else ""
        text = escape(span.text, quote=False)
        parts.append(f"<tspan{style}>{text}</tspan>" if style else text)
        level = span.level
    return f'<text x="{_n(x)}" y="{_n(y + 0.33 * size)}" font-size="{size:g}">{"".join(parts)}</text>'


def _svg(drawing: Drawing, page: Layout) -> str:
    labels = typeset(drawing)
    width, height = _n(page.width), _n(page.height)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="{FONTS}" text-anchor="middle">',
        f"<title>Graphical model of {len(drawing.nodes)} nodes</title>",
        f"<desc>{escape(_describe(drawing), quote=False)}</desc>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for frame in page.frames:
        wide, tall = frame.right - frame.left, frame.bottom - frame.top
        spot = caption_place(frame)
        text = _svg_text(spot.x, spot.y, (Span(frame.box.name),), CAPTION)
        out.append(
            f'<g><title>{escape(frame.box.name, quote=False)}</title><rect x="{_n(frame.left)}" '
            f'y="{_n(frame.top)}" width="{_n(wide)}" height="{_n(tall)}" rx="7" fill="none" '
            f'stroke="{RULE}"/>{text}</g>'
        )
    for route in page.routes:
        edge = route.edge
        dash = f' stroke-dasharray="{_n(*DASH)}"' if edge.style == "dashed" else ""
        head = " ".join(_n(*point) for point in _head(route))
        text = _svg_text(*route.label, (Span(edge.label),), SMALL) if edge.label else ""
        out.append(
            f"<g><title>{escape(edge.source, quote=False)} → {escape(edge.target, quote=False)}</title>"
            f'<path d="{_svg_path(route.path)}" fill="none" stroke="{INK}"{dash}/>'
            f'<polygon points="{head}" fill="{INK}"/>{text}</g>'
        )
    for node in drawing.nodes:
        place, spans = page.places[node.name], labels[node.name]
        paint = f'fill="{FILL[node.kind]}" stroke="{INK}"'
        shapes = _svg_shape(place, 0.0, paint)
        if node.kind == "deterministic":
            shapes += _svg_shape(place, RING, paint)
        text = _svg_text(place.x, place.y, spans, span_size(spans[0], spans))
        out.append(f"<g><title>{escape(node.name, quote=False)}</title>{shapes}{text}</g>")
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


def _maths(spans: tuple[Span, ...]) -> str:
    """A label for matplotlib; only letters and digits get here, so nothing needs escaping."""
    text = ""
    for span in spans:
        face = "mathit" if span.italic else "mathrm"
        text += {-1: "_", 0: "", 1: "^"}[span.level] + f"{{\\{face}{{{span.text}}}}}"
    return f"${text}$"


def _png(drawing: Drawing, page: Layout) -> bytes:
    labels = typeset(drawing)
    figure = Figure(figsize=(page.width / 72, page.height / 72), facecolor="#ffffff")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, page.width), ylim=(page.height, 0))
    axes.set_axis_off()

    def shape(patch: patches.Patch, order: int, fill: str = "none", line: str = INK) -> None:
        patch.set(facecolor=fill, edgecolor=line, linewidth=1.0, zorder=order)
        axes.add_patch(patch)

    def write(x: float, y: float, spans: tuple[Span, ...], size: float) -> None:
        font = font_manager.FontProperties(
            family=["STIXGeneral", "DejaVu Serif", "DejaVu Sans"], size=size, math_fontfamily="stix"
        )
        plain = len(spans) == 1 and not spans[0].italic
        # The middle of a letter such as x, whatever its scripts: the baseline is placed, not the box.
        axes.text(
            x,
            y + 0.33 * size,
            spans[0].text if plain else _maths(spans),
            font=font,
            ha="center",
            va="baseline",
            parse_math=not plain,
            color=INK,
            zorder=4,
        )

    for frame in page.frames:
        wide, tall = frame.right - frame.left, frame.bottom - frame.top
        style = patches.BoxStyle("Round", pad=0, rounding_size=7)
        shape(patches.FancyBboxPatch((frame.left, frame.top), wide, tall, style), 1, line=RULE)
        spot = caption_place(frame)
        write(spot.x, spot.y, (Span(frame.box.name),), CAPTION)
    for route in page.routes:
        codes = [Curve.MOVETO, *[Curve.CURVE4] * (len(route.path) - 1)]
        line = patches.PathPatch(Curve(np.array(route.path), codes), capstyle="butt")
        if route.edge.style == "dashed":
            line.set_linestyle((0.0, DASH))
        shape(line, 2)
        head = patches.Polygon(np.array(_head(route)), closed=True, linewidth=0, zorder=2)
        head.set_facecolor(INK)
        axes.add_patch(head)
        if route.edge.label:
            write(*route.label, (Span(route.edge.label),), SMALL)
    for node in drawing.nodes:
        place, spans = page.places[node.name], labels[node.name]
        for inset in (0.0, RING) if node.kind == "deterministic" else (0.0,):
            a, b = place.width - 2 * inset, place.height - 2 * inset
            if place.square:
                outline: patches.Patch = patches.Rectangle((place.x - a / 2, place.y - b / 2), a, b)
            else:
                outline = patches.Ellipse((place.x, place.y), a, b)
            shape(outline, 3, FILL[node.kind])
        write(place.x, place.y, spans, span_size(spans[0], spans))
    result = io.BytesIO()
    # Agg refuses 2¹⁶ pixels a side; a picture that large is looked at from afar anyway.
    scale = min(2.0, 20_000 / max(page.width, page.height))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Glyph .* missing from")
        figure.savefig(result, format="png", dpi=72 * scale, metadata={"Software": None})
    return result.getvalue()
