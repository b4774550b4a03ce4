"""A network of nodes in; the latent ones in an order to draw them in, each with its parents, out.

Three ways to turn a graph round: `blanket` (Paige & Wood 2016, sec. 3.1), `faithful` (Webb et al.
2018), `filter_steps` (the paper's fig. 4).
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

    Keeps the local dependence of the model (proposition 1); siblings under a common parent come out
    independent of each other.
    """
    known = set(network.observed)
    draws: list[Draw] = []
    for node in reversed([n for n in network.nodes if n not in network.observed]):
        around = markov_blanket(network, node)
        among = around.pop(node, NOTHING)
        parents = {other: relation for other, relation in around.items() if other in known}
        draws.append(Draw(node, parents, among, coupled_axes(among), descending=True))
        known.add(node)
    return draws


def faithful(network: Network, later: Later) -> list[Draw]:
    """Eliminate the latents in the moral graph, and draw in the reverse order.

    An eliminated node is drawn given its neighbours not yet eliminated, which are then joined to
    each other. Encodes no independence that the model lacks. Latents on which nothing observed
    depends leave first and are drawn last, from the model's own conditionals.
    """
    latents = [n for n in network.nodes if n not in network.observed]
    barren = without_evidence(network, network.observed)
    eliminated = [n for n in latents if n not in barren]
    families = [n for n in network.nodes if n not in barren]
    moral = MoralGraph.of(network, families, given=network.observed)
    children = network.children
    blockers = {n: (children[n] | later(n)) - network.observed - barren for n in eliminated}
    draws = eliminate_all(moral, eliminated, blockers)
    return draws + [_own(network, n) for n in latents if n in barren]


def filter_steps(
    network: Network, chain: Collection[Node], unit: Callable[[Node], object], later: Later
) -> list[Draw]:
    """Program order, cut into steps that observations close, each inverted given the past.

    Latents outside time that the chain depends on are drawn first, given all data: a filter that
    drew them from the prior would have nothing left of them after a few steps.

    Args:
        network: the nodes.
        chain: those that make up the series: in scans and in loops.
        unit: for nodes of a scan, which step they belong to; None elsewhere.
        later: what is drawn later than a node of the same step.
    """
    latents = [n for n in network.nodes if n not in network.observed]
    leading = ancestors(network, chain) - network.observed - set(chain)
    draws: list[Draw] = []
    if leading:
        rest = set(latents) - leading
        whole = faithful(network, lambda n: rest if n in leading else later(n))
        draws = [d for d in whole if d.node in leading]
    for step in _steps(network, leading, unit):
        draws += _invert_step(network, step, later)
    return draws


def _steps(
    network: Network,
    leading: Collection[Node],
    unit: Callable[[Node], object],
) -> list[list[Node]]:
    """Cut the program into steps; an observation closes a step if it tells of its latents."""
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


def _invert_step(network: Network, step: Sequence[Node], later: Later) -> list[Draw]:
    latents = [n for n in step if n not in network.observed]
    evidence = [n for n in step if n in network.observed]
    informed = ancestors(network, evidence, step[0])
    barren = {n for n in latents if n not in informed}
    eliminated = [n for n in latents if n not in barren]
    families = [*eliminated, *evidence]
    around = {n for child in families for n in (child, *network.parents[child])}
    moral = MoralGraph.of(network, families, given=around - set(eliminated))
    children = network.children
    blockers = {n: (children[n] | later(n)) & set(eliminated) for n in eliminated}
    draws = eliminate_all(moral, eliminated, blockers)
    return draws + [_own(network, n) for n in latents if n in barren]


def without_evidence(network: Network, evidence: Collection[Node]) -> set[Node]:
    """Latents from which no directed path leads to any of the evidence."""
    informed = ancestors(network, evidence)
    return {n for n in network.nodes if n not in informed and n not in network.observed}


def ancestors(network: Network, nodes: Collection[Node], since: Node | None = None) -> set[Node]:
    """All from which a directed path leads to one of the nodes, or those not before a node."""
    first = 0 if since is None else network.place[since]
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        parents = network.parents[waiting.pop()]
        new = {node for node in parents if node not in found and network.place[node] >= first}
        found |= new
        waiting += new
    return found


def _own(network: Network, node: Node) -> Draw:
    return Draw(node, network.parents[node], from_prior=True)
