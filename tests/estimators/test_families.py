"""Conditionals without networks: densities by quadrature, answers by conjugacy and by Kalman."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints
from retrodict.estimators.analytic.families import Finite, Normal
from retrodict.estimators.analytic.proposal import Exact
from scipy import special, stats

import retrodict as rd
import zoo
from retrodict.estimators.analytic.gamma_beta import Beta, BetaParameters, Gamma, GammaParameters
from retrodict.estimators.conditional import EXPECTED, ConditionalMADE, Latent
from retrodict.proposal.conjugacy import Conditional
from retrodict.proposal.proposal import Proposal

POSITIVE = (Latent("x", constraints.positive, ()),)
SHORT = rd.Training(max_steps=60, dataset_size=1024, heldout_size=256)


def quietly(model, observed, **options):
    return rd.compile(zoo.key(0), model, observed, training=SHORT, progress_bar=False, **options)


def family_of(model, observed, **kwargs):
    """For every factor, the name of its conditional's family, if it is known of one."""
    proposal = Proposal.of(rd.invert(rd.trace(model, observed, model_kwargs=kwargs)))
    return {
        factor: a.guide.family.name if isinstance(a.guide, Conditional) else None
        for factor, a in proposal.assemblies.items()
    }


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 1.9, 2.1, 40.0])
def test_likenesses_of_a_gamma_are_densities_and_near_it(shape, inverse):
    exact = Exact.of(Gamma(inverse), POSITIVE, 1e-3)
    parameters = GammaParameters(jnp.array(shape), jnp.log(jnp.array(3.0)))
    z = np.linspace(-60 / min(shape, 1.0), 8, 60_001) - np.log(3.0)
    z = z[np.abs(z) < 80]
    z = np.sort(-z) if inverse else z
    x = np.exp(z)
    log_q = jax.jit(jax.vmap(lambda x: exact.log_prob({EXPECTED: parameters}, {"x": x})))(x)
    q = np.exp(np.asarray(log_q, float)) * x  # of z
    # what lies beyond the grid: the slow tail, and the wide component's
    assert abs(np.trapezoid(q, z) - 1) < (0.03 if shape < 0.1 else 3e-3)
    own = stats.invgamma(shape, scale=3.0) if inverse else stats.gamma(shape, scale=1 / 3.0)
    p = own.pdf(x) * x
    second = np.trapezoid(np.where(p > 0, p**2 / q, 0.0), z)
    assert 1 / second > 0.99


@pytest.mark.parametrize("shape", [0.3, 1.5, 6.0])
def test_draws_of_a_gamma_are_weighted_to_its_moments(shape):
    exact = Exact.of(Gamma(), POSITIVE, 1e-2)
    parameters = GammaParameters(jnp.array(shape), jnp.log(jnp.array(2.0)))
    noise = exact.noise(zoo.key(1), (20_000,))
    x, log_q = jax.jit(jax.vmap(lambda n: exact.draw(parameters, n)))(noise)
    again = jax.jit(jax.vmap(lambda x: exact.log_prob({EXPECTED: parameters}, x)))(x)
    np.testing.assert_allclose(log_q, again, atol=1e-4)
    x = np.asarray(x["x"], float)
    w = np.exp(stats.gamma(shape, scale=0.5).logpdf(x) - np.asarray(log_q))
    for fn, wanted in ((np.ones_like, 1.0), (lambda x: x, shape / 2)):
        found = w * fn(np.minimum(x, 1e6))
        assert abs(found.mean() - wanted) < 4.5 * found.std() / np.sqrt(found.size)


SHAPES = [(0.7, 0.8), (0.5, 4.0), (9.0, 0.8), (2.0, 2.0), (4.0, 4.0), (19.0, 5.0), (50.0, 60.0)]
UNIT = (Latent("x", constraints.unit_interval, ()),)


