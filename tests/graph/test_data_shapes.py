"""Data whose shape the model does not know when it is called without them."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer.util import log_density

import retrodict as rd
from retrodict.cli.arguments import build_parser
from retrodict.cli.commands import COMMANDS
from zoo import key


def normal_mean(y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    numpyro.sample("obs", dist.Normal(mu, 1.0), obs=y)


DATA = np.random.default_rng(0).normal(1, 1, 9).astype(np.float32)


@pytest.mark.parametrize(
    "graph",
    [
        lambda: rd.trace(normal_mean, {"obs": (9,)}),
        lambda: rd.trace(normal_mean, {"obs": DATA}),
        lambda: rd.trace(normal_mean, {"obs": list(DATA)}),
        lambda: rd.trace(normal_mean, ["obs"], model_args=(DATA,)),
    ],
)
def test_the_density_broadcasts_to_the_data(graph):
    program = graph().program
    assert program.simulate(key())["obs"].shape == (9,)
    values = {"mu": jnp.array(0.3), "obs": jnp.asarray(DATA)}
    ours = sum(d.sum() for d in program.log_density(values).values())
    theirs, _ = log_density(normal_mean, (DATA,), {}, {"mu": 0.3})
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_simulated_entries_are_independent():
    draw = rd.trace(normal_mean, {"obs": (9,)}).program.simulate(key())["obs"]
    assert len(np.unique(draw)) == 9


def test_data_of_a_stated_shape_have_the_exact_posterior(tmp_path):
    compiled = rd.compile(key(), normal_mean, {"obs": (9,)}, progress_bar=False)
    loaded = rd.load(compiled.save(tmp_path / "model.rd"), normal_mean)
    precision = 1 / 4 + 9
    for artefact in (compiled, loaded):
        posterior = artefact.infer(key(1), {"obs": DATA}, 4000)
        error = 4 / np.sqrt(precision * posterior.ess)
        assert abs(posterior.mean("mu") - DATA.sum() / precision) < error


def test_data_with_more_axes_than_the_site_are_explained():
    compiled = rd.compile(key(), normal_mean, ["obs"], progress_bar=False)
    with pytest.raises(rd.DataError, match=r"more axes .* observed=\{'obs': \(9,\)\}"):
        compiled.infer(key(), {"obs": DATA})


def test_shapes_with_plates_events_and_scans():
    def model(y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("n", 3):
            numpyro.sample("in_plate", dist.Normal(mu, 1))
        numpyro.sample("vector", dist.MultivariateNormal(mu * jnp.ones(2), jnp.eye(2)))

        def step(x, _):
            x = numpyro.sample("x", dist.Normal(x, 1))
            numpyro.sample("in_scan", dist.Normal(x, 1))
            return x, None

        scan(step, mu, None, length=5)

    shapes = {"in_plate": (4, 3), "vector": (6, 2), "in_scan": (5, 7)}
    graph = rd.trace(model, shapes)
    assert {name: graph.sites[name].shape for name in shapes} == shapes
    assert graph.sites["in_plate"].index_shape == (3,)
    assert graph.sites["in_scan"].index_shape == (5,)
    for wrong in ({"in_plate": (4, 2)}, {"vector": (6, 3)}, {"in_scan": (4, 7)}):
        with pytest.raises(rd.UnsupportedModel, match=next(iter(wrong))):
            rd.trace(model, shapes | wrong)


def test_shapes_on_the_command_line():
    arguments = ["graph", "model.py:f", "--observed", "t,y=9x2", "-o", "x.svg"]
    assert build_parser(COMMANDS).parse_args(arguments).observed == {"t": None, "y": (9, 2)}
