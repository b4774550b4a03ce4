"""Relations between the indices of two arrays: which elements of one go with which of the other.

A `Relation` is a union of terms, and a term is a conjunction of atoms (`index_atoms`): each a
constraint between an axis of the left array and one of the right array, or on one axis alone. Axes
without an atom are free: the term without atoms relates every element to every other.

Relations are symbolic: the sizes of the arrays matter only where a table relates two axes. Every
operation may return a superset of the true relation and never less: a superfluous edge of a graph
costs work, a missing edge costs correctness.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TypeAlias

from retrodict.graph.index_atoms import (
    INF,
    Atom,
    Axis,
    Sizes,
    Table,
    Window,
    left_range,
    mean_number,
    unbounded,
    union,
)
from retrodict.graph.index_terms import (
    Term,
    compose,
    conjunction,
    in_axis_order,
    in_order,
    lies_in,
    shape_of_atom,
    term_hull,
    union_of,
)

Index: TypeAlias = tuple[int, ...]


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
        return Relation(union_of([conjunction(atoms, left, right)]), left, right)

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
        return Relation(union_of([*self.terms, *other.terms]), left, right)

    def __le__(self, other: "Relation") -> bool:
        """Whether each term implies one of the other's: sufficient for all pairs to be in it."""
        return all(any(lies_in(inner, outer) for outer in other.terms) for inner in self.terms)

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
            compose(x, y, left, self.right, right)
            for x, y in itertools.product(self.terms, other.terms)
        )
        return Relation(union_of(terms), left, right)

    def transpose(self) -> "Relation":
        """The same pairs with left and right exchanged."""
        terms = (in_axis_order(atom.transposed for atom in term) for term in self.terms)
        return Relation(frozenset(terms), self.right, self.left)

    def restrict(self, *atoms: Atom) -> "Relation":
        """The pairs that satisfy these atoms as well."""
        terms = (conjunction((*term, *atoms), self.left, self.right) for term in self.terms)
        return replace(self, terms=union_of(terms))

    def move(
        self, left: Mapping[int, int] | None = None, right: Mapping[int, int] | None = None
    ) -> "Relation":
        """Renumber axes, old → new; an element gets the pairs of all elements along other axes."""
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
        """The same pairs, with infinite bounds in place of those that exclude nothing.

        Relations that differ in the sizes of the arrays alone become equal.
        """

        def widen(atom: Atom) -> Atom:
            if isinstance(atom, Table) or atom.lo == atom.hi:
                return atom
            return unbounded(atom, shape_of_atom(atom, self.left, self.right))

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
            return union(x, y, shape_of_atom(x, self.left, self.right))

        return reduce(partial(term_hull, join=either), in_order(self.terms)) if self.terms else ()

    @property
    def multiplicity(self) -> float:
        """The approximate number of elements of the right array for one of the left."""
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
    last = 0 if atom.right is None else sizes[atom.right] - 1
    return range(int(max(position + atom.lo, 0)), int(min(position + atom.hi, last)) + 1)
