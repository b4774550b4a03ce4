"""Tests of pictures as SVG, PNG and DOT files."""

import struct
import subprocess
import xml.etree.ElementTree as ET
from io import BytesIO

import pytest
from diagrams import (
    AWKWARD_NAMES,
    CROSSED,
    DIAGRAMS,
    awkward_diagram,
    edges,
    every_diagram,
    lag,
    needs_dot,
    nodes,
)
from matplotlib import pyplot as plt
from matplotlib.image import imread

from retrodict.plotting.diagram.drawing import FILL, FRAME_COLOUR, MARGIN
from retrodict.plotting.diagram.elements import Box, Diagram, DiagramEdge
from retrodict.plotting.picture import Picture

SVG = "{http://www.w3.org/2000/svg}"


def groups_by_title(svg):
    """Parse an SVG document; return its root and its groups of shapes by their title."""
    root, groups = ET.fromstring(svg), {}
    for g in root.iter(f"{SVG}g"):
        if (title := g.find(f"{SVG}title")) is not None:
            groups.setdefault(title.text or "", []).append(g)
    return root, groups


@every_diagram
def test_svg_shows_every_node_edge_and_box(diagram):
    picture = Picture(diagram)
    root, groups = groups_by_title(picture.to_svg())
    assert root.find(f"{SVG}title").text
    assert all(node.name in root.find(f"{SVG}desc").text for node in diagram.nodes)
    width, height = float(root.get("width")), float(root.get("height"))
    assert list(map(float, root.get("viewBox").split())) == [0, 0, width, height]
    for node in diagram.nodes:
        shape, letters = paths(groups[node.name])
        assert f"fill: {FILL[node.kind]}" in shape.get("style")
        assert ("C" in shape.get("d")) == (node.kind != "factor")  # ellipses have curves
        assert len(letters.get("d")) > 100
    for edge in diagram.edges:
        line, arrowhead = paths(
            g for g in groups[f"{edge.source} → {edge.target}"] if is_edge(g, edge)
        )
        assert "C" in line.get("d") and "fill: none" in line.get("style")
        assert "fill" not in arrowhead.get("style")  # black
    for box in diagram.boxes:
        halo, letters, border = paths(groups[box.name])
        assert FRAME_COLOUR in border.get("style") and "stroke-width: 6" in halo.get("style")
        assert halo.get("d") == letters.get("d")


def paths(groups):
    return [path for group in groups for path in group.iter(f"{SVG}path")]


def is_edge(group, edge):
    """Return whether a group draws the line of an edge of this style."""
    line = next(group.iter(f"{SVG}path"))
    dashed = "stroke-dasharray" in line.get("style")
    return "fill: none" in line.get("style") and dashed == (edge.style == "dashed")


def test_edge_labels_are_drawn_beside_the_edge():
    _, groups = groups_by_title(Picture(DIAGRAMS["filter"]).to_svg())
    assert len(paths(groups["x → f"])) == 4  # line, arrowhead, halo and letters
    assert len(paths(groups["f → x"])) == 2


@every_diagram
def test_equal_diagrams_give_equal_files(diagram):
    a, b = Picture(diagram), Picture(diagram)
    assert a.to_svg() == b.to_svg() == a._repr_svg_()
    assert a.to_png() == b.to_png()
    assert a.to_dot() == b.to_dot()


def test_awkward_names_are_escaped():
    _, groups = groups_by_title(Picture(awkward_diagram()).to_svg())
    for name in AWKWARD_NAMES:
        if name.isprintable() and name:
            assert len(paths(groups[name])) == 2
    assert Picture(awkward_diagram()).to_png().startswith(b"\x89PNG")


@needs_dot
@pytest.mark.parametrize("diagram", [*DIAGRAMS.values(), *CROSSED.values(), awkward_diagram()])
def test_dot_program_accepts_the_dot_text(diagram):
    text = Picture(diagram).to_dot()
    process = subprocess.run(["dot", "-Tsvg"], input=text.encode(), capture_output=True, check=True)
    assert not process.stderr
    root = ET.fromstring(process.stdout)
    kinds = [g.get("class") for g in root.iter(f"{SVG}g")]
    assert kinds.count("node") == len(diagram.nodes)
    assert kinds.count("edge") == len(diagram.edges)
    if diagram in DIAGRAMS.values():
        assert kinds.count("cluster") == len(diagram.boxes)


