"""Simulation and densities of a program against NumPyro's own."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Barrier, BrokenBarrierError

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.util import log_density
from scipy import stats

import retrodict as rd
from retrodict.graph.program import Program
from zoo import CASES, key

# NumPyro cannot substitute into a scan that runs backward: it numbers the steps from the start.
FORWARD = {name: case for name, case in CASES.items() if name != "backward_scan"}


def finite_draw(program):
    """A joint draw with a finite density; priors like Gamma(0.1, 1) underflow now and then."""
    for number in range(50):
        values = program.simulate(key(number))
        density = sum(d.sum() for d in program.log_density(values).values())
        if np.isfinite(density):
            return values
    raise AssertionError("no finite draw")


@pytest.mark.parametrize("case", FORWARD.values(), ids=FORWARD.keys())
def test_log_density_is_numpyros(case):
    graph = rd.trace(case.model, case.observed, model_kwargs=case.kwargs)
    values = finite_draw(graph.program)
    ours = replace(graph.program, mask_latents=True).log_density(values)
    for name, site in graph.sites.items():
        assert values[name].shape == site.shape
        assert values[name].dtype == site.dtype
        assert ours[name].shape == site.index_shape
    theirs, _ = log_density(case.model, (), case.kwargs, values)
    np.testing.assert_allclose(sum(d.sum() for d in ours.values()), theirs, rtol=1e-4, atol=1e-4)


def test_backward_scan_scores_each_step_with_its_own_inputs():
    graph = rd.trace(CASES["backward_scan"].model, ["y"])
    values = graph.program.simulate(key())
    x, rate = np.asarray(values["x"]), float(values["rate"])
    means = rate * np.append(x[1:], 0.0)
    expected = stats.norm.logpdf(x, means, np.linspace(1.0, 2.0, 4))
    np.testing.assert_allclose(graph.program.log_density(values)["x"], expected, rtol=1e-5)


def test_simulation_is_batched_and_has_the_right_moments():
    """A linear-Gaussian series, whose marginal variance is known at each step."""

    def series(steps=6):
        def step(x, _):
            x = numpyro.sample("x", dist.Normal(0.9 * x, 1))
            numpyro.sample("y", dist.Normal(x, 0.5))
            return x, None

        scan(step, 0.0, None, length=steps)

    program = rd.trace(series, ["y"]).program
    draws = 20_000
    values = jax.jit(jax.vmap(program.simulate))(jax.random.split(key(), draws))
    variance = np.cumsum(0.81 ** np.arange(6)) + 0.25
    assert values["y"].shape == (draws, 6)
    # The variance of a sample variance of normals is 2 v² / n.
    error = 4 * variance * np.sqrt(2 / draws)
    assert np.all(np.abs(np.var(values["y"], 0) - variance) < error)
    lagged = np.mean(values["x"][:, 1:] * values["x"][:, :-1], 0)
    np.testing.assert_allclose(lagged, 0.9 * (variance - 0.25)[:-1], rtol=0.08)


def test_densities_vectorise_under_jit():
    program = rd.trace(CASES["nested"].model, ["y"]).program
    values = jax.jit(jax.vmap(program.simulate))(jax.random.split(key(), 5))
    together = jax.jit(jax.vmap(program.log_density))(values)
    for number in range(5):
        alone = program.log_density({name: v[number] for name, v in values.items()})
        for name, density in alone.items():
            np.testing.assert_allclose(together[name][number], density, rtol=1e-5)


def test_deterministic_sites_come_along():
    graph = rd.trace(CASES["eight_schools_non_centred"].model, ["y"])
    values = graph.program.simulate(key())
    theta = graph.program.deterministic(values)["theta"]
    np.testing.assert_allclose(theta, values["mu"] + values["tau"] * values["eta"], rtol=1e-6)
    assert "theta" not in graph.sites


def test_deterministic_sites_in_a_scan_are_stacked():
    def series():
        def step(x, _):
            x = numpyro.sample("x", dist.Normal(x, 1))
            numpyro.deterministic("double", 2 * x)
            numpyro.sample("y", dist.Normal(x, 1))
            return x, None

        scan(step, 0.0, None, length=3)

    program = rd.trace(series, ["y"]).program
    values = program.simulate(key())
    np.testing.assert_allclose(program.deterministic(values)["double"], 2 * values["x"])


@pytest.mark.parametrize("inside", [True, False])
def test_masked_elements_have_no_density(inside):
    mask = handlers.mask(mask=False)

    def step(x, _):
        x = numpyro.sample("x", dist.Normal(x, 1))
        if inside:
            with handlers.mask(mask=False):
                numpyro.sample("y", dist.Normal(x, 1))
        else:
            numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    def model():
        numpyro.sample("z", dist.Normal(0, 1))
        if inside:
            scan(step, 0.0, None, length=3)
        else:
            with mask:
                scan(step, 0.0, None, length=3)

    program = rd.trace(model, ["y"]).program
    values = program.simulate(key())
    assert np.all(program.log_density(values)["x"] != 0)
    density = replace(program, mask_latents=True).log_density(values)
    np.testing.assert_array_equal(density["y"], 0)
    assert np.all((density["x"] == 0) == (not inside))
    assert density["z"] != 0


def test_values_given_in_the_model_are_overridden():
    """Data that the model was called with must not leak into simulations."""

    def model(y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    graph = rd.trace(model, ["y"], model_kwargs={"y": jnp.array(100.0)})
    assert abs(graph.program.simulate(key())["y"]) < 10


def test_models_can_be_traced_in_several_threads():
    """NumPyro's stack of handlers is global."""
    inside = Barrier(2, timeout=0.2)

    def model():
        x = numpyro.sample("x", dist.Normal(0, 1))
        with suppress(BrokenBarrierError):
            inside.wait()  # the other thread would enter its handlers here
        numpyro.sample("y", dist.Normal(x, 1))

    program = Program(model)
    values = {"x": jnp.zeros(()), "y": jnp.zeros(())}
    with ThreadPoolExecutor(2) as threads:
        densities = list(threads.map(program.log_density, [values, values]))
    for density in densities:
        assert set(density) == {"x", "y"}
        np.testing.assert_allclose(sum(density.values()), -np.log(2 * np.pi), rtol=1e-5)


def test_a_draw_needs_a_key():
    program = rd.trace(CASES["nested"].model, ["y"]).program
    with pytest.raises(KeyError, match="no value for site 'mu'"):
        program.log_density({})


PARAMETERS = """
import jax.numpy as jnp, numpyro, numpyro.distributions as dist
from retrodict.graph.program import Program

def model():
    with numpyro.plate("n", 2):
        numpyro.sample("y", dist.StudentT(jnp.array([3.0, 4.0]), jnp.array([0.0, 1.0]), 2.0))

print([p.tolist() for p in Program(model).run(None, {"y": jnp.zeros(2)}).parameters["y"]])
"""


def test_parameters_have_the_same_order_in_every_process():
    """NumPyro flattens distributions in an order that depends on Python's hash seed."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", PARAMETERS],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in (1, 3)
    ]
    assert runs[0] == runs[1]
