"""A drawing goes in; its text in Graphviz's language, or the layout that `dot` finds, comes out."""

from __future__ import annotations

import json
import shutil
import subprocess
from html import escape

from retrodict.plotting.diagram.bezier import Point
from retrodict.plotting.diagram.drawing import Box, Drawing, nested
from retrodict.plotting.diagram.ink import FILL
from retrodict.plotting.diagram.labels import (
    Span,
    Spans,
    font_size,
    plain,
    printable,
    sizes,
    typeset,
)
from retrodict.plotting.diagram.page import Frame, Layout, Place, Route, fit

DOT_SECONDS = 5.0
DOT_NODES = range(20, 151)  # fewer: ours are tidier; more: dot may take minutes


def suits_dot(drawing: Drawing) -> bool:
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
            input=dot_text(drawing).encode(),
            capture_output=True,
            timeout=DOT_SECONDS,
            check=True,
        )
        return _read(drawing, json.loads(run.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
        return None


def _read(drawing: Drawing, found: dict[str, list[dict[str, str]]]) -> Layout:
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


def dot_text(drawing: Drawing) -> str:
    """The drawing in Graphviz's language; places are left to whoever reads it."""
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
            f"height={height / 72:.4f}, fontsize={font_size(spans):g}, "
            f"label={_html(spans)}{more}];"
        )
    lines += _clusters([(i, box) for i, box in enumerate(drawing.boxes) if box.members])
    for i, edge in enumerate(drawing.edges):
        more = ", style=dashed, constraint=false, weight=0" if edge.style == "dashed" else ""
        if edge.label:
            # A no-break space keeps the label off the line.
            more += f", label={_html((Span(chr(0xA0) + printable(edge.label)),))}"
        lines.append(f"  {_quote(edge.source)} -> {_quote(edge.target)} [id=e{i}{more}];")
    return "\n".join([*lines, "}"]) + "\n"


def _clusters(boxes: list[tuple[int, Box]], indent: str = "  ") -> list[str]:
    """Nested clusters. DOT has no crossing ones: of two such boxes, the smaller is left out."""
    lines = []
    boxes = sorted(boxes, key=lambda item: -len(set(item[1].members)))
    while boxes:
        (i, box), *boxes = boxes
        boxes = [item for item in boxes if not box.crosses(item[1])]
        inner = [item for item in boxes if set(item[1].members) <= set(box.members)]
        boxes = [item for item in boxes if item not in inner]
        lines += [
            f"{indent}subgraph cluster_{i} {{",
            f"{indent}  graph [label={_html(plain(box.name))}, labelloc=b, labeljust=r, "
            "style=rounded, margin=10];",
            f"{indent}  {' '.join(_quote(name) + ';' for name in box.members)}",
            *_clusters(inner, indent + "  "),
            f"{indent}}}",
        ]
    return lines


def _quote(text: str) -> str:
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _html(spans: Spans) -> str:
    """A label in DOT's HTML-like form."""
    parts = []
    for span in spans:
        text = escape(span.text, quote=False)
        text = f"<i>{text}</i>" if span.italic else text
        tag = {-1: "sub", 0: "", 1: "sup"}[span.level]
        parts.append(f"<{tag}>{text}</{tag}>" if tag else text)
    return f"<{''.join(parts)}>" if spans[0].text.strip() else '""'
