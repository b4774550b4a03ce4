"""Labels as the user wrote them go in; typeset pieces, and the room they need, come out."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import NamedTuple

from retrodict.plotting.diagram.drawing import Drawing, Node

TEXT, SMALL, WORD, CAPTION = 16.0, 11.0, 13.0, 11.5  # font sizes; one unit is a point
DIAMETER, SIDE = 36.0, 28.0

_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma "
    "tau upsilon phi chi psi omega"
)
_LOWER = dict(zip(_NAMES.split(), "αβγδεζηθικλμνξοπρστυφχψω", strict=True))
_GREEK = _LOWER | {name.capitalize(): letter.upper() for name, letter in _LOWER.items()}
_MATHS = re.compile(
    r"(?P<base>[^\W\d_]+)(\^(?P<above>[^\W_]+))?"
    r"(_(?P<below>[^\W_]+|\d+(_\d+)+)|\[(?P<index>\w+(, ?\w+)*)\]|(?P<number>\d+))?"
)


class Span(NamedTuple):
    """A piece of a label: `level` is 0 on the line, −1 below (subscript), 1 above."""

    text: str
    level: int = 0
    italic: bool = False


Spans = tuple[Span, ...]


def plain(text: str) -> Spans:
    """The text on one line, without what XML and fonts refuse, such as control characters."""
    return (Span(printable(text)),)


def printable(text: str) -> str:
    """The text with a mark in place of every control character."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def typeset(drawing: Drawing) -> dict[str, Spans]:
    """Labels as they are drawn: `theta_0` and `theta[0]` as θ with a subscript, words as they are.

    Where two different labels would look alike (`w0` and `w_0`), all of them stay plain.
    """
    spans = {node.label: _spans(node.label) for node in drawing.nodes}
    looks = Counter(spans.values())
    return {
        node.name: spans[node.label] if looks[spans[node.label]] == 1 else plain(node.label)
        for node in drawing.nodes
    }


def _spans(label: str) -> Spans:
    found = _MATHS.fullmatch(label)
    base = _GREEK.get(found["base"], found["base"]) if found else ""
    if not found or len(base) != 1:
        return plain(label)
    below = (found["below"] or found["index"] or found["number"] or "").replace("_", ",")
    scripts = ((found["above"] or "", 1), (below, -1))
    parts = [(_GREEK.get(text, text), level) for text, level in scripts if text]
    letter = Span(base, 0, not base.isupper() or base.isascii())
    return (letter, *(Span(t, level, len(t) == 1 and t.isalpha()) for t, level in parts))


def font_size(spans: Spans) -> float:
    """The size of a label on the line: words are set a little smaller than single letters."""
    return WORD if len(spans[0].text) > 1 else TEXT


def text_width(text: str, size: float) -> float:
    """A generous guess: which font will be found is not known here."""
    return size * sum(map(_em, text))


def _em(c: str) -> float:
    if unicodedata.combining(c):
        return 0.0
    if unicodedata.east_asian_width(c) in "WF":
        return 1.0
    if c in "iljtf.,:;'|![]() ":
        return 0.34
    if c in "mwMW@%":
        return 0.85
    return 0.68 if c.isupper() else 0.52


def sizes(drawing: Drawing) -> dict[str, tuple[float, float]]:
    """Width and height of every node: a circle or square, wider where the label needs it."""
    labels = typeset(drawing)
    return {node.name: _size(node, labels[node.name]) for node in drawing.nodes}


def _size(node: Node, spans: Spans) -> tuple[float, float]:
    line = font_size(spans)
    text = sum(text_width(span.text, SMALL if span.level else line) for span in spans)
    if node.kind == "factor":
        return round(max(SIDE, text + 10.0), 1), SIDE
    ring = 6.0 if node.kind == "deterministic" else 0.0
    # An ellipse is narrow above and below its middle, where long labels still have height.
    wide = text + 10.0 if text + 8.0 <= DIAMETER else 1.12 * text + 16.0
    return round(max(DIAMETER, wide) + ring, 1), DIAMETER + ring
