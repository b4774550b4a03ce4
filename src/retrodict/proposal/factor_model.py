"""The part of a model that one factor takes part in, evaluated copy by copy.

A factor's latents enter the densities of their own sites and of their children. Where a child and
all of its other parents are known when the factor is drawn, its density can be evaluated then; if
that holds for every child, the factor's conditional is known up to a constant.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict.estimators.analytic.family import ConditionalMoments, ConditionalTarget
from retrodict.estimators.coordinates import coordinate_table
from retrodict.graph.evaluation import Evaluation, Expect
from retrodict.graph.graph import Edge, Graph, Site
from retrodict.graph.index_atoms import Table, Window
from retrodict.graph.moments import NO_INFORMATION
from retrodict.inverse.factors import Factor
from retrodict.proposal.copies import Copies
from retrodict.proposal.scope import Scope, model_at
from retrodict.types import Values

Evaluate: TypeAlias = Callable[[Values, Expect | None], Evaluation]


class Child(NamedTuple):
    """A site that depends on a factor's latents, with all of its other parents known.

    Attributes:
        name: of the site.
        axes: of its array (of one step in time), those that the factor's plates run along.
        scalar: whether it has one density per entry.
        members: where a constant index assigns its elements to copies, the table from copies to
            their elements along the axis.
    """

    name: str
    axes: tuple[int, ...]
    scalar: bool
    members: Table | None = None


@dataclass(frozen=True)
class FactorModel:
    """Evaluates the model's distributions that a factor's latents take part in.

    Attributes:
        graph: the model's.
        copies: of the factor.
        scan: the scan along which the factor is drawn, if any.
        children: those that are considered, all of whose other parents have values.
    """

    graph: Graph
    copies: Copies
    scan: int | None
    children: tuple[Child, ...]

    @property
    def factor(self) -> Factor:
        """The factor."""
        return self.copies.factor

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The sites whose distributions are evaluated: a run of the model ends with the last."""
        return (*self.factor.latents, *(child.name for child in self.children))

    @property
    def parents(self) -> frozenset[str]:
        """The sites on whose values these distributions and the children's densities depend."""
        parents = frozenset(p for name in self.evaluated for p in self.graph.parents(name))
        return parents | frozenset(child.name for child in self.children)

    @property
    def child_sizes(self) -> list[int]:
        """How many entries of each child belong to one copy."""
        sizes = []
        for child in self.children:
            site = self.graph.sites[child.name]
            shape = site.shape[1:] if self.scan is not None else site.shape
            rest = int(np.prod([n for a, n in enumerate(shape) if a not in child.axes]))
            sizes.append(rest * (1 if child.members is None else child.members.padded[0].shape[1]))
        return sizes

    @property
    def num_observations(self) -> int:
        """How many entries of all children belong to one copy."""
        return sum(self.child_sizes)

    def evaluator(self, scope: Scope) -> Evaluate:
        """A function that runs the model, or its current step, at some values of the latents."""
        run = model_at(self.graph, self.factor.latents, self.scan, scope)
        return lambda values, expect: run(values, expect=expect, only=self.evaluated)

    def by_copy(self, child: Child, value: Array, fill: float = 0.0) -> Array:
        """Entries of a child by copy; `fill` where a copy has fewer than others."""
        moved = jnp.moveaxis(jnp.asarray(value, float), child.axes, range(len(child.axes)))
        if child.members is not None:
            elements, exists = child.members.padded
            moved = moved[elements]
            exists = exists.reshape(*exists.shape, *(1 for _ in moved.shape[2:]))
            moved = jnp.where(exists, moved, fill)
        return moved.reshape(*self.copies.plate_sizes, -1)

    def observed(self, values: Values, fill: float = 0.0) -> Float[Array, "*copies observations"]:
        """Entries of all children by copy."""
        parts = [self.by_copy(child, values[child.name], fill) for child in self.children]
        return jnp.concatenate(parts, -1)

    def moments(self, evaluation: Evaluation) -> ConditionalMoments:
        """Moments of the latents given their parents, and of the children given the latents."""
        names = self.factor.latents
        prior_mean, prior_variance = (
            self.copies.rows({n: evaluation.moments[n][part] for n in names}) for part in range(2)
        )
        mean, variance = (
            self.observed({c.name: evaluation.moments[c.name][part] for c in self.children}, fill)
            for part, fill in enumerate((0.0, NO_INFORMATION))
        )
        densities = [
            self.by_copy(child, evaluation.log_density[child.name])
            if child.scalar
            else jnp.zeros((*self.copies.plate_sizes, size))
            for child, size in zip(self.children, self.child_sizes, strict=True)
        ]
        log_density, observed = jnp.concatenate(densities, -1), self.observed(evaluation.values)
        return ConditionalMoments(prior_mean, prior_variance, mean, variance, log_density, observed)

    def target(self, scope: Scope, *, stable: bool = False) -> ConditionalTarget:
        """The product of all densities that a copy's latents take part in.

        Densities in their numerically `stable` form take longer to trace; derivatives do not need
        it.
        """
        evaluate, lower = self.evaluator(scope), coordinate_table(self.copies.latents).lower

        def at(x: Float[Array, "*copies coordinates"], expect: Expect | None) -> Evaluation:
            return evaluate(self.copies.from_rows(x + lower), expect)

        def log_density(x: Float[Array, "*copies coordinates"]) -> Float[Array, "*copies"]:
            density = at(x, None if stable else {}).log_density
            parts = [self.by_copy(site, density[site.name]) for site in self._density_axes]
            return sum((jnp.sum(part, -1) for part in parts), jnp.zeros(self.copies.plate_sizes))

        return ConditionalTarget(log_density, lambda x: self.moments(at(x, {})))

    @property
    def _density_axes(self) -> list[Child]:
        """The latents and their children, with the axes of their densities."""
        located = []
        latents = map(partial(Child, scalar=True), self.factor.latents, self.copies.plate_axes)
        for site in (*self.children, *latents):
            axes = self.graph.sites[site.name].axes
            # Densities have axes of plates and time alone, and those of a step none of time.
            if self.scan is not None:
                axes = tuple(axis - 1 for axis in axes[1:])
            located.append(site._replace(axes=tuple(map(axes.index, site.axes))))
        return located

    def is_closed(self) -> bool:
        """Whether every density that the latents take part in can be evaluated."""
        graph, factor, scan = self.graph, self.factor, self.scan
        children = {child.name for child in self.children}
        for name, site in graph.sites.items():
            parents = graph.parents(name).values()
            if name in factor.latents:
                rest = [edge for edge in parents if edge.parent not in factor.latents]
                if not all(parent_known(graph, factor, edge, scan) for edge in rest):
                    return False
                continue
            from_latents = [edge for edge in parents if edge.parent in factor.latents]
            # A filter draws given the past; later steps are not part of its target.
            later = scan is not None and site.scan == scan
            later = later and not any(map(within_step, from_latents))
            if from_latents and name not in children and not later:
                return False
        return True


