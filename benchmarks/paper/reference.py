"""Write the demonstrations' data and exact answers: `python -m benchmarks.paper.reference`."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper import exact, optimal_filter
from retrodict import demos
from retrodict.demos.fhmm import PARTICLES, RUNS
from retrodict.demos.models import POWER

# The ten pumps of George, Makov & Smith (1993), table 3: thousands of hours, and failures.
TIMES = [94.3, 15.7, 62.9, 126, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5]
FAILURES = [5, 1, 5, 14, 3, 19, 1, 1, 4, 22]


def pumps() -> dict[str, Any]:
    """Data of the ten pumps and the exact posterior of alpha and beta."""
    posterior = exact.pumps(np.array(TIMES), np.array(FAILURES))
    return {"t": TIMES, "y": FAILURES, **_to_json(posterior)}


def simulate_regression(rng: np.random.Generator) -> dict[str, Any]:
    """Simulate a data set of ten points, and solve it."""
    w = rng.laplace(scale=10.0 ** (1 - np.arange(3)))
    z = np.round(rng.uniform(-10, 10, 10), 3)
    t = np.round(w[0] + w[1] * z + w[2] * z**2 + rng.standard_t(4, 10), 3)
    return {"z": z.tolist(), "t": t.tolist(), **_to_json(exact.regression(z, t))}


def simulate_meter(rng: np.random.Generator, steps: int = 30) -> np.ndarray:
    """Simulate meter readings from the factorial HMM."""
    x = rng.uniform(size=len(POWER)) < 0.1
    readings = []
    for _ in range(steps):
        readings.append(POWER @ x + 20 * rng.standard_normal())
        x = x ^ (rng.uniform(size=len(POWER)) < 0.05)
    return np.round(readings, 1)


def fhmm(rng: np.random.Generator) -> dict[str, Any]:
    """Simulate a series; give its evidence and runs of a filter with the optimal proposal."""
    y, model = simulate_meter(rng), exact.FactorialHMM(POWER)
    runs = [optimal_filter.run_filter(rng, model, y, PARTICLES) for _ in range(RUNS)]
    ancestors = np.stack([run.ancestors for run in runs]).astype(np.uint8)
    return {
        "y": y.tolist(),
        "log_evidence": model.log_evidence(y),
        "bound": {
            "ess": [np.round(run.ess, 2).tolist() for run in runs],
            "log_evidence": [run.log_evidence for run in runs],
            "ancestors": base64.b64encode(ancestors.tobytes()).decode(),
        },
    }


def _to_json(posterior: exact.ExactPosterior) -> dict[str, Any]:
    return {
        "log_evidence": posterior.log_evidence,
        "mean": posterior.mean.tolist(),
        "sd": posterior.sd.tolist(),
    }


def main() -> None:
    """Write the file that comes with the package."""
    rng = np.random.default_rng(2016)
    references = {
        "pumps": pumps(),
        "regression": {"sets": [simulate_regression(rng) for _ in range(4)]},
        "fhmm": fhmm(rng),
    }
    path = Path(demos.__file__).with_name("reference.json")
    path.write_text(json.dumps(references, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
