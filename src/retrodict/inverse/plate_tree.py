"""Whether an inverse is a tree over plates, as divide and conquer requires."""

from retrodict.graph.graph import Graph
from retrodict.inverse.density_schedule import DensitySchedule
from retrodict.inverse.factors import Factor
from retrodict.inverse.inverse import Inverse


def divisible(inverse: Inverse) -> bool:
    """Whether the factors form a tree over plates, sampled from the leaves to the root."""
    graph, factors = inverse.graph, inverse.factors
    if graph.scan_lengths or any(factor.from_prior for factor in factors):
        return False
    return any(f.plates for f in factors) and all(_is_local(graph, factor) for factor in factors)


def _is_local(graph: Graph, factor: Factor) -> bool:
    """Whether a copy of a factor reads only latents of the same plate elements."""
    if set(graph.sites[factor.latents[0]].plates) != set(factor.plates):
        return False  # elements sampled jointly belong to one population
    for source in factor.inputs:
        site = graph.sites[source.site]
        if site.observed:
            continue
        for number, plate in enumerate(factor.plates):
            if plate not in site.plates:
                return False
            if not source.relation.aligned(number, site.plates.index(plate)):
                return False
    return True


def needing_marginals(inverse: Inverse) -> list[Factor]:
    """Factors whose latents are weighted before their prior is counted."""
    if not divisible(inverse):
        return []
    return [inverse.factors[stage] for stage in DensitySchedule(inverse).marginal_stages]
