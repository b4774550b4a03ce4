"""A NumPyro model in; its lifted dependency graph out: sites, index axes, and how indices meet.

A random variable is one element of a sample site: a plate index, a time step. The graph keeps one
node a site, and on every edge the relation between the indices of child and parent (see
`retrodict.relations`): `same`, `lag`, a constant `map`, or `all`. `Graph.unroll` writes it out.
Paige & Wood (2016), sec. 2: PA(x_i).
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import networkx as nx
import numpy as np
from numpyro.distributions import constraints

from retrodict.dataflow import Abstract, Constant, Flow
from retrodict.errors import UnsupportedModel
from retrodict.model import Evaluation, Program, Seen, own
from retrodict.relations import (
    EVERYTHING,
    INF,
    Link,
    Relation,
    Relations,
    Table,
    Window,
    array_axis,
    union,
)

if TYPE_CHECKING:
    from retrodict.render import Picture

Index: TypeAlias = tuple[int, ...]
Support: TypeAlias = constraints.Constraint[Any]


@dataclass(frozen=True)
class Site:
    """A sample site of the model.

    Attributes:
        name: as in the model.
        shape: of its value; time, if any, comes first.
        support: a NumPyro constraint with concrete bounds; where the bounds depend on other sites,
            a wider one that does not.
        plates: the plates it lies in, in the order of its array's axes.
        observed: whether it will be data.
        time: whether it lies inside a scan.
        distribution: the name of its distribution's class.
        event_shape: the shape of one variable: all axes but time and plates.
        axes: the position of each index axis (time first, then plates) in `shape`.
        scan: which scan of the model it lies in, or None.
        family: for a site of a loop, `x_3`, its base name and number: ("x", 3).
        unlike: index axes (time 0 first, then plates) along which the site's own distribution
            changes with constants of the model, such as a covariate that is a plain argument.
        dtype: of its value.
    """

    name: str
    shape: tuple[int, ...]
    support: Support
    plates: tuple[str, ...]
    observed: bool
    time: bool
    distribution: str
    axes: tuple[int, ...] = ()
    scan: int | None = None
    family: tuple[str, int] | None = None
    unlike: tuple[int, ...] = ()
    dtype: Any = np.float32

    @property
    def index_shape(self) -> tuple[int, ...]:
        """Sizes of the index axes: one random variable for each index."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of one variable: all axes that are neither time nor plates."""
        return tuple(size for axis, size in enumerate(self.shape) if axis not in self.axes)

    def indices(self) -> Iterator[Index]:
        """All indices of the site's variables, in order."""
        return itertools.product(*map(range, self.index_shape))

    def variable(self, index: Sequence[int]) -> str:
        """The name of one variable: `theta[3]`, `x[5,2]`, or the site's own if it has no index."""
        return f"{self.name}[{','.join(map(str, index))}]" if index else self.name


@dataclass(frozen=True)
class Carry:
    """One array that the steps of a scan hand on: what a step knows of the past.

    Attributes:
        name: its name among values.
        scan: which scan.
        shape: of one step's.
        plates: the plate that each of its axes runs along, or None.
    """

    name: str
    scan: int
    shape: tuple[int, ...]
    plates: tuple[str | None, ...]


@dataclass(frozen=True)
class Edge:
    """A parent and a child, and which of their variables depend on which.

    `relations` has, for each index axis of the parent, a link to the index axes of the child.
    """

    parent: str
    child: str
    relations: Relations

    def kinds(self) -> frozenset[str]:
        """How indices meet, in words: `same`, `lag`, `window`, `map`, `all`."""
        words = {_kind(link) for relation in self.relations for link in relation.links}
        return frozenset(words or {"same"})


def _kind(link: Link) -> str:
    if isinstance(link, Table):
        return "map"
    if link.axis is None:
        return "all"
    if link.lo == link.hi:
        return "same" if link.lo == 0 else "lag"
    return "window"


_MOST_EDGES = 5_000_000


