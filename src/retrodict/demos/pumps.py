"""Failure rates of ten pumps (Paige & Wood 2016, sec. 5.2), with the paper's figure 6.

The model is compiled with two inverses. The faithful inverse samples alpha and beta first, given
all data, and is used for the posterior. The paper's inverse, `blanket`, samples each pump's rate
given the data of that pump alone, as divide-and-conquer SMC requires.
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
from retrodict.demos.models import pumps
from retrodict.demos.reference_answers import format_table, load_reference

# Divide and conquer compiles a program for each of these numbers.
PARTICLES = (5, 20, 100, 500, 2000, 10_000)
RUNS = 10
# Gradient steps for each network: a number of steps gives the same networks on a busy machine,
# where a time limit would cut the training short.
STEPS = 5000
# Effective fraction of the particles of the authors' own code on these data.
AUTHORS_EFFECTIVE_FRACTION = 0.032


def run(folder: Path, minutes: float | None, progress_bar: bool) -> str:
    """Compile the model with both inverses, infer, write figures and report the results."""
    reference = load_reference("pumps")
    data = {"t": np.array(reference["t"]), "y": np.array(reference["y"])}
    seconds = None if minutes is None else 60 * minutes / 2
    faithful, blanket = (
        rd.compile(
            jax.random.key(0),
            pumps,
            ("t", "y"),
            inverse=inverse,
            training=rd.Training(max_steps=STEPS, max_seconds=seconds),
            progress_bar=progress_bar,
        )
        for inverse in ("faithful", "blanket")
    )
    faithful.save(folder / "pumps.rd")
    posterior = faithful.infer(jax.random.key(1), data, PARTICLES[-1], method="importance")
    posterior.plot().savefig(folder / "pumps-posterior.png", dpi=120)
    # The reference gives the evidence of y given t; the model has t as a site.
    log_density_t = float(np.sum(np.log(1 / 50) - data["t"] / 50))
    log_evidences = {
        method: values - log_density_t
        for method, values in estimate_log_evidence(faithful, blanket, data).items()
    }
    figure = evidence_figure(log_evidences, reference["log_evidence"])
    figure.savefig(folder / "pumps-evidence.png", dpi=120)
    rows = _posterior_rows(posterior, float(posterior.log_evidence) - log_density_t, reference)
    rows.append(_divide_row(log_evidences[DIVIDE], reference))
    return "\n".join(
        [
            f"Ten pumps: faithful inverse, importance sampling, {PARTICLES[-1]} particles; last "
            f"row: blanket inverse, mean ± sd of {RUNS} runs",
            "",
            format_table(("", "retrodict", "authors' code", "exact"), rows),
            "",
            f"Verdict: {posterior.diagnostics}",
            f"Figures and the compiled model are in {folder}.",
        ]
    )


def _posterior_rows(posterior: Any, log_evidence: float, reference: Any) -> list[tuple[str, ...]]:
    fraction = posterior.ess / len(posterior.log_weights)
    authors = f"{AUTHORS_EFFECTIVE_FRACTION:.1%}"
    rows: list[tuple[str, ...]] = [
        ("effective particles", f"{fraction:.1%}", authors, "100%"),
        ("log evidence", f"{log_evidence:.4f}", "", f"{reference['log_evidence']:.4f}"),
    ]
    for index, site in enumerate(("alpha", "beta")):
        for moment, value in (("mean", posterior.mean(site)), ("sd", posterior.sd(site))):
            exact = f"{reference[moment][index]:.4f}"
            rows.append((f"{moment} of {site}", f"{value:.4f}", "", exact))
    return rows


def _divide_row(log_evidences: np.ndarray, reference: Any) -> tuple[str, ...]:
    few = log_evidences[:, 0]
    return (
        f"log evidence, divide and conquer, {PARTICLES[0]} particles",
        f"{few.mean():.2f} ± {few.std():.2f}",
        "",
        f"{reference['log_evidence']:.2f}",
    )


PRIOR = "prior, importance sampling"
DIVIDE = "blanket inverse, divide and conquer"


def estimate_log_evidence(faithful: Any, blanket: Any, data: Any) -> dict[str, np.ndarray]:
    """Estimate log p(t, y) by each method.

    Returns:
        Method → estimates, of shape (RUNS, len(PARTICLES)).
    """
    divide = [
        [run.log_evidence for run in _repeat(blanket, data, "divide", number)]
        for number in PARTICLES
    ]
    return {
        PRIOR: _log_means(_prior_log_weights(blanket, data)),
        "blanket inverse, importance sampling": _log_means(_importance_log_weights(blanket, data)),
        DIVIDE: np.array(divide).T,
        "faithful inverse, importance sampling": _log_means(
            _importance_log_weights(faithful, data)
        ),
    }


def evidence_figure(log_evidences: dict[str, np.ndarray], exact: float) -> Any:
    """Draw the paper's figure 6: estimates of the log evidence by number of particles."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for index, (method, values) in enumerate(log_evidences.items()):
        # Shifted by a few per cent, so that the error bars do not overlap.
        particles = np.array(PARTICLES) * 1.06 ** (index - 1.5)
        style: Any = {"fmt": ".-", "capsize": 2, "color": f"C{index}", "label": method}
        for panel in panels[: 1 if method == PRIOR else 2]:
            panel.errorbar(particles, values.mean(0), 2 * values.std(0), **style)
    for panel, below, above in ((panels[0], 130, 20), (panels[1], 2.5, 1.5)):
        panel.axhline(exact, color="black", linewidth=0.8, linestyle="--", label="exact")
        panel.set(xscale="log", xlabel="particles", ylim=(exact - below, exact + above))
    panels[0].set(ylabel="log evidence", title="All methods")
    panels[1].set(title="The networks, magnified")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"Pumps: mean and two standard deviations over {RUNS} runs")
    return figure


def _log_means(log_weights: np.ndarray) -> np.ndarray:
    """Estimate each run's log evidence from its first K particles, for every K in `PARTICLES`."""
    return np.stack([logsumexp(log_weights[:, :k], axis=1) - np.log(k) for k in PARTICLES], 1)


def _repeat(compiled: Any, data: Any, method: str, number: int) -> list[Any]:
    """Infer several times from the same data."""
    keys = jax.random.split(jax.random.key(number), RUNS)
    return [compiled.infer(key, data, number, method=method) for key in keys]


def _importance_log_weights(compiled: Any, data: Any) -> np.ndarray:
    """Unnormalised log weights of importance sampling, of shape (RUNS, PARTICLES[-1])."""
    number = PARTICLES[-1]
    runs = _repeat(compiled, data, "importance", number)
    return np.stack([run.log_weights + run.log_evidence + np.log(number) for run in runs])


def _prior_log_weights(compiled: Any, data: Any) -> np.ndarray:
    """Log weights of likelihood weighting: latents are sampled from the prior."""
    program, observed = compiled.graph.program, compiled.graph.observed
    values = {name: jnp.asarray(value) for name, value in data.items()}

    def log_weight(key: Any) -> Any:
        trace = program.run(key, values)
        log_likelihood = jnp.sum(jnp.stack([trace.log_density[s].sum() for s in observed]))
        # Rates that underflow to zero have no density in float32.
        return jnp.where(jnp.isnan(log_likelihood), -jnp.inf, log_likelihood)

    keys = jax.random.split(jax.random.key(4), (RUNS, PARTICLES[-1]))
    return np.asarray(run_once(jax.vmap(jax.vmap(log_weight)), keys))
