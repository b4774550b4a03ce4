"""Rows of synthetic data: what is dropped and why, which copies are used, memory, and threads."""

import threading
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import zoo
from retrodict.errors import UnsupportedModel
from retrodict.estimators.conditional import EXPECTED
from retrodict.graph.prior_draws import CHUNK_BYTES, fresh_keys, generator, joint_draws
from retrodict.graph.trace import trace
from retrodict.inverse.inverse import invert
from retrodict.proposal.proposal import Proposal
from retrodict.training.prefetch import Prefetcher
from retrodict.training.rejections import RejectionCounts
from retrodict.training.simulate import Simulator


def go_on():
    return False


@cache
def simulators(model, observed, copies=4, **kwargs):
    """A simulator for each network, by the first site it draws."""
    graph = trace(model, observed, model_kwargs=kwargs)
    proposal = Proposal.of(invert(graph, "faithful"), exact=False)
    draws = joint_draws(graph)
    return {
        assemblies[0].factor.latents[0]: Simulator(
            graph, tuple(assemblies), proposal.designs, copies, draws
        )
        for assemblies in proposal.networks().values()
    }


def first(rows):
    """One of the arrays, of which every entry is distinct."""
    return np.asarray(jax.tree.leaves(rows[0])[0])


def rejected(model, observed, size=4000, **kwargs):
    (simulator, *_) = simulators(model, observed, **kwargs).values()
    rows, counts = simulator.examples(zoo.key(1), size, go_on)
    assert all(len(leaf) == size for leaf in jax.tree.leaves(rows))
    return rows, counts


def test_pumps_lose_a_fifth_of_their_draws_and_say_where():
    rows, counts = rejected(zoo.pumps, ("t", "y"), size=10_000)
    # The same model in float64, where everything can be represented.
    rng, number, tiny = np.random.default_rng(0), 100_000, np.finfo(np.float32).tiny
    alpha, beta = rng.exponential(size=number), rng.gamma(0.1, size=number)
    theta = rng.gamma(alpha[:, None], size=(number, 10)) / beta[:, None]
    rate = theta * rng.exponential(50, size=(number, 10))
    lost = {
        ("beta", "underflow"): beta < tiny,
        ("theta", "underflow"): (theta < tiny).any(1),
        ("theta", "not finite"): (theta > np.finfo(np.float32).max).any(1),
        ("y", "integer overflow"): (rate > 2**31).any(1),
    }
    before = np.zeros(number, bool)
    for what, here in lost.items():
        share = np.mean(here & ~before)
        before |= here
        # Poisson noise at 2³¹ is nothing beside the four standard errors.
        error = 4 * np.sqrt(share * (1 - share) * (1 / counts.simulated + 1 / number)) + 1e-4
        assert counts.dropped[what] / counts.simulated == pytest.approx(share, abs=error), what
    assert 0.15 < counts.fraction < 0.3
    assert np.mean(before) == pytest.approx(counts.fraction, abs=0.02)
    x, context = rows
    assert np.all(np.isfinite(x["alpha"])) and np.all(x["beta"] > 0)
    assert context["pumps"]["y"].min() >= 0
    assert context["pumps"]["y"].max() < np.iinfo(np.int32).max


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
        # exp(100 x) passes 3·10³⁸ where x > 0.887, and is below 10⁻³⁸ where x < -0.873.
        (overflowing, ("z",), "y", "not finite", 0.187),
        (overflowing, ("z",), "y", "underflow", 0.191),
        # Almost all of Beta(0.01, 0.01) is closer to 0 or 1 than float32 can say.
        (clipped, ("y",), "x", "underflow", 0.66),
    ],
)
def test_a_dropped_draw_is_put_down_to_its_first_fault(model, observed, site, reason, share):
    _, counts = rejected(model, observed)
    assert {name for name, _ in counts.dropped} == {site}
    found = counts.dropped[site, reason] / counts.simulated
    error = 4 * np.sqrt(share * (1 - share) / counts.simulated)
    # The noise of y on top of exp(100 x) shifts the shares a little.
    assert found == pytest.approx(share, abs=error + 0.01)


def test_a_density_that_is_not_finite_counts():
    _, counts = rejected(impossible, ("y", "z"))
    assert sum(counts.dropped.values()) == pytest.approx(counts.simulated / 2, rel=0.1)
    assert {name for name, _ in counts.dropped} == {"z"}


def hopeless():
    x = numpyro.sample("x", dist.Normal(0, 1))
    rate = numpyro.sample("rate", dist.LogNormal(60, 1))
    numpyro.sample("y", dist.Poisson(rate * jnp.exp(x)))


def test_a_model_all_of_whose_draws_are_bad_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match=r"100% of the draws.*'y': integer overflow"):
        rejected(hopeless, ("y",))


def test_all_but_a_few_bad_draws_are_refused_as_well():
    def rare():
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.LogNormal(jnp.where(x > 2, 0.0, 200.0), 1))

    with pytest.raises(UnsupportedModel, match=r"9[678]% of the draws.*'y': not finite"):
        rejected(rare, ("y",))


def test_good_draws_of_any_kind_are_kept():
    for name in ("fhmm_scan", "discrete_network", "covariance"):
        case = zoo.CASES[name]
        _, counts = rejected(case.model, case.observed, size=1000, **case.kwargs)
        # Uniforms and their like touch a bound once in millions of draws.
        assert counts.fraction < 0.005, name


