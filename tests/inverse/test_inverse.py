"""Inverses against their definitions: the table of the design, Markov blankets, d-separation."""

from itertools import combinations

import jax.numpy as jnp
import networkx as nx
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.contrib.control_flow import scan

import retrodict as rd
from zoo import CASES

METHODS = ["blanket", "faithful", "filter"]
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def trace(name, **kwargs):
    case = CASES[name]
    return rd.trace(case.model, case.observed, model_kwargs=case.kwargs | kwargs)


def table(name, method, **kwargs):
    """(latents, context, plates) of every factor, in the order drawn."""
    inverse = rd.invert(trace(name, **kwargs), method)
    return [(f.latents, set(f.context), f.plates) for f in inverse.factors]


# What must come out


@pytest.mark.parametrize("n", [10, 1000])
def test_regression(n):
    assert table("regression", "blanket", n=n) == [(("w2", "w1", "w0"), {"z", "t"}, ())]
    assert table("regression", "faithful", n=n) == [(("w0", "w1", "w2"), {"z", "t"}, ())]
    for name in ("regression_vector", "regression_event"):
        for method in ("blanket", "faithful", "auto"):
            assert table(name, method, n=n) == [(("w",), {"z", "t"}, ())]


@pytest.mark.parametrize("n", [10, 1000])
def test_pumps(n):
    assert table("pumps", "blanket", n=n) == [
        (("theta",), {"t", "y"}, ("pumps",)),
        (("beta", "alpha"), {"theta"}, ()),
    ]
    for method in ("faithful", "auto"):
        assert table("pumps", method, n=n) == [
            (("alpha", "beta"), {"t", "y"}, ()),
            (("theta",), {"alpha", "beta", "t", "y"}, ("pumps",)),
        ]


@pytest.mark.parametrize("name", ["fhmm_scan", "fhmm_scan_vector"])
def test_factorial_hmm_in_a_scan(name):
    for method in ("filter", "auto"):
        (factor,) = rd.invert(trace(name), method).factors
        assert (factor.latents, factor.context, factor.plates) == (("x",), {"x", "y"}, ())
        assert factor.time and not factor.backward
        assert {i.site: i.steps for i in factor.inputs} == {"x": (-1, -1), "y": (0, 0)}
    (factor,) = rd.invert(trace(name), "blanket").factors
    assert factor.backward
    assert {i.site: i.steps for i in factor.inputs} == {"x": (1, 1), "y": (0, 0)}
    (factor,) = rd.invert(trace(name), "faithful").factors
    assert {i.site: i.steps for i in factor.inputs} == {"x": (-1, -1), "y": (0, float("inf"))}


def test_factorial_hmm_in_a_loop():
    inverse = rd.invert(trace("fhmm_loop"))
    assert inverse.method == "filter"
    assert [(f.latents, set(f.context)) for f in inverse.factors] == [
        (("x_0",), {"y_0"}),
        (("x_1",), {"x_0", "y_1"}),
        (("x_2",), {"x_1", "y_2"}),
        (("x_3",), {"x_2", "y_3"}),
    ]
    assert len({f.network for f in inverse.factors}) == 1


def test_factorial_hmm_in_a_loop_of_scalars():
    inverse = rd.invert(trace("fhmm_loop_scalars"))
    step = [{f"x{d}_{t}" for d in range(3)} for t in range(4)]
    assert [set(f.latents) for f in inverse.factors] == step
    assert [set(f.context) for f in inverse.factors] == [
        {f"y_{t}"} | (step[t - 1] if t else set()) for t in range(4)
    ]
    assert len({f.network for f in inverse.factors}) == 1


