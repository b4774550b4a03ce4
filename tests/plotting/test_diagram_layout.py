"""Tests of diagram layouts: positions of nodes, edges and boxes on the page."""

import shutil
import time
from itertools import combinations
from math import dist

import numpy as np
import pytest
from diagrams import (
    AWKWARD_NAMES,
    CROSSED,
    DIAGRAMS,
    awkward_diagram,
    every_diagram,
    needs_dot,
    nodes,
    random_diagram,
    state_space_chain,
)

from retrodict.plotting.diagram import dot
from retrodict.plotting.diagram.dot import dot_layout
from retrodict.plotting.diagram.elements import Diagram, DiagramNode
from retrodict.plotting.diagram.labels import typeset_labels
from retrodict.plotting.diagram.layered_layout import layered_layout
from retrodict.plotting.diagram.layout import Layout
from retrodict.plotting.picture import Picture

every_layout = pytest.mark.parametrize(
    "compute_layout",
    [
        pytest.param(layered_layout, id="layered"),
        pytest.param(dot_layout, id="dot", marks=needs_dot),
    ],
)


def corners(outline):
    dx, dy = outline.width / 2, outline.height / 2
    return outline.x - dx, outline.y - dy, outline.x + dx, outline.y + dy


def check_boxes(diagram, layout: Layout):
    """Check that the members of every box lie inside its frame and all other nodes outside."""
    drawn_members = {}
    for frame in layout.frames:
        assert layout.width >= frame.right > frame.left >= 0
        assert layout.height >= frame.bottom > frame.top >= 0
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


@every_layout
@every_diagram
def test_boxes_contain_exactly_their_members(diagram, compute_layout):
    check_boxes(diagram, compute_layout(diagram))


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


@every_layout
@every_diagram
def test_arrows_connect_the_borders_of_their_nodes(diagram, compute_layout):
    layout = compute_layout(diagram)
    assert [route.edge for route in layout.routes] == list(diagram.edges)
    for route in layout.routes:
        source, target = layout.outlines[route.edge.source], layout.outlines[route.edge.target]
        # dot ends its curves up to 1.5 points away from the border.
        assert source.gauge(route.path[0]) == pytest.approx(1, abs=0.1)
        assert target.gauge(route.tip) == pytest.approx(1, abs=0.1)
        if compute_layout is layered_layout:
            assert source.gauge(route.path[0]) == pytest.approx(1, abs=0.002)
            assert target.gauge(route.tip) == pytest.approx(1, abs=0.002)
        assert 4 < dist(route.tip, route.path[-1]) < 12
        assert len(route.path) % 3 == 1


@every_diagram
def test_arrows_avoid_other_nodes(diagram):
    layout = layered_layout(diagram)
    for route in layout.routes:
        points = sample_path(route.path)
        for name, outline in layout.outlines.items():
            if name not in (route.edge.source, route.edge.target):
                assert outline.gauge(points).min() > 1, (route.edge, name)


def sample_path(path):
    """Evaluate a cubic Bézier curve, independently of the module under test."""
    t = np.linspace(0, 1, 50)[:, None]
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


@every_layout
@every_diagram
def test_nodes_do_not_overlap_and_solid_edges_point_down(diagram, compute_layout):
    layout = compute_layout(diagram)
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
        next(sample_path(r.path) for r in layout.routes if (r.edge.source, r.edge.target) == pair)
        for pair in (("f", "x"), ("x", "f"))
    )
    middle = forward[len(forward) // 2]
    assert np.hypot(*(backward - middle).T).min() > 8


@pytest.mark.parametrize(
    ("label", "expected"),
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
def test_labels_are_typeset_as_symbols_or_words(label, expected):
    spans = typeset_labels(Diagram((DiagramNode("n", label, "latent"),), (), ()))["n"]
    assert [(span.text, span.level) for span in spans] == expected


def test_labels_that_would_look_the_same_stay_plain():
    spans = typeset_labels(Diagram(nodes("w0 w_0 w_1 alpha α"), (), ()))
    assert {name: spans[name][0].text for name in spans} == {
        "w0": "w0",
        "w_0": "w_0",
        "w_1": "w",
        "alpha": "alpha",
        "α": "α",
    }


def test_long_labels_fit_into_their_nodes():
    layout = layered_layout(Diagram(nodes("x intercept_of_the_group", "", "f", ""), (), ()))
    assert layout.outlines["x"].width == layout.outlines["x"].height
    assert layout.outlines["intercept_of_the_group"].width > 6 * len("intercept_of_the_group")


@needs_dot
def test_dot_layout_handles_awkward_names():
    assert set(dot_layout(awkward_diagram()).outlines) == set(AWKWARD_NAMES)


@pytest.mark.parametrize("which", [lambda _: None, lambda _: "/nowhere/dot"])
def test_layout_and_files_do_not_need_dot(monkeypatch, tmp_path, which):
    monkeypatch.setattr(shutil, "which", which)
    diagram = state_space_chain(15)
    picture = Picture(diagram)
    assert picture.layout == layered_layout(diagram)
    for suffix in ("svg", "png", "dot"):
        assert picture.save(tmp_path / f"x.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize(
    "script", ["exit 1", "echo nonsense", "echo '{}'", "sleep 30"], ids=lambda s: s.split()[0]
)
def test_layered_layout_is_used_if_dot_fails(monkeypatch, tmp_path, script):
    program = tmp_path / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    monkeypatch.setattr(dot, "DOT_TIMEOUT", 0.3)
    diagram = state_space_chain(15)
    assert Picture(diagram).layout == layered_layout(diagram)


@needs_dot
def test_dot_lays_out_larger_diagrams():
    diagram = state_space_chain(15)
    assert Picture(diagram).layout == dot_layout(diagram) != layered_layout(diagram)
    assert Picture(DIAGRAMS["pumps"]).layout == layered_layout(DIAGRAMS["pumps"])


def test_layout_of_hundreds_of_nodes_takes_seconds():
    diagram = state_space_chain(150)
    start = time.perf_counter()
    layout = layered_layout(diagram)
    assert time.perf_counter() - start < 10  # below 2 s on an idle machine
    check_boxes(diagram, layout)
