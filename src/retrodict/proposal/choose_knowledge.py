"""Choose what a factor's proposal takes from the model."""

import jax
import jax.numpy as jnp

from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import PriorSampler
from retrodict.proposal.conjugacy import find_conditional, restore_conditional
from retrodict.proposal.contexts import ContextTree, follows_time
from retrodict.proposal.copies import Copies
from retrodict.proposal.factor_model import FactorModel, known_children
from retrodict.proposal.guide_search import find_guide, restore_guide
from retrodict.proposal.model_knowledge import NO_KNOWLEDGE, Facts, GuideFacts, ModelKnowledge


def find_knowledge(
    graph: Graph, copies: Copies, context: ContextTree, sample_prior: PriorSampler, analytic: bool
) -> ModelKnowledge:
    """The most that the model says of a factor's latents: its conditional, a guide, or nothing.

    Args:
        graph: the model's.
        copies: of the factor.
        context: of the factor.
        sample_prior: joint draws of the model.
        analytic: whether to search for a conditional in closed form.
    """
    model = _factor_model(graph, copies)
    if model is None or _carries_keys(graph, model.scan):
        return NO_KNOWLEDGE
    conditional = None
    # A filter's conditional ends with its step; a proposal that reads the future does not.
    if analytic and not context.series:
        conditional = find_conditional(model, sample_prior)
    return conditional or find_guide(model, sample_prior) or NO_KNOWLEDGE


def restore_knowledge(
    graph: Graph, copies: Copies, facts: Facts | None, sample_prior: PriorSampler
) -> ModelKnowledge:
    """The result of `find_knowledge` for a model whose facts were determined before."""
    model = _factor_model(graph, copies)
    if model is None or facts is None:
        return NO_KNOWLEDGE
    if isinstance(facts, GuideFacts):
        return restore_guide(model, facts)
    return restore_conditional(model, facts, sample_prior) or NO_KNOWLEDGE


def _factor_model(graph: Graph, copies: Copies) -> FactorModel | None:
    """The model of a factor; None if it is drawn against the direction of time."""
    scan = follows_time(graph, copies.factor)
    if copies.factor.time and scan is None:
        return None
    return FactorModel(graph, copies, scan, known_children(graph, copies.factor, scan))


def _carries_keys(graph: Graph, scan: int | None) -> bool:
    """Whether random keys go from step to step, so that a carry cannot be rebuilt from numbers."""
    if scan is None:
        return False
    outer = {n: s for n, s in graph.sites.items() if s.scan != scan}
    shapes = {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in outer.items()}  # type: ignore[no-untyped-call]
    carry = jax.eval_shape(lambda v: graph.program.initial_carry(scan, v), shapes)
    return any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(carry))
