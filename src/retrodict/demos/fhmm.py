"""The factorial HMM of twenty devices and one meter (Paige & Wood 2016, sec. 5.3), with figure 7.

The particle filter is run with four proposals for the devices' states x_t:

- bootstrap: the transition prior p(x_t | x_{t−1});
- network: the paper's, a network trained to sample x_t given x_{t−1} and y_t;
- analytic: what the compiler does by default. It recognises that y_t is normal around a sum over
  independent devices, and computes p(x_t | x_{t−1}, y_t) without training;
- optimal: exact draws from p(x_t | x_{t−1}, y_t), computed beforehand and stored with the package.
"""

import base64
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import retrodict as rd
from retrodict.demos.models import fhmm
from retrodict.demos.reference_answers import format_table, load_reference
from retrodict.particles.resampling import resampler
from retrodict.particles.weights import ess, normalise
from retrodict.plotting.ancestry import ancestral_lineages

PARTICLES, RUNS = 100, 10
# The paper's network: four layers, of which three are hidden.
HIDDEN = (300, 300, 300)
STEPS = 5000


class FilterRuns(NamedTuple):
    """Repeated runs of a particle filter on the same series.

    Attributes:
        ess: effective sample size before each resampling decision, (runs, steps).
        ancestors: index of each particle's parent in the step before, (runs, steps − 1, particles).
        log_evidence: (runs,).
    """

    ess: np.ndarray
    ancestors: np.ndarray
    log_evidence: np.ndarray


def run(folder: Path, minutes: float | None, progress_bar: bool) -> str:
    """Compile the model with a network and without, filter, draw figure 7, report the results."""
    reference = load_reference("fhmm")
    y = np.array(reference["y"])
    seconds = None if minutes is None else 60 * minutes
    analytic, network = (
        rd.compile(
            jax.random.key(0),
            fhmm,
            ("y",),
            estimator=estimator,
            training=rd.Training(max_steps=STEPS, max_seconds=seconds),
            progress_bar=progress_bar,
        )
        for estimator in (rd.MADE(), rd.MADE(hidden=HIDDEN))
    )
    analytic.save(folder / "fhmm.rd")
    network.save(folder / "fhmm-network.rd")
    runs_by_proposal = {
        "bootstrap": bootstrap_filter(analytic, jax.random.key(2), y),
        "network": compiled_filter(network, jax.random.key(1), y),
        "analytic": compiled_filter(analytic, jax.random.key(1), y),
        "optimal": stored_runs(reference["bound"]),
    }
    ancestry_figure(runs_by_proposal).savefig(folder / "fhmm.png", dpi=120)
    return _report(runs_by_proposal, reference, folder)


def _report(runs_by_proposal: dict[str, FilterRuns], reference: Any, folder: Path) -> str:
    rows: list[tuple[str, ...]] = [
        (
            proposal,
            f"{np.mean(runs.ess):.1f}",
            f"{np.mean(surviving_ancestors(runs)[:, 0]):.1f}",
            f"{np.mean(runs.log_evidence):.2f}",
            f"{np.std(runs.log_evidence, ddof=1):.2f}",
        )
        for proposal, runs in runs_by_proposal.items()
    ]
    rows.append(("exact", "", "", f"{reference['log_evidence']:.2f}", "0"))
    header = ("proposal", "mean ESS", "surviving ancestors of step 1", "log evidence", "its sd")
    return "\n".join(
        [
            f"Factorial HMM, {len(reference['y'])} steps, {PARTICLES} particles, {RUNS} runs",
            "",
            format_table(header, rows),
            "",
            "network: trained, as in the paper; analytic: recognised by the compiler (the default)",
            f"Figures and the compiled models are in {folder}.",
        ]
    )


def compiled_filter(compiled: Any, rng_key: Any, y: np.ndarray) -> FilterRuns:
    """Run the particle filter with the proposal of a compiled model."""
    data = {"y": np.repeat(y[None], RUNS, 0)}
    runs = compiled.infer_many(rng_key, data, PARTICLES, method="smc", rescue=False)
    return FilterRuns(*map(np.asarray, (runs.ess_by_stage, runs.ancestors, runs.log_evidence)))


