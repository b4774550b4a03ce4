"""The draws of one site or element in; one panel of a figure out."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from retrodict.particles.weights import weighted_hdi
from retrodict.plotting.curves import central, weighted_density, weighted_quantiles

if TYPE_CHECKING:
    from retrodict.particles.posterior import Posterior

COLOUR, PRIOR = "#2a6f97", "#9a8c98"
PROBABILITIES = (0.5, 0.94)
# Sites of more elements than this are drawn as one panel of intervals, not a panel an element.
MOST_PANELS_A_SITE = 6
# A prior much wider than the posterior is cut off where the posterior would become a spike.
MOST_PRIOR = 4.0

Array = np.ndarray[Any, Any]


class Density:
    """A scalar of real numbers."""

    def __init__(self, title: str, values: Array, prior: Array | None = None):
        self.title, self.values, self.prior = title, values, prior

    def draw(self, axes: Axes, weights: Array) -> None:
        """Density, 94 % highest-density interval and mean; the prior's density behind it."""
        alive = (weights > 0.0) & np.isfinite(self.values)
        values, weights = self.values[alive], weights[alive]
        if self.prior is not None and values.size:
            self._draw_prior(axes, self.prior[np.isfinite(self.prior)], values, weights)
        if not values.size or np.ptp(values) == 0.0:
            axes.axvline(values[0] if values.size else np.nan, color=COLOUR)
        else:
            x, height = weighted_density(values, weights)
            axes.plot(x, height, color=COLOUR, label="posterior")
            axes.fill_between(x, height, color=COLOUR, alpha=0.2, linewidth=0)
        if values.size:
            axes.plot(weighted_hdi(values, np.log(weights), 0.94), (0, 0), color="black", lw=3)
            axes.plot(np.average(values, weights=weights), 0, "o", color="white", mec="black")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)

    def _draw_prior(self, axes: Axes, prior: Array, values: Array, weights: Array) -> None:
        low, high = central(values, weights, 0.998)
        widest = MOST_PRIOR * max(high - low, 1e-12 * max(abs(high), 1.0)) / 2
        prior_low, prior_high = central(prior, np.ones_like(prior), 0.9)
        within = (max(min(low, prior_low), low - widest), min(max(high, prior_high), high + widest))
        x, height = weighted_density(prior, np.ones_like(prior), within)
        axes.plot(x, height, color=PRIOR, lw=1.2, ls="--", label="prior", zorder=1)


