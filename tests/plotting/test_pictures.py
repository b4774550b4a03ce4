"""Pictures are checked by geometry: what the reader sees must be what the drawing says."""

import shutil
import struct
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from io import BytesIO
from itertools import pairwise
from math import dist

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.image import imread

from retrodict.plotting.diagram import dot
from retrodict.plotting.diagram.dot import from_dot
from retrodict.plotting.diagram.ink import FILL
from retrodict.plotting.diagram.labels import typeset
from retrodict.plotting.diagram.layout import layered
from retrodict.plotting.diagram.page import Layout
from retrodict.plotting.picture import Box, Drawing, Edge, Node, Picture

SVG = "{http://www.w3.org/2000/svg}"
needs_dot = pytest.mark.skipif(
    shutil.which("dot") is None, reason="the dot binary is not installed"
)
LAYOUTS = [pytest.param(layered, id="own"), pytest.param(from_dot, id="dot", marks=needs_dot)]


def nodes(latent="", observed="", factor="", deterministic=""):
    kinds = {
        "latent": latent,
        "observed": observed,
        "factor": factor,
        "deterministic": deterministic,
    }
    return tuple(Node(name, name, kind) for kind, text in kinds.items() for name in text.split())


def edges(text):
    return tuple(Edge(*arrow.split(">")) for arrow in text.split())


def lag(source, target):
    return Edge(source, target, "dashed", "t−1")


DRAWINGS = {
    "regression": Drawing(
        nodes("w0 w1 w2", "z t"),
        edges("w0>t w1>t w2>t z>t"),
        (Box("N: 10", ("z", "t")),),
    ),
    "pumps": Drawing(
        nodes("alpha beta theta", "t y"),
        edges("alpha>theta beta>theta theta>y t>y"),
        (Box("pumps: 10", ("theta", "t", "y")),),
    ),
    "pumps faithful inverse": Drawing(
        nodes("alpha beta theta", "t y", "f g"),
        edges("t>f y>f f>alpha f>beta alpha>g beta>g t>g y>g g>theta"),
        (Box("pumps: 10", ("theta", "t", "y", "g")),),
    ),
    "factorial HMM": Drawing(
        nodes("x^1 x^2 x^3", "y"),
        (*edges("x^1>y x^2>y x^3>y"), *(lag(x, x) for x in ("x^1", "x^2", "x^3"))),
        (Box("time: 30", ("x^1", "x^2", "x^3", "y")),),
    ),
    "filter": Drawing(
        nodes("x z", "y", "f"),
        (*edges("y>f f>x f>z"), lag("x", "f"), lag("z", "f")),
        (Box("time: 30", ("x", "z", "y", "f")),),
    ),
    "nested": Drawing(
        nodes("mu tau sigma", "score hours", "", "school pupil"),
        edges("mu>school tau>school school>pupil sigma>pupil pupil>score hours>score tau>score"),
        (
            Box("pupils: 30", ("pupil", "score", "hours")),
            Box("schools: 8", ("school", "pupil", "score", "hours")),
            Box("a caption much wider than what it is written under", ("sigma",)),
        ),
    ),
    "same members": Drawing(
        nodes("a b", "y"), edges("a>y b>y"), (Box("i", ("b", "y")), Box("j", ("b", "y")))
    ),
    "stranger between members": Drawing(
        nodes("a b c"), edges("a>b b>c a>c"), (Box("plate", ("a", "c")),)
    ),
}
THREE = "a b c ab bc ac abc"
CROSSED = {
    "crossed": Drawing(
        nodes("s a b", "y"),
        edges("s>y a>y b>y"),
        (Box("rows: 5", ("a", "y")), Box("columns: 7", ("b", "y"))),
    ),
    "crossed three ways": Drawing(
        nodes("a b c", "ab bc ac abc"),
        edges("a>ab b>ab b>bc c>bc a>ac c>ac a>abc b>abc c>abc"),
        tuple(Box(k, tuple(n for n in THREE.split() if k in n)) for k in "abc"),
    ),
}
every_drawing = pytest.mark.parametrize(
    "drawing", [pytest.param(d, id=k) for k, d in DRAWINGS.items()]
)
every_layout = pytest.mark.parametrize("lay_out", LAYOUTS)


