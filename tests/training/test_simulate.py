"""Simulation of training examples: dropped draws, choice of copies, memory, prefetching."""

import threading
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import zoo
from retrodict.errors import UnsupportedModel
from retrodict.estimators.guide_inputs import LinearEstimate
from retrodict.graph.prior_draws import CHUNK_BYTES, fresh_keys, generator, prior_sampler
from retrodict.graph.trace import trace
from retrodict.inverse.inverse import invert
from retrodict.proposal.context_views import InputName
from retrodict.proposal.proposal import Proposal
from retrodict.training.prefetch import Prefetcher
from retrodict.training.rejections import RejectionCounts
from retrodict.training.simulate import Simulator


def never():
    return False


@cache
def simulators(model, observed, copies=4, **kwargs):
    """First latent of each network → simulator."""
    graph = trace(model, observed, model_kwargs=kwargs)
    proposal = Proposal.of(invert(graph, "faithful"), analytic=False)
    draws = prior_sampler(graph)
    return {
        structures[0].factor.latents[0]: Simulator(
            graph, tuple(structures), proposal.covariates, copies, draws
        )
        for structures in proposal.networks().values()
    }


def first_latent(examples):
    """Values of the first latent, which are distinct."""
    return np.asarray(jax.tree.leaves(examples[0])[0])


def simulate(model, observed, size=4000, **kwargs):
    (simulator, *_) = simulators(model, observed, **kwargs).values()
    examples, counts = simulator.examples(zoo.key(1), size, never)
    assert all(len(leaf) == size for leaf in jax.tree.leaves(examples))
    return examples, counts


def test_dropped_draws_of_the_pumps_agree_with_a_simulation_in_float64():
    examples, counts = simulate(zoo.pumps, ("t", "y"), size=10_000)
    # In float64 everything can be represented.
    rng, number, tiny = np.random.default_rng(0), 100_000, np.finfo(np.float32).tiny
    alpha, beta = rng.exponential(size=number), rng.gamma(0.1, size=number)
    theta = rng.gamma(alpha[:, None], size=(number, 10)) / beta[:, None]
    rate = theta * rng.exponential(50, size=(number, 10))
    faults = {
        ("beta", "underflow"): beta < tiny,
        ("theta", "underflow"): (theta < tiny).any(1),
        ("theta", "not finite"): (theta > np.finfo(np.float32).max).any(1),
        ("y", "integer overflow"): (rate > 2**31).any(1),
    }
    dropped = np.zeros(number, bool)
    for fault, occurs in faults.items():
        share = np.mean(occurs & ~dropped)
        dropped |= occurs
        # Poisson noise at 2³¹ is negligible beside four standard errors.
        error = 4 * np.sqrt(share * (1 - share) * (1 / counts.simulated + 1 / number)) + 1e-4
        assert counts.dropped[fault] / counts.simulated == pytest.approx(share, abs=error), fault
    assert 0.15 < counts.fraction < 0.3
    assert np.mean(dropped) == pytest.approx(counts.fraction, abs=0.02)
    x, context = examples
    assert np.all(np.isfinite(x["alpha"])) and np.all(x["beta"] > 0)
    plate = context.inputs[InputName("plate", "pumps")].values
    y = plate[InputName("site", "y")]
    assert y.min() >= 0
    assert y.max() < np.iinfo(np.int32).max


def overflowing():
    x = numpyro.sample("x", dist.Normal(0, 1))
    y = numpyro.sample("y", dist.LogNormal(100 * x, 1))
    numpyro.sample("z", dist.Normal(y, 1))


def clipped():
    x = numpyro.sample("x", dist.Beta(0.01, 0.01))
    numpyro.sample("y", dist.Normal(x, 1))


def impossible():
    x = numpyro.sample("x", dist.Uniform(0, 1))
    numpyro.sample("y", dist.Bernoulli(probs=0.5))
    numpyro.sample("z", dist.Uniform(0.0, jnp.where(x < 0.5, 1.0, jnp.nan)))


