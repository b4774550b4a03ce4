"""A calibration in; its verdict in words, its numbers and its charts out."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes

from retrodict.evaluation.ranks import Rank, band, limit, looked_at, meaning
from retrodict.evaluation.report.charts import ACCENT, BAD, BAND, MUTED, chart, histogram
from retrodict.evaluation.report.markup import Cell, code, escape, figure, figures, table
from retrodict.particles.diagnostics import GRADES

Array = np.ndarray[Any, Any]

# Above this share of answers that call themselves poor, the reader is told.
MANY_POOR = 0.05
MOST_ROWS = 40


class Checked(Protocol):
    """What is read from a calibration."""

    @property
    def ranks(self) -> Mapping[str, Any]:
        """Site → where the truth lies among the draws, from 0 to 1: `(datasets, *shape)`."""

    @property
    def ess(self) -> Any:
        """Effective sample size on each data set."""

    @property
    def pareto_k(self) -> Any:
        """k̂ on each data set."""

    @property
    def trust(self) -> Any:
        """Each answer's verdict on itself."""

    @property
    def num_particles(self) -> int:
        """K."""


class Verdict(NamedTuple):
    """What to make of a compiled model.

    Attributes:
        tone: "good", "fair", "poor", or "none" if nothing was tried.
        headline: one sentence.
        meaning: what it says and does not say, for someone new to it.
        reasons: what it rests on, with numbers.
        advice: what to do.
    """

    tone: str
    headline: str
    meaning: str
    reasons: tuple[str, ...] = ()
    advice: str = ""


def judge(checked: Checked | None) -> Verdict:
    """The verdict in words."""
    if checked is None:
        return Verdict(
            "none",
            "Not checked yet",
            "This page shows what was learned. Whether the answers are right has not been tried.",
            advice="Run retrodict check, or retrodict.calibrate.",
        )
    number = len(np.asarray(checked.ess))
    poor = float(np.mean(np.asarray(checked.trust) == "poor"))
    ranks = looked_at(checked.ranks)
    held = [_held(rank, 0.9) for rank in ranks]
    uneven = [rank for rank in ranks if rank.p < limit(len(ranks))]
    ess = np.asarray(checked.ess, float)
    reasons = [
        f"Of the intervals that claim to hold the truth in 90 of 100 cases, {np.mean(held):.0%} "
        f"did, over all unknowns and {number} data sets (for a single unknown from "
        f"{min(held):.0%} to {max(held):.0%}).",
        f"Half of the answers are worth at least {np.median(ess):.0f} independent draws, out of "
        f"{checked.num_particles} particles; nine in ten at least {np.quantile(ess, 0.1):.0f}.",
        f"{_share(poor, number)} answers called themselves poor.",
    ]
    if uneven:
        worst = min(uneven, key=lambda rank: rank.p)
        reasons.insert(0, f"Of {worst.name}, for one: {meaning(worst.column).lower()}.")
        return Verdict(
            "poor",
            "Do not rely on these answers",
            f"On {number} data sets simulated from the model itself, where the truth is known, the "
            "truth did not fall among the draws as it should: the answers are too narrow, too wide "
            "or off to one side.",
            tuple(reasons),
            "Train longer, use larger networks, or use more particles; the charts below show which "
            "unknowns are concerned.",
        )
    if poor > MANY_POOR:
        return Verdict(
            "fair",
            "Right, but often too coarse",
            f"On {number} data sets simulated from the model itself, where the truth is known, the "
            f"answers were right as often as they claimed. But {poor:.0%} of them rest on few "
            "particles. Each answer says so itself: heed it.",
            tuple(reasons),
            "Train longer, or use more particles.",
        )
    return Verdict(
        "good",
        "These answers can be relied on",
        f"On {number} data sets simulated from the model itself, where the truth is known, the "
        "answers were right as often as they claimed. This holds for data like those the model "
        "produces; on data unlike any of them, each answer's own verdict tells.",
        tuple(reasons),
    )


def _share(share: float, number: int) -> str:
    count = round(share * number)
    return f"{count or 'None'} of {number}"


def facts(checked: Checked) -> dict[str, str]:
    """The two numbers that matter most."""
    ess = np.asarray(checked.ess, float)
    trust = np.asarray(checked.trust)
    return {
        f"effective draws of {checked.num_particles}, in the middle": f"{np.median(ess):.0f}",
        "of answers good or fair": f"{np.mean(trust != 'poor'):.0%}",
    }


