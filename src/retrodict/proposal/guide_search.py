"""A factor in; whether and how its model can say what it expects of the latents, out.

A guide needs latents that are numbers, each with a bound or none, and something that depends on
them: a site that is known when the factor is drawn, and so are its other parents. A few hundred
draws from the prior tell which moments exist, what stands in for those that do not, and which
coordinates move the observations most.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from retrodict._xla.jit import run_once
from retrodict.errors import UnsupportedModel
from retrodict.estimators.analytic.bit_sums import fitted, spans, starts_of
from retrodict.estimators.coordinates import Latent, blocks, table
from retrodict.estimators.guide_inputs import BITS, Expected
from retrodict.graph.graph import Edge, Graph, Site
from retrodict.graph.index_atoms import Table, Window
from retrodict.graph.prior_draws import Draws, fresh_keys, usual_number
from retrodict.inverse.factors import Factor
from retrodict.proposal.linear_guide import Child, Facts, Guide, Pieces

# Latents times observations: beyond this, the picture costs more than it tells.
LARGEST = 2**15
MOST_COORDINATES = 128
# Draws from the prior that are looked at; fewer where a model has so many values that not as many
# are drawn at a time.
REFERENCES = 128
# Bits whose sum is looked at: each few of them are written out.
MOST_BITS = 60
# Rounding aside, what is expected beforehand is what is so.
ALIKE = 3e-3


def blank_guide(
    graph: Graph,
    factor: Factor,
    latents: tuple[Latent, ...],
    own_axes: tuple[tuple[int, ...], ...],
    scan: int | None,
    facts: Facts | None = None,
) -> Guide | None:
    """A guide that knows of no children yet; none where the model cannot be asked copy by copy.

    Args:
        graph: the model's.
        factor: one of its inverse.
        latents: what its network draws.
        own_axes: for each latent, the axes of its array that the factor's copies run along.
        scan: the scan along which the factor is drawn, if any.
        facts: found before, if they were.
    """
    if factor.time and scan is None:
        return None
    if scan is not None:
        if _carries_keys(graph, scan):
            return None
        own_axes = tuple(tuple(axis - 1 for axis in axes[1:]) for axes in own_axes)
    copies = tuple(graph.plates[plate] for plate in factor.plates)
    number = sum(block.size for block in blocks(latents))
    unknown = (float("nan"),) * number
    blank = facts or Facts(tuple(range(number)), (), unknown, unknown)
    return Guide(graph, factor, latents, own_axes, copies, scan, (), blank)


def find_guide(blank: Guide, draws: Draws, *, known: bool = False) -> Guide | None:
    """The guide of a factor, or none if there is nothing to be expected.

    Args:
        blank: from `blank_guide`.
        draws: joint draws of the model.
        known: whether it has facts that were found before; nothing is simulated then, as long as
            they are of the model with the same arguments.
    """
    if not _are_numbers(blank.latents):
        return None
    candidates = children_of(blank.graph, blank.factor, blank.scan)
    if known:
        chosen = tuple(child for child in candidates if child.name in blank.facts.children)
        return _with_slope(replace(blank, children=chosen), draws)
    return _with_facts(blank, candidates, draws)


def _are_numbers(latents: tuple[Latent, ...]) -> bool:
    simple = all(b.elementwise and b.family in ("mixture", "bernoulli") for b in blocks(latents))
    return simple and table(latents).lower.size <= MOST_COORDINATES


def _carries_keys(graph: Graph, scan: int) -> bool:
    """Whether random keys go from step to step, of which nothing can be expected."""
    outer = {n: s for n, s in graph.sites.items() if s.scan != scan}
    shapes = {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in outer.items()}  # type: ignore[no-untyped-call]
    carry = jax.eval_shape(lambda v: graph.program.initial_carry(scan, v), shapes)
    return any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(carry))


def children_of(graph: Graph, factor: Factor, scan: int | None) -> tuple[Child, ...]:
    """Sites that depend on the latents, copy by copy, with all else that they depend on known."""
    found = []
    for name, site in graph.sites.items():
        parents = graph.parents(name)
        mine = [edge for parent, edge in parents.items() if parent in factor.latents]
        if name in factor.latents or not mine or (scan is not None and site.scan != scan):
            continue
        rest = [edge for parent, edge in parents.items() if parent not in factor.latents]
        if not (_known(graph, factor, site) and all(given(graph, factor, e, scan) for e in rest)):
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
) -> tuple[tuple[int], Table] | None:
    """The axis of a child's array whose elements a constant index gives to copies, and to which."""
    if len(factor.plates) != 1 or factor.time or site.time:
        return None
    (plate,) = factor.plates
    tables = {
        next((a for a in term if isinstance(a, Table) and a.right == axis), None)
        for edge in edges
        for axis in [graph.sites[edge.parent].plates.index(plate)]
        for term in edge.relation.terms
    }
    table = tables.pop()
    if table is None or tables or table.left is None or not table.is_function:
        return None
    return (site.axes[table.left],), replace(table.transposed, left=0, right=0)


