"""Twenty devices and one meter (Paige & Wood 2016, sec. 5.3), and fig. 7 drawn anew.

Given the devices' states and the meter, the filter proposes which have switched. What a device adds
to the meter is always the same and the meter's noise is normal, so that the compiler has the
proposal without training. Fig. 7 shows how many particles' histories survive: nearly none with
draws from the model itself, and how many could at best, with draws from the exact
p(x_t | x_{t−1}, y_t).
"""

import base64
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import retrodict as rd
from retrodict.demos.answers import reference, table
from retrodict.demos.models import fhmm
from retrodict.particles.resampling import resampler
from retrodict.particles.weights import ess, normalise

PARTICLES, RUNS = 100, 10


def run(folder: Path, minutes: float | None, progress_bar: bool) -> str:
    """Compile, filter, draw, compare."""
    known = reference("fhmm")
    y = np.array(known["y"])
    compiled = rd.compile(
        jax.random.key(0),
        fhmm,
        ("y",),
        training=rd.Training(
            max_steps=1_000_000,
            max_seconds=60 * (10.0 if minutes is None else minutes),
            batch_size=500,
        ),
        progress_bar=progress_bar,
    )
    compiled.save(folder / "fhmm.rd")
    many = {"y": np.repeat(y[None], RUNS, 0)}
    runs = compiled.infer_many(jax.random.key(1), many, PARTICLES, method="smc", rescue=False)
    blind = bootstrap(compiled, jax.random.key(2), y)
    found = {
        "from the model itself": blind,
        "compiled": (
            np.asarray(runs.ess_by_stage),
            np.asarray(runs.ancestors),
            np.asarray(runs.log_evidence),
        ),
        "optimal": optimal(known["bound"]),
    }
    ancestry_figure({name: parts[1] for name, parts in found.items()}).savefig(
        folder / "fhmm.png", dpi=120
    )
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{np.mean(sizes):.1f}",
            f"{np.mean([len(np.unique(lineage(a)[0])) for a in ancestors]):.1f}",
            f"{np.mean(log_evidence):.2f}",
            f"{np.std(log_evidence, ddof=1):.2f}",
        )
        for name, (sizes, ancestors, log_evidence) in found.items()
    ]
    rows.append(("exact", "", "", f"{known['log_evidence']:.2f}", "0"))
    header = ("proposal", "mean ESS", "survivors of step 1", "log evidence", "its sd")
    return "\n".join(
        [
            f"Factorial HMM, {len(y)} steps, {PARTICLES} particles, {RUNS} runs",
            "",
            table(header, rows),
            "",
            f"Figures and the compiled model are in {folder}.",
        ]
    )


def optimal(known: Any) -> tuple[Any, Any, Any]:
    """What the best proposal there is, p(x_t | x_{t−1}, y_t), makes of the series: the bound."""
    flat = np.frombuffer(base64.b64decode(known["ancestors"]), np.uint8)
    ancestors = flat.reshape(len(known["ess"]), -1, PARTICLES)
    return np.array(known["ess"]), ancestors, np.array(known["log_evidence"])


def lineage(ancestors: np.ndarray) -> np.ndarray:
    """For each step, which of its particles the last population descends from."""
    found = [np.arange(ancestors.shape[1])]
    for parents in ancestors[::-1]:
        found.insert(0, parents[found[0]])
    return np.stack(found)


def bootstrap(compiled: Any, rng_key: Any, y: np.ndarray) -> tuple[Any, Any, Any]:
    """A filter that draws from the model itself: what the proposal is to be compared with."""
    program, choose = compiled.graph.program, resampler("systematic")

    def one(rng_key: Any) -> Any:
        first = program.initial_carry(0, {})
        start = jnp.broadcast_to(first, (PARTICLES, *first.shape))
        equal = jnp.full(PARTICLES, -np.log(PARTICLES))

        def step(state: Any, inputs: Any) -> Any:
            carry, log_weights, total = state
            time, value, key = inputs
            choose_key, draw_key = jax.random.split(key)
            needed = ess(log_weights) < 0.5 * PARTICLES
            everyone = jnp.arange(PARTICLES)
            parents = jnp.where(needed, choose(choose_key, log_weights, PARTICLES), everyone)
            log_weights = jnp.where(needed, equal, log_weights)

            def move(key: Any, carry: Any) -> Any:
                carry, found = program.step(key, 0, {}, time, carry, {"y": value})
                return carry, found.log_density["y"]

            keys = jax.random.split(draw_key, PARTICLES)
            carry, increment = jax.vmap(move)(keys, carry[parents])
            log_weights, log_mean = normalise(log_weights + increment)
            total = total + log_mean + np.log(PARTICLES)
            return (carry, log_weights, total), (ess(log_weights), parents)

        inputs = (jnp.arange(len(y)), jnp.asarray(y), jax.random.split(rng_key, len(y)))
        (_, _, total), (sizes, parents) = jax.lax.scan(step, (start, equal, jnp.zeros(())), inputs)
        return sizes, parents[1:], total

    sizes, parents, total = jax.jit(jax.vmap(one))(jax.random.split(rng_key, RUNS))
    return np.asarray(sizes), np.asarray(parents), np.asarray(total)


def ancestry_figure(ancestors: dict[str, np.ndarray]) -> Any:
    """The paper's fig. 7: histories of the last particles, and how many are left at each step."""
    figure, axes = plt.subplots(
        2, len(ancestors), figsize=(4.2 * len(ancestors), 5), layout="constrained", squeeze=False
    )
    for column, (name, runs) in enumerate(ancestors.items()):
        paths = lineage(runs[0])
        axes[0, column].plot(np.arange(1, len(paths) + 1), paths, color="C0", alpha=0.3, lw=0.6)
        axes[0, column].set(title=name, ylabel="particle" if column == 0 else None)
        left = np.array([[len(np.unique(row)) for row in lineage(run)] for run in runs])
        axes[1, column].plot(np.arange(1, left.shape[1] + 1), left.T, color="C0", alpha=0.4)
        axes[1, column].set(xlabel="step", ylim=(0, PARTICLES))
        axes[1, column].set_ylabel("surviving ancestors" if column == 0 else "")
    return figure
