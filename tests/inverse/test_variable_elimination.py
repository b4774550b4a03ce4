"""Moral graphs, Markov blankets and elimination of plated nodes against networkx."""

import itertools

import jax.numpy as jnp
import networkx as nx
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrodict as rd
from retrodict.graph.index_atoms import Window
from retrodict.graph.index_relations import Relation
from retrodict.inverse.variable_elimination import (
    MoralGraph,
    Network,
    Node,
    eliminate_all,
    markov_blanket,
    unroll_time,
)
from zoo import CASES

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def written_out(case):
    """The graph of a model, its network of nodes and its network of variables."""
    graph = rd.trace(case.model, case.observed, model_kwargs=case.kwargs)
    return graph, unroll_time(graph, graph.scan_lengths), graph.unroll()


def variables(graph, network, node):
    """The variables of a node, by index in its plates."""
    site = graph.sites[node.site]
    time = () if node.step is None else (node.step,)
    return {
        index: site.variable((*time, *index))
        for index in itertools.product(*map(range, network.sizes[node]))
    }


def pairs(graph, network, left, right, relation):
    """The pairs of variables that a relation between two nodes joins."""
    names, others = variables(graph, network, left), variables(graph, network, right)
    return {(names[i], others[j]) for i in names for j in relation.at(i)}


@cases
def test_nodes_have_the_parents_of_the_network(case):
    graph, network, model = written_out(case)
    edges = {
        (parent, child)
        for node, parents in network.parents.items()
        for other, relation in parents.items()
        for child, parent in pairs(graph, network, node, other, relation)
    }
    assert edges == set(model.edges)


@cases
def test_moral_graph(case):
    graph, network, model = written_out(case)
    moral = MoralGraph.of(network, network.nodes, conditioned=())
    joined = {
        frozenset(pair)
        for node, around in moral.adjacent.items()
        for other, relation in around.items()
        for pair in pairs(graph, network, node, other, relation)
    }
    joined = {pair for pair in joined if len(pair) == 2}
    assert joined == set(map(frozenset, nx.moral_graph(model).edges))


@cases
def test_moral_graph_leaves_out_what_joins_given_nodes(case):
    graph, network, model = written_out(case)
    moral = MoralGraph.of(network, network.nodes, conditioned=network.observed)
    observed = {name for name, node in model.nodes(data=True) if node["observed"]}
    for node, around in moral.adjacent.items():
        for other in around:
            assert not (node in network.observed and other in network.observed)
    kept = {
        frozenset(pair)
        for node, around in moral.adjacent.items()
        for other, relation in around.items()
        for pair in pairs(graph, network, node, other, relation)
    }
    expected = {frozenset(p) for p in nx.moral_graph(model).edges if not {*p} <= observed}
    assert {pair for pair in kept if len(pair) == 2} == expected


@cases
def test_markov_blanket(case):
    graph, network, model = written_out(case)
    for node in network.nodes:
        blanket = {
            pair
            for other, relation in markov_blanket(network, node).items()
            for pair in pairs(graph, network, node, other, relation)
        }
        expected = set()
        for name in variables(graph, network, node).values():
            children = set(model.successors(name))
            mates = {p for child in children for p in model.predecessors(child)}
            around = (children | mates | set(model.predecessors(name))) - {name}
            expected |= {(name, other) for other in around}
        assert {(a, b) for a, b in blanket if a != b} == expected


def eliminated(model, moral, order):
    """The neighbours of each variable when it is eliminated, by the definition."""
    moral = nx.Graph(moral)
    found = {}
    for name in order:
        found[name] = set(moral.neighbors(name))
        moral.add_edges_from(itertools.combinations(found[name], 2))
        moral.remove_node(name)
    return found


# Elements of a node that are coupled are eliminated as one, which here joins more than it must.
SUPERSETS = {"fhmm_scan", "crossed_groups", "misaligned_plate"}


