"""Models written as Python loops are answered as models with scans, with the user's names."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import retrodict as rd
from exact import kalman, series_loop
from loop_models import CASES, site_values
from retrodict._xla.jit import CompiledFunction
from retrodict._xla.tuning import FAST_COMPILE
from retrodict.graph.loop_surface import stack_steps
from retrodict.inference.smc import SMC
from retrodict.particles.resampling import systematic
from retrodict.proposal.proposal import Proposal
from zoo import key

TINY = rd.MADE(hidden=(8,), components=2, context=(4,))
BRIEF = rd.Training(max_steps=20, batch_size=32, dataset_size=256, heldout_size=64)


def traced(steps):
    observed = [f"y_{t}" for t in range(steps)]
    return rd.trace(series_loop, observed, model_kwargs={"steps": steps})


@cache
def prepared(steps, analytic=True):
    """A proposal, which needs no training where conditionals are known in closed form, and data."""
    graph = traced(steps)
    proposal = Proposal.of(rd.invert(graph, "filter"), analytic=analytic)
    networks = {
        name: proposal.build(TINY, key(), structures)
        for name, structures in proposal.networks().items()
    }
    drawn = CompiledFunction(graph.lifted.program.simulate, FAST_COMPILE)(key(1))
    return proposal, networks, {"y_…": drawn["y_…"]}


@cache
def compiled(name):
    case = CASES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrodict.inference.planning.PLAN_PARTICLES", 50)
        return rd.compile(
            key(), case.model, case.observed, estimator=TINY, training=BRIEF, progress_bar=False
        )


def data_of(name, seed=1):
    values = site_values(CASES[name].model, seed)
    return {site: np.asarray(values[site]) for site in CASES[name].observed}


def run(proposal, networks, data, threshold, particles):
    sampler = SMC(proposal, particles, systematic, threshold)
    return CompiledFunction(sampler.run, FAST_COMPILE)(networks, key(3), data)


def test_a_long_loop_is_a_particle_filter():
    """Evidence, filtered means and what is left of early draws, over sixty steps."""
    proposal, networks, data = prepared(60)
    log_evidence, means, variances = kalman(np.asarray(data["y_…"]))
    population, info = run(proposal, networks, data, 1.0, 2000)
    error = float(info.log_evidence_se)
    assert error < 0.3
    assert abs(float(population.log_evidence.value()) - log_evidence) < 4 * error
    weights = np.exp(population.log_weights)
    last = np.average(population.values["x_…"][:, -1], weights=weights)
    assert abs(last - means[-1]) < 0.2 * np.sqrt(variances[-1])
    assert info.ess_by_stage.shape == (60,)
    assert info.ancestors.shape == (59, 2000)
    # Few of the first draws have descendants, nearly all of the last.
    left = np.asarray(info.survivors["x_…"])
    assert left.shape == (60,)
    assert np.all(np.diff(left) >= -1e-3 * left[-1])
    assert left[0] < 0.2 * left[-1]


def test_every_particle_has_its_own_ancestors_values():
    proposal, networks, data = prepared(12)
    population, info = run(proposal, networks, data, 1.0, 30)
    for t in range(11):
        line = np.arange(30)
        for chosen in info.ancestors[t:][::-1]:
            line = chosen[line]
        _, counts = np.unique(line, return_counts=True)
        _, copies = np.unique(population.values["x_…"][:, t], return_counts=True)
        assert sorted(copies) == sorted(counts)


def test_evidence_is_unbiased():
    """With networks that have learned nothing."""
    proposal, networks, data = prepared(8, analytic=False)
    sampler = SMC(proposal, 200, systematic, 0.5)

    def evidence(rng_key):
        return sampler.run(networks, rng_key, data)[0].log_evidence

    found = CompiledFunction(jax.vmap(evidence), FAST_COMPILE)(jax.random.split(key(5), 300))
    ratio = np.exp(found.value() - kalman(np.asarray(data["y_…"]))[0])
    error = ratio.std(ddof=1) / np.sqrt(len(ratio))
    assert error < 0.1
    assert abs(ratio.mean() - 1) < 3 * error


def test_loops_get_conditionals_in_closed_form():
    """x_t given x_{t−1} and y_t is normal: no network is needed, and the filter is exact a step."""
    proposal = Proposal.of(rd.invert(traced(20), "filter"))
    (structure,) = proposal.estimated.values()
    assert structure.knowledge.requirements == "normal"


ANSWERED = ["two_steps_back", "plates_masks_and_deterministic_sites", "independent_copies"]


@pytest.mark.parametrize("name", ANSWERED)
def test_answers_have_the_users_names(name):
    answers, data = compiled(name), data_of(name)
    graph = answers.graph
    posterior = answers.infer(key(1), data, 60, rescue=False)
    values = site_values(CASES[name].model)
    deterministic = set(graph.program.deterministic(values))
    assert set(posterior.samples) == set(graph.latent) | deterministic
    assert list(posterior.samples)[: len(graph.latent)] == list(graph.latent)
    for site in graph.latent:
        assert posterior.samples[site].shape == (60, *np.shape(values[site]))
        assert isinstance(posterior.samples[site], jax.Array)
        assert posterior.mcse(site).shape == np.shape(values[site])
    assert set(posterior.data) == set(data)
    assert posterior.filtered is None
    last = graph.latent[-1]
    assert any(str(row).startswith(last) for row in posterior.summary().index)
    assert last in posterior.to_arviz()["posterior"]


@pytest.mark.parametrize("name", ANSWERED)
def test_many_data_sets_are_one_after_the_other(name):
    answers = compiled(name)
    rows = [data_of(name, seed) for seed in (1, 2)]
    many = {site: np.stack([row[site] for row in rows]) for site in rows[0]}
    posterior = answers.infer_many(key(1), many, 40, rescue=False)
    for number, row in enumerate(rows):
        one = posterior[number]
        assert set(one.samples) == set(answers.infer(key(2), row, 40, rescue=False).samples)
        for site, value in row.items():
            mask = answers.graph.sites[site].mask
            # Masked elements are no data: they hold a constant, whatever the user's values.
            expected = value if mask is None else np.where(mask, value, 0.0)
            np.testing.assert_allclose(one.data[site], expected, rtol=1e-6)
        assert np.isfinite(one.log_evidence)


@pytest.mark.parametrize("name", ["two_steps_back", "independent_copies"])
def test_weights_are_the_models_density_over_that_of_the_proposal(name):
    """By NumPyro's own density of the model as the user wrote it."""
    answers, data = compiled(name), data_of(name)
    samples, log_q = answers.propose(key(4), data, 8)
    np.testing.assert_allclose(answers.log_prob(samples, data), log_q, rtol=1e-3, atol=1e-3)
    posterior = answers.infer(key(5), data, 8, method="importance", rescue=False)

    def joint(latents):
        values = {**data, **{n: latents[n] for n in answers.graph.latent}}
        return sum(d.sum() for d in answers.graph.program.log_density(values).values())

    latents = {n: posterior.samples[n] for n in answers.graph.latent}
    log_weights = jax.vmap(joint)(latents) - answers.log_prob(latents, data)
    expected = log_weights - jax.nn.logsumexp(log_weights)
    np.testing.assert_allclose(posterior.log_weights, expected, rtol=1e-3, atol=2e-3)