def random_drawing(seed, count=25):
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(count)]
    pairs = {tuple(sorted(rng.choice(count, 2, replace=False))) for _ in range(2 * count)}
    boxes = []
    for k in range(4):
        start, length = rng.integers(count - 8), rng.integers(1, 9)
        boxes.append(Box(f"box {k}", tuple(names[start : start + length])))
    arrows = tuple(Edge(names[i], names[j]) for i, j in sorted(pairs))
    return Drawing(tuple(Node(name, name, "latent") for name in names), arrows, tuple(boxes))


def corners(place):
    dx, dy = place.width / 2, place.height / 2
    return place.x - dx, place.y - dy, place.x + dx, place.y + dy


def check_boxes(drawing, page: Layout):
    """Members lie wholly inside, everything else wholly outside."""
    drawn = {}
    for frame in page.frames:
        assert page.width >= frame.right > frame.left >= 0
        assert page.height >= frame.bottom > frame.top >= 0
        for name, place in page.places.items():
            left, top, right, bottom = corners(place)
            inside = frame.left < left and right < frame.right
            inside &= frame.top < top and bottom < frame.bottom
            outside = right < frame.left or frame.right < left
            outside |= bottom < frame.top or frame.bottom < top
            assert inside if name in frame.box.members else outside, (frame.box.name, name)
        drawn.setdefault(frame.box.name, []).extend(frame.box.members)
    assert {k: sorted(v) for k, v in drawn.items()} == {
        box.name: sorted(box.members) for box in drawing.boxes
    }


@every_layout
@every_drawing
def test_boxes_hold_exactly_their_members(drawing, lay_out):
    check_boxes(drawing, lay_out(drawing))


@pytest.mark.parametrize("drawing", CROSSED.values(), ids=CROSSED)
def test_crossing_boxes_hold_exactly_their_members(drawing):
    check_boxes(drawing, Picture(drawing).layout)


def test_two_crossing_boxes_are_two_boxes():
    assert len(layered(CROSSED["crossed"]).frames) == 2


@pytest.mark.parametrize("seed", range(12))
def test_boxes_of_random_drawings(seed):
    drawing = random_drawing(seed)
    check_boxes(drawing, layered(drawing))


def test_inner_box_lies_inside_outer_one():
    frames = {frame.box.name: frame for frame in layered(DRAWINGS["nested"]).frames}
    inner, outer = frames["pupils: 30"], frames["schools: 8"]
    assert outer.left < inner.left < inner.right < outer.right
    assert outer.top < inner.top < inner.bottom < outer.bottom


@every_layout
@every_drawing
def test_arrows_join_the_borders_of_their_nodes(drawing, lay_out):
    page = lay_out(drawing)
    assert [route.edge for route in page.routes] == list(drawing.edges)
    for route in page.routes:
        source, target = page.places[route.edge.source], page.places[route.edge.target]
        # dot ends its curves up to a point and a half off the border
        assert source.gauge(route.path[0]) == pytest.approx(1, abs=0.1)
        assert target.gauge(route.tip) == pytest.approx(1, abs=0.1)
        if lay_out is layered:
            assert source.gauge(route.path[0]) == pytest.approx(1, abs=0.002)
            assert target.gauge(route.tip) == pytest.approx(1, abs=0.002)
        assert 4 < dist(route.tip, route.path[-1]) < 12
        assert len(route.path) % 3 == 1


@every_drawing
def test_arrows_miss_other_nodes(drawing):
    page = layered(drawing)
    for route in page.routes:
        points = sampled(route.path)
        for name, place in page.places.items():
            if name not in (route.edge.source, route.edge.target):
                assert place.gauge(points).min() > 1, (route.edge, name)


def sampled(path):
    t = np.linspace(0, 1, 50)[:, None]
    pieces = [path[k : k + 4] for k in range(0, len(path) - 1, 3)]
    return np.vstack(
        [
            (1 - t) ** 3 * np.array(a)
            + 3 * (1 - t) ** 2 * t * np.array(b)
            + 3 * (1 - t) * t**2 * np.array(c)
            + t**3 * np.array(d)
            for a, b, c, d in pieces
        ]
    )


