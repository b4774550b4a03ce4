"""Graphviz: the DOT text of a diagram, and its layout by the `dot` program."""

from __future__ import annotations

import json
import shutil
import subprocess
from html import escape

from retrodict.plotting.diagram.bezier import Point
from retrodict.plotting.diagram.elements import Box, Diagram, any_crossing
from retrodict.plotting.diagram.labels import (
    Span,
    Spans,
    font_size,
    node_sizes,
    plain_spans,
    printable,
    typeset_labels,
)
from retrodict.plotting.diagram.layout import Frame, Layout, Outline, Route, fit_to_page
from retrodict.plotting.diagram.style import FILL

DOT_TIMEOUT = 5.0  # seconds
# The layered layout of smaller diagrams is tidier; dot may take minutes for larger ones.
DOT_NUM_NODES = range(20, 151)


def prefers_dot(diagram: Diagram) -> bool:
    """Return whether the layout by `dot` is better than the layered one.

    `dot` cannot draw crossing boxes, and it tangles edges to earlier layers.
    """
    has_back_edge = any(e.style == "dashed" and e.source != e.target for e in diagram.edges)
    suitable = not any_crossing(diagram.boxes) and not has_back_edge
    return len(diagram.nodes) in DOT_NUM_NODES and suitable


def dot_layout(diagram: Diagram) -> Layout | None:
    """Return the layout by `dot`, or None if `dot` is missing or fails or if boxes cross."""
    program = shutil.which("dot")
    if program is None:
        return None
    try:
        process = subprocess.run(
            [program, "-Tjson0"],
            input=dot_text(diagram).encode(),
            capture_output=True,
            timeout=DOT_TIMEOUT,
            check=True,
        )
        return _read_layout(diagram, json.loads(process.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
        return None


def _read_layout(diagram: Diagram, output: dict[str, list[dict[str, str]]]) -> Layout:
    def parse_points(text: str) -> list[Point]:
        pairs = (pair.split(",") for pair in text.split())
        return [(float(x), -float(y)) for x, y in pairs]  # dot's y axis points up

    objects = {item.get("id", item["name"]): item for item in output["objects"]}
    arrows = {item["id"]: item for item in output.get("edges", [])}
    size = node_sizes(diagram)
    outlines = {}
    for i, node in enumerate(diagram.nodes):
        (centre,) = parse_points(objects[f"n{i}"]["pos"])
        outlines[node.name] = Outline(*centre, *size[node.name], node.kind == "factor")
    routes = []
    for i, edge in enumerate(diagram.edges):
        arrow = arrows[f"e{i}"]
        tip, *path = parse_points(arrow["pos"].removeprefix("e,"))
        middle = path[len(path) // 2]
        label_position = parse_points(arrow["lp"])[0] if "lp" in arrow else middle
        routes.append(Route(edge, tuple(path), tip, label_position))
    frames = []
    for i, box in enumerate(diagram.boxes):
        if box.members:
            left, low, right, high = map(float, objects[f"cluster_{i}"]["bb"].split(","))
            frames.append(Frame(box, left, -high, right, -low))
    return fit_to_page(outlines, routes, frames)


def dot_text(diagram: Diagram) -> str:
    """Return the diagram in the DOT language, without positions."""
    labels, size = typeset_labels(diagram), node_sizes(diagram)
    lines = [
        "digraph {",
        '  graph [nodesep=0.3, ranksep=0.4, newrank=true, fontname="Times", fontsize=11.5];',
        '  node [fontname="Times", fixedsize=true, style=filled, fillcolor=white];',
        '  edge [arrowsize=0.7, fontname="Times", fontsize=11];',
    ]
    for i, node in enumerate(diagram.nodes):
        spans = labels[node.name]
        double = node.kind == "deterministic"
        # dot draws the second outline outside the node size.
        width, height = (side - 8.0 * double for side in size[node.name])
        shape = "box" if node.kind == "factor" else "ellipse"
        attributes = f', fillcolor="{FILL[node.kind]}"' + (", peripheries=2" if double else "")
        lines.append(
            f"  {_quote(node.name)} [id=n{i}, shape={shape}, width={width / 72:.4f}, "
            f"height={height / 72:.4f}, fontsize={font_size(spans):g}, "
            f"label={_html(spans)}{attributes}];"
        )
    lines += _clusters([(i, box) for i, box in enumerate(diagram.boxes) if box.members])
    for i, edge in enumerate(diagram.edges):
        attributes = ", style=dashed, constraint=false, weight=0" if edge.style == "dashed" else ""
        if edge.label:
            # A no-break space separates the label from the line.
            attributes += f", label={_html((Span(chr(0xA0) + printable(edge.label)),))}"
        lines.append(f"  {_quote(edge.source)} -> {_quote(edge.target)} [id=e{i}{attributes}];")
    return "\n".join([*lines, "}"]) + "\n"


def _clusters(boxes: list[tuple[int, Box]], indent: str = "  ") -> list[str]:
    """Return nested clusters. DOT cannot express crossings: the smaller of two boxes is omitted."""
    lines = []
    boxes = sorted(boxes, key=lambda item: -len(set(item[1].members)))
    while boxes:
        (i, box), *boxes = boxes
        boxes = [item for item in boxes if not box.crosses(item[1])]
        inner = [item for item in boxes if set(item[1].members) <= set(box.members)]
        boxes = [item for item in boxes if item not in inner]
        lines += [
            f"{indent}subgraph cluster_{i} {{",
            f"{indent}  graph [label={_html(plain_spans(box.name))}, labelloc=b, labeljust=r, "
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
    """Return an HTML-like label."""
    parts = []
    for span in spans:
        text = escape(span.text, quote=False)
        text = f"<i>{text}</i>" if span.italic else text
        tag = {-1: "sub", 0: "", 1: "sup"}[span.level]
        parts.append(f"<{tag}>{text}</{tag}>" if tag else text)
    return f"<{''.join(parts)}>" if spans[0].text.strip() else '""'