def stored_runs(bound: Any) -> FilterRuns:
    """Read the stored runs of a filter with the optimal proposal."""
    ancestors = np.frombuffer(base64.b64decode(bound["ancestors"]), np.uint8)
    return FilterRuns(
        np.array(bound["ess"]),
        ancestors.reshape(len(bound["ess"]), -1, PARTICLES),
        np.array(bound["log_evidence"]),
    )


class BootstrapState(NamedTuple):
    """State of the bootstrap filter: carry and log weight of each particle, and log Ẑ so far."""

    carry: Any
    log_weights: Any
    log_evidence: Any


def bootstrap_filter(compiled: Any, rng_key: Any, y: np.ndarray) -> FilterRuns:
    """Run a particle filter that proposes from the transition prior."""
    program, resample = compiled.graph.program, resampler("systematic")
    equal_log_weights = jnp.full(PARTICLES, -np.log(PARTICLES))

    def step(state: BootstrapState, inputs: Any) -> Any:
        time, y_t, key = inputs
        resample_key, propagate_key = jax.random.split(key)
        # Resample
        needed = ess(state.log_weights) < 0.5 * PARTICLES
        resampled = resample(resample_key, state.log_weights, PARTICLES)
        ancestors = jnp.where(needed, resampled, jnp.arange(PARTICLES))
        log_weights = jnp.where(needed, equal_log_weights, state.log_weights)

        # Propagate
        def propagate(key: Any, carry: Any) -> Any:
            carry, trace = program.step(key, 0, {}, time, carry, {"y": y_t})
            return carry, trace.log_density["y"]

        keys = jax.random.split(propagate_key, PARTICLES)
        carry, log_likelihoods = jax.vmap(propagate)(keys, state.carry[ancestors])
        # Reweight
        log_weights, log_mean = normalise(log_weights + log_likelihoods)
        log_evidence = state.log_evidence + log_mean + np.log(PARTICLES)
        return BootstrapState(carry, log_weights, log_evidence), (ess(log_weights), ancestors)

    def one_run(rng_key: Any) -> Any:
        carry = program.initial_carry(0, {})
        carries = jnp.broadcast_to(carry, (PARTICLES, *carry.shape))
        initial = BootstrapState(carries, equal_log_weights, jnp.zeros(()))
        inputs = (jnp.arange(len(y)), jnp.asarray(y), jax.random.split(rng_key, len(y)))
        final, (sizes, ancestors) = jax.lax.scan(step, initial, inputs)
        return sizes, ancestors[1:], final.log_evidence

    runs = jax.jit(jax.vmap(one_run))(jax.random.split(rng_key, RUNS))
    return FilterRuns(*map(np.asarray, runs))


def surviving_ancestors(runs: FilterRuns) -> np.ndarray:
    """Count the particles of each step that have descendants at the end, (runs, steps)."""
    return np.array(
        [[len(np.unique(step)) for step in ancestral_lineages(run)] for run in runs.ancestors]
    )


def ancestry_figure(runs_by_proposal: dict[str, FilterRuns]) -> Any:
    """Draw the paper's figure 7: surviving ancestors by step, and the lineages of one run."""
    number = len(runs_by_proposal)
    figure = plt.figure(figsize=(3.2 * number, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, number)
    counts_axes = figure.add_subplot(grid[1, :])
    for column, (proposal, runs) in enumerate(runs_by_proposal.items()):
        colour = f"C{column}"
        counts = surviving_ancestors(runs)
        steps = np.arange(1, counts.shape[1] + 1)
        lineage_axes = figure.add_subplot(grid[0, column])
        lineages = ancestral_lineages(runs.ancestors[0])
        lineage_axes.plot(steps, lineages, color=colour, alpha=0.3, linewidth=0.6)
        lineage_axes.set(title=f"{proposal}: lineages of one run", xlabel="step")
        lineage_axes.set_ylabel("particle" if column == 0 else "")
        mean, sd = counts.mean(0), counts.std(0)
        counts_axes.plot(steps, mean, color=colour, label=proposal)
        counts_axes.fill_between(steps, mean - sd, mean + sd, color=colour, alpha=0.2)
    counts_axes.set(xlabel="step", ylabel="surviving ancestors", ylim=(0, PARTICLES))
    counts_axes.set_title(f"Mean and standard deviation over {RUNS} runs")
    counts_axes.legend(frameon=False, loc="upper left")
    return figure
