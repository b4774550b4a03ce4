"""Constraints between a position along an axis of one array and one along an axis of another.

They are the atoms of the relations in `index_relations`: a `Window` of offsets, or a `Table` of
pairs. None stands for no constraint, which is always a valid superset: `product`, `hull`, `union`
and `as_table` return it where they have no rule for a kind of atom, or where it would be too large.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

INF = math.inf

# Axes of an array count from 0; the steps of the scans around it are its axes −1, −2, …. None is an
# axis with the single position 0: a constraint that has it is one on the other array alone.
Axis: TypeAlias = int | None
Sizes: TypeAlias = Mapping[int, int]
Places: TypeAlias = tuple[NDArray[np.integer], NDArray[np.integer]]


class Window(NamedTuple):
    """Positions i along the left axis and j along the right axis with lo ≤ j − i ≤ hi."""

    left: Axis
    right: Axis
    lo: float = 0
    hi: float = 0

    @property
    def transposed(self) -> "Window":
        """The same pairs with left and right exchanged."""
        return Window(self.right, self.left, -self.hi, -self.lo)

    @property
    def bounds(self) -> tuple[float, float]:
        """The range of j − i."""
        return self.lo, self.hi


@dataclass(frozen=True)
class Table:
    """The pairs of positions at the nonzero entries of a sparse matrix.

    Attributes:
        left, right: the axes of rows and columns.
        shape: their sizes.
        rows, columns: where the entries are, in row-major order: bytes of int64, so that tables
            compare and hash.
    """

    left: Axis
    right: Axis
    shape: tuple[int, int]
    rows: bytes
    columns: bytes

    @staticmethod
    def of(left: Axis, right: Axis, shape: tuple[int, int], places: Places) -> "Table":
        """A table from the places of its entries, without those outside of the shape."""
        rows, columns = (np.asarray(part, np.int64) for part in places)
        inside = (rows >= 0) & (rows < shape[0]) & (columns >= 0) & (columns < shape[1])
        if not inside.all():
            rows, columns = rows[inside], columns[inside]
        codes = rows * shape[1] + columns
        if np.any(codes[1:] <= codes[:-1]):
            codes = np.sort(codes)  # far quicker than np.unique
            rows, columns = np.divmod(codes[np.diff(codes, prepend=-1) > 0], shape[1])
        return Table(left, right, shape, rows.tobytes(), columns.tobytes())

    @staticmethod
    def of_index(left: Axis, right: Axis, size: int, index: NDArray[np.integer]) -> "Table":
        """The right position, out of `size`, for each left one; −1 where there is none."""
        return Table.of(left, right, (len(index), size), (np.arange(len(index)), index))

    @cached_property
    def places(self) -> Places:
        """Rows and columns of the entries."""
        return np.frombuffer(self.rows, np.int64), np.frombuffer(self.columns, np.int64)

    @cached_property
    def matrix(self) -> csr_array:
        """The table as a sparse matrix."""
        return csr_array((np.ones(len(self.places[0]), bool), self.places), shape=self.shape)

    @cached_property
    def transposed(self) -> "Table":
        """The same pairs with left and right exchanged."""
        return Table.of(self.right, self.left, self.shape[::-1], self.places[::-1])

    @cached_property
    def padded(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The columns of each row's entries, padded to equal length, and which are entries."""
        counts = np.diff(self.matrix.indptr)
        mask = np.arange(max(int(counts.max(initial=0)), 1)) < counts[:, None]
        columns = np.zeros(mask.shape, np.int32)
        columns[mask] = self.places[1]
        return columns, mask

    @property
    def is_function(self) -> bool:
        """Whether no row has more than one entry."""
        return bool(np.all(np.diff(self.places[0]) > 0))

    @property
    def bounds(self) -> tuple[float, float]:
        """The range of j − i."""
        offsets = self.places[1] - self.places[0]
        return float(offsets.min()), float(offsets.max())

    def where(self, kept: NDArray[np.bool_]) -> "Table":
        """The table with some of its entries."""
        rows, columns = self.places
        return replace(self, rows=rows[kept].tobytes(), columns=columns[kept].tobytes())


