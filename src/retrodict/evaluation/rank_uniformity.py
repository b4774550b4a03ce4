"""Tests of whether the ranks of simulation-based calibration are uniform."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Ranks = np.ndarray[Any, Any]

# Probability that a calibrated model fails, over all tests of all coordinates together.
FALSE_ALARM_RATE = 0.01
# Elements of a plate are exchangeable, so a sample of them suffices.
MAX_COORDINATES_PER_SITE = 16


class CoordinateRanks(NamedTuple):
    """The ranks of one coordinate of a latent site.

    Attributes:
        site: name of the site.
        name: name of the coordinate: the site's, with an index if it has one.
        ranks: normalised rank of the true value among the draws, one for each data set.
        p_value: of the hypothesis that the ranks are uniform.
    """

    site: str
    name: str
    ranks: Ranks
    p_value: float


def analyse_coordinates(ranks: Mapping[str, Any]) -> tuple[CoordinateRanks, ...]:
    """Test coordinates of every site: all of them, or a sample at equal distances.

    Args:
        ranks: site → (datasets, *site shape).
    """
    coordinates = []
    for site, values in ranks.items():
        array = np.asarray(values, float)
        shape, flat = array.shape[1:], array.reshape(len(array), -1)
        number = min(flat.shape[1], MAX_COORDINATES_PER_SITE)
        for position in np.linspace(0, flat.shape[1] - 1, number).round().astype(int):
            index = ", ".join(map(str, np.unravel_index(position, shape)))
            name = f"{site}[{index}]" if shape else site
            column = flat[:, position]
            coordinates.append(CoordinateRanks(site, name, column, uniformity_p_value(column)))
    return tuple(coordinates)


def uniformity_p_value(ranks: Ranks) -> float:
    """Return the smaller p-value of two tests of uniformity.

    The Kolmogorov-Smirnov test detects ranks that lie too high or too low; the χ² test of
    Σ Φ⁻¹(rank)² detects ranks that concentrate in the middle or at the ends.
    """
    from scipy import stats  # slow to import

    z = stats.norm.ppf(np.clip(ranks, 1e-6, 1 - 1e-6))
    lower_tail = stats.chi2.cdf(np.sum(z**2), len(z))
    p_spread = 2 * min(lower_tail, 1 - lower_tail)
    return float(min(stats.kstest(ranks, "uniform").pvalue, p_spread))


def significance_level(num_coordinates: int) -> float:
    """Bonferroni-corrected significance level of each of the two tests of a coordinate."""
    return FALSE_ALARM_RATE / (2 * max(num_coordinates, 1))


def ecdf_band(num_datasets: int, num_coordinates: int) -> float:
    """Largest deviation of the ECDF from uniform that the Kolmogorov-Smirnov test accepts."""
    from scipy import stats

    return float(stats.kstwo.ppf(1 - significance_level(num_coordinates), num_datasets))


def coverage(ranks: Ranks, level: float) -> float:
    """Share of true values inside the central interval of a level."""
    return float(np.mean(np.abs(ranks - 0.5) <= level / 2))


def describe_deviation(ranks: Ranks) -> str:
    """Explain what ranks that are not uniform say about the draws."""
    standard_error = np.sqrt(1 / 12 / len(ranks))
    if abs(ranks.mean() - 0.5) > 2 * standard_error:
        side = "below" if ranks.mean() < 0.5 else "above"
        return f"The true value lies {side} the draws too often: the draws are biased"
    if ranks.var() > 1 / 12:
        return "The true value lies at the ends of the draws too often: they are too narrow"
    return "The true value lies in the middle of the draws too often: they are too wide"
