"""The bootstrap filter of `particles`, for `benchmarks.filtering`.

Runs in its own environment. The argument is a JSON object with the observations and the model's
parameters: a factorial HMM if it has `power`, else a scalar linear-Gaussian model. For every input
line with a number of particles, a threshold and a seed, it prints seconds and log evidence.
"""

import json
import sys
import time

import numpy as np

import particles
from particles import distributions
from particles import state_space_models as models

model = json.loads(sys.argv[1])


class LinearGaussian(models.StateSpaceModel):
    """The scalar linear-Gaussian model."""

    def PX0(self):  # noqa: N802 (method names prescribed by `particles`)
        """Distribution of x_0."""
        return distributions.Normal(scale=model["spread"])

    def PX(self, t, xp):  # noqa: N802
        """Distribution of x_t given x_{t−1}."""
        return distributions.Normal(loc=model["drift"] * xp, scale=model["spread"])

    def PY(self, t, xp, x):  # noqa: N802
        """Distribution of y_t given x_t."""
        return distributions.Normal(loc=x, scale=model["noise"])


class IndependentBernoulli(distributions.ProbDist):
    """Independent Bernoulli variables."""

    dtype = bool

    def __init__(self, chance_on):
        self.chance_on = chance_on
        self.dim = chance_on.shape[-1]

    def rvs(self, size=None):
        """Sample for `size` particles."""
        return np.random.random(self.shape(size)) < self.chance_on  # noqa: NPY002


class FactorialHMM(models.StateSpaceModel):
    """The factorial HMM."""

    def PX0(self):  # noqa: N802
        """Distribution of x_0."""
        return IndependentBernoulli(np.full(len(model["power"]), model["initial"]))

    def PX(self, t, xp):  # noqa: N802
        """Distribution of x_t given x_{t−1}."""
        return IndependentBernoulli(np.where(xp, 1 - model["switch"], model["switch"]))

    def PY(self, t, xp, x):  # noqa: N802
        """Distribution of y_t given x_t."""
        return distributions.Normal(loc=x @ np.asarray(model["power"]), scale=model["noise"])


ssm = FactorialHMM() if "power" in model else LinearGaussian()
feynman_kac = models.Bootstrap(ssm=ssm, data=np.asarray(model["y"]))
for line in sys.stdin:
    num_particles, threshold, seed = line.split()
    np.random.seed(int(seed))  # noqa: NPY002 (`particles` uses the global generator)
    smc = particles.SMC(
        fk=feynman_kac, N=int(num_particles), resampling="systematic", ESSrmin=float(threshold)
    )
    start_time = time.perf_counter()
    smc.run()
    print(time.perf_counter() - start_time, smc.logLt, flush=True)