@dataclass(frozen=True)
class Graph:
    """The lifted dependency graph of a model; sites are in program order."""

    sites: Mapping[str, Site]
    edges: tuple[Edge, ...]
    plates: Mapping[str, int]
    scan_lengths: tuple[int, ...]
    reversed_scans: tuple[bool, ...]
    carries: tuple[Carry, ...] = ()
    program: Program = field(compare=False, default=Program(lambda: None))
    codes: Mapping[str, str] = field(compare=False, default_factory=dict)

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the observed sites, in program order."""
        return tuple(name for name, site in self.sites.items() if site.observed)

    @property
    def latent(self) -> tuple[str, ...]:
        """Names of the latent sites, in program order."""
        return tuple(name for name, site in self.sites.items() if not site.observed)

    @cached_property
    def _by_child(self) -> Mapping[str, Mapping[str, Edge]]:
        found: dict[str, dict[str, Edge]] = {name: {} for name in self.sites}
        for edge in self.edges:
            found[edge.child][edge.parent] = edge
        return found

    def parents(self, child: str) -> Mapping[str, Edge]:
        """The edges into a site, by parent."""
        return self._by_child[child]

    def unroll(self) -> "nx.DiGraph[str]":
        """The plain directed network over random variables, for small instances."""
        self.check_unrollable()
        network: nx.DiGraph[str] = nx.DiGraph()
        for site in self.sites.values():
            for index in site.indices():
                network.add_node(site.variable(index), observed=site.observed)
        for edge in self.edges:
            parent, child = self.sites[edge.parent], self.sites[edge.child]
            for child_index, parent_index in pairs(edge.relations, child, parent):
                network.add_edge(parent.variable(parent_index), child.variable(child_index))
        return network

    def check_unrollable(self) -> None:
        """Refuse to write out what would not fit."""
        size = sum(float(np.prod(site.index_shape)) for site in self.sites.values())
        for edge in self.edges:
            parent, child = self.sites[edge.parent], self.sites[edge.child]
            size += sum(_count(r, child, parent) for r in edge.relations)
        if size > _MOST_EDGES:
            raise ValueError(
                f"unrolled, this graph has about {size:.2g} variables and edges, more than the "
                f"{_MOST_EDGES:.2g} that are reasonable. Unroll a smaller instance of the model "
                "(fewer plate elements, fewer steps); the structure is the same"
            )

    def render(self) -> "Picture":
        """A picture of the model: latent white, observed grey, plates as boxes."""
        from retrodict.pictures import forward_picture

        return forward_picture(self)


def pairs(relations: Relations, child: Site, parent: Site) -> Iterator[tuple[Index, Index]]:
    """All (child index, parent index) that are related."""
    for relation in relations:
        for index in child.indices():
            for parent_index in related(relation, index, parent.index_shape):
                yield index, parent_index


def related(relation: Relation, index: Index, sizes: Sequence[int]) -> Iterable[Index]:
    """The parent's indices that a relation gives for one index of the child."""
    if any(not start <= index[array_axis(axis)] < stop for axis, start, stop in relation.present):
        return ()
    return itertools.product(
        *(_indices(link, index, size) for link, size in zip(relation.links, sizes, strict=True))
    )


def _indices(link: Link, index: Index, size: int) -> Iterable[int]:
    position = 0 if link.axis is None else index[link.along]
    if isinstance(link, Table):
        found = int(link.indices[position])
        return (found,) if 0 <= found < size else ()
    return range(int(max(position + link.lo, 0)), int(min(position + link.hi, size - 1)) + 1)


def _count(relation: Relation, child: Site, parent: Site) -> float:
    total = float(np.prod(child.index_shape))
    for link, size in zip(relation.links, parent.index_shape, strict=True):
        if isinstance(link, Window):
            total *= min(size, link.hi - link.lo + 1)
    return total


