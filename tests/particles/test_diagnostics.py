"""Whether grades are right, on models whose exact posterior is known."""

import numpy as np
import pytest

from exact import ORACLES
from oracles import PARTICLES, UNTRAINED, compiled, example_datasets, group, method_cases, slow_if
from zoo import key


def is_wrong(posterior, exact):
    """Whether the error of any mean exceeds 3 of its standard errors + 0.1 posterior sd."""
    wrong = np.zeros(len(posterior), bool)
    for site in exact[0].means:
        means, sds = (np.stack([e[part][site] for e in exact]) for part in (1, 2))
        tolerance = 3 * np.asarray(posterior.mcse(site), float) + 0.1 * sds
        errors = np.abs(np.asarray(posterior.mean(site), float) - means)
        wrong |= (errors > tolerance).reshape(len(posterior), -1).any(1)
    return wrong


# SMC resamples the parameters of the pumps before any count has a weight. Few of them survive, and
# no posterior is graded good.
RUNS_WITH_GOOD_GRADES = [run for run in method_cases() if run.values != ("pumps", "smc")]
# Slow: enumeration for many data sets. Another model with time, the series, is tested always.
SLOW = ("chain",)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(*run.values, id=run.id, marks=[*run.marks, *slow_if(run.values[0] in SLOW)])
        for run in RUNS_WITH_GOOD_GRADES
    ],
)
def test_at_most_2_percent_of_good_posteriors_are_wrong(name, method):
    """And the standard error of the log evidence is calibrated."""
    data, exact = example_datasets(name)
    # The chain has six states, and the pumps' rates span orders of magnitude: they need more.
    num = {"chain": 4, "pumps": 10}.get(name, 1) * PARTICLES
    # Two seeds: of a hundred posteriors, two may be wrong by chance.
    posteriors = [compiled(name).infer_many(key(k), data, num, method=method) for k in (14, 17)]
    good = np.concatenate([posterior.grade == 0 for posterior in posteriors])
    assert good.sum() >= 60  # a grade that is never given would be useless
    wrong = np.concatenate([is_wrong(posterior, exact) for posterior in posteriors])
    assert wrong[good].mean() <= 0.02
    log_evidence = np.array([e.log_evidence for e in exact])
    z = np.concatenate([(p.log_evidence - log_evidence) / p.log_evidence_se for p in posteriors])
    # The median of the square of a standard normal is 0.455.
    assert 0.4 < np.median(z[good] ** 2) / 0.455 < 2.5


@group("series")
def test_posteriors_of_untrained_networks_are_graded_poor():
    """With importance sampling of eight steps; a filter corrects itself and is right."""
    data, exact = example_datasets("series")
    untrained = compiled("series", UNTRAINED)
    importance = untrained.infer_many(key(15), data, PARTICLES, method="importance")
    assert is_wrong(importance, exact).mean() > 0.2  # there are errors to detect
    assert np.mean(importance.trust == "poor") > 0.98
    smc = untrained.infer_many(key(16), data, PARTICLES, method="smc")
    assert np.all(smc.trust != "good")
    assert is_wrong(smc, exact).mean() <= 0.02


def test_every_oracle_is_tested():
    assert {run.values[0] for run in method_cases()} == set(ORACLES)
