"""A drawing (nodes, edges, boxes) goes in; where everything stands on the page comes out.

Layers from top to bottom (Sugiyama, Tagawa & Toda 1981): longest-path layers, barycentre sweeps
against crossings, then horizontal places by a small quadratic program whose constraints keep every
stranger out of every box. Boxes may nest or cross; all that is asked of the left-to-right order is
that the members of a box stand next to one another.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise, permutations, takewhile
from math import dist, hypot
from typing import Literal, NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import splu

Point = tuple[float, float]
Points = NDArray[np.float64]

TEXT, SMALL, WORD, CAPTION = 16.0, 11.0, 13.0, 11.5  # font sizes; one unit is a point
DIAMETER, SIDE = 36.0, 28.0
GAP_X, GAP_Y, PAD, CAPTION_HEIGHT, MARGIN = 18.0, 32.0, 10.0, 16.0, 10.0
HEAD = 8.0
SMALL_DRAWING = 40
MAX_STAND_INS = 800  # edges along a series pass hundreds of layers: the longest go unguided
MAX_ATOMS = 7  # crossing boxes are put in order by trying all orders of their pieces


@dataclass(frozen=True)
class Node:
    """A variable (circle) or a factor (square)."""

    name: str
    label: str
    kind: Literal["latent", "observed", "factor", "deterministic"]


@dataclass(frozen=True)
class Edge:
    """An arrow; dashed where it comes from the previous time step."""

    source: str
    target: str
    style: Literal["solid", "dashed"] = "solid"
    label: str = ""


@dataclass(frozen=True)
class Box:
    """A plate around its members; `name` is the caption."""

    name: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """What is to be drawn. Order counts only where nothing else decides."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        counts = Counter(node.name for node in self.nodes)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"node names must differ; more than once: {twice}")
        used = [name for edge in self.edges for name in (edge.source, edge.target)]
        used += [name for box in self.boxes for name in box.members]
        if unknown := [name for name in dict.fromkeys(used) if name not in counts]:
            raise ValueError(f"edges or boxes name no node: {unknown}; nodes are {list(counts)}")


class Span(NamedTuple):
    """A piece of a label: `level` is 0 on the line, −1 below (subscript), 1 above."""

    text: str
    level: int = 0
    italic: bool = False


class Place(NamedTuple):
    """The centre and size of a node."""

    x: float
    y: float
    width: float
    height: float
    square: bool

    def gauge(self, points: Points | Point) -> Points:
        """For every point: less than 1 inside the node, 1 on its border."""
        off = np.abs(np.asarray(points) - (self.x, self.y)) * 2 / (self.width, self.height)
        across, down = off[..., 0], off[..., 1]
        return np.maximum(across, down) if self.square else np.hypot(across, down)


class Route(NamedTuple):
    """An edge: cubic Bézier curves (3k + 1 points) as far as the arrowhead, which ends in `tip`."""

    edge: Edge
    path: tuple[Point, ...]
    tip: Point
    label: Point


class Frame(NamedTuple):
    """A box on the page; the caption stands in its lower left or right corner."""

    box: Box
    left: float
    top: float
    right: float
    bottom: float
    caption: Literal["left", "right"] = "right"


class Layout(NamedTuple):
    """A page: x to the right, y down, origin in the upper left corner."""

    width: float
    height: float
    places: dict[str, Place]
    routes: tuple[Route, ...]
    frames: tuple[Frame, ...]


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


