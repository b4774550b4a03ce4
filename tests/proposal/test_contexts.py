"""What one copy of a factor sees, element by element, against the inverse written out."""

import itertools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.contrib.control_flow import scan

import retrodict as rd
from index_tensors import dense, relations, small_shapes
from retrodict.estimators.conditional import Series, Set, Value
from retrodict.estimators.encoders import Elements
from retrodict.proposal.context_views import InputName, is_position, select
from retrodict.proposal.contexts import context_tree
from retrodict.proposal.copies import Copies
from retrodict.proposal.scope import Scope
from zoo import CASES

GROUP = np.array([0, 0, 1, 2, 2])


def pooled():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("n", 4):
        x = numpyro.sample("x", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(x, 1))


def grouped():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(mu, 1))
    with numpyro.plate("n", 5):
        numpyro.sample("y", dist.Normal(a[GROUP], 1))


def grouped_twice():
    """Two sites of one plate, whose elements belong to the groups in different ways."""
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("n", 5):
        numpyro.sample("y", dist.Normal(a[GROUP], 1))
        numpyro.sample("z", dist.Normal(a[np.array([0, 1, 1, 2, 2])], 1))


def neighbours():
    with numpyro.plate("n", 5):
        x = numpyro.sample("x", dist.Normal(0, 1))
    with numpyro.plate("between", 4):
        z = numpyro.sample("z", dist.Normal(x[1:] - x[:-1], 1))
        numpyro.sample("y", dist.Normal(z, 1))


def ring():
    with numpyro.plate("n", 5):
        x = numpyro.sample("x", dist.Normal(0, 1))
        z = numpyro.sample("z", dist.Normal(x + jnp.roll(x, 1), 1))
        numpyro.sample("y", dist.Normal(z, 1))


def shifted():
    with numpyro.plate("n", 4):
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(jnp.concatenate([jnp.zeros(1), x[:-1]]), 1))


def one_element():
    with numpyro.plate("n", 1):
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(x, 1))


def walk(steps=12):
    """Longer than the part of it that is written out to find the factors."""

    def step(x, _):
        x = numpyro.sample("x", dist.Normal(x, 1))
        numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    scan(step, 0.0, None, length=steps)


def walk_observed_in_a_plate(steps=12):
    def step(x, _):
        x = numpyro.sample("x", dist.Normal(x, 1))
        return x, x

    _, xs = scan(step, 0.0, None, length=steps)
    with numpyro.plate("steps", steps):
        numpyro.sample("y", dist.Normal(xs, 1))


def running_sum(steps=12):
    def step(total, _):
        total = total + numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(total, 1))
        return total, None

    scan(step, 0.0, None, length=steps)


def plate_of_walks(steps=12):
    def step(x, _):
        with numpyro.plate("k", 3):
            x = numpyro.sample("x", dist.Normal(x, 1))
            with numpyro.plate("r", 2, dim=-2):
                numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    scan(step, jnp.zeros(3), None, length=steps)


def noise_in_a_plate_along_time(steps=12):
    """Latents outside of a scan, one for each of its steps."""
    with numpyro.plate("steps", steps):
        z = numpyro.sample("z", dist.Normal(0, 1))

    def step(x, z_t):
        x = numpyro.sample("x", dist.Normal(x + z_t, 1))
        numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    scan(step, 0.0, z, length=steps)


def numbered(graph):
    """Values of all sites and carries, each element a number of its own, and whose number it is."""
    values, variables, start = {}, {}, 1
    for name, site in graph.sites.items():
        numbers = np.arange(start, start + np.prod(site.shape, dtype=int)).reshape(site.shape)
        for place in np.ndindex(*site.shape):
            index = tuple(place[axis] for axis in site.axes)
            variables[int(numbers[place])] = site.variable(index)
        values[name] = jnp.asarray(numbers, float)
        start += numbers.size
    carries = {
        carry.key: jnp.zeros((graph.scan_lengths[carry.key.scan], *carry.shape))
        for carry in graph.carries
    }
    return Scope(values, {}, carries), variables