def calibration_section(checked: Checked | None) -> str:
    """Ranks, coverage, effective sample sizes and tails, each as a chart."""
    if checked is None:
        return "<p>This has not been tried: run <code>retrodict check</code>.</p>"
    ranks = looked_at(checked.ranks)
    number = len(np.asarray(checked.ess))
    drawn = [
        figure(
            _ecdf(ranks),
            "<b>Ranks.</b> Where the truth falls among the draws, against where it should. A line "
            "for each unknown; inside the band is chance. One side up: truths lie too low or too "
            "high; an S: intervals of the wrong width.",
        ),
        figure(
            _coverage(ranks),
            "<b>Coverage.</b> How often intervals hold the truth, against how often they claim to. "
            "On the diagonal is right; below it, answers are too sure of themselves.",
        ),
        figure(
            histogram(
                np.asarray(checked.ess, float) / checked.num_particles * 100,
                "effective sample size, % of particles",
                limits=(0.0, 100.0),
                bad=(0.0, 1.0),
            ),
            "<b>Worth of the particles.</b> Further to the right is better: the networks' guesses "
            "are closer to the posterior.",
        ),
        figure(
            histogram(
                np.nan_to_num(np.asarray(checked.pareto_k, float), posinf=9.0),
                "Pareto k",
                limits=(-0.5, 1.5),
                bad=(0.7, 9.0),
            ),
            "<b>Tails of the weights.</b> Beyond 0.7 a few particles carry nearly everything, and "
            "the answer is called poor.",
        ),
    ]
    counts = {grade: int(np.sum(np.asarray(checked.trust) == grade)) for grade in GRADES}
    said = ", ".join(f"{count} {grade}" for grade, count in counts.items() if count)
    return (
        f"<p>{number} data sets were simulated from the model, the unknowns inferred from each, "
        f"and compared with those that the data were made from. Answers by their own verdict: "
        f"{escape(said)}.</p>" + figures(drawn) + _table(ranks)
    )


def _held(rank: Rank, level: float) -> float:
    return float(np.mean(np.abs(rank.column - 0.5) <= level / 2))


def _ecdf(ranks: Sequence[Rank]) -> str:
    number = len(ranks[0].column)
    width, least = band(number, len(ranks)), limit(len(ranks))
    curves = [(np.sort(rank.column), rank.p < least) for rank in ranks]
    heights = [np.arange(1, number + 1) / number - ordered for ordered, _ in curves]
    most = max(1.6 * width, *(float(np.abs(height).max()) for height in heights))

    def draw(axes: Axes) -> None:
        axes.axhspan(-width, width, color=BAND, lw=0)
        axes.axhline(0, color=MUTED, lw=0.6)
        for (ordered, wrong), height in zip(curves, heights, strict=True):
            axes.step(
                ordered,
                height,
                where="post",
                color=BAD if wrong else ACCENT,
                lw=1.4 if wrong else 1.0,
                alpha=1.0 if wrong or len(ranks) < 5 else 0.5,
            )
        axes.set(xlim=(0, 1), ylim=(-1.1 * most, 1.1 * most))
        axes.set_xlabel("rank of the truth")
        axes.set_ylabel("observed − expected")

    outside = sum(wrong for _, wrong in curves)
    return chart(draw, f"Ranks of {len(ranks)} unknowns, of which {outside} stray from uniform")


def _coverage(ranks: Sequence[Rank]) -> str:
    levels = np.linspace(0, 1, 101)

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, lw=0.8, ls="--")
        for rank in ranks:
            held = [_held(rank, level) for level in levels]
            axes.plot(levels, held, color=ACCENT, lw=1.0, alpha=0.5)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="claimed", ylabel="held the truth")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])

    return chart(draw, "Coverage of central intervals, against what they claim")


def _table(ranks: Sequence[Rank]) -> str:
    least = limit(len(ranks))
    # Those that stray first: there may be a hundred others.
    order = sorted(ranks, key=lambda rank: rank.p >= least)
    rows: list[list[str | Cell]] = [
        [
            code(rank.name),
            Cell("stray", "poor") if rank.p < least else Cell("uniform", "good"),
            Cell(f"{rank.p:.2g}", "number"),
            Cell(f"{_held(rank, 0.5):.0%}", "number"),
            Cell(f"{_held(rank, 0.9):.0%}", "number"),
            Cell(f"{np.mean(rank.column):.2f}", "number"),
        ]
        for rank in order[:MOST_ROWS]
    ]
    head = ["unknown", "ranks", "p", "50 % held", "90 % held", "mean rank"]
    more = len(order) - MOST_ROWS
    left = f"<p>… and {more} more, none worse than these.</p>" if more > 0 else ""
    return table(head, rows) + left
