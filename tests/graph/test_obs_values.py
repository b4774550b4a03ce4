"""Values that a model passes to its own sites by `obs=`: constants, latents, arguments."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan

import retrodict as rd
from retrodict.graph.validate import check_data
from zoo import key


def observed_at_a_latent():
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(3.0, 1.0), obs=x)


def observed_at_a_function_of_a_latent(z=None):
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(3.0, 1.0), obs=jnp.sin(x))
    numpyro.sample("z", dist.Normal(x, 1.0), obs=z)


def observed_at_a_latent_of_a_scan():
    def step(x, _):
        x = numpyro.sample("x", dist.Normal(x, 1))
        numpyro.sample("y", dist.Normal(0, 1), obs=2 * x)
        return x, None

    scan(step, 0.0, None, length=3)


def observed_at_latents_of_a_loop():
    for t in range(4):
        x = numpyro.sample(f"x_{t}", dist.Normal(0, 1))
        numpyro.sample(f"y_{t}", dist.Normal(0, 1), obs=x)


@pytest.mark.parametrize(
    ("model", "observed", "sites"),
    [
        (observed_at_a_latent, ["y"], ("y", "x")),
        (observed_at_a_function_of_a_latent, ["z"], ("y", "x")),
        (observed_at_a_latent_of_a_scan, ["y"], ("y", "x")),
        (observed_at_latents_of_a_loop, [f"y_{t}" for t in range(4)], ("y_0", "x_0")),
    ],
)
def test_a_value_that_depends_on_a_latent_is_refused(model, observed, sites):
    with pytest.raises(rd.UnsupportedModel, match=f"'{sites[0]}' .* latent site '{sites[1]}'"):
        rd.trace(model, observed)


def test_a_value_that_depends_on_an_observed_site_is_accepted():
    def model(y=None):
        x = numpyro.sample("x", dist.Normal(0, 1))
        y = numpyro.sample("y", dist.Normal(x, 1), obs=y)
        numpyro.sample("double", dist.Normal(2 * x, 1), obs=2 * y)

    assert rd.trace(model, ["y", "double"]).latent == ("x",)
    with pytest.raises(rd.UnsupportedModel, match="Name 'double' in `observed`"):
        rd.trace(model, ["y"])


def autoregression(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("steps", len(y) - 1):
        numpyro.sample("y", dist.Normal(a * y[:-1], 1), obs=y[1:])


def test_an_argument_that_is_data_and_enters_a_density_is_needed_for_every_data_set():
    """A conjugate regression on the series' own past."""
    first, second = np.random.default_rng(0).normal(size=(2, 12)).astype(np.float32)
    with pytest.warns(UserWarning, match="'y' holds the data of site 'y'"):
        compiled = rd.compile(key(), autoregression, ["y"], model_args=(first,), progress_bar=False)
    with pytest.raises(rd.DataError, match=r"argument 'y'.*model_args"):
        compiled.infer(key(1), {"y": second[1:]})
    with pytest.raises(rd.DataError, match="argument 'y'"):
        compiled.infer_many(key(1), {"y": np.stack([first[1:], second[1:]])})
    with pytest.raises(rd.DataError, match="argument 'y'"):
        rd.calibrate(key(1), compiled, num_datasets=2, num_particles=10)
    for series in (first, second):
        posterior = compiled.infer(key(1), {"y": series[1:]}, 4000, model_args=(series,))
        precision = 1 + np.sum(series[:-1] ** 2)
        exact = np.sum(series[:-1] * series[1:]) / precision
        assert abs(posterior.mean("a") - exact) < 4 / np.sqrt(precision * posterior.ess)


