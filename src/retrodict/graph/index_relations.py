"""Relations between the indices of two arrays: which elements of one go with which of the other.

A `Relation` is a union of terms, and a term is a conjunction of atoms (`index_atoms`): each a
constraint between an axis of the left array and one of the right array, or on one axis alone. Axes
without an atom are free: the term without atoms relates every element to every other.

Relations are symbolic: the sizes of the arrays matter only where a table ties two axes together.
Every operation may give a superset of the true relation and never less: a graph with an edge too
many costs work, one with an edge too few costs correctness.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, TypeAlias

from retrodict.graph.index_atoms import (
    INF,
    Atom,
    Axis,
    Sizes,
    Table,
    Window,
    as_table,
    hull,
    implies,
    intersection,
    is_empty,
    left_range,
    limited,
    mean_number,
    product,
    renamed,
    simplified,
    touch,
    unbounded,
    union,
)

Index: TypeAlias = tuple[int, ...]
# At most one atom for each pair of axes, in the order of the axes.
Term: TypeAlias = tuple[Atom, ...]


@dataclass(frozen=True)
class Relation:
    """A union of terms. Relations of arrays of different sizes are equal if their terms are.

    Attributes:
        terms: each a conjunction of atoms.
        left, right: the sizes of the axes of the two arrays.
    """

    terms: frozenset[Term]
    left: Sizes = field(compare=False, repr=False, default_factory=dict)
    right: Sizes = field(compare=False, repr=False, default_factory=dict)

    @staticmethod
    def of(
        atoms: Iterable[Atom], left: Sequence[int] | Sizes, right: Sequence[int] | Sizes
    ) -> "Relation":
        """The pairs that satisfy all atoms, of arrays of these shapes, or sizes by axis."""
        left, right = (s if isinstance(s, Mapping) else dict(enumerate(s)) for s in (left, right))
        return _union([_term(atoms, left, right)], left, right)

    @staticmethod
    def identity(shape: Sequence[int]) -> "Relation":
        """Each element of an array with itself."""
        return Relation.of([Window(axis, axis) for axis in range(len(shape))], shape, shape)

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __or__(self, other: "Relation") -> "Relation":
        """The union."""
        if self.terms == other.terms:
            return self
        left, right = {**self.left, **other.left}, {**self.right, **other.right}
        return _union([*self.terms, *other.terms], left, right)

    def __le__(self, other: "Relation") -> bool:
        """Whether each term is found to lie in one of the other's, so that all pairs do."""
        return all(any(_lies_in(inner, outer) for outer in other.terms) for inner in self.terms)

    def compose(self, other: "Relation") -> "Relation":
        """The pairs (a, c) for which some b has (a, b) in this relation and (b, c) in the other.

        Left axes of the other that are not right axes of this one stay left axes of the result. The
        result is exact if each right axis of this has at most one atom to either side, limits on
        that axis alone aside.
        """
        outer = {axis: size for axis, size in other.left.items() if axis not in self.right}
        left, right = {**self.left, **outer}, other.right
        if self.terms == other.terms == _ALL_PAIRS:
            return Relation(_ALL_PAIRS, left, right)
        terms = (
            _compose(x, y, left, self.right, right)
            for x, y in itertools.product(self.terms, other.terms)
        )
        return _union(terms, left, right)

    def transpose(self) -> "Relation":
        """The same pairs with left and right exchanged."""
        terms = (_sorted(atom.transposed for atom in term) for term in self.terms)
        return Relation(frozenset(terms), self.right, self.left)

    def restrict(self, *atoms: Atom) -> "Relation":
        """The pairs that satisfy these atoms as well."""
        terms = (_term((*term, *atoms), self.left, self.right) for term in self.terms)
        return _union(terms, self.left, self.right)

    def move(
        self, left: Mapping[int, int] | None = None, right: Mapping[int, int] | None = None
    ) -> "Relation":
        """Number axes anew, old → new; an element gets the pairs of all along axes not named."""
        result = self
        if left is not None and left != {axis: axis for axis in self.left}:
            sizes = {new: self.left[old] for old, new in left.items()}
            atoms = [Window(new, old) for old, new in left.items()]
            result = Relation.of(atoms, sizes, self.left).compose(self)
        return result if right is None else result.transpose().move(right).transpose()

    def free(self, left: Collection[int] = (), right: Collection[int] = ()) -> "Relation":
        """Give each element the pairs of all elements along some axes."""
        if not left and not right:
            return self
        rest = [
            {axis: axis for axis in sizes if axis not in axes}
            for sizes, axes in ((self.left, left), (self.right, right))
        ]
        return replace(self.move(*rest), left=self.left, right=self.right)

    def fix(
        self, left: Mapping[int, int] | None = None, right: Mapping[int, int] | None = None
    ) -> "Relation":
        """Slice the arrays at positions along some axes, which vanish; the others move up."""
        result = self
        if left:
            rest = [axis for axis in self.left if axis not in left]
            result = self.restrict(*(left_range(axis, i, i + 1) for axis, i in left.items()))
            result = result.move({old: new for new, old in enumerate(rest)})
        return result.transpose().fix(right).transpose() if right else result

    def unbounded(self) -> "Relation":
        """The same pairs, with bounds of windows that exclude nothing made infinite.

        Relations that differ in the sizes of the arrays alone become equal.
        """

        def widen(atom: Atom) -> Atom:
            if isinstance(atom, Table) or atom.lo == atom.hi:
                return atom
            return unbounded(atom, (_size(self.left, atom.left), _size(self.right, atom.right)))

        terms = frozenset(tuple(map(widen, term)) for term in self.terms)
        return replace(self, terms=terms)

    def at(self, index: Index) -> set[Index]:
        """The indices of the right array that go with one index of the left."""
        indices: set[Index] = set()
        for term in self.terms:
            positions: dict[Axis, Iterable[int]] = {a: range(n) for a, n in self.right.items()}
            positions[None] = (0,)
            for atom in term:
                row = _row(atom, 0 if atom.left is None else index[atom.left], self.right)
                positions[atom.right] = [j for j in row if j in positions[atom.right]]
            if positions.pop(None):
                indices.update(itertools.product(*positions.values()))
        return indices

    def aligned(self, left: int, right: int) -> bool:
        """Whether elements go together only if they have equal positions along two axes."""
        return all(Window(left, right) in term for term in self.terms)

    def window(self, left: int, right: int) -> tuple[float, float]:
        """The range of j − i for positions i and j along two axes."""
        axes = left, right
        return next((a.bounds for a in self.hull if (a.left, a.right) == axes), (-INF, INF))

    @property
    def hull(self) -> Term:
        """One term that contains all terms: for each pair of axes, the union of their atoms."""

        def either(x: Atom, y: Atom) -> Atom | None:
            return union(x, y, (_size(self.left, x.left), _size(self.right, x.right)))

        return reduce(partial(_hull, join=either), _in_order(self.terms)) if self.terms else ()

    @property
    def multiplicity(self) -> float:
        """About how many elements of the right array go with one of the left."""
        total = 0.0
        for term in self.terms:
            total += math.prod(
                min([size, *(mean_number(atom, size) for atom in term if atom.right == axis)])
                for axis, size in self.right.items()
            )
        return total


