"""Pair plots: marginals on the diagonal, joint densities below it."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from retrodict.plotting.panels import (
    POSTERIOR_COLOUR,
    PROBABILITIES,
    Array,
    draw_scalar,
    element_name,
)
from retrodict.plotting.weighted_statistics import (
    central_interval,
    highest_density_levels,
    weighted_joint_density,
)

MAX_SCALARS = 8


def plot_pairs(samples: Mapping[str, Array], weights: Array) -> Figure:
    """Plot every two scalars against each other, with regions of 50 and 94 %.

    Args:
        samples: Draws of each site: `(particles, *shape)`.
        weights: Normalised weights: `(particles,)`.

    Raises:
        ValueError: If there are fewer than 2 or more than `MAX_SCALARS` scalars.
    """
    scalars = {
        element_name(site, index): values[(slice(None), *index)]
        for site, values in samples.items()
        for index in np.ndindex(values.shape[1:])
    }
    number = len(scalars)
    if not 2 <= number <= MAX_SCALARS:
        raise ValueError(
            f"a pair plot needs 2 to {MAX_SCALARS} scalars, but these sites have {number}: select "
            "sites, as in posterior.plot(('alpha', 'beta'), kind='pairs')"
        )
    figure = Figure(figsize=(1.9 * number + 0.6, 1.8 * number + 0.6), layout="constrained")
    grid = figure.subplots(number, number, squeeze=False, sharex="col")
    for row, (y_name, y) in enumerate(scalars.items()):
        for column, (x_name, x) in enumerate(scalars.items()):
            axes = grid[row, column]
            if column > row:
                axes.set_axis_off()
                continue
            if column == row:
                draw_scalar(axes, x, weights)
                axes.set_ylabel("")
                axes.set_yticks([])
            else:
                _draw_pair(axes, x, y, weights)
            if column == 0 and row:
                axes.set_ylabel(y_name)
            elif column < row:
                axes.sharey(grid[row, 0])
                axes.tick_params(labelleft=False)
            if row == number - 1:
                axes.set_xlabel(x_name)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
    return figure


def _draw_pair(axes: Axes, x: Array, y: Array, weights: Array) -> None:
    usable = (weights > 0.0) & np.isfinite(x) & np.isfinite(y)
    x, y, weights = x[usable], y[usable], weights[usable]
    discrete = [not np.issubdtype(values.dtype, np.floating) for values in (x, y)]
    limits = (
        _axis_limits(x.astype(float), weights, discrete[0]),
        _axis_limits(y.astype(float), weights, discrete[1]),
    )
    # Jitter integers, which would hide each other.
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, (2, len(x)))
    x_jittered, y_jittered = np.stack([x, y]) + noise * np.array(discrete)[:, None]
    # The area of a dot is proportional to the weight; an average particle is a small dot.
    sizes = np.clip(6.0 * weights / weights.mean(), 0.2, 60.0)
    axes.scatter(x_jittered, y_jittered, sizes, color=POSTERIOR_COLOUR, alpha=0.25, linewidths=0)
    if not any(discrete):
        grid_x, grid_y, density = weighted_joint_density(x, y, weights, limits)
        levels = highest_density_levels(density, PROBABILITIES)
        if levels[0] < levels[-1]:
            axes.contour(grid_x, grid_y, density, levels, colors="black", linewidths=(0.7, 1.2))
    axes.set_xlim(*limits[0])
    axes.set_ylim(*limits[1])
    for axis, integers in zip((axes.xaxis, axes.yaxis), discrete, strict=True):
        if integers:
            axis.set_major_locator(MaxNLocator(integer=True))


def _axis_limits(values: Array, weights: Array, discrete: bool) -> tuple[float, float]:
    low, high = central_interval(values, weights, 0.998)
    margin = max(0.06 * (high - low), 0.5 * discrete) or 0.5
    return low - margin, high + margin
