"""Group nodes in sampling order into joint factors.

Consecutive nodes that depend on one another form one joint factor, and copies of a factor along a
plate or in time share one network: Paige & Wood (2016), sec. 3.3 and figs. 2 to 4.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from retrodict.graph.graph import Graph, Site
from retrodict.graph.index_atoms import INF, Window
from retrodict.graph.index_relations import Relation
from retrodict.inverse.variable_elimination import Draw


@dataclass(frozen=True)
class Input:
    """How one site enters the context of a factor.

    Attributes:
        site: its name.
        relation: which of its elements a copy of the factor reads. The left axes are those that
            the factor is repeated over (time first, then plates), the right axes those of the site.
        same_scan: whether site and factor lie in the same scan, so that their first axes are steps
            of the same series.
    """

    site: str
    relation: Relation
    same_scan: bool = False

    @property
    def steps(self) -> tuple[float, float] | None:
        """The steps read of a site in the same scan, relative to the factor's step; else None.

        (−1, −1) is the step before, (0, inf) this step and the future.
        """
        return self.relation.window(0, 0) if self.same_scan else None


@dataclass(frozen=True)
class Factor:
    """Latents that one network draws jointly.

    Attributes:
        latents: site names in sampling order.
        context: names of the sites it conditions on; a site of a scan may condition on its past.
        plates: plates it is repeated over; elements of the latents along other plates are drawn
            jointly.
        network: equal for factors that share weights.
        time: whether it is repeated in time, with one draw for each step of a scan.
        backward: whether steps are drawn from the last to the first.
        inputs: how each site of the context enters.
        from_prior: whether it is drawn from the model's conditional, because no observation depends
            on it.
    """

    latents: tuple[str, ...]
    context: frozenset[str]
    plates: tuple[str, ...]
    network: Hashable
    time: bool = False
    backward: bool = False
    inputs: tuple[Input, ...] = ()
    from_prior: bool = False


def make_factors(graph: Graph, draws: Sequence[Draw], backward: bool) -> tuple[Factor, ...]:
    """Group nodes in sampling order into factors.

    Args:
        graph: the model's graph.
        draws: the nodes with their parents, in sampling order.
        backward: whether scans are drawn from the last step to the first.
    """
    # All steps of a scan are copies of one factor.
    copies: dict[tuple[str, ...], list[list[Draw]]] = {}
    for block in _blocks(graph, draws):
        copies.setdefault(tuple(draw.node.site for draw in block), []).append(block)
    last_step = max((d.node.step for d in draws if d.node.step is not None), default=0)
    return tuple(_factor(graph, steps, last_step, backward) for steps in copies.values())


def _blocks(graph: Graph, draws: Sequence[Draw]) -> list[list[Draw]]:
    """Cut the sampling order into blocks; all steps of a scan are cut like one in the middle.

    A step in the middle has both a past and a future.
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
    # Where scans alternate, other sites may come between two sites in some of the steps.
    adjacent = Counter(
        (a.node.site, b.node.site)
        for a, b in itertools.pairwise(draws)
        if a.node.step == b.node.step
    )
    number = Counter(draw.node.site for draw in draws)
    together = {pair for pair in together if adjacent[pair] == number[pair[0]]}

    blocks: list[list[Draw]] = []
    for draw in draws:
        last = blocks[-1][-1].node if blocks else draw.node
        if last.step == draw.node.step and (last.site, draw.node.site) in together:
            blocks[-1].append(draw)
        else:
            blocks.append([draw])
    return blocks


def _belongs(graph: Graph, block: Sequence[Draw], draw: Draw) -> bool:
    """Whether a node depends on every node of a block by element and has the same plates."""
    if draw.from_prior or block[0].from_prior:
        return False
    first, site = graph.sites[block[0].node.site], graph.sites[draw.node.site]
    if (first.plates, first.scan, block[0].node.step) != (site.plates, site.scan, draw.node.step):
        return False
    if block[0].joint != draw.joint:
        return False
    free = [axis for axis in range(len(site.plates)) if axis not in draw.joint]
    for member in block:
        relation = draw.parents.get(member.node)
        if relation is None or not all(relation.aligned(axis, axis) for axis in free):
            return False
    return True


