"""The graph read from a model against the edges written down by hand, and against probing."""

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
from numpyro.distributions import constraints

import retrodict as rd
from zoo import CASES, key, pumps

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@cases
def test_unroll_gives_the_edges_of_the_text(case):
    network = rd.trace(case.model, case.observed, model_kwargs=case.kwargs).unroll()
    assert set(network.edges) == case.edges
    assert nx.is_directed_acyclic_graph(network)
    bases = {name for name, node in network.nodes(data=True) if node["observed"]}
    assert {name.split("[")[0] for name in bases} == set(case.observed)


def probed_edges(graph):
    """Change one element of a site at a time, and see which densities move."""
    program = graph.program
    values = jax.jit(program.simulate)(key(3))
    values = {n: jnp.where(jnp.isfinite(v), v, 1) for n, v in values.items()}
    density = jax.jit(program.log_density)
    before = density(values)
    edges = set()
    for parent in graph.sites.values():
        for index in parent.indices():
            place = [slice(None)] * len(parent.shape)
            for axis, position in zip(parent.axes, index, strict=True):
                place[axis] = position
            old = values[parent.name]
            changed = 1 - old[tuple(place)] if old.dtype.kind == "i" else old[tuple(place)] * 0.9
            after = density(values | {parent.name: old.at[tuple(place)].set(changed)})
            for child in graph.sites.values():
                if child is not parent or child.time:
                    moved = np.argwhere(np.asarray(before[child.name] != after[child.name]))
                    edges |= {(parent.variable(index), child.variable(tuple(m))) for m in moved}
    return {(a, b) for a, b in edges if a != b}


@cases
def test_no_density_moves_without_an_edge(case):
    graph = rd.trace(case.model, case.observed, model_kwargs=case.kwargs)
    probed = probed_edges(graph)
    assert probed  # else nothing was tested
    assert probed <= set(graph.unroll().edges)


def test_sites_carry_shape_support_plates_and_time():
    graph = rd.trace(CASES["nested"].model, ["y"])
    y = graph.sites["y"]
    assert (y.shape, y.plates, y.observed, y.time) == ((2, 3), ("pupils", "schools"), True, False)
    assert graph.sites["tau"].support is constraints.positive
    x = rd.trace(CASES["fhmm_scan"].model, ["y"]).sites["x"]
    assert (x.shape, x.plates, x.time) == ((4, 3), ("devices",), True)
    assert x.support is constraints.boolean
    w = rd.trace(CASES["regression_event"].model, ["z", "t"]).sites["w"]
    assert (w.event_shape, w.plates) == ((3,), ())


def test_edges_say_how_indices_meet():
    def kinds(name):
        case = CASES[name]
        graph = rd.trace(case.model, case.observed, model_kwargs=case.kwargs)
        return {(e.parent, e.child): e.kinds() for e in graph.edges}

    assert kinds("pumps")["theta", "y"] == {"same"}
    assert kinds("fhmm_scan")["x", "x"] == {"lag", "same"}
    assert kinds("fhmm_scan")["x", "y"] == {"same", "all"}
    assert kinds("varying_intercept")["a", "y"] == {"map"}
    assert kinds("mixture_with_indicators")["mu", "y"] == {"all"}


def test_elements_that_differ_by_constants_are_found():
    def heterogeneous(name):
        graph = rd.trace(CASES[name].model, CASES[name].observed)
        return {
            site.name: site.heterogeneous_axes
            for site in graph.sites.values()
            if site.heterogeneous_axes
        }

    assert heterogeneous("eight_schools") == {"y": (0,)}
    assert heterogeneous("varying_intercept") == {"y": (0,)}
    assert heterogeneous("crossed_groups") == {}
    assert heterogeneous("pumps") == {}
    assert heterogeneous("backward_scan") == {"x": (0,)}


def test_a_moving_support_is_widened_and_guarded():
    case = CASES["moving_support"]
    graph = rd.trace(case.model, case.observed)
    assert graph.sites["width"].support == constraints.greater_than(0)
    values = {"high": jnp.array(2.0), "width": jnp.array(3.0), "y": jnp.array([1.0, 3.5])}
    density = graph.program.log_density(values)
    assert density["width"] == -jnp.inf
    np.testing.assert_array_equal(density["y"], [-np.log(3.0).astype(np.float32), -np.inf])
    with pytest.raises(rd.UnsupportedModel, match=r"support of latent site 'parts'.*Multinomial"):

        def parts():
            total = numpyro.sample("total", dist.Poisson(4.0))
            parts = numpyro.sample("parts", dist.Multinomial(total, jnp.ones(3) / 3, total_count_max=50))  # fmt: skip  # noqa: E501
            numpyro.sample("y", dist.Normal(parts.sum(), 1))

        rd.trace(parts, ["y"])


