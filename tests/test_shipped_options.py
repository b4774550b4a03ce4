"""The shipped compiler options and the real plan, end to end, against exact answers.

The other tests run with compiler flags that suit many small programs, and most of them leave out
planning (`tests/conftest.py`). Here, one model for each inference method runs in a process that has
neither: this file, run as a script with the method's name.
"""

import os
import subprocess
import sys
from contextlib import contextmanager

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import integrate, stats

import retrodict as rd
from exact import Exact, gaussian, kalman, series, series_exact
from hard import discrepancies
from retrodict._xla.tuning import FAST_COMPILE, LOW_LATENCY, NO_YNNPACK
from zoo import key

NETWORK = rd.MADE(hidden=(8,), components=2, context=(8,))
TRAINING = rd.Training(max_steps=100, batch_size=128, dataset_size=2048, heldout_size=512)


def compile_(model, inverse, **model_kwargs):
    return rd.compile(
        key(),
        model,
        ["y"],
        inverse=inverse,
        model_kwargs=model_kwargs,
        estimator=NETWORK,
        training=TRAINING,
        progress_bar=False,
    )


def simulated(compiled, number):
    values = jax.jit(jax.vmap(compiled.graph.program.simulate))(jax.random.split(key(1), number))
    return np.asarray(values["y"])


def check_infer(compiled, exact, num_particles, max_se):
    """One data set by the planned method: evidence and means agree with the exact answer."""
    (y,) = simulated(compiled, 1)
    posterior = compiled.infer(key(2), {"y": y}, num_particles, rescue=False)
    assert posterior.method == compiled.plan.method
    assert posterior.diagnostics.predictive_check is not None
    assert posterior.log_evidence_se < max_se
    assert not discrepancies(posterior, exact(y), 4.0)


def check_infer_many(compiled, exact, num_particles, max_se):
    """Eight data sets: each evidence and each mean agrees with the exact answer."""
    ys = simulated(compiled, 8)
    batch = compiled.infer_many(key(3), {"y": ys}, num_particles, rescue=False)
    assert np.median(batch.log_evidence_se) < max_se
    wrong = [discrepancies(batch[number], exact(y), 5.0) for number, y in enumerate(ys)]
    assert not any(wrong), wrong


def square():
    """The sign of x is not observed; y far above its prior range leaves two narrow modes."""
    x = numpyro.sample("x", dist.Normal(0.5, 1.0))
    with numpyro.plate("n", 4):
        numpyro.sample("y", dist.Normal(x**2, 0.5))


def square_exact(y):
    grid = np.linspace(-8, 8, 200_001)
    log_joint = stats.norm.logpdf(grid, 0.5, 1.0)
    log_joint = log_joint + sum(stats.norm.logpdf(value, grid**2, 0.5) for value in y)
    joint = np.exp(log_joint - log_joint.max())
    total, first, second = (integrate.simpson(joint * grid**power, x=grid) for power in range(3))
    mean = first / total
    sd = np.sqrt(second / total - mean**2)
    return Exact(np.log(total) + log_joint.max(), {"x": mean}, {"x": sd})


def check_importance():
    compiled = compile_(square, "auto")
    assert compiled.plan.method == "importance"
    assert compiled.plan.reference is not None
    check_infer(compiled, square_exact, 2000, 0.1)
    check_infer(compiled, square_exact, 100, 0.4)  # few particles have other compiler options
    check_infer_many(compiled, square_exact, 1000, 0.1)
    far = np.array([30.1, 29.95, 30.02, 30.3], "f4")
    rescued = compiled.infer(key(4), {"y": far}, 2000)
    assert rescued.diagnostics.rescue.planned_method == "importance"
    assert rescued.method == "temper"
    assert not discrepancies(rescued, square_exact(far), 4.0)


def check_smc():
    compiled = compile_(series, "filter", steps=30)
    assert compiled.plan.method == "smc"
    assert compiled.plan.ess["smc"] > 4 * compiled.plan.ess["importance"]
    check_infer(compiled, series_exact, 4000, 0.25)
    check_infer_many(compiled, series_exact, 1000, 0.4)
    (y,) = simulated(compiled, 1)
    state, num_resamplings = compiled.filter_init(key(5), 4000), 0
    for step, value in enumerate(y):
        state, info = compiled.filter_step(key(100 + step), state, {"y": value})
        num_resamplings += int(info.resampled)
    assert 1 <= num_resamplings < len(y)
    log_evidence, means, variances = kalman(y)
    assert abs(float(state.log_evidence) - log_evidence) < 0.6
    mean = np.average(state.samples["x"], weights=np.exp(state.log_weights))
    assert abs(mean - means[-1]) < 0.15 * np.sqrt(variances[-1])


def pairs(n=6):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", n):
        z = numpyro.sample("z", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(z, 0.5))


def pairs_exact(y):
    cov_z = 1.0 + np.eye(len(y))
    sites = {"mu": (0.0, 1.0, np.ones(len(y))), "z": (0.0, 2.0, cov_z)}
    return gaussian(y, np.zeros(len(y)), cov_z + 0.25 * np.eye(len(y)), sites)


def check_divide():
    compiled = compile_(pairs, "blanket")
    assert compiled.plan.method == "divide"
    assert set(compiled.plan.ess) == {"importance", "smc", "divide"}
    assert compiled.plan.ess["divide"] > 1.5 * compiled.plan.ess["importance"]
    check_infer(compiled, pairs_exact, 2000, 0.2)
    check_infer_many(compiled, pairs_exact, 1000, 0.3)


CHECKS = {"importance": check_importance, "smc": check_smc, "divide": check_divide}


@pytest.mark.parametrize("method", CHECKS)
def test_every_method_is_exact_with_the_shipped_options(method):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, "-W", "error::UserWarning", __file__, method]
    process = subprocess.run(command, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "passed\n"


@contextmanager
def recorded_options():
    """The compiler options of every program that is compiled inside."""
    options, jit = [], jax.jit

    def recording_jit(*args, **kwargs):
        options.append(kwargs.get("compiler_options"))
        return jit(*args, **kwargs)

    jax.jit = recording_jit
    yield options
    jax.jit = jit


if __name__ == "__main__":
    assert "XLA_FLAGS" not in os.environ
    assert len(FAST_COMPILE) == 3  # not cleared, as in tests/conftest.py
    with recorded_options() as used:
        CHECKS[sys.argv[1]]()
    for shipped in (FAST_COMPILE, NO_YNNPACK, LOW_LATENCY):
        assert shipped in used, f"no program was compiled with {shipped}"
    print("passed")  # noqa: T201