def test_hierarchies():
    assert table("eight_schools", "faithful") == [
        (("mu", "tau"), {"y"}, ()),
        (("theta",), {"mu", "tau", "y"}, ("schools",)),
    ]
    assert table("eight_schools_non_centred", "faithful") == [
        (("mu", "tau"), {"y"}, ()),
        (("eta",), {"mu", "tau", "y"}, ("schools",)),
    ]
    assert table("nested", "faithful") == [
        (("mu", "tau", "sigma"), {"y"}, ()),
        (("a",), {"mu", "tau", "sigma", "y"}, ("schools",)),
    ]
    assert table("nested", "blanket") == [
        (("a",), {"y"}, ("schools",)),
        (("sigma",), {"a", "y"}, ()),
        (("tau", "mu"), {"a"}, ()),
    ]
    assert table("varying_intercept", "faithful") == [
        (("mu", "tau", "b", "sigma"), {"y"}, ()),
        (("a",), {"mu", "tau", "b", "sigma", "y"}, ("groups",)),
    ]


def test_series_with_global_parameters():
    for method in ("filter", "auto"):
        assert table("stochastic_volatility", method) == [
            (("mu", "phi", "sigma"), {"y"}, ()),
            (("h",), {"mu", "phi", "sigma", "h", "y"}, ()),
        ]
    inverse = rd.invert(trace("ar2"))
    leading, step = inverse.factors
    assert set(leading.latents) == {"phi", "sigma", "x0", "x1"}
    assert {i.site: i.steps for i in step.inputs if i.steps} == {"x": (-2, -1), "y": (0, 0)}


def test_elements_that_a_sum_ties_together_are_drawn_jointly():
    def sums(n=6):
        with numpyro.plate("n", n):
            x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(x.sum(), 1))

    inverse = rd.invert(rd.trace(sums, ["y"]))
    (factor,) = inverse.factors
    assert (factor.latents, factor.context, factor.plates) == (("x",), {"y"}, ())
    assert set(inverse.unroll().predecessors("x[3]")) == {"x[0]", "x[1]", "x[2]", "y"}


def test_elements_in_groups_stay_apart():
    network = rd.invert(trace("varying_intercept"), "faithful").unroll()
    assert set(network.predecessors("a[2]")) == {"mu", "tau", "b", "sigma", "y[3]", "y[4]"}


@pytest.mark.parametrize("scales", [[1.0, 1.0, 1.0], [1.0, 1.0, 2.0]])
def test_independent_copies_in_a_loop_share_a_network(scales):
    """As elements of a plate do, also where constants tell them apart."""

    def replicates():
        for n, scale in enumerate(scales):
            x = numpyro.sample(f"x{n}", dist.Normal(0, 1))
            numpyro.sample(f"y{n}", dist.Normal(x, scale))

    inverse = rd.invert(rd.trace(replicates, [f"y{n}" for n in range(3)]))
    assert [(f.latents, set(f.context), f.plates) for f in inverse.factors] == [
        ((f"x{n}",), {f"y{n}"}, ()) for n in range(3)
    ]
    assert len({f.network for f in inverse.factors}) == 1


def test_latents_that_nothing_observed_depends_on_are_drawn_last():
    def model():
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(a, 1))
        numpyro.sample("c", dist.Normal(b, 1))
        numpyro.sample("y", dist.Normal(a, 1))

    inverse = rd.invert(rd.trace(model, ["y"]))
    assert [(f.latents, set(f.context), f.from_prior) for f in inverse.factors] == [
        (("a",), {"y"}, False),
        (("b",), {"a"}, True),
        (("c",), {"b"}, True),
    ]


def test_unknown_method():
    with pytest.raises(ValueError, match="'forward'; there are 'auto', 'blanket'"):
        rd.invert(trace("pumps"), "forward")


# What must hold for every model and every method


def check_valid(inverse):
    network, order = inverse.unroll(), inverse.order
    latents = {n for n, node in network.nodes(data=True) if not node["observed"]}
    assert len(order) == len(set(order)) and set(order) == latents
    place = {name: number for number, name in enumerate(order)}
    for parent, child in network.edges:
        assert child in latents
        assert parent not in latents or place[parent] < place[child]
    sites = [name for factor in inverse.factors for name in factor.latents]
    assert sorted(sites) == sorted(inverse.graph.latent)
    known = set(inverse.graph.observed)
    for factor in inverse.factors:
        assert factor.context <= known | (set(factor.latents) if factor.time else set())
        assert factor.context == {i.site for i in factor.inputs}
        known |= set(factor.latents)


