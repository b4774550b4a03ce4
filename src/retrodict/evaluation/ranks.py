"""Ranks of truths among draws in; whether they are uniform, and what it means if not, out."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Column = np.ndarray[Any, Any]

# Chance that a model without fault does not pass: shared over all tests of all coordinates.
FALSE_ALARM = 0.01
# Elements of a plate are alike, so that some stand for all.
MOST_ELEMENTS = 16


class Rank(NamedTuple):
    """The ranks of one coordinate: its site and name, one rank a data set, and their p-value."""

    site: str
    name: str
    column: Column
    p: float


def looked_at(ranks: Mapping[str, Any]) -> tuple[Rank, ...]:
    """Of every site all coordinates, or so many that lie evenly among them."""
    found = []
    for site, values in ranks.items():
        array = np.asarray(values, float)
        shape, flat = array.shape[1:], array.reshape(len(array), -1)
        number = min(flat.shape[1], MOST_ELEMENTS)
        for place in np.linspace(0, flat.shape[1] - 1, number).round().astype(int):
            index = ", ".join(map(str, np.unravel_index(place, shape)))
            column = flat[:, place]
            found.append(Rank(site, f"{site}[{index}]" if shape else site, column, p_value(column)))
    return tuple(found)


def p_value(column: Column) -> float:
    """The chance of ranks so uneven; the lesser of two tests.

    Kolmogorov and Smirnov's sees ranks that lean to one side; that of the sum of squares of
    Φ⁻¹(rank) sees those that crowd in the middle or at the ends.
    """
    from scipy import stats  # slow to import, and seldom needed

    z = stats.norm.ppf(np.clip(column, 1e-6, 1 - 1e-6))
    spread = stats.chi2.cdf(np.sum(z**2), len(z))
    return float(min(stats.kstest(column, "uniform").pvalue, 2 * min(spread, 1 - spread)))


def limit(coordinates: int) -> float:
    """The p-value below which one of so many coordinates is at fault."""
    return FALSE_ALARM / (2 * max(coordinates, 1))


def band(datasets: int, coordinates: int) -> float:
    """How far the distribution of ranks may be from uniform, by the first of the two tests."""
    from scipy import stats

    return float(stats.kstwo.ppf(1 - limit(coordinates), datasets))


def meaning(column: Column) -> str:
    """What uneven ranks say of the draws."""
    if abs(column.mean() - 0.5) > 2 * np.sqrt(1 / 12 / len(column)):
        side = "below" if column.mean() < 0.5 else "above"
        return f"The truth lies {side} the draws too often: they are biased"
    if column.var() > 1 / 12:
        return "The truth lies at the ends too often: the draws are too narrow"
    return "The truth lies in the middle too often: the draws are too wide"
