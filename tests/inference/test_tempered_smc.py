"""Tempering where importance sampling fails; what is rescued, and what is said of it."""

from functools import cache

import jax
import numpy as np
import pytest

import retrodict as rd
from exact import ORACLES
from hard import HARD, compiled_hard, wrong_of
from oracles import NOTHING, QUICK, SMALL, compiled, data_of, group, repeated, slow_if
from zoo import key

K = 1000
# of many unknowns, or rare events, the evidence takes more particles to be known well
MANY = {"pumps": 16_000, "schools": 12_000, "alarms": 8_000}
RUNS = 2  # `python -m benchmarks.rescue` makes more of them
LONG = ("pumps", "schools", "alarms", "network", "regression")


def case(name, mark):
    return pytest.param(name, marks=[mark, *slow_if(name in LONG)])


hard = pytest.mark.parametrize(
    "name", [case(name, pytest.mark.xdist_group(f"hard {name}")) for name in HARD]
)


@hard
def test_importance_sampling_fails_and_says_so(name):
    found = compiled_hard(name).infer(key(1), HARD[name].data, K, method="importance", rescue=False)
    assert found.pareto_k > 0.7
    assert found.trust == "poor"
    assert found.diagnostics.rescue is None


@hard
def test_rescue_reaches_the_exact_answer(name):
    """Means and evidence within 4 standard errors, at every one of several seeds."""
    exact = HARD[name].exact()
    good = 0
    for seed in range(RUNS):
        found = compiled_hard(name).infer(key(seed), HARD[name].data, MANY.get(name, 4000))
        assert found.method == "temper"
        assert not wrong_of(found, exact, 4.0)
        if found.trust == "good":
            good += 1
            assert not wrong_of(found, exact, 3.0, 0.1)
    assert good > 0  # else no answer was of any use


@pytest.mark.slow
@pytest.mark.xdist_group("hard regression")
def test_what_a_rescue_says():
    found = compiled_hard("regression").infer(key(1), HARD["regression"].data, K)
    assert found.diagnostics.rescue.planned_method == "importance"
    tempering = found.diagnostics.tempering
    temperatures = np.array(tempering.temperatures)
    assert temperatures[-1] == 1.0
    assert np.all(np.diff(temperatures) > 0)
    assert 0.0 < tempering.acceptance <= 1.0
    assert tempering.seconds > 0
    said = " ".join(found.diagnostics.reasons)
    assert f"{len(temperatures)} temperatures" in said
    assert "Rescued: 'importance', as planned, ended poor." in said
    assert "rescued by tempering" in repr(found)


@pytest.mark.xdist_group("hard two modes")
def test_nobody_is_rescued_against_their_will():
    asked = compiled_hard("two modes"), HARD["two modes"].data
    found = asked[0].infer(key(1), asked[1], K, rescue=False)
    assert found.method != "temper"
    assert found.trust == "poor"
    assert asked[0].infer(key(1), asked[1], 50).trust == "poor"  # too few to be moved


@pytest.mark.slow
@pytest.mark.xdist_group("hard two modes")
def test_poor_answers_among_many_are_rescued():
    """Of three, two are far out; with one rescue allowed, one stays poor, with a warning."""
    model = compiled_hard("two modes")
    exact = HARD["two modes"].exact()
    data = repeated(HARD["two modes"].data, 3)
    data["y"][1] = [2.0, 8.0, 4.0, 1.0]
    found = model.infer_many(key(2), data, K)
    assert len(found) == 3
    for row in (0, 2):
        assert not wrong_of(found[row], exact, 4.0)
        assert found[row].diagnostics.rescue is not None
    with pytest.warns(UserWarning, match="only the first 1 are rescued"):
        some = model.infer_many(key(2), data, K, max_rescues=1)
    assert some[2].trust == "poor"


# A model with time, and a discrete one.
MODELS = ("series", "chain")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=group(name)) for name in MODELS])
def test_networks_that_know_nothing_are_no_obstacle(name):
    data = data_of(name)
    found = compiled(name, NOTHING).infer(key(3), data, K, method="temper")
    assert not wrong_of(found, ORACLES[name].exact(data), 4.0)
    assert found.trust != "poor"


@pytest.mark.parametrize("name", [case(name, group(name)) for name in ("normal", "network")])
def test_evidence_is_unbiased(name):
    """The mean of Ẑ/Z over 100 runs is 1, within 3 standard errors."""
    data = data_of(name)
    exact = ORACLES[name].exact(data).log_evidence
    model = compiled(name, NOTHING)
    ratios = np.exp(
        [
            float(model.infer(k, data, 100, method="temper").log_evidence) - exact
            for k in jax.random.split(key(4), 100)
        ]
    )
    assert abs(ratios.mean() - 1) < 3 * ratios.std() / 10
    assert 0.005 < ratios.std() < 1.0  # neither exact by chance nor useless


def test_too_few_particles_to_learn_from():
    with pytest.raises(ValueError, match="num_particles is 10; tempering needs at least"):
        compiled("normal", NOTHING).infer(key(), data_of("normal"), 10, method="temper")


@cache
def planned():
    """What is known of synthetic data comes from planning, which other tests do without."""
    model, observed, *_ = ORACLES["normal"]
    return rd.compile(key(), model, observed, estimator=SMALL, training=QUICK, progress_bar=False)


@group("normal")
def test_data_unlike_synthetic_ones_are_flagged():
    """By the values that networks see, and by the evidence; few synthetic ones are."""
    model = planned()
    far = model.infer(key(5), {"y": np.full(4, 60.0, "f4")}, K)
    check = far.diagnostics.predictive_check
    assert check.data < 0.01
    assert check.evidence < 0.01
    said = " ".join(far.diagnostics.reasons)
    assert "unlike synthetic data" in said
    assert "less probable under the model" in said
    values = jax.jit(jax.vmap(model.graph.program.simulate))(jax.random.split(key(6), 300))
    many = model.infer_many(key(7), {"y": np.asarray(values["y"])}, 200, rescue=False)
    each = [one.diagnostics.predictive_check for one in many]
    assert np.mean([one.data < 0.01 for one in each]) < 0.05
    assert np.mean([one.evidence < 0.01 for one in each]) < 0.05
    # where they lie is uniform
    assert abs(np.mean([one.data for one in each]) - 0.5) < 0.1
    assert abs(np.mean([one.evidence for one in each]) - 0.5) < 0.15


@group("normal")
def test_what_is_known_of_synthetic_data_is_saved(tmp_path):
    model = planned()
    model.save(tmp_path / "normal.rd")
    loaded = rd.load(tmp_path / "normal.rd", ORACLES["normal"].model)
    data = {"y": np.full(4, 60.0, "f4")}
    asked, again = (m.infer(key(5), data, K).diagnostics.predictive_check for m in (model, loaded))
    assert asked == again
