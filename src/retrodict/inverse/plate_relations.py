"""Two plated nodes in; which of their elements are neighbours, as constraints between plate axes.

A `Meet` between nodes u and v is a conjunction: each constraint says which positions along an axis
of u go with which along an axis of v; axes without a constraint are free (`all`). The empty meet
joins every element of u with every element of v, and is the only one between plateless nodes. A set
of meets is their union. The size of a plate enters only where a constant index ties two plates
together, so that turning a graph round costs the same for ten elements and for a million.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

Index: TypeAlias = tuple[int, ...]

# Stands for the missing axis in a constraint on one node alone ("only element 0 of u").
NO_AXIS = -1


class Table(NamedTuple):
    """A boolean matrix between two axes, by its nonzero places; bytes, so that it hashes."""

    shape: tuple[int, int]
    rows: bytes
    columns: bytes

    @staticmethod
    def of(matrix: csr_array) -> "Table":
        """A table from a sparse matrix."""
        places = csr_array(matrix).tocoo()
        order = np.lexsort((places.col, places.row))
        rows = places.row[order].astype(np.int64).tobytes()
        return Table(places.shape, rows, places.col[order].astype(np.int64).tobytes())

    @staticmethod
    def of_places(shape: tuple[int, int], rows: NDArray[np.integer], columns: NDArray[np.integer]) -> "Table":  # fmt: skip  # noqa: E501
        """A table from the indices of its nonzero places."""
        ones = np.ones(len(rows), bool)
        return Table.of(csr_array((ones, (rows, columns)), shape=shape))

    @property
    def matrix(self) -> csr_array:
        """The table as a sparse matrix of booleans."""
        rows, columns = np.frombuffer(self.rows, np.int64), np.frombuffer(self.columns, np.int64)
        return csr_array((np.ones(len(rows), bool), (rows, columns)), shape=self.shape)

    @property
    def transposed(self) -> "Table":
        """The same constraint seen from the other axis."""
        return Table.of(self.matrix.T)


class Same(NamedTuple):
    """Equal positions along two axes of the same size."""

    @property
    def transposed(self) -> "Same":
        """The same constraint seen from the other axis."""
        return self


SAME = Same()


class Constraint(NamedTuple):
    """Positions along axis `mine` of one node go with those along `theirs` of the other."""

    mine: int
    theirs: int
    places: Same | Table


Meet: TypeAlias = frozenset[Constraint]
Meets: TypeAlias = frozenset[Meet]

EVERYWHERE: Meets = frozenset({frozenset()})


def flip(meets: Meets) -> Meets:
    """The meets seen from the other node."""
    return frozenset(
        frozenset(Constraint(c.theirs, c.mine, c.places.transposed) for c in meet) for meet in meets
    )


def join(*parts: Iterable[Meet]) -> Meets:
    """The union; what is contained in another meet is left out, and too many are made one."""
    meets = list(frozenset().union(*parts))
    kept = [m for m in meets if not any(n != m and contains(n, m) for n in meets)]
    if len(kept) > _MOST_MEETS:
        # What all of them say is true of the union.
        kept = [frozenset.intersection(*kept)]
    return frozenset(kept)


_MOST_MEETS = 8


def contains(outer: Meet, inner: Meet) -> bool:
    """Whether every pair of elements that meets in `inner` does so in `outer`."""
    return all(any(_implies(have, want) for have in inner) for want in outer)


def _implies(have: Constraint, want: Constraint) -> bool:
    if (have.mine, have.theirs) != (want.mine, want.theirs):
        return False
    if have.places == want.places:
        return True
    if isinstance(have.places, Same) or isinstance(want.places, Same):
        return False
    beyond = have.places.matrix.astype(int) - want.places.matrix.astype(int)
    return bool((beyond > 0).nnz == 0)


def compose(first: Meets, second: Meets, sizes: Sequence[int], hidden: frozenset[int]) -> Meets:
    """Pairs of u and v that have a common neighbour s: u–s, then s–v.

    Args:
        first: meets of u with s.
        second: meets of s with v.
        sizes: of the axes of s.
        hidden: axes of s along which its elements are bound together, so that a neighbour of one is
            as good as a neighbour of all.
    """
    composed = (_composed(a, b, sizes, hidden) for a, b in itertools.product(first, second))
    return join(meet for meet in composed if meet is not None)


def _composed(a: Meet, b: Meet, sizes: Sequence[int], hidden: frozenset[int]) -> Meet | None:
    """One meet of u with v through s, or None where no element of s meets both."""
    found = {c for c in a if c.theirs == NO_AXIS} | {c for c in b if c.mine == NO_AXIS}
    for axis, size in enumerate(sizes):
        if axis in hidden:
            continue
        allowed: NDArray[np.bool_] | None = None
        for only in [c for c in a if c.theirs == axis and c.mine == NO_AXIS] + [
            Constraint(NO_AXIS, axis, c.places.transposed)
            for c in b
            if c.mine == axis and c.theirs == NO_AXIS
        ]:
            mask = np.zeros(size, bool)
            mask[_row(only.places, 0)] = True
            allowed = mask if allowed is None else allowed & mask
        lefts = [c for c in a if c.theirs == axis and c.mine != NO_AXIS]
        rights = [c for c in b if c.mine == axis and c.theirs != NO_AXIS]
        through = _restriction(allowed)
        for left, right in itertools.product(lefts, rights):
            places = _product(_product(left.places, through), right.places)
            if places is not None:
                found.add(Constraint(left.mine, right.theirs, places))
        if allowed is not None and not allowed.all():
            column = Table.of(csr_array(allowed[:, None]))
            for c in lefts:
                places = _product(c.places, column)
                if places is not None:
                    found.add(Constraint(c.mine, NO_AXIS, places))
            for c in rights:
                places = _product(column.transposed, c.places)
                if places is not None:
                    found.add(Constraint(NO_AXIS, c.theirs, places))
            if not allowed.any():
                return None
    if any(isinstance(c.places, Table) and not c.places.rows for c in found):
        return None
    return frozenset(found)


def _row(places: Same | Table, position: int) -> NDArray[np.integer]:
    if isinstance(places, Same):
        return np.array([position])
    matrix = places.matrix
    return np.asarray(matrix.indices[matrix.indptr[position] : matrix.indptr[position + 1]])


def _restriction(allowed: NDArray[np.bool_] | None) -> Same | Table:
    if allowed is None or allowed.all():
        return SAME
    hits = np.flatnonzero(allowed)
    return Table.of_places((len(allowed), len(allowed)), hits, hits)


def _product(a: Same | Table | None, b: Same | Table) -> Same | Table | None:
    """Which positions are tied by going through a common one; None where nothing is excluded."""
    if a is None or isinstance(a, Same):
        return None if a is None else b
    if isinstance(b, Same):
        return a
    return constraint_places(a.matrix.astype(int) @ b.matrix.astype(int))


def constraint_places(matrix: csr_array) -> Same | Table | None:
    """The shortest way to say it: the identity, a table, or None where nothing is excluded.

    A table is worth keeping only while it is sparse; a full constraint is a safe superset.
    """
    rows, columns = matrix.shape
    places = csr_array(matrix != 0)
    crowded = places.nnz > 10_000 and places.nnz > 16 * (rows + columns)
    if places.nnz == rows * columns or crowded:
        return None
    if rows == columns == places.nnz and np.array_equal(places.diagonal(), np.ones(rows, bool)):
        return SAME
    return Table.of(places)


def forget(meets: Meets, axes: frozenset[int]) -> Meets:
    """Drop the constraints on axes of the first node."""
    return join(frozenset(c for c in meet if c.mine not in axes) for meet in meets)


def coupled_axes(meets: Meets, ndim: int) -> frozenset[int]:
    """Axes of a node along which its own elements are neighbours of each other."""
    return frozenset(
        axis for meet in meets for axis in range(ndim) if Constraint(axis, axis, SAME) not in meet
    )


def neighbours(meets: Meets, index: Index, sizes: Sequence[int]) -> set[Index]:
    """The elements of the second node, of the given sizes, that meet one of the first."""
    found: set[Index] = set()
    for meet in meets:
        allowed = [set(range(size)) for size in sizes]
        for mine, theirs, places in meet:
            position = 0 if mine == NO_AXIS else index[mine]
            row = set(_row(places, position).tolist())
            if theirs == NO_AXIS:
                if not row:
                    break
            else:
                allowed[theirs] &= row
        else:
            found.update(itertools.product(*allowed))
    return found


def multiplicity(meets: Meets, sizes: Sequence[int]) -> float:
    """About how many elements of the second node one element of the first meets."""
    total = 0.0
    for meet in meets:
        count = 1.0
        for axis, size in enumerate(sizes):
            bound = [c.places for c in meet if c.theirs == axis and c.mine != NO_AXIS]
            if any(isinstance(places, Same) for places in bound):
                continue
            tables = [places for places in bound if isinstance(places, Table)]
            count *= min([len(t.rows) / 8 / t.shape[0] for t in tables], default=size)
        total += count
    return total