@pytest.mark.parametrize("name", CASES)
def test_elimination_gives_the_neighbours_that_are_left(name):
    graph, network, model = written_out(CASES[name])
    latents = [node for node in network.nodes if node not in network.observed]
    moral = MoralGraph.of(network, network.nodes, conditioned=network.observed)
    draws = eliminate_all(moral, latents, {n: network.children[n] & {*latents} for n in latents})
    assert sorted(draw.node for draw in draws) == sorted(latents)
    order = [
        name
        for draw in reversed(draws)
        for name in reversed(variables(graph, network, draw.node).values())
    ]
    expected = eliminated(model, nx.moral_graph(model), order)
    for draw in draws:
        names = variables(graph, network, draw.node)
        for number, (index, variable) in enumerate(names.items()):
            parents = {
                variables(graph, network, other)[i]
                for other, relation in draw.parents.items()
                for i in relation.at(index)
            }
            before = {*list(names)[:number]}
            parents |= {names[i] for i in draw.among.at(index) & before}
            assert expected[variable] <= parents
            if name not in SUPERSETS:
                assert expected[variable] == parents


@st.composite
def networks_of_scalars(draw):
    nodes = [Node(f"x{number}") for number in range(draw(st.integers(2, 7)))]
    everything = Relation.of([], (), ())
    parents = {
        child: {parent: everything for parent in nodes[:number] if draw(st.booleans())}
        for number, child in enumerate(nodes)
    }
    observed = draw(st.lists(st.sampled_from(nodes), max_size=len(nodes) - 1, unique=True))
    return Network(dict.fromkeys(nodes, ()), frozenset(observed), parents)


def fewest_fill_ins(network):
    """The order of elimination: fewest joins, of equals the last, children before parents."""
    model = nx.DiGraph((p, child) for child, parents in network.parents.items() for p in parents)
    model.add_nodes_from(network.nodes)
    moral = nx.moral_graph(model)
    remaining = [node for node in network.nodes if node not in network.observed]
    order = []

    def fill(node):
        pairs = itertools.combinations(moral.neighbors(node), 2)
        return sum(not ({u, v} <= network.observed or moral.has_edge(u, v)) for u, v in pairs)

    while remaining:
        ready = [n for n in remaining if not {*model.successors(n)} & {*remaining}]
        chosen = min(reversed(ready), key=fill)
        moral.add_edges_from(itertools.combinations(moral.neighbors(chosen), 2))
        moral.remove_node(chosen)
        remaining.remove(chosen)
        order.append(chosen)
    return order


@settings(max_examples=100, deadline=None, derandomize=True)
@given(networks_of_scalars())
def test_scalars_are_eliminated_by_fewest_fill_ins(network):
    latents = [node for node in network.nodes if node not in network.observed]
    moral = MoralGraph.of(network, network.nodes, conditioned=network.observed)
    draws = eliminate_all(moral, latents, {n: network.children[n] & {*latents} for n in latents})
    assert [draw.node for draw in draws[::-1]] == fewest_fill_ins(network)


def test_fill_counts_the_pairs_that_one_element_joins():
    def model():
        with numpyro.plate("m", 3):
            u = numpyro.sample("u", dist.Normal(0, 1))
        with numpyro.plate("n", 4):
            v = numpyro.sample("v", dist.Normal(u.sum(), 1))
            numpyro.sample("w", dist.Normal(v, 1))

    graph = rd.trace(model, ["w"])
    network = unroll_time(graph, ())
    moral = MoralGraph.of(network, network.nodes, conditioned=network.observed)
    # An element of v joins each of three u with its w; the three u are joined already.
    assert moral.fill(Node("v")) == 3
    # All u are coupled and go together: they join the four v with each other.
    assert moral.fill(Node("u")) == 6


@pytest.mark.parametrize("size", [5, 100_000])
def test_elimination_costs_the_same_for_any_size(size):
    """Relations stay a few windows, whatever the size of the plates that are shifted."""

    def model():
        with numpyro.plate("n", size):
            x = numpyro.sample("x", dist.Normal(0, 1))
            shifted = jnp.concatenate([jnp.zeros(1), x[:-1]])
            z = numpyro.sample("z", dist.Normal(x + shifted, 1))
            numpyro.sample("y", dist.Normal(z, 1))

    graph = rd.trace(model, ["y"])
    network = unroll_time(graph, ())
    moral = MoralGraph.of(network, network.nodes, conditioned=network.observed)
    draw = moral.eliminate(Node("z"))
    relations = {n.site: r.unbounded().terms for n, r in draw.parents.items()}
    assert relations == {"x": {(Window(0, 0, -1, 0),)}, "y": {(Window(0, 0),)}}
    coupled = moral.adjacent[Node("x")][Node("x")].terms
    assert coupled == {(Window(0, 0, -1, 1),)}