@pytest.mark.parametrize("shapes", SHAPES)
def test_likenesses_of_a_beta_are_densities_and_near_it(shapes):
    exact = Exact.of(Beta(), UNIT, 1e-3)
    parameters = BetaParameters(*map(jnp.asarray, shapes))
    z = np.linspace(-30 / min(*shapes, 1), 16, 60_001)
    log_q = jax.jit(
        jax.vmap(lambda x: exact.log_prob({EXPECTED: parameters}, {"x": x}))
    )(special.expit(z))  # fmt: skip
    log_slope = special.log_expit(z) + special.log_expit(-z)
    q, p = np.exp(np.asarray(log_q, float) + log_slope), stats.beta(*shapes)
    # what lies beyond the grid: the slow tail, above which floats near one are too few
    beyond = p.sf(special.expit(z[-1])) + p.cdf(special.expit(z[0]))
    assert abs(np.trapezoid(q, z) - 1) < 3e-3 + 2 * beyond
    own = np.exp(p.logpdf(special.expit(z)) + log_slope)
    second = np.trapezoid(own**2 / q, z)
    assert (1 - beyond) ** 2 / second > 0.98
    noise = exact.noise(zoo.key(1), (20_000,))
    x, log_q = jax.jit(jax.vmap(lambda n: exact.draw(parameters, n)))(noise)
    again = jax.jit(jax.vmap(lambda x: exact.log_prob({EXPECTED: parameters}, x)))(x)
    np.testing.assert_allclose(log_q, again, atol=1e-3)
    x = np.asarray(x["x"], float)
    w = np.exp(p.logpdf(x) - np.asarray(log_q, float))
    for found, wanted in ((w, 1.0), (w * x, p.mean())):
        assert abs(found.mean() - wanted) < 4.5 * found.std() / np.sqrt(found.size) + 1e-4


def test_a_normal_is_read_from_slope_and_curvature():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(3, 3))
    precision, centre = root @ root.T + np.eye(3), np.array([300.0, -2.0, 0.1])

    def target(x):
        gap = x - centre
        return -0.5 * jnp.einsum("...i,ij,...j->...", gap, jnp.asarray(precision), gap)

    found = Normal().parameters(target, jnp.zeros((2, 3)))
    np.testing.assert_allclose(found.centre[1], centre, atol=1e-3)
    np.testing.assert_allclose(found.root[0] @ found.root[0].T, np.linalg.inv(precision), atol=1e-4)
    np.testing.assert_allclose(found.white[0] @ found.root[0], np.eye(3), atol=1e-4)
    latents = (Latent("x", constraints.real_vector, (3,)),)
    exact, one = Exact.of(Normal(), latents), jax.tree.map(lambda leaf: leaf[0], found)
    x, log_q = exact.draw(one, exact.noise(zoo.key(0)))
    wanted = stats.multivariate_normal(centre, np.linalg.inv(precision)).logpdf(np.asarray(x["x"]))
    np.testing.assert_allclose(log_q, wanted, atol=1e-2)


@pytest.mark.parametrize("sizes", [(2,), (3, 2), (2, 2, 4)])
def test_finite_states_have_their_chances(sizes):
    latents = tuple(
        Latent(f"x{i}", constraints.integer_interval(1, size), ()) for i, size in enumerate(sizes)
    )
    family = Finite(sizes)
    exact = Exact.of(family, latents)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=np.prod(sizes))).at[1].set(-jnp.inf)
    noise = exact.noise(zoo.key(2), (20_000,))
    x, log_q = jax.jit(jax.vmap(lambda n: exact.draw(logits, n)))(noise)
    states = np.array(list(product(*map(range, sizes)))) + 1
    drawn = np.stack([np.asarray(x[latent.name]) for latent in latents], -1)
    place = np.array([np.flatnonzero((states == row).all(1))[0] for row in drawn])
    chances = np.asarray(jax.nn.softmax(logits))
    counts = np.bincount(place, minlength=len(states))
    assert counts[1] == 0
    error = np.sqrt(chances * (1 - chances) / place.size)
    np.testing.assert_array_less(np.abs(counts / place.size - chances), 4.5 * error + 1e-9)
    np.testing.assert_allclose(np.exp(log_q), chances[place], rtol=1e-3)
    again = jax.jit(jax.vmap(lambda x: exact.log_prob({EXPECTED: logits}, x)))(x)
    np.testing.assert_allclose(log_q, again, atol=1e-3)


