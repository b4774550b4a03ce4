"""Panels of a figure: the marginal distribution of one site, element or filtered series."""

from typing import TYPE_CHECKING, Any

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


class DensityPanel:
    """The marginal density of a real scalar."""

    def __init__(self, title: str, values: Array, prior: Array | None = None):
        self.title, self.values, self.prior = title, values, prior

    def draw(self, axes: Axes, weights: Array) -> None:
        """Draw the density, the 94 % highest-density interval, the mean and the prior density."""
        usable = (weights > 0.0) & np.isfinite(self.values)
        values, weights = self.values[usable], weights[usable]
        if self.prior is not None and values.size:
            self._draw_prior(axes, self.prior[np.isfinite(self.prior)], values, weights)
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

    def _draw_prior(self, axes: Axes, prior: Array, values: Array, weights: Array) -> None:
        low, high = central_interval(values, weights, 0.998)
        margin = MAX_PRIOR_RANGE * max(high - low, 1e-12 * max(abs(high), 1.0)) / 2
        prior_low, prior_high = central_interval(prior, np.ones_like(prior), 0.9)
        within = (max(min(low, prior_low), low - margin), min(max(high, prior_high), high + margin))
        x, density = weighted_density(prior, np.ones_like(prior), within)
        axes.plot(x, density, color=PRIOR_COLOUR, lw=1.2, ls="--", label="prior", zorder=1)


class BarPanel:
    """The marginal probabilities of an integer or boolean scalar."""

    def __init__(self, title: str, values: Array, prior: Array | None = None):
        self.title, self.values = title, values.astype(int)
        self.prior = None if prior is None else prior.astype(int)

    def draw(self, axes: Axes, weights: Array) -> None:
        """Draw a bar for each value; the prior's bars are outlines."""
        positive = weights > 0.0
        values, weights = self.values[positive], weights[positive]
        support, index = np.unique(values, return_inverse=True)
        probabilities = np.bincount(index, weights, len(support))
        axes.bar(support, probabilities, color=POSTERIOR_COLOUR, label="posterior")
        first, last = central_interval(values.astype(float), weights, 0.998)
        if self.prior is not None:
            first, last = self._draw_prior(axes, self.prior, first, last)
        axes.set_xlim(first - 0.6, last + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("probability", fontsize=8)

    def _draw_prior(
        self, axes: Axes, prior: Array, first: float, last: float
    ) -> tuple[float, float]:
        """Draw the prior and return the first and last value to show."""
        support, counts = np.unique(prior, return_counts=True)
        probabilities = counts / len(prior)
        axes.bar(
            support, probabilities, fill=False, ec=PRIOR_COLOUR, ls="--", lw=1.2, label="prior"
        )
        low, high = central_interval(prior.astype(float), np.ones(len(prior)), 0.9)
        margin = max(last - first, 4.0)
        return max(min(first, low), first - margin), min(max(last, high), last + margin)


class IntervalPanel:
    """The intervals and means of all elements of a site, by flat index."""

    def __init__(self, title: str, values: Array, prior: Array | None = None):
        self.title, self.values = title, values.reshape(len(values), -1)
        self.prior = None if prior is None else prior.reshape(len(prior), -1)

    def draw(self, axes: Axes, weights: Array) -> None:
        """Draw the 50 and 94 % highest-density intervals and the mean of every element."""
        positive = weights > 0.0
        values, weights = self.values[positive].astype(float), weights[positive]
        index = np.arange(values.shape[1])
        bounds = np.empty((2, 0))
        for probability, width in zip(PROBABILITIES, (3.0, 1.0), strict=True):
            intervals = [weighted_hdi(column, np.log(weights), probability) for column in values.T]
            bounds = np.array(intervals).T
            axes.vlines(index, *bounds, color=POSTERIOR_COLOUR, lw=width)
        means = weights @ values / weights.sum()
        axes.plot(index, means, "o", color="white", mec=POSTERIOR_COLOUR, ms=4)
        if self.prior is not None:
            self._draw_prior(axes, self.prior.astype(float), index, bounds)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("index", fontsize=8)

    def _draw_prior(self, axes: Axes, prior: Array, index: Array, bounds: Array) -> None:
        """Draw the central 50 % of the prior as a band, clipped far from the posterior."""
        low, high = weighted_quantiles(prior.T, np.ones_like(prior.T), [0.25, 0.75])
        axes.fill_between(
            index, low, high, color=PRIOR_COLOUR, alpha=0.2, lw=0, zorder=0, step="mid"
        )
        least, greatest = bounds.min(), bounds.max()
        margin = MAX_PRIOR_RANGE * max(greatest - least, 1e-12) / 2
        axes.set_ylim(
            max(min(least, low.min()) - 0.05 * margin, least - margin),
            min(max(greatest, high.max()) + 0.05 * margin, greatest + margin),
        )


class BandPanel:
    """Quantiles of a filtered series at each time step, under the weights of that step."""

    def __init__(self, title: str, values: Array, weights: Array):
        self.title, self.values, self.weights = title, values, weights

    def draw(self, axes: Axes, weights: Array) -> None:
        """Draw the median and central bands of 50 and 94 %; `weights` are not used."""
        del weights
        levels = [0.5, *(0.5 + side * p / 2 for p in PROBABILITIES for side in (-1, 1))]
        quantiles = weighted_quantiles(self.values.astype(float), self.weights, levels)
        time = np.arange(len(self.values))
        for number, alpha in zip((1, 3), (0.45, 0.2), strict=True):
            low, high = quantiles[number], quantiles[number + 1]
            axes.fill_between(time, low, high, color=POSTERIOR_COLOUR, alpha=alpha, linewidth=0)
        axes.plot(time, quantiles[0], color=POSTERIOR_COLOUR)
        axes.set_xlabel("time", fontsize=8)


Panel = DensityPanel | BarPanel | IntervalPanel | BandPanel


def element_name(site: str, index: tuple[int, ...]) -> str:
    """Return the name of an element of a site, such as `theta[0, 2]`."""
    return f"{site}[{', '.join(map(str, index))}]" if index else site


def marginal_panels(site: str, values: Array, prior: Array | None = None) -> list[Panel]:
    """Return a panel for each element of a site, or one for all if there are many."""
    shape = values.shape[1:]
    if np.prod(shape) > MAX_PANELS_PER_SITE:
        return [IntervalPanel(f"{site} [{' × '.join(map(str, shape))}]", values, prior)]
    return [
        scalar_panel(
            element_name(site, index),
            values[(slice(None), *index)],
            None if prior is None else prior[(slice(None), *index)],
        )
        for index in np.ndindex(shape)
    ]


def scalar_panel(title: str, values: Array, prior: Array | None = None) -> Panel:
    """Return a panel for one element: bars for integers, a density for real numbers."""
    discrete = np.issubdtype(values.dtype, np.integer) or values.dtype == bool
    return BarPanel(title, values, prior) if discrete else DensityPanel(title, values, prior)


def filtered_panels(posterior: "Posterior", site: str) -> list[Panel]:
    """Return a panel for each of the first elements of a filtered site."""
    assert posterior.filtered is not None and posterior.filtered_log_weights is not None
    values = np.asarray(posterior.filtered[site])
    weights = np.exp(np.asarray(posterior.filtered_log_weights, np.float64))
    indices = list(np.ndindex(values.shape[2:]))[:MAX_PANELS_PER_SITE]
    return [
        BandPanel(
            element_name(site, i) + ", filtered", values[(slice(None), slice(None), *i)], weights
        )
        for i in indices
    ]
