"""PyMC's sequential Monte Carlo, for `benchmarks.newdata`.

Runs in its own environment. The arguments are a model's name and its data as JSON. For every input
line with a number of draws and a seed, it prints the seconds, the means of all scalars for both
independent chains, and their standard deviations over both.
"""

import json
import logging
import sys
import time
import warnings

import numpy as np
import pymc as pm

warnings.simplefilter("ignore")
logging.getLogger("pymc").setLevel(logging.ERROR)
CHAINS = 2


def pumps(t, y):
    """The pumps model."""
    alpha = pm.Exponential("alpha", 1.0)
    beta = pm.Gamma("beta", alpha=0.1, beta=1.0)
    theta = pm.Gamma("theta", alpha=alpha, beta=beta, shape=len(y))
    pm.Poisson("y", theta * np.asarray(t), observed=y)


def schools(y, sigma):
    """The eight schools model, non-centred."""
    mu = pm.Normal("mu", 0.0, 5.0)
    tau = pm.HalfCauchy("tau", 5.0)
    eta = pm.Normal("eta", shape=len(y))
    theta = pm.Deterministic("theta", mu + tau * eta)
    pm.Normal("y", theta, np.asarray(sigma), observed=y)


SITES = {"pumps": ("alpha", "beta", "theta"), "schools": ("mu", "tau", "theta")}
name, data = sys.argv[1], json.loads(sys.argv[2])
for line in sys.stdin:
    draws, seed = map(int, line.split())
    start_time = time.perf_counter()
    # A new data set requires a new model.
    with pm.Model():
        {"pumps": pumps, "schools": schools}[name](**data)
        trace = pm.sample_smc(
            draws,
            chains=CHAINS,
            cores=CHAINS,
            random_seed=seed,
            progressbar=False,
            compute_convergence_checks=False,
        )
    seconds = time.perf_counter() - start_time
    values = np.concatenate(
        [trace.posterior[site].values.reshape(CHAINS, draws, -1) for site in SITES[name]], 2
    )
    print(seconds, *values.mean(1).ravel(), *values.std((0, 1)), flush=True)
