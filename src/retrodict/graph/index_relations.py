"""Which elements of one array the elements of another depend on, as an algebra of index windows.

A `Relation` answers, for an array and one *source* (a sample site): the element of the array at
position (i, j, …) depends on which elements of the source? The answer is a product over the index
axes of the source, one `Link` an axis: a `Window` of source indices around the position along one
axis of the array (`Window(axis=0, lo=0, hi=0)` is the aligned plate, `lo=hi=-1` the element before,
`axis=None` a fixed range), or a `Table` that gives the source index for each position (a gather by
a constant index). A set of relations is their union.

Every operation may give a superset of the true dependence and never less: a graph with an edge too
many costs work, one with an edge too few costs correctness.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

INF = math.inf


class Step:
    """The axis of one scan while its body is being read: a token, equal only to itself."""


# An axis of an array, by number, or the step of an enclosing scan.
AxisKey: TypeAlias = int | Step


def array_axis(axis: AxisKey | None) -> int:
    """The number of an axis that must be one of an array's."""
    assert isinstance(axis, int)
    return axis


class Window(NamedTuple):
    """Source indices from position + lo to position + hi, both included."""

    axis: AxisKey | None
    lo: float
    hi: float

    @property
    def along(self) -> int:
        """The axis of an array, where there must be one."""
        return array_axis(self.axis)


class Table(NamedTuple):
    """The source index for each position along an axis; −1 where there is none."""

    axis: AxisKey
    raw: bytes  # int64; bytes, so that relations compare and hash

    @staticmethod
    def of(axis: AxisKey, index: NDArray[np.integer]) -> "Table":
        """A table from an array of indices."""
        return Table(axis, np.ascontiguousarray(index, np.int64).tobytes())

    @property
    def along(self) -> int:
        """The axis of an array, where there must be one."""
        return array_axis(self.axis)

    @property
    def indices(self) -> NDArray[np.int64]:
        """The table as an array."""
        return np.frombuffer(self.raw, np.int64)


Link: TypeAlias = Window | Table
EVERYTHING = Window(None, -INF, INF)


class Relation(NamedTuple):
    """A product of links, one for each index axis of the source.

    `present` limits it: (axis, start, stop) says that only positions start ≤ i < stop along that
    axis of the array depend on the source at all.
    """

    links: tuple[Link, ...]
    present: tuple[tuple[AxisKey, int, int], ...] = ()


Relations: TypeAlias = frozenset[Relation]


class Take(NamedTuple):
    """Where an axis of a result comes from: position i of the result is i + shift of the operand.

    With `picked`, it is picked[i] instead (−1: nowhere).
    """

    axis: AxisKey
    size: int
    shift: int = 0
    picked: NDArray[np.int64] | None = None


def identity(ndim: int) -> Relations:
    """An array's relation to itself."""
    return frozenset({Relation(tuple(Window(axis, 0, 0) for axis in range(ndim)))})


def move(
    relations: Relations, sizes: Mapping[AxisKey, int], taken: Mapping[AxisKey, Take]
) -> Relations:
    """Relations of a result whose axes are taken from an operand's.

    Args:
        relations: those of the operand.
        sizes: sizes of the operand's axes that may vanish or move.
        taken: for an axis of the operand, where it is in the result; axes in `sizes` that are not
            here vanish (the result sees all of their positions); others stay as they are.
    """
    moved = (_move(relation, sizes, taken) for relation in relations)
    return union(*({relation} for relation in moved if relation is not None))


def _move(
    relation: Relation, sizes: Mapping[AxisKey, int], taken: Mapping[AxisKey, Take]
) -> Relation | None:
    present: list[tuple[AxisKey, int, int]] = []
    ranges = {axis: (0, size) for axis, size in sizes.items()}
    for axis, start, stop in relation.present:
        if axis not in sizes:
            present.append((axis, start, stop))
            continue
        ranges[axis] = (start, stop)
        if axis in taken:
            kept = _move_range(start, stop, taken[axis])
            if kept is None:
                return None
            if kept != (0, taken[axis].size):
                present.append((taken[axis].axis, *kept))

    def moved(link: Link) -> Link:
        if link.axis is None or link.axis not in sizes:
            return link
        if link.axis in taken:
            return _follow(link, taken[link.axis])
        return _forget(link, *ranges[link.axis])

    links = tuple(map(moved, relation.links))
    return Relation(links, tuple(sorted(present, key=repr)))


def _move_range(start: int, stop: int, take: Take) -> tuple[int, int] | None:
    if take.picked is None:
        start, stop = max(start - take.shift, 0), min(stop - take.shift, take.size)
        return (start, stop) if start < stop else None
    hits = np.flatnonzero((take.picked >= start) & (take.picked < stop))
    return (int(hits[0]), int(hits[-1]) + 1) if hits.size else None


def _follow(link: Link, take: Take) -> Link:
    """The link after its axis has been taken to another place."""
    if take.picked is None:
        if isinstance(link, Window):
            return Window(take.axis, link.lo + take.shift, link.hi + take.shift)
        positions = np.arange(take.size) + take.shift
    else:
        positions = take.picked
        if isinstance(link, Window):
            if link.lo != link.hi:
                return _forget(link, int(positions.min(initial=0)), int(positions.max()) + 1)
            return Table.of(take.axis, np.where(positions >= 0, positions + int(link.lo), -1))
    table = link.indices
    inside = (positions >= 0) & (positions < table.size)
    return Table.of(take.axis, np.where(inside, table[np.where(inside, positions, 0)], -1))


