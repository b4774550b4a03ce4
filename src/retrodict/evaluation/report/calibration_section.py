"""The report's section on calibration: charts and a table of the ranks."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from retrodict.evaluation.rank_uniformity import (
    CoordinateRanks,
    analyse_coordinates,
    coverage,
    ecdf_band,
    significance_level,
)
from retrodict.evaluation.report.charts import ACCENT, BAD, BAND, MUTED, chart, histogram
from retrodict.evaluation.report.markup import Cell, code, escape, figure, figures, table
from retrodict.evaluation.report.verdict import CalibrationResult
from retrodict.particles.diagnostics import GRADES

MAX_ROWS = 40


def calibration_section(calibration: CalibrationResult | None) -> str:
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
    return [
        figure(
            _ecdf_chart(coordinates),
            "<b>Ranks.</b> The rank of the true value among the draws should be uniform. A line "
            "for each unknown shows the deviation; inside the band it is chance. A line on one "
            "side of zero: the draws are biased; an S: the intervals have the wrong width.",
        ),
        figure(
            _coverage_chart(coordinates),
            "<b>Coverage.</b> How often intervals hold the true value, against how often they "
            "claim to. The diagonal is correct; below it, intervals are too narrow.",
        ),
    ]


def _weight_figures(calibration: CalibrationResult) -> list[str]:
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


def _ecdf_chart(coordinates: Sequence[CoordinateRanks]) -> str:
    num_datasets = len(coordinates[0].ranks)
    band = ecdf_band(num_datasets, len(coordinates))
    level = significance_level(len(coordinates))
    failed = [coordinate.p_value < level for coordinate in coordinates]
    sorted_ranks = [np.sort(coordinate.ranks) for coordinate in coordinates]
    deviations = [np.arange(1, num_datasets + 1) / num_datasets - ranks for ranks in sorted_ranks]
    height = 1.1 * max(1.6 * band, *(float(np.abs(d).max()) for d in deviations))

    def draw(axes: Axes) -> None:
        axes.axhspan(-band, band, color=BAND, lw=0)
        axes.axhline(0, color=MUTED, lw=0.6)
        for ranks, deviation, bad in zip(sorted_ranks, deviations, failed, strict=True):
            axes.step(
                ranks,
                deviation,
                where="post",
                color=BAD if bad else ACCENT,
                lw=1.4 if bad else 1.0,
                alpha=1.0 if bad or len(coordinates) < 5 else 0.5,
            )
        axes.set(xlim=(0, 1), ylim=(-height, height))
        axes.set_xlabel("rank of the true value")
        axes.set_ylabel("observed − expected")

    label = f"Ranks of {len(coordinates)} unknowns, of which {sum(failed)} are not uniform"
    return chart(draw, label)


def _coverage_chart(coordinates: Sequence[CoordinateRanks]) -> str:
    levels = np.linspace(0, 1, 101)

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, lw=0.8, ls="--")
        for coordinate in coordinates:
            shares = [coverage(coordinate.ranks, level) for level in levels]
            axes.plot(levels, shares, color=ACCENT, lw=1.0, alpha=0.5)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="claimed", ylabel="held the true value")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])

    return chart(draw, "Coverage of central intervals, against what they claim")


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
