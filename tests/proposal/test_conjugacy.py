"""Conditionals that belong to a known family: recognition, and answers without training."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp
from numpyro.contrib.control_flow import scan
from scipy import stats

import retrodict as rd
import zoo
from retrodict.estimators.analytic.gamma_beta import Gamma
from retrodict.estimators.conditional import ConditionalMADE, has_weights
from retrodict.proposal.closed_conditional import ClosedConditional
from retrodict.proposal.proposal import Proposal

SHORT = rd.Training(max_steps=60, dataset_size=1024, heldout_size=256)


def compile_short(model, observed, **options):
    return rd.compile(zoo.key(0), model, observed, training=SHORT, progress_bar=False, **options)


def families(model, observed, **kwargs):
    """The name of the family of every factor's conditional, None if it is not recognised."""
    proposal = Proposal.of(rd.invert(rd.trace(model, observed, model_kwargs=kwargs)))
    knowledge = {factor: s.knowledge for factor, s in proposal.estimated.items()}
    return {
        factor: known.family.name if isinstance(known, ClosedConditional) else None
        for factor, known in knowledge.items()
    }


def scales(n=4):
    """A precision with its conjugate prior."""
    tau = numpyro.sample("tau", dist.Gamma(2.0, 3.0))
    with numpyro.plate("n", n):
        numpyro.sample("y", dist.Normal(0.0, tau**-0.5))


def variances(n=4):
    v = numpyro.sample("v", dist.InverseGamma(3.0, 2.0))
    with numpyro.plate("n", n):
        numpyro.sample("y", dist.Normal(0.0, jnp.sqrt(v)))


def events():
    """Counts that are one multivariate event."""
    x = numpyro.sample("x", dist.Gamma(2.0, 1.0))
    numpyro.sample("y", dist.Poisson(x * jnp.array([1.0, 2.0])).to_event(1))


TRIALS = np.array([12, 7, 30])


def coins(n=3):
    """Probabilities with a beta prior of unknown parameters."""
    a = numpyro.sample("a", dist.HalfNormal(3.0))
    b = numpyro.sample("b", dist.HalfNormal(3.0))
    with numpyro.plate("n", n):
        p = numpyro.sample("p", dist.Beta(0.5 + a, 0.5 + b))
        numpyro.sample("y", dist.Binomial(TRIALS, p))


def labels(n=5):
    """A mixture with explicit labels."""
    with numpyro.plate("n", n):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.5, 0.3, 0.2])))
        numpyro.sample("y", dist.Normal(jnp.array([-2.0, 0.0, 3.0])[z], 1.0))


def cauchy():
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Cauchy(x, 1.0))


def half():
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(0.0, s))


