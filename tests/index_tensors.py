"""Index relations as boolean tensors, by the definition of atoms, and strategies to draw them."""

import numpy as np
from hypothesis import strategies as st

from retrodict.graph.index_atoms import INF, Table, Window
from retrodict.graph.index_relations import NOTHING, Relation


def dense(terms, left, right):
    """A tensor with the left axes first, by the definition of atoms, terms and relations."""
    tensor = np.zeros((*left, *right), bool)
    for term in terms:
        part = np.ones((*left, *right), bool)
        for atom in term:
            part &= _spread(_matrix(atom, left, right), atom, len(left), tensor.ndim)
        tensor |= part
    return tensor


def _matrix(atom, left, right):
    rows = np.arange(1 if atom.left is None else left[atom.left])[:, None]
    columns = np.arange(1 if atom.right is None else right[atom.right])[None, :]
    if isinstance(atom, Window):
        return (atom.lo <= columns - rows) & (columns - rows <= atom.hi)
    entries = {*zip(*(places.tolist() for places in atom.places), strict=True)}
    return np.array([[(i, j) in entries for j in columns[0]] for i in rows[:, 0]])


def _spread(matrix, atom, number, ndim):
    """A matrix between two axes as a tensor that broadcasts along all others."""
    shape = [1] * ndim
    if atom.left is not None:
        shape[atom.left] = matrix.shape[0]
    if atom.right is not None:
        shape[number + atom.right] = matrix.shape[1]
    return matrix.reshape(shape)


def tensor(relation, left, right):
    return dense(relation.terms, left, right)


shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
small_shapes = st.lists(st.integers(1, 4), max_size=2).map(tuple)


@st.composite
def atoms(draw, left, right):
    """One atom between arrays of these shapes: a window, a table, or a limit on one axis."""
    i = draw(st.sampled_from([None, *range(len(left))]))
    j = draw(st.sampled_from([None, *range(len(right))]))
    n, m = 1 if i is None else left[i], 1 if j is None else right[j]
    kind = draw(st.sampled_from(["aligned", "window", "half window", "index", "table"]))
    if i is None and j is None:
        return Window(None, None)
    if kind == "aligned":
        return Window(i, j)
    if kind in ("index", "table"):
        if kind == "index":
            index = draw(st.lists(st.integers(-1, m - 1), min_size=n, max_size=n))
            return Table.of_index(i, j, m, np.array(index))
        entries = st.tuples(st.integers(0, n - 1), st.integers(0, m - 1))
        places = np.array(draw(st.lists(entries, max_size=8)), int).reshape(-1, 2)
        return Table.of(i, j, (n, m), (places[:, 0], places[:, 1]))
    lo, hi = sorted(draw(st.tuples(st.integers(-5, 5), st.integers(-5, 5))))
    if kind == "half window":
        return draw(st.sampled_from([Window(i, j, lo, INF), Window(i, j, -INF, hi)]))
    return Window(i, j, lo, hi)


def terms(left, right, size=3):
    return st.lists(atoms(left, right), max_size=size)


@st.composite
def relations(draw, left, right, size=3):
    """A union of random terms, and the tensor that its atoms define."""
    parts = draw(st.lists(terms(left, right, size), max_size=3))
    relation = NOTHING
    for part in parts:
        relation = relation | Relation.of(part, left, right)
    return Relation(relation.terms, dict(enumerate(left)), dict(enumerate(right))), dense(
        parts, left, right
    )
