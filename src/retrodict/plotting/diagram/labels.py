"""Typesetting of node labels, and the node sizes that the labels require."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from functools import cache
from html import escape
from typing import NamedTuple

import numpy as np
from matplotlib.font_manager import FontProperties, get_font_names
from matplotlib.path import Path
from matplotlib.textpath import text_to_path

from retrodict.plotting.diagram.elements import Diagram, DiagramNode

# Font sizes in points, which are the unit of all lengths in a diagram.
SYMBOL_SIZE, WORD_SIZE, CAPTION_SIZE, EDGE_LABEL_SIZE = 16.0, 13.0, 11.5, 11.0
DIAMETER, SIDE = 36.0, 28.0  # smallest circle and square
# Fonts of other scripts are used where they are installed.
_OTHER_SCRIPTS = {"Noto Sans CJK JP", "PingFang SC", "Microsoft YaHei", "Arial Unicode MS"}
_FAMILIES = ["STIXGeneral", "DejaVu Serif", "DejaVu Sans"]
_FAMILIES += sorted(_OTHER_SCRIPTS.intersection(get_font_names()))
_FONT = FontProperties(family=_FAMILIES, math_fontfamily="stix")

_LETTER_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma "
    "tau upsilon phi chi psi omega"
)
_LOWER = dict(zip(_LETTER_NAMES.split(), "αβγδεζηθικλμνξοπρστυφχψω", strict=True))
_GREEK = _LOWER | {name.capitalize(): letter.upper() for name, letter in _LOWER.items()}
_LETTER = "[A-Za-zΑ-Ωα-ω]"
_SYMBOL = re.compile(
    rf"(?P<base>{_LETTER}+)(\^(?P<above>({_LETTER}|\d)+))?"
    rf"(_(?P<below>({_LETTER}|\d)+|\d+(_\d+)+)|\[(?P<index>\d+(, ?\d+)*)\]|(?P<number>\d+))?"
)


class Label(NamedTuple):
    """A word, or a letter that may have a superscript and a subscript."""

    base: str
    above: str = ""
    below: str = ""

    @property
    def is_symbol(self) -> bool:
        """Whether the label is a letter, which is set in italics and larger than words."""
        return len(self.base) == 1 and self.base.isalpha()

    @property
    def size(self) -> float:
        """The font size of the base."""
        return SYMBOL_SIZE if len(self.base) == 1 else WORD_SIZE

    def mathtext(self) -> str:
        """Return the label in matplotlib's language of formulas, if it is a symbol."""
        if not self.is_symbol:
            return self.base
        scripts = f"^{{{_upright(self.above)}}}_{{{_upright(self.below)}}}"
        return f"${_upright(self.base)}{scripts}$".replace("^{}", "").replace("_{}", "")

    def html(self) -> str:
        """Return the label in the HTML of Graphviz."""
        base = f"<i>{escape(self.base)}</i>" if self.is_symbol else escape(self.base, quote=False)
        above, below = (
            f"<{tag}>{escape(text)}</{tag}>" if text else ""
            for tag, text in (("sup", self.above), ("sub", self.below))
        )
        return base + above + below


def _upright(text: str) -> str:
    """Return words and Greek capitals in upright type; other letters are in italics."""
    greek_capital = text.isupper() and not text.isascii()
    return rf"\mathrm{{{text}}}" if len(text) > 1 or greek_capital else text


def printable(text: str) -> str:
    """Replace characters that XML and fonts reject, such as control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def typeset_labels(diagram: Diagram) -> dict[str, Label]:
    """Typeset all labels: `theta_0` and `theta[0]` become θ with a subscript, words stay plain.

    Different labels that would look the same (`w0` and `w_0`) all stay plain.
    """
    labels = {node.label: _typeset(node.label) for node in diagram.nodes}
    counts = Counter(labels.values())
    return {
        node.name: label
        if counts[label := labels[node.label]] == 1
        else Label(printable(node.label))
        for node in diagram.nodes
    }


def _typeset(text: str) -> Label:
    match = _SYMBOL.fullmatch(text)
    base = _GREEK.get(match["base"], match["base"]) if match else ""
    if not match or len(base) != 1:
        return Label(printable(text))
    above = match["above"] or ""
    below = (match["below"] or match["index"] or match["number"] or "").replace("_", ",")
    return Label(base, _GREEK.get(above, above), _GREEK.get(below, below))


@cache
def text_path(text: str, size: float, is_formula: bool = False) -> Path:
    """Return the outlines of a text's letters; the text starts at 0 on the baseline, y is down."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Glyph .* missing from")
        vertices, codes = text_to_path.get_text_path(_FONT, text, ismath=is_formula)
    scale = size / text_to_path.FONT_SCALE
    return Path(np.reshape(vertices, (-1, 2)) * (scale, -scale), codes)


def text_width(text: str, size: float, is_formula: bool = False) -> float:
    """Return the width of a text in points."""
    vertices = np.asarray(text_path(text, size, is_formula).vertices)
    return float(np.max(vertices[:, 0], initial=0.0))


def node_sizes(diagram: Diagram) -> dict[str, tuple[float, float]]:
    """Return width and height of every node: a circle or square, widened if the label is long."""
    labels = typeset_labels(diagram)
    return {node.name: _node_size(node, labels[node.name]) for node in diagram.nodes}


def _node_size(node: DiagramNode, label: Label) -> tuple[float, float]:
    width = text_width(label.mathtext(), label.size, label.is_symbol)
    if node.kind == "factor":
        return round(max(SIDE, width + 10.0), 1), SIDE
    # A long label needs a wider ellipse: above and below the middle, the ellipse is narrower.
    width = width + 10.0 if width + 12.0 <= DIAMETER else 1.12 * width + 16.0
    return round(max(DIAMETER, width), 1), DIAMETER