@pytest.mark.parametrize(
    ("model", "observed", "site", "reason", "share"),
    [
        # exp(100 x) exceeds 3·10³⁸ where x > 0.887, and is below 10⁻³⁸ where x < -0.873.
        (overflowing, ("z",), "y", "not finite", 0.187),
        (overflowing, ("z",), "y", "underflow", 0.191),
        # Most draws of Beta(0.01, 0.01) are closer to 0 or 1 than float32 can represent.
        (clipped, ("y",), "x", "underflow", 0.66),
    ],
)
def test_a_dropped_draw_is_counted_at_its_first_faulty_site(model, observed, site, reason, share):
    _, counts = simulate(model, observed)
    assert {name for name, _ in counts.dropped} == {site}
    fraction = counts.dropped[site, reason] / counts.simulated
    error = 4 * np.sqrt(share * (1 - share) / counts.simulated)
    # The noise of y shifts the shares a little.
    assert fraction == pytest.approx(share, abs=error + 0.01)


def test_draws_with_a_nonfinite_density_are_dropped():
    _, counts = simulate(impossible, ("y", "z"))
    assert sum(counts.dropped.values()) == pytest.approx(counts.simulated / 2, rel=0.1)
    assert {name for name, _ in counts.dropped} == {"z"}


def hopeless():
    x = numpyro.sample("x", dist.Normal(0, 1))
    rate = numpyro.sample("rate", dist.LogNormal(60, 1))
    numpyro.sample("y", dist.Poisson(rate * jnp.exp(x)))


def test_a_model_without_valid_draws_is_refused_with_the_site():
    with pytest.raises(UnsupportedModel, match=r"100% of the draws.*'y': integer overflow"):
        simulate(hopeless, ("y",))


def test_a_model_with_few_valid_draws_is_refused():
    def rare():
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.LogNormal(jnp.where(x > 2, 0.0, 200.0), 1))

    with pytest.raises(UnsupportedModel, match=r"9[678]% of the draws.*'y': not finite"):
        simulate(rare, ("y",))


def test_hardly_any_draws_of_well_behaved_models_are_dropped():
    for name in ("fhmm_scan", "discrete_network", "covariance"):
        case = zoo.CASES[name]
        _, counts = simulate(case.model, case.observed, size=1000, **case.kwargs)
        # Uniform draws equal a bound once in millions of draws.
        assert counts.fraction < 0.005, name


def test_examples_hold_the_latents_and_context_of_a_factor():
    by_latent = simulators(zoo.pumps, ("t", "y"), n=3)
    (theta, context), _ = by_latent["theta"].examples(zoo.key(2), 64, never)
    assert theta["theta"].shape == (64,)
    inputs = {name.name: value for name, value in context.inputs.items()}
    assert set(inputs) == {"alpha", "beta", "t", "y"}
    assert isinstance(context.from_model, LinearEstimate)
    # The three copies of a draw are adjacent and share the values outside of the plate.
    assert by_latent["theta"].examples_per_draw == 3
    alpha = inputs["alpha"][:63].reshape(-1, 3)
    np.testing.assert_array_equal(alpha, np.broadcast_to(alpha[:, :1], alpha.shape))
    assert len(np.unique(inputs["t"][:63])) == 63


def test_copies_are_used_equally_often_and_never_twice_for_one_draw():
    def numbered():
        x = numpyro.sample("x", dist.Normal(0, 1))
        with numpyro.plate("n", 10):
            z = numpyro.sample("z", dist.Normal(x + 100 * jnp.arange(10), 1))
            numpyro.sample("y", dist.Normal(z, 1))

    simulator = simulators(numbered, ("y",), copies=4)["z"]
    (x, _), _ = simulator.examples(zoo.key(3), 8000, never)
    copies = np.round(x["z"] / 100).astype(int).reshape(-1, 4)
    assert all(len(set(draw)) == 4 for draw in copies)
    shares = np.bincount(copies.ravel(), minlength=10) / copies.size
    # The binomial error is an upper bound, since the choice is stratified.
    np.testing.assert_allclose(shares, 0.1, atol=4 * np.sqrt(0.09 / copies.size) + 0.026)


