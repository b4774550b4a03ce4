"""Invert a dependency graph: find factors that draw the latents given the data.

The inverse is p̃(x | y) = ∏ p̃(x_i | PaH(x_i)), Paige & Wood (2016), sec. 3.1. `orderings` has the
methods to choose the order and the parents PaH, `factors` groups variables into joint factors.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from retrodict.graph.graph import Graph
from retrodict.graph.index_atoms import INF, Window
from retrodict.inverse.factors import Factor, make_factors
from retrodict.inverse.loop_factors import user_factors
from retrodict.inverse.orderings import blanket, faithful, filter_steps
from retrodict.inverse.variable_elimination import Draw, Network, Node, unroll_time

if TYPE_CHECKING:
    import networkx as nx

    from retrodict.plotting.picture import Picture

Method = Literal["auto", "blanket", "faithful", "filter"]


@dataclass(frozen=True)
class Inverse:
    """The inverse of a model.

    Attributes:
        graph: the model's graph.
        method: the method of inversion; never "auto".
        lifted_factors: factors, in sampling order, of the graph in which Python loops are scans and
            plates.
    """

    graph: Graph
    method: Method
    lifted_factors: tuple[Factor, ...]

    @property
    def lifted(self) -> "Inverse":
        """The inverse of the graph in which Python loops are scans and plates."""
        return self if self.graph.source is None else replace(self, graph=self.graph.source)

    @cached_property
    def surface(self) -> "Inverse":
        """The inverse in terms of the user's sites."""
        return replace(self, graph=self.graph.surface) if self.graph.loops else self

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The factors in sampling order."""
        if self.graph.source is None:
            return self.lifted_factors
        return user_factors(self.graph.source, self.lifted_factors)

    @cached_property
    def _unrolled(self) -> tuple[Network, list[Draw]]:
        self.graph.check_unrollable()
        return _invert(self.graph.lifted, self.method, self.graph.lifted.scan_lengths)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The unrolled latent variables in sampling order."""
        network, draws = self._unrolled
        sites = self.graph.lifted.sites
        return tuple(
            sites[draw.node.site].variable(_with_step(draw.node, index))
            for draw in draws
            for index in _elements(network, draw)
        )

    def unroll(self) -> "nx.DiGraph[str]":
        """The inverse as a Bayesian network over single variables, for small models.

        All edges lead into latent variables.
        """
        import networkx as nx  # slow to import

        network, draws = self._unrolled
        sites = self.graph.lifted.sites
        inverse: nx.DiGraph[str] = nx.DiGraph()
        for site in self.graph.sites.values():
            for index in site.indices():
                inverse.add_node(site.variable(index), observed=site.observed)
        for draw in draws:
            site = sites[draw.node.site]
            drawn: set[tuple[int, ...]] = set()
            for index in _elements(network, draw):
                variable = site.variable(_with_step(draw.node, index))
                for parent, relation in draw.parents.items():
                    for other in relation.at(index):
                        name = sites[parent.site].variable(_with_step(parent, other))
                        inverse.add_edge(name, variable)
                for other in draw.among.at(index) & drawn:
                    inverse.add_edge(site.variable(_with_step(draw.node, other)), variable)
                drawn.add(index)
        return inverse

    def render(self) -> "Picture":
        """A picture of the inverse: squares are networks, between their inputs and outputs."""
        from retrodict.plotting.graphical_model import inverse_picture

        return inverse_picture(self)


def _with_step(node: Node, index: tuple[int, ...]) -> tuple[int, ...]:
    return index if node.step is None else (node.step, *index)


def _elements(network: Network, draw: Draw) -> Iterator[tuple[int, ...]]:
    ranges = [range(size) for size in network.sizes[draw.node]]
    return itertools.product(*(reversed(r) if draw.descending else r for r in ranges))


