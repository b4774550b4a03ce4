"""Tests of pictures as SVG, PNG and DOT files."""

import struct
import subprocess
import sys
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

from retrodict.plotting.diagram.elements import Box, Diagram, DiagramEdge
from retrodict.plotting.diagram.labels import typeset_labels
from retrodict.plotting.diagram.style import FILL
from retrodict.plotting.picture import Picture

SVG = "{http://www.w3.org/2000/svg}"


def groups_by_title(svg):
    """Parse an SVG document; return its root and its `<g>` elements by title."""
    root = ET.fromstring(svg)
    return root, {g.find(f"{SVG}title").text: g for g in root.findall(f"{SVG}g")}


@every_diagram
def test_svg_shows_every_node_edge_and_box(diagram):
    picture = Picture(diagram)
    root, groups = groups_by_title(picture.to_svg())
    assert root.find(f"{SVG}title").text
    assert all(node.name in root.find(f"{SVG}desc").text for node in diagram.nodes)
    background = root.find(f"{SVG}rect")
    assert background.get("fill") == "#ffffff" and background.get("width") == root.get("width")
    for node in diagram.nodes:
        shapes = [*groups[node.name].iter(f"{SVG}ellipse"), *groups[node.name].iter(f"{SVG}rect")]
        assert len(shapes) == (2 if node.kind == "deterministic" else 1)
        assert shapes[0].tag == SVG + ("rect" if node.kind == "factor" else "ellipse")
        assert (shapes[0].get("fill") != "#ffffff") == (node.kind == "observed")
        spans = typeset_labels(diagram)[node.name]
        assert "".join(groups[node.name].find(f"{SVG}text").itertext()) == "".join(
            span.text for span in spans
        )
    for edge, route in zip(diagram.edges, picture.layout.routes, strict=True):
        path = next(
            g.find(f"{SVG}path")
            for g in root.findall(f"{SVG}g")
            if g.find(f"{SVG}title").text == f"{edge.source} → {edge.target}"
            and (g.find(f"{SVG}path").get("stroke-dasharray") is not None)
            == (edge.style == "dashed")
        )
        x, y = map(float, path.get("d")[1:].split("C")[0].split(","))
        assert (x, y) == pytest.approx(route.path[0], abs=0.01)
    captions = ["".join(text.itertext()) for text in root.findall(f"{SVG}text")]
    for box in diagram.boxes:
        assert groups[box.name].find(f"{SVG}rect") is not None and box.name in captions
    assert ("t−1" in captions) == any(edge.label for edge in diagram.edges)


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
            assert groups[name].find(f"{SVG}ellipse") is not None
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
    assert "peripheries=2" in lines['"pupil"']
    assert "style=dashed" in Picture(DIAGRAMS["filter"]).to_dot()
    assert "shape=box" in Picture(DIAGRAMS["filter"]).to_dot()


def test_png_has_the_size_of_the_page():
    picture = Picture(DIAGRAMS["pumps"])
    data = picture.to_png()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == pytest.approx(
        (2 * picture.layout.width, 2 * picture.layout.height), abs=2
    )
    assert 100 < width < 1000 and 100 < height < 1000


def test_png_contains_the_nodes():
    picture = Picture(DIAGRAMS["pumps"])
    pixels = imread(BytesIO(picture.to_png()))[..., :3]
    for node in picture.diagram.nodes:
        outline = picture.layout.outlines[node.name]
        # A point inside the circle, to the left of the label.
        colour = pixels[int(2 * outline.y), int(2 * (outline.x - 0.4 * outline.width))]
        grey = int(FILL[node.kind][1:3], 16) / 255
        assert colour == pytest.approx([grey] * 3, abs=0.01)
        assert pixels[int(2 * outline.y), int(2 * (outline.x - outline.width / 2))].max() < 0.6


def test_writing_a_png_does_not_change_the_state_of_pyplot():
    before = plt.get_fignums(), dict(plt.rcParams)
    Picture(DIAGRAMS["pumps"]).to_png()
    assert (plt.get_fignums(), dict(plt.rcParams)) == before


def test_only_png_output_imports_matplotlib():
    code = (
        "import sys\n"
        "from retrodict.plotting.diagram.elements import Diagram, DiagramNode\n"
        "from retrodict.plotting.picture import Picture\n"
        "picture = Picture(Diagram((DiagramNode('a', 'a', 'latent'),), (), ()))\n"
        "picture.to_svg(), picture.to_dot()\n"
        "assert 'matplotlib' not in sys.modules\n"
        "picture.to_png()\n"
        "assert 'matplotlib' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
    root = ET.fromstring(Picture(diagram).to_svg())
    assert len(list(root.iter(f"{SVG}ellipse"))) == len(diagram.nodes)
    assert len(list(root.iter(f"{SVG}path"))) == len(diagram.edges)
    assert Picture(diagram).to_png().startswith(b"\x89PNG")
