"""A posterior in; a matplotlib figure of its weighted marginals out.

Figures are made without pyplot: nothing is shown, and nothing stays behind in global state.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from retrodict.weights import weighted_hdi

if TYPE_CHECKING:
    from retrodict.posterior import Posterior

COLOUR = "#2a6f97"
PROBABILITIES = (0.5, 0.94)
# Sites of more elements than this are drawn as one panel of intervals, not a panel an element.
MOST_PANELS_A_SITE = 6
COLUMNS = 3


def plot_posterior(posterior: "Posterior", sites: Sequence[str] | None = None) -> Figure:
    """One panel for every scalar, one for every long site, one for every filtered series.

    Numbers get a weighted density with the 94 % highest-density interval and the mean below it;
    integers get bars; sites of more than six elements get an interval for each; filtered sites
    get bands of 50 and 94 % about the median, over time.
    """
    names = list(posterior.samples) if sites is None else list(sites)
    unknown = [name for name in names if name not in posterior.samples]
    if unknown:
        raise KeyError(
            f"no latent site {unknown[0]!r} here; there are: {', '.join(posterior.samples)}"
        )
    weights = np.exp(np.asarray(posterior.log_weights, np.float64))
    panels = []
    for name in names:
        if posterior.filtered is not None and name in posterior.filtered:
            panels.extend(_series(posterior, name))
        else:
            panels.extend(_marginals(name, np.asarray(posterior.samples[name])))
    columns = min(COLUMNS, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(3.6 * columns, 2.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        panel.draw(axes, weights)
        axes.set_title(panel.title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(
        f"{posterior.trust}: effective sample size {float(posterior.ess):.0f} of "
        f"{posterior.num_particles}, Pareto k {float(posterior.pareto_k):.2f}",
        fontsize=10,
    )
    return figure


class _Density:
    """A scalar of real numbers."""

    def __init__(self, title: str, values: np.ndarray):
        self.title, self.values = title, values

    def draw(self, axes: Axes, weights: np.ndarray) -> None:
        alive = (weights > 0.0) & np.isfinite(self.values)
        values, weights = self.values[alive], weights[alive]
        if not values.size or np.ptp(values) == 0.0:
            axes.axvline(values[0] if values.size else np.nan, color=COLOUR)
        else:
            x, height = weighted_density(values, weights)
            axes.plot(x, height, color=COLOUR)
            axes.fill_between(x, height, color=COLOUR, alpha=0.2, linewidth=0)
        if values.size:
            axes.plot(weighted_hdi(values, np.log(weights), 0.94), (0, 0), color="black", lw=3)
            axes.plot(np.average(values, weights=weights), 0, "o", color="white", mec="black")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)


class _Bars:
    """A scalar of integers or truth values."""

    def __init__(self, title: str, values: np.ndarray):
        self.title, self.values = title, values.astype(int)

    def draw(self, axes: Axes, weights: np.ndarray) -> None:
        points, group = np.unique(self.values[weights > 0.0], return_inverse=True)
        axes.bar(points, np.bincount(group, weights[weights > 0.0], len(points)), color=COLOUR)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("probability", fontsize=8)


class _Intervals:
    """A long site: the interval and mean of each element, by its flat index."""

    def __init__(self, title: str, values: np.ndarray):
        self.title, self.values = title, values.reshape(len(values), -1)

    def draw(self, axes: Axes, weights: np.ndarray) -> None:
        alive = weights > 0.0
        values, weights = self.values[alive].astype(float), weights[alive]
        index = np.arange(values.shape[1])
        for probability, width in zip(PROBABILITIES, (3.0, 1.0), strict=True):
            ends = [weighted_hdi(column, np.log(weights), probability) for column in values.T]
            axes.vlines(index, *np.array(ends).T, color=COLOUR, lw=width)
        axes.plot(index, weights @ values / weights.sum(), "o", color="white", mec=COLOUR, ms=4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("index", fontsize=8)


class _Bands:
    """A filtered series: quantiles at each step under that step's own weights."""

    def __init__(self, title: str, values: np.ndarray, weights: np.ndarray):
        self.title, self.values, self.weights = title, values, weights

    def draw(self, axes: Axes, weights: np.ndarray) -> None:
        del weights  # those of the last step
        levels = [0.5, *(0.5 + side * p / 2 for p in PROBABILITIES for side in (-1, 1))]
        quantiles = weighted_quantiles(self.values.astype(float), self.weights, levels)
        time = np.arange(len(self.values))
        for number, alpha in zip((1, 3), (0.45, 0.2), strict=True):
            low, high = quantiles[number], quantiles[number + 1]
            axes.fill_between(time, low, high, color=COLOUR, alpha=alpha, linewidth=0)
        axes.plot(time, quantiles[0], color=COLOUR)
        axes.set_xlabel("time", fontsize=8)


_Panel = _Density | _Bars | _Intervals | _Bands


def _scalar(title: str, values: np.ndarray) -> _Panel:
    discrete = np.issubdtype(values.dtype, np.integer) or values.dtype == bool
    return _Bars(title, values) if discrete else _Density(title, values)


def _label(name: str, index: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def _marginals(name: str, values: np.ndarray) -> list[_Panel]:
    shape = values.shape[1:]
    if np.prod(shape) > MOST_PANELS_A_SITE:
        return [_Intervals(f"{name} [{' × '.join(map(str, shape))}]", values)]
    return [_scalar(_label(name, i), values[(slice(None), *i)]) for i in np.ndindex(shape)]


def _series(posterior: "Posterior", name: str) -> list[_Panel]:
    assert posterior.filtered is not None and posterior.filtered_log_weights is not None
    values = np.asarray(posterior.filtered[name])
    weights = np.exp(np.asarray(posterior.filtered_log_weights, np.float64))
    indices = list(np.ndindex(values.shape[2:]))[:MOST_PANELS_A_SITE]
    return [
        _Bands(_label(name, i) + ", filtered", values[(slice(None), slice(None), *i)], weights)
        for i in indices
    ]


def weighted_density(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A kernel density estimate on a grid, by Silverman's rule with the effective sample size.

    Mass that the kernel would carry past the outermost draws is reflected: a density that ends
    at zero is drawn so.
    """
    weights = weights / weights.sum()
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
    height = (kernel / kernel.sum(0)) @ mass / step
    return x, height


def weighted_quantiles(
    values: np.ndarray, weights: np.ndarray, levels: Sequence[float]
) -> np.ndarray:
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