def test_dot_text_contains_styles_and_nested_clusters():
    text = Picture(DIAGRAMS["nested"]).to_dot()
    outer, inner = text.index("schools: 8"), text.index("pupils: 30")
    assert outer < inner < text.index("}", outer)
    lines = {line.split()[0]: line for line in text.splitlines() if "shape=" in line}
    assert FILL["observed"] in lines['"score"']
    assert FILL["observed"] not in lines['"mu"']
    assert "style=dashed" in Picture(DIAGRAMS["filter"]).to_dot()
    assert "shape=box" in Picture(DIAGRAMS["filter"]).to_dot()


def test_png_has_twice_the_size_of_the_svg():
    picture = Picture(DIAGRAMS["pumps"])
    data = picture.to_png()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    root = ET.fromstring(picture.to_svg())
    page = [2 * float(root.get(side)) for side in ("width", "height")]
    assert (width, height) == pytest.approx(page, abs=2)
    assert 100 < width < 1000 and 100 < height < 1000


def test_png_contains_the_nodes():
    picture = Picture(DIAGRAMS["pumps"])
    pixels = imread(BytesIO(picture.to_png()))[..., :3]
    outlines = picture.layout.outlines
    # The leftmost and the topmost shape touch the margins.
    left = min(frame.left for frame in picture.layout.frames) - MARGIN
    left = min(left, *(o.x - o.width / 2 - MARGIN for o in outlines.values()))
    top = min(o.y - o.height / 2 for o in outlines.values()) - MARGIN
    for node in picture.diagram.nodes:
        outline = outlines[node.name]
        x, y, radius = outline.x - left, int(2 * (outline.y - top)), outline.width / 2
        # A point inside the circle, to the left of the label.
        grey = int(FILL[node.kind][1:3], 16) / 255
        assert pixels[y, int(2 * (x - 0.8 * radius))] == pytest.approx([grey] * 3, abs=0.01)
        border = pixels[y, int(2 * (x - radius)) - 2 : int(2 * (x - radius)) + 3]
        assert border.max(axis=1).min() < 0.6


def test_writing_a_png_does_not_change_the_state_of_pyplot():
    before = plt.get_fignums(), dict(plt.rcParams)
    Picture(DIAGRAMS["pumps"]).to_png()
    assert (plt.get_fignums(), dict(plt.rcParams)) == before


def test_suffix_selects_the_file_format(tmp_path):
    picture = Picture(DIAGRAMS["pumps"])
    assert picture.save(tmp_path / "x.SVG").read_text(encoding="utf-8") == picture.to_svg()
    assert picture.save(str(tmp_path / "x.png")).read_bytes() == picture.to_png()
    assert picture.save(tmp_path / "x.dot").read_text(encoding="utf-8") == picture.to_dot()
    with pytest.raises(ValueError, match=r"'x\.pdf'.*\.svg, \.png, \.dot"):
        picture.save(tmp_path / "x.pdf")
    with pytest.raises(ValueError, match="suffix"):
        picture.save(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=r"'x\.svg'.*no folder .*missing"):
        picture.save(tmp_path / "missing" / "x.svg")


def test_inconsistent_diagrams_are_rejected():
    with pytest.raises(ValueError, match=r"must be unique; these are repeated: \['a'\]"):
        Diagram(nodes("a a"), (), ())
    with pytest.raises(ValueError, match=r"unknown nodes: \['b'\]"):
        Diagram(nodes("a"), edges("a>b"), ())
    with pytest.raises(ValueError, match=r"unknown nodes: \['c'\]"):
        Diagram(nodes("a"), (), (Box("plate", ("c",)),))


@pytest.mark.parametrize(
    "diagram",
    [
        Diagram((), (), ()),
        Diagram(nodes("a"), (), (Box("empty", ()),)),
        Diagram(nodes("a b"), edges("a>b b>a"), ()),
        Diagram(nodes("a b"), (lag("a", "b"),), ()),
        Diagram(nodes("a"), (DiagramEdge("a", "a"),), ()),
    ],
    ids=["no nodes", "empty box", "cycle", "dashed edge only", "self-loop"],
)
def test_degenerate_diagrams_are_drawn(diagram):
    _, groups = groups_by_title(Picture(diagram).to_svg())
    assert set(groups) == {
        *(node.name for node in diagram.nodes),
        *(f"{edge.source} → {edge.target}" for edge in diagram.edges),
    }
    assert Picture(diagram).to_png().startswith(b"\x89PNG")
