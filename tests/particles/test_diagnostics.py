"""Whether the verdict on an answer is to be believed, where the exact answer is known."""

import numpy as np
import pytest

from exact import ORACLES
from oracles import NOTHING, PARTICLES, compiled, group, many_data_of, runs, slow_if
from zoo import key


def off(answers, exact):
    """Whether any mean is off by more than 3 of its own standard errors + 0.1 posterior sd."""
    wrong = np.zeros(len(answers), bool)
    for site in exact[0].means:
        means, sds = (np.stack([e[part][site] for e in exact]) for part in (1, 2))
        allowed = 3 * np.asarray(answers.mcse(site), float) + 0.1 * sds
        beyond = np.abs(np.asarray(answers.mean(site), float) - means) > allowed
        wrong |= beyond.reshape(len(answers), -1).any(1)
    return wrong


# Resampling the pumps' parameters before any count is weighed leaves few, and no answer is called
# good: there is nothing to be checked.
CALLED_GOOD = [run for run in runs() if run.values != ("pumps", "smc")]
# Exact answers of many data sets take long, and a series is another model with time.
LONG = ("chain",)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(*run.values, id=run.id, marks=[*run.marks, *slow_if(run.values[0] in LONG)])
        for run in CALLED_GOOD
    ],
)
def test_good_answers_are_right(name, method):
    """At most 2 % of them are off, and the evidence's error is what it says."""
    data, exact = many_data_of(name)
    # of a chain of six states, and of many orders of magnitude, so few know too little
    num = {"chain": 4, "pumps": 10}.get(name, 1) * PARTICLES
    # twice over, for of a hundred answers two may be off by chance
    both = [compiled(name).infer_many(key(k), data, num, method=method) for k in (14, 17)]
    good = np.concatenate([answers.grade == 0 for answers in both])
    assert good.sum() >= 60  # a verdict that calls nothing good is no use
    assert np.concatenate([off(answers, exact) for answers in both])[good].mean() <= 0.02
    known = np.array([e.log_evidence for e in exact])
    z = np.concatenate([(a.log_evidence - known) / a.log_evidence_se for a in both])
    # the median of squares of standard normals is 0.455
    assert 0.4 < np.median(z[good] ** 2) / 0.455 < 2.5


@group("series")
def test_networks_that_have_learned_nothing_are_found_out():
    """Importance sampling of eight steps is poor; a filter, which can correct itself, is not."""
    data, exact = many_data_of("series")
    untrained = compiled("series", NOTHING)
    answers = untrained.infer_many(key(15), data, PARTICLES, method="importance")
    assert off(answers, exact).mean() > 0.2  # there is something to be found out
    assert np.mean(answers.trust == "poor") > 0.98
    filtered = untrained.infer_many(key(16), data, PARTICLES, method="smc")
    assert np.all(filtered.trust != "good")
    assert off(filtered, exact).mean() <= 0.02


def test_every_oracle_is_among_them():
    assert {run.values[0] for run in runs()} == set(ORACLES)
