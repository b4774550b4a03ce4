"""Read the lifted dependency graph of a NumPyro model, without drawing anything.

Python loops over numbered sites are lifted into scans and plates first. Then `jaxpr_dependence`
interprets the densities of all sites as functions of all values: the dependence of each density,
element by element, gives the edges. Supports that depend on other sites are widened to fixed ones.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray
from numpyro.distributions import constraints

from retrodict.errors import UnsupportedModel
from retrodict.graph.dependence import Abstract
from retrodict.graph.evaluation import CarryKey, Evaluation, ModelStructure, SiteRecord
from retrodict.graph.graph import Carry, Edge, Graph, Site, Support
from retrodict.graph.index_atoms import Window
from retrodict.graph.index_relations import Relation
from retrodict.graph.jaxpr_dependence import Constant, dependence_of
from retrodict.graph.loops.lifting import lift
from retrodict.graph.masks import check_masked_latents
from retrodict.graph.obs_values import constant_data, shared_arguments
from retrodict.graph.program import Program

Observed: TypeAlias = Sequence[str] | Mapping[str, Any]


def trace(
    model: Callable[..., Any],
    observed: Observed,
    *,
    model_args: tuple[Any, ...] = (),
    model_kwargs: Mapping[str, Any] | None = None,
) -> Graph:
    """Read the dependency graph of a NumPyro model, without data and without drawing anything.

    Args:
        model: an ordinary NumPyro model.
        observed: the names of the sites that will be data, covariates that are sites included. Or
            a dict from these names to the shape of the data (a tuple) or an example of them, where
            the data have more axes than the site has when the model is called without data; None
            for the site's own shape.
        model_args, model_kwargs: what to call the model with: sizes and fixed covariates.

    Raises:
        UnsupportedModel: the model cannot be compiled; the message says which site and why.

    Example:
        >>> import numpyro, numpyro.distributions as dist
        >>> def coin(n=3):
        ...     p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        ...     with numpyro.plate("tosses", n):
        ...         numpyro.sample("heads", dist.Bernoulli(p))
        >>> sorted(trace(coin, ["heads"]).unroll().edges)
        [('p', 'heads[0]'), ('p', 'heads[1]'), ('p', 'heads[2]')]
    """
    shapes = _data_shapes(observed)
    program = Program(
        model,
        tuple(model_args),
        dict(model_kwargs or {}),
        frozenset(shapes),
        {name: shape for name, shape in shapes.items() if shape is not None},
    )
    program, structure = program.inspect()
    constants = constant_data(program, structure)
    _check_observed(list(shapes), constants, structure.sites)
    _check_shapes(program, structure)
    program = replace(program, observed=program.observed | constants.keys())
    check_masked_latents(program, structure)
    shared = shared_arguments(program, structure)
    lifted = lift(program, structure)
    if lifted.loops:
        graph = _graph(*lifted.program.inspect(), lifted.loops)
    else:
        graph = _graph(program, structure)
    graph = replace(graph, constant_data=constants, shared_arguments=shared)
    return replace(graph, user_program=program).surface if lifted.loops else graph


def _data_shapes(observed: Observed) -> dict[str, tuple[int, ...] | None]:
    """The shape of the data of each site, where it is stated."""
    if isinstance(observed, str):
        observed = (observed,)
    if not isinstance(observed, Mapping):
        return dict.fromkeys(observed)
    return {
        name: value if value is None or _is_shape(value) else np.shape(value)
        for name, value in observed.items()
    }


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


def _check_shapes(program: Program, structure: ModelStructure) -> None:
    for name, shape in program.data_shapes.items():
        if structure.shapes[name].shape != shape:
            raise UnsupportedModel(
                f"observed gives data of site '{name}' the shape {shape}, but the site has shape "
                f"{structure.shapes[name].shape} and cannot be broadcast to it. State the shape of "
                "all data of the site, or change the sizes that are arguments of the model"
            )


class DensityInput(NamedTuple):
    """An input of the densities: the value of a site, or the value at which it is scored."""

    site: str
    scored: bool = False


def _graph(
    program: Program,
    structure: ModelStructure,
    loops: Sequence[Mapping[str, tuple[str, ...]]] = (),
) -> Graph:
    """The graph of a model whose sites have been inspected.

    Args:
        program: the model.
        structure: from its inspection.
        loops: the names of the sites in its Python loops, by the site that stands for them.
    """
    evaluation = _dependence(program, structure)
    densities: Mapping[str, Abstract] = evaluation.log_density
    steps = {name: names for loop in loops for name, names in loop.items()}
    sites: dict[str, Site] = {}
    guarded = set()
    for name, record in structure.sites.items():
        bounds = evaluation.support_bounds[name]
        support, widened = _support(record, bounds, name in program.observed)
        if widened:
            guarded.add(name)
        sites[name] = _site(program, structure, name, support, steps.get(name, ()), densities[name])
    edges = tuple(
        Edge(parent, name, _lifted(relations[DensityInput(parent)], sites[name], sites[parent]))
        for name in sites
        for relations in [densities[name].dependence.sources]
        for parent in sites
        if DensityInput(parent) in relations
    )
    masks = _data_masks(program, structure, evaluation.masks, edges, sites)
    sites |= {name: replace(sites[name], mask=mask) for name, mask in masks.items()}
    return Graph(
        sites=sites,
        edges=edges,
        plates={a.plate: a.size for record in structure.sites.values() for a in record.axes},
        scan_lengths=tuple(structure.scan_lengths),
        reversed_scans=tuple(structure.reversed_scans),
        carries=_carries(evaluation.carries, sites),
        program=replace(
            program,
            guarded=frozenset(guarded),
            filled={name: sites[name].support for name in masks},
        ),
        loops=tuple(loops),
    )


def _data_masks(
    program: Program,
    structure: ModelStructure,
    masks: Mapping[str, Abstract],
    edges: Sequence[Edge],
    sites: Mapping[str, Site],
) -> dict[str, NDArray[np.bool_]]:
    """Constant masks of observed sites on which nothing depends, and whose support is fixed."""
    parents = {edge.parent for edge in edges}
    names = [
        name
        for name, mask in masks.items()
        if sites[name].observed
        and name not in parents
        and not any(isinstance(source, DensityInput) for source in mask.dependence.sources)
        and not isinstance(sites[name].support, type(constraints.dependent))
        and not any(map(np.ndim, jax.tree.leaves(sites[name].support)))
    ]
    arrays = program.constant_results(structure, lambda run: run.masks) if names else {}
    return {name: np.asarray(arrays[name]) for name in names}


def _dependence(program: Program, structure: ModelStructure) -> Any:
    """The dependence of all results of a run on the values of sites."""

    def evaluate(inputs: Mapping[DensityInput, Any]) -> Evaluation:
        values = {key.site: value for key, value in inputs.items() if not key.scored}
        scored_at = {key.site: value for key, value in inputs.items() if key.scored}
        return program.run(None, values, scored_at=scored_at)

    inputs = {
        DensityInput(name, scored): shape
        for name, shape in structure.shapes.items()
        for scored in (False, True)
    }
    return dependence_of(evaluate, inputs)


def _site(
    program: Program,
    structure: ModelStructure,
    name: str,
    support: Support,
    steps: tuple[str, ...],
    density: Abstract,
) -> Site:
    record, shape = structure.sites[name], structure.shapes[name]
    time = record.scan is not None
    return Site(
        name=name,
        shape=shape.shape,
        support=support,
        plates=tuple(axis.plate for axis in record.axes),
        observed=name in program.observed,
        time=time,
        distribution=record.distribution,
        axes=((0,) if time else ()) + tuple(axis.position + int(time) for axis in record.axes),
        scan=record.scan,
        steps=steps,
        heterogeneous_axes=_heterogeneous_axes(density),
        dtype=shape.dtype,
    )


def _carries(leaves: Mapping[CarryKey, Abstract], sites: Mapping[str, Site]) -> tuple[Carry, ...]:
    """Carries, with the plates along which they are aligned with a site they come from."""
    carries = []
    for key, leaf in leaves.items():
        plates: list[str | None] = [None] * (len(leaf.shape) - 1)
        for source, relation in leaf.dependence.sources.items():
            if not isinstance(source, DensityInput) or source.scored:
                continue
            site = sites[source.site]
            index_axes = site.axes[1:] if site.time else site.axes
            for (mine, size), (plate, theirs) in itertools.product(
                enumerate(leaf.shape[1:]), zip(site.plates, index_axes, strict=True)
            ):
                aligned = any(Window(mine + 1, theirs) in term for term in relation.terms)
                if aligned and size == site.shape[theirs]:
                    plates[mine] = plate
        carries.append(Carry(key, leaf.shape[1:], tuple(plates)))
    return tuple(carries)


def _check_observed(
    observed: Sequence[str], constants: Mapping[str, Any], sites: Mapping[str, SiteRecord]
) -> None:
    unknown = [name for name in observed if name not in sites]
    if unknown:
        raise UnsupportedModel(
            f"observed names {unknown[0]!r}, which is not a sample site of the model. Its sample "
            f"sites are: {', '.join(sites)}"
        )
    if not observed and not constants:
        raise UnsupportedModel(
            "observed is empty: there is nothing to condition on. Name the sites that are data, "
            f"out of: {', '.join(sites)}"
        )
    if len({*observed, *constants}) == len(sites):
        raise UnsupportedModel(
            "every site of the model is observed, so there is nothing to infer. Leave at least one "
            f"of these unobserved: {', '.join(sites)}"
        )


def _heterogeneous_axes(density: Abstract) -> tuple[int, ...]:
    """Index axes along which the density changes through constants alone."""
    axes = {
        atom.left
        for source, relation in density.dependence.sources.items()
        if isinstance(source, Constant)
        for term in relation.terms
        for atom in term
        if atom.left is not None and atom.right is not None
    }
    return tuple(sorted(axes))


def _lifted(relation: Relation, child: Site, parent: Site) -> Relation:
    """The relation between index axes: coordinates of one variable are not distinguished."""
    lifted = relation.move(right={axis: number for number, axis in enumerate(parent.axes)})
    return Relation.identity(child.index_shape).compose(lifted).unbounded()


def _support(
    record: SiteRecord, bounds: Sequence[Abstract], observed: bool
) -> tuple[Support, bool]:
    """The support with concrete bounds, and whether it is wider than the model's."""
    leaves = [
        None if any(not isinstance(s, Constant) for s in b.dependence.sources) else b.value
        for b in bounds
    ]
    if all(leaf is not None for leaf in leaves):
        concrete = [_common(leaf) for leaf in leaves]
        support: Support = jax.tree.unflatten(jax.tree.structure(record.support), concrete)
        return support, False
    return _wider(record, leaves, observed), True


