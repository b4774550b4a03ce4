"""Find out whether a factor has a linear guide, from draws of the prior.

A guide needs latents that are numbers, with or without bounds, and children that have values when
the factor is drawn, as have all of their other parents. A few draws from the prior show which
moments exist, what replaces those that do not, and which coordinates move the observations most.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.jit import run_once
from retrodict.estimators.coordinates import Latent, blocks, coordinate_table
from retrodict.estimators.linear_estimate import LinearEstimate
from retrodict.graph.prior_draws import JointDraws, PriorSampler
from retrodict.proposal.factor_model import FactorModel, parent_known
from retrodict.proposal.linear_guide import LinearGuide
from retrodict.proposal.model_knowledge import GuideFacts
from retrodict.proposal.reference_draws import at_references, pick, reference_draws
from retrodict.proposal.scope import Scope

# Latents times observations: beyond this, the estimate costs more than its information is worth.
MAX_ENTRIES = 2**15
MAX_COORDINATES = 128
# Information on a coordinate, relative to its prior precision, below which a guide is useless.
LEAST_INFORMATION = 1e-3


def restore_guide(model: FactorModel, facts: GuideFacts) -> LinearGuide:
    """The guide with facts from an earlier search."""
    children = tuple(child for child in model.children if child.name in facts.children)
    return LinearGuide(facts, replace(model, children=children))


def find_guide(model: FactorModel, sample_prior: PriorSampler) -> LinearGuide | None:
    """The guide of a factor, or None if it would carry no information."""
    latents = model.copies.latents
    number = coordinate_table(latents).lower.size
    simple = all(b.elementwise and b.kind in ("mixture", "bernoulli") for b in blocks(latents))
    smallest = number * min(filter(None, model.child_sizes), default=0)
    if not simple or number > MAX_COORDINATES or not 0 < smallest <= MAX_ENTRIES:
        return None
    references = reference_draws(model, sample_prior)
    moments = _reference_moments(model, references)
    children = tuple(child for child in model.children if _mostly_finite(moments[child.name]))
    model = replace(model, children=children)
    if not 0 < number * model.num_observations <= MAX_ENTRIES:
        return None
    centre, variance = _fallbacks(model, references, moments)
    names = tuple(child.name for child in children)
    guide = LinearGuide(GuideFacts(tuple(range(number)), names, centre, variance), model)
    gain, slope = _information(guide, references)
    if not np.any(gain > LEAST_INFORMATION):
        return None
    order = sampling_order(latents, gain)
    return LinearGuide(guide.facts._replace(order=order, slope=slope), model)


def _reference_moments(model: FactorModel, references: JointDraws) -> dict[str, Any]:
    """Moments of the latents and their children in every reference draw."""
    names = model.evaluated

    def moments(values: Mapping[str, Array]) -> Any:
        run = model.graph.program.run(jax.random.key(0), values, expect={}, only=names)
        return {name: run.moments[name] for name in names}

    by_site: dict[str, Any] = run_once(jax.vmap(moments), references.values)
    return by_site


def _mostly_finite(moments: Any) -> bool:
    rows = [np.asarray(leaf).reshape(leaf.shape[0], -1) for leaf in moments]
    finite = np.all([np.isfinite(row).all(1) for row in rows], 0)
    return bool(np.mean(finite) > 0.5)


def _fallbacks(
    model: FactorModel, references: JointDraws, moments: Mapping[str, Any]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Centre and variance of coordinates without moments, or whose parents have no values yet."""
    graph, factor = model.graph, model.factor
    pairs = []
    for latent, name in zip(model.copies.latents, factor.latents, strict=True):
        edges = [e for e in graph.parents(name).values() if e.parent not in factor.latents]
        computable = all(parent_known(graph, factor, edge, model.scan) for edge in edges)
        pair = (np.nan, np.nan)
        if not (computable and _mostly_finite(moments[name])):
            binary = blocks((latent,))[0].kind == "bernoulli"
            pair = _centre_and_variance(np.asarray(references.values[name], float), binary)
        pairs += [pair] * int(np.prod(latent.shape))
    centres, variances = zip(*pairs, strict=True)
    return centres, variances


def _centre_and_variance(values: np.ndarray, binary: bool) -> tuple[float, float]:
    """Order statistics, because priors in common use have no mean."""
    values = values[np.isfinite(values)]
    if binary:
        mean = float(np.clip(values.mean(), 0.01, 0.99))
        return mean, mean * (1 - mean)
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]) if values.size else (0, 0, 1)
    spread = max((high - low) / 1.35, 1e-6 * max(abs(median), 1.0))
    # Single precision must be able to represent the variance.
    return float(median), min(float(spread**2), 1e30)


def _information(
    guide: LinearGuide, references: JointDraws
) -> tuple[Float[np.ndarray, " coordinates"], tuple[float, ...]]:
    """Information on each coordinate in units of its prior precision, and the channels' slope.

    The slope is empty unless it is the same in all reference draws and copies.
    """

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
    return gain, slope


def median_gain(gains: Float[np.ndarray, "draws coordinates"]) -> np.ndarray:
    """The median over draws; zero where none is finite."""
    with np.errstate(invalid="ignore"):
        gains = np.where(np.isfinite(gains), gains, np.nan)
    gains = np.where(np.all(np.isnan(gains), 0), 0.0, gains)
    median: np.ndarray = np.nanmedian(gains, 0)
    return median


def sampling_order(latents: tuple[Latent, ...], gain: np.ndarray) -> tuple[int, ...]:
    """Binary coordinates that move the observations most come first within their block."""
    order: list[int] = []
    for block in blocks(latents):
        places = np.arange(block.start, block.start + block.size)
        if block.kind == "bernoulli":
            places = places[np.argsort(-np.round(gain[places], 3), kind="stable")]
        order += [int(place) for place in places]
    return tuple(order)
