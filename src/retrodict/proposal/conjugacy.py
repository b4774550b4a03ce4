"""Recognise a factor's conditional as a member of a known family.

A conditional is closed if every density that the latents take part in can be evaluated when they
are drawn: their own, and those of all their children. The product of these densities is the target
up to a constant, and a family that it belongs to can be sampled without a network. Membership is
not read from the names of distributions but tested on draws from the prior: the importance weights
of draws from the family must be nearly equal.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array

from retrodict._xla.jit import run_once
from retrodict._xla.tuning import MAX_TESTED_DENSITIES
from retrodict.errors import UnsupportedModel
from retrodict.estimators.analytic.bit_sums import BitSums
from retrodict.estimators.analytic.estimator import AnalyticEstimator
from retrodict.estimators.analytic.family import Family
from retrodict.estimators.analytic.finite import Finite
from retrodict.estimators.analytic.gamma_beta import Beta, Gamma
from retrodict.estimators.analytic.normal import Normal
from retrodict.estimators.coordinates import Latent, blocks, coordinate_table
from retrodict.estimators.scalar_bijections import ABOVE, BETWEEN, IDENTITY
from retrodict.graph.prior_draws import JointDraws, PriorSampler
from retrodict.proposal.bit_sum_recognition import (
    bit_sum_constants,
    find_bit_sum,
    restore_bit_sum,
)
from retrodict.proposal.closed_conditional import ClosedConditional
from retrodict.proposal.factor_model import FactorModel
from retrodict.proposal.model_knowledge import FamilyFacts
from retrodict.proposal.reference_draws import at_references, pick, reference_draws
from retrodict.proposal.scope import Scope

# States that are enumerated, once per data set or for every particle, and dimensions of a normal.
MAX_STATES, MAX_STATES_PER_PARTICLE, MAX_NORMAL = 1024, 64, 8
# Densities evaluated for one copy and particle; a network costs about as much.
MAX_EVALUATIONS = 1024
# Draws from the family for each reference draw; their importance ESS must exceed this share for
# all but a few of the reference draws.
NUM_WEIGHTED, LEAST_ESS, EXCEPTIONS = 32, 0.97, 0.02


def find_conditional(model: FactorModel, sample_prior: PriorSampler) -> ClosedConditional | None:
    """The conditional of a factor if it is closed and of a known family."""
    if not model.is_closed():
        return None
    families = [family for family in candidates(model.copies.latents) if _is_cheap(model, family)]
    if families:
        references = reference_draws(model, sample_prior)
        start = _typical_values(model, references)
        for family in families:
            conditional = ClosedConditional(FamilyFacts(family.name, start), model, family)
            if not family.defensive or _is_exact(conditional, references):
                return conditional
    bit_sum = find_bit_sum(model, sample_prior)
    return None if bit_sum is None else _with_bit_sum(model, bit_sum)


def restore_conditional(
    model: FactorModel, facts: FamilyFacts, sample_prior: PriorSampler
) -> ClosedConditional | None:
    """The conditional that was recognised before; None if the family does not fit any more.

    Constants that depend on the model's arguments are determined again where `facts` has none.
    """
    if not model.is_closed():
        return None
    if facts.name == BitSums.name:
        if facts.constants:
            return ClosedConditional(facts, model, restore_bit_sum(facts.constants))
        bit_sum = find_bit_sum(model, sample_prior)
        if bit_sum is None:
            raise UnsupportedModel(
                f"site '{model.factor.latents[0]}': with the arguments that the model was compiled "
                f"with, each bit shifted '{model.children[0].name}' by a constant amount; with "
                "these, the amount differs between draws. Compile the model again with these "
                "arguments"
            )
        return _with_bit_sum(model, bit_sum)
    families = {family.name: family for family in candidates(model.copies.latents)}
    family = families.get(facts.name)
    return None if family is None else ClosedConditional(facts, model, family)


def _with_bit_sum(model: FactorModel, family: BitSums) -> ClosedConditional:
    start = (0.0,) * len(family.order)
    facts = FamilyFacts(family.name, start, bit_sum_constants(family))
    return ClosedConditional(facts, model, family)


def candidates(latents: tuple[Latent, ...]) -> tuple[Family, ...]:
    """Families whose support is that of the latents."""
    kinds = {block.kind for block in blocks(latents)}
    c = coordinate_table(latents)
    if kinds <= {"bernoulli", "categorical"}:
        sizes = tuple(int(upper) + 1 for upper in c.upper)
        return (Finite(sizes),) if np.prod(sizes, dtype=float) <= MAX_STATES else ()
    if kinds != {"mixture"} or not all(block.elementwise for block in blocks(latents)):
        return ()
    if np.all(c.bijection == IDENTITY) and c.bijection.size <= MAX_NORMAL:
        return (Normal(),)
    if c.bijection.size == 1 and c.bijection[0] == ABOVE:
        return (Gamma(), Gamma(inverse=True))
    if c.bijection.size == 1 and c.bijection[0] == BETWEEN and (c.lower[0], c.upper[0]) == (0, 1):
        return (Beta(),)
    return ()


def _is_cheap(model: FactorModel, family: Family) -> bool:
    """Whether the parameters can be computed for every particle, or once if data decide them."""
    entries = model.num_observations + coordinate_table(model.copies.latents).lower.size
    latent = [name for name in model.factor.context if not model.graph.sites[name].observed]
    if not latent and model.scan is None:
        return family.evaluations * entries <= 64 * MAX_EVALUATIONS
    per_particle = family.evaluations <= MAX_STATES_PER_PARTICLE
    return per_particle and family.evaluations * entries <= MAX_EVALUATIONS


def _typical_values(model: FactorModel, references: JointDraws) -> tuple[float, ...]:
    """The median of each coordinate, measured from its lower bound."""
    latents = {name: references.values[name] for name in model.factor.latents}
    if model.scan is not None:
        latents = {name: array[:, -1] for name, array in latents.items()}
    rows = np.asarray(run_once(jax.vmap(model.copies.rows), latents))
    c = coordinate_table(model.copies.latents)
    flat = rows.reshape(-1, rows.shape[-1]) - c.lower
    flat = np.where(np.isfinite(flat), flat, np.nan)
    median = np.nan_to_num(np.nanmedian(flat, 0))
    # A lower bound itself is no point at which to take derivatives.
    least = np.where(c.min_value > -1e30, 1e-6, -np.inf)
    return tuple(map(float, np.maximum(median, least)))


def _is_exact(conditional: ClosedConditional, references: JointDraws) -> bool:
    """Whether draws from the family have nearly equal weights, for data from the model."""
    model = conditional.model
    estimator = AnalyticEstimator.of(conditional.family, model.copies.latents)

    def relative_ess(scope: Scope, index: tuple[Array, ...], draw: Array) -> Array:
        target = model.target(scope, stable=True).log_density
        parameters = pick(index, conditional.at(scope))
        key = jax.random.fold_in(jax.random.key(0), draw)

        def log_weight(noise: Any) -> Array:
            x, log_q = estimator.sample(parameters, noise)
            row = estimator.row(x)
            everywhere = jnp.broadcast_to(row, (*model.copies.plate_sizes, row.size))
            return target(everywhere)[index] - log_q

        log_weights = jax.vmap(log_weight)(estimator.noise(key, (NUM_WEIGHTED,)))
        return jnp.exp(2 * logsumexp(log_weights) - logsumexp(2 * log_weights)) / NUM_WEIGHTED

    # The density of one copy costs that of all; for large plates a few draws suffice.
    copies = int(np.prod(model.copies.plate_sizes))
    entries = copies * (model.num_observations + len(conditional.facts.start))
    count = max(8, MAX_TESTED_DENSITIES // (NUM_WEIGHTED * entries))
    shares = np.asarray(at_references(model, relative_ess, references, count))
    return bool(np.quantile(shares, EXCEPTIONS) > LEAST_ESS)
