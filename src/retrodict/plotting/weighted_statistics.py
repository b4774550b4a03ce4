"""Statistics of weighted draws for plots: densities, quantiles and highest-density regions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Smallest positive divisor, so that draws without any weight give zeros and not NaN.
TINY = 1e-300


def weighted_density(
    values: Array, weights: Array, within: tuple[float, float] | None = None
) -> tuple[Array, Array]:
    """Estimate a density by a Gaussian kernel, with reflection at the outermost draws.

    The bandwidth follows Silverman's rule with the effective sample size. Reflection keeps the
    edge of a density with bounded support, such as one that starts at zero.

    Args:
        values: Draws: `(draws,)`.
        weights: Their weights, not necessarily normalised: `(draws,)`.
        within: Restrict the estimate to this interval. The area under the curve is then the
            probability of the interval. This keeps the detail of heavy-tailed densities.

    Returns:
        The grid points and the density at each of them.
    """
    weights = weights / weights.sum()
    probability = 1.0
    if within is not None:
        inside = (values >= within[0]) & (values <= within[1])
        probability = float(weights[inside].sum())
        values, weights = values[inside], weights[inside] / max(probability, TINY)
        if values.size < 2 or np.ptp(values) == 0.0:
            return np.array(within), np.zeros(2)
    bandwidth = _silverman_bandwidth(values, weights)
    edges = _density_grid(values, weights, bandwidth)
    x = (edges[1:] + edges[:-1]) / 2
    mass = np.histogram(values, edges, weights=weights)[0]
    step = edges[1] - edges[0]
    kernel = np.exp(-0.5 * ((x[:, None] - x) / bandwidth) ** 2)
    for end in (edges[0], edges[-1]):
        kernel += np.exp(-0.5 * ((x[:, None] + x - 2 * end) / bandwidth) ** 2)
    density = probability * (kernel / kernel.sum(0)) @ mass / step
    return x, density


def _silverman_bandwidth(values: Array, weights: Array) -> float:
    lower, upper = weighted_quantiles(values[None], weights[None], [0.25, 0.75])[:, 0]
    mean = weights @ values
    deviation = float(np.sqrt(weights @ (values - mean) ** 2))
    scales = [s for s in (deviation, (upper - lower) / 1.34) if s > 0.0]
    return 0.9 * min(scales) * np.sum(weights**2) ** 0.2 if scales else 1.0


def _density_grid(values: Array, weights: Array, bandwidth: float) -> Array:
    """Return the bin edges: the bulk of the draws with a margin, but not beyond the draws."""
    low, high = weighted_quantiles(values[None], weights[None], [0.001, 0.999])[:, 0]
    edges = np.linspace(low - 3 * bandwidth, high + 3 * bandwidth, 513)
    least, greatest = values.min(), values.max()
    edges = edges[(edges >= least) & (edges <= greatest)]
    return edges if len(edges) >= 3 else np.linspace(least, greatest, 513)


def weighted_quantiles(values: Array, weights: Array, levels: Sequence[float]) -> Array:
    """Return quantiles of each row of values under that row's weights.

    The q-quantile is the smallest value such that the weight of all values up to it is at least q.

    Args:
        values: `(rows, draws)`.
        weights: `(rows, draws)`, not necessarily normalised.
        levels: Probabilities.

    Returns:
        `(levels, rows)`.
    """
    quantiles = np.empty((len(levels), len(values)))
    for row, (value, weight) in enumerate(zip(values, weights, strict=True)):
        order = np.argsort(value)
        cumulative = np.cumsum(weight[order])
        indices = np.searchsorted(cumulative, np.asarray(levels) * cumulative[-1] * (1 - 1e-12))
        quantiles[:, row] = value[order][indices]
    return quantiles


def central_interval(values: Array, weights: Array, probability: float) -> tuple[float, float]:
    """Return the interval of this probability with equal weight below and above it."""
    tail = (1 - probability) / 2
    low, high = weighted_quantiles(values[None], weights[None], [tail, 1 - tail])[:, 0]
    return float(low), float(high)


def weighted_joint_density(
    x: Array, y: Array, weights: Array, limits: tuple[tuple[float, float], tuple[float, float]]
) -> tuple[Array, Array, Array]:
    """Estimate an unnormalised joint density on a grid, with a bandwidth by Scott's rule.

    Returns:
        The cell centres along x, those along y, and the density `(y, x)`.
    """
    from scipy.ndimage import gaussian_filter

    num_bins = 64
    mass, x_edges, y_edges = np.histogram2d(x, y, num_bins, range=limits, weights=weights)
    weights = weights / weights.sum()
    factor = np.sum(weights**2) ** (1 / 6)
    bandwidths = []  # in cells of the grid
    for values, edges in ((x, x_edges), (y, y_edges)):
        low, high = central_interval(values, weights, 0.68)
        bandwidths.append(max(0.8, factor * ((high - low) / 2) / (edges[1] - edges[0])))
    density = gaussian_filter(mass, bandwidths, mode="nearest").T
    return (x_edges[1:] + x_edges[:-1]) / 2, (y_edges[1:] + y_edges[:-1]) / 2, density


def highest_density_levels(density: Array, probabilities: Sequence[float]) -> list[float]:
    """Return the density levels that bound the highest-density regions, in increasing order."""
    descending = np.sort(density.ravel())[::-1]
    cumulative = np.cumsum(descending) / max(descending.sum(), TINY)
    indices = [min(int(np.searchsorted(cumulative, p)), len(descending) - 1) for p in probabilities]
    return sorted(float(descending[i]) for i in indices)
