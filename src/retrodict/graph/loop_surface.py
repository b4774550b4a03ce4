"""Translate between the user's sites and those that stand for the sites of a Python loop."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from retrodict.graph.graph import Edge, Graph, Site, Support
from retrodict.graph.index_relations import Relation


def stack_steps(graph: Graph, values: Mapping[str, Any], axis: int = 0) -> dict[str, Any]:
    """Values of the user's sites as those of the lifted graph's.

    Args:
        graph: the lifted one.
        values: by the user's names; sites of a loop are all there, or none is.
        axis: where the steps go: behind as many leading axes.
    """
    found = dict(values)
    for name, steps in _steps(graph):
        if steps[0] in values:
            found[name] = np.stack([np.asarray(found.pop(step)) for step in steps], axis)
    return found


def split_steps(graph: Graph, values: Mapping[str, Any], axis: int = 0) -> dict[str, Any]:
    """Values of the lifted graph's sites by the user's names: sites in program order, then others.

    Entries of a loop are NumPy's, and views of one array. What has no axis of steps is repeated.

    Args:
        graph: the lifted one.
        values: by names of the lifted graph.
        axis: that of the steps, behind as many leading axes.
    """
    if not graph.loops:
        return dict(values)
    found = dict(values)
    for name, steps in _steps(graph):
        if name in found:
            array = np.asarray(found.pop(name))
            if array.ndim > axis:
                rows: Iterable[Any] = np.ascontiguousarray(np.moveaxis(array, axis, 0))
            else:
                rows = [array] * len(steps)
            found |= zip(steps, rows, strict=True)
    order = [name for name in graph.surface.sites if name in found]
    return {name: found[name] for name in dict.fromkeys([*order, *found])}


def on_device(values: Mapping[str, Any]) -> dict[str, Array]:
    """JAX's arrays in the same order, all put there at once."""
    return dict(zip(values, jax.device_put(list(values.values())), strict=True))


def by_user_site(graph: Graph, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of the lifted graph's sites by the user's names, where there is one for each step."""
    own = {name: flag for name, flag in flags.items() if np.ndim(flag) and graph.sites[name].steps}
    rest = {name: np.all(flag) for name, flag in flags.items() if name not in own}
    return split_steps(graph, own) | rest


def _steps(graph: Graph) -> Iterator[tuple[str, tuple[str, ...]]]:
    return ((name, steps) for loop in graph.loops for name, steps in loop.items())


def surface_graph(graph: Graph) -> Graph:
    """The graph with the user's sites in place of those that stand for the sites of a loop."""
    sites: dict[str, Site] = {}
    loops = {name: loop for loop in graph.loops for name in loop}
    for site in graph.sites.values():
        if not site.steps:
            sites[site.name] = site
        elif site.steps[0] not in sites:
            together = [graph.sites[name] for name in loops[site.name] if name in graph.sites]
            for step in range(len(site.steps)):
                sites |= {s.steps[step]: _step_site(s, step) for s in together}
    relations: dict[tuple[str, str], Relation] = {
        (parent, child): relation
        for edge in graph.edges
        for parent, child, relation in _step_relations(graph, edge)
    }
    order = {name: number for number, name in enumerate(sites)}
    pairs = sorted(relations, key=lambda pair: (order[pair[1]], order[pair[0]]))
    guarded = [graph.sites[name] for name in graph.program.guarded]
    assert graph.user_program is not None
    program = replace(
        graph.user_program,
        guarded=frozenset(name for site in guarded for name in site.steps or (site.name,)),
    )
    inside = {site.scan for site in graph.sites.values() if site.steps}
    own = [number for number in range(len(graph.scan_lengths)) if number not in inside]
    return replace(
        graph,
        sites=sites,
        edges=tuple(Edge(*pair, relations[pair]) for pair in pairs),
        plates={
            name: size
            for name, size in graph.plates.items()
            if any(name in site.plates for site in sites.values())
        },
        scan_lengths=tuple(graph.scan_lengths[number] for number in own),
        reversed_scans=tuple(graph.reversed_scans[number] for number in own),
        carries=tuple(carry for carry in graph.carries if carry.key.scan in own),
        program=program,
        loops=(),
        source=graph,
    )


def _step_site(site: Site, step: int) -> Site:
    """One step of a site that stands for those of a loop."""

    def bound(leaf: Any) -> Any:
        if not np.ndim(leaf):
            return leaf
        own = np.asarray(leaf)[step]
        return own.flat[0].item() if np.all(own == own.flat[0]) else own

    support: Support = jax.tree.map(bound, site.support)
    return replace(
        site,
        name=site.steps[step],
        shape=site.shape[1:],
        support=support,
        plates=site.plates if site.time else site.plates[1:],
        time=False,
        axes=tuple(axis - 1 for axis in site.axes[1:]),
        scan=None,
        steps=(),
        heterogeneous_axes=tuple(axis - 1 for axis in site.heterogeneous_axes if axis),
    )


def _step_relations(graph: Graph, edge: Edge) -> Iterator[tuple[str, str, Relation]]:
    """Parent, child and relation between the user's sites, for an edge of the lifted graph."""
    parent, child = graph.sites[edge.parent], graph.sites[edge.child]
    for step, name in enumerate(child.steps or (child.name,)):
        of_child = edge.relation.fix(left={0: step}) if child.steps else edge.relation
        for parent_step, parent_name in enumerate(parent.steps or (parent.name,)):
            relation = of_child.fix(right={0: parent_step}) if parent.steps else of_child
            if relation:
                yield parent_name, name, relation
