"""Give a posterior the user's site names, where sites of a Python loop are one site inside."""

from dataclasses import replace

from retrodict.graph.graph import Graph
from retrodict.graph.loop_surface import on_device, split_steps
from retrodict.particles.posterior import Posterior


def user_posterior(graph: Graph, posterior: Posterior) -> Posterior:
    """The posterior with one entry for each of the user's sites.

    Args:
        graph: the one whose names the posterior has.
        posterior: of one data set, or of many.
    """
    leading = posterior.log_weights.ndim
    samples = on_device(split_steps(graph, posterior.samples, leading))
    if not graph.loops:
        return replace(posterior, samples=samples)
    return replace(
        posterior,
        samples=samples,
        survivors=split_steps(graph, posterior.survivors, leading - 1),
        data=on_device(split_steps(graph, posterior.data, leading - 1)),
        filtered=None,
        filtered_log_weights=None,
    )
