"""The DOT text of a diagram, for Graphviz."""

from __future__ import annotations

from html import escape

from retrodict.plotting.diagram.drawing import FILL
from retrodict.plotting.diagram.elements import Box, Diagram
from retrodict.plotting.diagram.labels import node_sizes, printable, typeset_labels


def dot_text(diagram: Diagram) -> str:
    """Return the diagram in the DOT language, without positions."""
    labels, size = typeset_labels(diagram), node_sizes(diagram)
    lines = [
        "digraph {",
        '  graph [nodesep=0.3, ranksep=0.4, newrank=true, fontname="Times", fontsize=11.5];',
        '  node [fontname="Times", fixedsize=true, style=filled];',
        '  edge [arrowsize=0.7, fontname="Times", fontsize=11];',
    ]
    for node in diagram.nodes:
        label, (width, height) = labels[node.name], size[node.name]
        shape = "box" if node.kind == "factor" else "ellipse"
        lines.append(
            f"  {_quote(node.name)} [shape={shape}, width={width / 72:.4f}, "
            f"height={height / 72:.4f}, fontsize={label.size:g}, "
            f'label={_html(label.html())}, fillcolor="{FILL[node.kind]}"];'
        )
    lines += _clusters([box for box in diagram.boxes if box.members])
    for edge in diagram.edges:
        attributes = ["style=dashed, constraint=false, weight=0"] if edge.style == "dashed" else []
        if edge.label:
            # A no-break space separates the label from the line.
            attributes.append(f"label={_html(chr(0xA0) + _text(edge.label))}")
        arrow = f"  {_quote(edge.source)} -> {_quote(edge.target)}"
        lines.append(f"{arrow} [{', '.join(attributes)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _clusters(boxes: list[Box], indent: str = "  ", prefix: str = "cluster") -> list[str]:
    """Return nested clusters. DOT cannot express crossings: the smaller of two boxes is omitted."""
    lines = []
    boxes = sorted(boxes, key=lambda box: -len(set(box.members)))
    while boxes:
        outer, *boxes = boxes
        boxes = [box for box in boxes if not outer.crosses(box)]
        inner = [box for box in boxes if set(box.members) <= set(outer.members)]
        boxes = [box for box in boxes if box not in inner]
        name = f"{prefix}_{len(boxes)}"
        lines += [
            f"{indent}subgraph {name} {{",
            f"{indent}  graph [label={_html(_text(outer.name))}, labelloc=b, labeljust=r, "
            "style=rounded, margin=10];",
            f"{indent}  {' '.join(_quote(member) + ';' for member in outer.members)}",
            *_clusters(inner, indent + "  ", name),
            f"{indent}}}",
        ]
    return lines


def _quote(text: str) -> str:
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _text(text: str) -> str:
    return escape(printable(text), quote=False)


def _html(content: str) -> str:
    return f"<{content}>" if content.strip() else '""'
