"""Figures of a calibration: ranks, coverage and effective sample sizes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from retrodict.evaluation.rank_uniformity import CoordinateRanks, coverage, ecdf_band

if TYPE_CHECKING:
    from retrodict.evaluation.calibrate import Calibration


def draw_ranks(
    axes: Axes, coordinates: Sequence[CoordinateRanks], colours: Sequence[str], band_colour: str
) -> None:
    """Draw the ECDF of the ranks minus uniform, with the band in which the test passes."""
    num_datasets = len(coordinates[0].ranks)
    band = ecdf_band(num_datasets, len(coordinates))
    axes.axhspan(-band, band, color=band_colour, lw=0)
    expected = np.arange(1, num_datasets + 1) / num_datasets
    for coordinate, colour in zip(coordinates, colours, strict=True):
        ranks = np.sort(coordinate.ranks)
        axes.step(ranks, expected - ranks, where="post", color=colour, lw=1.0, alpha=0.7)
    height = 1.1 * max(1.6 * band, *np.abs(axes.dataLim.intervaly))
    axes.set(xlim=(0, 1), ylim=(-height, height))
    axes.set(xlabel="rank of the true value", ylabel="observed − expected")


def draw_coverage(
    axes: Axes, coordinates: Sequence[CoordinateRanks], colours: Sequence[str], band_colour: str
) -> None:
    """Draw how often central intervals hold the true value, with a band of 99 % probability."""
    levels, num_datasets = np.linspace(0, 1, 101), len(coordinates[0].ranks)
    lower, upper = stats.binom.ppf([[0.005], [0.995]], num_datasets, levels) / num_datasets
    axes.fill_between(levels, lower, upper, color=band_colour, lw=0)
    for coordinate, colour in zip(coordinates, colours, strict=True):
        shares = [coverage(coordinate.ranks, level) for level in levels]
        axes.plot(levels, shares, color=colour, lw=1.0, alpha=0.7)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="central interval", ylabel="held the true value")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])


def calibration_plot(calibration: "Calibration") -> Figure:
    """Draw three panels: ranks against uniform, coverage, and effective sample sizes."""
    figure, (ranks_axes, coverage_axes, ess_axes) = plt.subplots(
        1, 3, figsize=(11, 3.4), layout="constrained"
    )
    colour_by_site = {site: f"C{number % 10}" for number, site in enumerate(calibration.ranks)}
    colours = [colour_by_site[coordinate.site] for coordinate in calibration.coordinates]
    draw_ranks(ranks_axes, calibration.coordinates, colours, "0.9")
    draw_coverage(coverage_axes, calibration.coordinates, colours, "0.9")
    ranks_axes.set_title("Ranks of the true values")
    coverage_axes.set_title("Coverage")
    ess_percent = 100 * calibration.ess / calibration.num_particles
    ess_axes.hist(ess_percent, bins=np.linspace(0, 100, 26), color="C0")
    ess_axes.set(title="Effective sample size", xlabel="% of particles", ylabel="data sets")
    if len(colour_by_site) <= 10:
        for site, colour in colour_by_site.items():
            ranks_axes.plot([], color=colour, label=site)
        ranks_axes.legend(frameon=False, fontsize="small")
    return figure