def _factor(
    graph: Graph, copies: Sequence[Sequence[Draw]], last_step: int, backward: bool
) -> Factor:
    latents = tuple(draw.node.site for draw in copies[0])
    site = graph.sites[latents[0]]
    joint = frozenset().union(*(draw.joint for copy in copies for draw in copy))
    free = [axis for axis in range(len(site.plates)) if axis not in joint]

    relations: dict[str, list[Relation]] = {}
    reached: dict[str, set[tuple[int, int]]] = {}
    for copy in copies:
        inside = {draw.node for draw in copy}
        for draw in copy:
            for parent, relation in draw.parents.items():
                if parent in inside:
                    continue
                relation = relation.move({axis: number for number, axis in enumerate(free)})
                relations.setdefault(parent.site, []).append(relation)
                if draw.node.step is not None and graph.sites[parent.site].scan == site.scan:
                    steps = reached.setdefault(parent.site, set())
                    steps.add((draw.node.step, parent.step or 0))
    inputs = []
    for name in (name for name in graph.sites if name in relations):
        in_time = site.time or graph.sites[name].time
        relation = _common(relations[name]) if in_time else reduce(or_, relations[name])
        relation = _with_time(relation, site, graph.sites[name])
        if name in reached:
            relation = relation.restrict(Window(0, 0, *_window(reached[name], last_step)))
        inputs.append(Input(name, relation, name in reached))
    return Factor(
        latents=latents,
        context=frozenset(relations),
        plates=tuple(site.plates[axis] for axis in free),
        network=network_name(latents, relations),
        time=site.time,
        backward=site.time and backward != graph.reversed_scans[site.scan or 0],
        inputs=tuple(inputs),
        from_prior=copies[0][0].from_prior,
    )


def network_name(latents: Iterable[str], context: Iterable[str] | None) -> str:
    """A readable name of a network, different for different latents or context.

    Args:
        latents: the sites that it draws.
        context: the sites that it conditions on; None for a marginal.
    """

    def quoted(name: str) -> str:
        return name if re.fullmatch(r"\w+", name) else json.dumps(name)

    return " ".join([*map(quoted, latents), "|", *map(quoted, sorted(context or ()))])


def _common(relations: Sequence[Relation]) -> Relation:
    """The constraints that hold at all of a few steps, so that they are assumed at all others."""
    first = relations[0]
    if all(relation == first for relation in relations):
        return first
    atoms = set.intersection(*({*term} for relation in relations for term in relation.terms))
    return Relation.of(atoms, first.left, first.right)


def _with_time(relation: Relation, latent: Site, site: Site) -> Relation:
    """A relation between plates as one between all index axes, of which time is the first."""

    relation = relation.move(
        {axis: axis + latent.time for axis in relation.left},
        {axis: axis + site.time for axis in relation.right},
    )
    steps = [{0: s.shape[0]} if s.time else {} for s in (latent, site)]
    return replace(
        relation, left={**steps[0], **relation.left}, right={**steps[1], **relation.right}
    )


def _window(reached: set[tuple[int, int]], last: int) -> tuple[float, float]:
    """The range of parents' steps relative to the factor's; infinite if all reach an end.

    Args:
        reached: pairs of a step of the factor and a step of the parent.
        last: the last step.
    """
    by_step: dict[int, list[int]] = {}
    for step, parent in reached:
        by_step.setdefault(step, []).append(parent)
    lo: float = min(parent - step for step, parent in reached)
    hi: float = max(parent - step for step, parent in reached)
    if hi > 0 and len(by_step) > 2 and all(last in parents for parents in by_step.values()):
        hi = INF
    if lo < 0 and len(by_step) > 2 and all(0 in parents for parents in by_step.values()):
        lo = -INF
    return lo, hi