@every_layout
@every_drawing
def test_nodes_keep_apart_and_solid_edges_go_down(drawing, lay_out):
    page = lay_out(drawing)
    spots = list(page.places.values())
    for k, one in enumerate(spots):
        for other in spots[:k]:
            apart_x = abs(one.x - other.x) - (one.width + other.width) / 2
            apart_y = abs(one.y - other.y) - (one.height + other.height) / 2
            assert max(apart_x, apart_y) > 4
    for edge in drawing.edges:
        if edge.style == "solid":
            assert page.places[edge.source].y < page.places[edge.target].y


def test_two_edges_between_two_nodes_are_seen_as_two():
    page = layered(DRAWINGS["filter"])
    there, back = (
        next(sampled(r.path) for r in page.routes if (r.edge.source, r.edge.target) == pair)
        for pair in (("f", "x"), ("x", "f"))
    )
    middle = there[len(there) // 2]
    assert np.hypot(*(back - middle).T).min() > 8


def groups_by_title(svg):
    root = ET.fromstring(svg)
    return root, {g.find(f"{SVG}title").text: g for g in root.findall(f"{SVG}g")}


@every_drawing
def test_svg_shows_every_node_edge_and_box(drawing):
    picture = Picture(drawing)
    root, groups = groups_by_title(picture.to_svg())
    assert root.find(f"{SVG}title").text
    assert all(node.name in root.find(f"{SVG}desc").text for node in drawing.nodes)
    background = root.find(f"{SVG}rect")
    assert background.get("fill") == "#ffffff" and background.get("width") == root.get("width")
    for node in drawing.nodes:
        shapes = [*groups[node.name].iter(f"{SVG}ellipse"), *groups[node.name].iter(f"{SVG}rect")]
        assert len(shapes) == (2 if node.kind == "deterministic" else 1)
        assert shapes[0].tag == SVG + ("rect" if node.kind == "factor" else "ellipse")
        assert (shapes[0].get("fill") != "#ffffff") == (node.kind == "observed")
        spans = typeset(drawing)[node.name]
        assert "".join(groups[node.name].find(f"{SVG}text").itertext()) == "".join(
            span.text for span in spans
        )
    for edge, route in zip(drawing.edges, picture.layout.routes, strict=True):
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
    for box in drawing.boxes:
        assert groups[box.name].find(f"{SVG}rect") is not None and box.name in captions
    assert ("t−1" in captions) == any(edge.label for edge in drawing.edges)


@every_drawing
def test_same_drawing_same_bytes(drawing):
    one, two = Picture(drawing), Picture(drawing)
    assert one.to_svg() == two.to_svg() == one._repr_svg_()
    assert one.to_png() == two.to_png()
    assert one.to_dot() == two.to_dot()


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("alpha", [("α", 0)]),
        ("x_0", [("x", 0), ("0", -1)]),
        ("theta[3]", [("θ", 0), ("3", -1)]),
        ("theta_raw", [("θ", 0), ("raw", -1)]),
        ("x^1", [("x", 0), ("1", 1)]),
        ("φ_αβ", [("φ", 0), ("αβ", -1)]),
        ("Sigma", [("Σ", 0)]),
        ("log_sigma", [("log_sigma", 0)]),
        ("alphabet", [("alphabet", 0)]),
        ("x_", [("x_", 0)]),
        ("", [("", 0)]),
    ],
)
def test_labels(label, shown):
    spans = typeset(Drawing((Node("n", label, "latent"),), (), ()))["n"]
    assert [(span.text, span.level) for span in spans] == shown


def test_labels_that_would_look_alike_stay_plain():
    spans = typeset(Drawing(nodes("w0 w_0 w_1 alpha α"), (), ()))
    assert {name: spans[name][0].text for name in spans} == {
        "w0": "w0",
        "w_0": "w_0",
        "w_1": "w",
        "alpha": "alpha",
        "α": "α",
    }


