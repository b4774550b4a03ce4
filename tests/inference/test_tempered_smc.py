"""Tempering of posteriors for which importance sampling fails, and what is reported of it."""

from functools import cache

import jax
import numpy as np
import pytest

import retrodict as rd
from exact import ORACLES
from hard import HARD, MODES, compiled_hard, discrepancies
from oracles import QUICK, SMALL, UNTRAINED, compiled, example_data, group, repeat_data, slow_if
from retrodict.inference.mcmc_kernels import Tuning
from retrodict.inference.samplers import Settings
from retrodict.inference.tempered_smc import (
    PathStage,
    TemperingRun,
    TemperingStageInfo,
    TemperingState,
)
from retrodict.inference.tempering_driver import divided_path
from zoo import key

K = 1000
# The evidence of models with many unknowns or rare events takes more particles.
NUM_PARTICLES = {"pumps": 16_000, "schools": 12_000, "alarms": 8_000}
NUM_SEEDS = 2  # `python -m benchmarks.rescue` has more of them
LONG = ("pumps", "schools", "alarms", "network", "regression", "coefficients", "series")


def case(name, mark):
    return pytest.param(name, marks=[mark, *slow_if(name in LONG)])


hard = pytest.mark.parametrize(
    "name", [case(name, pytest.mark.xdist_group(f"hard {name}")) for name in HARD]
)


@hard
def test_importance_sampling_of_hard_posteriors_is_graded_poor(name):
    posterior = compiled_hard(name).infer(
        key(1), HARD[name].data, K, method="importance", rescue=False
    )
    assert posterior.pareto_k > 0.7
    assert posterior.trust == "poor"
    assert posterior.diagnostics.rescue is None


@hard
def test_tempering_gives_the_exact_posterior(name):
    """Means and evidence within 4 standard errors, at every one of several seeds."""
    exact = HARD[name].exact()
    good = 0
    for seed in range(NUM_SEEDS):
        posterior = compiled_hard(name).infer(
            key(seed), HARD[name].data, NUM_PARTICLES.get(name, 4000)
        )
        assert posterior.method == "temper"
        assert not discrepancies(posterior, exact, 4.0)
        if posterior.trust == "good":
            good += 1
            assert not discrepancies(posterior, exact, 3.0, 0.1)
    assert good > 0  # otherwise all posteriors were useless


@pytest.mark.slow
@pytest.mark.xdist_group("hard regression")
def test_the_report_of_a_rescue():
    posterior = compiled_hard("regression").infer(key(1), HARD["regression"].data, K)
    assert posterior.diagnostics.rescue.planned_method == "importance"
    tempering = posterior.diagnostics.tempering
    temperatures = np.array(tempering.temperatures)
    assert temperatures[-1] == 1.0
    assert np.all(np.diff(temperatures) > 0)
    assert 0.0 < tempering.acceptance <= 1.0
    assert tempering.seconds > 0
    reasons = " ".join(posterior.diagnostics.reasons)
    assert f"{len(temperatures)} temperatures" in reasons
    assert "Rescued: the planned method 'importance' gave a poor posterior." in reasons
    assert "rescued by tempering" in repr(posterior)


@pytest.mark.xdist_group("hard two modes")
def test_no_rescue_on_request_or_with_few_particles():
    model, data = compiled_hard("two modes"), HARD["two modes"].data
    posterior = model.infer(key(1), data, K, rescue=False)
    assert posterior.method != "temper"
    assert posterior.trust == "poor"
    assert model.infer(key(1), data, 50).trust == "poor"  # too few to adapt moves to


@pytest.mark.xdist_group("hard two modes")
def test_poor_posteriors_among_many_are_rescued():
    """Data sets for which there is no time stay poor and say so."""
    model = compiled_hard("two modes")
    exact = HARD["two modes"].exact()
    data = repeat_data(HARD["two modes"].data, 6)
    data["y"][1] = [2.0, 8.0, 4.0, 1.0]
    posterior = model.infer_many(key(2), data, 4 * K, progress_bar=False)
    assert len(posterior) == 6
    for row in (0, 2, 3, 4, 5):
        assert not discrepancies(posterior[row], exact, 4.0)
        assert posterior[row].diagnostics.rescue is not None
    with pytest.warns(UserWarning, match="6 of 6 posteriors are poor, and 6 of these were not"):
        late = model.infer_many(key(2), data, K, progress_bar=False, max_rescue_seconds=0.0)
    assert late[2].trust == "poor"
    assert late[2].diagnostics.rescue is None
    reasons = " ".join(late[2].diagnostics.reasons)
    assert "Not rescued by tempering: the 0 s of max_rescue_seconds are over." in reasons


def temper(number_of_rows, rows):
    """Log evidence and samples of "two modes" with data that differ between rows."""
    model, settings = compiled_hard("two modes"), Settings(200, "temper", "systematic", 0.5)
    shift = np.arange(number_of_rows, dtype="f4")[:, None]
    data = {"y": MODES["y"] + shift}
    keys = jax.random.split(key(8), number_of_rows)
    return model._inference.temper(model.networks, keys, data, settings, rows, 2**28)


@pytest.mark.xdist_group("hard two modes")
def test_a_data_set_does_not_depend_on_others_in_its_batch():
    together, alone = temper(7, range(7)), temper(7, [5])
    assert sorted(together) == list(range(7))
    one, other = together[5], alone[5]
    assert abs(float(one.log_evidence - other.log_evidence)) < 1e-3
    np.testing.assert_allclose(one.samples["x"], other.samples["x"], rtol=1e-3)
    assert not np.allclose(one.samples["x"], together[4].samples["x"], rtol=1e-2)


