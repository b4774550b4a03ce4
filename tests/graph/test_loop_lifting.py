"""A model with its loops lifted is the model: densities, draws, derivatives, structure, names."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.util import log_density

import retrodict as rd
import retrodict.graph.trace as tracing
from loop_models import CASES, DESIGN, SPREADS, site_values
from retrodict._xla.jit import CompiledFunction
from retrodict._xla.tuning import FAST_COMPILE
from retrodict.graph.loop_surface import split_steps, stack_steps
from retrodict.graph.loops.lifting import Lifted
from zoo import CASES as ZOO
from zoo import key

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
LIFTED = {name: case for name, case in CASES.items() if case.in_time or case.in_plates}
lifted_cases = pytest.mark.parametrize("case", LIFTED.values(), ids=LIFTED)


@cache
def graph_of(case):
    return rd.trace(case.model, case.observed)


@cases
def test_loops_become_scans_and_plates(case):
    sites = graph_of(case).lifted.sites.values()
    assert sum(site.time for site in sites) == case.in_time
    assert sum(bool(site.steps) and not site.time for site in sites) == case.in_plates
    assert bool(graph_of(case).source) == bool(case.in_time or case.in_plates)


@lifted_cases
def test_density_is_that_of_the_model(case):
    graph, values = graph_of(case), site_values(case.model, 3)
    lifted = CompiledFunction(graph.lifted.program.log_density, FAST_COMPILE)(
        stack_steps(graph.lifted, values)
    )
    total, _ = log_density(case.model, (), {}, values)
    np.testing.assert_allclose(sum(d.sum() for d in lifted.values()), total, rtol=1e-4)
    by_site = split_steps(graph.lifted, lifted)
    for name, expected in graph.program.log_density(values).items():
        np.testing.assert_allclose(by_site[name], expected, rtol=2e-4, atol=1e-5)


@lifted_cases
def test_deterministic_sites_are_those_of_the_model(case):
    graph, values = graph_of(case), site_values(case.model, 4)
    found = graph.lifted.program.deterministic(stack_steps(graph.lifted, values))
    expected = graph.program.deterministic(values)
    assert set(split_steps(graph.lifted, found)) == set(expected)
    for name, value in split_steps(graph.lifted, found).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5)


@lifted_cases
def test_draws_have_the_density_of_the_model(case):
    """The mean log density of joint draws, from both programs."""
    graph = graph_of(case)

    def mean(program):
        def one(rng_key):
            evaluation = program.run(rng_key, {})
            return sum(d.sum() for d in evaluation.log_density.values())

        densities = CompiledFunction(jax.vmap(one), FAST_COMPILE)(jax.random.split(key(5), 4000))
        return np.mean(densities), np.std(densities) / np.sqrt(4000)

    (a, error_a), (b, error_b) = mean(graph.program), mean(graph.lifted.program)
    assert abs(a - b) < 4 * np.hypot(error_a, error_b)


@pytest.mark.parametrize(
    "name", ["first_step_has_a_prior_of_its_own", "two_steps_back", "covariates", "running_sum"]
)
def test_derivatives_are_those_of_the_model(name):
    graph, values = graph_of(CASES[name]), site_values(CASES[name].model, 6)

    def total(program, values):
        floats = {n: v for n, v in values.items() if v.dtype.kind == "f"}
        rest = {n: v for n, v in values.items() if n not in floats}

        def density(floats):
            return sum(d.sum() for d in program.log_density({**floats, **rest}).values())

        return CompiledFunction(jax.grad(density), FAST_COMPILE)(floats)

    stacked = jax.tree.map(jnp.asarray, stack_steps(graph.lifted, values))
    found = split_steps(graph.lifted, total(graph.lifted.program, stacked))
    for site, expected in total(graph.program, values).items():
        np.testing.assert_allclose(found[site], expected, rtol=1e-3, atol=1e-4)


@cases
def test_graph_is_that_of_the_model_written_out(case, monkeypatch):
    graph = graph_of(case)
    monkeypatch.setattr(tracing, "lift", lambda program, notes: Lifted(program))
    written = rd.trace(case.model, case.observed)
    assert list(graph.unroll().nodes(data=True)) == list(written.unroll().nodes(data=True))
    assert set(graph.unroll().edges) == set(written.unroll().edges)
    assert list(graph.sites) == list(written.sites)
    for name, site in graph.sites.items():
        other = written.sites[name]
        assert (site.shape, site.plates, site.axes) == (other.shape, other.plates, other.axes)
        assert (site.observed, site.time, site.dtype) == (other.observed, other.time, other.dtype)
        assert (site.distribution, str(site.support)) == (other.distribution, str(other.support))
    assert graph.plates == written.plates
    assert graph.scan_lengths == written.scan_lengths == ()
    assert graph.program.guarded == written.program.guarded


@lifted_cases
@pytest.mark.parametrize("method", ["blanket", "faithful", "filter"])
def test_inverses_speak_of_the_users_sites(case, method):
    graph = graph_of(case)
    inverse = rd.invert(graph, method)
    latents = {v for v, node in graph.unroll().nodes(data=True) if not node["observed"]}
    assert set(inverse.order) == latents
    assert set(inverse.unroll()) == set(graph.unroll())
    drawn = [name for factor in inverse.factors for name in factor.latents]
    assert sorted(drawn) == sorted(graph.latent)
    for factor in inverse.factors:
        assert factor.context == {seen.site for seen in factor.inputs}
    # what the unrolled inverse says of parents, the factors say of sites
    parents = {
        (a.split("[")[0], b.split("[")[0])
        for a, b in inverse.unroll().edges
        if "plates_masks" not in case.model.__name__
    }
    seen = {(s, name) for f in inverse.factors for s in f.context for name in f.latents}
    together = {(a, b) for f in inverse.factors for a in f.latents for b in f.latents}
    assert parents <= seen | together


def test_special_steps_are_not_confused_with_others():
    """The first step alone depends on its own parents, and no other does."""
    edges = set(graph_of(CASES["only_the_first_step_has_parents_outside"]).unroll().edges)
    assert ("mean", "x_0") in edges and ("mean", "x_1") not in edges
    assert ("drift", "x_0") not in edges and ("drift", "x_1") in edges


def test_what_differs_from_step_to_step_is_known():
    def heterogeneous(name):
        sites = graph_of(CASES[name]).lifted.sites.values()
        return {site.name: site.heterogeneous_axes for site in sites if site.heterogeneous_axes}

    # Only the first x has a distribution of its own; all y have the same.
    assert heterogeneous("first_step_has_a_prior_of_its_own") == {"x_…": (0,)}
    assert heterogeneous("covariates") == {"x_…": (0,), "y_…": (0,)}
    assert heterogeneous("states") == {"z_…": (0,)}
    assert heterogeneous("independent_copies") == {"theta_…": (0,)}


def test_elements_of_sites_stay_aligned_with_steps():
    """A covariate for each step is an input of the scan, not one array for all steps."""
    case = CASES["elements_of_a_plate"]
    parents = graph_of(case).unroll().predecessors
    assert set(parents("x_1")) == {"x_0", "z[3]"}
    assert set(parents("y_1")) == {"x_1", "z[1]", "z[2]"}


def test_carries_hold_what_later_steps_need_and_no_more():
    def carries(name):
        return [carry.shape for carry in graph_of(CASES[name]).lifted.carries]

    assert carries("starts_from_a_number") == [()]
    assert carries("two_steps_back") == [(), ()]
    assert carries("running_sum") == [(), ()]  # the last x, and the sum of those before
    assert carries("plates_masks_and_deterministic_sites") == [(3,)]


def test_a_lifted_site_has_a_name_that_no_user_has_taken():
    def model():
        x = numpyro_sample("x_…")
        for t in range(4):
            x = numpyro_sample(f"x_{t}", x)
            numpyro_sample(f"y_{t}", x)

    import numpyro
    import numpyro.distributions as dist

    def numpyro_sample(name, mean=0.0):
        return numpyro.sample(name, dist.Normal(mean, 1.0))

    graph = rd.trace(model, [f"y_{t}" for t in range(4)])
    assert list(graph.lifted.sites) == ["x_…", "x_…′", "y_…"]
    assert ("x_…", "x_0") in graph.unroll().edges


def test_values_are_stacked_and_split():
    graph = graph_of(CASES["two_steps_back"])
    values = site_values(CASES["two_steps_back"].model)
    stacked = stack_steps(graph.lifted, values)
    assert set(stacked) == set(graph.lifted.sites)
    assert stacked["x_…"].shape == (7,)
    split = split_steps(graph.lifted, stacked)
    assert list(split) == list(graph.sites)
    for name, value in split.items():
        np.testing.assert_array_equal(value, values[name])
    many = {name: np.stack([v, v + 1]) for name, v in values.items()}
    again = split_steps(graph.lifted, stack_steps(graph.lifted, many, axis=1), axis=1)
    np.testing.assert_array_equal(again["x_3"], many["x_3"])


def test_a_model_without_loops_is_left_alone():
    for name in ("pumps", "regression", "fhmm_scan", "ar2"):
        graph = rd.trace(ZOO[name].model, ZOO[name].observed, model_kwargs=ZOO[name].kwargs)
        assert graph.lifted is graph and graph.surface is graph


def test_the_program_does_not_grow_with_the_number_of_steps():
    def size(steps):
        model = CASES["covariates"].model
        observed = [f"y_{t}" for t in range(steps)]
        program = rd.trace(model, observed, model_args=(steps,)).lifted.program
        return len(jax.make_jaxpr(program.run)(key(), {}).jaxpr.eqns)

    assert size(24) == size(12)


def test_constants_of_numpy_and_jax_are_inputs_of_the_scan():
    graph = graph_of(CASES["covariates"])
    values = site_values(CASES["covariates"].model, 2)
    parameters = graph.lifted.program.run(None, stack_steps(graph.lifted, values)).parameters
    np.testing.assert_allclose(parameters["y_…"][1][1:, 0], SPREADS[1:9])
    x, w, z = (values[n] for n in ("x_4", "w", "z"))
    mean = 0.8 * x + DESIGN[5] @ w + DESIGN[5, 1] + z[5]
    np.testing.assert_allclose(parameters["x_…"][0][5, 0], mean, rtol=1e-5)