def scales(n=4):
    """Precisions and variances, with their conjugate priors."""
    tau = numpyro.sample("tau", dist.Gamma(2.0, 3.0))
    with numpyro.plate("n", n):
        numpyro.sample("y", dist.Normal(0.0, tau**-0.5))


def variances(n=4):
    v = numpyro.sample("v", dist.InverseGamma(3.0, 2.0))
    with numpyro.plate("n", n):
        numpyro.sample("y", dist.Normal(0.0, jnp.sqrt(v)))


def events():
    """Counts that are one event."""
    x = numpyro.sample("x", dist.Gamma(2.0, 1.0))
    numpyro.sample("y", dist.Poisson(x * jnp.array([1.0, 2.0])).to_event(1))


TRIALS = np.array([12, 7, 30])


def coins(n=3):
    """Shares of their own, of two more that are not known."""
    a = numpyro.sample("a", dist.HalfNormal(3.0))
    b = numpyro.sample("b", dist.HalfNormal(3.0))
    with numpyro.plate("n", n):
        p = numpyro.sample("p", dist.Beta(0.5 + a, 0.5 + b))
        numpyro.sample("y", dist.Binomial(TRIALS, p))


def labels(n=5):
    """A mixture with its labels."""
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
    ("model", "observed", "wanted"),
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
def test_families_are_recognised_by_densities(model, observed, wanted):
    assert family_of(model, observed) == wanted


def test_the_blanket_of_a_hierarchy_leaves_its_leaves_open():
    """Where parents are drawn later, children's densities are not the conditional."""
    graph = rd.trace(zoo.pumps, ("t", "y"), model_kwargs={"n": 3})
    assemblies = Proposal.of(rd.invert(graph, "blanket")).assemblies
    assert not isinstance(assemblies[("theta",)].guide, Conditional)
    faithful = Proposal.of(rd.invert(graph, "faithful")).assemblies
    assert faithful[("theta",)].guide.family == Gamma()


def test_conjugate_answers_come_without_training(tmp_path):
    compiled = quietly(scales, ("y",))
    (history,) = compiled.history.networks.values()
    assert history.stopped == "no weights to train"
    assert not any(map(has_weights, compiled.networks.values()))
    y = np.array([0.5, -1.0, 2.0, 0.1])
    found = compiled.infer(zoo.key(1), {"y": y}, 4000)
    own = stats.gamma(2 + 2, scale=1 / (3 + (y**2).sum() / 2))
    assert found.ess > 0.97 * 4000 and found.trust == "good"
    assert abs(found.mean("tau") - own.mean()) < 4.5 * own.std() / np.sqrt(4000)
    shape, rate = 4.0, 3 + (y**2).sum() / 2
    wanted = stats.gamma(2, scale=1 / 3).logpdf(1.0) + stats.norm(0, 1).logpdf(y).sum()
    wanted -= stats.gamma(shape, scale=1 / rate).logpdf(1.0)
    assert abs(found.log_evidence - wanted) < 5 * found.log_evidence_se + 1e-4
    compiled.save(tmp_path / "scales.rd")
    same = rd.load(tmp_path / "scales.rd", scales).infer(zoo.key(1), {"y": y}, 4000)
    np.testing.assert_array_equal(same.samples["tau"], found.samples["tau"])
    six = compiled.infer(zoo.key(1), {"y": np.ones(6)}, 2000, model_kwargs={"n": 6})
    assert abs(six.mean("tau") - 5 / 6) < 0.05


@pytest.mark.slow
def test_elements_may_have_bounds_of_their_own():
    """Trials that differ from coin to coin: the evidence is that of the beta-binomial."""
    y = np.array([3, 5, 9])
    found = quietly(coins, ("y",)).infer(zoo.key(1), {"y": y}, 4000)
    grid = np.linspace(0.005, 15, 600)
    prior = stats.halfnorm(scale=3.0).pdf(grid)
    a, b = np.meshgrid(grid, grid, indexing="ij")
    whole = np.outer(prior, prior)
    for n, k in zip(TRIALS, y, strict=True):
        whole = whole * stats.betabinom(n, 0.5 + a, 0.5 + b).pmf(k)
    wanted = np.log(np.trapezoid(np.trapezoid(whole, grid), grid))
    assert found.log_evidence_se < 0.1
    assert abs(found.log_evidence - wanted) < 4.5 * found.log_evidence_se + 2e-3


