"""Panels of a figure: the marginal distribution of one site, element or filtered series."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from retrodict.particles.weights import weighted_hdi
from retrodict.plotting.weighted_statistics import (
    central_interval,
    weighted_density,
    weighted_quantiles,
)

if TYPE_CHECKING:
    from retrodict.particles.posterior import Posterior

POSTERIOR_COLOUR, PRIOR_COLOUR = "#2a6f97", "#9a8c98"
PROBABILITIES = (0.5, 0.94)
# A site with more elements gets one panel of intervals instead of a panel for each element.
MAX_PANELS_PER_SITE = 6
# Of a wider prior only this multiple of the posterior's range is shown, so that the posterior is
# not reduced to a spike.
MAX_PRIOR_RANGE = 4.0

Array = np.ndarray[Any, Any]


class Panel(NamedTuple):
    """A panel of a figure: its title, and the function that draws it."""

    title: str
    draw: Callable[[Axes], None]


def draw_density(axes: Axes, values: Array, weights: Array, prior: Array | None = None) -> None:
    """Draw the density of a real scalar, its 94 % interval and mean, and the prior density."""
    usable = (weights > 0.0) & np.isfinite(values)
    values, weights = values[usable], weights[usable]
    if prior is not None and values.size:
        prior = prior[np.isfinite(prior)]
        equal_weights = np.ones_like(prior)
        within = _limits(central_interval(values, weights, 0.998), prior, MAX_PRIOR_RANGE / 2)
        x, density = weighted_density(prior, equal_weights, within)
        axes.plot(x, density, color=PRIOR_COLOUR, lw=1.2, ls="--", label="prior", zorder=1)
    if not values.size or np.ptp(values) == 0.0:
        axes.axvline(values[0] if values.size else np.nan, color=POSTERIOR_COLOUR)
    else:
        x, density = weighted_density(values, weights)
        axes.plot(x, density, color=POSTERIOR_COLOUR, label="posterior")
        axes.fill_between(x, density, color=POSTERIOR_COLOUR, alpha=0.2, linewidth=0)
    if values.size:
        axes.plot(weighted_hdi(values, np.log(weights), 0.94), (0, 0), color="black", lw=3)
        axes.plot(np.average(values, weights=weights), 0, "o", color="white", mec="black")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _limits(
    interval: tuple[float, float], prior: Array, max_margin: float, least_range: float = 0.0
) -> tuple[float, float]:
    """Widen the posterior's interval to 90 % of the prior, by limited margins on both sides."""
    low, high = interval
    margin = max_margin * max(high - low, least_range, 1e-12 * max(abs(high), 1.0))
    prior_low, prior_high = central_interval(prior, np.ones_like(prior), 0.9)
    return max(min(low, prior_low), low - margin), min(max(high, prior_high), high + margin)