def visible(context, mask=True):
    """The numbers in a context, without what masks hide."""
    if isinstance(context, Elements):
        return visible(context.values, _with(context.mask, mask))
    if isinstance(context, dict):
        return [number for inner in context.values() for number in visible(inner, mask)]
    array = np.asarray(context)
    mask = np.reshape(mask, np.shape(mask) + (1,) * (array.ndim - np.ndim(mask)))
    return [int(number) for number in array[np.broadcast_to(mask, array.shape)] if number]


def _with(inner, outer):
    if inner is None:
        return outer
    return inner & np.reshape(outer, np.shape(outer) + (1,) * (np.ndim(inner) - np.ndim(outer)))


def contexts(graph, inverse):
    """(latent variables, variables seen) of each copy of each factor, in the order drawn."""
    scope, variables = numbered(graph)
    for factor in inverse.factors:
        if factor.from_prior:
            continue
        copies, tree = Copies.of(graph, factor), context_tree(graph, factor, {})
        for index in itertools.product(*map(range, copies.sizes)):
            place = tuple(jnp.asarray(i) for i in index)
            latents = visible(copies.one(scope.values, place))
            seen = visible(tree.read(scope, place))
            assert len(seen) == len(set(seen)), "an element is seen twice"
            yield factor, {variables[n] for n in latents}, {variables[n] for n in seen}


def is_earlier(graph, factor, name, latents):
    """Whether a variable belongs to a step of the factor's scan that the carry tells of."""
    scan_of = graph.sites[factor.latents[0]].scan
    if not factor.time or factor.backward != graph.reversed_scans[scan_of]:
        return False
    step_of = {
        site.variable(index): index[0]
        for site in graph.sites.values()
        if site.scan == scan_of
        for index in site.indices()
    }
    if name not in step_of:
        return False
    steps = [step_of[latent] for latent in latents]
    step = step_of[name]
    return step > max(steps) if graph.reversed_scans[scan_of] else step < min(steps)


def check(graph, inverse, *, exact):
    """Contexts hold all parents, and nothing that is not known yet; if exact, only parents."""
    network, order = inverse.unroll(), list(inverse.order)
    observed = {n for n, node in network.nodes(data=True) if node["observed"]}
    place = {name: number for number, name in enumerate(order)}
    for factor, latents, seen in contexts(graph, inverse):
        parents = set().union(*(network.predecessors(name) for name in latents)) - latents
        parents = {n for n in parents if not is_earlier(graph, factor, n, latents)}
        first = min(place[name] for name in latents)
        known = observed | set(order[:first])
        if not factor.time:
            # Copies are drawn side by side, and none may see another.
            sites = [graph.sites[name] for name in factor.latents]
            known -= {site.variable(index) for site in sites for index in site.indices()}
        assert seen <= known, "a latent is seen before it is drawn"
        assert parents <= seen, "a parent is not seen"
        if exact:
            assert seen == parents


# name: (model, observed, methods for which contexts are exactly the parents)
MODELS = {
    "aligned and a set": (pooled, ["y"], "blanket faithful filter"),
    "a table": (grouped, ["y"], "blanket faithful filter"),
    "two tables": (grouped_twice, ["y", "z"], "blanket faithful filter"),
    "neighbours": (neighbours, ["y"], "blanket faithful filter"),
    "ring": (ring, ["y"], "blanket faithful filter"),
    "shifted": (shifted, ["y"], "blanket faithful filter"),
    "a plate of one": (one_element, ["y"], "blanket faithful filter"),
    "a series": (walk, ["y"], "blanket faithful filter"),
    "a series in a plate": (walk_observed_in_a_plate, ["y"], "faithful filter"),
    "a running sum": (running_sum, ["y"], "blanket faithful filter"),
    "a plate of series": (plate_of_walks, ["y"], "blanket faithful filter"),
    "a plate along time": (noise_in_a_plate_along_time, ["y"], "blanket"),
}


