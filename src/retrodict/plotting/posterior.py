"""A posterior in; a matplotlib figure out: marginals, pairs, filtered series, or the ancestry.

Figures are made without pyplot: nothing is shown, and nothing stays behind in global state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from retrodict._xla.jit import run_once
from retrodict.graph.graph import Graph
from retrodict.plotting.curves import (
    central,
    region_levels,
    weighted_density,
    weighted_quantiles,
    weighted_surface,
)
from retrodict.plotting.panels import (
    COLOUR,
    PROBABILITIES,
    Array,
    Panel,
    label,
    marginals,
    scalar,
    series,
)

if TYPE_CHECKING:
    from retrodict.particles.posterior import Posterior

__all__ = ["Kind", "draw_prior", "plot_posterior", "weighted_density", "weighted_quantiles"]

Kind = Literal["marginals", "pairs", "filtered", "ancestry"]
COLUMNS = 3
MOST_PAIRS = 8
# Of more particles only every so many are followed back: a screen has no room for more lines.
MOST_LINES = 300
BUNDLE = 0.5


def plot_posterior(
    posterior: "Posterior",
    sites: Sequence[str] | None = None,
    kind: Kind = "marginals",
    prior: Mapping[str, Any] | None = None,
) -> Figure:
    """A figure of one posterior.

    Args:
        posterior: of one data set.
        sites: which; all by default.
        kind: "marginals": one panel for every scalar, one for every long site, one for every
            filtered series. Numbers get a weighted density with the 94 % highest-density interval
            and the mean below it; integers get bars; sites of more than six elements get an
            interval for each; filtered sites get bands of 50 and 94 % about the median, over time.
            "pairs": every two scalars against each other, with regions of 50 and 94 %.
            "filtered": the series alone, one below the other.
            "ancestry": which particles of each stage have descendants among the last.
        prior: draws of the sites, as from `draw_prior`, to be drawn along with the marginals.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}; there are {', '.join(map(repr, get_args(Kind)))}")
    names = list(posterior.samples) if sites is None else list(sites)
    unknown = [name for name in names if name not in posterior.samples]
    if unknown:
        raise KeyError(
            f"no latent site {unknown[0]!r} here; there are: {', '.join(posterior.samples)}"
        )
    draw: Mapping[str, Callable[[], Figure]] = {
        "marginals": lambda: _marginals(posterior, names, prior or {}),
        "pairs": lambda: _pairs(posterior, names),
        "filtered": lambda: _filtered(posterior, names),
        "ancestry": lambda: _ancestry(posterior),
    }
    figure = draw[kind]()
    figure.suptitle(
        f"{posterior.trust}: effective sample size {float(posterior.ess):.0f} of "
        f"{posterior.num_particles}, Pareto k {float(posterior.pareto_k):.2f}",
        fontsize=10,
    )
    return figure


def draw_prior(rng_key: PRNGKeyArray, graph: Graph, num: int = 2000) -> dict[str, Array]:
    """Draws from the prior of the latent and deterministic sites: site → `(num, *shape)`."""

    def one(key: PRNGKeyArray) -> dict[str, Any]:
        found = graph.program.run(key, {})
        return {**{name: found.values[name] for name in graph.latent}, **found.deterministic}

    drawn = run_once(jax.vmap(one), jax.random.split(rng_key, num))
    return {name: np.asarray(value) for name, value in drawn.items()}


