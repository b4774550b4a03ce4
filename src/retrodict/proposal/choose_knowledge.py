"""Choose what a factor's proposal takes from the model."""

from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import PriorSampler
from retrodict.proposal.conjugacy import find_conditional, restore_conditional
from retrodict.proposal.contexts import ContextTree, follows_time
from retrodict.proposal.copies import Copies
from retrodict.proposal.factor_model import FactorModel
from retrodict.proposal.facts import FactorFacts
from retrodict.proposal.guide_search import find_guide, restore_guide
from retrodict.proposal.model_knowledge import ModelKnowledge, NoKnowledge


def choose_knowledge(
    graph: Graph,
    copies: Copies,
    context: ContextTree,
    sample_prior: PriorSampler,
    facts: FactorFacts | None,
    analytic: bool,
) -> ModelKnowledge:
    """The most that the model says of a factor's latents: its conditional, a guide, or nothing.

    Args:
        graph: the model's.
        copies: of the factor.
        context: of the factor.
        sample_prior: joint draws of the model.
        facts: what was found before; None to look for it.
        analytic: whether closed-form conditionals are looked for.
    """
    scan = follows_time(graph, copies.factor)
    if copies.factor.time and scan is None:
        return NoKnowledge()
    model = FactorModel(graph, copies, scan)
    conditional = guide = None
    if facts is None:
        # A filter's conditional ends with its step; a proposal that reads the future does not.
        if analytic and not context.series:
            conditional = find_conditional(model, sample_prior)
        if conditional is None:
            guide = find_guide(model, sample_prior)
    elif facts.family is not None:
        conditional = restore_conditional(model, facts.family, sample_prior)
    elif facts.guide is not None:
        guide = restore_guide(model, facts.guide)
    return conditional or guide or NoKnowledge()
