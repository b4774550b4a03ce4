"""The exact solvers of the paper's models, by brute force; and the demonstrations."""

import itertools
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from benchmarks.paper import bound, exact, reference
from scipy import stats
from scipy.special import logsumexp

import retrodict.demos
from exact import PUMPS, pumps_exact
from retrodict.demos.answers import table
from retrodict.demos.fhmm import lineage
from retrodict.inference.methods import Inference
from retrodict.inference.planning import Plan
from retrodict.inference.samplers import first_choice

SMALL = exact.FactorialHMM(np.array([10.0, 30.0, 40.0]), sd=15.0, initial=0.2, switch=0.1)
STATES = np.array(list(itertools.product((0, 1), repeat=3)))


def log_likelihood(y):
    return stats.norm.logpdf(y, STATES @ SMALL.power, SMALL.sd)


def test_the_forward_algorithm_sums_over_all_paths():
    y = [35.0, 5.0, 62.0]
    paths = []
    for path in itertools.product(range(8), repeat=3):
        first = STATES[path[0]]
        total = np.log(np.where(first == 1, 0.2, 0.8)).sum()
        for a, b in itertools.pairwise(path):
            total += np.log(np.where(STATES[a] == STATES[b], 0.9, 0.1)).sum()
        paths.append(total + sum(log_likelihood(v)[s] for v, s in zip(y, path, strict=True)))
    np.testing.assert_allclose(SMALL.log_evidence(np.array(y)), logsumexp(paths), rtol=1e-10)


def test_the_optimal_proposal_draws_from_the_conditional():
    on = np.array([0.7, 0.4, 0.3])
    joint = np.log(np.where(STATES == 1, on, 1 - on)).sum(1) + log_likelihood(38.0)
    x, log_predictive = SMALL.optimal(np.random.default_rng(0), np.tile(on, (20_000, 1)), 38.0)
    np.testing.assert_allclose(log_predictive, logsumexp(joint), rtol=1e-10)
    chance = np.exp(joint - logsumexp(joint))
    seen = np.bincount(x @ [4, 2, 1], minlength=8)
    assert chance.min() * 20_000 > 5
    assert stats.chisquare(seen, 20_000 * chance).pvalue > 1e-3


def test_the_bound_estimates_the_evidence():
    y = np.array([35.0, 5.0, 62.0, 80.0])
    rng = np.random.default_rng(1)
    runs = [bound.run(rng, SMALL, y, 50) for _ in range(200)]
    ratio = np.exp([run.log_evidence - SMALL.log_evidence(y) for run in runs])
    assert abs(ratio.mean() - 1) < 3 * ratio.std() / np.sqrt(200)
    assert all(run.ancestors.shape == (3, 50) and run.ess.shape == (4,) for run in runs)


def test_regression_by_quadrature_is_what_sampling_finds():
    rng = np.random.default_rng(3)
    z = rng.uniform(-10, 10, 10)
    t = 4 + 0.5 * z - 0.1 * z**2 + rng.standard_t(4, 10)
    found = exact.regression(z, t, points=81)
    finer = exact.regression(z, t, points=121, reach=11.0)
    assert abs(found.log_evidence - finer.log_evidence) < 2e-3
    np.testing.assert_allclose(found.mean, finer.mean, atol=2e-3 * finer.sd.max())
    # Importance sampling from a wide t around the answer.
    w = found.mean + 1.5 * found.sd * rng.standard_t(5, (400_000, 3))
    log_q = (stats.t.logpdf((w - found.mean) / (1.5 * found.sd), 5) - np.log(1.5 * found.sd)).sum(1)
    log_w = exact._log_joint_regression(w, z, t) - log_q
    weight = np.exp(log_w - logsumexp(log_w))
    size = 1 / np.sum(weight**2)
    assert abs(logsumexp(log_w) - np.log(len(w)) - found.log_evidence) < 4 / np.sqrt(size)
    assert np.all(np.abs(weight @ w - found.mean) < 4 * found.sd / np.sqrt(size))


def test_pumps_by_quadrature_agrees_with_the_published_figures():
    found = exact.pumps(np.array(reference.TIMES), np.array(reference.FAILURES), points=400)
    assert found.log_evidence == pytest.approx(-36.5777, abs=2e-4)
    np.testing.assert_allclose(found.mean, [0.6972, 0.9268], atol=2e-4)
    np.testing.assert_allclose(found.sd, [0.2708, 0.5428], atol=2e-4)
    means, sds = exact.rates(np.array(reference.TIMES), np.array(reference.FAILURES), points=400)
    simpson = pumps_exact(PUMPS)
    np.testing.assert_allclose(means, simpson.means["theta"], rtol=1e-3)
    np.testing.assert_allclose(sds, simpson.sds["theta"], rtol=1e-3)


def test_the_packaged_answers_are_those_of_the_solvers():
    path = Path(retrodict.demos.__file__).with_name("reference.json")
    kept = json.loads(path.read_text(encoding="utf-8"))
    rng = np.random.default_rng(2016)
    for name, value in reference.pumps().items():
        np.testing.assert_allclose(kept["pumps"][name], value, rtol=1e-6)
    for one in kept["regression"]["sets"]:
        made = reference.curves(rng)
        assert one["z"] == made["z"] and one["t"] == made["t"]
        np.testing.assert_allclose(one["mean"], made["mean"], rtol=1e-5)
        assert one["log_evidence"] == pytest.approx(made["log_evidence"], rel=1e-6)
    assert kept["fhmm"]["y"] == reference.series(rng).tolist()


def test_lineages_are_followed_back():
    found = lineage(np.array([[0, 0, 2], [1, 1, 2]]))
    np.testing.assert_array_equal(found, [[0, 0, 2], [1, 1, 2], [0, 1, 2]])


def test_tables_line_up():
    assert table(("", "a"), [("x", "10"), ("yy", "2")]) == "     a\n--  --\nx   10\nyy   2"


# The regression is in the documentation, whose blocks are run as well.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pumps", "fhmm"])
def test_demonstrations_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(Inference, "plan", lambda self, *_: Plan(first_choice(self.proposal)))
    if name == "pumps":
        monkeypatch.setattr("retrodict.demos.pumps.PARTICLES", (5, 50))
        monkeypatch.setattr("retrodict.demos.pumps.DIVIDED", (5,))
    with pytest.warns(UserWarning) if name == "pumps" else nullcontext():
        text = retrodict.demos.run(name, tmp_path, minutes=0.02, progress_bar=False)
    assert "exact" in text and str(tmp_path) in text
    assert (tmp_path / f"{name}.rd").exists()
    assert len(list(tmp_path.glob("*.png"))) == (2 if name == "pumps" else 1)