def draw_bars(axes: Axes, values: Array, weights: Array, prior: Array | None = None) -> None:
    """Draw a bar for each value of an integer or boolean scalar; the prior's are outlines."""
    values, weights = values[weights > 0.0].astype(int), weights[weights > 0.0]
    support, index = np.unique(values, return_inverse=True)
    probabilities = np.bincount(index, weights, len(support))
    axes.bar(support, probabilities, color=POSTERIOR_COLOUR, label="posterior")
    first, last = central_interval(values.astype(float), weights, 0.998)
    if prior is not None:
        support, counts = np.unique(prior.astype(int), return_counts=True)
        style: Any = {"fill": False, "ec": PRIOR_COLOUR, "ls": "--", "lw": 1.2, "label": "prior"}
        axes.bar(support, counts / len(prior), **style)
        first, last = _limits((first, last), prior.astype(float), 1.0, least_range=4.0)
    axes.set_xlim(first - 0.6, last + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("probability", fontsize=8)


def draw_intervals(axes: Axes, values: Array, weights: Array, prior: Array | None = None) -> None:
    """Draw the 50 and 94 % highest-density intervals and the mean of every element.

    The central 50 % of the prior is a band, clipped far from the posterior.
    """
    values = values.reshape(len(values), -1)[weights > 0.0].astype(float)
    weights = weights[weights > 0.0]
    index = np.arange(values.shape[1])
    bounds = np.empty((2, 0))
    for probability, width in zip(PROBABILITIES, (3.0, 1.0), strict=True):
        intervals = [weighted_hdi(column, np.log(weights), probability) for column in values.T]
        bounds = np.array(intervals).T
        axes.vlines(index, *bounds, color=POSTERIOR_COLOUR, lw=width)
    means = weights @ values / weights.sum()
    axes.plot(index, means, "o", color="white", mec=POSTERIOR_COLOUR, ms=4)
    if prior is not None:
        columns = prior.reshape(len(prior), -1).T.astype(float)
        low, high = weighted_quantiles(columns, np.ones_like(columns), [0.25, 0.75])
        style: Any = {"color": PRIOR_COLOUR, "alpha": 0.2, "lw": 0, "zorder": 0, "step": "mid"}
        axes.fill_between(index, low, high, **style)
        least, greatest = bounds.min(), bounds.max()
        margin = MAX_PRIOR_RANGE * max(greatest - least, 1e-12) / 2
        axes.set_ylim(
            max(min(least, low.min()) - 0.05 * margin, least - margin),
            min(max(greatest, high.max()) + 0.05 * margin, greatest + margin),
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("index", fontsize=8)


def draw_bands(axes: Axes, values: Array, weights: Array) -> None:
    """Draw the median and central bands of 50 and 94 % of a filtered series at each time step."""
    levels = [0.5, *(0.5 + side * p / 2 for p in PROBABILITIES for side in (-1, 1))]
    quantiles = weighted_quantiles(values.astype(float), weights, levels)
    time = np.arange(len(values))
    for number, alpha in zip((1, 3), (0.45, 0.2), strict=True):
        low, high = quantiles[number], quantiles[number + 1]
        axes.fill_between(time, low, high, color=POSTERIOR_COLOUR, alpha=alpha, linewidth=0)
    axes.plot(time, quantiles[0], color=POSTERIOR_COLOUR)
    axes.set_xlabel("time", fontsize=8)


def element_name(site: str, index: tuple[int, ...]) -> str:
    """Return the name of an element of a site, such as `theta[0, 2]`."""
    return f"{site}[{', '.join(map(str, index))}]" if index else site


def draw_scalar(axes: Axes, values: Array, weights: Array, prior: Array | None = None) -> None:
    """Draw one element: bars for integers, a density for real numbers."""
    discrete = np.issubdtype(values.dtype, np.integer) or values.dtype == bool
    (draw_bars if discrete else draw_density)(axes, values, weights, prior)


def marginal_panels(
    site: str, values: Array, weights: Array, prior: Array | None = None
) -> list[Panel]:
    """Return a panel for each element of a site, or one for all if there are many."""
    shape = values.shape[1:]
    if np.prod(shape) > MAX_PANELS_PER_SITE:
        title = f"{site} [{' × '.join(map(str, shape))}]"
        draw = partial(draw_intervals, values=values, weights=weights, prior=prior)
        return [Panel(title, draw)]
    panels = []
    for index in np.ndindex(shape):
        element = (slice(None), *index)
        element_prior = None if prior is None else prior[element]
        draw = partial(draw_scalar, values=values[element], weights=weights, prior=element_prior)
        panels.append(Panel(element_name(site, index), draw))
    return panels


def filtered_panels(posterior: "Posterior", site: str) -> list[Panel]:
    """Return a panel for each of the first elements of a filtered site."""
    assert posterior.filtered is not None and posterior.filtered_log_weights is not None
    values = np.asarray(posterior.filtered[site])
    weights = np.exp(np.asarray(posterior.filtered_log_weights, np.float64))
    return [
        Panel(
            element_name(site, index) + ", filtered",
            partial(draw_bands, values=values[(slice(None), slice(None), *index)], weights=weights),
        )
        for index in list(np.ndindex(values.shape[2:]))[:MAX_PANELS_PER_SITE]
    ]