def _known(graph: Graph, factor: Factor, site: Site) -> bool:
    return site.observed or site.name in factor.context


def given(graph: Graph, factor: Factor, edge: Edge, scan: int | None) -> bool:
    """Whether what an edge leads from is known when the factor is drawn."""
    site = graph.sites[edge.parent]
    if _known(graph, factor, site):
        return True
    if scan is None:
        return False
    # Sites before the scan are drawn; of the scan's own, those of earlier steps are in its carry.
    return site.scan != scan or not happens_now(edge)


def happens_now(edge: Edge) -> bool:
    """Whether a step's child depends on its parent in the same step."""
    return bool(edge.relation.restrict(Window(0, 0)))


def _aligned(
    graph: Graph, factor: Factor, site: Site, edges: list[Edge], scan: int | None
) -> tuple[int, ...] | None:
    """The axes of a child's array along the factor's plates; none if it mixes copies."""
    if not set(factor.plates) <= set(site.plates):
        return None
    first = int(site.time)
    for edge in edges:
        parent = graph.sites[edge.parent]
        if scan is not None and not happens_now(edge):
            return None
        for axis, plate in enumerate(parent.plates, int(parent.time)):
            if plate in factor.plates and not edge.relation.aligned(
                first + site.plates.index(plate), axis
            ):
                return None
    shift = int(scan is not None)
    return tuple(site.axes[first + site.plates.index(plate)] - shift for plate in factor.plates)


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

    references = reference_draws(replace(guide, children=candidates), draws)
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
    told = _information(guide, references)
    if not np.any(told.gain > 1e-3):
        return None
    facts = guide.facts._replace(order=_order(guide.latents, told.gain), slope=told.slope)
    guide = replace(guide, facts=facts)
    if _adds_up(guide):
        guide = replace(guide, facts=facts._replace(waves=_waves(facts, told)))
    return guide


def reference_draws(guide: Guide, draws: Draws) -> dict[str, Array]:
    """Draws from the prior, sound ones if there are enough of them.

    They are always the same, as the same model must have the same guide.
    """
    graph, names = guide.graph, guide.looked_at
    keys = fresh_keys(np.random.default_rng(0), usual_number(graph), jax.random.key(0))
    if guide.scan is None and 2 * max(map(list(graph.sites).index, names)) < len(graph.sites):
        # all draws share a program, which is long to compile where little of it is needed

        def begun(rng_key: PRNGKeyArray) -> dict[str, Array]:
            return graph.program.run(rng_key, {}, only=names).values

        found: dict[str, Array] = run_once(jax.vmap(begun), keys[:REFERENCES])
        return found
    made, faults = draws(keys)
    order = np.argsort(np.asarray(faults) != 0, kind="stable")[:REFERENCES]
    # in one program, where each would be several otherwise
    few: dict[str, Array] = run_once(
        lambda made, order: jax.tree.map(lambda leaf: leaf[order], made), made, order
    )
    return few


def _with_slope(guide: Guide, draws: Draws) -> Guide:
    """The guide with how bits move a sum, if that is not known: the model has other arguments.

    Elsewhere it need not be known beforehand; but a sum is looked at by tables of what its bits do.
    """
    if not guide.facts.waves or guide.facts.slope:
        return guide
    own_order = guide.facts._replace(order=tuple(range(len(guide.facts.order))))
    told = _information(replace(guide, facts=own_order), reference_draws(guide, draws))
    if not told.slope:
        raise UnsupportedModel(
            f"site '{guide.factor.latents[0]}': with the arguments it was compiled with, each bit "
            f"moved '{guide.facts.children[0]}' by an amount of its own; with these, the amount "
            "differs from draw to draw. Compile the model anew with these arguments"
        )
    return replace(guide, facts=guide.facts._replace(slope=told.slope))


def _adds_up(guide: Guide) -> bool:
    """Whether the coordinates are bits that move one observation, always alike."""
    number = len(guide.facts.order)
    few = 1 < number <= MOST_BITS
    return bool(guide.channels == 1 and guide.facts.slope and guide.binary.all() and few)


