"""Find out whether a factor has a linear guide, from draws of the prior.

A guide needs latents that are numbers, with or without bounds, and children that are known when the
factor is drawn, with all of their other parents. A few draws from the prior tell which moments
exist, what replaces those that do not, and which coordinates move the observations most.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.jit import run_once
from retrodict.estimators.coordinates import Latent, blocks, coordinate_table
from retrodict.estimators.guide_inputs import LinearEstimate
from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import JointDraws, PriorSampler
from retrodict.proposal.factor_model import FactorModel, known_children, parent_known
from retrodict.proposal.facts import GuideFacts
from retrodict.proposal.linear_guide import LinearGuide
from retrodict.proposal.reference_draws import at_references, pick, reference_draws
from retrodict.proposal.scope import Scope

# Latents times observations: beyond this, the estimate costs more than it tells.
MAX_ENTRIES = 2**15
MAX_COORDINATES = 128
# Information on a coordinate, relative to its prior precision, below which a guide is useless.
LEAST_INFORMATION = 1e-3


def restore_guide(model: FactorModel, facts: GuideFacts) -> LinearGuide:
    """The guide with facts that were found before."""
    children = known_children(model.graph, model.factor, model.scan)
    chosen = tuple(child for child in children if child.name in facts.children)
    return LinearGuide(replace(model, children=chosen), facts)


def find_guide(model: FactorModel, sample_prior: PriorSampler) -> LinearGuide | None:
    """The guide of a factor, or None if it would have nothing to say.

    Args:
        model: of the factor, without children.
        sample_prior: joint draws of the model.
    """
    if not _has_guide_coordinates(model.copies.latents) or carries_keys(model.graph, model.scan):
        return None
    children = known_children(model.graph, model.factor, model.scan)
    sizes = [_entries(replace(model, children=(child,))) for child in children]
    if not children or min(sizes) > MAX_ENTRIES:
        return None
    model = replace(model, children=children)
    references = reference_draws(model, sample_prior)
    moments = _reference_moments(model, references)
    model = replace(model, children=tuple(c for c in children if _mostly_finite(moments[c.name])))
    if not model.children or _entries(model) > MAX_ENTRIES:
        return None
    number = coordinate_table(model.copies.latents).lower.size
    centre, variance = _fallbacks(model, references, moments)
    names = tuple(child.name for child in model.children)
    guide = LinearGuide(model, GuideFacts(tuple(range(number)), names, centre, variance))
    information = _information(guide, references)
    if not np.any(information.gain > LEAST_INFORMATION):
        return None
    order = sampling_order(model.copies.latents, information.gain)
    return LinearGuide(model, guide.facts._replace(order=order, slope=information.slope))


def _has_guide_coordinates(latents: tuple[Latent, ...]) -> bool:
    simple = all(b.elementwise and b.kind in ("mixture", "bernoulli") for b in blocks(latents))
    return simple and coordinate_table(latents).lower.size <= MAX_COORDINATES


def carries_keys(graph: Graph, scan: int | None) -> bool:
    """Whether random keys go from step to step, so that a carry cannot be rebuilt from numbers."""
    if scan is None:
        return False
    outer = {n: s for n, s in graph.sites.items() if s.scan != scan}
    shapes = {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in outer.items()}  # type: ignore[no-untyped-call]
    carry = jax.eval_shape(lambda v: graph.program.initial_carry(scan, v), shapes)
    return any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(carry))


def _entries(model: FactorModel) -> int:
    return model.num_observations * coordinate_table(model.copies.latents).lower.size


def _reference_moments(model: FactorModel, references: JointDraws) -> dict[str, Any]:
    """Moments of the latents and their children in every reference draw."""
    names = model.evaluated

    def moments(values: Mapping[str, Array]) -> Any:
        run = model.graph.program.run(jax.random.key(0), values, expect={}, only=names)
        return {name: run.moments[name] for name in names}

    found: dict[str, Any] = run_once(jax.vmap(moments), references.values)
    return found


def _mostly_finite(moments: Any) -> bool:
    rows = [np.asarray(leaf).reshape(leaf.shape[0], -1) for leaf in moments]
    finite = np.all([np.isfinite(row).all(1) for row in rows], 0)
    return bool(np.mean(finite) > 0.5)


def _fallbacks(
    model: FactorModel, references: JointDraws, moments: Mapping[str, Any]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Centre and variance of coordinates without moments, or with moments unknown when drawn."""
    graph, factor = model.graph, model.factor
    centres, variances = [], []
    for latent, name in zip(model.copies.latents, factor.latents, strict=True):
        edges = [e for e in graph.parents(name).values() if e.parent not in factor.latents]
        known = all(parent_known(graph, factor, edge, model.scan) for edge in edges)
        size = int(np.prod(latent.shape))
        if known and _mostly_finite(moments[name]):
            centres.append(np.full(size, np.nan))
            variances.append(np.full(size, np.nan))
            continue
        binary = blocks((latent,))[0].kind == "bernoulli"
        centre, spread = _centre_and_spread(np.asarray(references.values[name], float), binary)
        centres.append(np.full(size, centre))
        variances.append(np.full(size, spread**2))
    return (
        tuple(map(float, np.concatenate(centres))),
        tuple(map(float, np.concatenate(variances))),
    )


