"""Methods of inversion: the order in which latents are drawn, and the parents of each.

`blanket` is that of Paige & Wood (2016), sec. 3.1, `faithful` that of Webb et al. (2018), and
`filter_steps` that of Paige & Wood (2016), fig. 4.
"""

from collections.abc import Callable, Collection, Sequence

from retrodict.graph.index_relations import NOTHING, coupled_axes
from retrodict.inverse.variable_elimination import (
    Draw,
    MoralGraph,
    Network,
    Node,
    eliminate_all,
    markov_blanket,
)

# Nodes that must be drawn later than, so eliminated before, a node.
Later = Callable[[Node], set[Node]]


def blanket(network: Network) -> list[Draw]:
    """PaH(x_i) = MB(x_i) ∩ {x_{i+1}, …, x_N, y_1, …, y_M}, drawn in the order x_N, …, x_1.

    Keeps the local dependence of the model (proposition 1); children of a common parent become
    independent of each other.
    """
    available = set(network.observed)
    draws: list[Draw] = []
    for node in reversed([n for n in network.nodes if n not in network.observed]):
        around = markov_blanket(network, node)
        among = around.pop(node, NOTHING)
        parents = {other: relation for other, relation in around.items() if other in available}
        draws.append(Draw(node, parents, among, coupled_axes(among), descending=True))
        available.add(node)
    return draws


def faithful(network: Network, later: Later) -> list[Draw]:
    """Eliminate the latents in the moral graph, and draw in the reverse order.

    An eliminated node is drawn given its neighbours not yet eliminated, which are then joined to
    each other. The inverse has no independence that the model lacks (Webb et al. 2018). Latents on
    which no observation depends are eliminated first and drawn last, from the model's conditionals.
    """
    return _eliminate(network, network.nodes, later)


def filter_steps(
    network: Network, chain: Collection[Node], unit: Callable[[Node], object], later: Later
) -> list[Draw]:
    """Program order, cut into steps that observations close, each inverted given the past.

    Latents outside of time that the chain depends on are drawn first, given all data: samples from
    their prior would degenerate after a few resampling steps.

    Args:
        network: the network to invert.
        chain: the nodes that lie in scans.
        unit: for a node of a scan, its scan and step; None for others.
        later: the nodes that must be drawn later than a node.
    """
    latents = [n for n in network.nodes if n not in network.observed]
    leading = ancestors(network, chain) - network.observed - set(chain)
    draws: list[Draw] = []
    if leading:
        rest = set(latents) - leading
        whole = faithful(network, lambda n: rest if n in leading else later(n))
        draws = [d for d in whole if d.node in leading]
    for step in _steps(network, leading, unit):
        draws += _eliminate(network, step, later)
    return draws


def _steps(
    network: Network,
    leading: Collection[Node],
    unit: Callable[[Node], object],
) -> list[list[Node]]:
    """Cut the program into steps; an observation closes a step if it depends on its latents."""
    steps: list[list[Node]] = []
    current: list[Node] = []
    closed, current_unit = False, None
    for node in network.nodes:
        if node in leading:
            continue
        observed = node in network.observed
        starts_anew = unit(node) != current_unit or (closed and not observed and unit(node) is None)
        if current and starts_anew:
            steps.append(current)
            current, closed = [], False
        current_unit = unit(node)
        current.append(node)
        if observed:
            here = set(current) - network.observed
            closed = closed or bool(ancestors(network, [node], current[0]) & here)
    return [*steps, current] if current else steps


def _eliminate(network: Network, nodes: Sequence[Node], later: Later) -> list[Draw]:
    """Draw the latents among consecutive nodes given all nodes before and the data among them."""
    latents = [n for n in nodes if n not in network.observed]
    evidence = [n for n in nodes if n in network.observed]
    informed = ancestors(network, evidence, since=nodes[0])
    eliminated = [n for n in latents if n in informed]
    families = [*eliminated, *evidence]
    around = {n for child in families for n in (child, *network.parents[child])}
    moral = MoralGraph.of(network, families, conditioned=around - set(eliminated))
    blockers = {n: (network.children[n] | later(n)) & set(eliminated) for n in eliminated}
    barren = (n for n in latents if n not in informed)
    from_prior = [Draw(n, network.parents[n], from_prior=True) for n in barren]
    return eliminate_all(moral, eliminated, blockers) + from_prior


def ancestors(network: Network, nodes: Collection[Node], since: Node | None = None) -> set[Node]:
    """The ancestors of some nodes; only those not before `since` in program order."""
    first = 0 if since is None else network.place[since]
    reached: set[Node] = set()
    pending = list(nodes)
    while pending:
        parents = network.parents[pending.pop()]
        new = {node for node in parents if node not in reached and network.place[node] >= first}
        reached |= new
        pending += new
    return reached
