"""Translate between the user's sites `x_0, x_1, …` and the lifted sites of Python loops."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from retrodict.graph.graph import Edge, Graph, Site, Support


def stack_steps(graph: Graph, values: Mapping[str, Any], axis: int = 0) -> dict[str, Any]:
    """Values of the user's sites as values of the lifted graph's sites.

    Args:
        graph: the lifted graph.
        values: values by the user's names; of the sites of a loop, all or none.
        axis: the position of the new axis of steps.
    """
    stacked = dict(values)
    for name, steps in _steps(graph):
        if steps[0] in values:
            stacked[name] = np.stack([np.asarray(stacked.pop(step)) for step in steps], axis)
    return stacked


def split_steps(graph: Graph, values: Mapping[str, Any], axis: int = 0) -> dict[str, Any]:
    """Values of the lifted graph's sites by the user's names: sites in program order, then others.

    Values of the steps of a loop are views of one NumPy array. A value without an axis of steps is
    repeated.

    Args:
        graph: the lifted graph.
        values: values by names of the lifted graph.
        axis: the axis of steps.
    """
    if not graph.loops:
        return dict(values)
    split = dict(values)
    for name, steps in _steps(graph):
        if name in split:
            array = np.asarray(split.pop(name))
            if array.ndim > axis:
                entries: Iterable[Any] = np.ascontiguousarray(np.moveaxis(array, axis, 0))
            else:
                entries = [array] * len(steps)
            split |= zip(steps, entries, strict=True)
    order = [name for name in graph.surface.sites if name in split]
    return {name: split[name] for name in dict.fromkeys([*order, *split])}


def on_device(values: Mapping[str, Any]) -> dict[str, Array]:
    """Values as JAX arrays in the same order, transferred all at once."""
    return dict(zip(values, jax.device_put(list(values.values())), strict=True))


def by_user_site(graph: Graph, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of the lifted graph's sites by the user's names, where there is one for each step."""
    by_step = {
        name: flag for name, flag in flags.items() if np.ndim(flag) and graph.sites[name].steps
    }
    rest = {name: np.all(flag) for name, flag in flags.items() if name not in by_step}
    return split_steps(graph, by_step) | rest


def _steps(graph: Graph) -> Iterator[tuple[str, tuple[str, ...]]]:
    return ((name, steps) for loop in graph.loops for name, steps in loop.items())


def surface_graph(graph: Graph) -> Graph:
    """The graph with the user's sites in place of the lifted sites of loops."""
    sites: dict[str, Site] = {}
    loops = {name: loop for loop in graph.loops for name in loop}
    for site in graph.sites.values():
        if not site.steps:
            sites[site.name] = site
        elif site.steps[0] not in sites:
            together = [graph.sites[name] for name in loops[site.name] if name in graph.sites]
            for step in range(len(site.steps)):
                sites |= {s.steps[step]: _step_site(s, step) for s in together}
    order = {name: number for number, name in enumerate(sites)}
    edges = (step_edge for edge in graph.edges for step_edge in _step_edges(graph, edge))
    guarded = [graph.sites[name] for name in graph.program.guarded]
    assert graph.user_program is not None
    program = replace(
        graph.user_program,
        guarded=frozenset(name for site in guarded for name in site.steps or (site.name,)),
    )
    lifted = {site.scan for site in graph.sites.values() if site.steps}
    scans = [number for number in range(len(graph.scan_lengths)) if number not in lifted]
    return replace(
        graph,
        sites=sites,
        edges=tuple(sorted(edges, key=lambda edge: (order[edge.child], order[edge.parent]))),
        plates={
            name: size
            for name, size in graph.plates.items()
            if any(name in site.plates for site in sites.values())
        },
        scan_lengths=tuple(graph.scan_lengths[number] for number in scans),
        reversed_scans=tuple(graph.reversed_scans[number] for number in scans),
        carries=tuple(carry for carry in graph.carries if carry.key.scan in scans),
        program=program,
        loops=(),
        source=graph,
    )


def _step_site(site: Site, step: int) -> Site:
    """The user's site at one step of a lifted site."""

    def bound(leaf: Any) -> Any:
        if not np.ndim(leaf):
            return leaf
        bounds = np.asarray(leaf)[step]
        return bounds.flat[0].item() if np.all(bounds == bounds.flat[0]) else bounds

    support: Support = jax.tree.map(bound, site.support)
    return replace(
        site,
        name=site.steps[step],
        shape=site.shape[1:],
        support=support,
        mask=None if site.mask is None else site.mask[step],
        plates=site.plates if site.time else site.plates[1:],
        time=False,
        axes=tuple(axis - 1 for axis in site.axes[1:]),
        scan=None,
        steps=(),
        heterogeneous_axes=tuple(axis - 1 for axis in site.heterogeneous_axes if axis),
    )


def _step_edges(graph: Graph, edge: Edge) -> Iterator[Edge]:
    """The edges between the user's sites for an edge of the lifted graph."""
    parent, child = graph.sites[edge.parent], graph.sites[edge.child]
    for step, name in enumerate(child.steps or (child.name,)):
        of_child = edge.relation.fix(left={0: step}) if child.steps else edge.relation
        for parent_step, parent_name in enumerate(parent.steps or (parent.name,)):
            relation = of_child.fix(right={0: parent_step}) if parent.steps else of_child
            if relation:
                yield Edge(parent_name, name, relation)