def _common(bound: Any) -> Any:
    """One number where all elements have the same bound, else the array of bounds."""
    array = np.asarray(bound)
    if array.size and np.all(array == array.flat[0]):
        return array.flat[0].item()
    return array


def _wider(record: SiteRecord, leaves: Sequence[Any], observed: bool) -> Support:
    constraint, depth = record.support, 0
    while isinstance(constraint, constraints.independent):
        depth += constraint.reinterpreted_batch_ndims
        constraint = constraint.base_constraint
    bounds = [None if leaf is None else _common(leaf) for leaf in leaves]
    wider: Support
    match constraint, bounds:
        case constraints.integer_interval(), [low, _] if low is not None:
            wider = constraints.integer_greater_than(low)
        case constraints.interval(), [low, _] if low is not None:
            wider = constraints.greater_than(low)
        case constraints.interval(), [_, high] if high is not None:
            wider = constraints.less_than(high)
        case (
            constraints.interval() | constraints.greater_than() | constraints.less_than(),
            _,
        ):
            wider = constraints.real
        case _ if observed:
            event_dim = constraint.event_dim + depth
            wider = constraints.dependent(is_discrete=constraint.is_discrete, event_dim=event_dim)
            depth = 0
        case _:
            raise UnsupportedModel(
                f"the support of latent site '{record.name}' ({record.distribution}) depends on "
                "other sites in a way that has no fixed hull. Give it fixed bounds, or "
                "reparameterise it on a fixed support and transform"
            )
    if depth == 0:
        return wider
    nested: Support = constraints.independent(wider, depth)
    return nested
