"""The bootstrap filter of `particles`, for `benchmarks.filtering`, in an environment of its own.

Takes the observations and the model's numbers as JSON: a factorial HMM if there are powers among
them, else a scalar linear-Gaussian model. Then, for every line with a number of particles, a
threshold and a seed, it writes the seconds taken and the log evidence.
"""

import json
import sys
import time

import numpy as np

import particles
from particles import distributions
from particles import state_space_models as models

model = json.loads(sys.argv[1])


class Series(models.StateSpaceModel):
    """The scalar linear-Gaussian model."""

    def PX0(self):  # noqa: N802 (the names that `particles` asks for)
        """The first state."""
        return distributions.Normal(scale=model["spread"])

    def PX(self, t, xp):  # noqa: N802
        """x_t given x_{t−1}."""
        return distributions.Normal(loc=model["drift"] * xp, scale=model["spread"])

    def PY(self, t, xp, x):  # noqa: N802
        """y_t given x_t."""
        return distributions.Normal(loc=x, scale=model["noise"])


class Switches(distributions.ProbDist):
    """Independent devices that are on with given chances."""

    dtype = bool

    def __init__(self, on):
        self.on = on
        self.dim = on.shape[-1]

    def rvs(self, size=None):
        """States of all devices, for `size` particles."""
        return np.random.random(self.shape(size)) < self.on  # noqa: NPY002


class Devices(models.StateSpaceModel):
    """The factorial HMM."""

    def PX0(self):  # noqa: N802
        """The first states."""
        return Switches(np.full(len(model["power"]), model["initial"]))

    def PX(self, t, xp):  # noqa: N802
        """x_t given x_{t−1}."""
        return Switches(np.where(xp, 1 - model["switch"], model["switch"]))

    def PY(self, t, xp, x):  # noqa: N802
        """y_t given x_t."""
        return distributions.Normal(loc=x @ np.asarray(model["power"]), scale=model["noise"])


ssm = Devices() if "power" in model else Series()
feynman_kac = models.Bootstrap(ssm=ssm, data=np.asarray(model["y"]))
for line in sys.stdin:
    num, threshold, seed = line.split()
    np.random.seed(int(seed))  # noqa: NPY002 (the generator that `particles` draws from)
    run = particles.SMC(
        fk=feynman_kac, N=int(num), resampling="systematic", ESSrmin=float(threshold)
    )
    begun = time.perf_counter()
    run.run()
    print(time.perf_counter() - begun, run.logLt, flush=True)