@cases
@pytest.mark.parametrize("method", METHODS)
def test_order_and_factors_are_valid(case, method):
    graph = rd.trace(case.model, case.observed, model_kwargs=case.kwargs)
    check_valid(rd.invert(graph, method))


def blanket_by_definition(network, order):
    """PaH(x) = MB(x) ∩ {drawn before, observed}."""
    known = {n for n, node in network.nodes(data=True) if node["observed"]}
    edges = set()
    for name in order:
        children = set(network.successors(name))
        blanket = set(network.predecessors(name)) | children
        blanket |= {p for child in children for p in network.predecessors(child)}
        edges |= {(other, name) for other in (blanket - {name}) & known}
        known.add(name)
    return edges


@cases
def test_blanket_is_its_definition(case):
    graph = rd.trace(case.model, case.observed, model_kwargs=case.kwargs)
    inverse = rd.invert(graph, "blanket")
    assert set(inverse.unroll().edges) == blanket_by_definition(graph.unroll(), inverse.order)
    program = [v for v in graph.unroll() if not graph.unroll().nodes[v]["observed"]]
    if not graph.scan_lengths:
        assert list(inverse.order) == program[::-1]


def check_no_false_independence(inverse, *, minimal):
    """The ordered Markov property of the inverse holds in the model (d-separation), and no less."""
    model, network = inverse.graph.unroll(), inverse.unroll()
    known = {n for n, node in model.nodes(data=True) if node["observed"]}
    for name in inverse.order:
        parents = set(network.predecessors(name))
        assert nx.is_d_separator(model, {name}, known - parents, parents)
        if minimal:
            for parent in parents:
                assert not nx.is_d_separator(model, {name}, {parent}, parents - {parent})
        known.add(name)


@cases
def test_faithful_asserts_nothing_the_model_lacks(case):
    graph = rd.trace(case.model, case.observed, model_kwargs=case.kwargs)
    check_no_false_independence(rd.invert(graph, "faithful"), minimal=False)


SCANS = {n: c for n, c in CASES.items() if rd.trace(c.model, c.observed).scan_lengths}


@pytest.mark.parametrize("case", SCANS.values(), ids=SCANS.keys())
def test_filter_steps_are_faithful_given_the_past(case):
    """Given its parents, a variable depends on nothing else that is known up to its own step."""
    graph = rd.trace(case.model, case.observed, model_kwargs=case.kwargs)
    inverse = rd.invert(graph, "filter")
    model, network = graph.unroll(), inverse.unroll()
    backward = graph.reversed_scans[0]
    drawn = set()
    for name in inverse.order:
        site, _, index = name.rstrip("]").partition("[")
        if graph.sites[site].time:
            step = int(index.split(",")[0])
            known = drawn | {
                graph.sites[y].variable((t,))
                for y in graph.observed
                if graph.sites[y].time
                for t in range(graph.scan_lengths[0])
                if (t >= step if backward else t <= step)
            }
            parents = set(network.predecessors(name))
            assert parents <= known
            assert nx.is_d_separator(model, {name}, known - parents, parents)
        drawn.add(name)


@st.composite
def random_graphs(draw):
    size = draw(st.integers(2, 8))
    names = draw(st.sampled_from(["abcdefgh", [f"x{n}" for n in range(8)]]))[:size]
    pairs = list(combinations(names, 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=len(pairs)))
    observed = draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=size - 1))
    return list(names), set(edges), sorted(observed)


def as_model(names, edges):
    def model():
        values = {}
        for name in names:
            mean = sum((values[p] for p, c in sorted(edges) if c == name), jnp.zeros(()))
            values[name] = numpyro.sample(name, dist.Normal(mean, 1))

    return model


@settings(max_examples=60, deadline=None, derandomize=True)
@given(random_graphs())
def test_random_graphs(drawn):
    names, edges, observed = drawn
    graph = rd.trace(as_model(names, edges), observed)
    assert set(graph.unroll().edges) == edges
    for method in METHODS:
        check_valid(rd.invert(graph, method))
    blanket = rd.invert(graph, "blanket")
    assert list(blanket.order) == [n for n in names[::-1] if n not in observed]
    assert set(blanket.unroll().edges) == blanket_by_definition(graph.unroll(), blanket.order)
    check_no_false_independence(rd.invert(graph, "faithful"), minimal=True)


