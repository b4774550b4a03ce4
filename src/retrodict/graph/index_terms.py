"""Terms of index relations: conjunctions of atoms in canonical form, and unions of terms."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
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
    limited,
    product,
    renamed,
    simplified,
    touch,
)

# At most one atom for each pair of axes, in the order of the axes.
Term: TypeAlias = tuple[Atom, ...]


def shape_of_atom(atom: Atom, left: Sizes, right: Sizes) -> tuple[int, int]:
    """The sizes of the two axes of an atom; 1 for None."""
    return (
        1 if atom.left is None else left[atom.left],
        1 if atom.right is None else right[atom.right],
    )


def _axes(atom: Atom) -> tuple[float, ...]:
    return tuple(-INF if axis is None else axis for axis in (atom.left, atom.right))


def in_axis_order(atoms: Iterable[Atom]) -> Term:
    """A term of atoms that are in canonical form."""
    return tuple(sorted(atoms, key=_axes))


def in_order(terms: Iterable[Term]) -> list[Term]:
    """Terms in an order that does not depend on hashes."""

    def key(atom: Atom) -> tuple[Any, ...]:
        if isinstance(atom, Window):
            return _axes(atom), atom.lo, atom.hi
        return _axes(atom), INF, atom.rows, atom.columns

    return sorted(terms, key=lambda term: [key(atom) for atom in term])


def conjunction(atoms: Iterable[Atom], left: Sizes, right: Sizes) -> Term | None:
    """The conjunction of atoms in canonical form; None where no pair of elements satisfies it."""
    by_axes: dict[tuple[Axis, Axis], Atom] = {}
    for atom in atoms:
        axes = atom.left, atom.right
        by_axes[axes] = intersection(by_axes[axes], atom) if axes in by_axes else atom
    _absorb_limits(by_axes)
    result: list[Atom] = []
    for atom in by_axes.values():
        shape = shape_of_atom(atom, left, right)
        if is_empty(atom, shape):
            return None
        simple = simplified(atom, shape)
        if simple is not None:
            result.append(simple)
    if any(atom.left is None or atom.right is None for atom in result) and len(result) > 1:
        return _without_implied_limits(result, left, right)
    return in_axis_order(result)


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
    return in_axis_order(result)


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


def compose(x: Term, y: Term, left: Sizes, middle: Sizes, right: Sizes) -> Term | None:
    """The composition of two terms; None where it has no pairs."""
    atoms = [a for a in x if a.right is None] + [b for b in y if b.left not in middle]
    for axis, size in middle.items():
        into, out_of = [a for a in x if a.right == axis], [b for b in y if b.left == axis]
        if into or out_of:
            products = _eliminate(axis, size, into, out_of, left, right)
            if products is None:
                return None
            atoms += products
    return conjunction(atoms, left, right)


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


def lies_in(inner: Term, outer: Term) -> bool:
    """Whether one term implies another; False may also mean that this could not be decided."""
    return all(any(implies(x, y) for x in inner) for y in outer)


def term_hull(x: Term, y: Term, join: Callable[[Atom, Atom], Atom | None] = hull) -> Term:
    """A term that contains two: atoms of the same axes are joined, others dropped."""
    others = {(atom.left, atom.right): atom for atom in y}
    atoms = (
        atom if atom == other else join(atom, other)
        for atom in x
        if (other := others.get((atom.left, atom.right))) is not None
    )
    return tuple(atom for atom in atoms if atom is not None)


_MOST_TERMS = 16


def union_of(terms: Iterable[Term | None]) -> frozenset[Term]:
    """A union of terms: joined where the union is a term, or where there are too many."""
    unique = {term for term in terms if term is not None}
    if len(unique) > 1:
        fewer = _join(in_order(unique), _exact_union)
        if len(fewer) > _MOST_TERMS:
            fewer = _join(fewer, _loose_union)
        if len(fewer) > _MOST_TERMS:
            fewer = [reduce(term_hull, fewer)]
        unique = {*fewer}
    return frozenset(unique)


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
    if lies_in(x, y) or lies_in(y, x):
        return y if lies_in(x, y) else x
    different = [(a, b) for a, b in zip(x, y, strict=False) if a != b]
    if len(x) != len(y) or len(different) != 1:
        return None
    ((a, b),) = different
    if not (isinstance(a, Window) and isinstance(b, Window) and a[:2] == b[:2] and touch(a, b)):
        return None
    return term_hull(x, y)


def _loose_union(x: Term, y: Term) -> Term | None:
    """The hull of terms whose atoms have the same axes."""
    return term_hull(x, y) if list(map(_axes, x)) == list(map(_axes, y)) else None
