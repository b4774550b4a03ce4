"""PyMC's sequential Monte Carlo, for `benchmarks.newdata`, in an environment of its own.

Takes a model's name and its data as JSON; then, for every line with a number of draws and a seed,
writes the seconds taken, and for both of its independent chains the means of all scalars, followed
by their standard deviations over both.
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
    """Failures of pumps."""
    alpha = pm.Exponential("alpha", 1.0)
    beta = pm.Gamma("beta", alpha=0.1, beta=1.0)
    theta = pm.Gamma("theta", alpha=alpha, beta=beta, shape=len(y))
    pm.Poisson("y", theta * np.asarray(t), observed=y)


def schools(y, sigma):
    """Effects of coaching, with the scale taken out."""
    mu = pm.Normal("mu", 0.0, 5.0)
    tau = pm.HalfCauchy("tau", 5.0)
    eta = pm.Normal("eta", shape=len(y))
    theta = pm.Deterministic("theta", mu + tau * eta)
    pm.Normal("y", theta, np.asarray(sigma), observed=y)


SITES = {"pumps": ("alpha", "beta", "theta"), "schools": ("mu", "tau", "theta")}
name, data = sys.argv[1], json.loads(sys.argv[2])
for line in sys.stdin:
    draws, seed = map(int, line.split())
    begun = time.perf_counter()
    # a new data set is a new model
    with pm.Model():
        {"pumps": pumps, "schools": schools}[name](**data)
        found = pm.sample_smc(
            draws,
            chains=CHAINS,
            cores=CHAINS,
            random_seed=seed,
            progressbar=False,
            compute_convergence_checks=False,
        )
    seconds = time.perf_counter() - begun
    values = np.concatenate(
        [found.posterior[site].values.reshape(CHAINS, draws, -1) for site in SITES[name]], 2
    )
    print(seconds, *values.mean(1).ravel(), *values.std((0, 1)), flush=True)