def _forget(link: Link, start: int, stop: int) -> Window:
    """The link for a result that sees all positions start ≤ i < stop of the axis."""
    if isinstance(link, Window):
        return Window(None, link.lo + start, link.hi + stop - 1)
    table = link.indices[start:stop]
    table = table[table >= 0]
    return Window(None, float(table.min(initial=0)), float(table.max(initial=-1)))


def widen(relations: Relations, axis: AxisKey, size: int, *, backward: bool) -> Relations:
    """Let windows along `axis` reach to its beginning (or its end), and presence to its end.

    This bounds from above what an unbounded number of steps along the axis would give.
    """

    def wider(link: Link) -> Link:
        if link.axis != axis:
            return link
        if isinstance(link, Table):
            return EVERYTHING
        return Window(axis, link.lo, INF) if backward else Window(axis, -INF, link.hi)

    def longer(item: tuple[AxisKey, int, int]) -> tuple[AxisKey, int, int]:
        key, start, stop = item
        if key != axis:
            return item
        return (key, 0, stop) if backward else (key, start, size)

    return union(
        {Relation(tuple(map(wider, r.links)), tuple(map(longer, r.present))) for r in relations}
    )


def limit(relations: Relations, axis: AxisKey, size: int, start: int, stop: int) -> Relations:
    """Only positions start ≤ i < stop along `axis` keep the relations."""
    if (start, stop) == (0, size):
        return relations
    return frozenset(
        Relation(r.links, tuple(sorted((*r.present, (axis, start, stop)), key=repr)))
        for r in relations
    )


def clip(relations: Relations, axis: AxisKey, size: int) -> Relations:
    """Call a window along `axis` unbounded where it reaches past the axis from any position."""

    def clipped(link: Link) -> Link:
        if link.axis != axis or not isinstance(link, Window):
            return link
        lo = -INF if link.lo <= 1 - size else link.lo
        hi = INF if link.hi >= size - 1 else link.hi
        return Window(axis, lo, hi)

    return frozenset(Relation(tuple(map(clipped, r.links)), r.present) for r in relations)


_MOST = 16


def union(*parts: Iterable[Relation]) -> Relations:
    """The union, with relations joined where that loses nothing, or where there are too many."""
    relations = frozenset().union(*parts)
    if len(relations) < 2:
        return relations
    joined = _join(sorted(relations, key=repr), exact=True)
    if len(joined) > _MOST:
        joined = _join(joined, exact=False)
    return frozenset(joined)


def _join(relations: list[Relation], *, exact: bool) -> list[Relation]:
    result: list[Relation] = []
    for relation in relations:
        for number, other in enumerate(result):
            hull = _hull(other, relation)
            if hull is not None and (not exact or _is_union(hull, other, relation)):
                result[number] = hull
                break
        else:
            result.append(relation)
    return result if len(result) == len(relations) else _join(result, exact=exact)


def _hull(a: Relation, b: Relation) -> Relation | None:
    """The smallest relation above both, if their links run along the same axes."""
    links: list[Link] = []
    for x, y in zip(a.links, b.links, strict=True):
        if x == y:
            links.append(x)
        elif isinstance(x, Window) and isinstance(y, Window) and x.axis == y.axis:
            links.append(Window(x.axis, min(x.lo, y.lo), max(x.hi, y.hi)))
        else:
            return None
    spans = {axis: (start, stop) for axis, start, stop in b.present}
    present = tuple(
        (axis, min(start, spans[axis][0]), max(stop, spans[axis][1]))
        for axis, start, stop in a.present
        if axis in spans
    )
    return Relation(tuple(links), present)


def _is_union(hull: Relation, a: Relation, b: Relation) -> bool:
    """Whether the hull holds no more than the two: they differ in one place, and touch there."""
    if a in (hull, b) or b == hull:
        return True
    if a.present == b.present:
        different = [(x, y) for x, y in zip(a.links, b.links, strict=True) if x != y]
        if len(different) > 1:
            return False
        ((x, y),) = different
        assert isinstance(x, Window) and isinstance(y, Window)
        return max(x.lo, y.lo) <= min(x.hi, y.hi) + 1
    if a.links != b.links or len(a.present) != len(b.present):
        return False
    spans = [(p, q) for p, q in zip(a.present, b.present, strict=True) if p != q]
    if len(spans) > 1:
        return False
    ((p, q),) = spans
    return p[0] == q[0] and max(p[1], q[1]) <= min(p[2], q[2])


@dataclass(frozen=True)
class Dependence:
    """The relations of one array to every source it depends on."""

    sources: Mapping[Hashable, Relations]

    @staticmethod
    def nothing() -> "Dependence":
        """An array that depends on no source."""
        return Dependence({})

    def __or__(self, other: "Dependence") -> "Dependence":
        if not other.sources:
            return self
        merged = dict(self.sources)
        for source, relations in other.sources.items():
            mine = merged.get(source)
            merged[source] = (
                relations if mine is None or mine == relations else union(mine, relations)
            )
        return Dependence(merged)

    def move(self, sizes: Mapping[AxisKey, int], taken: Mapping[AxisKey, Take]) -> "Dependence":
        """See `move`."""
        moved = {s: move(relations, sizes, taken) for s, relations in self.sources.items()}
        return Dependence({source: relations for source, relations in moved.items() if relations})

    def map(self, fn: Callable[[Relations], Relations]) -> "Dependence":
        """Apply a function of relations to those of every source."""
        return Dependence({source: fn(relations) for source, relations in self.sources.items()})