NOTHING = Relation(frozenset())
_ALL_PAIRS: frozenset[Term] = frozenset({()})


def coupled_axes(relation: Relation) -> frozenset[int]:
    """The axes along which an array's relation with itself goes beyond equal positions."""
    return frozenset(axis for axis in relation.left if not relation.aligned(axis, axis))


def off_diagonal(relation: Relation) -> Relation:
    """An array's relation with itself without the terms that pair elements only with themselves."""
    diagonal = {Window(axis, axis) for axis in relation.left}
    return replace(relation, terms=frozenset(t for t in relation.terms if not diagonal <= {*t}))


def _row(atom: Atom, position: int, sizes: Sizes) -> Iterable[int]:
    """The right positions that go with one left position."""
    if isinstance(atom, Table):
        start, stop = atom.matrix.indptr[position : position + 2]
        return map(int, atom.places[1][start:stop])
    last = _size(sizes, atom.right) - 1
    return range(int(max(position + atom.lo, 0)), int(min(position + atom.hi, last)) + 1)


# Terms: conjunctions of atoms in canonical form.


def _size(sizes: Sizes, axis: Axis) -> int:
    return 1 if axis is None else sizes[axis]


def _axes(atom: Atom) -> tuple[float, ...]:
    return tuple(-INF if axis is None else axis for axis in (atom.left, atom.right))