def test_unrolling_the_unreasonable_is_refused():
    def pairs():
        with numpyro.plate("a", 10_000):
            x = numpyro.sample("x", dist.Normal(0, 1))
        with numpyro.plate("b", 10_000):
            numpyro.sample("y", dist.Normal(x.sum(), 1))

    graph = rd.trace(pairs, ["y"])
    with pytest.raises(ValueError, match="smaller instance"):
        graph.unroll()
    with pytest.raises(ValueError, match="smaller instance"):
        rd.invert(graph).unroll()


def refused(message):
    return pytest.raises(rd.UnsupportedModel, match=message)


def with_observation(site):
    def model():
        x = site()
        numpyro.sample("y", dist.Normal(0 if x is None else x, 1))

    return model


def normal():
    return numpyro.sample("x", dist.Normal(0, 1))


REFUSED = {
    "'x' has an improper prior": lambda: numpyro.sample(
        "x", dist.ImproperUniform(constraints.real, (), ())
    ),
    "'x' is a numpyro.factor": lambda: numpyro.factor("x", 1.0),
    "'x' is a numpyro.param": lambda: numpyro.param("x", 1.0),
    "numpyro.prng_key": lambda: jax.random.normal(numpyro.prng_key()),
    "choose with jnp.where": lambda: cond(True, lambda _: normal(), lambda _: 0.0, None),
    "'x' is rescaled": lambda: handlers.scale(normal, scale=2.0)(),
    "two sites are called 'x'": lambda: normal() + normal(),
    r"raised TypeError.*without data.*default to None": lambda: len(None),
}


@pytest.mark.parametrize(("message", "site"), REFUSED.items())
def test_refusals(message, site):
    with refused(message):
        rd.trace(with_observation(site), ["y"])


def test_subsampled_plate_is_refused():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", 10, subsample_size=5):
            numpyro.sample("y", dist.Normal(mu, 1))

    with refused("plate 'data' takes a subsample of 5 of its 10"):
        rd.trace(model, ["y"])


def test_structure_that_changes_is_refused():
    def branches():
        x = numpyro.sample("x", dist.Normal(0, 1))
        if x > 0:
            numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(x, 1))

    with refused(r"changes from draw to draw.*\(after site 'x'\).*jnp\.where"):
        rd.trace(branches, ["y"])

    visits = []

    def forgetful():
        visits.append(0)
        numpyro.sample(f"x{len(visits)}", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(0, 1))

    with refused("two runs differ in the sites x1, x2"):
        rd.trace(forgetful, ["y"])


def test_nested_scans_and_scans_in_plates_are_refused():
    def inner(carry, _):
        scan(lambda c, _: (numpyro.sample("x", dist.Normal(c, 1)), None), 0.0, None, length=2)
        numpyro.sample("y", dist.Normal(0, 1))
        return carry, None

    with refused("scan inside a scan"):
        rd.trace(lambda: scan(inner, 0.0, None, length=2), ["y"])

    def plated():
        with numpyro.plate("n", 2):
            scan(lambda c, _: (numpyro.sample("x", dist.Normal(c, 1)), None), 0.0, None, length=2)
        numpyro.sample("y", dist.Normal(0, 1))

    with refused("plate"):
        rd.trace(plated, ["y"])


def test_observed_names_must_be_sample_sites():
    with refused(r"'z', which is not a sample site.*alpha, beta, t, theta, y"):
        rd.trace(pumps, ["t", "z"])
    with refused("observed is empty"):
        rd.trace(pumps, [])
    with refused("nothing to infer"):
        rd.trace(pumps, ["alpha", "beta", "t", "theta", "y"])


def test_tracing_does_not_look_at_sizes():
    """The jaxprs that are read have the same number of equations, whatever the sizes."""

    def series(n):
        def step(x, scale):
            x = numpyro.sample("x", dist.Normal(x, scale))
            numpyro.sample("y", dist.Normal(x, 1))
            return x, None

        scan(step, 0.0, np.linspace(1, 2, n), length=n)

    small, large = (rd.trace(series, ["y"], model_args=(n,)) for n in (100, 100_000))
    assert small.edges == large.edges
    small, large = (rd.trace(pumps, ["t", "y"], model_kwargs={"n": n}) for n in (100, 100_000))
    assert small.edges == large.edges
    assert [f.network for f in rd.invert(small).factors] == [
        f.network for f in rd.invert(large).factors
    ]