Atom: TypeAlias = Window | Table


def left_range(axis: int, start: int, stop: int) -> Window:
    """The constraint start ≤ i < stop on the left array alone."""
    return Window(axis, None, 1 - stop, -start)


def right_range(axis: int, start: int, stop: int) -> Window:
    """The constraint start ≤ j < stop on the right array alone."""
    return Window(None, axis, start, stop - 1)


def renamed(atom: Atom, left: Axis, right: Axis) -> Atom:
    """The same constraint on other axes."""
    if isinstance(atom, Window):
        return Window(left, right, atom.lo, atom.hi)
    return replace(atom, left=left, right=right)


def satisfied(
    atom: Atom, rows: NDArray[np.integer], columns: NDArray[np.integer]
) -> NDArray[np.bool_]:
    """Which of the pairs of positions satisfy the constraint."""
    if isinstance(atom, Window):
        return (columns - rows >= atom.lo) & (columns - rows <= atom.hi)
    codes, wide = atom.places[0] * atom.shape[1] + atom.places[1], atom.shape[1]
    return np.isin(rows * wide + columns, codes)


def mean_number(atom: Atom, size: int) -> float:
    """The approximate number of positions of a right axis for one left position."""
    if isinstance(atom, Table):
        return len(atom.places[0]) / atom.shape[0]
    lo, hi = atom.bounds
    return (min(hi, size - 1) - max(lo, 0) if atom.left is None else hi - lo) + 1


def intersection(x: Atom, y: Atom) -> Atom:
    """Both of two constraints on the same axes."""
    if isinstance(x, Window) and isinstance(y, Window):
        return Window(x.left, x.right, max(x.lo, y.lo), min(x.hi, y.hi))
    table, other = (x, y) if isinstance(x, Table) else (y, x)
    assert isinstance(table, Table)
    return table.where(satisfied(other, *table.places))


def limited(table: Table, limit: Atom) -> Table:
    """The table without the rows, or columns, that violate a constraint on them alone."""
    rows, columns = table.places
    shape = (table.shape[0], 1) if limit.right is None else (1, table.shape[1])
    if isinstance(limit, Window) and unbounded(limit, shape).bounds == (-INF, INF):
        return table
    one = np.zeros_like(rows)
    kept = satisfied(limit, rows, one) if limit.right is None else satisfied(limit, one, columns)
    return table if kept.all() else table.where(kept)


def hull(x: Atom, y: Atom) -> Atom | None:
    """The smallest window, or table where both are tables, that two constraints imply."""
    if isinstance(x, Table) and isinstance(y, Table):
        return union(x, y, x.shape)
    lo, hi = min(x.bounds[0], y.bounds[0]), max(x.bounds[1], y.bounds[1])
    return None if (lo, hi) == (-INF, INF) else Window(x.left, x.right, lo, hi)


def union(x: Atom, y: Atom, shape: tuple[int, int]) -> Atom | None:
    """Either of two constraints between axes of these sizes, or their hull where it has no form."""
    if isinstance(x, Window) and isinstance(y, Window) and touch(x, y):
        return hull(x, y)
    first, second = as_table(x, shape), as_table(y, shape)
    if first is None or second is None:
        return hull(x, y)
    rows, columns = map(np.concatenate, zip(first.places, second.places, strict=True))
    return simplified(Table.of(x.left, x.right, shape, (rows, columns)), shape)


def touch(x: Window, y: Window) -> bool:
    """Whether no offset lies between two windows."""
    return max(x.lo, y.lo) <= min(x.hi, y.hi) + 1


def implies(x: Atom, y: Atom) -> bool:
    """Whether one constraint implies another; False may also mean that it could not be decided."""
    if (x.left, x.right) == (y.left, y.right):
        if isinstance(x, Table):
            return bool(satisfied(y, *x.places).all())
        return isinstance(y, Window) and y.lo <= x.lo and x.hi <= y.hi
    limits = (x.left, None), (None, x.right)
    return isinstance(x, Table) and (y.left, y.right) in limits and limited(x, y) == x


