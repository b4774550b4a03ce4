"""PNG output of a diagram.

The only module of `plotting.diagram` that imports matplotlib: import it only to write a PNG file.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from matplotlib import patches
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from matplotlib.textpath import text_to_path

from retrodict.plotting.diagram.elements import Diagram
from retrodict.plotting.diagram.labels import SMALL_SIZE, Span
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

FONTS = ["STIXGeneral", "DejaVu Serif", "DejaVu Sans"]
EDGE_ORDER, CAPTION_ORDER, SHAPE_ORDER, LABEL_ORDER = 2, 3, 4, 5  # drawing order, the top one last


def png_bytes(diagram: Diagram, layout: Layout) -> bytes:
    """Return the content of a PNG file."""
    figure = Figure(figsize=(layout.width / 72, layout.height / 72), facecolor=BACKGROUND)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, layout.width), ylim=(layout.height, 0))
    axes.set_axis_off()
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Glyph .* missing from")
        _draw(axes, diagram, layout)
        figure.savefig(buffer, format="png", dpi=72 * _scale(layout), metadata={"Software": None})
    return buffer.getvalue()


def _scale(layout: Layout) -> float:
    """Return pixels per point: 2 for sharp screens, less for very large pages."""
    longest, area = max(layout.width, layout.height), layout.width * layout.height
    return float(min(2.0, 20_000 / longest, (2e7 / area) ** 0.5))


def _draw(axes: Axes, diagram: Diagram, layout: Layout) -> None:
    for frame in layout.frames:
        _add(axes, _frame(frame), SHAPE_ORDER, line=FRAME_COLOUR)
    for route in layout.routes:
        _add(axes, _line(route), EDGE_ORDER)
        arrowhead = patches.Polygon(np.array(route.arrowhead), closed=True)
        _add(axes, arrowhead, EDGE_ORDER, LINE_COLOUR, "none")
    for line in caption_lines(layout):
        _write(axes, line, CAPTION_ORDER)
    labels = node_label_lines(diagram, layout)
    for node in diagram.nodes:
        for inset in outline_insets(node):
            shape = _shape(layout.outlines[node.name], inset)
            _add(axes, shape, SHAPE_ORDER, FILL[node.kind])
        _write(axes, labels[node.name], LABEL_ORDER)


def _add(
    axes: Axes, patch: patches.Patch, order: int, fill: str = "none", line: str = LINE_COLOUR
) -> None:
    patch.set(facecolor=fill, edgecolor=line, linewidth=1.0, zorder=order)
    axes.add_patch(patch)


def _frame(frame: Frame) -> patches.Patch:
    width, height = frame.right - frame.left, frame.bottom - frame.top
    style = f"round,pad=0,rounding_size={CORNER_RADIUS}"
    return patches.FancyBboxPatch((frame.left, frame.top), width, height, style)


def _line(route: Route) -> patches.Patch:
    codes = [Path.MOVETO, *[Path.CURVE4] * (len(route.path) - 1)]
    style = (0.0, DASH_PATTERN) if route.edge.style == "dashed" else "solid"
    return patches.PathPatch(Path(np.array(route.path), codes), capstyle="butt", linestyle=style)


def _shape(outline: Outline, inset: float) -> patches.Patch:
    width, height = outline.width - 2 * inset, outline.height - 2 * inset
    if outline.rectangular:
        corner = (outline.x - width / 2, outline.y - height / 2)
        return patches.Rectangle(corner, width, height)
    return patches.Ellipse((outline.x, outline.y), width, height)


def _write(axes: Axes, line: TextLine, order: int) -> None:
    fonts = [_font(span, line.size) for span in line.spans]
    widths = [
        text_to_path.get_text_width_height_descent(span.text, font, ismath=False)[0]
        for span, font in zip(line.spans, fonts, strict=True)
    ]
    x = line.x - sum(widths) * {"start": 0.0, "middle": 0.5, "end": 1.0}[line.anchor]
    for span, font, width in zip(line.spans, fonts, widths, strict=True):
        y = line.y - SCRIPT_SHIFT * span.level
        text = axes.text(x, y, span.text, font=font, color=LINE_COLOUR)
        text.set(ha="left", va="baseline", parse_math=False, zorder=order)
        if line.halo:
            text.set_path_effects([withStroke(linewidth=HALO_WIDTH, foreground=BACKGROUND)])
        x += width


def _font(span: Span, size: float) -> FontProperties:
    return FontProperties(
        family=FONTS,
        style="italic" if span.italic else "normal",
        size=SMALL_SIZE if span.level else size,
    )
