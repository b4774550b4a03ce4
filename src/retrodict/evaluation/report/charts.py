"""Small charts as SVG that takes its colours and fonts from the page.

Matplotlib draws with placeholder colours, which are then replaced by CSS variables: one chart
serves light and dark colour schemes, and scales to the width of the screen.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Placeholders for the colours of the page.
INK, MUTED, ACCENT, BAND, BAD = "#010203", "#040506", "#070809", "#0a0b0c", "#0d0e0f"
_CSS_NAMES = {INK: "ink", MUTED: "muted", ACCENT: "accent", BAND: "band", BAD: "poor"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "retrodict",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.4,
}
SIZE = (3.5, 2.3)

Array = np.ndarray[Any, Any]


def chart(draw: Callable[[Axes], None], label: str, size: tuple[float, float] = SIZE) -> str:
    """Render a chart as an SVG element; `label` describes it for screen readers."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        axes = figure.subplots()
        axes.set_facecolor("none")
        draw(axes)
        text = StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=metadata)
    return _themed(text.getvalue(), label)


def _themed(document: str, label: str) -> str:
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    width, height = (float(n) for n in re.findall(r'(?:width|height)="([0-9.]+)pt"', head))
    box = f'viewBox="0 0 {width:g} {height:g}" style="aspect-ratio: {width:g} / {height:g}"'
    for colour, name in _CSS_NAMES.items():
        rest = rest.replace(colour, f"var(--{name})")
    # Use the page's font family, but keep the sizes.
    rest = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", rest)
    rest = re.sub(r"font-family: [^;\"]*;?", "", rest)
    return f'<svg class="chart" {box} role="img" aria-label="{escape(label)}">{rest}'


def learning_curve(steps: Sequence[int], loss: Sequence[float], refreshes: Sequence[int]) -> str:
    """Draw held-out loss over steps, with marks where new data were simulated."""

    def draw(axes: Axes) -> None:
        axes.plot(steps, loss, color=ACCENT)
        finite = np.asarray([value for value in loss if np.isfinite(value)])
        if finite.size:
            # The first losses are far larger, and would flatten the rest of the curve.
            low, high = finite.min(), np.quantile(finite, 0.9)
            height = max(high - low, 1e-3)
            axes.set_ylim(low - 0.15 * height, high + 0.6 * height)
        bottom = axes.get_xaxis_transform()
        axes.plot(refreshes, np.zeros(len(refreshes)), "|", color=MUTED, ms=5, transform=bottom)
        axes.set_xlabel("gradient steps")
        axes.set_ylabel("held-out loss, nats")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    last = f"{loss[-1]:.3g}" if len(loss) else "unknown"
    return chart(draw, f"Held-out loss over {steps[-1] if steps else 0} steps, {last} at the end")


def bars(values: Mapping[str, float], maximum: float, axis: str, chosen: str) -> str:
    """Draw one bar for each name, with the chosen one highlighted."""

    def draw(axes: Axes) -> None:
        names = list(values)[::-1]
        colours = [ACCENT if name == chosen else BAND for name in names]
        axes.barh(names, [values[name] for name in names], color=colours, height=0.6)
        for row, name in enumerate(names):
            axes.text(values[name], row, f" {values[name]:.0f}", va="center", color=INK)
        axes.set_xlim(0, maximum)
        axes.set_xlabel(axis)
        axes.spines["left"].set_visible(False)
        axes.tick_params(left=False, labelcolor=INK)

    text = ", ".join(f"{name} {value:.0f}" for name, value in values.items())
    return chart(draw, f"{axis}: {text}", size=(3.5, 0.9 + 0.32 * len(values)))


def histogram(
    values: Array,
    axis: str,
    *,
    limits: tuple[float, float],
    bad: tuple[float, float] | None = None,
    bins: int = 24,
) -> str:
    """Draw a histogram; bars within `bad` have the warning colour."""
    clipped = np.clip(values, *limits)

    def draw(axes: Axes) -> None:
        edges = np.linspace(*limits, bins + 1)
        heights, _ = np.histogram(clipped, edges)
        centres = (edges[1:] + edges[:-1]) / 2
        colours = [BAD if bad and bad[0] <= centre < bad[1] else ACCENT for centre in centres]
        axes.bar(centres, heights, width=0.92 * (edges[1] - edges[0]), color=colours)
        axes.set_xlim(*limits)
        axes.set_xlabel(axis)
        axes.set_ylabel("data sets")
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))

    low, median, high = np.quantile(values, [0.05, 0.5, 0.95]) if len(values) else (0.0,) * 3
    label = f"Histogram of {axis}: median {median:.3g}, 90 % between {low:.3g} and {high:.3g}"
    return chart(draw, label)