def is_empty(atom: Atom, shape: tuple[int, int]) -> bool:
    """Whether no positions of axes of these sizes satisfy the constraint."""
    if isinstance(atom, Table):
        return not atom.rows
    return atom.lo > atom.hi or atom.lo > shape[1] - 1 or atom.hi < 1 - shape[0]


def simplified(atom: Atom, shape: tuple[int, int]) -> Atom | None:
    """A constraint between axes of these sizes in canonical form; None where it excludes nothing.

    A window of one position stays one even along an axis of size one: it says that the axes are
    aligned.
    """
    if isinstance(atom, Table):
        return _simplified_table(atom)
    if None not in (atom.left, atom.right) and atom.lo == atom.hi:
        return atom
    wide = unbounded(atom, shape)
    if wide.bounds == (-INF, INF):
        return None
    return wide if None in (atom.left, atom.right) else atom


def unbounded(window: Window, shape: tuple[int, int]) -> Window:
    """The window with infinite bounds in place of those that exclude nothing at these sizes."""
    lo = -INF if window.lo <= 1 - shape[0] else window.lo
    hi = INF if window.hi >= shape[1] - 1 else window.hi
    return Window(window.left, window.right, lo, hi)


def _simplified_table(table: Table) -> Atom | None:
    """A window where the table is one; None where it excludes nothing, or has too many entries."""
    number, (height, width) = len(table.places[0]), table.shape
    if number == height * width or is_dense(number, table.shape):
        return None
    lo, hi = table.bounds
    same_offset = lo == hi and number == min(height, width - lo) - max(0, -lo)
    one_run = 1 in table.shape and number == hi - lo + 1
    if same_offset or one_run:
        return simplified(Window(table.left, table.right, lo, hi), table.shape)
    return table


def is_dense(entries: float, shape: tuple[int, int]) -> bool:
    """Whether a table has too many entries to be stored."""
    return entries > max(10_000, 16 * sum(shape))


def as_table(atom: Atom, shape: tuple[int, int]) -> Table | None:
    """A constraint between axes of these sizes as a table; None if that were too dense."""
    if isinstance(atom, Table):
        return atom
    lo, hi = int(max(atom.lo, 1 - shape[0])), int(min(atom.hi, shape[1] - 1))
    if is_dense((hi - lo + 1) * shape[0], shape):
        return None
    rows = np.repeat(np.arange(shape[0]), hi - lo + 1)
    columns = rows + np.tile(np.arange(lo, hi + 1), shape[0])
    return Table.of(atom.left, atom.right, shape, (rows, columns))


_MOST_PRODUCTS = 20_000_000


def product(x: Atom, y: Atom, shape: tuple[int, int, int]) -> Atom | None:
    """The constraint that some position along a common axis satisfies both x and y.

    Args:
        x: from the left array to the common axis.
        y: from the common axis to the right array.
        shape: the sizes of the left axis, the common axis and the right axis.
    """
    if isinstance(x, Window) and isinstance(y, Window):
        return Window(x.left, y.right, x.lo + y.lo, x.hi + y.hi)
    if y == Window(y.left, y.right) and shape[1] == shape[2]:
        return renamed(x, x.left, y.right)
    if isinstance(x, Table) and y.right is None:
        return _rows_with_entries(limited(x, y.transposed))
    if isinstance(y, Table) and x.left is None:
        limit = _rows_with_entries(limited(y, x.transposed).transposed)
        return None if limit is None else limit.transposed
    first, second = as_table(x, shape[:2]), as_table(y, shape[1:])
    if first is None or second is None:
        return None
    pairs = np.bincount(first.places[1], minlength=shape[1]) @ np.diff(second.matrix.indptr)
    if pairs > _MOST_PRODUCTS:
        return None
    places = (first.matrix @ second.matrix).tocoo().coords
    return Table.of(x.left, y.right, (shape[0], shape[2]), places)


def _rows_with_entries(table: Table) -> Table | None:
    """The constraint on the left array alone that a table implies; None where it implies none."""
    height, _ = table.shape
    rows = np.flatnonzero(np.bincount(table.places[0], minlength=height))
    if len(rows) == height:
        return None
    return Table.of(table.left, None, (height, 1), (rows, np.zeros_like(rows)))