def _marginals(posterior: "Posterior", names: list[str], prior: Mapping[str, Any]) -> Figure:
    panels: list[Panel] = []
    for name in names:
        if posterior.filtered is not None and name in posterior.filtered:
            panels.extend(series(posterior, name))
        else:
            draws = np.asarray(prior[name]) if name in prior else None
            panels.extend(marginals(name, np.asarray(posterior.samples[name]), draws))
    columns = min(COLUMNS, len(panels)) or 1
    # One panel alone still has to be as wide as the title.
    figure = _grid(panels, columns, (3.6 if columns > 1 else 5.6, 2.5), _weights(posterior))
    handles, words = [], []
    for axes in figure.axes:
        for handle, word in zip(*axes.get_legend_handles_labels(), strict=True):
            if word not in words:
                handles.append(handle)
                words.append(word)
    if len(words) > 1:
        figure.legend(handles, words, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    return figure


def _filtered(posterior: "Posterior", names: list[str]) -> Figure:
    found = [name for name in names if posterior.filtered and name in posterior.filtered]
    if not found:
        raise ValueError(
            "there is no filtered series here: that needs a model with time, and method='smc'"
        )
    panels = [panel for name in found for panel in series(posterior, name)]
    return _grid(panels, 1, (8.0, 2.2), _weights(posterior))


def _grid(
    panels: Sequence[Panel], columns: int, size: tuple[float, float], weights: Array
) -> Figure:
    rows = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(size[0] * columns, size[1] * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        panel.draw(axes, weights)
        axes.set_title(panel.title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    return figure


def _weights(posterior: "Posterior") -> Array:
    return np.exp(np.asarray(posterior.log_weights, np.float64))


def _pairs(posterior: "Posterior", names: list[str]) -> Figure:
    """Marginals on the diagonal, joint densities below it."""
    scalars = {
        label(name, index): np.asarray(posterior.samples[name])[(slice(None), *index)]
        for name in names
        for index in np.ndindex(posterior.samples[name].shape[1:])
    }
    if not 2 <= len(scalars) <= MOST_PAIRS:
        raise ValueError(
            f"pairs of {len(scalars)} scalars cannot be drawn, only of 2 to {MOST_PAIRS}: choose "
            "among the sites, as in posterior.plot(('alpha', 'beta'), kind='pairs')"
        )
    weights = _weights(posterior)
    number = len(scalars)
    figure = Figure(figsize=(1.9 * number + 0.6, 1.8 * number + 0.6), layout="constrained")
    grid = figure.subplots(number, number, squeeze=False, sharex="col")
    for row, (below, y) in enumerate(scalars.items()):
        for column, (left, x) in enumerate(scalars.items()):
            axes = grid[row, column]
            if column > row:
                axes.set_axis_off()
                continue
            if column == row:
                scalar(left, x).draw(axes, weights)
                axes.set_ylabel("")
                axes.set_yticks([])
            else:
                _draw_pair(axes, x, y, weights)
            if column == 0 and row:
                axes.set_ylabel(below)
            elif column < row:
                axes.sharey(grid[row, 0])
                axes.tick_params(labelleft=False)
            if row == number - 1:
                axes.set_xlabel(left)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
    return figure


def _draw_pair(axes: Axes, x: Array, y: Array, weights: Array) -> None:
    alive = (weights > 0.0) & np.isfinite(x) & np.isfinite(y)
    x, y, weights = x[alive], y[alive], weights[alive]
    whole = [not np.issubdtype(values.dtype, np.floating) for values in (x, y)]
    limits = (
        _room(x.astype(float), weights, whole[0]),
        _room(y.astype(float), weights, whole[1]),
    )
    # Whole numbers would hide each other.
    shaken = np.random.default_rng(0).uniform(-0.3, 0.3, (2, len(x))) * np.array(whole)[:, None]
    # Area by weight; an average particle is a small dot.
    sizes = np.clip(6.0 * weights / weights.mean(), 0.2, 60.0)
    across, up = np.stack([x, y]) + shaken
    axes.scatter(across, up, sizes, color=COLOUR, alpha=0.25, linewidths=0)
    if not any(whole):
        grid_x, grid_y, heights = weighted_surface(x, y, weights, limits)
        levels = region_levels(heights, PROBABILITIES)
        if levels[0] < levels[-1]:
            axes.contour(grid_x, grid_y, heights, levels, colors="black", linewidths=(0.7, 1.2))
    axes.set_xlim(*limits[0])
    axes.set_ylim(*limits[1])
    for axis, integers in zip((axes.xaxis, axes.yaxis), whole, strict=True):
        if integers:
            axis.set_major_locator(MaxNLocator(integer=True))


def _room(values: Array, weights: Array, whole: bool) -> tuple[float, float]:
    low, high = central(values, weights, 0.998)
    margin = max(0.06 * (high - low), 0.5 * whole) or 0.5
    return low - margin, high + margin


def _ancestry(posterior: "Posterior") -> Figure:
    """The family tree of the last particles, and how many of each stage have descendants."""
    if posterior.ancestors is None or not posterior.ancestors.shape[0]:
        raise ValueError(
            "there is no ancestry here: that needs a method that resamples, as method='smc'"
        )
    parents = np.asarray(posterior.ancestors)
    stages, num = parents.shape
    lines = np.empty((stages + 1, num), int)
    lines[-1] = np.arange(num)
    for stage in reversed(range(stages)):
        lines[stage] = parents[stage][lines[stage + 1]]
    distinct = np.array([len(np.unique(row)) for row in lines])
    # Sorted by ancestor, first the oldest: branches do not cross.
    order = np.lexsort(lines[::-1])
    kept = lines[:, order[:: max(1, -(-num // MOST_LINES))]]
    own = np.linspace(0, 1, kept.shape[1])
    heights = np.empty(kept.shape)
    for stage, row in enumerate(kept):
        _, group = np.unique(row, return_inverse=True)
        middle = (np.bincount(group, own) / np.bincount(group))[group]
        # A particle is a bundle as thick as it has descendants, with gaps between bundles.
        heights[stage] = middle + BUNDLE * (own - middle)
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    tree, count = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    time = np.arange(stages + 1)
    paths = [np.column_stack([time, heights[:, line]]) for line in range(kept.shape[1])]
    tree.add_collection(LineCollection(paths, colors=COLOUR, linewidths=0.6, alpha=0.8))
    tree.set(xlim=(-0.02 * stages, 1.02 * stages), ylim=(-0.02, 1.02), yticks=[])
    tree.set_title("who descends from whom", fontsize=10)
    tree.spines[["top", "right", "left"]].set_visible(False)
    count.step(time, distinct, where="mid", color="black", lw=1, label="with descendants")
    if posterior.ess_by_stage is not None:
        sizes = np.asarray(posterior.ess_by_stage, float)
        count.plot(np.arange(len(sizes)), sizes, color=COLOUR, lw=1, label="effective sample size")
    count.set_yscale("log")
    count.set_ylim(min(10.0, 0.7 * distinct.min()), 1.4 * num)
    count.set_xlabel("stage", fontsize=8)
    count.xaxis.set_major_locator(MaxNLocator(integer=True))
    count.set_title(f"of {num} particles", fontsize=10)
    count.legend(fontsize=8, frameon=False, loc="lower right")
    count.spines[["top", "right"]].set_visible(False)
    return figure
