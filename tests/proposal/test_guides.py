"""Linear guides against exact posteriors, and networks that have a guide as an input."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints

import retrodict as rd
import zoo
from oracles import slow_if
from retrodict.estimators import guide_inputs, linear_estimate
from retrodict.estimators.conditional import MADE, GuideSpec, Latent
from retrodict.estimators.encoders import Conditions, Embedding
from retrodict.estimators.scalar_bijections import (
    ABOVE,
    BELOW,
    BETWEEN,
    IDENTITY,
    SOFTPLUS,
    constrain,
    match_gaussian,
)
from retrodict.graph.evaluation import CarryKey
from retrodict.inference.methods import Inference
from retrodict.proposal.linear_guide import LinearGuide
from retrodict.proposal.proposal import Proposal
from retrodict.proposal.reference_draws import pick
from retrodict.proposal.scope import Scope

SMALL = MADE((24, 24), 4, (8,), Embedding((8,), (8,), 8, 1))


def guide_of(model, observed, latent, method="auto", **kwargs):
    inverse = rd.invert(rd.trace(model, observed, **kwargs), method)
    proposal = Proposal.of(inverse, analytic=False)
    (structure,) = (s for s in proposal.estimated.values() if latent in s.factor.latents)
    return structure.knowledge


def estimate(guide, values, index=()):
    """The linear estimate of one copy outside of time."""
    return pick(tuple(map(jnp.array, index)), guide.at(Scope(values)))


def estimate_of_step(guide, observed, time, carry):
    scope = Scope.of_step({}, observed, {}, 0, jnp.array(time), carry)
    return guide.at(scope)


def line(t=None, z=None):
    w = numpyro.sample("w", dist.Normal(jnp.array([1.0, 0.0]), jnp.array([10.0, 2.0])).to_event(1))
    with numpyro.plate("n", 6):
        z = numpyro.sample("z", dist.Normal(0, 3), obs=z)
        numpyro.sample("t", dist.Normal(w[0] + w[1] * z, 0.1), obs=t)


def test_linear_regression_has_the_exact_posterior():
    guide = guide_of(line, ("t", "z"), "w")
    values = guide.model.graph.program.simulate(zoo.key(1))
    actual = estimate(guide, values)
    design = np.stack([np.ones(6), values["z"]], 1).astype(float)
    prior = np.diag([1 / 100, 1 / 4])
    precision = prior + design.T @ design / 0.01
    mean = np.linalg.solve(
        precision, prior @ [1, 0] + design.T @ np.asarray(values["t"], float) / 0.01
    )
    np.testing.assert_allclose(actual.mean, mean, rtol=1e-3)
    root = np.asarray(actual.root, float)
    np.testing.assert_allclose(root @ root.T, np.linalg.inv(precision), rtol=1e-2)
    np.testing.assert_allclose(root @ actual.whitening, np.eye(2), atol=1e-4)
    # Each coordinate given those before it: Gaussian conditioning.
    view = linear_estimate.condition_all(actual, jnp.array([2.0, 5.0]))
    covariance = np.linalg.inv(precision)
    conditional = mean[1] + covariance[1, 0] / covariance[0, 0] * (2.0 - mean[0])
    np.testing.assert_allclose(view.mean, [mean[0], conditional], rtol=2e-3)
    np.testing.assert_allclose(view.scale[1], precision[1, 1] ** -0.5, rtol=1e-2)


def test_outliers_of_a_heavy_tailed_likelihood_have_less_influence():
    def model(t=None):
        w = numpyro.sample("w", dist.Normal(0, 10))
        with numpyro.plate("n", 9):
            numpyro.sample("t", dist.StudentT(4.0, w, 1.0), obs=t)

    guide = guide_of(model, ("t",), "w")
    t = jnp.array([0.9, 1.0, 1.1, 1.0, 0.95, 1.05, 0.9, 1.1, 60.0])
    assert abs(estimate(guide, {"t": t, "w": 0.0}).mean[0] - 1) < 0.5
    assert np.mean(t) > 7


def test_gamma_poisson_rates_have_the_exact_posterior_mean():
    guide = guide_of(zoo.pumps, ("t", "y"), "theta", "faithful")
    t, y = jnp.linspace(1.0, 50, 10), jnp.arange(10)
    values = {"alpha": jnp.array(2.5), "beta": jnp.array(0.7), "t": t, "y": y}
    actual = estimate(guide, values, (4,))
    np.testing.assert_allclose(actual.mean[0], (2.5 + 4) / (0.7 + t[4]), rtol=1e-3)
    np.testing.assert_allclose(actual.prior_mean[0], 2.5 / 0.7, rtol=1e-5)


GROUP = np.array([0, 0, 2, 1, 2, 3, 0])


def grouped(y=None):
    with numpyro.plate("groups", 4):
        a = numpyro.sample("a", dist.Normal(1.0, 2.0))
    with numpyro.plate("rows", 7):
        numpyro.sample("y", dist.Normal(a[GROUP], 0.5), obs=y)


def test_observations_are_pooled_by_group():
    guide = guide_of(grouped, ("y",), "a")
    y = jnp.arange(7.0)
    for group in range(4):
        actual = estimate(guide, {"y": y, "a": jnp.zeros(4)}, (group,))
        members = np.flatnonzero(group == GROUP)
        precision = 0.25 + 4 * len(members)
        mean = (0.25 + 4 * y[members].sum()) / precision
        np.testing.assert_allclose(actual.mean[0], mean, rtol=1e-4)
        np.testing.assert_allclose(actual.root[0, 0], precision**-0.5, rtol=1e-4)


def local_level(y=None):
    def step(x, y_t):
        x = numpyro.sample("x", dist.Normal(0.9 * x, 0.5))
        numpyro.sample("y", dist.Normal(2 * x, 0.3), obs=y_t)
        return x, None

    scan(step, 1.0, y, length=4)


def test_step_of_a_linear_state_space_is_the_kalman_update():
    guide = guide_of(local_level, ("y",), "x")
    assert guide.model.scan == 0
    y, before = jnp.array(0.8), jnp.array(-0.4)
    actual = estimate_of_step(guide, {"y": y}, 1, before)
    gain = 0.25 * 2 / (4 * 0.25 + 0.09)
    np.testing.assert_allclose(actual.mean[0], 0.9 * before + gain * (y + 2 * 0.36), rtol=1e-4)
    np.testing.assert_allclose(actual.root[0, 0] ** 2, 0.25 * (1 - 2 * gain), rtol=1e-3)
    # The whole series gives the same estimate of the step.
    values = {"y": jnp.array([0.0, 0.8, 0, 0]), "x": jnp.zeros(4)}
    carries = {CarryKey(0, 0): jnp.array([1.0, -0.4, 0, 0])}
    whole = guide.at(Scope(values, {}, carries).at_step(jnp.array(1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole, actual)


POWER = jnp.array([20.0, 50.0, 30.0])


def appliances(y=None):
    def step(on, y_t):
        with numpyro.plate("devices", 3):
            x = numpyro.sample("x", dist.Bernoulli(on))
        total = jnp.where(x == 1, POWER, 0.0).sum()
        numpyro.sample("y", dist.Normal(total, 10.0), obs=y_t)
        return jnp.where(x == 1, 0.9, 0.1), None

    scan(step, jnp.full(3, 0.3), y, length=3)


def test_bits_are_ordered_by_their_effect_and_have_innovations():
    guide = guide_of(appliances, ("y",), "x")
    assert guide.facts.order == (1, 2, 0)
    assert guide.channels == 1
    on = jnp.array([0.1, 0.9, 0.1])
    actual = estimate_of_step(guide, {"y": jnp.array(75.0)}, 0, on)
    np.testing.assert_allclose(actual.slope[0], [50, 30, 20], rtol=1e-5)
    np.testing.assert_allclose(actual.residual, 75 - on @ POWER, rtol=1e-5)
    np.testing.assert_allclose(
        actual.innovation_variance[1, 0], 100 + 0.09 * (30**2 + 20**2), rtol=1e-5
    )
    view = linear_estimate.condition_all(actual, jnp.array([1.0, 1.0, 0.0]))
    np.testing.assert_allclose(view.residual[0, 2], 75 - 50 - 30 - 2, rtol=1e-4)
    # The log odds of the last coordinate are exact: all other coordinates are given.
    ratio, prior = guide_inputs._log_odds(
        jax.tree.map(lambda leaf: leaf[..., 2], view._replace(noise_variance=jnp.zeros((0, 3))))
    )
    exact = -((75 - 80 - 20) ** 2) / 200 + (75 - 80) ** 2 / 200
    np.testing.assert_allclose(ratio, exact, rtol=1e-3)
    np.testing.assert_allclose(prior, np.log(1 / 9), rtol=1e-5)


def coin_flips():
    p = numpyro.sample("p", dist.Beta(2, 3))
    with numpyro.plate("n", 5):
        numpyro.sample("y", dist.Bernoulli(p))


def scale_only():
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(0, sigma))


def behind():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("n", 5):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1))


def chooser():
    k = numpyro.sample("k", dist.Categorical(jnp.ones(3) / 3))
    numpyro.sample("y", dist.Normal(jnp.arange(3.0)[k], 1))


def heavy():
    x = numpyro.sample("x", dist.Cauchy(0, 1))
    numpyro.sample("y", dist.Normal(x, 1))


def without_moments():
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.Cauchy(x, 1))


@pytest.mark.parametrize(
    ("model", "latent", "has_guide"),
    [
        (coin_flips, "p", True),
        (scale_only, "sigma", False),  # has no effect on a mean
        (behind, "mu", False),  # its child is latent and drawn later
        (behind, "z", True),
        (chooser, "k", False),  # categorical
        (heavy, "x", True),  # its moments come from simulation
        (without_moments, "x", False),
    ],
)
def test_which_latents_have_a_guide(model, latent, has_guide):
    guide = guide_of(model, ("y",), latent)
    assert isinstance(guide, LinearGuide) == has_guide
    if model is heavy:
        assert abs(guide.facts.centre[0]) < 0.3 and 0.5 < guide.facts.variance[0] < 5


def random_estimate(rng, number, channels):
    root = np.tril(rng.normal(size=(number, number))) + 2 * np.eye(number)
    empty = np.zeros((0, 0))
    arrays = (
        rng.normal(size=number),
        empty if channels else root,
        empty if channels else np.linalg.inv(root),
        rng.uniform(0.1, 0.9, number),
        rng.uniform(0.1, 1, number),
        rng.normal(size=channels),
        rng.normal(size=(channels, number)),
        rng.uniform(0.5, 2, channels),
    )
    return linear_estimate.LinearEstimate(*(jnp.asarray(a, float) for a in arrays))


@pytest.mark.parametrize("channels", [0, 2])
def test_sequential_conditioning_equals_conditioning_at_once(channels):
    linear = random_estimate(np.random.default_rng(0), 5, channels)
    row = jnp.array([0.3, -1.0, 2.0, 0.0, 1.0])
    whole = linear_estimate.condition_all(linear, row)
    whole = whole._replace(noise_variance=jnp.broadcast_to(whole.noise_variance, (channels, 5)))
    state = linear_estimate.initial_state(linear)
    for place in range(5):
        view = linear_estimate.condition(linear, linear.innovation_variance, state, place)
        jax.tree.map(
            lambda a, b, place=place: np.testing.assert_allclose(
                a, b[..., place], rtol=2e-4, atol=1e-5
            ),
            view,
            whole,
        )
        state = linear_estimate.update(linear, state, view, place, row[place])


def test_sequential_conditioning_on_blocks_of_bits_equals_conditioning_at_once():
    linear = random_estimate(np.random.default_rng(0), 7, 2)
    row = jnp.array([0.0, 1, 1, 0, 1, 0, 1])
    whole = guide_inputs.condition_all_bits(linear, row, slice(1, 7), 3)
    state = linear_estimate.update_bits(linear, linear_estimate.initial_state(linear), 0, row[:1])
    for number, place in enumerate((1, 4)):
        block = guide_inputs.condition_bits(linear, linear.innovation_variance, state, place, 3)
        for one, every in zip(block, whole, strict=True):
            np.testing.assert_allclose(one, every[:, number], rtol=2e-4, atol=1e-5)
        state = linear_estimate.update_bits(linear, state, place, row[place : place + 3])


def test_constant_slope_of_bits_is_stored():
    guide = guide_of(appliances, ("y",), "x")
    np.testing.assert_allclose(np.reshape(guide.facts.slope, (1, 3)), [POWER], rtol=1e-4)
    on = jnp.array([0.1, 0.9, 0.1])
    at = ({"y": jnp.array(75.0)}, 0, on)
    without = replace(guide, facts=guide.facts._replace(slope=()))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        estimate_of_step(guide, *at),
        estimate_of_step(without, *at),
    )


@pytest.mark.parametrize(
    "y", [1e30, *(pytest.param(y, marks=pytest.mark.slow) for y in (0.0, -1e30))]
)
def test_bits_have_finite_densities_for_any_observation(y):
    """Also for observations whose density underflows for every pattern of bits."""
    guide = guide_of(appliances, ("y",), "x")
    linear = estimate_of_step(guide, {"y": jnp.array(y)}, 0, jnp.full(3, 0.3))
    latents = (Latent("a", constraints.boolean, (3,)),)
    net = SMALL.build(zoo.key(0), latents, (), GuideSpec((1, 2, 0), 1))
    encoding = net.encode(Conditions({}, linear), differentiable=False)
    noise = net.noise(zoo.key(1), (20,))
    _, log_q = jax.jit(jax.vmap(lambda noise: net.sample(encoding, noise)))(noise)
    assert np.isfinite(log_q).all()


def rising(y=None):
    """Devices whose power rises with every step."""

    def step(on, inputs):
        factor, y_t = inputs
        with numpyro.plate("devices", 3):
            x = numpyro.sample("x", dist.Bernoulli(on))
        numpyro.sample("y", dist.Normal(factor * jnp.sum(POWER * x), 10.0), obs=y_t)
        return jnp.where(x == 1, 0.9, 0.1), None

    scan(step, jnp.full(3, 0.3), (jnp.arange(1.0, 4.0), y))


def test_slope_of_bits_that_changes_in_time_is_not_stored():
    guide = guide_of(rising, ("y",), "x")
    assert guide.channels == 1 and guide.facts.slope == ()


LATENTS = {
    "reals": ((Latent("a", constraints.real, (2,)), Latent("b", constraints.positive, ())), 0),
    "bits": ((Latent("a", constraints.boolean, (3,)),), 2),
    "many bits": ((Latent("a", constraints.boolean, (39,)),), 1),
    "one bit more": ((Latent("a", constraints.boolean, (6,)),), 1),
    "mixed": (
        (Latent("a", constraints.boolean, (2,)), Latent("b", constraints.unit_interval, ())),
        1,
    ),
}


# These take long, and the other kinds cover their parts.
LONG_KINDS = ("many bits", "one bit more", "mixed", "reals")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=slow_if(k in LONG_KINDS)) for k in LATENTS],
)
def test_log_q_of_draws_is_their_log_density(kind):
    latents, channels = LATENTS[kind]
    order = {"reals": (0, 1, 2), "bits": (2, 0, 1), "mixed": (1, 0, 2)}.get(kind)
    order = order or tuple(range(latents[0].shape[0]))
    net = SMALL.build(zoo.key(0), latents, (), GuideSpec(order, channels))
    linear = random_estimate(np.random.default_rng(1), len(order), channels)
    encoding = net.encode(Conditions({}, linear))
    noise = net.noise(zoo.key(1), (400,))
    x, log_q = jax.jit(jax.vmap(lambda noise: net.sample(encoding, noise)))(noise)
    log_prob = jax.jit(jax.vmap(lambda x: net.log_prob(encoding, x)))
    again = log_prob(x)
    np.testing.assert_allclose(log_q, again, atol=2e-4)
    if kind == "bits":
        rows = jnp.array(np.indices((2, 2, 2)).reshape(3, -1).T)
        each = jnp.exp(log_prob({"a": rows}))
        np.testing.assert_allclose(each.sum(), 1, rtol=1e-4)
        # Frequencies of 400 draws, to four standard errors.
        frequencies = np.array(
            [(np.asarray(x["a"]) == row).all(1).mean() for row in np.asarray(rows)]
        )
        error = np.sqrt(np.asarray(each * (1 - each)) / 400)
        assert np.all(np.abs(frequencies - each) < 4 * error + 1e-3)


def test_guided_density_integrates_to_one():
    latents = (Latent("a", constraints.positive, ()),)
    net = SMALL.build(zoo.key(0), latents, (), GuideSpec((0,), 0))
    encoding = net.encode(Conditions({}, random_estimate(np.random.default_rng(2), 1, 0)))
    z = jnp.linspace(-16, 16, 20001)
    log_density = jax.vmap(lambda z: net.log_prob(encoding, {"a": jnp.exp(z)}) + z)
    density = jnp.exp(jax.jit(log_density)(z))
    # A Cauchy has 0.04 of its mass beyond ±16.
    np.testing.assert_allclose(jnp.trapezoid(density, z), 1 - SMALL.wide * 0.04, atol=1e-3)


BIJECTIONS = {
    IDENTITY: (0.0, 1.0, 3.0, 0.5),
    ABOVE: (2.0, 3.0, 5.0, 0.5),
    BELOW: (1.0, 2.0, -3.0, 0.5),
    BETWEEN: (0.0, 4.0, 1.0, 0.2),
    SOFTPLUS: (0.0, 1.0, 2.0, 0.2),
}


@pytest.mark.parametrize("bijection", BIJECTIONS)
def test_a_normal_is_matched_under_every_bijection(bijection):
    lower, upper, mean, sd = BIJECTIONS[bijection]
    latent = Latent("a", constraints.real, ())
    net = SMALL.build(zoo.key(0), (latent,), ())
    c = jax.tree.map(lambda column: column[0], net._constants())
    c = c._replace(bijection=jnp.array(bijection), lower=jnp.array(lower), upper=jnp.array(upper))
    z, scale = match_gaussian(jnp.array(mean), jnp.array(sd), c)
    draws = z + scale * jax.random.normal(zoo.key(0), (20000,))
    x = jax.jit(jax.vmap(lambda z: constrain(z, c, (bijection,))))(draws)
    # Matching is to second order in sd: within a tenth of it.
    assert abs(x.mean() - mean) < 0.1 * sd
    assert abs(x.std() - sd) < 0.15 * sd


@pytest.mark.slow
def test_guide_gives_narrow_posteriors_after_short_training():
    """Posteriors a thousand times narrower than the prior, after a few steps of training."""

    def model(y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("n", 4):
            numpyro.sample("y", dist.Normal(mu, 0.02), obs=y)

    training = rd.Training(max_steps=200, batch_size=64, dataset_size=2048, heldout_size=256)
    compiled = rd.compile(
        zoo.key(0), model, ("y",), estimator=SMALL, training=training, progress_bar=False
    )
    values = compiled.graph.program.simulate(zoo.key(5))
    posterior = compiled.infer(zoo.key(1), {"y": values["y"]}, 1000, method="importance")
    assert posterior.ess > 500
    assert abs(posterior.mean("mu") - values["y"].mean()) < 4 * 0.01 / np.sqrt(posterior.ess)


def test_innovations_have_fourier_features():
    x = np.array([-3000.0, -7.3, 0.0, 0.4, 55.0, 900.0], "f4")
    sines, cosines = (
        jnp.stack(waves, -1) for waves in guide_inputs._fourier_features(jnp.asarray(x))
    )
    angles = 2 * np.pi * x.astype(float)[:, None] / [4.0, 8.0, 16.0, 32.0, 64.0]
    # Rounding error of the angle in float32.
    allowed = 1e-5 + 4 * np.finfo("f4").eps * np.abs(angles)
    assert np.all(np.abs(sines - np.sin(angles)) < allowed)
    assert np.all(np.abs(cosines - np.cos(angles)) < allowed)


def scaled(factor, y=None):
    x = numpyro.sample("x", dist.Bernoulli(jnp.full(3, 0.3)).to_event(1))
    numpyro.sample("y", dist.Normal(factor * jnp.sum(POWER * x), 10.0), obs=y)


def test_slope_of_bits_is_recomputed_for_other_arguments():
    """The slope depends on the arguments of the model."""
    inverse = rd.invert(rd.trace(scaled, ("y",), model_args=(1.0,)))
    proposal = Proposal.of(inverse, analytic=False)
    assert all(facts.slope for facts in proposal.facts.values())
    resized = Inference(proposal).called_with((2.0,), None).proposal
    (structure,) = resized.estimated.values()
    actual = estimate(structure.knowledge, {"y": jnp.array(75.0)})
    order = np.array(structure.knowledge.facts.order)
    np.testing.assert_allclose(actual.slope[0], 2 * np.asarray(POWER)[order], rtol=1e-5)