@pytest.mark.xdist_group("hard two modes")
def test_a_new_number_of_data_sets_compiles_no_program(caplog):
    def programs(rows):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
            temper(7, rows)
        return sum("Finished XLA compilation" in record.message for record in caplog.records)

    jax.clear_caches()
    assert programs(range(7)) > 0
    assert programs(range(5)) == 0
    assert programs(range(6)) == 0


# A model with time, and a discrete one.
MODELS = ("series", "chain")


@pytest.mark.parametrize("name", [case(name, group(name)) for name in MODELS])
def test_tempering_works_with_untrained_networks(name):
    data = example_data(name)
    posterior = compiled(name, UNTRAINED).infer(key(3), data, K, method="temper")
    assert not discrepancies(posterior, ORACLES[name].exact(data), 4.0)
    assert posterior.trust != "poor"


@pytest.mark.parametrize("name", [case(name, group(name)) for name in ("normal", "network")])
def test_evidence_is_unbiased(name):
    """The mean of Ẑ/Z over 100 runs is 1, within 3 standard errors."""
    data = example_data(name)
    exact = ORACLES[name].exact(data).log_evidence
    model = compiled(name, UNTRAINED)
    ratios = np.exp(
        [
            float(model.infer(k, data, 100, method="temper").log_evidence) - exact
            for k in jax.random.split(key(4), 100)
        ]
    )
    error = ratios.std(ddof=1) / np.sqrt(len(ratios))
    assert 0.0005 < error < 0.02  # neither exact by chance nor useless
    assert abs(ratios.mean() - 1) < 3 * error


@pytest.mark.slow
@pytest.mark.xdist_group("hard coefficients")
def test_evidence_of_a_narrow_posterior():
    """Posterior sd 10⁻⁴ of the prior sd: unbiased, with an error that is known."""
    model, data = compiled_hard("coefficients"), HARD["coefficients"].data
    exact = HARD["coefficients"].exact().log_evidence
    runs = [model.infer(k, data, 4000, method="temper") for k in jax.random.split(key(5), 100)]
    off = np.array([float(run.log_evidence) for run in runs]) - exact
    claimed = np.array([float(run.log_evidence_se) for run in runs])
    ratios = np.exp(off)
    assert abs(ratios.mean() - 1) < 3 * ratios.std(ddof=1) / np.sqrt(len(ratios))
    assert np.sum(np.abs(off) <= 4 * claimed) >= 99
    assert claimed.max() <= 0.2
    # The claimed error is neither far too small nor far too large.
    assert 0.5 < np.sqrt(np.mean((off / claimed) ** 2)) < 1.25


@pytest.mark.parametrize(("variance", "parts"), [(0.01, 1), (0.06, 3), (10.0, 5)])
def test_a_path_is_divided_where_the_error_would_be_large(variance, parts):
    temperatures, sweeps = np.array([1e-4, 1e-2, 1.0], "f4"), [2, 6, 9]
    tuning = Tuning(np.eye(2), np.ones(2), np.ones(1))
    stages = [PathStage(*stage, tuning) for stage in zip(temperatures, sweeps, strict=True)]
    state = TemperingState(None, temperatures[-1], None, np.full(8, variance), None, tuning, False)
    path = divided_path(
        TemperingRun(state, tuple(TemperingStageInfo(s, None, None) for s in stages))
    )
    lam = np.array([stage.lam for stage in path])
    assert len(path) == 1 + 2 * parts
    assert np.all(lam[::parts] == temperatures)
    np.testing.assert_allclose(lam[1:] / lam[:-1], 100 ** (1 / parts), rtol=1e-4)
    middle, last = -(-6 // parts), -(-9 // parts)
    expected = [2, *[middle] * parts, *[last] * (parts - 1), 9]
    assert [int(stage.num_sweeps) for stage in path] == expected


def test_tempering_with_too_few_particles_is_an_error():
    with pytest.raises(ValueError, match="num_particles is 10; tempering needs at least"):
        compiled("normal", UNTRAINED).infer(key(), example_data("normal"), 10, method="temper")


@cache
def planned():
    """A model with a reference of synthetic data sets, which planning makes."""
    model, observed, *_ = ORACLES["normal"]
    return rd.compile(key(), model, observed, estimator=SMALL, training=QUICK, progress_bar=False)


@group("normal")
def test_data_unlike_synthetic_data_are_reported():
    """By the values that networks read and by the evidence; few synthetic data sets are."""
    model = planned()
    far = model.infer(key(5), {"y": np.full(4, 60.0, "f4")}, K)
    check = far.diagnostics.predictive_check
    assert check.data < 0.01
    assert check.evidence < 0.01
    reasons = " ".join(far.diagnostics.reasons)
    assert "unlike synthetic data" in reasons
    assert "less probable under the model" in reasons
    values = jax.jit(jax.vmap(model.graph.program.simulate))(jax.random.split(key(6), 300))
    many = model.infer_many(key(7), {"y": np.asarray(values["y"])}, 200, rescue=False)
    checks = [posterior.diagnostics.predictive_check for posterior in many]
    assert np.mean([check.data < 0.01 for check in checks]) < 0.05
    assert np.mean([check.evidence < 0.01 for check in checks]) < 0.05
    # Their shares are uniform.
    assert abs(np.mean([check.data for check in checks]) - 0.5) < 0.1
    assert abs(np.mean([check.evidence for check in checks]) - 0.5) < 0.15


@group("normal")
def test_the_reference_of_synthetic_data_is_saved(tmp_path):
    model = planned()
    model.save(tmp_path / "normal.rd")
    loaded = rd.load(tmp_path / "normal.rd", ORACLES["normal"].model)
    data = {"y": np.full(4, 60.0, "f4")}
    checks = [m.infer(key(5), data, K).diagnostics.predictive_check for m in (model, loaded)]
    assert checks[0] == checks[1]
