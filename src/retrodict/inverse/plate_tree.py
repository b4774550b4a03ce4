"""An inverse in; whether it is a tree over plates, and where its densities are counted, out.

What divide and conquer needs to know of the structure, see `retrodict.divide`.
"""

from retrodict.graph.graph import Graph
from retrodict.inverse.factors import Factor
from retrodict.inverse.inverse import Inverse


def divisible(inverse: Inverse) -> bool:
    """Whether the factors form a tree over plates, drawn from the leaves to the root."""
    graph, factors = inverse.graph, inverse.factors
    if graph.scan_lengths or any(factor.own for factor in factors):
        return False
    return any(f.plates for f in factors) and all(_is_local(graph, factor) for factor in factors)


def _is_local(graph: Graph, factor: Factor) -> bool:
    """Whether a copy of a factor looks only at latents of its own plate elements."""
    if set(graph.sites[factor.latents[0]].plates) != set(factor.plates):
        return False  # elements drawn jointly belong to one population
    for seen in factor.inputs:
        site = graph.sites[seen.site]
        if site.observed:
            continue
        for number, plate in enumerate(factor.plates):
            if plate not in site.plates:
                return False
            if not seen.relation.aligned(number, site.plates.index(plate)):
                return False
    return True


def counted(inverse: Inverse) -> dict[str, int]:
    """The factor at which each site's density is counted; −1 where it needs no latents.

    That is where its last variable has arrived and the populations are of plates it lies in; the
    number of factors, where there is no such one.
    """
    graph, factors = inverse.graph, inverse.factors
    drawn = {name: n for n, factor in enumerate(factors) for name in factor.latents}
    when = {}
    for name, site in graph.sites.items():
        arrived = max(drawn.get(n, -1) for n in (name, *graph.parents(name)))
        fits = [
            n
            for n, factor in enumerate(factors)
            if n >= arrived and set(factor.plates) <= set(site.plates)
        ]
        when[name] = -1 if arrived < 0 else min(fits, default=len(factors))
    return when


def needing_marginals(inverse: Inverse) -> list[Factor]:
    """Factors whose latents are weighted before their own prior is counted."""
    if not divisible(inverse):
        return []
    when = counted(inverse)
    return [
        factor
        for number, factor in enumerate(inverse.factors)
        if any(when[name] > number for name in factor.latents)
    ]
