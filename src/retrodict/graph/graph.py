"""The lifted dependency graph of a model: sites, index axes, and relations between indices.

A random variable is one element of a sample site: a plate index, a time step. The graph has one
node per site, and on every edge the relation between the indices of child and parent (see
`index_relations`): `same`, `lag`, a constant `map`, or `all`. `Graph.unroll` gives the graph over
random variables. Paige & Wood (2016), sec. 2: PA(x_i).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from numpyro.distributions import constraints

from retrodict.graph.evaluation import CarryKey
from retrodict.graph.index_atoms import Atom, Table
from retrodict.graph.index_relations import Index, Relation
from retrodict.graph.program import Program

if TYPE_CHECKING:
    import networkx as nx

    from retrodict.graph.obs_values import SharedArgument
    from retrodict.plotting.picture import Picture

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
        steps: for a site that stands for those of a Python loop, `x_0, x_1, …`, their names; its
            first index axis is that of the steps.
        heterogeneous_axes: index axes (time 0 first, then plates) along which the distribution
            changes with constants of the model, such as a covariate that is a plain argument.
        dtype: of its value.
        mask: of an observed site with masked entries on which nothing depends, which entries count;
            the others are replaced by a constant.
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
    steps: tuple[str, ...] = ()
    heterogeneous_axes: tuple[int, ...] = ()
    dtype: Any = np.float32
    mask: NDArray[np.bool_] | None = field(compare=False, default=None)

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
        name, rest = (self.steps[index[0]], index[1:]) if self.steps else (self.name, index)
        return f"{name}[{','.join(map(str, rest))}]" if rest else name


@dataclass(frozen=True)
class Carry:
    """One array that the steps of a scan pass on: the memory of a step.

    Attributes:
        key: which leaf of which scan's carry.
        shape: at one step.
        plates: the plate that each of its axes runs along, or None.
    """

    key: CarryKey
    shape: tuple[int, ...]
    plates: tuple[str | None, ...]


@dataclass(frozen=True)
class Edge:
    """A parent and a child, and the relation from the child's indices to the parent's."""

    parent: str
    child: str
    relation: Relation

    def kinds(self) -> frozenset[str]:
        """How the parent's axes relate to the child's: `same`, `lag`, `window`, `map`, `all`."""
        kinds = set()
        for term in self.relation.terms:
            atoms = {a.right: a for a in term if a.left is not None and a.right is not None}
            kinds |= {_kind(atoms.get(axis)) for axis in self.relation.right}
        return frozenset(kinds or {"same"})


def _kind(atom: Atom | None) -> str:
    if atom is None:
        return "all"
    if isinstance(atom, Table):
        return "map"
    if atom.lo == atom.hi:
        return "same" if atom.lo == 0 else "lag"
    return "window"


_MAX_UNROLLED = 5_000_000


@dataclass(frozen=True)
class Graph:
    """The lifted dependency graph of a model; sites are in program order.

    A model with Python loops over numbered sites has two: one with the user's sites, and one in
    which the sites of a loop are one site, in a scan or a plate (`lifted`). Inference uses the
    second.

    Attributes:
        sites: by name.
        edges: between sites.
        plates: their sizes.
        scan_lengths, reversed_scans: of the scans in program order.
        carries: of the scans.
        program: the model as functions.
        loops: for each Python loop, the names of its steps' sites, by the site that stands for
            them; deterministic sites are among them.
        user_program: the model as the user wrote it, if it has such loops.
        source: of a graph with the user's sites, the one with loops as scans and plates.
        constant_data: the values of observed sites that are constants of the model, by the user's
            names. Data for such a site may be omitted.
        shared_arguments: the arguments of the model that are data and enter densities besides.
    """

    sites: Mapping[str, Site]
    edges: tuple[Edge, ...]
    plates: Mapping[str, int]
    scan_lengths: tuple[int, ...]
    reversed_scans: tuple[bool, ...]
    carries: tuple[Carry, ...] = ()
    program: Program = field(compare=False, default=Program(lambda: None))
    loops: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    user_program: Program | None = field(compare=False, default=None)
    source: "Graph | None" = field(compare=False, default=None)
    constant_data: Mapping[str, NDArray[Any]] = field(compare=False, default_factory=dict)
    shared_arguments: "tuple[SharedArgument, ...]" = field(compare=False, default=())

    @property
    def lifted(self) -> "Graph":
        """The graph in which loops are scans and plates."""
        return self if self.source is None else self.source

    @cached_property
    def surface(self) -> "Graph":
        """The graph with the user's sites."""
        from retrodict.graph.loop_surface import surface_graph  # which needs this module

        return surface_graph(self) if self.loops else self

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the observed sites, in program order."""
        return tuple(name for name, site in self.sites.items() if site.observed)

    @property
    def named_observed(self) -> dict[str, tuple[int, ...] | None]:
        """The observed sites that are not constants of the model, with shapes where stated."""
        shapes = self.program.data_shapes
        return {name: shapes.get(name) for name in self.observed if name not in self.constant_data}

    @property
    def latent(self) -> tuple[str, ...]:
        """Names of the latent sites, in program order."""
        return tuple(name for name, site in self.sites.items() if not site.observed)

    @cached_property
    def _by_child(self) -> Mapping[str, Mapping[str, Edge]]:
        edges: dict[str, dict[str, Edge]] = {name: {} for name in self.sites}
        for edge in self.edges:
            edges[edge.child][edge.parent] = edge
        return edges

    def parents(self, child: str) -> Mapping[str, Edge]:
        """The edges into a site, by parent."""
        return self._by_child[child]

    def unroll(self) -> "nx.DiGraph[str]":
        """The directed graph over random variables, for small instances."""
        import networkx as nx  # slow to import

        self.check_unrollable()
        network: nx.DiGraph[str] = nx.DiGraph()
        for site in self.sites.values():
            for index in site.indices():
                network.add_node(site.variable(index), observed=site.observed)
        for edge in self.edges:
            parent, child = self.sites[edge.parent], self.sites[edge.child]
            for index in child.indices():
                for other in edge.relation.at(index):
                    network.add_edge(parent.variable(other), child.variable(index))
        return network

    def check_unrollable(self) -> None:
        """Refuse a graph with too many variables and edges to unroll."""
        size = sum(float(np.prod(site.index_shape)) for site in self.sites.values())
        for edge in self.edges:
            shape = self.sites[edge.child].index_shape
            size += float(np.prod(shape)) * edge.relation.multiplicity
        if size > _MAX_UNROLLED:
            raise ValueError(
                f"unrolled, this graph has about {size:.2g} variables and edges, more than the "
                f"{_MAX_UNROLLED:.2g} that are reasonable. Unroll a smaller instance of the model "
                "(fewer plate elements, fewer steps); the structure is the same"
            )

    def render(self) -> "Picture":
        """A picture of the model: latent white, observed grey, plates as boxes."""
        from retrodict.plotting.graphical_model import forward_picture

        return forward_picture(self)
