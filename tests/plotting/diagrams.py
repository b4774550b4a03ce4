"""Diagrams that the tests of layouts and file formats share."""

import shutil
from itertools import pairwise

import numpy as np
import pytest

from retrodict.plotting.diagram.elements import Box, Diagram, DiagramEdge, DiagramNode

needs_dot = pytest.mark.skipif(
    shutil.which("dot") is None, reason="the dot program is not installed"
)


def nodes(latent="", observed="", factor=""):
    """Return nodes of each kind by names separated by spaces; the name is the label."""
    kinds = {"latent": latent, "observed": observed, "factor": factor}
    return tuple(
        DiagramNode(name, name, kind) for kind, names in kinds.items() for name in names.split()
    )


def edges(text):
    """Parse solid edges such as `"a>b b>c"`."""
    return tuple(DiagramEdge(*arrow.split(">")) for arrow in text.split())


def lag(source, target):
    return DiagramEdge(source, target, "dashed", "t−1")


DIAGRAMS = {
    "regression": Diagram(
        nodes("w0 w1 w2", "z t"),
        edges("w0>t w1>t w2>t z>t"),
        (Box("N: 10", ("z", "t")),),
    ),
    "pumps": Diagram(
        nodes("alpha beta theta", "t y"),
        edges("alpha>theta beta>theta theta>y t>y"),
        (Box("pumps: 10", ("theta", "t", "y")),),
    ),
    "pumps faithful inverse": Diagram(
        nodes("alpha beta theta", "t y", "f g"),
        edges("t>f y>f f>alpha f>beta alpha>g beta>g t>g y>g g>theta"),
        (Box("pumps: 10", ("theta", "t", "y", "g")),),
    ),
    "factorial HMM": Diagram(
        nodes("x^1 x^2 x^3", "y"),
        (*edges("x^1>y x^2>y x^3>y"), *(lag(x, x) for x in ("x^1", "x^2", "x^3"))),
        (Box("time: 30", ("x^1", "x^2", "x^3", "y")),),
    ),
    "filter": Diagram(
        nodes("x z", "y", "f"),
        (*edges("y>f f>x f>z"), lag("x", "f"), lag("z", "f")),
        (Box("time: 30", ("x", "z", "y", "f")),),
    ),
    "nested": Diagram(
        nodes("mu tau sigma school pupil", "score hours"),
        edges("mu>school tau>school school>pupil sigma>pupil pupil>score hours>score tau>score"),
        (
            Box("pupils: 30", ("pupil", "score", "hours")),
            Box("schools: 8", ("school", "pupil", "score", "hours")),
            Box("a caption much wider than what it is written under", ("sigma",)),
        ),
    ),
    "same members": Diagram(
        nodes("a b", "y"), edges("a>y b>y"), (Box("i", ("b", "y")), Box("j", ("b", "y")))
    ),
    "other node between members": Diagram(
        nodes("a b c"), edges("a>b b>c a>c"), (Box("plate", ("a", "c")),)
    ),
}
SUBSETS = "a b c ab bc ac abc"
CROSSED = {
    "crossed": Diagram(
        nodes("s a b", "y"),
        edges("s>y a>y b>y"),
        (Box("rows: 5", ("a", "y")), Box("columns: 7", ("b", "y"))),
    ),
    "crossed three ways": Diagram(
        nodes("a b c", "ab bc ac abc"),
        edges("a>ab b>ab b>bc c>bc a>ac c>ac a>abc b>abc c>abc"),
        tuple(Box(k, tuple(n for n in SUBSETS.split() if k in n)) for k in "abc"),
    ),
}
every_diagram = pytest.mark.parametrize(
    "diagram", [pytest.param(d, id=k) for k, d in DIAGRAMS.items()]
)


def random_diagram(seed, count=25):
    """Return a random acyclic diagram with four nested, crossing or disjoint boxes."""
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(count)]
    pairs = {tuple(sorted(rng.choice(count, 2, replace=False))) for _ in range(2 * count)}
    boxes = []
    for k in range(4):
        start, length = rng.integers(count - 8), rng.integers(1, 9)
        boxes.append(Box(f"box {k}", tuple(names[start : start + length])))
    edges = tuple(DiagramEdge(names[i], names[j]) for i, j in sorted(pairs))
    return Diagram(nodes(" ".join(names)), edges, tuple(boxes))


def state_space_chain(length):
    """Return an unrolled state-space model, with a parameter of every step."""
    states = [f"x[{t}]" for t in range(length)]
    data = [f"y[{t}]" for t in range(length)]
    edges = [DiagramEdge("a", x) for x in states]
    edges += [DiagramEdge(*pair) for pair in pairwise(states)]
    edges += [DiagramEdge(*pair) for pair in zip(states, data, strict=True)]
    sites = (*nodes("a"), *nodes(" ".join(states), " ".join(data)))
    return Diagram(sites, tuple(edges), (Box("time", tuple(states + data)),))


# Names that need escaping in XML, DOT or mathtext.
AWKWARD_NAMES = [
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


def awkward_diagram():
    boxes = (Box('<"\\', tuple(AWKWARD_NAMES[:2])), Box("{}&", tuple(AWKWARD_NAMES[5:7])))
    edges = tuple(DiagramEdge(a, b, label=b) for a, b in pairwise(AWKWARD_NAMES))
    return Diagram(tuple(DiagramNode(name, name, "latent") for name in AWKWARD_NAMES), edges, boxes)
