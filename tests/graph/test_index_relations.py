"""The algebra of index relations against boolean tensors with an entry for each pair."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index_tensors import dense, relations, shapes, small_shapes, tensor, terms
from retrodict.graph.index_atoms import INF, Table, Window, left_range, right_range
from retrodict.graph.index_relations import NOTHING, Relation, coupled_axes, off_diagonal

properties = settings(max_examples=100, deadline=None, derandomize=True)


@properties
@given(st.data())
def test_a_union_of_conjunctions_is_exact(data):
    left, right = data.draw(shapes), data.draw(shapes)
    relation, truth = data.draw(relations(left, right))
    np.testing.assert_array_equal(tensor(relation, left, right), truth)


@properties
@given(st.data())
def test_at_gives_the_right_elements_of_a_left_one(data):
    left, right = data.draw(shapes), data.draw(shapes)
    relation, truth = data.draw(relations(left, right))
    for index in np.ndindex(*left):
        assert relation.at(index) == {tuple(map(int, j)) for j in np.argwhere(truth[index])}


def one_atom_an_axis(relation, side):
    """Whether no axis of one array has atoms to two axes of the other."""
    axes = [
        [getattr(atom, side) for atom in term if None not in (atom.left, atom.right)]
        for term in relation.terms
    ]
    return all(len(found) == len(set(found)) for found in axes)


@properties
@given(st.data())
def test_compose(data):
    left, middle, right = (data.draw(small_shapes) for _ in range(3))
    first, first_truth = data.draw(relations(left, middle))
    second, second_truth = data.draw(relations(middle, right))
    result = tensor(first.compose(second), left, right)
    size = len(middle)
    truth = np.tensordot(first_truth.astype(int), second_truth.astype(int), size) > 0
    assert np.all(result[truth])
    if one_atom_an_axis(first, "right") and one_atom_an_axis(second, "left"):
        np.testing.assert_array_equal(result, truth)


@properties
@given(st.data())
def test_compose_leaves_axes_outside_of_the_middle_alone(data):
    """As in the body of a scan, whose operations do not know the axis of its steps."""
    left, middle, right = (data.draw(small_shapes) for _ in range(3))
    steps = data.draw(st.integers(1, 3))
    first, first_truth = data.draw(relations(left, middle, 1))
    second, second_truth = data.draw(relations((*middle, steps), right, 1))
    size = len(middle)
    outer = second.move({**{axis: axis for axis in range(size)}, size: -1})
    result = first.compose(outer).move({**{a: a for a in range(len(left))}, -1: len(left)})
    truth = np.tensordot(first_truth.astype(int), second_truth.astype(int), size) > 0
    np.testing.assert_array_equal(tensor(result, (*left, steps), right), truth)


@properties
@given(st.data())
def test_transpose(data):
    left, right = data.draw(shapes), data.draw(shapes)
    relation, truth = data.draw(relations(left, right))
    order = [*range(len(left), truth.ndim), *range(len(left))]
    flipped = relation.transpose()
    np.testing.assert_array_equal(tensor(flipped, right, left), truth.transpose(order))
    assert flipped.transpose() == relation and hash(flipped.transpose()) == hash(relation)


@properties
@given(st.data())
def test_restrict(data):
    left, right = data.draw(shapes), data.draw(shapes)
    relation, truth = data.draw(relations(left, right))
    extra = data.draw(terms(left, right, 2))
    result = tensor(relation.restrict(*extra), left, right)
    np.testing.assert_array_equal(result, truth & dense([extra], left, right))


@properties
@given(st.data())
def test_fix_slices_the_tensor(data):
    left, right = data.draw(shapes), data.draw(shapes)
    relation, truth = data.draw(relations(left, right))
    places = [
        {
            axis: data.draw(st.integers(0, size - 1))
            for axis, size in enumerate(shape)
            if data.draw(st.booleans())
        }
        for shape in (left, right)
    ]
    fixed = relation.fix(*places)
    both = list(zip((left, right), places, strict=True))
    rest = [tuple(n for a, n in enumerate(shape) if a not in at) for shape, at in both]
    index = tuple(at.get(a, slice(None)) for shape, at in both for a in range(len(shape)))
    np.testing.assert_array_equal(tensor(fixed, *rest), truth[index])
    assert (fixed.left, fixed.right) == tuple(dict(enumerate(shape)) for shape in rest)


@properties
@given(st.data())
def test_move_permutes_axes_and_unites_along_those_left_out(data):
    left, right = data.draw(shapes), data.draw(shapes)
    relation, truth = data.draw(relations(left, right))
    kept = data.draw(st.permutations(range(len(right))))
    kept = kept[: data.draw(st.integers(0, len(kept)))]
    moved = relation.move(right={old: new for new, old in enumerate(kept)})
    gone = tuple(len(left) + axis for axis in range(len(right)) if axis not in kept)
    summed = truth.any(axis=gone, keepdims=True) if gone else truth
    order = [*range(len(left)), *(len(left) + axis for axis in kept), *gone]
    shape = (*left, *(right[axis] for axis in kept))
    expected = summed.transpose(order).reshape(shape)
    result = tensor(moved, left, shape[len(left) :])
    assert np.all(result[expected])
    if one_atom_an_axis(relation, "right"):
        np.testing.assert_array_equal(result, expected)


@properties
@given(st.data())
def test_containment_and_union(data):
    left, right = data.draw(shapes), data.draw(shapes)
    first, first_truth = data.draw(relations(left, right))
    second, second_truth = data.draw(relations(left, right))
    either = first | second
    np.testing.assert_array_equal(tensor(either, left, right), first_truth | second_truth)
    assert first <= first and first >= NOTHING
    if first <= second:
        assert np.all(second_truth[first_truth])
    if first_truth.any() and not second_truth.any():
        assert not first <= second
    narrower = first.restrict(*data.draw(terms(left, right, 1)))
    hull = tensor(Relation(frozenset([first.hull])), left, right) if first else first_truth
    assert np.all(hull[first_truth])
    assert np.all(first_truth[tensor(narrower, left, right)])


@properties
@given(st.data())
def test_what_is_said_of_two_axes(data):
    left, right = data.draw(shapes.filter(bool)), data.draw(shapes.filter(bool))
    relation, truth = data.draw(relations(left, right))
    i, j = data.draw(st.integers(0, len(left) - 1)), data.draw(st.integers(0, len(right) - 1))
    lo, hi = relation.window(i, j)
    pairs = np.argwhere(truth)
    offsets = pairs[:, len(left) + j] - pairs[:, i]
    assert np.all((offsets >= lo) & (offsets <= hi))
    if relation.aligned(i, j):
        assert np.all(offsets == 0)


@properties
@given(st.data())
def test_an_array_with_itself(data):
    shape = data.draw(shapes)
    relation, truth = data.draw(relations(shape, shape))
    diagonal = tensor(Relation.identity(shape), shape, shape)
    rest = off_diagonal(relation)
    assert np.all(tensor(rest, shape, shape)[truth & ~diagonal])
    assert rest <= relation
    pairs = np.argwhere(truth)
    for axis in set(range(len(shape))) - coupled_axes(relation):
        assert np.all(pairs[:, axis] == pairs[:, len(shape) + axis])


# Costs and forms that are promised


@pytest.mark.parametrize("size", [10, 100_000])
def test_windows_say_the_same_of_any_size(size):
    lag = Relation.of([Window(0, 0, -1, -1)], (size,), (size,))
    assert lag == Relation.of([Window(0, 0, -1, -1)], (4,), (4,))
    assert lag.compose(lag) == Relation.of([Window(0, 0, -2, -2)], (4,), (4,))
    before = Relation.of([Window(0, 0, -INF, -1)], (size,), (size,))
    assert before.compose(before) == Relation.of([Window(0, 0, -INF, -2)], (4,), (4,))
    assert lag.transpose().compose(lag).terms == {(Window(0, None, 2 - size, INF), Window(0, 0))}


def test_a_table_that_is_a_window_becomes_one():
    size = 6
    index = np.arange(size)
    groups = np.array([0, 0, 1, 1, 2, 2])

    def relation(atom, right=size):
        return Relation.of([atom], (size,), (right,))

    assert relation(Table.of_index(0, 0, size, index)) == relation(Window(0, 0))
    assert relation(Table.of_index(0, 0, size, index - 1)) == relation(Window(0, 0, -1, -1))
    grouped = relation(Table.of_index(0, 0, 3, groups), 3)
    assert grouped.transpose().compose(grouped) == Relation.identity((3,))
    assert grouped.at((4,)) == {(2,)} and grouped.transpose().at((1,)) == {(2,), (3,)}


def test_a_table_without_bounds_on_its_entries_is_given_up():
    """Each of 100 000 elements with all others of its ten groups: 10¹⁰ pairs, or no constraint."""
    size = 100_000
    grouped = Relation.of([Table.of_index(0, 0, 10, np.arange(size) % 10)], (size,), (10,))
    assert grouped.compose(grouped.transpose()).terms == {()}


def test_limits_that_windows_imply_are_dropped():
    def relation(*atoms):
        return Relation.of(atoms, (5,), (5,))

    assert relation(Window(0, 0, -1, -1), left_range(0, 1, 5)) == relation(Window(0, 0, -1, -1))
    assert relation(Window(0, 0, 1, 2), right_range(0, 1, 5)) == relation(Window(0, 0, 1, 2))
    assert not relation(Window(0, 0, -1, -1), left_range(0, 0, 1))
    assert not relation(Window(0, 0, 5, 5))
    assert relation(left_range(0, 0, 5)) == relation()
    # Of two limits that imply each other, one stays.
    both = Window(0, 0), left_range(0, 2, 4), right_range(0, 2, 4)
    assert relation(*both) == relation(*both[:2])
    np.testing.assert_array_equal(tensor(relation(*both), (5,), (5,)), dense([both], (5,), (5,)))


def test_union_joins_only_what_touches():
    def window(lo, hi):
        return Relation.of([Window(0, 0, lo, hi)], (200,), (200,))

    assert window(-1, -1) | window(-2, -2) == window(-2, -1)
    apart = window(-1, -1) | window(-3, -3)
    assert apart.terms == window(-1, -1).terms | window(-3, -3).terms
    assert window(-1, -1) | window(-3, 2) == window(-3, 2)
    apart = frozenset().union(*(window(3 * n, 3 * n).terms for n in range(40)))
    assert Relation(apart, {0: 200}, {0: 200}).restrict() == window(0, 117)


def test_multiplicity_counts_right_elements():
    def multiplicity(atoms, right=(6, 7)):
        return Relation.of(atoms, (6,), right).multiplicity

    assert multiplicity([]) == 42
    assert multiplicity([Window(0, 0)]) == 7
    assert multiplicity([Window(0, 0, -1, 1), right_range(1, 2, 4)]) == 6
    assert multiplicity([Table.of_index(0, 0, 6, np.arange(6) // 2)]) == 7