def _sorted(atoms: Iterable[Atom]) -> Term:
    return tuple(sorted(atoms, key=_axes))


def _in_order(terms: Iterable[Term]) -> list[Term]:
    """Terms in an order that does not depend on hashes."""

    def key(atom: Atom) -> tuple[Any, ...]:
        if isinstance(atom, Window):
            return _axes(atom), atom.lo, atom.hi
        return _axes(atom), INF, atom.rows, atom.columns

    return sorted(terms, key=lambda term: [key(atom) for atom in term])


def _term(atoms: Iterable[Atom], left: Sizes, right: Sizes) -> Term | None:
    """The conjunction of atoms in canonical form; None where no pair of elements satisfies it."""
    by_axes: dict[tuple[Axis, Axis], Atom] = {}
    for atom in atoms:
        axes = atom.left, atom.right
        by_axes[axes] = intersection(by_axes[axes], atom) if axes in by_axes else atom
    _absorb_limits(by_axes)
    result: list[Atom] = []
    for atom in by_axes.values():
        shape = _size(left, atom.left), _size(right, atom.right)
        if is_empty(atom, shape):
            return None
        simple = simplified(atom, shape)
        if simple is not None:
            result.append(simple)
    if any(atom.left is None or atom.right is None for atom in result) and len(result) > 1:
        return _without_implied_limits(result, left, right)
    return _sorted(result)


def _absorb_limits(atoms: dict[tuple[Axis, Axis], Atom]) -> None:
    """Put limits on an axis of a table into the table."""
    limits = set()
    for (left, right), atom in atoms.items():
        if isinstance(atom, Table) and left is not None and right is not None:
            for limit in {(left, None), (None, right)} & atoms.keys():
                atom = limited(atom, atoms[limit])
                limits.add(limit)
            atoms[left, right] = atom
    for limit in limits:
        del atoms[limit]


def _without_implied_limits(atoms: Sequence[Atom], left: Sizes, right: Sizes) -> Term | None:
    """Drop limits that other atoms and the sizes imply; None where they contradict each other."""
    windows = [atom for atom in atoms if isinstance(atom, Window)]
    result: list[Atom] = []
    for atom in atoms:
        limit: Atom | None = atom
        if atom in windows and atom.right is None:
            limit = _reduced(atom, windows, right, final=False)
        elif atom in windows and atom.left is None:
            limit = _reduced(atom.transposed, [w.transposed for w in windows], left, final=True)
            limit = limit and limit.transposed
        if limit is None:
            return None
        if limit.bounds != (-INF, INF):
            result.append(limit)
    return _sorted(result)


def _reduced(limit: Atom, windows: Sequence[Window], sizes: Sizes, final: bool) -> Window | None:
    """A limit on a left axis without the bounds that follow from windows and from the sizes.

    Limits on right axes may stand in for the sizes only if they are `final`: two limits that imply
    each other must not both be dropped. None where there is a contradiction.
    """
    limits = {window.right: window.bounds for window in windows if window.left is None}
    lo, hi = limit.bounds
    for window in windows:
        if window.left == limit.left and window.right is not None:
            last = sizes[window.right] - 1
            first, end = limits.get(window.right, (0, last))
            first, end = max(first, 0), min(end, last)
            if max(limit.bounds[0], window.lo - end) > min(limit.bounds[1], window.hi - first):
                return None
            lo = -INF if limit.bounds[0] <= window.lo - (end if final else last) else lo
            hi = INF if limit.bounds[1] >= window.hi - (first if final else 0) else hi
    return Window(limit.left, None, lo, hi)


def _compose(x: Term, y: Term, left: Sizes, middle: Sizes, right: Sizes) -> Term | None:
    """The composition of two terms; None where it has no pairs."""
    atoms = [a for a in x if a.right is None] + [b for b in y if b.left not in middle]
    for axis, size in middle.items():
        into, out_of = [a for a in x if a.right == axis], [b for b in y if b.left == axis]
        if into or out_of:
            products = _eliminate(axis, size, into, out_of, left, right)
            if products is None:
                return None
            atoms += products
    return _term(atoms, left, right)


