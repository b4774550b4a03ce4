"""Bits whose sum is observed with normal noise are recognised, and get their exact posterior."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp

import retrodict as rd
import zoo
from retrodict.estimators.analytic.bit_sums import BitSums
from retrodict.inference.methods import Inference
from retrodict.proposal import conjugacy
from retrodict.proposal.bit_sum_recognition import (
    bit_sum_constants,
    find_bit_sum,
    restore_bit_sum,
)
from retrodict.proposal.closed_conditional import ClosedConditional
from retrodict.proposal.copies import Copies
from retrodict.proposal.factor_model import FactorModel, known_children
from retrodict.proposal.linear_guide import LinearGuide
from retrodict.proposal.proposal import Proposal

EFFECTS = np.array([5.0, 3.0, -4.0, 2.0, 1.5, 0.7, -2.5])


def devices(noise="normal"):
    """Bits, and one observation of their sum."""
    scale, probability = 0.8, jnp.full(len(EFFECTS), 0.3)
    if noise == "chained":
        first = numpyro.sample("first", dist.Bernoulli(probability).to_event(1))
        probability = jnp.where(first == 1, 0.8, 0.2)
    x = numpyro.sample("x", dist.Bernoulli(probability).to_event(1))
    mean = jnp.sum(EFFECTS * x) + (jnp.sum(first) if noise == "chained" else 0.0)
    if noise == "student":
        numpyro.sample("y", dist.StudentT(4.0, mean, scale))
    elif noise == "louder":
        numpyro.sample("y", dist.Normal(mean, scale + 0.5 * x[0]))
    else:
        numpyro.sample("y", dist.Normal(mean, scale))


CASES = [("normal", True), ("student", False), ("louder", False), ("chained", False)]


@pytest.fixture
def few_states(monkeypatch):
    """Seven bits have few states, which would be enumerated."""
    monkeypatch.setattr(conjugacy, "MAX_STATES", 4)


@pytest.mark.parametrize(("noise", "recognised"), CASES)
def test_only_independent_bits_with_normal_noise_are_recognised(noise, recognised, few_states):
    proposal = Proposal.of(rd.invert(rd.trace(devices, ("y",), model_args=(noise,))))
    (structure,) = proposal.estimated.values()
    graph, factor = proposal.graph, structure.factor
    children = known_children(graph, factor, None)
    model = FactorModel(graph, Copies.of(graph, factor), None, children)
    family = find_bit_sum(model, proposal.sample_prior)
    assert (family is not None) == recognised
    assert isinstance(structure.knowledge, ClosedConditional if recognised else LinearGuide)
    if recognised:
        assert structure.knowledge.family == family
        np.testing.assert_array_equal(family.order, np.argsort(-np.abs(EFFECTS)))
        np.testing.assert_allclose(family.effects, EFFECTS[list(family.order)], rtol=1e-4)
        assert restore_bit_sum(bit_sum_constants(family)) == family


def test_exact_posterior_needs_no_training(tmp_path, few_states):
    training = rd.Training(max_steps=50, dataset_size=512, heldout_size=128)
    compiled = rd.compile(zoo.key(0), devices, ("y",), training=training, progress_bar=False)
    (history,) = compiled.history.networks.values()
    assert history.stopped == "no weights to train" and len(history.loss) == 1
    posterior = compiled.infer(zoo.key(1), {"y": 4.1}, 2000, method="importance")
    states = np.array(list(product((0.0, 1.0), repeat=len(EFFECTS))))
    log_p = states @ np.full(7, np.log(0.3)) + (1 - states) @ np.full(7, np.log(0.7))
    log_p = log_p + np.asarray(dist.Normal(states @ EFFECTS, 0.8).log_prob(4.1))
    evidence = float(logsumexp(log_p))
    assert posterior.ess > 0.97 * 2000
    assert abs(posterior.log_evidence - evidence) < 4 * posterior.log_evidence_se + 1e-4
    marginals = np.exp(log_p - evidence) @ states
    error = np.sqrt(marginals * (1 - marginals) / 2000)
    np.testing.assert_array_less(np.abs(posterior.mean("x") - marginals), 4.5 * error + 1e-3)
    compiled.save(tmp_path / "devices.rd")
    loaded = rd.load(tmp_path / "devices.rd", devices)
    same = loaded.infer(zoo.key(1), {"y": 4.1}, 2000, method="importance")
    np.testing.assert_array_equal(same.samples["x"], posterior.samples["x"])
    longer = compiled.train(zoo.key(2), training)
    assert longer.history.networks.keys() == compiled.history.networks.keys()


def scaled(factor=1.0):
    x = numpyro.sample("x", dist.Bernoulli(jnp.full(len(EFFECTS), 0.3)).to_event(1))
    numpyro.sample("y", dist.Normal(factor * jnp.sum(EFFECTS * x), 0.8))


def test_effects_are_found_again_for_other_arguments(few_states):
    proposal = Proposal.of(rd.invert(rd.trace(scaled, ("y",), model_args=(1.0,))))
    (knowledge,) = (s.knowledge for s in proposal.estimated.values())
    assert isinstance(knowledge.family, BitSums)
    other = Inference(proposal).called_with((2.0,), None).proposal
    (family,) = (s.knowledge.family for s in other.estimated.values())
    np.testing.assert_allclose(family.effects, 2 * EFFECTS[list(family.order)], rtol=1e-4)


def test_answers_with_other_arguments_use_their_effects(few_states):
    training = rd.Training(max_steps=50, dataset_size=512, heldout_size=128)
    compiled = rd.compile(zoo.key(0), scaled, ("y",), training=training, progress_bar=False)
    posterior = compiled.infer(zoo.key(1), {"y": 8.2}, 2000, method="importance", model_args=(2.0,))
    states = np.array(list(product((0.0, 1.0), repeat=len(EFFECTS))))
    log_p = states @ np.full(7, np.log(0.3)) + (1 - states) @ np.full(7, np.log(0.7))
    log_p = log_p + np.asarray(dist.Normal(2 * states @ EFFECTS, 0.8).log_prob(8.2))
    assert posterior.ess > 0.97 * 2000
    evidence = float(logsumexp(log_p))
    assert abs(posterior.log_evidence - evidence) < 4 * posterior.log_evidence_se + 1e-4


def uneven(extra):
    """Bits whose effects may depend on a covariate."""
    z = numpyro.sample("z", dist.Uniform(0.0, 1.0))
    x = numpyro.sample("x", dist.Bernoulli(jnp.full(len(EFFECTS), 0.3)).to_event(1))
    numpyro.sample("y", dist.Normal((1 + extra * z) * jnp.sum(EFFECTS * x), 0.8))


def test_arguments_for_which_effects_vary_are_refused(few_states):
    proposal = Proposal.of(rd.invert(rd.trace(uneven, ("z", "y"), model_args=(0.0,))))
    assert all(facts.constants for facts in proposal.facts.values())
    with pytest.raises(rd.UnsupportedModel, match=r"'x'.*'y'.*Compile the model again"):
        Inference(proposal).called_with((1.0,), None)
