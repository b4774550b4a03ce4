"""A calibration in; a figure of its ranks, coverage and effective sample sizes out."""

from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from retrodict.evaluation.ranks import band

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from retrodict.evaluation.calibrate import Calibration


def calibration_plot(found: "Calibration") -> "Figure":
    """Three panels: ranks against uniform, coverage, and effective sample sizes."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    number, levels = found.num_datasets, np.linspace(0, 1, 101)
    height = band(number, len(found.coordinates))
    left.fill_between(levels, -height, height, color="0.9", label="allowed")
    chance = stats.binom.ppf([[0.005], [0.995]], number, levels) / number
    middle.fill_between(levels, *chance, color="0.9", label="99 % of lines")
    colors = {site: f"C{place % 10}" for place, site in enumerate(found.ranks)}
    named: set[str] = set()
    for rank in found.coordinates:
        label = None if rank.site in named else rank.site
        named.add(rank.site)
        style = {"color": colors[rank.site], "linewidth": 1, "alpha": 0.8, "label": label}
        ecdf = np.searchsorted(np.sort(rank.column), levels, side="right") / number
        left.plot(levels, ecdf - levels, **style)
        inside = np.abs(rank.column[:, None] - 0.5) <= levels / 2
        middle.plot(levels, inside.mean(0), **style)
    left.set(title="Ranks of the truth", xlabel="rank", ylabel="cumulative share − uniform")
    middle.plot(levels, levels, color="black", linewidth=0.6)
    middle.set(title="Coverage", xlabel="central interval", ylabel="share of truths inside")
    share = 100 * found.ess / found.num_particles
    right.hist(share, bins=np.linspace(0, 100, 26), color="C0")
    right.set(title="Effective particles", xlabel="% of K", ylabel="data sets")
    if len(found.ranks) <= 10:
        left.legend(frameon=False, fontsize="small")
    return figure