# Lifting


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["pumps", "nested", "varying_intercept", "crossed_groups"])
def test_plates_lift(name, method):
    """Turning the lifted graph round is turning the written-out graph round."""
    graph = trace(name)
    # Names that end in no number, or the written-out sites would be lifted again.
    written = nx.relabel_nodes(graph.unroll(), lambda name: f"{name}'")
    observed = [n for n, node in written.nodes(data=True) if node["observed"]]
    flat = as_model(list(written), set(written.edges))
    expected = rd.invert(rd.trace(flat, observed), method).unroll()
    found = nx.relabel_nodes(rd.invert(graph, method).unroll(), lambda name: f"{name}'")
    if method == "blanket" or name in ("pumps", "nested", "varying_intercept"):
        assert set(found.edges) == set(expected.edges)
    else:
        assert found.number_of_edges() >= expected.number_of_edges()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["stochastic_volatility", "ar2"])
def test_the_length_of_a_series_does_not_change_its_factors(name, method):
    short = rd.invert(trace(name, steps=9), method)
    long = rd.invert(trace(name, steps=5000), method)
    assert short.factors == long.factors


def chain(steps, observed_step):
    """One step of a chain is observed, outside of its scan."""

    def step(x, _):
        x = numpyro.sample("x", dist.Normal(x, 1))
        return x, x

    _, xs = scan(step, 0.0, None, length=steps)
    numpyro.sample("y", dist.Normal(xs[observed_step], 1))


@pytest.mark.parametrize("method", ["blanket", "faithful"])
def test_an_observation_of_one_step_informs_a_long_series(method):
    for steps, place in [(9, -1), (500, -1), (500, 250), (500, -2), (500, 1)]:
        graph = rd.trace(chain, ["y"], model_args=(steps, place))
        (factor,) = rd.invert(graph, method).factors
        assert not factor.from_prior and factor.context == {"x", "y"}


def test_steps_of_a_scan_are_drawn_in_one_order():
    """Two coupled chains: the last step alone would be cut differently."""

    def chains():
        def step(carry, _):
            a = numpyro.sample("a", dist.Normal(carry[0], 1))
            b = numpyro.sample("b", dist.Normal(carry[1] + a, 1))
            numpyro.sample("y", dist.Normal(a + b, 1))
            return (a, b), None

        scan(step, (0.0, 0.0), None, length=5)

    inverse = rd.invert(rd.trace(chains, ["y"]), "faithful")
    (factor,) = inverse.factors
    assert set(factor.latents) == {"a", "b"}
    steps = [name[0] for name in inverse.order]
    assert steps == list(factor.latents) * 5


def test_scans_of_different_lengths_are_cut_alike_at_every_step():
    """No site is drawn by two factors."""

    def chain(name, first, length):
        def step(x, _):
            x = numpyro.sample(f"x{name}", dist.Normal(x, 1))
            z = numpyro.sample(f"z{name}", dist.Normal(x, 1))
            numpyro.sample(f"y{name}", dist.Normal(x + z, 1))
            return x, None

        return scan(step, first, None, length=length)[0]

    def chains():
        drift = numpyro.sample("drift", dist.Normal(0, 1))
        chain("b", chain("a", drift, 2) * drift, 5)

    for method in METHODS:
        check_valid(rd.invert(rd.trace(chains, ["ya", "yb"]), method))


@pytest.mark.parametrize("method", ["blanket", "faithful"])
@pytest.mark.parametrize("length", [4, 40])
def test_what_only_the_last_step_tells_reaches_all_steps(length, method):
    def chain():
        def step(x, _):
            x = numpyro.sample("x", dist.Normal(x, 1))
            return x, None

        last, _ = scan(step, 0.0, None, length=length)
        numpyro.sample("y", dist.Normal(last, 1))

    (factor,) = rd.invert(rd.trace(chain, ["y"]), method).factors
    assert "y" in factor.context and not factor.from_prior
