"""A drawing (nodes, edges, boxes) goes in; where everything stands on the page comes out.

Layers from top to bottom (Sugiyama, Tagawa & Toda 1981): longest-path layers, barycentre sweeps
against crossings, then horizontal places by a small quadratic program.
"""

from __future__ import annotations

from retrodict.plotting.diagram.columns import PAD, Columns, columns
from retrodict.plotting.diagram.drawing import Drawing
from retrodict.plotting.diagram.grid import Grid
from retrodict.plotting.diagram.labels import sizes
from retrodict.plotting.diagram.order import crossings, moves, untangle
from retrodict.plotting.diagram.page import Frame, Layout, Place, fit
from retrodict.plotting.diagram.routes import routed

GAP, CAPTION_HEIGHT = 32.0, 16.0
SMALL_DRAWING = 40

Sizes = dict[str, tuple[float, float]]


def layered(drawing: Drawing) -> Layout:
    """Lay out a drawing without the help of `dot`."""
    grid, size = Grid(drawing), sizes(drawing)
    x, sides, _ = _polish(grid, untangle(grid), size)
    middle, ends = _rows(grid, x, size)
    centres = [(x[i], middle[row]) for i, row in enumerate(grid.row)]
    places = {
        node.name: Place(*centres[i], *size[node.name], node.kind == "factor")
        for i, node in enumerate(drawing.nodes)
    }
    frames = [
        Frame(box, left, top, right, bottom)
        for box, (left, right), (top, bottom) in zip(grid.boxes, sides, ends, strict=True)
    ]
    bends = {number: [centres[i] for i in chain] for number, chain in grid.chains.items()}
    return fit(places, routed(drawing, places, bends), frames)


def _polish(grid: Grid, order: list[int], size: Sizes) -> Columns:
    """Small drawings: go on as long as a single move gives fewer crossings or shorter edges."""
    best, least = columns(grid, order, size), crossings(grid, order)[0]
    better = len(order) <= SMALL_DRAWING
    while better:
        better = False
        for other in moves(grid, order):
            count = crossings(grid, other)[0]
            if count > least:
                continue
            found = columns(grid, other, size)
            if count < least or found.energy < 0.99 * best.energy:
                best, least, order, better = found, count, other, True
                break
    return best


def _rows(grid: Grid, x: list[float], size: Sizes) -> tuple[list[float], list[tuple[float, float]]]:
    """The middle of every layer, and the top and bottom of every box."""
    over, under = _borders(grid)
    count = len(grid.rows)
    head, foot, lean, tall = ([0.0] * count for _ in range(4))
    for b, (first, last) in enumerate(grid.reach):
        head[first], foot[last] = max(head[first], over[b]), max(foot[last], under[b])
    for upper, lower, _ in grid.links:
        lean[grid.row[lower]] = max(lean[grid.row[lower]], abs(x[upper] - x[lower]))
    for name, row in zip(grid.names, grid.row, strict=False):  # stand-ins have no height
        tall[row] = max(tall[row], size[name][1])
    middle: list[float] = []
    y = 0.0
    for k in range(count):
        # Flat edges would graze the neighbours of the nodes they join.
        y += head[k] + (GAP + min(60.0, 0.1 * lean[k]) if k else 0.0) + tall[k] / 2
        middle.append(y)
        y += tall[k] / 2 + foot[k]
    ends = [
        (middle[first] - tall[first] / 2 - over[b], middle[last] + tall[last] / 2 + under[b])
        for b, (first, last) in enumerate(grid.reach)
    ]
    return middle, ends


def _borders(grid: Grid) -> tuple[list[float], list[float]]:
    """How far every box reaches above its first row and below its last, round those inside it."""
    sets = [set(box.members) for box in grid.boxes]
    over, under = [0.0] * len(sets), [0.0] * len(sets)
    inner_first = sorted(range(len(sets)), key=lambda b: (len(sets[b]), -b))
    for k, b in enumerate(inner_first):
        touching = [c for c in inner_first[:k] if sets[b] & sets[c]]
        tops = [over[c] for c in touching if grid.reach[c][0] == grid.reach[b][0]]
        bottoms = [under[c] for c in touching if grid.reach[c][1] == grid.reach[b][1]]
        over[b] = max(tops, default=0.0) + PAD
        under[b] = max(bottoms, default=4.0) + CAPTION_HEIGHT
    return over, under
