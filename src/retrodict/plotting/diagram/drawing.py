"""Drawing of a laid-out diagram by matplotlib, as SVG or PNG.

The style follows figures 2 to 4 of Paige & Wood (2016).
"""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import patches
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from retrodict.plotting.diagram.elements import Diagram
from retrodict.plotting.diagram.labels import (
    CAPTION_SIZE,
    EDGE_LABEL_SIZE,
    printable,
    text_path,
    text_width,
    typeset_labels,
)
from retrodict.plotting.diagram.layout import Layout, Outline, Point

LINE_COLOUR, FRAME_COLOUR, BACKGROUND = "#000000", "#555555", "#ffffff"
FILL = {"latent": BACKGROUND, "observed": "#d4d4d4", "factor": BACKGROUND}
MARGIN = 10.0
EDGE_ORDER, CAPTION_ORDER, SHAPE_ORDER, LABEL_ORDER = 2, 3, 4, 5  # drawing order, the top one last


def svg_document(diagram: Diagram, layout: Layout) -> str:
    """Return a self-contained SVG document, with a tooltip for each node, edge and box."""
    content = _save(draw(diagram, layout), format="svg").decode()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", content[content.index("<svg") :], flags=re.S)
    svg = re.sub(r'(?<= )d="[^"]*"', _shorten_path, svg)
    svg = re.sub(r"<g id=(['\"])tooltip (.*?)\1>", r"<g><title>\2</title>", svg)
    svg = svg.replace('pt"', '"', 2)  # width and height in the viewer's unit
    head = (
        f"<title>Graphical model of {len(diagram.nodes)} nodes</title>"
        f"<desc>{escape(printable(_description(diagram)), quote=False)}</desc>"
    )
    return svg.replace(">", f' role="img">{head}', 1)


def _shorten_path(match: re.Match[str]) -> str:
    """Write a path in one line, with two decimals."""
    return re.sub(r"(\.\d\d)\d+", r"\1", " ".join(match[0].split()))


def png_bytes(diagram: Diagram, layout: Layout) -> bytes:
    """Return the content of a PNG file: 2 pixels per point, or less for very large pages."""
    figure = draw(diagram, layout)
    page = figure.get_tightbbox()
    scale = min(2.0, 20_000 / 72 / max(page.width, page.height, 1.0))
    scale = min(scale, (2e7 / 72**2 / max(page.width * page.height, 1.0)) ** 0.5)
    return _save(figure, format="png", dpi=72 * scale)


def draw(diagram: Diagram, layout: Layout) -> Figure:
    """Draw a diagram into a figure that is cropped to the diagram when it is saved."""
    # One unit of the data is one point; the patches extend beyond the axes.
    figure = Figure(figsize=(1, 1), dpi=72)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, 72), ylim=(72, 0))
    axes.set_axis_off()
    for box, left, top, right, bottom in layout.frames:
        border = patches.FancyBboxPatch(
            (left, top), right - left, bottom - top, "round,pad=0,rounding_size=7"
        )
        _add(axes, border, SHAPE_ORDER, box.name, ec=FRAME_COLOUR, fc="none")
        caption = printable(box.name)
        start = right - 7.0 - text_width(caption, CAPTION_SIZE)
        _write(axes, (start, bottom - 4.0), text_path(caption, CAPTION_SIZE), box.name, halo=True)
    for edge, curve, (x, y) in layout.routes:
        arrow = patches.FancyArrowPatch(
            path=Path(curve, [Path.MOVETO, *[Path.CURVE4] * (len(curve) - 1)]),
            arrowstyle="-|>,head_length=8,head_width=3",
            mutation_scale=1.0,
        )
        arrow.set_linestyle((0.0, (4.0, 3.0)) if edge.style == "dashed" else "solid")
        title = f"{edge.source} → {edge.target}"
        _add(axes, arrow, EDGE_ORDER, title, ec=LINE_COLOUR, fc=LINE_COLOUR)
        if edge.label:
            text = printable(edge.label)
            start = x - text_width(text, EDGE_LABEL_SIZE) / 2
            _write(axes, (start, y + 3.5), text_path(text, EDGE_LABEL_SIZE), title, halo=True)
    labels = typeset_labels(diagram)
    for node in diagram.nodes:
        outline, label = layout.outlines[node.name], labels[node.name]
        _add(axes, _shape(outline), SHAPE_ORDER, node.name, ec=LINE_COLOUR, fc=FILL[node.kind])
        letters = label.mathtext(), label.size, label.is_symbol
        baseline = outline.x - text_width(*letters) / 2, outline.y + 0.32 * label.size
        _write(axes, baseline, text_path(*letters), node.name)
    return figure


def _add(axes: Axes, patch: patches.Patch, order: int, tooltip: str, **style: Any) -> None:
    gid = f"tooltip {printable(tooltip)}"
    axes.add_patch(patch)
    patch.set(**{"lw": 1.0, "zorder": order, "clip_on": False, "gid": gid, **style})


def _shape(outline: Outline) -> patches.Patch:
    x, y, width, height, rectangular = outline
    if rectangular:
        return patches.Rectangle((x - width / 2, y - height / 2), width, height)
    return patches.Ellipse((x, y), width, height)


def _write(axes: Axes, baseline: Point, letters: Path, tooltip: str, *, halo: bool = False) -> None:
    """Write a text; a halo keeps it readable where edges pass behind it."""
    patch = patches.PathPatch(Path(np.add(letters.vertices, baseline), letters.codes))
    effects = (
        [withStroke(linewidth=6.0, foreground=BACKGROUND, joinstyle="round")] if halo else None
    )
    order = CAPTION_ORDER if halo else LABEL_ORDER
    _add(axes, patch, order, tooltip, lw=0, ec="none", fc=LINE_COLOUR, path_effects=effects)


def _save(figure: Figure, **options: Any) -> bytes:
    """Return the content of an image file, which is the same for equal figures."""
    buffer = io.BytesIO()
    metadata = {"Software": None} if options["format"] == "png" else {"Date": None}
    with mpl.rc_context({"svg.hashsalt": "retrodict"}):
        figure.savefig(
            buffer,
            bbox_inches="tight",
            pad_inches=MARGIN / 72,
            facecolor=BACKGROUND,
            metadata=metadata,
            **options,
        )
    return buffer.getvalue()


def _description(diagram: Diagram) -> str:
    """Describe the diagram in words, for screen readers."""
    parts = [
        f"{kind}: {', '.join(names)}"
        for kind in FILL
        if (names := [node.name for node in diagram.nodes if node.kind == kind])
    ]
    parts += [f"box {box.name}: {', '.join(box.members)}" for box in diagram.boxes]
    arrows = [
        f"{edge.source} → {edge.target}{' (dashed)' if edge.style == 'dashed' else ''}"
        for edge in diagram.edges
    ]
    return ". ".join([*parts, *([f"edges: {', '.join(arrows)}"] if arrows else [])])