def test_an_argument_that_is_only_data_may_be_anything():
    def model(y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("n", 3):
            numpyro.sample("y", dist.Normal(mu, 1), obs=None if y is None else y - y.mean())

    graph = rd.trace(model, ["y"], model_args=(np.arange(3.0),))
    assert graph.shared_arguments == ()
    np.testing.assert_array_equal(check_data(graph, {"y": [7, 8, 9]})["y"], [7, 8, 9])


def prior_from_data(y=None):
    mu = numpyro.sample("mu", dist.Normal(0.0 if y is None else y.mean(), 1))
    with numpyro.plate("n", 3):
        numpyro.sample("obs", dist.Normal(mu, 1), obs=y)


def past_from_data(y=None):
    a = numpyro.sample("a", dist.Normal(0, 1))

    def step(past, current):
        numpyro.sample("y", dist.Normal(a * past, 1), obs=current)
        return (past if current is None else current), None

    scan(step, 0.0, y, length=4)


def loop_over_data(y=None):
    a = numpyro.sample("a", dist.Normal(0, 1))
    for t in range(4):
        mean = 0.0 if t == 0 or y is None else a * y[t - 1]
        numpyro.sample(f"y_{t}", dist.Normal(mean, 1), obs=None if y is None else y[t])


@pytest.mark.parametrize(
    ("model", "observed", "dependent"),
    [
        (prior_from_data, ["obs"], "mu"),
        (past_from_data, ["y"], "y"),
        (loop_over_data, [f"y_{t}" for t in range(4)], "y_1"),
    ],
)
def test_data_that_would_enter_densities_through_an_argument_are_refused(
    model, observed, dependent
):
    with pytest.raises(rd.UnsupportedModel, match=f"'y' of the model .*density of.*'{dependent}'"):
        rd.trace(model, observed)


def test_a_series_that_carries_the_returned_value_is_accepted():
    def model(y=None):
        a = numpyro.sample("a", dist.Normal(0, 1))

        def step(past, current):
            current = numpyro.sample("y", dist.Normal(a * past, 1), obs=current)
            return current, None

        scan(step, 0.0, y, length=4)

    for args in ((), (np.arange(4.0),)):
        assert rd.trace(model, ["y"], model_args=args).shared_arguments == ()


def soft_constraint(y=None):
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("fixed", dist.Normal(x, 1), obs=2.0)
    total = 2 * x
    numpyro.sample("recorded", dist.Delta(total), obs=total)
    with handlers.scale(scale=1.0):
        numpyro.sample("y", dist.Normal(x, 1), obs=y)


def test_a_site_observed_at_a_constant_needs_no_data(tmp_path):
    """Two normal observations with equal variances, of which one is a constant of the model."""
    compiled = rd.compile(key(), soft_constraint, ["y"], progress_bar=False)
    assert set(compiled.graph.observed) == {"fixed", "y"}
    loaded = rd.load(compiled.save(tmp_path / "model.rd"), soft_constraint)
    for artefact in (compiled, loaded):
        posterior = artefact.infer(key(1), {"y": 1.0}, 4000)
        assert abs(posterior.mean("x") - 1) < 4 * np.sqrt(1 / 3 / posterior.ess)
        covariance = np.ones((2, 2)) + np.eye(2)
        exact = dist.MultivariateNormal(jnp.zeros(2), covariance).log_prob(jnp.array([2.0, 1.0]))
        assert abs(posterior.log_evidence - exact) < 4 * posterior.log_evidence_se + 1e-4
        doubled = 2 * posterior.samples["x"]
        np.testing.assert_allclose(posterior.samples["recorded"], doubled, atol=1e-6)
    many = compiled.infer_many(key(1), {"y": np.array([1.0, 4.0])}, 4000)
    np.testing.assert_allclose(many.mean("x"), [1, 2], atol=0.05)


def conditioned_scan(y=None):
    def step(x, current):
        x = numpyro.sample("x", dist.Normal(x, 1))
        numpyro.sample("w", dist.Normal(x, 1))
        numpyro.sample("y", dist.Normal(x, 1), obs=current)
        return x, None

    with handlers.condition(data={"w": np.arange(4.0)}):
        scan(step, 0.0, y, length=4)


def test_a_condition_around_a_scan_observes_the_site():
    graph = rd.trace(conditioned_scan, ["y"])
    assert graph.latent == ("x",)
    np.testing.assert_array_equal(graph.constant_data["w"], np.arange(4))


def test_a_filter_takes_the_constants_of_each_step():
    """Both observations of a step have variance one: their mean is one with variance one half."""
    compiled = rd.compile(key(), conditioned_scan, ["y"], inverse="filter", progress_bar=False)
    data = [0.5, 1.0, 3.0, 2.0]
    mean, variance = 0.0, 0.0
    state = compiled.filter_init(key(1), 4000)
    for t, y in enumerate(data):
        state, _ = compiled.filter_step(key(t), state, {"y": y})
        gain = (variance + 1) / (variance + 1 + 0.5)
        mean, variance = mean + gain * ((y + t) / 2 - mean), gain * 0.5
    estimate = np.sum(np.exp(state.log_weights) * np.asarray(state.samples["x"]))
    assert abs(estimate - mean) < 6 * np.sqrt(variance / 4000)
    with pytest.raises(rd.DataError, match="inputs for 4 steps"):
        compiled.filter_step(key(9), state, {"y": 0.0})


def substituted():
    with handlers.substitute(data={"x": 1.0}):
        x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(x, 1))


def substituted_scan():
    def step(x, _):
        x = numpyro.sample("x", dist.Normal(x, 1))
        numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    with handlers.substitute(data={"x": np.arange(3.0)}):
        scan(step, 0.0, None, length=3)


@pytest.mark.parametrize("model", [substituted, substituted_scan])
def test_a_substituted_value_is_refused(model):
    with pytest.raises(rd.UnsupportedModel, match="'x' is set inside the model"):
        rd.trace(model, ["y"])


def test_deltas_that_are_factors_or_data_are_refused():
    def with_density():
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("d", dist.Delta(x, log_density=-x))
        numpyro.sample("y", dist.Normal(x, 1))

    def with_data():
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("d", dist.Delta(x), obs=1.0)
        numpyro.sample("y", dist.Normal(x, 1))

    for model, match in ((with_density, "log_density"), (with_data, "'d' is a Delta .* observed")):
        with pytest.raises(rd.UnsupportedModel, match=match):
            rd.trace(model, ["y"])