def known_children(graph: Graph, factor: Factor, scan: int | None) -> tuple[Child, ...]:
    """Sites that depend on the latents copy by copy, with all of their other parents known."""
    children = []
    for name, site in graph.sites.items():
        parents = graph.parents(name)
        from_latents = [edge for parent, edge in parents.items() if parent in factor.latents]
        if name in factor.latents or not from_latents or (scan is not None and site.scan != scan):
            continue
        rest = [edge for parent, edge in parents.items() if parent not in factor.latents]
        has_value = site.observed or name in factor.context
        if not (has_value and all(parent_known(graph, factor, edge, scan) for edge in rest)):
            continue
        scalar = site.event_shape == ()
        axes = _aligned_axes(graph, factor, site, from_latents, scan)
        if axes is not None:
            children.append(Child(name, axes, scalar))
        elif (members := _members(graph, factor, site, from_latents)) is not None:
            children.append(Child(name, members[0], scalar, members[1]))
    return tuple(children)


def parent_known(graph: Graph, factor: Factor, edge: Edge, scan: int | None) -> bool:
    """Whether the parent of an edge is known when the factor is drawn."""
    site = graph.sites[edge.parent]
    if site.observed or site.name in factor.context:
        return True
    if scan is None:
        return False
    # Sites outside of the scan are drawn before it; earlier steps of its own are in the carry.
    return site.scan != scan or not within_step(edge)


def within_step(edge: Edge) -> bool:
    """Whether the child depends on its parent in the same step of a scan."""
    return bool(edge.relation.restrict(Window(0, 0)))


def _members(
    graph: Graph, factor: Factor, site: Site, edges: list[Edge]
) -> tuple[tuple[int], Table] | None:
    """The axis of a child's array whose elements a constant index assigns to copies, and how."""
    if len(factor.plates) != 1 or factor.time or site.time:
        return None
    (plate,) = factor.plates
    tables = {
        next((a for a in term if isinstance(a, Table) and a.right == axis), None)
        for edge in edges
        for axis in [graph.sites[edge.parent].plates.index(plate)]
        for term in edge.relation.terms
    }
    table = tables.pop()
    if table is None or tables or table.left is None or not table.is_function:
        return None
    return (site.axes[table.left],), replace(table.transposed, left=0, right=0)


def _aligned_axes(
    graph: Graph, factor: Factor, site: Site, edges: list[Edge], scan: int | None
) -> tuple[int, ...] | None:
    """The axes of a child's array along the factor's plates; None if it mixes copies."""
    if not set(factor.plates) <= set(site.plates):
        return None
    first = int(site.time)
    for edge in edges:
        parent = graph.sites[edge.parent]
        if scan is not None and not within_step(edge):
            return None
        for axis, plate in enumerate(parent.plates, int(parent.time)):
            if plate in factor.plates and not edge.relation.aligned(
                first + site.plates.index(plate), axis
            ):
                return None
    shift = int(scan is not None)
    return tuple(site.axes[first + site.plates.index(plate)] - shift for plate in factor.plates)