def trace(
    model: Callable[..., Any],
    observed: Sequence[str],
    *,
    model_args: tuple[Any, ...] = (),
    model_kwargs: Mapping[str, Any] | None = None,
) -> Graph:
    """Read the dependency graph of a NumPyro model, without data and without drawing anything.

    Args:
        model: an ordinary NumPyro model.
        observed: the names of the sites that will be data, covariates that are sites included.
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
    if isinstance(observed, str):
        observed = (observed,)
    program = Program(model, tuple(model_args), dict(model_kwargs or {}), frozenset(observed))
    program, seen, notes = program.inspect()
    _check_observed(observed, seen)

    def evaluate(values: Any) -> Evaluation:
        return program.run(None, values)

    shapes = jax.eval_shape(program.simulate, jax.random.key(0))
    flow = Flow.of(evaluate, shapes | {own(name): shape for name, shape in shapes.items()})
    findings = flow.dependence()
    densities: Mapping[str, Abstract] = findings.log_density

    sites: dict[str, Site] = {}
    guarded = set()
    for name, found in seen.items():
        time = found.scan is not None
        shift = int(time)
        axes = tuple(axis.position + shift for axis in found.axes)
        support, varies = _support(found, findings.support_bounds[name], name in observed)
        if varies:
            guarded.add(name)
        sites[name] = Site(
            name=name,
            shape=shapes[name].shape,
            support=support,
            plates=tuple(axis.plate for axis in found.axes),
            observed=name in observed,
            time=time,
            distribution=found.distribution,
            axes=((0,) if time else ()) + axes,
            scan=found.scan,
            unlike=_unlike(densities[name]),
            dtype=shapes[name].dtype,
        )
    edges = tuple(
        Edge(parent, name, _lifted(densities[name].dependence.sources[parent], sites, parent, name))
        for name in sites
        for parent in sites
        if parent in densities[name].dependence.sources
    )
    sites = _with_families(sites)
    return Graph(
        sites=sites,
        edges=edges,
        plates={a.plate: a.size for found in seen.values() for a in found.axes},
        scan_lengths=tuple(notes.scan_lengths),
        reversed_scans=tuple(notes.reversed_scans),
        carries=_carries(findings.carries, sites),
        program=replace(program, guarded=frozenset(guarded)),
        codes=_codes(flow, sites),
    )


def _carries(found: Mapping[str, Abstract], sites: Mapping[str, Site]) -> tuple[Carry, ...]:
    """Carries, with the plates along which they are aligned with a site they come from."""
    carries = []
    for name, leaf in found.items():
        plates: list[str | None] = [None] * (len(leaf.shape) - 1)
        for source, relations in leaf.dependence.sources.items():
            site = sites.get(str(source))
            if site is None:
                continue
            index_axes = site.axes[1:] if site.time else site.axes
            for relation, (plate, axis) in itertools.product(
                relations, zip(site.plates, index_axes, strict=True)
            ):
                link = relation.links[axis]
                if isinstance(link, Window) and isinstance(link.axis, int) and link.axis > 0:
                    aligned = (link.lo, link.hi) == (0, 0)
                    if aligned and leaf.shape[link.axis] == site.shape[axis]:
                        plates[link.axis - 1] = plate
        scan = int(name.split()[1].split(".")[0])
        carries.append(Carry(name, scan, leaf.shape[1:], tuple(plates)))
    return tuple(carries)


def _check_observed(observed: Sequence[str], seen: Mapping[str, Seen]) -> None:
    unknown = [name for name in observed if name not in seen]
    if unknown:
        raise UnsupportedModel(
            f"observed names {unknown[0]!r}, which is not a sample site of the model. Its sample "
            f"sites are: {', '.join(seen)}"
        )
    if not observed:
        raise UnsupportedModel(
            "observed is empty: there is nothing to condition on. Name the sites that are data, "
            f"out of: {', '.join(seen)}"
        )
    if len(set(observed)) == len(seen):
        raise UnsupportedModel(
            "every site of the model is observed, so there is nothing to infer. Leave at least one "
            f"of these unobserved: {', '.join(seen)}"
        )


def _unlike(density: Abstract) -> tuple[int, ...]:
    """Index axes along which the density changes through constants alone."""
    found = {
        link.along
        for source, relations in density.dependence.sources.items()
        if isinstance(source, Constant)
        for relation in relations
        for link in relation.links
        if link.axis is not None
    }
    return tuple(sorted(found))


def _lifted(
    relations: Relations, sites: Mapping[str, Site], parent_name: str, child_name: str
) -> Relations:
    """Keep the links of the parent's index axes; coordinates of one variable go together."""
    parent, child = sites[parent_name], sites[child_name]

    def simplified(link: Link, size: int) -> Link:
        if isinstance(link, Table):
            child_size = child.index_shape[link.along]
            if child_size == size and np.array_equal(link.indices, np.arange(size)):
                return Window(link.axis, 0, 0)
            return link
        if link.axis is None:
            return EVERYTHING if link.lo <= 0 and link.hi >= size - 1 else link
        span = max(child.index_shape[link.along], size) - 1
        return Window(
            link.axis,
            -INF if link.lo <= -span and span else link.lo,
            INF if link.hi >= span and span else link.hi,
        )

    def present(relation: Relation) -> Iterator[tuple[Any, int, int]]:
        windows = [w for w in relation.links if isinstance(w, Window)]
        for axis, start, stop in relation.present:
            # A position whose whole window lies before the first index has no parent anyway.
            implied = max((-w.hi for w in windows if w.axis == axis), default=0)
            first = 0 if start <= implied else start
            implied_end = min(
                (parent.index_shape[i] - w.lo for i, w in enumerate(relation.links)
                 if isinstance(w, Window) and w.axis == axis),
                default=INF,
            )  # fmt: skip
            size = child.index_shape[array_axis(axis)]
            last = size if stop >= min(size, implied_end) else stop
            if (first, last) != (0, size):
                yield axis, first, last

    lifted = set()
    for relation in relations:
        links = tuple(relation.links[axis] for axis in parent.axes)
        kept = Relation(links, relation.present)
        kept = Relation(links, tuple(present(kept)))
        sizes = parent.index_shape
        lifted.add(Relation(tuple(map(simplified, links, sizes)), kept.present))
    return union(lifted)


