"""A factor in; whether and how its model can say what it expects of the latents, out.

A guide needs latents that are numbers, each with a bound or none, and something that depends on
them: a site that is known when the factor is drawn, and so are its other parents. A few hundred
draws from the prior tell which moments exist, what stands in for those that do not, and which
coordinates move the observations most.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from retrodict.coordinates import Latent, blocks, table
from retrodict.draws import Draws, usual_number
from retrodict.expectations import Child, Facts, Guide
from retrodict.factors import Factor
from retrodict.graph import Edge, Graph, Site
from retrodict.relations import Link, Table, Window
from retrodict.views import Group, Members, membership
from retrodict.xla import run_once

# Latents times observations: beyond this, the picture costs more than it tells.
LARGEST = 2**15
MOST_COORDINATES = 128
# Draws from the prior that are looked at; fewer where a model has so many values that not as many
# are drawn at a time.
REFERENCES = 128


def find_guide(
    graph: Graph,
    factor: Factor,
    latents: tuple[Latent, ...],
    own_axes: tuple[tuple[int, ...], ...],
    scan: int | None,
    draws: Draws,
    facts: Facts | None = None,
) -> Guide | None:
    """The guide of a factor, or none if there is nothing to be expected.

    Args:
        graph: the model's.
        factor: one of its inverse.
        latents: what its network draws.
        own_axes: for each latent, the axes of its array that the factor's copies run along.
        scan: the scan along which the factor is drawn, if any.
        draws: joint draws of the model.
        facts: found before, if they were; nothing is simulated then.
    """
    if not _are_numbers(latents) or (factor.time and scan is None):
        return None
    if scan is not None:
        if _carries_keys(graph, scan):
            return None
        own_axes = tuple(tuple(axis - 1 for axis in axes[1:]) for axes in own_axes)
    copies = tuple(graph.plates[plate] for plate in factor.plates)
    number = sum(block.size for block in blocks(latents))
    unknown = (float("nan"),) * number
    blank = facts or Facts(tuple(range(number)), (), unknown, unknown)
    guide = Guide(graph, factor, latents, own_axes, copies, scan, (), blank)
    candidates = _children(graph, factor, scan)
    if facts is not None:
        chosen = tuple(child for child in candidates if child.name in facts.children)
        return replace(guide, children=chosen)
    return _with_facts(guide, candidates, draws)


def _are_numbers(latents: tuple[Latent, ...]) -> bool:
    simple = all(b.elementwise and b.family in ("mixture", "bernoulli") for b in blocks(latents))
    return simple and table(latents).lower.size <= MOST_COORDINATES


def _carries_keys(graph: Graph, scan: int) -> bool:
    outer = {n: s for n, s in graph.sites.items() if s.scan != scan}
    shapes = {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in outer.items()}  # type: ignore[no-untyped-call]
    carry = jax.eval_shape(lambda v: graph.program.initial_carry(scan, v), shapes)
    return any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(carry))


def _children(graph: Graph, factor: Factor, scan: int | None) -> tuple[Child, ...]:
    """Sites that depend on the latents, copy by copy, with all else that they depend on known."""
    found = []
    for name, site in graph.sites.items():
        parents = graph.parents(name)
        mine = [edge for parent, edge in parents.items() if parent in factor.latents]
        if name in factor.latents or not mine or (scan is not None and site.scan != scan):
            continue
        rest = [edge for parent, edge in parents.items() if parent not in factor.latents]
        if not (_known(graph, factor, site) and all(_given(graph, factor, e, scan) for e in rest)):
            continue
        scalar = site.event_shape == ()
        axes = _aligned(graph, factor, site, mine, scan)
        if axes is not None:
            found.append(Child(name, axes, scalar))
        elif (members := _members(graph, factor, site, mine)) is not None:
            found.append(Child(name, members[0], scalar, members[1]))
    return tuple(found)


def _members(
    graph: Graph, factor: Factor, site: Site, edges: list[Edge]
) -> tuple[tuple[int], Members] | None:
    """The axis of a child's array whose elements a constant index gives to copies, and to which."""
    if len(factor.plates) != 1 or factor.time or site.time:
        return None
    (plate,) = factor.plates
    tables = {
        link
        for edge in edges
        for relation in edge.relations
        for name, link in zip(graph.sites[edge.parent].plates, relation.links, strict=True)
        if name == plate
    }
    if len(tables) != 1:
        return None
    (table,) = tables
    if not isinstance(table, Table):
        return None
    matrix = membership(table.indices, graph.plates[plate])
    return (site.axes[table.along],), Members(Group(plate), 0, matrix)


