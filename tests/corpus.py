"""Twenty models as applied work has them, each small enough to trace in a second.

The arguments that carry data have the names of the observed sites.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions.transforms import OrderedTransform

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype(np.float32)


class Entry(NamedTuple):
    """A model of the corpus.

    Attributes:
        model: the NumPyro model.
        observed: its observed sites.
        discrete: whether it has discrete latents.
    """

    model: Callable[..., Any]
    observed: tuple[str, ...]
    discrete: bool


CORPUS: dict[str, Entry] = {}


def entry(observed: Iterable[str], *, discrete: bool = False) -> Callable[..., Any]:
    def register(model: Callable[..., Any]) -> Callable[..., Any]:
        CORPUS[model.__name__] = Entry(model, tuple(observed), discrete)
        return model

    return register


@entry(["captured"], discrete=True)
def capture_recapture(captured=None):
    """Survival and detection of animals after their first capture; steps before it are masked."""
    first = np.array([0, 0, 1, 2, 0])
    survival = numpyro.sample("survival", dist.Beta(4, 2))
    detection = numpyro.sample("detection", dist.Beta(2, 2))

    def step(alive, inputs):
        time, current = inputs
        alive = jnp.where(time == first + 1, 1, alive)
        with numpyro.plate("animals", len(first)), handlers.mask(mask=time > first):
            alive = numpyro.sample("alive", dist.Bernoulli(survival * alive))
            numpyro.sample("captured", dist.Bernoulli(detection * alive), obs=current)
        return alive, None

    scan(step, jnp.ones(len(first), int), (jnp.arange(1, 5), captured))


@entry(["y"])
def horseshoe(y=None):
    """Regression with few relevant coefficients."""
    tau = numpyro.sample("tau", dist.HalfCauchy(0.5))
    with numpyro.plate("predictors", X.shape[1]):
        shrinkage = numpyro.sample("shrinkage", dist.HalfCauchy(1.0))
        w = numpyro.sample("w", dist.Normal(0, tau * shrinkage))
    sigma = numpyro.sample("sigma", dist.Gamma(4, 4))
    with numpyro.plate("n", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


@entry(["y"])
def exponential_smoothing(y=None):
    """Holt's linear trend: level and slope follow the observations."""
    smoothing = numpyro.sample("smoothing", dist.Uniform(0, 1))
    slope_smoothing = numpyro.sample("slope_smoothing", dist.Uniform(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    level = numpyro.sample("level", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 0.5))

    def step(state, current):
        level, slope = state
        current = numpyro.sample("y", dist.Normal(level + slope, sigma), obs=current)
        new_level = smoothing * current + (1 - smoothing) * (level + slope)
        slope = slope_smoothing * (new_level - level) + (1 - slope_smoothing) * slope
        return (new_level, slope), None

    scan(step, (level, slope), y, length=8)


@entry(["rating"])
def ordinal_regression(rating=None):
    """Ordered categories with latent cut points."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    base = dist.Normal(jnp.array([-1.0, 0.0, 1.0]), 1).to_event(1)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(base, OrderedTransform()))
    with numpyro.plate("n", len(X)):
        numpyro.sample("rating", dist.OrderedLogistic(X @ w, cuts), obs=rating)


@entry(["count"])
def zero_inflated_counts(count=None):
    """Counts that are zero for two reasons."""
    gate = numpyro.sample("gate", dist.Beta(2, 4))
    a = numpyro.sample("a", dist.Normal(1, 0.5))
    b = numpyro.sample("b", dist.Normal(0, 0.5))
    with numpyro.plate("n", len(X)):
        rate = jnp.exp(a + b * X[:, 0])
        numpyro.sample("count", dist.ZeroInflatedPoisson(gate, rate=rate), obs=count)


@entry(["y"])
def neural_network(y=None):
    """One hidden layer with normal weights."""
    w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([3, 4]).to_event(2))
    w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([4]).to_event(1))
    precision = numpyro.sample("precision", dist.Gamma(3, 1))
    mean = jnp.tanh(X @ w1) @ w2
    with numpyro.plate("n", len(X)):
        numpyro.sample("y", dist.Normal(mean, 1 / jnp.sqrt(precision)), obs=y)


@entry(["y"])
def gaussian_process(y=None):
    """Squared-exponential covariance of eight points, integrated over the function."""
    places = jnp.linspace(0, 1, 8)
    variance = numpyro.sample("variance", dist.LogNormal(0, 0.5))
    length = numpyro.sample("length", dist.LogNormal(-1, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1, 0.5))
    gaps = (places[:, None] - places) / length
    covariance = variance * jnp.exp(-0.5 * gaps**2) + (noise + 1e-3) * jnp.eye(8)
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(8), covariance), obs=y)


@entry(["y"], discrete=True)
def hidden_markov_model(y=None):
    """Two sequences of different lengths, padded and masked."""
    lengths = jnp.array([6, 4])
    with numpyro.plate("states", 2):
        transition = numpyro.sample("transition", dist.Dirichlet(jnp.array([2.0, 2.0])))
        mean = numpyro.sample("mean", dist.Normal(jnp.array([-2.0, 2.0]), 0.5))

    def step(state, inputs):
        time, current = inputs
        with numpyro.plate("sequences", 2), handlers.mask(mask=time < lengths):
            state = numpyro.sample("state", dist.Categorical(transition[state]))
            numpyro.sample("y", dist.Normal(mean[state], 1), obs=current)
        return state, None

    scan(step, jnp.zeros(2, int), (jnp.arange(6), y))


@entry(["correct"])
def item_response(correct=None):
    """Ability of persons, difficulty and discrimination of items."""
    with numpyro.plate("persons", 6):
        ability = numpyro.sample("ability", dist.Normal(0, 1))
    with numpyro.plate("items", 4):
        difficulty = numpyro.sample("difficulty", dist.Normal(0, 1))
        discrimination = numpyro.sample("discrimination", dist.LogNormal(0, 0.3))
    with numpyro.plate("answered", 6, dim=-2), numpyro.plate("asked", 4, dim=-1):
        logits = discrimination * (ability[:, None] - difficulty)
        numpyro.sample("correct", dist.Bernoulli(logits=logits), obs=correct)


@entry(["lifetime"])
def censored_survival(lifetime=None):
    """Weibull lifetimes; those beyond the end of the study are known to exceed it."""
    censored = np.array([False, True, False, False, True, False])
    shape = numpyro.sample("shape", dist.LogNormal(0.5, 0.3))
    scale = numpyro.sample("scale", dist.LogNormal(1, 0.5))
    weibull = dist.Weibull(scale, shape)
    with numpyro.plate("patients", 6):
        numpyro.sample("lifetime", weibull.mask(~censored), obs=lifetime)
        survives = jnp.exp(-((5.0 / scale) ** shape))
        with handlers.mask(mask=censored):
            numpyro.sample("survived", dist.Bernoulli(survives), obs=jnp.ones(6, int))


@entry(["count"])
def change_point(count=None):
    """The rate of a Poisson process changes once."""
    early = numpyro.sample("early", dist.Gamma(3, 1))
    late = numpyro.sample("late", dist.Gamma(3, 0.5))
    when = numpyro.sample("when", dist.Uniform(0, 12))
    share = jnp.clip(when - jnp.arange(12), 0, 1)
    with numpyro.plate("years", 12):
        numpyro.sample("count", dist.Poisson(share * early + (1 - share) * late), obs=count)


@entry(["y"])
def correlated_normal(y=None):
    """Covariance with an LKJ prior on correlations."""
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.5).expand([2]).to_event(1))
    factor = numpyro.sample("factor", dist.LKJCholesky(2, concentration=2.0))
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("n", 10):
        scale_tril = scale[:, None] * factor
        numpyro.sample("y", dist.MultivariateNormal(mean, scale_tril=scale_tril), obs=y)


@entry(["y"], discrete=True)
def mixture_of_normals(y=None):
    """A mixture with an assignment for each observation."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.array([3.0, 3.0])))
    with numpyro.plate("components", 2):
        mean = numpyro.sample("mean", dist.Normal(jnp.array([-2.0, 2.0]), 1))
    with numpyro.plate("n", 8):
        component = numpyro.sample("component", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(mean[component], 1), obs=y)


@entry(["returns"])
def stochastic_volatility(returns=None):
    """The log variance of returns is a random walk."""
    step_size = numpyro.sample("step_size", dist.Exponential(5.0))
    freedom = numpyro.sample("freedom", dist.Gamma(8, 0.5))

    def step(volatility, current):
        volatility = numpyro.sample("volatility", dist.Normal(volatility, step_size))
        scale = jnp.exp(volatility)
        numpyro.sample("returns", dist.StudentT(freedom, 0.0, scale), obs=current)
        return volatility, None

    scan(step, 0.0, returns, length=8)


@entry(["y"])
def second_order_autoregression(y=None):
    """Each value depends on the two before it."""
    a = numpyro.sample("a", dist.Normal(0, 0.4))
    b = numpyro.sample("b", dist.Normal(0, 0.4))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))

    def step(past, current):
        last, one_before = past
        mean = a * last + b * one_before
        current = numpyro.sample("y", dist.Normal(mean, sigma), obs=current)
        return (current, last), None

    scan(step, (0.5, -0.5), y, length=10)


