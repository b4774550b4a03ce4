"""A calibration in; a figure of its ranks, coverage and effective sample sizes out."""

from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from retrodict.calibrate import Calibration


def calibration_plot(found: "Calibration") -> "Figure":
    """Three panels: ranks against uniform, coverage, and effective sample sizes."""
    import matplotlib.pyplot as plt

    from retrodict.calibrate import _some

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    number, levels = found.num_datasets, np.linspace(0, 1, 101)
    # Half the height of the band that all lines stay in: that of the test itself.
    height = stats.kstwo.ppf(1 - found.limit, number)
    left.fill_between(levels, -height, height, color="0.9", label="allowed")
    band = stats.binom.ppf([[0.005], [0.995]], number, levels) / number
    middle.fill_between(levels, *band, color="0.9", label="99 % of lines")
    for color, (name, ranks) in enumerate(found.ranks.items()):
        for place, column in enumerate(_some(ranks).T):
            label = name if place == 0 else None
            style = {"color": f"C{color % 10}", "linewidth": 1, "alpha": 0.8, "label": label}
            ecdf = np.searchsorted(np.sort(column), levels, side="right") / number
            left.plot(levels, ecdf - levels, **style)
            inside = np.abs(column[:, None] - 0.5) <= levels / 2
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