def test_tempering_speaks_of_the_users_sites():
    name = "two_steps_back"
    posterior = compiled(name).infer(key(6), data_of(name), 80, method="temper")
    assert set(posterior.samples) == set(compiled(name).graph.latent)
    assert posterior.samples["x_3"].shape == (80,)


def test_wrong_data_are_told_by_the_users_names():
    answers, data = compiled("two_steps_back"), data_of("two_steps_back")
    with pytest.raises(rd.DataError, match="lacks site 'y_3'"):
        answers.infer(key(), {n: v for n, v in data.items() if n != "y_3"})
    with pytest.raises(rd.DataError, match=r"'n_2'.*outside the support"):
        answers.infer(key(), {**data, "n_2": 7})


def test_where_it_fails_is_told():
    """A site that no particle makes possible is known by its name, in a loop as elsewhere."""
    answers, data = compiled("moving_support"), data_of("moving_support")
    with pytest.raises(rd.DataError, match=r"positive density to 'y_3'\."):
        answers.infer(key(6), {**data, "y_3": 1e6}, 50, method="smc", rescue=False)
    with pytest.raises(rd.DataError, match=r"positive density to 'y_3'\."):
        answers.infer(key(6), {**data, "y_3": 1e6}, 50, method="temper")


def test_draws_that_cannot_be_used_are_told_by_the_users_names():
    def heavy():
        x = 0.0
        for t in range(4):
            x = numpyro.sample(f"x_{t}", dist.Normal(0.5 * x, 1.0))
            numpyro.sample(f"n_{t}", dist.Poisson(jnp.exp(x + 12.0 * (t == 2))))

    graph = rd.trace(heavy, [f"n_{t}" for t in range(4)])
    names = list(graph.sites)
    values = {name: jnp.zeros((), site.dtype) for name, site in graph.sites.items()}
    stacked = jax.tree.map(jnp.asarray, stack_steps(graph.lifted, {**values, "n_2": 2**31 - 1}))
    from retrodict.graph.prior_draws import REASONS, fault_code

    density = graph.lifted.program.log_density(stacked)
    site, reason = divmod(int(fault_code(graph.lifted, stacked, density)) - 1, len(REASONS))
    assert (names[site], REASONS[reason]) == ("n_2", "integer overflow")


def test_calibration_is_of_the_users_sites():
    checked = rd.calibrate(key(8), compiled("two_steps_back"), num_datasets=8, num_particles=20)
    assert set(checked.ranks) == set(compiled("two_steps_back").graph.latent)


def test_an_artefact_of_a_loop_is_loaded(tmp_path):
    name = "two_steps_back"
    answers, data = compiled(name), data_of(name)
    again = rd.load(answers.save(tmp_path / "loop.rd"), CASES[name].model)
    assert list(again.graph.sites) == list(answers.graph.sites)
    one, other = (a.infer(key(9), data, 50, rescue=False) for a in (answers, again))
    assert one.log_evidence == pytest.approx(other.log_evidence, rel=1e-5)


def test_a_loop_cannot_be_streamed():
    with pytest.raises(ValueError, match="written as a Python loop"):
        compiled("starts_from_a_number").filter_init(key(), 10)