def _eliminate(
    axis: int, size: int, into: Sequence[Atom], out_of: Sequence[Atom], left: Sizes, right: Sizes
) -> list[Atom] | None:
    """Atoms that say that some position along an axis of the middle array satisfies all of these.

    Pairs of atoms are enough: windows are intervals of positions along the axis, and intervals that
    meet in pairs meet in one point (Helly).
    """
    outer = into[0].left if len(into) == 1 else None
    if outer is not None and into[0] == Window(outer, axis) and left[outer] == size:
        return [renamed(atom, outer, atom.right) for atom in out_of]
    within: Atom = Window(None, axis, 0, size - 1)
    limits = [a for a in into if a.left is None] + [b.transposed for b in out_of if b.right is None]
    within = reduce(intersection, limits, within)
    if is_empty(within, (1, size)):
        return None
    starts = [(within, 1)] + [
        (_limited(atom, within, (left[atom.left], size)), left[atom.left])
        for atom in into
        if atom.left is not None
    ]
    ends = [(within.transposed, 1)] + [
        (_limited(atom, within.transposed, (size, right[atom.right])), right[atom.right])
        for atom in out_of
        if atom.right is not None
    ]
    pairs = list(itertools.product(starts, ends))[1:]
    products = (product(x, y, (n, size, m)) for (x, n), (y, m) in pairs)
    return [atom for atom in products if atom is not None]


def _limited(atom: Atom, within: Atom, shape: tuple[int, int]) -> Atom:
    """An atom within a limit on one of its axes, unless products with the limit say as much."""
    table = atom if isinstance(within, Window) else as_table(atom, shape)
    return limited(table, within) if isinstance(table, Table) else atom


# Unions of terms.


def _lies_in(inner: Term, outer: Term) -> bool:
    return all(any(implies(x, y) for x in inner) for y in outer)


def _hull(x: Term, y: Term, join: Callable[[Atom, Atom], Atom | None] = hull) -> Term:
    """A term that contains two: atoms of the same axes are joined, others dropped."""
    others = {(atom.left, atom.right): atom for atom in y}
    atoms = (
        atom if atom == other else join(atom, other)
        for atom in x
        if (other := others.get((atom.left, atom.right))) is not None
    )
    return tuple(atom for atom in atoms if atom is not None)


_MOST_TERMS = 16


def _union(terms: Iterable[Term | None], left: Sizes, right: Sizes) -> Relation:
    """The union of terms: joined where that loses nothing, or where there are too many."""
    unique = {term for term in terms if term is not None}
    if len(unique) > 1:
        fewer = _join(_in_order(unique), _exact_union)
        if len(fewer) > _MOST_TERMS:
            fewer = _join(fewer, _loose_union)
        if len(fewer) > _MOST_TERMS:
            fewer = [reduce(_hull, fewer)]
        unique = {*fewer}
    return Relation(frozenset(unique), left, right)


def _join(terms: list[Term], union: Callable[[Term, Term], Term | None]) -> list[Term]:
    result: list[Term] = []
    for term in terms:
        for number, other in enumerate(result):
            both = union(other, term)
            if both is not None:
                result[number] = both
                break
        else:
            result.append(term)
    return result if len(result) == len(terms) else _join(result, union)


def _exact_union(x: Term, y: Term) -> Term | None:
    """The union where it is a term: one holds the other, or they differ in windows that touch."""
    if _lies_in(x, y) or _lies_in(y, x):
        return y if _lies_in(x, y) else x
    different = [(a, b) for a, b in zip(x, y, strict=False) if a != b]
    if len(x) != len(y) or len(different) != 1:
        return None
    ((a, b),) = different
    if not (isinstance(a, Window) and isinstance(b, Window) and a[:2] == b[:2] and touch(a, b)):
        return None
    return _hull(x, y)


def _loose_union(x: Term, y: Term) -> Term | None:
    """The hull of terms whose atoms have the same axes."""
    return _hull(x, y) if list(map(_axes, x)) == list(map(_axes, y)) else None