def test_examples_are_determined_by_the_key():
    (simulator, *_) = simulators(zoo.regression, ("z", "t")).values()
    examples, same, other = (simulator.examples(zoo.key(k), 500, never)[0] for k in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, examples, same)
    assert not np.array_equal(first_latent(examples), first_latent(other))


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_keys_from_a_numpy_generator_keep_the_implementation_and_are_distinct(kind):
    like = jax.random.key(3, impl=kind)
    keys, same = (fresh_keys(generator(like), 1000, like) for _ in range(2))
    assert keys.shape == (1000,) and keys.dtype == like.dtype
    words = np.asarray(jax.random.key_data(keys))
    assert len(np.unique(words, axis=0)) == 1000
    np.testing.assert_array_equal(words, jax.random.key_data(same))
    uniform = np.asarray(jax.vmap(jax.random.uniform)(keys))
    assert uniform.mean() == pytest.approx(0.5, abs=4 * np.sqrt(1 / 12 / 1000))


@pytest.mark.slow
def test_large_models_are_simulated_in_smaller_chunks():
    small = simulators(zoo.regression, ("z", "t"), n=10)["w0"]
    large = simulators(zoo.regression, ("z", "t"), n=20_000)["w0"]
    assert small.chunk_size == 2048
    expected = 3 * 3 + 2 * 3 * 3  # three vectors and two matrices of the linear guide
    assert small.example_bytes == 4 * (3 + 20 + expected)
    assert large.example_bytes == 4 * (3 + 40_000)  # too many for a guide
    assert large.chunk_size * (large.example_bytes + 4 * 40_003) <= CHUNK_BYTES
    (_, context), _ = large.examples(zoo.key(0), 5, never)
    assert context["N"]["t"].shape == (5, 20_000)


def test_rejection_counts_can_be_added_and_described():
    counts = RejectionCounts(10, Counter({("x", "underflow"): 1}))
    assert counts.fraction == 0.1 and "'x': underflow (1 of 10)" in counts.describe()
    total = counts + RejectionCounts(5)
    assert total.simulated == 15 and total.total == 1
    none = RejectionCounts(10) + RejectionCounts(5)
    assert none.simulated == 15 and none.total == 0


def prefetcher(stop=never, size=200, model=zoo.regression, observed=("z", "t")):
    (simulator, *_) = simulators(model, observed).values()
    return Prefetcher(simulator, zoo.key(5), size, 100, stop)


def test_sets_differ_and_do_not_depend_on_timing():
    with prefetcher() as sets:
        first, second = sets.next(), sets.next()
    with prefetcher() as sets:
        first_again = sets.next()
        threading.Event().wait(0.5)
        second_again = sets.next()
    for a, b in ((first, first_again), (second, second_again)):
        jax.tree.map(np.testing.assert_array_equal, a.training, b.training)
        assert a.rejected == b.rejected
    assert len(first_latent(first.training)) == 200 and len(first_latent(first.heldout)) == 100
    parts = (first.training, first.heldout, second.training, second.heldout)
    assert len(np.unique(np.concatenate([first_latent(part) for part in parts]))) == 600


def test_a_request_to_stop_cuts_a_set_short_but_never_to_nothing():
    with prefetcher(stop=lambda: True, size=1_000_000) as sets:
        short = sets.next()
    assert 0 < len(first_latent(short.heldout)) + len(first_latent(short.training)) <= 2048


def test_exit_ends_the_thread_in_the_middle_of_a_set():
    num_threads = threading.active_count()
    with prefetcher(size=2000) as sets:
        sets.next()
        sets._upcoming.result()
        sets._training_size = 10**8  # the set after the next would take hours
        sets.next()
    assert threading.active_count() == num_threads


def test_an_error_in_the_thread_is_raised_by_next(monkeypatch):
    original, threads = Simulator.examples, []

    def raise_at_third_call(*args):
        threads.append(threading.current_thread())
        if len(threads) == 3:
            raise OverflowError("no more")
        return original(*args)

    monkeypatch.setattr(Simulator, "examples", raise_at_third_call)
    with prefetcher() as sets:
        sets.next()
        sets.next()
        with pytest.raises(OverflowError, match="no more"):
            sets.next()
    assert threads[0] is threading.main_thread() and threads[2] is not threads[0]
