"""Sums of bits are compared with all of their values, one by one."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints
from retrodict.estimators.analytic.families import BitSums
from retrodict.estimators.analytic.proposal import Exact

import retrodict as rd
import zoo
from retrodict.estimators import guide_inputs
from retrodict.estimators.analytic import bit_sums
from retrodict.estimators.analytic.bit_sums import fitted, spans, starts_of
from retrodict.estimators.conditional import EXPECTED, MADE, GuideSpec, Latent
from retrodict.estimators.guide_inputs import BITS, LinearEstimate
from retrodict.proposal import conjugacy
from retrodict.proposal.proposal import Proposal

NUMBER, NOISE = 12, 0.8


def random_sum(seed=0, number=NUMBER):
    """Effects and chances of bits, and an observation of them, far from what is usual if odd."""
    rng = np.random.default_rng(seed)
    effects = rng.normal(size=number) * rng.choice([1, 4], number)
    chances = rng.uniform(0.02, 0.98, number)
    bits = rng.random(number) < (chances if seed % 2 == 0 else 0.5)
    return effects, chances, float(bits @ effects + NOISE * rng.normal())


def waves_of(effects, chances, exact=True):
    cut = spans(len(effects), BITS)
    variance = chances * (1 - chances) * effects**2
    spreads = [np.sqrt(variance[start:].sum()) for start in starts_of(cut)[:-1]]
    return fitted(effects, cut, spreads, NOISE, exact)


def expected_of(effects, chances, y):
    """The same as a guide has it."""
    number, empty = len(effects), np.zeros((0, 0))
    arrays = (chances, empty, empty, chances, chances * (1 - chances))
    arrays += (np.array([y - effects @ chances]), effects[None], np.array([NOISE**2]))
    assert number == chances.size
    known = bit_sums.Effects(tuple(map(float, effects)))
    return LinearEstimate(*(jnp.asarray(a, float) for a in arrays), known)


def all_states(number):
    return np.array(list(product((0.0, 1.0), repeat=number)))


def exact_log_posterior(effects, chances, y):
    states = all_states(len(effects))
    log_p = states @ np.log(chances) + (1 - states) @ np.log(1 - chances)
    log_p = log_p - 0.5 * ((y - states @ effects) / NOISE) ** 2
    return log_p - float(logsumexp(log_p))


def log_q_of_all(effects, chances, y):
    """Of every state, by the family."""
    latents = (Latent("x", constraints.boolean, (NUMBER,)),)
    net = Exact.of(BitSums(tuple(range(NUMBER)), waves_of(effects, chances), BITS), latents)
    context = {EXPECTED: expected_of(effects, chances, y)}
    states = jnp.asarray(all_states(NUMBER))
    return np.asarray(jax.jit(jax.vmap(lambda x: net.log_prob(context, {"x": x})))(states))


@pytest.mark.parametrize("number", range(1, 40))
def test_spans_are_no_longer_than_asked_for_and_leave_no_bit_alone(number):
    found = spans(number, BITS)
    assert sum(found) == number and max(found) <= BITS
    assert min(found) > 1 or number == 1
    assert list(found) == sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_seen_of_bits_is_their_posterior_given_those_before(seed):
    effects, chances, y = random_sum(seed)
    waves, cut = waves_of(effects, chances), spans(NUMBER, BITS)
    exact = np.exp(exact_log_posterior(effects, chances, y)).reshape((2,) * NUMBER)
    row = np.random.default_rng(seed).integers(0, 2, NUMBER)
    row[: cut[0]] = np.unravel_index(exact.reshape(2 ** cut[0], -1).sum(1).argmax(), (2,) * cut[0])
    seen = guide_inputs.look_at_all_sums(
        waves, cut, expected_of(effects, chances, y), jnp.asarray(row, float)
    )
    given: tuple[int, ...] = ()
    for span, logits in zip(cut, seen, strict=True):
        rest = exact[given].reshape(2**span, -1).sum(1)
        # what is all but ruled out by the bits before is below what single precision can tell
        if rest.sum() > 1e-4:
            np.testing.assert_allclose(jax.nn.softmax(logits), rest / rest.sum(), atol=0.01)
        given += tuple(row[len(given) : len(given) + span])


def test_a_density_sums_to_one_and_is_the_posterior():
    effects, chances, y = random_sum(2)
    log_q = log_q_of_all(effects, chances, y)
    np.testing.assert_allclose(np.exp(log_q).sum(), 1, rtol=1e-4)
    log_p = exact_log_posterior(effects, chances, y)
    divergence = np.sum(np.exp(log_p) * (log_p - log_q))
    assert 0 < divergence < 0.01


@pytest.mark.parametrize("seed", [3, 5, 15])
def test_what_is_seldom_keeps_its_chance(seed):
    # bits that hardly ever switch, but four of which did: their sum is far from what is expected,
    # and a period off it looks usual
    rng = np.random.default_rng(seed)
    effects, before = np.linspace(24, 4, NUMBER), rng.integers(0, 2, NUMBER)
    chances = np.where(before == 1, 0.95, 0.05)
    after = before.copy()
    after[rng.choice(NUMBER, 4, replace=False)] ^= 1
    y = float(after @ effects + NOISE * rng.normal())
    log_q = log_q_of_all(effects, chances, y)
    log_p = exact_log_posterior(effects, chances, y)
    # mean of the weights of draws from p, one if q is p; in the thousands if periods are mistaken
    assert np.sum(np.exp(2 * log_p - log_q)) < 30


@pytest.mark.parametrize("exact", [True, False])
def test_draws_have_the_density_they_say(exact):
    effects, chances, y = random_sum(4)
    waves = waves_of(effects, chances, exact)
    latents = (Latent("x", constraints.boolean, (NUMBER,)),)
    order = np.argsort(-np.abs(effects))
    guide = GuideSpec(tuple(order.tolist()), 1, waves)
    if exact:
        guide = BitSums(guide.order, waves, BITS)
    net = MADE(hidden=(24,)).build(zoo.key(0), latents, (), guide)
    # rows of their own for what is expected, as particles have
    shifts = jnp.linspace(-1.0, 1.0, 300)

    def expected(shift):
        return expected_of(effects[order], chances[order], y + 0.0)._replace(
            residual=jnp.array([y - effects @ chances]) + shift
        )

    def drawn(key, shift):
        return net.draw(net.encode({EXPECTED: expected(shift)}), net.noise(key))

    x, log_q = jax.jit(jax.vmap(drawn))(jax.random.split(zoo.key(1), 300), shifts)
    again = jax.jit(jax.vmap(lambda x, s: net.log_prob({EXPECTED: expected(s)}, x)))(x, shifts)
    np.testing.assert_allclose(log_q, again, atol=2e-3)


@pytest.mark.parametrize(
    "y", [-1e15, *(pytest.param(y, marks=pytest.mark.slow) for y in (300.0, 1e15))]
)
def test_bits_are_drawn_whatever_is_observed(y):
    """Even where everything is as good as impossible, there are draws, and they have a density."""
    effects, chances, _ = random_sum(4)
    latents = (Latent("x", constraints.boolean, (NUMBER,)),)
    net = Exact.of(BitSums(tuple(range(NUMBER)), waves_of(effects, chances), BITS), latents)
    expected = expected_of(effects, chances, y)
    x, log_q = jax.jit(jax.vmap(lambda n: net.draw(expected, n)))(net.noise(zoo.key(0), (50,)))
    assert np.isfinite(log_q).all() and set(np.unique(x["x"])) <= {0, 1}


def test_many_rows_are_as_each_alone():
    effects, chances, y = random_sum(6)
    waves, cut = waves_of(effects, chances), spans(NUMBER, BITS)
    shift = jnp.array([0.0, 0.7, -1.3])
    bits = jnp.asarray(np.random.default_rng(0).integers(0, 2, (NUMBER, 3)), float)
    rows = [expected_of(effects, chances * (1 - n / 8), y + float(shift[n])) for n in range(3)]
    alone = [guide_inputs.look_at_all_sums(waves, cut, rows[n], bits[:, n]) for n in range(3)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves, -1), *rows)
    left, blocks = guide_inputs.start(together, waves), guide_inputs.sums(waves, cut, together)
    for step, end in enumerate(np.cumsum(cut)):
        logits = guide_inputs.look_at_sum(waves, together, left, blocks[step])
        for row in range(3):
            shown = partial(np.testing.assert_allclose, atol=5e-3)
            shown(jax.nn.softmax(logits[:, row]), jax.nn.softmax(alone[row][step]))
        left = guide_inputs.learn_sum(left, blocks[step], bits[end - cut[step] : end])


def test_frequencies_that_are_enough_for_later_blocks_come_first():
    waves = bit_sums.Waves(0.1, (16, 8, 2), 0.0, True)
    assert sorted(waves.places) == list(range(16))
    assert sorted(waves.places[:8]) == list(range(0, 16, 2))
    assert sorted(waves.places[:2]) == [0, 8]
    waves = bit_sums.Waves(0.1, (48, 24, 3), 0.0, True)
    assert sorted(waves.places) == list(range(48))
    assert sorted(waves.places[:24]) == list(range(0, 48, 2))
    assert sorted(waves.places[:3]) == [0, 16, 32]


@pytest.mark.parametrize("number", [1, 2, 4, 16, 64])
def test_phases(number):
    angle = np.linspace(-20, 20, 7)
    waves = bit_sums.Waves(1.0, (number,), 0.0, True)
    wanted = np.exp(1j * waves.places[:, None] * angle)
    for first in {number, -(-number // 2), 1}:
        found = bit_sums._phase(waves, jnp.asarray(angle), first)
        np.testing.assert_allclose(
            found.real + 1j * np.asarray(found.imaginary), wanted[:first], atol=1e-4
        )


@pytest.mark.parametrize(("rows", "parts"), [(32, 1), (40, 2), (80, 4), (300, 1)])
def test_products_in_parts_are_the_same_products(rows, parts):
    rng = np.random.default_rng(rows)
    waves, weights = rng.normal(size=(3, 64, 8)), rng.normal(size=(3, 8, rows))
    waves, weights = waves.astype(np.float32), weights.astype(np.float32)
    made = jax.make_jaxpr(partial(bit_sums._products, waves))(weights)
    (multiplied,) = (eqn for eqn in made.eqns if eqn.primitive.name == "dot_general")
    assert multiplied.outvars[0].aval.shape[:-2] == (3, parts)
    np.testing.assert_allclose(bit_sums._products(waves, weights), waves @ weights, atol=1e-4)


def test_where_noise_is_too_fine_it_is_blurred():
    effects = np.linspace(10, 1000, 40)
    cut, spreads = (5, 5, 30), [3000.0, 2900.0]
    fine = fitted(effects, cut, spreads, 0.1, True)
    assert max(fine.numbers) == bit_sums.MOST and fine.blur > 0.1**2
    coarse = fitted(effects, cut, spreads, 500.0, True)
    assert coarse.blur == 0 and max(coarse.numbers) < bit_sums.MOST


EFFECTS = np.array([5.0, 3.0, -4.0, 2.0, 1.5, 0.7, -2.5])


def devices(noise="normal"):
    """Some bits, and one observation of their sum."""
    scale, chance = 0.8, jnp.full(len(EFFECTS), 0.3)
    if noise == "chained":
        first = numpyro.sample("first", dist.Bernoulli(chance).to_event(1))
        chance = jnp.where(first == 1, 0.8, 0.2)
    x = numpyro.sample("x", dist.Bernoulli(chance).to_event(1))
    mean = jnp.sum(EFFECTS * x) + (jnp.sum(first) if noise == "chained" else 0.0)
    if noise == "student":
        numpyro.sample("y", dist.StudentT(4.0, mean, scale))
    elif noise == "louder":
        numpyro.sample("y", dist.Normal(mean, scale + 0.5 * x[0]))
    else:
        numpyro.sample("y", dist.Normal(mean, scale))


@pytest.mark.parametrize(
    ("noise", "exact"),
    [("normal", True), ("student", False), ("louder", False), ("chained", False)],
)
def test_whether_the_picture_is_exact_is_found_out(noise, exact, monkeypatch):
    # seven bits have few states, which would be looked at one by one
    monkeypatch.setattr(conjugacy, "MOST_STATES", 4)
    proposal = Proposal.of(rd.invert(rd.trace(devices, ("y",), model_args=(noise,))))
    (assembly,) = proposal.assemblies.values()
    assert assembly.guide.waves.exact == exact
    assert isinstance(assembly.guided, BitSums if exact else GuideSpec)


def test_an_exact_picture_needs_no_training_and_gives_the_posterior(tmp_path, monkeypatch):
    monkeypatch.setattr(conjugacy, "MOST_STATES", 4)
    training = rd.Training(max_steps=50, dataset_size=512, heldout_size=128)
    compiled = rd.compile(zoo.key(0), devices, ("y",), training=training, progress_bar=False)
    (history,) = compiled.history.networks.values()
    assert history.stopped == "no weights to train" and len(history.loss) == 1
    found = compiled.infer(zoo.key(1), {"y": 4.1}, 2000, method="importance")
    states = all_states(len(EFFECTS))
    log_p = states @ np.full(7, np.log(0.3)) + (1 - states) @ np.full(7, np.log(0.7))
    log_p = log_p + np.asarray(dist.Normal(states @ EFFECTS, 0.8).log_prob(4.1))
    evidence = float(logsumexp(log_p))
    assert found.ess > 0.97 * 2000
    assert abs(found.log_evidence - evidence) < 4 * found.log_evidence_se + 1e-4
    marginals = np.exp(log_p - evidence) @ states
    error = np.sqrt(marginals * (1 - marginals) / 2000)
    np.testing.assert_array_less(np.abs(found.mean("x") - marginals), 4.5 * error + 1e-3)
    compiled.save(tmp_path / "devices.rd")
    again = rd.load(tmp_path / "devices.rd", devices)
    same = again.infer(zoo.key(1), {"y": 4.1}, 2000, method="importance")
    np.testing.assert_array_equal(same.samples["x"], found.samples["x"])
    (history,) = compiled.train(zoo.key(2), training).history.networks.values()
    assert history.stopped == "no weights to train"