def _known(graph: Graph, factor: Factor, site: Site) -> bool:
    return site.observed or site.name in factor.context


def _given(graph: Graph, factor: Factor, edge: Edge, scan: int | None) -> bool:
    """Whether what an edge leads from is known when the factor is drawn."""
    site = graph.sites[edge.parent]
    if _known(graph, factor, site):
        return True
    if scan is None:
        return False
    # Sites before the scan are drawn; of the scan's own, those of earlier steps are in its carry.
    return site.scan != scan or not _now(edge)


def _now(edge: Edge) -> bool:
    """Whether a step's child depends on its parent in the same step."""
    times = [relation.links[0] for relation in edge.relations]
    return any(not isinstance(link, Window) or link.lo <= 0 <= link.hi for link in times)


def _aligned(
    graph: Graph, factor: Factor, site: Site, edges: list[Edge], scan: int | None
) -> tuple[int, ...] | None:
    """The axes of a child's array along the factor's plates; none if it mixes copies."""
    if not set(factor.plates) <= set(site.plates):
        return None
    first = int(site.time)
    for edge in edges:
        parent = graph.sites[edge.parent]
        if scan is not None and not _now(edge):
            return None
        for relation in edge.relations:
            links = relation.links[int(parent.time) :]
            for plate, link in zip(parent.plates, links, strict=True):
                if plate in factor.plates and not _same(link, first + site.plates.index(plate)):
                    return None
    shift = int(scan is not None)
    return tuple(site.axes[first + site.plates.index(plate)] - shift for plate in factor.plates)


def _same(link: Link, axis: int) -> bool:
    return isinstance(link, Window) and (link.axis, link.lo, link.hi) == (axis, 0, 0)


def _with_facts(guide: Guide, candidates: tuple[Child, ...], draws: Draws) -> Guide | None:
    """The guide with what draws from the prior tell, if it then has something to say."""
    least = min((_size(replace(guide, children=(child,))) for child in candidates), default=0)
    if not candidates or least > LARGEST:
        return None
    graph = guide.graph
    names = replace(guide, children=candidates).looked_at

    def expected(values: Mapping[str, Array]) -> Any:
        found = graph.program.run(jax.random.key(0), values, expect={}, only=names)
        return {name: found.moments[name] for name in names}

    # The key is fixed: the same model must give the same guide.
    keys = jax.random.split(jax.random.key(0), usual_number(graph))
    if 2 * max(map(list(graph.sites).index, names)) < len(graph.sites):
        # all draws share a program, which is long to compile where little of it is needed

        def begun(rng_key: PRNGKeyArray) -> dict[str, Array]:
            return graph.program.run(rng_key, {}, only=names).values

        references = run_once(jax.vmap(begun), keys[:REFERENCES])
    else:
        made, _ = draws(keys)
        references = jax.tree.map(lambda leaf: leaf[:REFERENCES], made)
    moments = run_once(
        jax.vmap(expected), {n: references[n] for n in references if n in graph.sites}
    )
    children = tuple(c for c in candidates if _mostly_finite(moments[c.name]))
    if not children or _size(replace(guide, children=children)) > LARGEST:
        return None
    centre, variance = _fallbacks(guide, references, moments)
    telling = tuple(child.name for child in children)
    guide = replace(
        guide, children=children, facts=Facts(guide.facts.order, telling, centre, variance)
    )
    told, slope = _information(guide, references)
    if not np.any(told > 1e-3):
        return None
    order = _order(guide.latents, told)
    return replace(guide, facts=guide.facts._replace(order=order, slope=slope))


