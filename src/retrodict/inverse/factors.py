"""Nodes in the order drawn in; joint factors with shared networks out.

Consecutive nodes that depend on one another form one joint factor, and copies of a factor along a
plate, in time or in a loop share one network: Paige & Wood (2016), sec. 3.3 and figs. 2 to 4.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import NamedTuple

from retrodict.graph.graph import Graph, Site
from retrodict.graph.index_atoms import INF, Sizes, Window
from retrodict.graph.index_relations import Relation
from retrodict.inverse.variable_elimination import Draw


@dataclass(frozen=True)
class Input:
    """How one site enters the context of a factor.

    Attributes:
        site: its name.
        label: its name for the network: relative to the factor's own step in a loop.
        relation: which of its elements a copy of the factor sees. The left axes are those that the
            factor is repeated over (time first, then plates), the right axes are the site's own.
        same_scan: whether site and factor lie in the same scan, so that their first axes are steps
            of the same series.
    """

    site: str
    label: str
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
        labels: their names for the network, equal in factors that share it.
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
    labels: tuple[str, ...] = ()
    time: bool = False
    backward: bool = False
    inputs: tuple[Input, ...] = ()
    own: bool = False


def make_factors(
    graph: Graph, draws: Sequence[Draw], chain: Mapping[str, int], backward: bool
) -> tuple[Factor, ...]:
    """Group nodes in the order drawn into factors.

    Args:
        graph: the model's.
        draws: one a node, in the order drawn.
        chain: for sites of loops in time, their step: different steps stay different factors.
        backward: scans are drawn from the last step to the first.
    """
    # All steps of a scan are copies of one factor.
    copies: dict[tuple[str, ...], list[list[Draw]]] = {}
    for block in _blocks(graph, draws, chain):
        copies.setdefault(tuple(draw.node.site for draw in block), []).append(block)
    drawn = _Drawn.of(graph, draws)
    return tuple(_factor(graph, alike, drawn, backward) for alike in copies.values())


class _Drawn(NamedTuple):
    """What is known of all nodes together.

    Attributes:
        last: for each latent site, when the last of its nodes is drawn.
        last_step: of all scans.
        order: of the sites in the program.
        children: of each site.
    """

    last: Mapping[str, int]
    last_step: int
    order: Mapping[str, int]
    children: Mapping[str, Sequence[str]]

    @staticmethod
    def of(graph: Graph, draws: Sequence[Draw]) -> "_Drawn":
        children: dict[str, list[str]] = {}
        for edge in graph.edges:
            children.setdefault(edge.parent, []).append(edge.child)
        return _Drawn(
            {draw.node.site: number for number, draw in enumerate(draws)},
            max((d.node.step for d in draws if d.node.step is not None), default=0),
            {name: number for number, name in enumerate(graph.sites)},
            children,
        )


def _blocks(graph: Graph, draws: Sequence[Draw], chain: Mapping[str, int]) -> list[list[Draw]]:
    """Cut the order into blocks; every step of a scan is cut in the same way.

    The way is that of a step in the middle, which has both a past and a future.
    """
    steps = {d.node.step for d in draws if d.node.step is not None}
    middle = sorted(steps)[len(steps) // 2] if steps else None
    together: set[tuple[str, str]] = set()
    block: list[Draw] = []
    for draw in (d for d in draws if d.node.step in (None, middle)):
        if block and _belongs(graph, block, draw, chain):
            together.add((block[-1].node.site, draw.node.site))
            block.append(draw)
        else:
            block = [draw]

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


def _belongs(graph: Graph, block: Sequence[Draw], draw: Draw, chain: Mapping[str, int]) -> bool:
    """Whether a node depends on every node of a block, element by element, and is indexed alike."""
    if draw.own or block[0].own:
        return False
    first, site = graph.sites[block[0].node.site], graph.sites[draw.node.site]
    if (first.plates, first.scan, block[0].node.step) != (site.plates, site.scan, draw.node.step):
        return False
    if chain.get(first.name) != chain.get(site.name) or block[0].joint != draw.joint:
        return False
    free = [axis for axis in range(len(site.plates)) if axis not in draw.joint]
    for member in block:
        relation = draw.parents.get(member.node)
        if relation is None or not all(relation.aligned(axis, axis) for axis in free):
            return False
    return True


def _factor(
    graph: Graph, copies: Sequence[Sequence[Draw]], drawn: _Drawn, backward: bool
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
    label = _labels(graph, latents)
    inputs = []
    for name in sorted(relations, key=drawn.order.__getitem__):
        in_time = site.time or graph.sites[name].time
        relation = (_common if in_time else _union)(relations[name])
        relation = _with_time(relation, site, graph.sites[name])
        if name in reached:
            relation = relation.restrict(Window(0, 0, *_window(reached[name], drawn.last_step)))
        inputs.append(Input(name, label(name), relation, name in reached))
    return Factor(
        latents=latents,
        context=frozenset(relations),
        plates=tuple(site.plates[axis] for axis in free),
        network=_network(graph, copies[0], label, relations, drawn),
        labels=tuple(map(label, latents)),
        time=site.time,
        backward=site.time and backward != graph.reversed_scans[site.scan or 0],
        inputs=tuple(inputs),
        own=copies[0][0].own,
    )


def _labels(graph: Graph, latents: Sequence[str]) -> Callable[[str], str]:
    """Names relative to the step of a factor in a loop: `x_-1` for `x_4` in the factor of `x_5`."""
    families = [graph.sites[name].family for name in latents]
    start = next((family[1] for family in families if family is not None), None)

    def label(name: str) -> str:
        family = graph.sites[name].family
        return name if family is None or start is None else f"{family[0]}{family[1] - start:+d}"

    return label


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


def _network(
    graph: Graph,
    block: Sequence[Draw],
    label: Callable[[str], str],
    context: Iterable[str],
    drawn: _Drawn,
) -> str:
    """A name for the network: equal for blocks of a loop that are copies of each other.

    Copies have the same sites in the same relative position, and the densities that tie them to the
    rest are computed alike, constants included.
    """
    names = [draw.node.site for draw in block]
    title = f"{' '.join(map(label, names))} | {' '.join(sorted(map(label, context)))}"
    if all(graph.sites[name].family is None for name in names):
        return title
    digest = hashlib.sha256()
    for touched in _touched(graph, block, drawn):
        digest.update(f"{label(touched)}:{graph.codes.get(touched, '')}\n".encode())
    return f"{title} # {digest.hexdigest()[:8]}"


def _touched(graph: Graph, block: Sequence[Draw], drawn: _Drawn) -> Iterable[str]:
    """Sites whose densities make up the block's conditional: its own, and downwards.

    Latent children drawn later have been integrated over, so theirs count as well.
    """
    names = [draw.node.site for draw in block]
    last = max(drawn.last[name] for name in names)
    context = {parent.site for draw in block for parent in draw.parents}

    def later(name: str) -> bool:
        return drawn.last.get(name, -1) > last

    telling = _with_evidence(graph, context, later)
    found, pending = dict.fromkeys(names), list(names)
    while pending:
        for child in drawn.children.get(pending.pop(), ()):
            # A child beyond the context is not conditioned on: a step of a filter ends there.
            if child not in found and (child in context or later(child)):
                if graph.sites[child].observed and child not in context:
                    continue
                found[child] = None
                if later(child) and child in telling:
                    pending.append(child)
    return sorted(
        (n for n in found if n in names or n in context or n in telling),
        key=drawn.order.__getitem__,
    )


def _with_evidence(graph: Graph, context: set[str], later: Callable[[str], bool]) -> set[str]:
    """Sites from which a path leads to the context through such as are drawn later."""
    found: set[str] = set()
    pending = list(context)
    while pending:
        for parent in graph.parents(pending.pop()):
            if parent not in found:
                found.add(parent)
                if later(parent):
                    pending.append(parent)
    return found