def test_rows_are_what_the_factor_needs_of_one_draw():
    made = simulators(zoo.pumps, ("t", "y"), n=3)
    (theta, context), _ = made["theta"].examples(zoo.key(2), 64, go_on)
    assert theta["theta"].shape == (64,)
    assert set(context) == {"alpha", "beta", "t", "y", EXPECTED}
    # Three copies of a draw, next to one another, share what is above the plate.
    assert made["theta"].examples_per_draw == 3
    alpha = context["alpha"][:63].reshape(-1, 3)
    np.testing.assert_array_equal(alpha, np.broadcast_to(alpha[:, :1], alpha.shape))
    assert len(np.unique(context["t"][:63])) == 63


def test_each_copy_is_used_as_often_and_none_twice():
    def numbered():
        x = numpyro.sample("x", dist.Normal(0, 1))
        with numpyro.plate("n", 10):
            z = numpyro.sample("z", dist.Normal(x + 100 * jnp.arange(10), 1))
            numpyro.sample("y", dist.Normal(z, 1))

    simulator = simulators(numbered, ("y",), copies=4)["z"]
    (x, _), _ = simulator.examples(zoo.key(3), 8000, go_on)
    which = np.round(x["z"] / 100).astype(int).reshape(-1, 4)
    assert all(len(set(row)) == 4 for row in which)
    shares = np.bincount(which.ravel(), minlength=10) / which.size
    # Copies of a part of the plate are exclusive, so the binomial's error is too large.
    np.testing.assert_allclose(shares, 0.1, atol=4 * np.sqrt(0.09 / which.size) + 0.026)


def test_same_key_same_rows_another_key_others():
    (simulator, *_) = simulators(zoo.regression, ("z", "t")).values()
    one, again, other = (simulator.examples(zoo.key(k), 500, go_on)[0] for k in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert not np.array_equal(first(one), first(other))


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_keys_made_by_numpy_are_of_the_kind_given_and_all_differ(kind):
    like = jax.random.key(3, impl=kind)
    made, again = (fresh_keys(generator(like), 1000, like) for _ in range(2))
    assert made.shape == (1000,) and made.dtype == like.dtype
    words = np.asarray(jax.random.key_data(made))
    assert len(np.unique(words, axis=0)) == 1000
    np.testing.assert_array_equal(words, jax.random.key_data(again))
    uniform = np.asarray(jax.vmap(jax.random.uniform)(made))
    assert uniform.mean() == pytest.approx(0.5, abs=4 * np.sqrt(1 / 12 / 1000))


@pytest.mark.slow
def test_large_models_are_simulated_in_smaller_chunks():
    small = simulators(zoo.regression, ("z", "t"), n=10)["w0"]
    large = simulators(zoo.regression, ("z", "t"), n=20_000)["w0"]
    assert small.chunk_size == 2048
    expected = 3 * 3 + 2 * 3 * 3  # three vectors and two matrices of what is expected
    assert small.example_bytes == 4 * (3 + 20 + expected)
    assert large.example_bytes == 4 * (3 + 40_000)  # so many are not worth looking at one by one
    assert large.chunk_size * (large.example_bytes + 4 * 40_003) <= CHUNK_BYTES
    rows, _ = large.examples(zoo.key(0), 5, go_on)
    assert rows[1]["N"]["t"].shape == (5, 20_000)


def test_rejections_add_up():
    one = RejectionCounts(10, {("x", "underflow"): 1})
    both = RejectionCounts(10) + RejectionCounts(5)
    assert both.simulated == 15 and both.total == 0
    assert (
        one.fraction == 0.1
        and "'x': underflow (1 of 10)"
        in RejectionCounts(10, type(both.dropped)(one.dropped)).describe()
    )


def sets(stop=go_on, size=200, held=100, model=zoo.regression, observed=("z", "t")):
    (simulator, *_) = simulators(model, observed).values()
    return Prefetcher(simulator, zoo.key(5), size, held, stop)


def test_sets_differ_and_do_not_depend_on_when_they_are_asked_for():
    with sets() as made:
        one, second = made.next(), made.next()
    with sets() as made:
        again = made.next()
        threading.Event().wait(0.5)
        later = made.next()
    for a, b in ((one, again), (second, later)):
        jax.tree.map(np.testing.assert_array_equal, a.training, b.training)
        assert a.rejected == b.rejected
    assert len(first(one.training)) == 200 and len(first(one.heldout)) == 100
    drawn = [first(rows) for split in (one, second) for rows in (split.training, split.heldout)]
    assert len(np.unique(np.concatenate(drawn))) == 600


def test_a_set_is_cut_short_but_never_empty():
    with sets(stop=lambda: True, size=1_000_000) as made:
        cut = made.next()
    assert 0 < len(first(cut.heldout)) + len(first(cut.training)) <= 2048


def test_leaving_ends_the_thread_though_its_set_is_not_done():
    before = threading.active_count()
    with sets(size=2000) as made:
        made.next()
        made._upcoming.result()
        made._training_size = 10**8  # the one after next would take hours
        made.next()
    assert threading.active_count() == before


def test_what_goes_wrong_in_the_thread_is_raised_where_the_set_is_asked_for(monkeypatch):
    real, calls = Simulator.examples, []

    def third_time_broken(*args):
        calls.append(threading.current_thread())
        if len(calls) == 3:
            raise OverflowError("no more")
        return real(*args)

    monkeypatch.setattr(Simulator, "examples", third_time_broken)
    with sets() as made:
        made.next()
        made.next()
        with pytest.raises(OverflowError, match="no more"):
            made.next()
    assert calls[0] is threading.main_thread() and calls[2] is not calls[0]