@pytest.mark.parametrize("method", ["blanket", "faithful", "filter"])
@pytest.mark.parametrize(("model", "observed", "exact"), MODELS.values(), ids=MODELS)
def test_a_copy_sees_its_parents(model, observed, exact, method):
    graph = rd.trace(model, observed)
    check(graph.lifted, rd.invert(graph, method).lifted, exact=method in exact)


@pytest.mark.parametrize("method", ["blanket", "faithful", "filter"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_copies_of_every_model_see_at_least_their_parents(case, method):
    graph = rd.trace(case.model, case.observed, model_kwargs=case.kwargs)
    check(graph.lifted, rd.invert(graph, method).lifted, exact=False)


def shape_of(spec):
    """An input as nested tuples: names of values, and (kind, name, elements) of groups."""
    if isinstance(spec, Value):
        return spec.name
    return (type(spec), spec.name, tuple(map(shape_of, spec.elements)))


def site(name, detail=""):
    return InputName("site", name, detail)


def inputs(model, observed, method="faithful"):
    graph = rd.trace(model, observed)
    return [
        tuple(map(shape_of, context_tree(graph, factor, {}).inputs))
        for factor in rd.invert(graph, method).factors
    ]


def test_plates_are_sets_and_tables_are_sets_of_members():
    whole = (Set, InputName("plate", "n"), (site("y"),))
    assert inputs(pooled, ["y"]) == [(whole,), (site("mu"), site("y"))]
    members = (Set, InputName("members", "n"), (site("y"),))
    by_group = (Set, InputName("group", "n", "groups"), (site("y"),))
    groups = (Set, InputName("plate", "groups"), (by_group,))
    assert inputs(grouped, ["y"]) == [(groups,), (site("mu"), members)]
    others = (Set, InputName("members", "n", number=1), (site("z"),))
    assert inputs(grouped_twice, ["y", "z"]) == [(members, others)]


def test_plates_in_plates_are_nested_sets():
    (first, second) = inputs(CASES["nested"].model, ["y"])
    pupils = (Set, InputName("plate", "pupils"), (site("y"),))
    assert first == ((Set, InputName("plate", "schools"), (pupils,)),)
    assert second == (site("mu"), site("tau"), site("sigma"), pupils)


def test_what_is_to_come_is_a_series():
    (faithful,), (filtered,) = inputs(walk, ["y"]), inputs(walk, ["y"], "filter")
    time, carry = InputName("time", "0"), InputName("carry", "0")
    assert faithful == (carry, (Series, time, (site("y"),)))
    assert filtered == (site("y"), carry)
    assert inputs(walk, ["y"], "blanket") == [(site("x", "+1"), site("y"))]
    # A step sees its own observation, but of the latents only those after it.
    (backward,) = inputs(running_sum, ["y"], "blanket")
    others = (Series, time._replace(number=1), (site("y"),))
    assert backward == ((Series, time, (site("x"),)), others)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_select_gives_the_related_elements(data):
    left, right = data.draw(small_shapes), data.draw(small_shapes)
    relation, truth = data.draw(relations(left, right).filter(lambda drawn: drawn[0]))
    index = tuple(data.draw(st.integers(0, size - 1)) for size in left)
    numbers = jnp.arange(1, np.prod(right, dtype=int) + 1).reshape(right)
    array, masks = select(relation, numbers, [jnp.asarray(i) for i in index])
    kept = [
        axis
        for axis in range(len(right))
        if not any(atom.right == axis and is_position(atom) for atom in relation.hull)
    ]
    shown = np.ones(array.shape, bool)
    for place, axis in enumerate(kept):
        mask = np.asarray(masks.get(axis, np.ones(array.shape[place], bool)))
        shown &= mask.reshape(-1, *[1] * (array.ndim - place - 1))
    seen = sorted(int(n) for n in np.asarray(array)[shown] if n)

    def related(tensor):
        return sorted(np.asarray(numbers)[tensor[index]].ravel().tolist())

    assert seen == related(dense([relation.hull], left, right))
    assert set(seen) >= set(related(truth))
    if len(relation.terms) == 1:
        assert seen == related(truth)
