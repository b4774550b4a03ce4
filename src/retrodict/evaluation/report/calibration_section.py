"""The report's section on calibration: charts and a table of the ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from retrodict.evaluation.calibration_plot import draw_coverage, draw_ranks
from retrodict.evaluation.rank_uniformity import (
    CoordinateRanks,
    analyse_coordinates,
    coverage,
    significance_level,
)
from retrodict.evaluation.report.charts import ACCENT, BAD, BAND, chart, histogram
from retrodict.evaluation.report.markup import Cell, code, escape, figure, figures, table
from retrodict.particles.diagnostics import GRADES

if TYPE_CHECKING:
    from retrodict.evaluation.calibrate import Calibration

MAX_ROWS = 40


def calibration_section(calibration: "Calibration | None") -> str:
    """Show ranks, coverage, effective sample sizes and Pareto k̂ as charts, and a table."""
    if calibration is None:
        return "<p>Not tested: run <code>retrodict check</code>.</p>"
    coordinates = analyse_coordinates(calibration.ranks)
    trust = np.asarray(calibration.trust)
    counts = {grade: int(np.sum(trust == grade)) for grade in GRADES}
    counts_text = ", ".join(f"{count} {grade}" for grade, count in counts.items() if count)
    return (
        f"<p>{len(trust)} data sets were simulated from the model. The unknowns were inferred from "
        "each and compared with the true values that generated the data. Trust of the posteriors: "
        f"{escape(counts_text)}.</p>"
        + figures([*_rank_figures(coordinates), *_weight_figures(calibration)])
        + _table(coordinates)
    )


def _rank_figures(coordinates: Sequence[CoordinateRanks]) -> list[str]:
    level = significance_level(len(coordinates))
    colours = [BAD if coordinate.p_value < level else ACCENT for coordinate in coordinates]
    num_failed = colours.count(BAD)
    ranks_label = f"Ranks of {len(colours)} unknowns, of which {num_failed} are not uniform"
    return [
        figure(
            chart(lambda axes: draw_ranks(axes, coordinates, colours, BAND), ranks_label),
            "<b>Ranks.</b> The rank of the true value among the draws should be uniform. A line "
            "for each unknown shows the deviation; inside the band it is chance. A line on one "
            "side of zero: the draws are biased; an S: the intervals have the wrong width.",
        ),
        figure(
            chart(
                lambda axes: draw_coverage(axes, coordinates, colours, BAND),
                "Coverage of central intervals, against what they claim",
            ),
            "<b>Coverage.</b> How often intervals hold the true value, against how often they "
            "claim to. Most lines should lie in the band; below it, intervals are too narrow.",
        ),
    ]


def _weight_figures(calibration: "Calibration") -> list[str]:
    return [
        figure(
            histogram(
                np.asarray(calibration.ess, float) / calibration.num_particles * 100,
                "effective sample size, % of particles",
                limits=(0.0, 100.0),
                bad=(0.0, 1.0),
            ),
            "<b>Effective sample size.</b> The larger, the closer the networks' proposals are to "
            "the posterior.",
        ),
        figure(
            histogram(
                np.nan_to_num(np.asarray(calibration.pareto_k, float), posinf=9.0),
                "Pareto k",
                limits=(-0.5, 1.5),
                bad=(0.7, 9.0),
            ),
            "<b>Tails of the weights.</b> Above 0.7 a few particles carry nearly all of the "
            "weight, and the trust is “poor”.",
        ),
    ]


def _table(coordinates: Sequence[CoordinateRanks]) -> str:
    level = significance_level(len(coordinates))
    # Coordinates that failed come first: there may be many others.
    ordered = sorted(coordinates, key=lambda coordinate: coordinate.p_value >= level)
    rows: list[list[str | Cell]] = [
        [
            code(coordinate.name),
            Cell("not uniform", "poor") if coordinate.p_value < level else Cell("uniform", "good"),
            Cell(f"{coordinate.p_value:.2g}", "number"),
            Cell(f"{coverage(coordinate.ranks, 0.5):.0%}", "number"),
            Cell(f"{coverage(coordinate.ranks, 0.9):.0%}", "number"),
            Cell(f"{np.mean(coordinate.ranks):.2f}", "number"),
        ]
        for coordinate in ordered[:MAX_ROWS]
    ]
    header = ["unknown", "ranks", "p", "50 % coverage", "90 % coverage", "mean rank"]
    num_omitted = len(ordered) - MAX_ROWS
    omitted = f"<p>… and {num_omitted} more, none worse than these.</p>" if num_omitted > 0 else ""
    return table(header, rows) + omitted
