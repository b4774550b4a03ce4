"""The bootstrap filter of `particles`, for `benchmarks.filtering`, in an environment of its own.

Takes the observations and the model's numbers as JSON; then, for every line with a number of
particles, a threshold and a seed, writes the seconds taken and the log evidence.
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


feynman_kac = models.Bootstrap(ssm=Series(), data=np.asarray(model["y"]))
for line in sys.stdin:
    num, threshold, seed = line.split()
    np.random.seed(int(seed))  # noqa: NPY002 (the generator that `particles` draws from)
    run = particles.SMC(
        fk=feynman_kac, N=int(num), resampling="systematic", ESSrmin=float(threshold)
    )
    begun = time.perf_counter()
    run.run()
    print(time.perf_counter() - begun, run.logLt, flush=True)
