"""Measure, in a fresh process, what a user waits for before the first answer; print JSON.

`python -m benchmarks.firstanswer_worker CASE [nuts]`, for `benchmarks.firstanswer`. The stages of
`rd.compile` are wrapped with clocks; JAX reports the seconds of tracing, lowering and compiling.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import jax
import numpy as np
from numpyro.handlers import condition
from numpyro.infer import MCMC, NUTS

import retrodict as rd
import retrodict.compiled
from benchmarks.firstanswer_models import CASES, Case, simulate
from benchmarks.growth_worker import peak_memory
from retrodict.inference.planning import Planner
from retrodict.proposal.proposal import Proposal

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "xla",
}
TRAINING_STEPS, DATASETS, PARTICLES = 200, 20, 1000


class Clock:
    """Seconds of each phase, in all and by what JAX does in it.

    A phase within another is subtracted from it. Training compiles in a second thread, so there the
    seconds by activity may add up to more than the phase took.
    """

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, float]] = {}
        self._stack: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_: Any) -> None:
        if event in EVENTS and self._stack:
            phase = self.phases[self._stack[-1]]
            kind = EVENTS[event]
            phase[kind] = phase.get(kind, 0.0) + seconds
            if kind == "xla":
                phase["programs"] = phase.get("programs", 0) + 1

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; the time of a phase within it is subtracted."""
        self.phases.setdefault(name, {"seconds": 0.0, "cpu": 0.0})
        outer = self._stack[-1] if self._stack else None
        self._stack.append(name)
        start = {"seconds": time.perf_counter(), "cpu": time.process_time()}
        try:
            yield
        finally:
            end = {"seconds": time.perf_counter(), "cpu": time.process_time()}
            self._stack.pop()
            for kind, value in end.items():
                self.phases[name][kind] += value - start[kind]
                if outer is not None:
                    self.phases[outer][kind] -= value - start[kind]

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of a function."""
        function: Callable[..., Any] = getattr(owner, attribute)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        setattr(owner, attribute, staticmethod(timed) if attribute == "of" else timed)


def measure(case: Case) -> dict[str, Any]:
    """Compile a model with little training and infer; return seconds by phase."""
    clock = Clock()
    clock.wrap(retrodict.compiled, "trace", "trace")
    clock.wrap(retrodict.compiled, "invert", "invert")
    clock.wrap(Proposal, "of", "assemble")
    clock.wrap(Proposal, "build", "assemble")
    clock.wrap(retrodict.compiled, "train_network", "train")
    clock.wrap(Planner, "plan", "plan")
    first_loss: list[float] = []
    report = retrodict.compiled.Progress.__call__

    def timed_report(self: Any, *args: Any) -> None:
        first_loss.append(time.perf_counter())
        report(self, *args)

    retrodict.compiled.Progress.__call__ = timed_report
    data = simulate(case, 1)
    many = [simulate(case, seed) for seed in range(2, 2 + DATASETS)]
    stacked = {name: np.stack([one[name] for one in many]) for name in case.observed}
    start_time = time.perf_counter()
    with clock.phase("other"):
        compiled = rd.compile(
            jax.random.key(0),
            case.model,
            case.observed,
            training=rd.Training(max_steps=TRAINING_STEPS),
            progress_bar=False,
        )
    end_time = time.perf_counter()
    key = jax.random.key(1)
    for name, call in {
        "first infer": lambda: compiled.infer(key, data, PARTICLES, rescue=False),
        "second infer": lambda: compiled.infer(key, data, PARTICLES, rescue=False),
        "first infer_many": lambda: compiled.infer_many(key, stacked, PARTICLES, rescue=False),
        "first rescue": lambda: compiled.infer(key, data, PARTICLES, method="temper"),
        "second rescue": lambda: compiled.infer(key, data, PARTICLES, method="temper"),
    }.items():
        with clock.phase(name):
            jax.block_until_ready(call().log_weights)
    return {
        "phases": clock.phases,
        "compile": end_time - start_time,
        "first loss": first_loss[0] - start_time if first_loss else float("nan"),
        "memory": peak_memory(),
    }


def measure_nuts(case: Case) -> dict[str, Any]:
    """Run NUTS cold on one data set."""
    kernel = NUTS(condition(case.model, simulate(case, 1)))
    start_time = time.perf_counter()
    mcmc = MCMC(kernel, num_warmup=500, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0))
    jax.block_until_ready(mcmc.get_samples())
    return {"nuts": time.perf_counter() - start_time, "memory": peak_memory()}


if __name__ == "__main__":
    case = CASES[sys.argv[1]]
    print(json.dumps(measure_nuts(case) if sys.argv[2:] == ["nuts"] else measure(case)))
