"""Tests of uniformity: how often they cry wolf, and what they see."""

import numpy as np

from retrodict.evaluation.ranks import MOST_ELEMENTS, band, limit, looked_at, meaning, p_value


def test_uniform_ranks_pass():
    """Of 400 checks of five unknowns at most 1 % may fail, by chance 4 ± 2."""
    rng = np.random.default_rng(0)
    failed = sum(
        any(p_value(row) < limit(5) for row in rng.uniform(size=(5, 200))) for _ in range(400)
    )
    assert failed <= 4 + 3 * np.sqrt(4)


def test_what_is_wrong_is_seen_and_named():
    uniform = np.random.default_rng(1).uniform(size=200)
    narrow = np.where(uniform < 0.5, uniform**2 * 2, 1 - 2 * (1 - uniform) ** 2)
    for ranks, said in (
        (uniform**1.8, "below the draws too often"),
        (1 - uniform**1.8, "above the draws too often"),
        (narrow, "too narrow"),
        (0.5 + 0.5 * (uniform - 0.5), "too wide"),
    ):
        assert p_value(ranks) < limit(5)
        assert said in meaning(ranks)


def test_nothing_beyond_the_band_passes():
    ranks = (np.arange(200) + 0.5) / 200
    assert p_value(np.clip(ranks - 1.05 * band(200, 5), 0, 1)) < limit(5)


def test_elements_of_a_large_site_stand_for_all():
    ranks = {"a": np.full((4, 2, 30), 0.5), "b": np.full(4, 0.5)}
    found = looked_at(ranks)
    assert [rank.name for rank in found][-1] == "b"
    assert len(found) == MOST_ELEMENTS + 1
    assert found[0].name == "a[0, 0]"
    assert found[MOST_ELEMENTS - 1].name == "a[1, 29]"
