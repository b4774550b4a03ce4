"""Typesetting of node labels, and the node sizes that the labels require."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import NamedTuple

from retrodict.plotting.diagram.elements import Diagram, DiagramNode

# Font sizes in points, which are the unit of all lengths in a diagram.
SYMBOL_SIZE, WORD_SIZE, CAPTION_SIZE = 16.0, 13.0, 11.5
SMALL_SIZE = 11.0  # subscripts, superscripts and edge labels
DIAMETER, SIDE = 36.0, 28.0  # smallest circle and square

_LETTER_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma "
    "tau upsilon phi chi psi omega"
)
_LOWER = dict(zip(_LETTER_NAMES.split(), "αβγδεζηθικλμνξοπρστυφχψω", strict=True))
_GREEK = _LOWER | {name.capitalize(): letter.upper() for name, letter in _LOWER.items()}
_SYMBOL = re.compile(
    r"(?P<base>[^\W\d_]+)(\^(?P<above>[^\W_]+))?"
    r"(_(?P<below>[^\W_]+|\d+(_\d+)+)|\[(?P<index>\w+(, ?\w+)*)\]|(?P<number>\d+))?"
)


class Span(NamedTuple):
    """A piece of a label; `level` is 0 on the baseline, −1 for a subscript, 1 for a superscript."""

    text: str
    level: int = 0
    italic: bool = False


Spans = tuple[Span, ...]


def plain_spans(text: str) -> Spans:
    """Return the text as a single span, without control characters."""
    return (Span(printable(text)),)


def printable(text: str) -> str:
    """Replace characters that XML and fonts reject, such as control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def typeset_labels(diagram: Diagram) -> dict[str, Spans]:
    """Typeset all labels: `theta_0` and `theta[0]` become θ with a subscript, words stay plain.

    Different labels that would look the same (`w0` and `w_0`) all stay plain.
    """
    spans = {node.label: _typeset(node.label) for node in diagram.nodes}
    counts = Counter(spans.values())
    return {
        node.name: spans[node.label] if counts[spans[node.label]] == 1 else plain_spans(node.label)
        for node in diagram.nodes
    }


def _typeset(label: str) -> Spans:
    match = _SYMBOL.fullmatch(label)
    base = _GREEK.get(match["base"], match["base"]) if match else ""
    if not match or len(base) != 1:
        return plain_spans(label)
    below = (match["below"] or match["index"] or match["number"] or "").replace("_", ",")
    scripts = ((match["above"] or "", 1), (below, -1))
    parts = [(_GREEK.get(text, text), level) for text, level in scripts if text]
    letter = Span(base, 0, not base.isupper() or base.isascii())
    return (letter, *(Span(t, level, len(t) == 1 and t.isalpha()) for t, level in parts))


def font_size(spans: Spans) -> float:
    """Return the font size on the baseline: words are smaller than single letters."""
    return WORD_SIZE if len(spans[0].text) > 1 else SYMBOL_SIZE


def text_width(text: str, size: float) -> float:
    """Estimate the width of a text from above, since the viewer's font is unknown."""
    return size * sum(map(_em_width, text))


def _em_width(c: str) -> float:
    if unicodedata.combining(c):
        return 0.0
    if unicodedata.east_asian_width(c) in "WF":
        return 1.0
    if c in "iljtf.,:;'|![]() ":
        return 0.34
    if c in "mwMW@%":
        return 0.85
    return 0.68 if c.isupper() else 0.52


def node_sizes(diagram: Diagram) -> dict[str, tuple[float, float]]:
    """Return width and height of every node: a circle or square, widened if the label is long."""
    labels = typeset_labels(diagram)
    return {node.name: _node_size(node, labels[node.name]) for node in diagram.nodes}


def _node_size(node: DiagramNode, spans: Spans) -> tuple[float, float]:
    baseline_size = font_size(spans)
    text = sum(text_width(s.text, SMALL_SIZE if s.level else baseline_size) for s in spans)
    if node.kind == "factor":
        return round(max(SIDE, text + 10.0), 1), SIDE
    ring = 6.0 if node.kind == "deterministic" else 0.0
    # A long label needs a wider ellipse: above and below the middle, the ellipse is narrower.
    width = text + 10.0 if text + 8.0 <= DIAMETER else 1.12 * text + 16.0
    return round(max(DIAMETER, width) + ring, 1), DIAMETER + ring
