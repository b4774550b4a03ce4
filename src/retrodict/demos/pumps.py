"""Ten pumps (Paige & Wood 2016, sec. 5.2): the model compiled twice, and fig. 6 drawn anew.

The faithful inverse draws the parameters first and answers with most of its particles. The paper's
own, `blanket`, draws each pump's rate by itself and is made for divide-and-conquer SMC.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from scipy.special import logsumexp

import retrodict as rd
from retrodict._xla.jit import run_once
from retrodict.demos.answers import reference, table
from retrodict.demos.models import pumps

PARTICLES = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
# Each number is a program of its own, to be compiled.
DIVIDED = (5, 1000)
RUNS = 10
# The effective share of particles that the authors' own code reaches on these data.
AUTHORS = 0.032


def run(folder: Path, minutes: float | None, progress_bar: bool) -> str:
    """Compile, infer, draw, compare."""
    known = reference("pumps")
    data = {"t": np.array(known["t"]), "y": np.array(known["y"])}
    seconds = 60 * (2.1 if minutes is None else minutes)
    compiled = {
        method: rd.compile(
            jax.random.key(0),
            pumps,
            ("t", "y"),
            inverse=method,  # type: ignore[arg-type]
            training=rd.Training(max_steps=1_000_000, max_seconds=share * seconds),
            progress_bar=progress_bar,
        )
        for method, share in (("faithful", 0.57), ("blanket", 0.43))
    }
    compiled["faithful"].save(folder / "pumps.rd")
    posterior = compiled["faithful"].infer(
        jax.random.key(1), data, PARTICLES[-1], method="importance"
    )
    posterior.plot().savefig(folder / "pumps-posterior.png", dpi=120)
    figure = evidence_figure(compiled, data, known["log_evidence"] + _of_times(data["t"]))
    figure.savefig(folder / "pumps-evidence.png", dpi=120)
    return _said(posterior, data, known, folder)


def _of_times(t: np.ndarray) -> float:
    """Log density of the times themselves, which the exact answer is given."""
    return float(np.sum(np.log(1 / 50) - t / 50))


def _said(posterior: Any, data: Any, known: Any, folder: Path) -> str:
    log_evidence = posterior.log_evidence - _of_times(data["t"])
    share = posterior.ess / len(posterior.log_weights)
    rows: list[tuple[str, ...]] = [
        ("effective particles", f"{share:.1%}", f"{AUTHORS:.1%}", "100 %"),
        ("log evidence", f"{log_evidence:.4f}", "", f"{known['log_evidence']:.4f}"),
    ]
    for place, name in enumerate(("alpha", "beta")):
        for what, found in (("mean", posterior.mean(name)), ("sd", posterior.sd(name))):
            rows.append((f"{what} of {name}", f"{found:.4f}", "", f"{known[what][place]:.4f}"))
    return "\n".join(
        [
            "Ten pumps, 10 000 particles, networks of the faithful inverse",
            "",
            table(("", "retrodict", "authors' code", "exact"), rows),
            "",
            f"Verdict: {posterior.diagnostics}",
            f"Figures and the compiled model are in {folder}.",
        ]
    )


def evidence_figure(compiled: Any, data: Any, exact: float) -> Any:
    """The paper's fig. 6: estimates of the log evidence by number of particles."""
    divided = [_divided(compiled["blanket"], data, particles) for particles in DIVIDED]
    series = {
        "prior": (PARTICLES, _by_number(_from_prior(compiled["blanket"], data))),
        "network, importance": (PARTICLES, _by_number(_weights(compiled["blanket"], data))),
        "network, divide and conquer": (DIVIDED, np.stack(divided, 1)),
        "network, faithful inverse": (PARTICLES, _by_number(_weights(compiled["faithful"], data))),
    }
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for number, (name, (particles, values)) in enumerate(series.items()):
        mean, sd = values.mean(0), values.std(0)
        axes.plot(particles, mean, label=name, color=f"C{number}")
        axes.fill_between(particles, mean - 2 * sd, mean + 2 * sd, alpha=0.2, color=f"C{number}")
    axes.axhline(exact, color="black", linewidth=0.8, linestyle="--", label="exact")
    axes.set(xscale="log", xlabel="particles", ylabel="log evidence", ylim=(exact - 25, exact + 8))
    axes.set_title("Pumps: mean and two standard deviations over ten runs")
    axes.legend(frameon=False, loc="lower left")
    return figure


def _by_number(log_weights: np.ndarray) -> np.ndarray:
    """Log evidence of each run by its first few particles, for every number of them."""
    return np.stack([logsumexp(log_weights[:, :k], axis=1) - np.log(k) for k in PARTICLES], 1)


def _runs(compiled: Any, data: Any, method: str, particles: int) -> list[Any]:
    """Several answers to the same question."""
    keys = jax.random.split(jax.random.key(particles), RUNS)
    return [compiled.infer(key, data, particles, method=method) for key in keys]


def _weights(compiled: Any, data: Any) -> np.ndarray:
    """Log weights of several runs of importance sampling on the same data."""
    number = PARTICLES[-1]
    runs = _runs(compiled, data, "importance", number)
    return np.stack([run.log_weights + run.log_evidence + np.log(number) for run in runs])


def _divided(compiled: Any, data: Any, particles: int) -> np.ndarray:
    """Log evidence of several runs of divide and conquer on the same data."""
    return np.array([run.log_evidence for run in _runs(compiled, data, "divide", particles)])


def _from_prior(compiled: Any, data: Any) -> np.ndarray:
    """Log weights of importance sampling that knows nothing: latents come from the prior."""
    program, observed = compiled.graph.program, compiled.graph.observed
    known = {name: jnp.asarray(value) for name, value in data.items()}

    def weight(key: Any) -> Any:
        drawn = program.run(key, known)
        return sum(drawn.log_density[name].sum() for name in observed)

    keys = jax.random.split(jax.random.key(4), (RUNS, PARTICLES[-1]))
    return np.asarray(run_once(jax.vmap(jax.vmap(weight)), keys))