def printable(text: str) -> str:
    """The text without what XML and fonts refuse, such as control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _spans(label: str) -> tuple[Span, ...]:
    found = _MATHS.fullmatch(label)
    base = _GREEK.get(found["base"], found["base"]) if found else ""
    if not found or len(base) != 1:
        return (Span(printable(label)),)
    below = (found["below"] or found["index"] or found["number"] or "").replace("_", ",")
    scripts = ((found["above"] or "", 1), (below, -1))
    parts = [(_GREEK.get(text, text), level) for text, level in scripts if text]
    letter = Span(base, 0, not base.isupper() or base.isascii())
    return (letter, *(Span(t, level, len(t) == 1 and t.isalpha()) for t, level in parts))


def typeset(drawing: Drawing) -> dict[str, tuple[Span, ...]]:
    """Labels as they are drawn: `theta_0` and `theta[0]` as θ with a subscript, words as they are.

    Where two different labels would look alike (`w0` and `w_0`), all of them stay plain.
    """
    spans = {node.label: _spans(node.label) for node in drawing.nodes}
    looks = Counter(spans.values())
    plain = {
        text: value if looks[value] == 1 else (Span(printable(text)),)
        for text, value in spans.items()
    }
    return {node.name: plain[node.label] for node in drawing.nodes}


def text_width(text: str, size: float) -> float:
    """A generous guess: which font will be found is not known here."""

    def em(c: str) -> float:
        if unicodedata.combining(c):
            return 0.0
        if unicodedata.east_asian_width(c) in "WF":
            return 1.0
        return (
            0.34
            if c in "iljtf.,:;'|![]() "
            else 0.85
            if c in "mwMW@%"
            else 0.68
            if c.isupper()
            else 0.52
        )

    return size * sum(map(em, text))


def span_size(span: Span, spans: tuple[Span, ...]) -> float:
    """Words are set a little smaller than single letters, scripts smaller still."""
    return SMALL if span.level else WORD if len(spans[0].text) > 1 else TEXT


def sizes(drawing: Drawing) -> dict[str, tuple[float, float]]:
    """Width and height of every node: a circle or square, wider where the label needs it."""
    result = {}
    spans = typeset(drawing)
    for node in drawing.nodes:
        pieces = spans[node.name]
        text = sum(text_width(span.text, span_size(span, pieces)) for span in pieces)
        ring = 6.0 if node.kind == "deterministic" else 0.0
        if node.kind == "factor":
            result[node.name] = (max(SIDE, text + 10.0), SIDE)
        else:
            wide = text + 10.0 if text + 8.0 <= DIAMETER else 1.12 * text + 16.0
            result[node.name] = (max(DIAMETER, wide) + ring, DIAMETER + ring)
    return {name: (round(width, 1), height) for name, (width, height) in result.items()}


def _loop_room(edge: Edge) -> float:
    """How far an edge from a node to itself reaches beyond the node."""
    return 28.0 + (text_width(edge.label, SMALL) + 4.0 if edge.label else 0.0)


def layered(drawing: Drawing) -> Layout:
    """Lay out a drawing with nothing but what is in this file."""
    boxes, groups = _arrange(drawing)
    layer = _layers(drawing)
    grid = _Grid(drawing, layer, boxes, groups)
    size = sizes(drawing)
    x, sides = _polish(grid, _untangle(grid), size)
    middle, tops, bottoms = _rows(grid, x, size)
    names = [node.name for node in drawing.nodes]
    kinds = {node.name: node.kind for node in drawing.nodes}
    places = {
        name: Place(x[i], middle[layer[name]], *size[name], kinds[name] == "factor")
        for i, name in enumerate(names)
    }
    frames = [
        Frame(box, left, top, right, bottom)
        for box, (left, right), top, bottom in zip(boxes, sides, tops, bottoms, strict=True)
    ]
    bends = {e: [(x[i], middle[grid.row[i]]) for i in chain] for e, chain in grid.chains.items()}
    return fit(places, _routes(drawing, places, bends), frames)


def nested(boxes: Iterable[Box]) -> bool:
    """Whether no two boxes cross."""
    return not any(_cross(set(a.members), set(b.members)) for a, b in combinations(boxes, 2))


def _cross(a: set[str] | frozenset[str], b: set[str] | frozenset[str]) -> bool:
    return bool(a & b) and not a <= b and not b <= a


class _Group(NamedTuple):
    """Boxes that cross (most often a single box), and the atoms they cut one another into."""

    atoms: tuple[frozenset[str], ...]
    boxes: tuple[int, ...]


def _arrange(drawing: Drawing) -> tuple[list[Box], list[_Group]]:
    """Group crossing boxes. A box for which no order exists is drawn in several pieces."""
    names = [node.name for node in drawing.nodes]
    boxes = [box for box in drawing.boxes if box.members]
    while True:
        sets = [frozenset(box.members) for box in boxes]
        touching: nx.Graph[int] = nx.empty_graph(len(boxes))
        pairs = combinations(range(len(boxes)), 2)
        touching.add_edges_from((a, b) for a, b in pairs if _cross(sets[a], sets[b]))
        groups = []
        for component in nx.connected_components(touching):
            inside = sorted(component)
            atoms = _in_order([sets[i] for i in inside], names)
            if atoms is None:
                odd = boxes.pop(inside[-1])
                rest = list(_atoms([sets[i] for i in inside[:-1]], names).values())
                rest.append(frozenset(odd.members).difference(*rest))
                pieces = [tuple(m for m in odd.members if m in atom) for atom in rest]
                boxes += [Box(odd.name, piece) for piece in pieces if piece]
                break
            groups.append(_Group(atoms, tuple(inside)))
        else:
            return boxes, groups


def _atoms(sets: list[frozenset[str]], names: list[str]) -> dict[tuple[int, ...], frozenset[str]]:
    """The names that lie in exactly the same sets, by which sets these are."""
    pieces: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in names:
        pieces[tuple(k for k, members in enumerate(sets) if name in members)].append(name)
    return {marks: frozenset(piece) for marks, piece in pieces.items() if marks}


def _in_order(sets: list[frozenset[str]], names: list[str]) -> tuple[frozenset[str], ...] | None:
    """Atoms in an order in which those of each set stand together."""
    atoms = _atoms(sets, names)
    for order in permutations(atoms) if len(atoms) <= MAX_ATOMS else ():
        runs = [[k for k, marks in enumerate(order) if s in marks] for s in range(len(sets))]
        if all(run[-1] - run[0] + 1 == len(run) for run in runs):
            return tuple(atoms[marks] for marks in order)
    return None


def _layers(drawing: Drawing) -> dict[str, int]:
    """Longest paths over the solid edges; then sources come down to the children they feed."""
    solid: nx.DiGraph[str] = nx.DiGraph()
    solid.add_nodes_from(node.name for node in drawing.nodes)
    solid.add_edges_from((e.source, e.target) for e in drawing.edges if e.style == "solid")
    if not nx.is_directed_acyclic_graph(solid):
        order = {node.name: i for i, node in enumerate(drawing.nodes)}
        solid.remove_edges_from([(a, b) for a, b in solid.edges if order[a] >= order[b]])
    generations = list(nx.topological_generations(solid))
    layer = {name: depth for depth, names in enumerate(generations) for name in names}
    for name in reversed(list(layer)):
        if solid.out_degree(name) > solid.in_degree(name):
            layer[name] = min(layer[child] for child in solid.successors(name)) - 1
    used = {value: rank for rank, value in enumerate(sorted(set(layer.values())))}
    return {name: used[value] for name, value in layer.items()}


class _Grid:
    """Nodes, and a stand-in wherever an edge passes a layer; each knows the boxes it belongs in."""

    def __init__(
        self, drawing: Drawing, layer: dict[str, int], boxes: list[Box], groups: list[_Group]
    ) -> None:
        self.names = [node.name for node in drawing.nodes]
        index = {name: i for i, name in enumerate(self.names)}
        self.row = [layer[name] for name in self.names]
        self.boxes, self.groups = boxes, groups
        spans = [[layer[m] for m in box.members] for box in boxes]
        self.reach = [(min(span), max(span)) for span in spans]
        hull = [sum(map(len, group.atoms)) for group in groups]
        self.path: list[tuple[tuple[int, int], ...]] = [
            tuple(
                (g, a)
                for g in sorted(range(len(groups)), key=lambda g: -hull[g])
                for a, atom in enumerate(groups[g].atoms)
                if name in atom
            )
            for name in self.names
        ]
        self.around = {
            (g, a): [b for b in group.boxes if atom <= set(boxes[b].members)]
            for g, group in enumerate(groups)
            for a, atom in enumerate(group.atoms)
        }
        self.links: list[tuple[int, int, float]] = []  # neighbours and how straight between them
        self.flat: list[tuple[int, int]] = []  # edges that only pull sideways
        self.chains: dict[int, list[int]] = {}
        self.room: dict[int, float] = {}  # room on the right
        spare = MAX_STAND_INS
        pairs = Counter(frozenset((edge.source, edge.target)) for edge in drawing.edges)
        length = [abs(layer[edge.source] - layer[edge.target]) for edge in drawing.edges]
        for number in sorted(range(len(length)), key=length.__getitem__):
            edge = drawing.edges[number]
            a, b = index[edge.source], index[edge.target]
            spare -= max(length[number] - 1, 0)
            if edge.style == "dashed" and pairs[frozenset((edge.source, edge.target))] > 1:
                self.room[a] = max(self.room.get(a, 0.0), 24.0)  # it bends beside the other edge
            if a == b:
                self.room[a] = max(self.room.get(a, 0.0), _loop_room(edge))
            elif length[number] == 0 or spare < 0:
                self.flat.append((a, b))
            else:
                self._link(number, a, b, 1.0 if edge.style == "solid" else 0.3)
        self.inside = [{b for step in path for b in self.around[step]} for path in self.path]
        self.rows: list[list[int]] = [[] for _ in range(max(self.row, default=-1) + 1)]
        for i, row in enumerate(self.row):
            self.rows[row].append(i)

    def _link(self, number: int, a: int, b: int, weight: float) -> None:
        step = 1 if self.row[b] > self.row[a] else -1
        chain = []
        for row in range(self.row[a] + step, self.row[b], step):
            chain.append(len(self.row))
            self.row.append(row)
            self.path.append(max(self._within(a, row), self._within(b, row), key=len))
        if chain:
            self.chains[number] = chain
        stops = [a, *chain, b][::step]
        for upper, lower in pairwise(stops):
            ends = (upper < len(self.names)) + (lower < len(self.names))
            self.links.append((upper, lower, weight * (8.0, 2.0, 1.0)[ends]))

    def _within(self, i: int, row: int) -> tuple[tuple[int, int], ...]:
        """The path of node i as far as the boxes along it reach to this row."""

        def reaches(step: tuple[int, int]) -> bool:
            return all(self.reach[b][0] <= row <= self.reach[b][1] for b in self.around[step])

        return tuple(takewhile(reaches, self.path[i]))


def _untangle(grid: _Grid, sweeps: int = 16) -> list[int]:
    """A left-to-right order of everything, members of a box together, with few crossings."""
    count = len(grid.row)
    key = [float(i) for i in range(count)]
    members: list[list[int]] = [[] for _ in grid.groups]
    for i, path in enumerate(grid.path):
        for g, _ in path:
            members[g].append(i)
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for upper, lower, _ in grid.links:
        above[lower].append(upper)
        below[upper].append(lower)
    flip = [1] * len(grid.groups)
    middle = [0.0] * len(grid.groups)

    def rank(i: int) -> tuple[tuple[float, int, int], ...]:
        around = tuple((middle[g], g, flip[g] * a) for g, a in grid.path[i])
        return (*around, (key[i], len(grid.groups) + i, 0))

    def centre(groups: Iterable[int]) -> None:
        for g in groups:
            middle[g] = sum(key[i] for i in members[g]) / len(members[g])
            if len(grid.groups[g].atoms) > 1:
                sides: dict[int, list[float]] = defaultdict(list)
                for i in members[g]:
                    sides[dict(grid.path[i])[g]].append(key[i])
                lean = float(np.mean(sides[max(sides)]) - np.mean(sides[0]))
                flip[g] = flip[g] if lean == 0 else 1 if lean > 0 else -1

    def spread(row: list[int]) -> None:
        for place, i in enumerate(sorted(row, key=rank)):
            key[i] = place - (len(row) - 1) / 2

    centre(range(len(grid.groups)))
    for row in grid.rows:
        spread(row)
    best = sorted(range(count), key=rank)
    least = _crossings(grid, best)
    for sweep in range(sweeps):
        downward = sweep % 2 == 0
        for row in grid.rows if downward else reversed(grid.rows):
            for i in row:
                near = above[i] if downward else below[i]
                if near:
                    key[i] = sum(key[j] for j in near) / len(near)
            centre({g for i in row for g, _ in grid.path[i]})
            spread(row)
        centre(range(len(grid.groups)))
        order = sorted(range(count), key=rank)
        if (cost := _crossings(grid, order)) < least:
            least, best = cost, order
    return best


def _moves(grid: _Grid, order: list[int]) -> Iterator[list[int]]:
    """Orders in which a node or a whole box has been moved left past its neighbour."""
    for depth in range(max(map(len, grid.path), default=0) + 1):

        def unit(i: int, depth: int = depth) -> tuple[object, int, bool]:
            path = grid.path[i]
            single = len(path) <= depth
            return (path[:depth], i if single else path[depth][0], single)

        runs = [(key, list(run)) for key, run in groupby(order, key=unit)]
        rows = [{grid.row[i] for i in run} for _, run in runs]
        for b, ((scope, _, _), run) in enumerate(runs):
            if len(grid.path[run[0]]) < depth:
                continue
            beside = (
                a for a in range(b - 1, -1, -1) if runs[a][0][0] == scope and rows[a] & rows[b]
            )
            if (a := next(beside, None)) is not None:
                moved = [*runs[:a], runs[b], *runs[a:b], *runs[b + 1 :]]
                yield [i for _, members in moved for i in members]


def _polish(
    grid: _Grid, order: list[int], size: dict[str, tuple[float, float]]
) -> tuple[list[float], list[tuple[float, float]]]:
    """Small drawings: go on as long as a single move gives fewer crossings or shorter edges."""
    x, sides, energy = _columns(grid, order, size)
    crossings = _crossings(grid, order)[0]
    better = len(order) <= SMALL_DRAWING
    while better:
        better = False
        for other in _moves(grid, order):
            count = _crossings(grid, other)[0]
            if count > crossings:
                continue
            x_other, sides_other, energy_other = _columns(grid, other, size)
            if count < crossings or energy_other < 0.99 * energy:
                x, sides, energy, crossings = x_other, sides_other, energy_other, count
                order, better = other, True
                break
    return x, sides


def _crossings(grid: _Grid, order: list[int]) -> tuple[int, float]:
    """How many edges cross, then how far they lean."""
    place = [0.0] * len(order)
    turn = {i: k for k, i in enumerate(order)}
    for row in grid.rows:
        for k, i in enumerate(sorted(row, key=turn.__getitem__)):
            place[i] = k - (len(row) - 1) / 2
    strips: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for upper, lower, _ in grid.links:
        strips[grid.row[upper]].append((place[upper], place[lower]))
    total = 0
    for strip in strips.values():
        ends: list[float] = []
        strip.sort()
        for _, end in strip:
            total += len(ends) - bisect_right(ends, end)
            insort(ends, end)
    return total, sum(abs(a - b) for strip in strips.values() for a, b in strip)


def _columns(
    grid: _Grid, order: list[int], size: dict[str, tuple[float, float]]
) -> tuple[list[float], list[tuple[float, float]], float]:
    """Where everything stands from left to right, the sides of the boxes, and what the edges cost.

    Minimises Σ w (x_i − x_j)² over linked pairs, with x_j − x_i ≥ s for neighbours and box sides.
    """
    count, boxes = len(order), range(len(grid.boxes))
    turn = {i: k for k, i in enumerate(order)}
    half = [size[name][0] / 2 for name in grid.names] + [1.0] * (count - len(grid.names))
    right = [half[i] + grid.room.get(i, 0.0) for i in range(count)]
    low, high = [count + 2 * b for b in boxes], [count + 2 * b + 1 for b in boxes]
    wide = [text_width(box.name, CAPTION) + 16.0 for box in grid.boxes]
    filled: list[list[int]] = [[] for _ in boxes]
    for i in order:
        for b in grid.inside[i]:
            filled[b].append(i)
    apart: list[tuple[int, int, float]] = []
    rows = [sorted(row, key=turn.__getitem__) for row in grid.rows]
    for row in rows:
        apart += [(i, j, right[i] + half[j] + GAP_X) for i, j in pairwise(row)]
    for b in boxes:
        apart.append((low[b], high[b], wide[b]))
        first, last = turn[filled[b][0]], turn[filled[b][-1]]
        # Edges that leave through the bottom pass the caption on its left.
        floor = [(u, v) for u, v, _ in grid.links if grid.row[u] == grid.reach[b][1]]
        leaving = [u for u, v in floor if b in grid.inside[u] and turn[v] <= last]
        apart += [(u, high[b], wide[b]) for u in leaving]
        apart += [(low[b], i, half[i] + PAD) for i in filled[b]]
        apart += [(i, high[b], right[i] + PAD) for i in filled[b]]
        for row in rows[grid.reach[b][0] : grid.reach[b][1] + 1]:
            outside = [i for i in row if b not in grid.inside[i]]
            apart += [(i, low[b], right[i] + PAD) for i in outside if turn[i] < first]
            apart += [(high[b], i, half[i] + PAD) for i in outside if turn[i] > last]
    ends = [(turn[f[0]], turn[f[-1]], len(f)) for f in filled]
    for a, b in combinations(boxes, 2):
        if ends[a][1] < ends[b][0] or ends[b][1] < ends[a][0]:
            one, two = (a, b) if ends[a][1] < ends[b][0] else (b, a)
            if grid.reach[a][0] <= grid.reach[b][1] and grid.reach[b][0] <= grid.reach[a][1]:
                apart.append((high[one], low[two], PAD))
            continue
        # The box that starts first, or is larger, has its side further out.
        outer, inner = (
            (a, b) if (ends[a][0], -ends[a][2], a) < (ends[b][0], -ends[b][2], b) else (b, a)
        )
        apart.append((low[outer], low[inner], PAD))
        outer, inner = (
            (a, b) if (-ends[a][1], -ends[a][2], a) < (-ends[b][1], -ends[b][2], b) else (b, a)
        )
        # A crossing box has its caption to itself, right of the other's border.
        crossing = _cross(set(grid.boxes[a].members), set(grid.boxes[b].members))
        apart.append((high[inner], high[outer], wide[outer] if crossing else PAD))
    pulls = [*grid.links, *((i, j, 0.1) for i, j in grid.flat)]
    pulls += [(i, j, 0.02) for row in rows for i, j in pairwise(row)]
    pulls += [(low[b], high[b], 0.02) for b in boxes]

    x = _separate(count + 2 * len(boxes), pulls, apart)
    energy = sum(weight * (x[i] - x[j]) ** 2 for i, j, weight in pulls)
    return x[:count], [(x[low[b]], x[high[b]]) for b in boxes], energy


def _separate(
    size: int, pulls: list[tuple[int, int, float]], apart: list[tuple[int, int, float]]
) -> list[float]:
    """The quadratic program, by ADMM (as in OSQP); then a push until all constraints hold."""
    order: nx.DiGraph[int] = nx.DiGraph()
    for i, j, distance in apart:
        known = order.get_edge_data(i, j, {"distance": 0.0})["distance"]
        order.add_edge(i, j, distance=max(distance, known))
    sequence = list(nx.topological_sort(order))

    def push(x: Points) -> Points:
        for i in sequence:
            for j, rule in order[i].items():
                x[j] = max(x[j], x[i] + rule["distance"])
        return x

    x = push(np.zeros(size))
    if not apart:
        return [float(value) for value in x]

    def differences(pairs: list[tuple[int, int, float]]) -> sparse.csr_matrix:
        ends = [(j, i) for i, j, _ in pairs]
        rows = np.repeat(np.arange(len(pairs)), 2)
        signs = np.tile([1.0, -1.0], len(pairs))
        return sparse.csr_matrix((signs, (rows, np.ravel(ends))), shape=(len(pairs), size))

    rules, bounds = differences(apart), np.array([distance for *_, distance in apart])
    springs = differences(pulls)
    stiff = springs.T @ sparse.diags([weight for *_, weight in pulls]) @ springs
    rho, sigma = 1.0, 1e-4
    solve = splu(sparse.csc_matrix(stiff + sigma * sparse.eye(size) + rho * rules.T @ rules)).solve
    z, dual = rules @ x, np.zeros(len(apart))
    for _ in range(300):
        last, x = x, solve(sigma * x + rules.T @ (rho * z - dual))
        reached = rules @ x
        if np.abs(x - last).max() < 0.02 and (bounds - reached).max() < 0.02:
            break
        z = np.maximum(reached + dual / rho, bounds)
        dual += rho * (reached - z)
    return [float(value) for value in push(x)]


def _rows(
    grid: _Grid, x: list[float], size: dict[str, tuple[float, float]]
) -> tuple[list[float], list[float], list[float]]:
    """The middle of every layer, and the top and bottom of every box."""
    sets = [set(box.members) for box in grid.boxes]
    over, under = [0.0] * len(sets), [0.0] * len(sets)
    done: list[int] = []
    for b in sorted(range(len(sets)), key=lambda b: (len(sets[b]), -b)):
        touching = [c for c in done if sets[b] & sets[c]]
        over[b] = PAD + max(
            (over[c] for c in touching if grid.reach[c][0] == grid.reach[b][0]), default=0.0
        )
        below = [under[c] for c in touching if grid.reach[c][1] == grid.reach[b][1]]
        under[b] = max(below, default=4.0) + CAPTION_HEIGHT
        done.append(b)
    count = len(grid.rows)
    head, foot, lean = [0.0] * count, [0.0] * count, [0.0] * count
    for b, (first, last) in enumerate(grid.reach):
        head[first], foot[last] = max(head[first], over[b]), max(foot[last], under[b])
    for upper, lower, _ in grid.links:
        lean[grid.row[lower]] = max(lean[grid.row[lower]], abs(x[upper] - x[lower]))
    tall = [
        max((size[grid.names[i]][1] for i in row if i < len(grid.names)), default=0.0)
        for row in grid.rows
    ]
    middle: list[float] = []
    y = 0.0
    for k in range(count):
        # Flat edges would graze the neighbours of the nodes they join.
        y += head[k] + (GAP_Y + min(60.0, 0.1 * lean[k]) if k else 0.0) + tall[k] / 2
        middle.append(y)
        y += tall[k] / 2 + foot[k]
    tops = [middle[f] - tall[f] / 2 - over[b] for b, (f, _) in enumerate(grid.reach)]
    bottoms = [middle[e] + tall[e] / 2 + under[b] for b, (_, e) in enumerate(grid.reach)]
    return middle, tops, bottoms


def _routes(
    drawing: Drawing, places: dict[str, Place], bends: dict[int, list[Point]]
) -> list[Route]:
    """Every edge straight if nothing is in its way, else the first curve that goes round."""
    index = {name: i for i, name in enumerate(places)}
    circles = [place[:4] for place in places.values()]
    for edge in drawing.edges:
        if edge.source == edge.target:
            place, room = places[edge.source], _loop_room(edge)
            circles.append((place.x + (place.width + room) / 2, place.y, room, 20.0))
    where = np.array(circles).reshape(-1, 4)
    axis = float(where[:, 0].mean()) if places else 0.0
    drawn: Counter[frozenset[str]] = Counter()

    def hits(curve: Sequence[Point], edge: Edge) -> int:
        points = _sample(curve)
        reach = where[:, 2:] / 2 + 4.0
        close = (where[:, :2] + reach > points.min(axis=0)) & (
            where[:, :2] - reach < points.max(axis=0)
        )
        close[[index[edge.source], index[edge.target]]] = False
        beside = close.all(axis=1)
        off = np.abs(points[:, None] - where[None, beside, :2]) / reach[beside]
        return int((np.hypot(off[..., 0], off[..., 1]) < 1).any(axis=0).sum())

    result = []
    for number, edge in enumerate(drawing.edges):
        source, target = places[edge.source], places[edge.target]
        start, stop = (source.x, source.y), (target.x, target.y)
        if edge.source == edge.target:
            out, up = source.x + source.width / 2 + 32.0, source.height
            result.append(
                _clip(
                    edge, (start, (out, start[1] - up), (out, start[1] + up), stop), source, target
                )
            )
            continue
        # A second edge between two nodes bends outward, a third inward, and so on.
        pair = frozenset((edge.source, edge.target))
        down = stop[1] > start[1] or (stop[1] == start[1] and stop[0] < start[0])
        outward = (-1 if down else 1) * (1 if start[0] + stop[0] >= 2 * axis - 2.0 else -1)
        turn, drawn[pair] = drawn[pair], drawn[pair] + 1
        bend = 22.0 * ((turn + 1) // 2) * (1 if turn % 2 else -1) * outward
        choices = [_bow(start, stop, bend)]
        if number in bends:
            choices.append(_through([start, *bends[number], stop]))
        elif start[1] != stop[1]:
            middle = (start[1] + stop[1]) / 2
            choices.append((start, (start[0], middle), (stop[0], middle), stop))
        sides = [side * outward * far for far in (24.0, 48.0, 72.0) for side in (1, -1)]
        choices += [_bow(start, stop, bend + aside) for aside in sides]
        counts = (hits(choice, edge) for choice in choices)
        fewest, best = len(places), choices[0]
        for choice, count in zip(choices, counts, strict=True):
            if count < fewest:
                fewest, best = count, choice
            if not count:
                break
        result.append(_clip(edge, best, source, target))
    return result


def caption_place(frame: Frame) -> Place:
    """Where the caption of a box stands."""
    width = text_width(frame.box.name, CAPTION)
    x = frame.left + 7.0 + width / 2 if frame.caption == "left" else frame.right - 7.0 - width / 2
    return Place(x, frame.bottom - 8.0, max(width, 1.0), CAPTION, square=True)


def _bow(start: Point, stop: Point, aside: float) -> tuple[Point, ...]:
    """A straight line, or one bent to its side."""
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    length = hypot(dx, dy) or 1.0
    nx, ny = -dy / length * aside * 4 / 3, dx / length * aside * 4 / 3
    return (
        start,
        (start[0] + dx / 3 + nx, start[1] + dy / 3 + ny),
        (start[0] + 2 * dx / 3 + nx, start[1] + 2 * dy / 3 + ny),
        stop,
    )


def _through(points: list[Point]) -> tuple[Point, ...]:
    """A smooth curve through points (Catmull and Rom)."""
    p = np.array([points[0], *points, points[-1]])
    slope = (p[2:] - p[:-2]) / 6
    curve: list[Point] = [points[0]]
    for k in range(len(points) - 1):
        for q in (p[k + 1] + slope[k], p[k + 2] - slope[k + 1], p[k + 2]):
            curve.append((float(q[0]), float(q[1])))
    return tuple(curve)


def _blossom(curve: Sequence[Point], k: int, ts: tuple[float, float, float]) -> Point:
    p = list(curve[3 * k : 3 * k + 4])
    for t in ts:
        p = [((1 - t) * a[0] + t * b[0], (1 - t) * a[1] + t * b[1]) for a, b in pairwise(p)]
    return p[0]


def _at(curve: Sequence[Point], t: float) -> Point:
    k = min(int(t), (len(curve) - 1) // 3 - 1)
    return _blossom(curve, k, (t - k, t - k, t - k))


def _sample(curve: Sequence[Point], count: int = 40) -> Points:
    pieces = (len(curve) - 1) // 3
    t = np.linspace(0, pieces, count)
    k = np.minimum(t.astype(int), pieces - 1)
    u, p = (t - k)[:, None], np.array(curve)
    a, b, c, d = (p[3 * k + j] for j in range(4))
    points: Points = (1 - u) ** 3 * a + 3 * (1 - u) ** 2 * u * b + 3 * (1 - u) * u**2 * c + u**3 * d
    return points


def _part(curve: Sequence[Point], start: float, stop: float) -> tuple[Point, ...]:
    """The curve between two of its parameters."""
    first, last = int(start), min(int(np.ceil(stop)), (len(curve) - 1) // 3) - 1
    points: list[Point] = [_at(curve, start)]
    for k in range(first, max(first, last) + 1):
        a, b = max(start - k, 0.0), min(stop - k, 1.0)
        points += [
            _blossom(curve, k, (a, a, b)),
            _blossom(curve, k, (a, b, b)),
            _blossom(curve, k, (b, b, b)),
        ]
    return tuple(points)


def _root(outside: Callable[[float], bool], low: float, high: float) -> float:
    """Where `outside` turns true between low (false) and high (true)."""
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if outside(middle) else (middle, high)
    return high


def _clip(edge: Edge, curve: tuple[Point, ...], source: Place, target: Place) -> Route:
    """From centre to centre becomes from border to border, with room for the arrowhead."""
    end = float((len(curve) - 1) // 3)
    steps, points = np.linspace(0, end, 60), _sample(curve, 60)
    away = steps[np.argmax(source.gauge(points) >= 1)]
    near = steps[::-1][np.argmax(target.gauge(points[::-1]) >= 1)]
    start = _root(lambda t: bool(source.gauge(_at(curve, t)) >= 1), 0.0, float(away))
    stop = _root(lambda t: bool(target.gauge(_at(curve, t)) >= 1), end, float(near))
    tip = _at(curve, stop)

    def clear(t: float) -> bool:
        return dist(_at(curve, t), tip) >= HEAD

    base = _root(clear, stop, start) if clear(start) else start
    if edge.source == edge.target:
        label = _at(curve, end / 2)
        label = (label[0] + 4.0 + text_width(edge.label, SMALL) / 2, label[1])
    else:
        # Off the middle: edges that meet in one node are further apart at their other ends.
        label = _at(curve, start + 0.4 * (stop - start))
    return Route(edge, _part(curve, start, base), tip, label)


def _corner(frame: Frame, frames: list[Frame], lines: Points) -> Literal["left", "right"]:
    """The right, unless an edge or the corner of a crossing box is there and not on the left."""

    def taken(side: Literal["left", "right"]) -> bool:
        spot = caption_place(frame._replace(caption=side))
        ends = [(o.left, o.right) for o in frames if o is not frame and o.top < spot.y < o.bottom]
        crossed = any(abs(x - spot.x) < spot.width / 2 + 2.0 for pair in ends for x in pair)
        return crossed or bool((spot.gauge(lines) < 1).any())

    return "left" if taken("right") and not taken("left") else "right"


def fit(places: dict[str, Place], routes: list[Route], frames: list[Frame]) -> Layout:
    """Move everything into the page and round, so that the same drawing gives the same bytes."""
    corners = [
        (p.x + s * p.width / 2, p.y + s * p.height / 2) for p in places.values() for s in (-1, 1)
    ]
    corners += [
        p for frame in frames for p in ((frame.left, frame.top), (frame.right, frame.bottom))
    ]
    lines = np.vstack([np.empty((0, 2)), *(_sample(route.path) for route in routes)])
    for r in routes:
        wide = text_width(r.edge.label, SMALL) / 2
        corners += (
            [(r.label[0] - wide, r.label[1]), (r.label[0] + wide, r.label[1])] if wide else []
        )
    spots = np.vstack([np.array(corners or [(0.0, 0.0)]), lines])
    (left, top), (right, bottom) = spots.min(axis=0) - MARGIN, spots.max(axis=0) + MARGIN

    frames = [frame._replace(caption=_corner(frame, frames, lines)) for frame in frames]

    def move(point: Point) -> Point:
        return (round(float(point[0] - left), 2), round(float(point[1] - top), 2))

    return Layout(
        round(float(right - left), 2),
        round(float(bottom - top), 2),
        {name: Place(*move((p.x, p.y)), p.width, p.height, p.square) for name, p in places.items()},
        tuple(Route(r.edge, tuple(map(move, r.path)), move(r.tip), move(r.label)) for r in routes),
        tuple(
            Frame(f.box, *move((f.left, f.top)), *move((f.right, f.bottom)), f.caption)
            for f in frames
        ),
    )
