"""The demonstrations: their stored answers, helpers and complete runs."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from benchmarks.paper import reference

import retrodict.demos
from retrodict.demos.fhmm import FilterRuns, surviving_ancestors
from retrodict.demos.reference_answers import format_table
from retrodict.plotting.ancestry import ancestral_lineages


def test_stored_answers_match_the_exact_solvers():
    path = Path(retrodict.demos.__file__).with_name("reference.json")
    stored = json.loads(path.read_text(encoding="utf-8"))
    rng = np.random.default_rng(2016)
    for name, value in reference.pumps().items():
        np.testing.assert_allclose(stored["pumps"][name], value, rtol=1e-6)
    for answer in stored["regression"]["sets"]:
        expected = reference.simulate_regression(rng)
        assert answer["z"] == expected["z"] and answer["t"] == expected["t"]
        np.testing.assert_allclose(answer["mean"], expected["mean"], rtol=1e-5)
        assert answer["log_evidence"] == pytest.approx(expected["log_evidence"], rel=1e-6)
    assert stored["fhmm"]["y"] == reference.simulate_meter(rng).tolist()


def test_ancestral_lineages_are_traced_back_from_the_last_step():
    ancestors = np.array([[0, 0, 2], [1, 1, 2]])
    np.testing.assert_array_equal(ancestral_lineages(ancestors), [[0, 0, 2], [1, 1, 2], [0, 1, 2]])
    runs = FilterRuns(np.ones((1, 3)), ancestors[None], np.zeros(1))
    np.testing.assert_array_equal(surviving_ancestors(runs), [[2, 2, 3]])


def test_table_columns_are_aligned():
    table = format_table(("", "a"), [("x", "10"), ("yy", "2")])
    assert table == "     a\nx   10\nyy   2"


# The documentation runs the regression.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "files"),
    [
        (
            "pumps",
            ("divide and conquer, 5 particles", "exact"),
            {"pumps.rd", "pumps-posterior.png", "pumps-evidence.png"},
        ),
        (
            "fhmm",
            ("bootstrap", "network", "analytic", "optimal", "exact"),
            {"fhmm.rd", "fhmm-network.rd", "fhmm.png"},
        ),
    ],
)
def test_demonstration_reports_and_writes_its_files(name, words, files, tmp_path, monkeypatch):
    monkeypatch.setattr("retrodict.demos.pumps.PARTICLES", (5, 50))
    with pytest.warns(UserWarning) if name == "pumps" else nullcontext():
        text = retrodict.demos.run(name, tmp_path, minutes=0.02, progress_bar=False)
    for expected in (*words, str(tmp_path)):
        assert expected in text
    assert {path.name for path in tmp_path.iterdir()} == files