def _waves(facts: Facts, told: "_Told") -> tuple[float, ...]:
    """The frequencies at which a sum of bits is looked at."""
    order, slope = np.array(facts.order), np.array(facts.slope)
    cut = spans(order.size, BITS)
    left = [order[start:] for start in starts_of(cut)[:-1]]
    usual = [np.sqrt(np.median(told.variance[:, bits] @ slope[bits] ** 2)) for bits in left]
    # where noise differs from draw to draw, even small ones should be seen as they are
    noise = float(np.sqrt(np.quantile(told.noise, 0.1)))
    exact = told.exact and bool(np.isnan(facts.centre).all())
    waves = fitted(slope[order], cut, usual, noise, exact)
    return tuple(map(float, (waves.spacing, waves.blur, waves.exact, *waves.numbers)))


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
        known = all(given(graph, factor, e, guide.scan) for e in mine)
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


class _Told(NamedTuple):
    """What a guide tells, on draws from the prior.

    Attributes:
        gain: how much more is known of each coordinate than before, in units of the prior's
            precision.
        slope: of channels, if it is the same in all draws and copies; empty else.
        variance, noise: of the coordinates and of the channels, by draw.
        exact: whether what is expected before latents are known is so whatever they are, and
            observations are normal.
    """

    gain: Float[np.ndarray, " coordinates"]
    slope: tuple[float, ...]
    variance: Float[np.ndarray, "draws coordinates"]
    noise: Float[np.ndarray, "draws channels"]
    exact: bool


def _information(guide: Guide, draws: Mapping[str, Array]) -> _Told:
    copies = ((guide.graph.scan_lengths[guide.scan],) if guide.scan is not None else ()) + (
        guide.copies
    )
    size = int(np.prod(copies, dtype=int))

    def told(values: Any, number: Array) -> tuple[Array, Expected, Array]:
        # Another copy for every draw, the last first: in time, the first may start from a constant.
        index = jnp.unravel_index(size - 1 - number % size, copies)
        found = guide.at(values, index if copies else ())
        if not guide.channels:
            gain = jnp.sum(found.white**2, 0) - 1 / found.variance
            return gain * found.variance, found, jnp.zeros(())
        gain = jnp.sum(found.slope**2 / found.noise[:, None], 0)
        # Facts have the latents' own order until this tells another.
        surprise = _surprise(found, *guide.truth(values, index if copies else ()))
        return gain * found.variance, found, surprise

    number = jax.tree.leaves(draws)[0].shape[0]
    gains, found, surprise = run_once(jax.vmap(told), draws, np.arange(number))
    gains, slopes = np.asarray(gains, float), np.asarray(found.slope, float)
    with np.errstate(invalid="ignore"):
        gains = np.where(np.isfinite(gains), gains, np.nan)
    seen = ~np.all(np.isnan(gains), 0)
    gain = np.where(seen, np.nanmedian(np.where(seen, gains, 0.0), 0), 0.0)
    slope: tuple[float, ...] = ()
    if guide.channels and np.ptp(slopes, 0).max() <= 1e-4 * np.abs(slopes).max():
        slope = tuple(map(float, np.median(slopes, 0).ravel()))
    variance, noise = np.asarray(found.variance, float), np.asarray(found.noise, float)
    return _Told(gain, slope, variance, noise, bool(np.all(np.asarray(surprise) < ALIKE)))


def _surprise(found: Expected, x: Array, y: Array, truth: Pieces) -> Float[Array, ""]:
    """How far what is expected beforehand is from what is so given the latents' values x.

    Zero for independent latents, observations whose means they move linearly, and normal noise.
    """
    mean, variance = truth.of_children
    sd = jnp.sqrt(variance)
    foreseen = found.residual - found.slope @ (x - found.prior)
    normal = -0.5 * ((y - mean) ** 2 / variance + jnp.log(2 * jnp.pi * variance))
    apart = [
        (y - mean - foreseen) / sd,
        jnp.log(variance / found.noise),
        truth.own.mean - found.prior,
        truth.log_density - normal,
    ]
    largest = jnp.max(jnp.abs(jnp.concatenate(apart)))
    return jnp.where(jnp.isnan(largest), jnp.inf, largest)


def _order(latents: tuple[Latent, ...], told: np.ndarray) -> tuple[int, ...]:
    """Discrete coordinates that move the observations most come first among their neighbours."""
    order: list[int] = []
    for block in blocks(latents):
        places = np.arange(block.start, block.start + block.size)
        if block.family == "bernoulli":
            places = places[np.argsort(-np.round(told[places], 3), kind="stable")]
        order += [int(place) for place in places]
    return tuple(order)
