"""Figure of a calibration: ranks, coverage and effective sample sizes."""

from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from retrodict.evaluation.rank_uniformity import ecdf_band

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from retrodict.evaluation.calibrate import Calibration


def calibration_plot(calibration: "Calibration") -> "Figure":
    """Draw three panels: ranks against uniform, coverage, and effective sample sizes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    ranks_axes, coverage_axes, ess_axes = axes
    num_datasets, levels = calibration.num_datasets, np.linspace(0, 1, 101)
    band = ecdf_band(num_datasets, len(calibration.coordinates))
    ranks_axes.fill_between(levels, -band, band, color="0.9", label="allowed")
    lower, upper = stats.binom.ppf([[0.005], [0.995]], num_datasets, levels) / num_datasets
    coverage_axes.fill_between(levels, lower, upper, color="0.9", label="99 % of lines")
    colors = {site: f"C{number % 10}" for number, site in enumerate(calibration.ranks)}
    labelled: set[str] = set()
    for coordinate in calibration.coordinates:
        site, ranks = coordinate.site, coordinate.ranks
        label = None if site in labelled else site
        labelled.add(site)
        style = {"color": colors[site], "linewidth": 1, "alpha": 0.8, "label": label}
        ecdf = np.searchsorted(np.sort(ranks), levels, side="right") / num_datasets
        ranks_axes.plot(levels, ecdf - levels, **style)
        inside = np.abs(ranks[:, None] - 0.5) <= levels / 2
        coverage_axes.plot(levels, inside.mean(0), **style)
    ranks_axes.set(title="Ranks of the true values", xlabel="rank", ylabel="ECDF − uniform")
    coverage_axes.plot(levels, levels, color="black", linewidth=0.6)
    coverage_axes.set(
        title="Coverage", xlabel="central interval", ylabel="share of true values inside"
    )
    ess_percent = 100 * calibration.ess / calibration.num_particles
    ess_axes.hist(ess_percent, bins=np.linspace(0, 100, 26), color="C0")
    ess_axes.set(title="Effective sample size", xlabel="% of particles", ylabel="data sets")
    if len(calibration.ranks) <= 10:
        ranks_axes.legend(frameon=False, fontsize="small")
    return figure
