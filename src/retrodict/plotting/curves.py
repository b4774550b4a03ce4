"""Weighted draws in; curves to draw out: densities, quantiles, regions of highest density."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def weighted_density(
    values: Array, weights: Array, within: tuple[float, float] | None = None
) -> tuple[Array, Array]:
    """A kernel density estimate on a grid, by Silverman's rule with the effective sample size.

    Mass that the kernel would carry past the outermost draws is reflected: a density that ends
    at zero is drawn so. With `within`, only that interval is drawn, under which the area is then
    the share of the draws that lie in it: a heavy tail leaves the rest its detail.
    """
    weights = weights / weights.sum()
    share = 1.0
    if within is not None:
        inside = (values >= within[0]) & (values <= within[1])
        share = float(weights[inside].sum())
        values, weights = values[inside], weights[inside] / max(share, 1e-300)
        if values.size < 2 or np.ptp(values) == 0.0:
            return np.array(within), np.zeros(2)
    low, high = weighted_quantiles(values[None], weights[None], [0.001, 0.999])[:, 0]
    quarter, three = weighted_quantiles(values[None], weights[None], [0.25, 0.75])[:, 0]
    mean = weights @ values
    spread = float(np.sqrt(weights @ (values - mean) ** 2))
    scales = [s for s in (spread, (three - quarter) / 1.34) if s > 0.0]
    width = 0.9 * min(scales) * np.sum(weights**2) ** 0.2 if scales else 1.0
    edges = np.linspace(low - 3 * width, high + 3 * width, 513)
    low_end, high_end = values.min(), values.max()
    edges = edges[(edges >= low_end) & (edges <= high_end)]
    if len(edges) < 3:
        edges = np.linspace(low_end, high_end, 513)
    x = (edges[1:] + edges[:-1]) / 2
    mass = np.histogram(values, edges, weights=weights)[0]
    step = edges[1] - edges[0]
    distance = x[:, None] - x
    kernel = np.exp(-0.5 * (distance / width) ** 2)
    for end in (edges[0], edges[-1]):
        kernel += np.exp(-0.5 * ((x[:, None] + x - 2 * end) / width) ** 2)
    height = share * (kernel / kernel.sum(0)) @ mass / step
    return x, height


def weighted_quantiles(values: Array, weights: Array, levels: Sequence[float]) -> Array:
    """Quantiles of each row of values under that row's weights: `(levels, rows)`.

    The q-quantile is the smallest value with at least the weight q at or below it.
    """
    found = np.empty((len(levels), len(values)))
    for row, (value, weight) in enumerate(zip(values, weights, strict=True)):
        order = np.argsort(value)
        cumulative = np.cumsum(weight[order])
        places = np.searchsorted(cumulative, np.asarray(levels) * cumulative[-1] * (1 - 1e-12))
        found[:, row] = value[order][places]
    return found


def central(values: Array, weights: Array, probability: float) -> tuple[float, float]:
    """The interval with as much weight below it as above."""
    side = (1 - probability) / 2
    low, high = weighted_quantiles(values[None], weights[None], [side, 1 - side])[:, 0]
    return float(low), float(high)


def weighted_surface(
    x: Array, y: Array, weights: Array, limits: tuple[tuple[float, float], tuple[float, float]]
) -> tuple[Array, Array, Array]:
    """A smooth joint density on a grid: the centres along both axes, and `(y, x)` heights."""
    from scipy.ndimage import gaussian_filter

    bins = 64
    mass, x_edges, y_edges = np.histogram2d(x, y, bins, range=limits, weights=weights)
    weights = weights / weights.sum()
    # Scott's rule in two dimensions, in cells of the grid.
    factor = np.sum(weights**2) ** (1 / 6)
    widths = [
        max(0.8, factor * (np.subtract(*central(v, weights, 0.68)[::-1]) / 2) / (e[1] - e[0]))
        for v, e in ((x, x_edges), (y, y_edges))
    ]
    heights = gaussian_filter(mass, widths, mode="nearest").T
    return (x_edges[1:] + x_edges[:-1]) / 2, (y_edges[1:] + y_edges[:-1]) / 2, heights


def region_levels(heights: Array, probabilities: Sequence[float]) -> list[float]:
    """Heights above which lie the given shares of the mass, from the lowest up."""
    ordered = np.sort(heights.ravel())[::-1]
    share = np.cumsum(ordered) / max(ordered.sum(), 1e-300)
    places = [min(int(np.searchsorted(share, p)), len(ordered) - 1) for p in probabilities]
    return sorted(float(ordered[place]) for place in places)