@pytest.mark.parametrize(
    ("model", "observed", "expected"),
    [
        (scales, ("y",), {("tau",): "gamma"}),
        (variances, ("y",), {("v",): "inverse gamma"}),
        (events, ("y",), {("x",): "gamma"}),
        pytest.param(coins, ("y",), {("a", "b"): None, ("p",): "beta"}, marks=pytest.mark.slow),
        (labels, ("y",), {("z",): "finite"}),
        (cauchy, ("y",), {("x",): None}),
        (half, ("y",), {("s",): None}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_families_are_recognised_by_densities(model, observed, expected):
    assert families(model, observed) == expected


def test_conditionals_with_parents_drawn_later_are_not_closed():
    """With such parents the children's densities are not the conditional."""
    graph = rd.trace(zoo.pumps, ("t", "y"), model_kwargs={"n": 3})
    blanket = Proposal.of(rd.invert(graph, "blanket")).estimated
    assert not isinstance(blanket[("theta",)].knowledge, ClosedConditional)
    faithful = Proposal.of(rd.invert(graph, "faithful")).estimated
    assert faithful[("theta",)].knowledge.family == Gamma()


def test_conjugate_answers_need_no_training(tmp_path):
    compiled = compile_short(scales, ("y",))
    (history,) = compiled.history.networks.values()
    assert history.stopped == "no weights to train"
    assert not any(map(has_weights, compiled.networks.values()))
    y = np.array([0.5, -1.0, 2.0, 0.1])
    posterior = compiled.infer(zoo.key(1), {"y": y}, 4000)
    exact = stats.gamma(2 + 2, scale=1 / (3 + (y**2).sum() / 2))
    assert posterior.ess > 0.97 * 4000 and posterior.trust == "good"
    assert abs(posterior.mean("tau") - exact.mean()) < 4.5 * exact.std() / np.sqrt(4000)
    evidence = stats.gamma(2, scale=1 / 3).logpdf(1.0) + stats.norm(0, 1).logpdf(y).sum()
    evidence -= exact.logpdf(1.0)
    assert abs(posterior.log_evidence - evidence) < 5 * posterior.log_evidence_se + 1e-4
    compiled.save(tmp_path / "scales.rd")
    same = rd.load(tmp_path / "scales.rd", scales).infer(zoo.key(1), {"y": y}, 4000)
    np.testing.assert_array_equal(same.samples["tau"], posterior.samples["tau"])
    six = compiled.infer(zoo.key(1), {"y": np.ones(6)}, 2000, model_kwargs={"n": 6})
    assert abs(six.mean("tau") - 5 / 6) < 0.05


@pytest.mark.slow
def test_evidence_of_betas_with_different_numbers_of_trials():
    """The marginal likelihood of each coin is beta-binomial."""
    y = np.array([3, 5, 9])
    posterior = compile_short(coins, ("y",)).infer(zoo.key(1), {"y": y}, 4000)
    grid = np.linspace(0.005, 15, 600)
    prior = stats.halfnorm(scale=3.0).pdf(grid)
    a, b = np.meshgrid(grid, grid, indexing="ij")
    joint = np.outer(prior, prior)
    for n, k in zip(TRIALS, y, strict=True):
        joint = joint * stats.betabinom(n, 0.5 + a, 0.5 + b).pmf(k)
    evidence = np.log(np.trapezoid(np.trapezoid(joint, grid), grid))
    assert abs(posterior.log_evidence - evidence) < 4.5 * posterior.log_evidence_se + 2e-3


def test_networks_are_built_if_hidden_layers_are_given():
    compiled = compile_short(scales, ("y",), estimator=rd.MADE(hidden=(8,)))
    (network,) = compiled.networks.values()
    assert isinstance(network, ConditionalMADE)


def sprinkler_network(wet=None):
    """The sprinkler network, whose states can be enumerated."""
    cloudy = numpyro.sample("cloudy", dist.Bernoulli(0.5))
    sprinkler = numpyro.sample("sprinkler", dist.Bernoulli(jnp.where(cloudy == 1, 0.1, 0.5)))
    rain = numpyro.sample("rain", dist.Bernoulli(jnp.where(cloudy == 1, 0.8, 0.2)))
    probability = jnp.array([[0.0, 0.9], [0.9, 0.99]])[sprinkler, rain]
    numpyro.sample("wet", dist.Bernoulli(probability), obs=wet)


def test_finite_networks_have_exact_evidence():
    compiled = compile_short(sprinkler_network, ("wet",))
    posterior = compiled.infer(zoo.key(1), {"wet": 1}, 2000)
    joint = {
        (c, s, r): 0.5
        * (np.array([0.5, 0.1])[c] if s else 1 - np.array([0.5, 0.1])[c])
        * (np.array([0.2, 0.8])[c] if r else 1 - np.array([0.2, 0.8])[c])
        * np.array([[0.0, 0.9], [0.9, 0.99]])[s, r]
        for c, s, r in product((0, 1), repeat=3)
    }
    assert abs(posterior.log_evidence - np.log(sum(joint.values()))) < 1e-4
    assert posterior.ess > 1999 and posterior.trust == "good"
    rain = sum(p for (_, _, r), p in joint.items() if r) / sum(joint.values())
    assert abs(posterior.mean("rain") - rain) < 4.5 * 0.5 / np.sqrt(2000)


A, Q = np.array([[0.9, 0.3], [-0.2, 0.8]]), np.array([[1.0, 0.6], [0.6, 0.8]])


def plane(steps=6):
    """A state of two correlated coordinates, one of which is observed."""

    def step(x, _):
        x = numpyro.sample("x", dist.MultivariateNormal(jnp.asarray(A) @ x, jnp.asarray(Q)))
        numpyro.sample("y", dist.Normal(x[0], 0.5))
        return x, None

    scan(step, jnp.zeros(2), None, length=steps)


@pytest.mark.slow
def test_correlated_normal_states_agree_with_the_kalman_filter():
    assert families(plane, ("y",)) == {("x",): "normal"}
    compiled = compile_short(plane, ("y",))
    y = np.array([0.3, 1.0, -2.0, 0.4, 0.0, 1.5])
    mean, cov, log_z = np.zeros(2), np.zeros((2, 2)), 0.0
    for value in y:
        mean, cov = A @ mean, A @ cov @ A.T + Q
        total = cov[0, 0] + 0.25
        log_z += stats.norm.logpdf(value, mean[0], np.sqrt(total))
        gain = cov[:, 0] / total
        mean, cov = mean + gain * (value - mean[0]), cov - np.outer(gain, cov[0])
    posterior = compiled.infer(zoo.key(1), {"y": y}, 4000)
    assert abs(posterior.log_evidence - log_z) < 4.5 * posterior.log_evidence_se
    weights = np.exp(posterior.filtered_log_weights[-1])
    last = np.average(posterior.filtered["x"][-1], axis=0, weights=weights)
    np.testing.assert_allclose(last, mean, atol=4.5 * np.sqrt(np.diag(cov).max() / 2000))


def chain(steps=5):
    """A hidden Markov model."""
    move = jnp.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
    show = jnp.array([[0.6, 0.3, 0.1], [0.2, 0.6, 0.2], [0.1, 0.2, 0.7]])

    def step(z, _):
        z = numpyro.sample("z", dist.Categorical(move[z]))
        numpyro.sample("y", dist.Categorical(show[z]))
        return z, None

    scan(step, 0, None, length=steps)


def test_hidden_markov_models_agree_with_the_forward_algorithm():
    compiled = compile_short(chain, ("y",))
    y = np.array([2, 2, 0, 1, 2])
    move = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
    show = np.array([[0.6, 0.3, 0.1], [0.2, 0.6, 0.2], [0.1, 0.2, 0.7]])
    forward = np.array([1.0, 0, 0])
    for value in y:
        forward = (forward @ move) * show[:, value]
    runs = [compiled.infer(zoo.key(seed), {"y": y}, 2000) for seed in range(5)]
    errors = [run.log_evidence - np.log(forward.sum()) for run in runs]
    assert np.all(np.abs(errors) < 4.5 * np.array([run.log_evidence_se for run in runs]) + 1e-4)
    assert all(run.trust == "good" for run in runs)


def test_states_of_probability_zero_are_not_drawn():
    def gate():
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.0, 0.5, 0.5])))
        numpyro.sample("y", dist.Normal(1.0 * z, 0.1))

    posterior = compile_short(gate, ("y",)).infer(zoo.key(1), {"y": 0.0}, 500)
    assert set(np.unique(posterior.samples["z"])) == {1}
    evidence = logsumexp(jnp.log(0.5) + dist.Normal(jnp.array([1.0, 2.0]), 0.1).log_prob(0.0))
    assert abs(posterior.log_evidence - float(evidence)) < 1e-3