def test_long_labels_fit_into_their_nodes():
    page = layered(Drawing(nodes("x intercept_of_the_group", "", "f", ""), (), ()))
    assert page.places["x"].width == page.places["x"].height
    assert page.places["intercept_of_the_group"].width > 6 * len("intercept_of_the_group")


AWKWARD = [
    'a"b',
    "a\\b",
    "a\\",
    "<i>&amp;",
    "x[1]",
    "μ→∞",
    "two\nlines",
    "bell\x07",
    "graph",
    "",
    "$y$",
    "1;}",
]


def awkward():
    boxes = (Box('<"\\', tuple(AWKWARD[:2])), Box("{}&", tuple(AWKWARD[5:7])))
    arrows = tuple(Edge(a, b, label=b) for a, b in pairwise(AWKWARD))
    return Drawing(tuple(Node(name, name, "latent") for name in AWKWARD), arrows, boxes)


def test_awkward_names_are_escaped():
    _, groups = groups_by_title(Picture(awkward()).to_svg())
    for name in AWKWARD:
        if name.isprintable() and name:
            assert groups[name].find(f"{SVG}ellipse") is not None
    assert Picture(awkward()).to_png().startswith(b"\x89PNG")


@needs_dot
@pytest.mark.parametrize("drawing", [*DRAWINGS.values(), *CROSSED.values(), awkward()])
def test_dot_accepts_our_dot(drawing):
    text = Picture(drawing).to_dot()
    run = subprocess.run(["dot", "-Tsvg"], input=text.encode(), capture_output=True, check=True)
    assert not run.stderr
    root = ET.fromstring(run.stdout)
    kinds = [g.get("class") for g in root.iter(f"{SVG}g")]
    assert kinds.count("node") == len(drawing.nodes)
    assert kinds.count("edge") == len(drawing.edges)
    if drawing in DRAWINGS.values():
        assert kinds.count("cluster") == len(drawing.boxes)


def test_dot_carries_style_and_nesting():
    text = Picture(DRAWINGS["nested"]).to_dot()
    outer, inner = text.index("schools: 8"), text.index("pupils: 30")
    assert outer < inner < text.index("}", outer)
    lines = {line.split()[0]: line for line in text.splitlines() if "shape=" in line}
    assert FILL["observed"] in lines['"score"']
    assert FILL["observed"] not in lines['"mu"']
    assert "peripheries=2" in lines['"pupil"']
    assert "style=dashed" in Picture(DRAWINGS["filter"]).to_dot()
    assert "shape=box" in Picture(DRAWINGS["filter"]).to_dot()


@needs_dot
def test_awkward_names_through_dot():
    assert set(from_dot(awkward()).places) == set(AWKWARD)


def chain(length):
    """A long series with a parameter that reaches every step."""
    steps = [f"x[{t}]" for t in range(length)]
    data = [f"y[{t}]" for t in range(length)]
    arrows = [Edge("a", x) for x in steps]
    arrows += [Edge(*pair) for pair in pairwise(steps)]
    arrows += [Edge(*pair) for pair in zip(steps, data, strict=True)]
    everything = (*nodes("a"), *nodes(" ".join(steps), " ".join(data)))
    return Drawing(everything, tuple(arrows), (Box("time", tuple(steps + data)),))


@pytest.mark.parametrize("which", [lambda _: None, lambda _: "/nowhere/dot"])
def test_without_dot(monkeypatch, tmp_path, which):
    monkeypatch.setattr(shutil, "which", which)
    drawing = chain(15)
    picture = Picture(drawing)
    assert picture.layout == layered(drawing)
    for suffix in ("svg", "png", "dot"):
        assert picture.save(tmp_path / f"x.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize(
    "script", ["exit 1", "echo nonsense", "echo '{}'", "sleep 30"], ids=lambda s: s.split()[0]
)
def test_a_failing_dot_is_passed_over(monkeypatch, tmp_path, script):
    program = tmp_path / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    monkeypatch.setattr(dot, "DOT_SECONDS", 0.3)
    drawing = chain(15)
    assert Picture(drawing).layout == layered(drawing)


