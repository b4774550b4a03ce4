"""Group nodes in the order drawn into joint factors.

Consecutive nodes that depend on one another form one joint factor, and copies of a factor along a
plate or in time share one network: Paige & Wood (2016), sec. 3.3 and figs. 2 to 4.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from retrodict.graph.graph import Graph
from retrodict.inverse.plate_relations import SAME, Constraint, Meets, join
from retrodict.inverse.variable_elimination import Draw


@dataclass(frozen=True)
class Input:
    """How one site enters the context of a factor.

    Attributes:
        site: its name.
        meets: which of its elements an element of the factor sees; axes are the factor's plates and
            the site's. Empty constraints: all of them, as a set.
        steps: where both lie in the same scan, which steps it sees, relative to the factor's own:
            (−1, −1) the step before, (0, inf) this one and the future. Otherwise None.
    """

    site: str
    meets: Meets
    steps: tuple[float, float] | None = None


@dataclass(frozen=True)
class Factor:
    """What one network draws.

    Attributes:
        latents: site names in the order drawn.
        context: names of the sites it looks at; a site of a scan may look at its own past.
        plates: what it is repeated over; plates of the latents that are not here are drawn jointly.
        network: equal for factors that share weights.
        time: whether it is repeated in time, one draw a step of a scan.
        backward: in time from the last step to the first.
        inputs: how each site of the context enters.
        own: drawn from the model's own conditional, for nothing observed depends on it.
    """

    latents: tuple[str, ...]
    context: frozenset[str]
    plates: tuple[str, ...]
    network: Hashable
    time: bool = False
    backward: bool = False
    inputs: tuple[Input, ...] = ()
    own: bool = False


def make_factors(graph: Graph, draws: Sequence[Draw], backward: bool) -> tuple[Factor, ...]:
    """Group nodes in the order drawn into factors.

    Args:
        graph: the model's.
        draws: one a node, in the order drawn.
        backward: scans are drawn from the last step to the first.
    """
    # All steps of a scan are copies of one factor.
    copies: dict[tuple[str, ...], list[list[Draw]]] = {}
    for block in _blocks(graph, draws):
        copies.setdefault(tuple(draw.node.site for draw in block), []).append(block)
    last_step = max((d.node.step for d in draws if d.node.step is not None), default=0)
    return tuple(_factor(graph, steps, last_step, backward) for steps in copies.values())


def _blocks(graph: Graph, draws: Sequence[Draw]) -> list[list[Draw]]:
    """Cut the order into blocks; every step of a scan is cut in the same way.

    The way is that of a step in the middle, which has both a past and a future.
    """
    steps = {d.node.step for d in draws if d.node.step is not None}
    middle = sorted(steps)[len(steps) // 2] if steps else None
    together: set[tuple[str, str]] = set()
    block: list[Draw] = []
    for draw in (d for d in draws if d.node.step in (None, middle)):
        if block and _belongs(graph, block, draw):
            together.add((block[-1].node.site, draw.node.site))
            block.append(draw)
        else:
            block = [draw]
    # Where scans take turns, others may come between two sites in some of the steps.
    adjacent = Counter(
        (a.node.site, b.node.site)
        for a, b in itertools.pairwise(draws)
        if a.node.step == b.node.step
    )
    number = Counter(draw.node.site for draw in draws)
    together = {pair for pair in together if adjacent[pair] == number[pair[0]]}

    blocks: list[list[Draw]] = []
    for draw in draws:
        last = blocks[-1][-1] if blocks else None
        if (
            last is not None
            and last.node.step == draw.node.step
            and (last.node.site, draw.node.site) in together
        ):
            blocks[-1].append(draw)
        else:
            blocks.append([draw])
    return blocks


def _belongs(graph: Graph, block: Sequence[Draw], draw: Draw) -> bool:
    """Whether a node depends on every node of a block, element by element, and is indexed alike."""
    if draw.own or block[0].own:
        return False
    first, site = graph.sites[block[0].node.site], graph.sites[draw.node.site]
    if (first.plates, first.scan, block[0].node.step) != (site.plates, site.scan, draw.node.step):
        return False
    if block[0].joint != draw.joint:
        return False
    free = [axis for axis in range(len(site.plates)) if axis not in draw.joint]
    for member in block:
        meets = draw.parents.get(member.node)
        if meets is None:
            return False
        if any(Constraint(axis, axis, SAME) not in meet for meet in meets for axis in free):
            return False
    return True


def _factor(
    graph: Graph, copies: Sequence[Sequence[Draw]], last_step: int, backward: bool
) -> Factor:
    latents = tuple(draw.node.site for draw in copies[0])
    site = graph.sites[latents[0]]
    joint = frozenset().union(*(draw.joint for copy in copies for draw in copy))
    free = [axis for axis in range(len(site.plates)) if axis not in joint]
    renumber = {axis: number for number, axis in enumerate(free)}

    met: dict[str, list[Meets]] = {}
    reached: dict[str, set[tuple[int, int]]] = {}
    for copy in copies:
        inside = {draw.node for draw in copy}
        for draw in copy:
            for parent, meets in draw.parents.items():
                if parent in inside:
                    continue
                met.setdefault(parent.site, []).append(_renumbered(meets, renumber))
                if draw.node.step is not None and parent.step is not None:
                    reached.setdefault(parent.site, set()).add((draw.node.step, parent.step))
    inputs = tuple(
        Input(name, join(*met[name]), _window(graph, site.scan, name, reached.get(name), last_step))
        for name in graph.sites
        if name in met
    )
    return Factor(
        latents=latents,
        context=frozenset(met),
        plates=tuple(site.plates[axis] for axis in free),
        network=f"{' '.join(latents)} | {' '.join(sorted(met))}",
        time=site.time,
        backward=site.time and backward != graph.reversed_scans[site.scan or 0],
        inputs=inputs,
        own=copies[0][0].own,
    )


def _renumbered(meets: Meets, renumber: Mapping[int, int]) -> Meets:
    """Constraints on the axes a factor is repeated over, counted among those."""
    return join(
        frozenset(
            c._replace(mine=renumber.get(c.mine, c.mine))
            for c in meet
            if c.mine in renumber or c.mine < 0
        )
        for meet in meets
    )


def _window(
    graph: Graph,
    scan: int | None,
    name: str,
    reached: set[tuple[int, int]] | None,
    last: int,
) -> tuple[float, float] | None:
    """The steps seen, relative to one's own; to the end of the series where that is the rule."""
    if reached is None or graph.sites[name].scan != scan:
        return None
    offsets = [theirs - mine for mine, theirs in reached]
    lo: float = min(offsets)
    hi: float = max(offsets)
    by_step: dict[int, list[int]] = {}
    for mine, theirs in reached:
        by_step.setdefault(mine, []).append(theirs)
    if hi > 0 and len(by_step) > 2 and all(max(seen) == last for seen in by_step.values()):
        hi = float("inf")
    if lo < 0 and len(by_step) > 2 and all(min(seen) == 0 for seen in by_step.values()):
        lo = float("-inf")
    return lo, hi
