"""Group nodes in the order drawn into joint factors.

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
from retrodict.graph.index_atoms import INF, Sizes, Window
from retrodict.graph.index_relations import Relation
from retrodict.inverse.variable_elimination import Draw


@dataclass(frozen=True)
class Input:
    """How one site enters the context of a factor.

    Attributes:
        site: its name.
        relation: which of its elements a copy of the factor sees. The left axes are those that the
            factor is repeated over (time first, then plates), the right axes are the site's own.
        same_scan: whether site and factor lie in the same scan, so that their first axes are steps
            of the same series.
    """

    site: str
    relation: Relation
    same_scan: bool = False

    @property
    def steps(self) -> tuple[float, float] | None:
        """The steps seen of a site in the same scan, relative to the factor's own; else None.

        (−1, −1) is the step before, (0, inf) this one and the future.
        """
        return self.relation.window(0, 0) if self.same_scan else None


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
        relation = (_common if in_time else _union)(relations[name])
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
        latents: what it draws.
        context: the sites that it sees; None for a marginal, which sees none.
    """

    def quoted(name: str) -> str:
        return name if re.fullmatch(r"\w+", name) else json.dumps(name)

    drawn = " ".join(map(quoted, latents))
    return (
        f"{drawn} |" if context is None else " ".join([drawn, "|", *map(quoted, sorted(context))])
    )


def _union(relations: Sequence[Relation]) -> Relation:
    return reduce(or_, relations)


def _common(relations: Sequence[Relation]) -> Relation:
    """What is true at all of a few steps, so that it may be said of the steps that follow."""
    first = relations[0]
    if all(relation == first for relation in relations):
        return first
    atoms = set.intersection(*({*term} for relation in relations for term in relation.terms))
    return Relation.of(atoms, first.left, first.right)


def _with_time(relation: Relation, latent: Site, site: Site) -> Relation:
    """A relation between plates as one between all index axes, of which time is the first."""

    def moved(sizes: Sizes, time: bool) -> dict[int, int]:
        return {axis: axis + time for axis in sizes}

    relation = relation.move(moved(relation.left, latent.time), moved(relation.right, site.time))
    lengths = [{0: s.shape[0]} if s.time else {} for s in (latent, site)]
    left, right = {**lengths[0], **relation.left}, {**lengths[1], **relation.right}
    return replace(relation, left=left, right=right)


def _window(reached: set[tuple[int, int]], last: int) -> tuple[float, float]:
    """The steps seen, relative to one's own; to the end of the series where that is the rule."""
    offsets = [theirs - mine for mine, theirs in reached]
    lo: float = min(offsets)
    hi: float = max(offsets)
    by_step: dict[int, list[int]] = {}
    for mine, theirs in reached:
        by_step.setdefault(mine, []).append(theirs)
    if hi > 0 and len(by_step) > 2 and all(max(seen) == last for seen in by_step.values()):
        hi = INF
    if lo < 0 and len(by_step) > 2 and all(min(seen) == 0 for seen in by_step.values()):
        lo = -INF
    return lo, hi
