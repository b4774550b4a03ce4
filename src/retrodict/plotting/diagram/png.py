"""A drawing and its layout go in; the bytes of a PNG file come out.

The only module that imports matplotlib, and itself imported only when a PNG is asked for.
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

from retrodict.plotting.diagram.drawing import Drawing
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
from retrodict.plotting.diagram.labels import SMALL, Span
from retrodict.plotting.diagram.page import Frame, Layout, Place, Route

FONTS = ["STIXGeneral", "DejaVu Serif", "DejaVu Sans"]
LINES, CAPTIONS, SHAPES, LABELS = 2, 3, 4, 5  # what lies over what


def png(drawing: Drawing, page: Layout) -> bytes:
    """The picture as a file."""
    figure = Figure(figsize=(page.width / 72, page.height / 72), facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, page.width), ylim=(page.height, 0))
    axes.set_axis_off()
    result = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Glyph .* missing from")
        _draw(axes, drawing, page)
        figure.savefig(result, format="png", dpi=72 * _scale(page), metadata={"Software": None})
    return result.getvalue()


def _scale(page: Layout) -> float:
    """Twice the size for sharp screens, but not without bound: large pages are seen from afar."""
    longest, area = max(page.width, page.height), page.width * page.height
    return float(min(2.0, 20_000 / longest, (2e7 / area) ** 0.5))


def _draw(axes: Axes, drawing: Drawing, page: Layout) -> None:
    for frame in page.frames:
        _add(axes, _rounded(frame), SHAPES, line=RULE)
    for route in page.routes:
        _add(axes, _line(route), LINES)
        _add(axes, patches.Polygon(np.array(route.head), closed=True), LINES, INK, "none")
    for text in captions(page):
        _write(axes, text, CAPTIONS)
    texts = labels(drawing, page)
    for node in drawing.nodes:
        for inset in insets(node):
            _add(axes, _outline(page.places[node.name], inset), SHAPES, FILL[node.kind])
        _write(axes, texts[node.name], LABELS)


def _add(axes: Axes, patch: patches.Patch, order: int, fill: str = "none", line: str = INK) -> None:
    patch.set(facecolor=fill, edgecolor=line, linewidth=1.0, zorder=order)
    axes.add_patch(patch)


def _rounded(frame: Frame) -> patches.Patch:
    wide, tall = frame.right - frame.left, frame.bottom - frame.top
    style = f"round,pad=0,rounding_size={ROUND}"
    return patches.FancyBboxPatch((frame.left, frame.top), wide, tall, style)


def _line(route: Route) -> patches.Patch:
    codes = [Path.MOVETO, *[Path.CURVE4] * (len(route.path) - 1)]
    style = (0.0, DASH) if route.edge.style == "dashed" else "solid"
    return patches.PathPatch(Path(np.array(route.path), codes), capstyle="butt", linestyle=style)


def _outline(place: Place, inset: float) -> patches.Patch:
    wide, tall = place.width - 2 * inset, place.height - 2 * inset
    if place.square:
        return patches.Rectangle((place.x - wide / 2, place.y - tall / 2), wide, tall)
    return patches.Ellipse((place.x, place.y), wide, tall)


def _write(axes: Axes, text: Text, order: int) -> None:
    fonts = [_font(span, text.size) for span in text.spans]
    widths = [
        text_to_path.get_text_width_height_descent(span.text, font, ismath=False)[0]
        for span, font in zip(text.spans, fonts, strict=True)
    ]
    x = text.x - sum(widths) * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.anchor]
    for span, font, width in zip(text.spans, fonts, widths, strict=True):
        written = axes.text(x, text.y - RAISE * span.level, span.text, font=font, color=INK)
        written.set(ha="left", va="baseline", parse_math=False, zorder=order)
        if text.halo:
            written.set_path_effects([withStroke(linewidth=HALO, foreground=PAPER)])
        x += width


def _font(span: Span, size: float) -> FontProperties:
    return FontProperties(
        family=FONTS,
        style="italic" if span.italic else "normal",
        size=SMALL if span.level else size,
    )
