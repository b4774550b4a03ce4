"""Tests of uniformity: their false-alarm rate, and the deviations that they detect."""

import numpy as np

from retrodict.evaluation.rank_uniformity import (
    MAX_COORDINATES_PER_SITE,
    analyse_coordinates,
    coverage,
    describe_deviation,
    ecdf_band,
    significance_level,
    uniformity_p_value,
)


def test_false_alarm_rate_on_uniform_ranks():
    """Of 400 calibrations of five coordinates at most 1 % may fail, by chance 4 ± 2."""
    rng = np.random.default_rng(0)
    failed = 0
    for _ in range(400):
        p_values = [uniformity_p_value(ranks) for ranks in rng.uniform(size=(5, 200))]
        failed += min(p_values) < significance_level(5)
    assert failed <= 4 + 3 * np.sqrt(4)


def test_deviations_are_detected_and_described():
    uniform = np.random.default_rng(1).uniform(size=200)
    narrow = np.where(uniform < 0.5, uniform**2 * 2, 1 - 2 * (1 - uniform) ** 2)
    for ranks, description in (
        (uniform**1.8, "below the draws too often"),
        (1 - uniform**1.8, "above the draws too often"),
        (narrow, "too narrow"),
        (0.5 + 0.5 * (uniform - 0.5), "too wide"),
    ):
        assert uniformity_p_value(ranks) < significance_level(5)
        assert description in describe_deviation(ranks)


def test_ranks_outside_the_ecdf_band_fail():
    ranks = (np.arange(200) + 0.5) / 200
    shifted = np.clip(ranks - 1.05 * ecdf_band(200, 5), 0, 1)
    assert uniformity_p_value(shifted) < significance_level(5)


def test_coverage_counts_ranks_in_the_central_interval():
    assert coverage(np.array([0.04, 0.06, 0.5, 0.97]), 0.9) == 0.5


def test_large_sites_are_sampled():
    coordinates = analyse_coordinates({"a": np.full((4, 2, 30), 0.5), "b": np.full(4, 0.5)})
    assert len(coordinates) == MAX_COORDINATES_PER_SITE + 1
    assert coordinates[0].name == "a[0, 0]"
    assert coordinates[MAX_COORDINATES_PER_SITE - 1].name == "a[1, 29]"
    assert coordinates[-1].name == "b"
