"""The exact solvers of the paper's models, against brute force and sampling."""

import itertools

import numpy as np
import pytest
from benchmarks.paper import exact, reference
from benchmarks.paper.optimal_filter import run_filter
from scipy import stats
from scipy.special import logsumexp

from exact import PUMPS, pumps_exact

SMALL = exact.FactorialHMM(np.array([10.0, 30.0, 40.0]), sd=15.0, initial=0.2, switch=0.1)
STATES = np.array(list(itertools.product((0, 1), repeat=3)))


def log_likelihood(y):
    return stats.norm.logpdf(y, STATES @ SMALL.power, SMALL.sd)


def test_forward_algorithm_matches_sum_over_all_paths():
    y = [35.0, 5.0, 62.0]
    log_joints = []
    for path in itertools.product(range(8), repeat=3):
        log_joint = np.log(np.where(STATES[path[0]] == 1, 0.2, 0.8)).sum()
        for a, b in itertools.pairwise(path):
            log_joint += np.log(np.where(STATES[a] == STATES[b], 0.9, 0.1)).sum()
        log_joint += sum(log_likelihood(y_t)[state] for y_t, state in zip(y, path, strict=True))
        log_joints.append(log_joint)
    np.testing.assert_allclose(SMALL.log_evidence(np.array(y)), logsumexp(log_joints), rtol=1e-10)


def test_optimal_proposal_samples_the_conditional():
    num_samples = 20_000
    chance_on = np.array([0.7, 0.4, 0.3])
    joint = np.log(np.where(STATES == 1, chance_on, 1 - chance_on)).sum(1) + log_likelihood(38.0)
    x, log_predictive = SMALL.sample_optimal(
        np.random.default_rng(0), np.tile(chance_on, (num_samples, 1)), 38.0
    )
    np.testing.assert_allclose(log_predictive, logsumexp(joint), rtol=1e-10)
    expected = num_samples * np.exp(joint - logsumexp(joint))
    counts = np.bincount(x @ [4, 2, 1], minlength=8)
    assert expected.min() > 5
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_optimal_filter_estimates_the_evidence_without_bias():
    y = np.array([35.0, 5.0, 62.0, 80.0])
    rng = np.random.default_rng(1)
    runs = [run_filter(rng, SMALL, y, 50) for _ in range(200)]
    ratio = np.exp([run.log_evidence - SMALL.log_evidence(y) for run in runs])
    assert ratio.std() < 0.5
    assert abs(ratio.mean() - 1) < 3 * ratio.std() / np.sqrt(200)
    assert all(run.ancestors.shape == (3, 50) and run.ess.shape == (4,) for run in runs)


def test_regression_quadrature_matches_a_finer_grid_and_importance_sampling():
    rng = np.random.default_rng(3)
    z = rng.uniform(-10, 10, 10)
    t = 4 + 0.5 * z - 0.1 * z**2 + rng.standard_t(4, 10)
    posterior = exact.regression(z, t, num_points=81)
    finer = exact.regression(z, t, num_points=121, half_width=11.0)
    assert abs(posterior.log_evidence - finer.log_evidence) < 2e-3
    np.testing.assert_allclose(posterior.mean, finer.mean, atol=2e-3 * finer.sd.max())
    # Importance sampling from a wide Student t around the posterior mean.
    scale = 1.5 * posterior.sd
    w = posterior.mean + scale * rng.standard_t(5, (400_000, 3))
    log_q = (stats.t.logpdf((w - posterior.mean) / scale, 5) - np.log(scale)).sum(1)
    log_weights = exact.regression_log_joint(w, z, t) - log_q
    weights = np.exp(log_weights - logsumexp(log_weights))
    ess = 1 / np.sum(weights**2)
    log_evidence = logsumexp(log_weights) - np.log(len(w))
    assert abs(log_evidence - posterior.log_evidence) < 4 / np.sqrt(ess)
    assert np.all(np.abs(weights @ w - posterior.mean) < 4 * posterior.sd / np.sqrt(ess))


def test_pumps_quadrature_matches_published_values_and_another_quadrature():
    t, y = np.array(reference.TIMES), np.array(reference.FAILURES)
    posterior = exact.pumps(t, y, num_points=400)
    assert posterior.log_evidence == pytest.approx(-36.5777, abs=2e-4)
    np.testing.assert_allclose(posterior.mean, [0.6972, 0.9268], atol=2e-4)
    np.testing.assert_allclose(posterior.sd, [0.2708, 0.5428], atol=2e-4)
    means, sds = exact.pump_rates(t, y, num_points=400)
    simpson = pumps_exact(PUMPS)
    np.testing.assert_allclose(means, simpson.means["theta"], rtol=1e-3)
    np.testing.assert_allclose(sds, simpson.sds["theta"], rtol=1e-3)