def _support(found: Seen, bounds: Sequence[Abstract], observed: bool) -> tuple[Support, bool]:
    """The support with concrete bounds, and whether it had to be widened to have any."""
    leaves = [
        None if any(not isinstance(s, Constant) for s in b.dependence.sources) else b.value
        for b in bounds
    ]
    if all(leaf is not None for leaf in leaves):
        concrete = [_common(leaf, found) for leaf in leaves]
        support: Support = jax.tree.unflatten(jax.tree.structure(found.support), concrete)
        return support, False
    return _wider(found, iter(leaves), observed), True


def _common(bound: Any, found: Seen) -> Any:
    """One number where all elements have the same bound, else the array of bounds."""
    array = np.asarray(bound)
    if array.size and np.all(array == array.flat[0]):
        return array.flat[0].item()
    return array


def _wider(found: Seen, leaves: Iterator[Any], observed: bool) -> Support:
    constraint, depth = found.support, 0
    while isinstance(constraint, constraints.independent):
        depth += constraint.reinterpreted_batch_ndims
        constraint = constraint.base_constraint
    bounds = [None if leaf is None else _common(leaf, found) for leaf in leaves]
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
                f"the support of latent site '{found.name}' ({found.distribution}) depends on "
                "other sites in a way that has no fixed hull. Give it fixed bounds, or "
                "reparameterise it on a fixed support and transform"
            )
    if depth == 0:
        return wider
    nested: Support = constraints.independent(wider, depth)
    return nested


_NUMBERED = re.compile(r"^(?P<base>.*\D)(?P<number>\d+)\]?$")


def _with_families(sites: Mapping[str, Site]) -> dict[str, Site]:
    """Mark the sites of Python loops: same base name, distribution and shape, numbered on."""
    members: dict[tuple[Any, ...], list[str]] = {}
    for name, site in sites.items():
        match = _NUMBERED.match(name)
        if match and not site.time:
            key = (match["base"], site.distribution, site.shape, site.plates, site.observed)
            members.setdefault(key, []).append(name)
    marked = dict(sites)
    for (base, *_), names in members.items():
        if len(names) > 1:
            for name in names:
                number = int(name.removeprefix(base).rstrip("]"))
                marked[name] = replace(marked[name], family=(base, number))
    return marked


def _codes(flow: Flow, sites: Mapping[str, Site]) -> dict[str, str]:
    """For each site of a loop, how its density is computed: equal for sites that are alike.

    Sites of other steps are named by their distance: `x_4` given `x_3` is `x_5` given `x_4`.
    """
    if not any(site.family for site in sites.values()):
        return {}

    def rename(name: str) -> str:
        family = sites[name].family if name in sites else None
        return f"<{name}>" if family is None else f"<{family[0]}#{family[1]}>"

    written: Evaluation = flow.code(rename)
    codes = {}
    for name, site in sites.items():
        if site.family is not None:
            text = str(written.log_density[name]).replace(f"<{own(name)}>", "<itself>")
            codes[name] = _relative_to(site.family[1], text)
    return codes


def _relative_to(number: int, text: str) -> str:
    return re.sub(r"#(\d+)>", lambda found: f"{int(found[1]) - number:+d}>", text)