def _centre_and_spread(values: np.ndarray, binary: bool) -> tuple[float, float]:
    """Order statistics, because priors in common use have no mean."""
    values = values[np.isfinite(values)]
    if binary:
        mean = float(np.clip(values.mean(), 0.01, 0.99))
        return mean, float(np.sqrt(mean * (1 - mean)))
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]) if values.size else (0, 0, 1)
    return median, max((high - low) / 1.35, 1e-6 * max(abs(median), 1.0))


class _Information(NamedTuple):
    """How much a guide tells, on reference draws.

    Attributes:
        gain: information on each coordinate in units of its prior precision.
        slope: of the channels, if it is the same in all draws and copies; empty otherwise.
    """

    gain: Float[np.ndarray, " coordinates"]
    slope: tuple[float, ...]


def _information(guide: LinearGuide, references: JointDraws) -> _Information:
    def at(scope: Scope, index: tuple[Array, ...], _: Array) -> tuple[Array, LinearEstimate]:
        estimate = pick(index, guide.at(scope))
        if guide.channels:
            gain = jnp.sum(estimate.slope**2 / estimate.noise_variance[:, None], 0)
        else:
            gain = jnp.sum(estimate.whitening**2, 0) - 1 / estimate.prior_variance
        return gain * estimate.prior_variance, estimate

    gains, estimates = at_references(guide.model, at, references)
    gain = median_gain(np.asarray(gains, float))
    slopes = np.asarray(estimates.slope, float)
    slope: tuple[float, ...] = ()
    if guide.channels and np.ptp(slopes, 0).max() <= 1e-4 * np.abs(slopes).max():
        slope = tuple(map(float, np.median(slopes, 0).ravel()))
    return _Information(gain, slope)


def median_gain(gains: Float[np.ndarray, "draws coordinates"]) -> np.ndarray:
    """The median over draws; zero where none is finite."""
    with np.errstate(invalid="ignore"):
        gains = np.where(np.isfinite(gains), gains, np.nan)
    known = ~np.all(np.isnan(gains), 0)
    result: np.ndarray = np.where(known, np.nanmedian(np.where(known, gains, 0.0), 0), 0.0)
    return result


def sampling_order(latents: tuple[Latent, ...], gain: np.ndarray) -> tuple[int, ...]:
    """Binary coordinates that move the observations most come first within their block."""
    order: list[int] = []
    for block in blocks(latents):
        places = np.arange(block.start, block.start + block.size)
        if block.kind == "bernoulli":
            places = places[np.argsort(-np.round(gain[places], 3), kind="stable")]
        order += [int(place) for place in places]
    return tuple(order)
