"""Training time to reach the loss of the paper's recipe: retrodict, the recipe, and sbi's flow.

Run as `python -m benchmarks.compiling [--full]`. Losses are held-out means of −log q(x | y) in
nats, over all latents x in the model's own coordinates, so that they are comparable between
methods; for the factorial HMM they are of one step given the previous one. Seconds include tracing
and XLA's compilation. They include simulation for retrodict and the recipe, but not for sbi, which
reads simulations from a file. The networks of a model are trained for equal times. The recipe is
described in `benchmarks/compiling_worker.py`. sbi trains its default masked autoregressive flow; it
has no density for the factorial HMM's binary latents.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import retrodict as rd
from benchmarks import report, simulations
from benchmarks.compiling_worker import SETUPS
from benchmarks.newdata import FOLDER, SBI
from benchmarks.peers import environment

RECIPES = {
    "ours": "retrodict's defaults",
    "raw": "the paper's recipe",
    "scaled": "the same, inputs and latents scaled as ours",
}


class Curve(NamedTuple):
    """The best loss so far, as a function of time."""

    seconds: np.ndarray
    loss: np.ndarray

    @property
    def end(self) -> tuple[float, float]:
        """Time at which the final loss is first reached, and the final loss."""
        final_loss = float(self.loss[-1])
        return self.until(final_loss), final_loss

    def until(self, loss: float) -> float:
        """Seconds until a loss is reached; infinite if it never is."""
        indices = np.flatnonzero(self.loss <= loss)
        return float(self.seconds[indices[0]]) if len(indices) else float("inf")


def combined_curve(result: Any) -> Curve:
    """Sum the losses of all networks of a model.

    Networks that learn are trained for equal times, one after the other. Those without parameters
    take the time that one evaluation of their loss takes.
    """
    networks = result["networks"]
    curves = [np.array(network["curve"], float).reshape(-1, 2) for network in networks]
    trained = [c for c, network in zip(curves, networks, strict=True) if network["learns"]]
    fixed = [c for c, network in zip(curves, networks, strict=True) if not network["learns"]]
    fixed_seconds = sum(float(curve[0, 0]) for curve in fixed)
    seconds = np.unique(np.concatenate([[0.0], *(curve[:, 0] for curve in trained)]))
    total = np.zeros(len(seconds))
    for network, curve in zip(networks, curves, strict=True):
        losses = np.where(np.isfinite(curve[:, 1]), curve[:, 1], np.inf)
        best = np.concatenate([[np.inf], np.minimum.accumulate(losses)])
        index = np.searchsorted(curve[:, 0], seconds, side="right") if network["learns"] else -1
        total += network["copies"] * best[index]
    return Curve(result["setup"] + fixed_seconds + len(trained) * seconds, total)


def train(recipe: str, name: str, seconds: float) -> Curve:
    """Train by one of `RECIPES`, in a separate process."""
    report.log_progress(f"{name}: {RECIPES[recipe]}, {seconds:.0f} s")
    command = [sys.executable, "-m", "benchmarks.compiling_worker", recipe, name, str(seconds)]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return combined_curve(json.loads(process.stdout))


def train_sbi(name: str, number: int, seconds: float) -> Curve:
    """Train sbi on simulations of the model."""
    report.log_progress(f"{name}: sbi, {seconds:.0f} s")
    graph = rd.trace(SETUPS[name].model, SETUPS[name].observed)
    values = simulations.simulate(graph, number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.npz"
        simulations.write(path, name, values, None)
        command = [environment(*SBI), FOLDER / "newdata_sbi.py", "train", path, str(seconds)]
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows = np.array([line.split() for line in process.stdout.splitlines()], float)
    loss = np.minimum.accumulate(rows[:, 1]) + simulations.mean_log_jacobian(name, values)
    return Curve(rows[:, 0], loss)


def section(name: str, seconds: float, ours_seconds: float, number: int) -> tuple[float, float]:
    """Print the table of one model; return the speed-ups over both recipes at their final loss."""
    curves = {
        title: train(recipe, name, ours_seconds if recipe == "ours" else seconds)
        for recipe, title in RECIPES.items()
    }
    if name in simulations.LATENTS:
        label = f"sbi's flow, {number} simulations"
        curves[label] = train_sbi(name, number, seconds)
    ends = [curves[RECIPES[recipe]].end for recipe in ("raw", "scaled")]
    rows = []
    for label, curve in curves.items():
        seconds_at_end, loss = curve.end
        rows.append(
            [
                label,
                f"{loss:.3f}",
                report.format_number(seconds_at_end),
                *(report.format_number(curve.until(final_loss)) for _, final_loss in ends),
            ]
        )
    print(f"\n### {name}")
    header = ["", "loss at its end", "reached after, s"]
    header += ["s to the recipe's end", "s to the scaled recipe's end"]
    report.print_table(header, rows)
    ours = curves[RECIPES["ours"]]
    # A recipe that never reaches a finite loss cannot be compared.
    raw, scaled = (
        seconds_at_end / ours.until(loss) if np.isfinite(loss) else float("inf")
        for seconds_at_end, loss in ends
    )
    raw_text, scaled_text = report.format_number(raw), report.format_number(scaled)
    print(f"retrodict reaches the final loss of the recipe {raw_text} times faster, and")
    print(f"that of the scaled recipe {scaled_text} times faster.")
    return raw, scaled


def main() -> None:
    """Run all three models."""
    full = report.parse_full_flag(__doc__)
    seconds, ours, number = (600.0, 240.0, 200_000) if full else (240.0, 60.0, 30_000)
    print(
        f"The paper's recipe and sbi train for {seconds:.0f} s or until their loss stops falling,"
    )
    print(
        f"retrodict for {ours:.0f} s. A ratio cannot exceed {seconds:.0f} s divided by the time at"
    )
    print("which retrodict first evaluates its loss. With unscaled inputs the recipe may learn")
    print("nothing and stop early, at a loss that retrodict passes at its first evaluation; the")
    print("ratio then compares compilation times.")
    ratios = {name: section(name, seconds, ours, number) for name in SETUPS}
    for index, recipe in enumerate(("the paper's recipe", "the recipe with scaled inputs")):
        speedups = {name: pair[index] for name, pair in ratios.items()}
        text = ", ".join(f"{name} {report.format_number(x)}" for name, x in speedups.items())
        report.print_target(
            f"at least 5 times faster than {recipe} to the recipe's final loss",
            f"speed-up: {text}",
            min(speedups.values()) >= 5,
        )


if __name__ == "__main__":
    main()