def _size(guide: Guide) -> int:
    """Latents times observations."""
    return guide.observations * len(guide.facts.order)


def _mostly_finite(moments: Any) -> bool:
    rows = [np.asarray(leaf).reshape(leaf.shape[0], -1) for leaf in moments]
    fine = np.all([np.isfinite(row).all(1) for row in rows], 0)
    return bool(np.mean(fine) > 0.5)


def _fallbacks(
    guide: Guide, draws: Mapping[str, Array], moments: Mapping[str, Any]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Centre and variance of what has no moments, or none that are known when it is drawn."""
    graph, factor = guide.graph, guide.factor
    centres, variances = [], []
    for latent, name in zip(guide.latents, factor.latents, strict=True):
        edges = graph.parents(name).values()
        mine = [e for e in edges if e.parent not in factor.latents]
        known = all(_given(graph, factor, e, guide.scan) for e in mine)
        size = int(np.prod(latent.shape))
        if known and _mostly_finite(moments[name]):
            centres.append(np.full(size, np.nan))
            variances.append(np.full(size, np.nan))
            continue
        values = np.asarray(draws[name], float).ravel()
        values = values[np.isfinite(values)]
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]) if values.size else (0, 0, 1)
        if guide.binary[len(np.concatenate([[], *centres]))]:
            middle = float(np.clip(values.mean(), 0.01, 0.99))
            spread = np.sqrt(middle * (1 - middle))
        else:
            spread = max((high - low) / 1.35, 1e-6 * max(abs(middle), 1.0))
        centres.append(np.full(size, middle))
        variances.append(np.full(size, spread**2))
    return (
        tuple(map(float, np.concatenate(centres))),
        tuple(map(float, np.concatenate(variances))),
    )


def _information(guide: Guide, draws: Mapping[str, Array]) -> tuple[np.ndarray, tuple[float, ...]]:
    """What a guide tells, on draws from the prior.

    Returns:
        how much more is known of each coordinate than before, in units of the prior's precision;
        and the slopes of channels, if they are the same in all draws and copies.
    """
    copies = ((guide.graph.scan_lengths[guide.scan],) if guide.scan is not None else ()) + (
        guide.copies
    )
    size = int(np.prod(copies, dtype=int))

    def told(values: Any, number: Array) -> tuple[Array, Array]:
        # Another copy for every draw, the last first: in time, the first may start from a constant.
        index = jnp.unravel_index(size - 1 - number % size, copies)
        found = guide.at(values, index if copies else ())
        if guide.channels:
            gain = jnp.sum(found.slope**2 / found.noise[:, None], 0)
        else:
            gain = jnp.sum(found.white**2, 0) - 1 / found.variance
        # Facts have the latents' own order until this tells another.
        return gain * found.variance, found.slope

    number = jax.tree.leaves(draws)[0].shape[0]
    gains, slopes = run_once(jax.vmap(told), draws, jnp.arange(number))
    gains, slopes = np.asarray(gains, float), np.asarray(slopes, float)
    with np.errstate(invalid="ignore"):
        gains = np.where(np.isfinite(gains), gains, np.nan)
    seen = ~np.all(np.isnan(gains), 0)
    gain = np.where(seen, np.nanmedian(np.where(seen, gains, 0.0), 0), 0.0)
    if not guide.channels or np.ptp(slopes, 0).max() > 1e-4 * np.abs(slopes).max():
        return gain, ()
    return gain, tuple(map(float, np.median(slopes, 0).ravel()))


def _order(latents: tuple[Latent, ...], told: np.ndarray) -> tuple[int, ...]:
    """Discrete coordinates that move the observations most come first among their neighbours."""
    order: list[int] = []
    for block in blocks(latents):
        places = np.arange(block.start, block.start + block.size)
        if block.family == "bernoulli":
            places = places[np.argsort(-np.round(told[places], 3), kind="stable")]
        order += [int(place) for place in places]
    return tuple(order)
