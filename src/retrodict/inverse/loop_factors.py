"""Rewrite factors of lifted loops as factors of the user's sites `x_0, x_1, …`."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from retrodict.graph.graph import Graph
from retrodict.graph.index_relations import Relation
from retrodict.inverse.factors import Factor, Input


def user_factors(graph: Graph, factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """The factors of the user's sites, in sampling order.

    Args:
        graph: the graph in which loops are scans and plates.
        factors: the factors of its inverse.
    """
    user: list[Factor] = []

    def series(factor: Factor) -> int | None:
        first = graph.sites[factor.latents[0]]
        return first.scan if factor.time and first.steps else None

    for scan, group in itertools.groupby(factors, series):
        together = list(group)
        if scan is None:
            user += [copy for factor in together for copy in _copies(graph, factor)]
            continue
        steps: Sequence[int] = range(graph.scan_lengths[scan])
        for step in reversed(steps) if together[0].backward else steps:
            user += [_copy(graph, factor, step) for factor in together]
    return tuple(user)


def _copies(graph: Graph, factor: Factor) -> Iterator[Factor]:
    """A factor outside of time; one for each step if it is repeated over a loop as a plate."""
    first = graph.sites[factor.latents[0]]
    if first.steps and first.plates[0] in factor.plates:
        yield from (_copy(graph, factor, step) for step in range(len(first.steps)))
    else:
        yield _copy(graph, factor, None)


def _copy(graph: Graph, factor: Factor, step: int | None) -> Factor:
    """A factor at one step of its loop, or at all steps jointly."""
    latents: list[str] = []
    for site in (graph.sites[name] for name in factor.latents):
        latents += site.steps if step is None else (site.steps[step],)
        latents += () if site.steps else (site.name,)
    sites = {
        name: source
        for source in factor.inputs
        for name in _names(graph, factor, source, step)
        if name not in latents
    }
    loops = {s.plates[0] for s in graph.sites.values() if s.steps and not s.time}
    return replace(
        factor,
        latents=tuple(latents),
        context=frozenset(sites),
        plates=tuple(plate for plate in factor.plates if plate not in loops),
        time=factor.time and step is None,
        backward=factor.backward and step is None,
        inputs=tuple(
            Input(name, Relation.of([], source.relation.left, source.relation.right))
            if graph.sites[source.site].steps
            else source
            for name, source in sites.items()
        ),
    )


def _names(graph: Graph, factor: Factor, source: Input, step: int | None) -> Sequence[str]:
    """The user's sites that an input of a factor stands for."""
    site = graph.sites[source.site]
    if not site.steps:
        return (site.name,)
    first = graph.sites[factor.latents[0]]
    plates = ["", *factor.plates] if factor.time else list(factor.plates)
    loop = "" if first.time else (first.plates[0] if first.steps else None)
    ranges = [
        range(size) if step is None or plate != loop else (step,)
        for plate, size in zip(plates, source.relation.left.values(), strict=True)
    ]
    indices = itertools.product(*ranges)
    steps = {other[0] for index in indices for other in source.relation.at(index)}
    return [site.steps[number] for number in sorted(steps)]