@needs_dot
def test_larger_drawings_are_left_to_dot():
    drawing = chain(15)
    assert Picture(drawing).layout == from_dot(drawing) != layered(drawing)
    assert Picture(DRAWINGS["pumps"]).layout == layered(DRAWINGS["pumps"])


def test_png_has_the_size_of_the_page():
    picture = Picture(DRAWINGS["pumps"])
    data = picture.to_png()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == pytest.approx(
        (2 * picture.layout.width, 2 * picture.layout.height), abs=2
    )
    assert 100 < width < 1000 and 100 < height < 1000


def test_png_shows_the_nodes():
    picture = Picture(DRAWINGS["pumps"])
    pixels = imread(BytesIO(picture.to_png()))[..., :3]
    for node in picture.drawing.nodes:
        place = picture.layout.places[node.name]
        # Left of the label, inside the circle.
        colour = pixels[int(2 * place.y), int(2 * (place.x - 0.4 * place.width))]
        grey = int(FILL[node.kind][1:3], 16) / 255
        assert colour == pytest.approx([grey] * 3, abs=0.01)
        assert pixels[int(2 * place.y), int(2 * (place.x - place.width / 2))].max() < 0.6


def test_drawing_a_png_leaves_pyplot_alone():
    before = plt.get_fignums(), dict(plt.rcParams)
    Picture(DRAWINGS["pumps"]).to_png()
    assert (plt.get_fignums(), dict(plt.rcParams)) == before


def test_only_a_png_needs_matplotlib():
    code = (
        "import sys\n"
        "from retrodict.plotting.picture import Drawing, Node, Picture\n"
        "picture = Picture(Drawing((Node('a', 'a', 'latent'),), (), ()))\n"
        "picture.to_svg(), picture.to_dot()\n"
        "assert 'matplotlib' not in sys.modules\n"
        "picture.to_png()\n"
        "assert 'matplotlib' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_save_by_suffix(tmp_path):
    picture = Picture(DRAWINGS["pumps"])
    assert picture.save(tmp_path / "x.SVG").read_text(encoding="utf-8") == picture.to_svg()
    assert picture.save(str(tmp_path / "x.png")).read_bytes() == picture.to_png()
    assert picture.save(tmp_path / "x.dot").read_text(encoding="utf-8") == picture.to_dot()
    with pytest.raises(ValueError, match=r"'x\.pdf'.*\.svg, \.png, \.dot"):
        picture.save(tmp_path / "x.pdf")
    with pytest.raises(ValueError, match="suffix"):
        picture.save(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=r"'x\.svg'.*no folder .*missing"):
        picture.save(tmp_path / "missing" / "x.svg")


def test_drawings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"more than once: \['a'\]"):
        Drawing(nodes("a a"), (), ())
    with pytest.raises(ValueError, match=r"no node: \['b'\]"):
        Drawing(nodes("a"), edges("a>b"), ())
    with pytest.raises(ValueError, match=r"no node: \['c'\]"):
        Drawing(nodes("a"), (), (Box("plate", ("c",)),))


@pytest.mark.parametrize(
    "drawing",
    [
        Drawing((), (), ()),
        Drawing(nodes("a"), (), (Box("empty", ()),)),
        Drawing(nodes("a b"), edges("a>b b>a"), ()),
        Drawing(nodes("a b"), (lag("a", "b"),), ()),
        Drawing(nodes("a"), (Edge("a", "a"),), ()),
    ],
    ids=["nothing", "empty box", "circle", "sideways", "loop"],
)
def test_odd_drawings_are_drawn(drawing):
    root = ET.fromstring(Picture(drawing).to_svg())
    assert len(list(root.iter(f"{SVG}ellipse"))) == len(drawing.nodes)
    assert len(list(root.iter(f"{SVG}path"))) == len(drawing.edges)
    assert Picture(drawing).to_png().startswith(b"\x89PNG")


def test_hundreds_of_nodes():
    drawing = chain(150)
    start = time.perf_counter()
    page = layered(drawing)
    assert time.perf_counter() - start < 10  # well under 2 s on an idle machine
    check_boxes(drawing, page)