class Bars:
    """A scalar of integers or truth values."""

    def __init__(self, title: str, values: Array, prior: Array | None = None):
        self.title, self.values = title, values.astype(int)
        self.prior = None if prior is None else prior.astype(int)

    def draw(self, axes: Axes, weights: Array) -> None:
        """The probability of each value; the prior's as an outline around it."""
        alive = weights > 0.0
        values, weights = self.values[alive], weights[alive]
        points, group = np.unique(values, return_inverse=True)
        axes.bar(points, np.bincount(group, weights, len(points)), color=COLOUR, label="posterior")
        first, last = central(values.astype(float), weights, 0.998)
        if self.prior is not None:
            low, high = central(self.prior.astype(float), np.ones(len(self.prior)), 0.9)
            room = max(last - first, 4.0)
            first, last = max(min(first, low), first - room), min(max(last, high), last + room)
            seen, counts = np.unique(self.prior, return_counts=True)
            share = counts / len(self.prior)
            axes.bar(seen, share, fill=False, ec=PRIOR, ls="--", lw=1.2, label="prior")
        axes.set_xlim(first - 0.6, last + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("probability", fontsize=8)


class Intervals:
    """A long site: the interval and mean of each element, by its flat index."""

    def __init__(self, title: str, values: Array, prior: Array | None = None):
        self.title, self.values = title, values.reshape(len(values), -1)
        self.prior = None if prior is None else prior.reshape(len(prior), -1)

    def draw(self, axes: Axes, weights: Array) -> None:
        """Intervals of 50 and 94 %, and the mean, of every element."""
        alive = weights > 0.0
        values, weights = self.values[alive].astype(float), weights[alive]
        index = np.arange(values.shape[1])
        bounds = np.empty((2, 0))
        for probability, width in zip(PROBABILITIES, (3.0, 1.0), strict=True):
            ends = [weighted_hdi(column, np.log(weights), probability) for column in values.T]
            bounds = np.array(ends).T
            axes.vlines(index, *bounds, color=COLOUR, lw=width)
        axes.plot(index, weights @ values / weights.sum(), "o", color="white", mec=COLOUR, ms=4)
        if self.prior is not None:
            self._draw_prior(axes, self.prior.astype(float), index, bounds)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("index", fontsize=8)

    def _draw_prior(self, axes: Axes, prior: Array, index: Array, bounds: Array) -> None:
        """The prior's central half as a band; what is far outside the posterior is cut off."""
        low, high = weighted_quantiles(prior.T, np.ones_like(prior.T), [0.25, 0.75])
        axes.fill_between(index, low, high, color=PRIOR, alpha=0.2, lw=0, zorder=0, step="mid")
        least, most = bounds.min(), bounds.max()
        room = MOST_PRIOR * max(most - least, 1e-12) / 2
        axes.set_ylim(
            max(min(least, low.min()) - 0.05 * room, least - room),
            min(max(most, high.max()) + 0.05 * room, most + room),
        )


class Bands:
    """A filtered series: quantiles at each step under that step's own weights."""

    def __init__(self, title: str, values: Array, weights: Array):
        self.title, self.values, self.weights = title, values, weights

    def draw(self, axes: Axes, weights: Array) -> None:
        """Bands of 50 and 94 % about the median."""
        del weights  # those of the last step
        levels = [0.5, *(0.5 + side * p / 2 for p in PROBABILITIES for side in (-1, 1))]
        quantiles = weighted_quantiles(self.values.astype(float), self.weights, levels)
        time = np.arange(len(self.values))
        for number, alpha in zip((1, 3), (0.45, 0.2), strict=True):
            low, high = quantiles[number], quantiles[number + 1]
            axes.fill_between(time, low, high, color=COLOUR, alpha=alpha, linewidth=0)
        axes.plot(time, quantiles[0], color=COLOUR)
        axes.set_xlabel("time", fontsize=8)


Panel = Density | Bars | Intervals | Bands


def label(name: str, index: tuple[int, ...]) -> str:
    """The name of an element."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def marginals(name: str, values: Array, prior: Array | None = None) -> list[Panel]:
    """A panel for each element of a site, or one for all if there are many."""
    shape = values.shape[1:]
    if np.prod(shape) > MOST_PANELS_A_SITE:
        return [Intervals(f"{name} [{' × '.join(map(str, shape))}]", values, prior)]
    return [
        scalar(
            label(name, index),
            values[(slice(None), *index)],
            None if prior is None else prior[(slice(None), *index)],
        )
        for index in np.ndindex(shape)
    ]


def scalar(title: str, values: Array, prior: Array | None = None) -> Panel:
    """A panel for one element: bars for integers, a density for numbers."""
    discrete = np.issubdtype(values.dtype, np.integer) or values.dtype == bool
    return Bars(title, values, prior) if discrete else Density(title, values, prior)


def series(posterior: "Posterior", name: str) -> list[Panel]:
    """A panel for each of the first elements of a filtered site."""
    assert posterior.filtered is not None and posterior.filtered_log_weights is not None
    values = np.asarray(posterior.filtered[name])
    weights = np.exp(np.asarray(posterior.filtered_log_weights, np.float64))
    indices = list(np.ndindex(values.shape[2:]))[:MOST_PANELS_A_SITE]
    return [
        Bands(label(name, i) + ", filtered", values[(slice(None), slice(None), *i)], weights)
        for i in indices
    ]