def invert(graph: Graph, method: Method = "auto") -> Inverse:
    """Invert a dependency graph.

    Args:
        graph: a graph from `trace`.
        method: "blanket" (the paper's sec. 3.1), "faithful" (Webb et al. 2018), "filter" (the
            paper's fig. 4: step by step, each step inverted given the past), or "auto": "filter"
            where latents and observations alternate in time, else "faithful".

    Returns:
        The inverse, whose factors draw the latents given the data.

    Example:
        >>> import numpyro, numpyro.distributions as dist
        >>> from retrodict.graph.trace import trace
        >>> def rain():
        ...     rain = numpyro.sample("rain", dist.Bernoulli(0.2))
        ...     sprinkler = numpyro.sample("sprinkler", dist.Bernoulli(0.4))
        ...     numpyro.sample("wet", dist.Bernoulli(0.1 + 0.4 * rain + 0.4 * sprinkler))
        >>> inverse = invert(trace(rain, ["wet"]))
        >>> inverse.factors[0].latents, sorted(inverse.factors[0].context)
        (('rain', 'sprinkler'), ['wet'])
    """
    if method not in get_args(Method):
        raise ValueError(
            f"method is {method!r}; there are {', '.join(map(repr, get_args(Method)))}"
        )
    lifted = graph.lifted
    if method == "auto":
        method = "filter" if _alternates(lifted) else "faithful"
    steps = [min(length, 2 * _longest_lag(lifted) + 3) for length in lifted.scan_lengths]
    _, draws = _invert(lifted, method, steps)
    factors = make_factors(lifted, draws, backward=method == "blanket")
    return Inverse(graph, method, factors)


def _invert(graph: Graph, method: Method, steps: Sequence[int]) -> tuple[Network, list[Draw]]:
    """Order and parents of all nodes; every step of a scan is drawn in the same order."""
    network = unroll_time(graph, steps)
    if method == "blanket":
        return network, blanket(network)
    draws = _order(graph, method, network, {})
    if not graph.scan_lengths:
        return network, draws
    ranks: dict[str, int] = {}
    for scan, length in enumerate(steps):
        inside = [d.node for d in draws if graph.sites[d.node.site].scan == scan]
        middle = [node.site for node in inside if node.step == length // 2]
        ranks |= {site: rank for rank, site in enumerate(middle)}
    return network, _order(graph, method, network, ranks)


def _order(graph: Graph, method: Method, network: Network, ranks: dict[str, int]) -> list[Draw]:
    scan_nodes = [n for n in network.nodes if n.step is not None and n not in network.observed]

    def scan(node: Node) -> int | None:
        return graph.sites[node.site].scan

    def moment(node: Node) -> tuple[int, int]:
        step = node.step or 0
        return -step if graph.reversed_scans[scan(node) or 0] else step, ranks.get(node.site, 0)

    def later(node: Node) -> set[Node]:
        """Steps of a scan are drawn one after the other, each with its sites in order of rank."""
        same_scan = (other for other in scan_nodes if scan(other) == scan(node))
        return {other for other in same_scan if moment(other) > moment(node)}

    if method == "faithful":
        return faithful(network, later)
    chain = [n for n in network.nodes if n.step is not None]

    def unit(node: Node) -> object:
        return None if node.step is None else (scan(node), node.step)

    return filter_steps(network, chain, unit, later)


def _alternates(graph: Graph) -> bool:
    """Whether a scan has both latents and observations in its steps."""
    return any(
        len({site.observed for site in graph.sites.values() if site.scan == scan}) == 2
        for scan in range(len(graph.scan_lengths))
    )


def _longest_lag(graph: Graph) -> int:
    """The longest finite lag in time of any edge."""
    lags = [1.0]
    for edge in graph.edges:
        windows = [a for t in edge.relation.terms for a in t if isinstance(a, Window)]
        if graph.sites[edge.child].time and graph.sites[edge.parent].time:
            lags += [abs(bound) for w in windows if w[:2] == (0, 0) for bound in w.bounds]
        if graph.sites[edge.child].time:
            # Steps of which only the first few depend on the parent.
            starts = [1 - w.lo for w in windows if w[:2] == (0, None) and w.hi == INF]
            lags += [stop for stop in starts if stop <= graph.sites[edge.child].shape[0] / 2]
    return int(max(lag for lag in lags if lag != INF))
