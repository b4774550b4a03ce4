"""The verdict on a compiled model, from its calibration, in words for a general reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from retrodict.evaluation.rank_uniformity import (
    CoordinateRanks,
    analyse_coordinates,
    coverage,
    describe_deviation,
    significance_level,
)

if TYPE_CHECKING:
    from retrodict.evaluation.calibrate import Calibration

# A larger share of posteriors with trust "poor" is worth a warning.
MAX_POOR_SHARE = 0.05


class Verdict(NamedTuple):
    """Whether a compiled model can be relied on.

    Attributes:
        tone: "good", "fair", "poor", or "none" without a calibration.
        headline: one sentence.
        meaning: what the verdict implies and what it does not.
        reasons: the numbers behind it.
        advice: what to do.
    """

    tone: str
    headline: str
    meaning: str
    reasons: tuple[str, ...] = ()
    advice: str = ""


def judge(calibration: Calibration | None) -> Verdict:
    """Judge a compiled model by its calibration."""
    if calibration is None:
        return Verdict(
            "none",
            "Not checked yet",
            "This page shows how the model was compiled. Its calibration has not been tested.",
            advice="Run retrodict check, or retrodict.calibrate.",
        )
    coordinates = analyse_coordinates(calibration.ranks)
    reasons = _reasons(calibration, coordinates)
    worst = min(coordinates, key=lambda coordinate: coordinate.p_value)
    if worst.p_value < significance_level(len(coordinates)):
        deviation = describe_deviation(worst.ranks)
        return _not_calibrated((f"For example, {worst.name}: {deviation.lower()}.", *reasons))
    poor_share = float(np.mean(np.asarray(calibration.trust) == "poor"))
    if poor_share > MAX_POOR_SHARE:
        return _imprecise(reasons, poor_share)
    return Verdict(
        "good",
        "These results can be relied on",
        "On data sets simulated from the model, where the true values are known, the intervals "
        "held the true values as often as they claim. This applies to data like those the model "
        "generates; for other data, see the trust that each posterior reports.",
        reasons,
    )


def _not_calibrated(reasons: tuple[str, ...]) -> Verdict:
    return Verdict(
        "poor",
        "Do not rely on these results",
        "On data sets simulated from the model, where the true values are known, the true values "
        "did not fall among the draws as they should: the posteriors are too narrow, too wide or "
        "biased.",
        reasons,
        "Train longer, use larger networks, or use more particles; the charts below show which "
        "unknowns are affected.",
    )


def _imprecise(reasons: tuple[str, ...], poor_share: float) -> Verdict:
    return Verdict(
        "fair",
        "Correct, but often imprecise",
        "On data sets simulated from the model, where the true values are known, the intervals "
        f"held the true values as often as they claim. But {poor_share:.0%} of the posteriors rest "
        "on few particles; each of them reports this as its trust.",
        reasons,
        "Train longer, or use more particles.",
    )


def _reasons(calibration: Calibration, coordinates: Sequence[CoordinateRanks]) -> tuple[str, ...]:
    ess = np.asarray(calibration.ess, float)
    coverages = [coverage(coordinate.ranks, 0.9) for coordinate in coordinates]
    num_poor = int(np.sum(np.asarray(calibration.trust) == "poor"))
    return (
        f"90 % intervals held the true value in {np.mean(coverages):.0%} of the cases, over all "
        f"unknowns and {len(ess)} data sets (for a single unknown, in {min(coverages):.0%} to "
        f"{max(coverages):.0%}).",
        f"Half of the posteriors are worth at least {np.median(ess):.0f} independent draws, out of "
        f"{calibration.num_particles} particles; nine in ten at least {np.quantile(ess, 0.1):.0f}.",
        f"{num_poor or 'None'} of {len(ess)} posteriors have trust “poor”.",
    )


def headline_numbers(calibration: Calibration) -> dict[str, str]:
    """The two most important numbers, by their labels."""
    ess, trust = np.asarray(calibration.ess, float), np.asarray(calibration.trust)
    return {
        f"effective draws of {calibration.num_particles}, median": f"{np.median(ess):.0f}",
        "of posteriors good or fair": f"{np.mean(trust != 'poor'):.0%}",
    }