@entry(["count"])
def overdispersed_counts(count=None):
    """Negative binomial regression."""
    a = numpyro.sample("a", dist.Normal(1, 0.5))
    b = numpyro.sample("b", dist.Normal(0, 0.3))
    concentration = numpyro.sample("concentration", dist.Gamma(4, 1))
    with numpyro.plate("n", len(X)):
        mean = jnp.exp(a + b * X[:, 1])
        numpyro.sample("count", dist.NegativeBinomial2(mean, concentration), obs=count)


@entry(["y"])
def hierarchical_logistic(y=None):
    """Intercepts of groups around a common mean."""
    groups = np.arange(len(X)) % 4
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", 4):
        intercept = numpyro.sample("intercept", dist.Normal(mu, spread))
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("n", len(X)):
        logits = intercept[groups] + w * X[:, 2]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


@entry(["y"])
def robust_regression(y=None):
    """Regression with outliers."""
    freedom = numpyro.sample("freedom", dist.Gamma(4, 0.5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("n", len(X)):
        numpyro.sample("y", dist.StudentT(freedom, X @ w, sigma), obs=y)


@entry(["label", "word"])
def naive_bayes(label=None, word=None):
    """Words of documents whose class is known."""
    classes = numpyro.sample("classes", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("topics", 2):
        words = numpyro.sample("words", dist.Dirichlet(jnp.ones(4)))
    with numpyro.plate("documents", 5, dim=-2):
        label = numpyro.sample("label", dist.Categorical(classes), obs=label)
        with numpyro.plate("positions", 6, dim=-1):
            numpyro.sample("word", dist.Categorical(words[label]), obs=word)


@entry(["first_wins"])
def paired_comparison(first_wins=None):
    """Strengths of players from the results of their games."""
    one, other = np.array([(i, j) for i in range(4) for j in range(i)]).T
    with numpyro.plate("players", 4):
        strength = numpyro.sample("strength", dist.Normal(0, 1))
    numpyro.deterministic("odds", jax.nn.softmax(strength))
    with numpyro.plate("games", len(one)):
        logits = strength[one] - strength[other]
        numpyro.sample("first_wins", dist.Bernoulli(logits=logits), obs=first_wins)


@entry(["tumours"])
def beta_binomial_rates(tumours=None):
    """Rates of experiments around a common rate."""
    trials = np.array([20, 20, 18, 25, 10, 48])
    mean = numpyro.sample("mean", dist.Beta(1, 3))
    size = numpyro.sample("size", dist.LogNormal(2, 0.5))
    with numpyro.plate("experiments", 6):
        rate = numpyro.sample("rate", dist.Beta(mean * size, (1 - mean) * size))
        numpyro.sample("tumours", dist.Binomial(trials, rate), obs=tumours)
