"""Tests of diagram layouts: positions of nodes, edges and boxes on the page."""

import time
from itertools import combinations

import numpy as np
import pytest
from diagrams import CROSSED, DIAGRAMS, every_diagram, nodes, random_diagram, state_space_chain

from retrodict.plotting.diagram.elements import Diagram, DiagramNode
from retrodict.plotting.diagram.labels import WORD_SIZE, Label, text_path, typeset_labels
from retrodict.plotting.diagram.layered_layout import layered_layout
from retrodict.plotting.diagram.layout import Layout
from retrodict.plotting.picture import Picture


def corners(outline):
    dx, dy = outline.width / 2, outline.height / 2
    return outline.x - dx, outline.y - dy, outline.x + dx, outline.y + dy


def check_boxes(diagram, layout: Layout):
    """Check that the members of every box lie inside its frame and all other nodes outside."""
    drawn_members = {}
    for frame in layout.frames:
        assert frame.right > frame.left and frame.bottom > frame.top
        for name, outline in layout.outlines.items():
            left, top, right, bottom = corners(outline)
            inside = frame.left < left and right < frame.right
            inside &= frame.top < top and bottom < frame.bottom
            outside = right < frame.left or frame.right < left
            outside |= bottom < frame.top or frame.bottom < top
            assert inside if name in frame.box.members else outside, (frame.box.name, name)
        drawn_members.setdefault(frame.box.name, []).extend(frame.box.members)
    assert {k: sorted(v) for k, v in drawn_members.items()} == {
        box.name: sorted(box.members) for box in diagram.boxes
    }


@every_diagram
def test_boxes_contain_exactly_their_members(diagram):
    check_boxes(diagram, layered_layout(diagram))


@pytest.mark.parametrize("diagram", CROSSED.values(), ids=CROSSED)
def test_crossing_boxes_contain_exactly_their_members(diagram):
    check_boxes(diagram, Picture(diagram).layout)


def test_two_crossing_boxes_are_drawn_without_splitting():
    assert len(layered_layout(CROSSED["crossed"]).frames) == 2


@pytest.mark.parametrize("seed", range(12))
def test_boxes_of_random_diagrams_contain_exactly_their_members(seed):
    diagram = random_diagram(seed)
    check_boxes(diagram, layered_layout(diagram))


def test_inner_box_lies_inside_outer_one():
    frames = {frame.box.name: frame for frame in layered_layout(DIAGRAMS["nested"]).frames}
    inner, outer = frames["pupils: 30"], frames["schools: 8"]
    assert outer.left < inner.left < inner.right < outer.right
    assert outer.top < inner.top < inner.bottom < outer.bottom


@every_diagram
def test_arrows_connect_the_borders_of_their_nodes(diagram):
    layout = layered_layout(diagram)
    assert [route.edge for route in layout.routes] == list(diagram.edges)
    for route in layout.routes:
        source, target = layout.outlines[route.edge.source], layout.outlines[route.edge.target]
        assert source.gauge(route.curve[0]) == pytest.approx(1, abs=0.002)
        assert target.gauge(route.curve[-1]) == pytest.approx(1, abs=0.002)
        assert len(route.curve) % 3 == 1


LAYOUTS = {
    **DIAGRAMS,
    **CROSSED,
    "chain": state_space_chain(15),
    **{f"random {seed}": random_diagram(seed) for seed in range(6)},
}


@pytest.mark.parametrize("diagram", LAYOUTS.values(), ids=LAYOUTS)
def test_arrows_avoid_other_nodes(diagram):
    layout = layered_layout(diagram)
    for route in layout.routes:
        points = sample_path(route.curve)
        for name, outline in layout.outlines.items():
            if name not in (route.edge.source, route.edge.target):
                assert outline.gauge(points).min() > 1, (route.edge, name)


def sample_path(path):
    """Evaluate a cubic Bézier curve, independently of the module under test."""
    t = np.linspace(0, 1, 200)[:, None]
    segments = [path[k : k + 4] for k in range(0, len(path) - 1, 3)]
    return np.vstack(
        [
            (1 - t) ** 3 * np.array(a)
            + 3 * (1 - t) ** 2 * t * np.array(b)
            + 3 * (1 - t) * t**2 * np.array(c)
            + t**3 * np.array(d)
            for a, b, c, d in segments
        ]
    )


@every_diagram
def test_nodes_do_not_overlap_and_solid_edges_point_down(diagram):
    layout = layered_layout(diagram)
    for a, b in combinations(layout.outlines.values(), 2):
        gap_x = abs(a.x - b.x) - (a.width + b.width) / 2
        gap_y = abs(a.y - b.y) - (a.height + b.height) / 2
        assert max(gap_x, gap_y) > 4
    for edge in diagram.edges:
        if edge.style == "solid":
            assert layout.outlines[edge.source].y < layout.outlines[edge.target].y


def test_two_edges_between_the_same_nodes_are_drawn_apart():
    layout = layered_layout(DIAGRAMS["filter"])
    forward, backward = (
        next(sample_path(r.curve) for r in layout.routes if (r.edge.source, r.edge.target) == pair)
        for pair in (("f", "x"), ("x", "f"))
    )
    middle = forward[len(forward) // 2]
    assert np.hypot(*(backward - middle).T).min() > 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alpha", Label("α")),
        ("x_0", Label("x", below="0")),
        ("x_0_1", Label("x", below="0,1")),
        ("theta[3]", Label("θ", below="3")),
        ("theta_raw", Label("θ", below="raw")),
        ("x^1", Label("x", above="1")),
        ("φ_αβ", Label("φ", below="αβ")),
        ("Sigma", Label("Σ")),
        ("log_sigma", Label("log_sigma")),
        ("alphabet", Label("alphabet")),
        ("x_", Label("x_")),
        ("", Label("")),
    ],
)
def test_labels_are_typeset_as_symbols_or_words(text, expected):
    label = typeset_labels(Diagram((DiagramNode("n", text, "latent"),), (), ()))["n"]
    assert label == expected
    assert label.is_symbol == (len(expected.base) == 1)


def test_formulas_have_italic_letters_and_upright_words():
    assert Label("x", "1", "i").mathtext() == "$x^{1}_{i}$"
    assert Label("Σ", below="raw").mathtext() == r"$\mathrm{Σ}_{\mathrm{raw}}$"
    assert Label("$y$").mathtext() == "$y$" and not Label("$y$").is_symbol
    assert Label("θ", below="3").html() == "<i>θ</i><sub>3</sub>"


def test_labels_that_would_look_the_same_stay_plain():
    labels = typeset_labels(Diagram(nodes("w0 w_0 w_1 alpha α"), (), ()))
    assert {name: label.base for name, label in labels.items()} == {
        "w0": "w0",
        "w_0": "w_0",
        "w_1": "w",
        "alpha": "alpha",
        "α": "α",
    }


def test_long_labels_fit_into_their_nodes():
    layout = layered_layout(Diagram(nodes("x intercept_of_the_group", "", "f"), (), ()))
    assert layout.outlines["x"].width == layout.outlines["x"].height
    letters = text_path("intercept_of_the_group", WORD_SIZE).get_extents()
    assert layout.outlines["intercept_of_the_group"].width > letters.width + 10


def test_layout_of_hundreds_of_nodes_takes_seconds():
    diagram = state_space_chain(150)
    start = time.process_time()
    layout = layered_layout(diagram)
    assert time.process_time() - start < 6  # below 2 s on an idle machine
    check_boxes(diagram, layout)