def test_hidden_units_that_are_asked_for_are_built():
    compiled = quietly(scales, ("y",), estimator=rd.MADE(hidden=(8,)))
    (network,) = compiled.networks.values()
    assert isinstance(network, ConditionalMADE)


def network(wet=None):
    """The sprinkler: a finite network, all of whose states can be looked at."""
    cloudy = numpyro.sample("cloudy", dist.Bernoulli(0.5))
    sprinkler = numpyro.sample("sprinkler", dist.Bernoulli(jnp.where(cloudy == 1, 0.1, 0.5)))
    rain = numpyro.sample("rain", dist.Bernoulli(jnp.where(cloudy == 1, 0.8, 0.2)))
    chance = jnp.array([[0.0, 0.9], [0.9, 0.99]])[sprinkler, rain]
    numpyro.sample("wet", dist.Bernoulli(chance), obs=wet)


def test_a_finite_network_has_no_variance():
    compiled = quietly(network, ("wet",))
    found = compiled.infer(zoo.key(1), {"wet": 1}, 2000)
    chances = {
        (c, s, r): 0.5
        * (np.array([0.5, 0.1])[c] if s else 1 - np.array([0.5, 0.1])[c])
        * (np.array([0.2, 0.8])[c] if r else 1 - np.array([0.2, 0.8])[c])
        * np.array([[0.0, 0.9], [0.9, 0.99]])[s, r]
        for c, s, r in product((0, 1), repeat=3)
    }
    assert abs(found.log_evidence - np.log(sum(chances.values()))) < 1e-4
    assert found.ess > 1999 and found.trust == "good"
    rain = sum(p for (_, _, r), p in chances.items() if r) / sum(chances.values())
    assert abs(found.mean("rain") - rain) < 4.5 * 0.5 / np.sqrt(2000)


A, Q = np.array([[0.9, 0.3], [-0.2, 0.8]]), np.array([[1.0, 0.6], [0.6, 0.8]])


def plane(steps=6):
    """A state of two correlated coordinates, one of which is seen."""

    def step(x, _):
        x = numpyro.sample("x", dist.MultivariateNormal(jnp.asarray(A) @ x, jnp.asarray(Q)))
        numpyro.sample("y", dist.Normal(x[0], 0.5))
        return x, None

    scan(step, jnp.zeros(2), None, length=steps)


@pytest.mark.slow
def test_a_correlated_state_is_drawn_as_the_kalman_filter_has_it():
    assert family_of(plane, ("y",)) == {("x",): "normal"}
    compiled = quietly(plane, ("y",))
    y = np.array([0.3, 1.0, -2.0, 0.4, 0.0, 1.5])
    mean, cov, log_z = np.zeros(2), np.zeros((2, 2)), 0.0
    for value in y:
        mean, cov = A @ mean, A @ cov @ A.T + Q
        total = cov[0, 0] + 0.25
        log_z += stats.norm.logpdf(value, mean[0], np.sqrt(total))
        gain = cov[:, 0] / total
        mean, cov = mean + gain * (value - mean[0]), cov - np.outer(gain, cov[0])
    found = compiled.infer(zoo.key(1), {"y": y}, 4000)
    assert found.log_evidence_se < 0.2
    assert abs(found.log_evidence - log_z) < 4.5 * found.log_evidence_se
    last = np.average(
        found.filtered["x"][-1], axis=0, weights=np.exp(found.filtered_log_weights[-1])
    )
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


def test_a_hidden_markov_model_is_trusted_and_right():
    compiled = quietly(chain, ("y",))
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


def test_impossible_states_are_not_drawn():
    def gate():
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.0, 0.5, 0.5])))
        numpyro.sample("y", dist.Normal(1.0 * z, 0.1))

    found = quietly(gate, ("y",)).infer(zoo.key(1), {"y": 0.0}, 500)
    assert set(np.unique(found.samples["z"])) == {1}
    wanted = logsumexp(jnp.log(0.5) + dist.Normal(jnp.array([1.0, 2.0]), 0.1).log_prob(0.0))
    assert abs(found.log_evidence - float(wanted)) < 1e-3
