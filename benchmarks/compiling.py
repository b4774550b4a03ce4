"""How long until networks are as good as by the paper's recipe: ours, the recipe, and sbi's flow.

Run as `python -m benchmarks.compiling [--full]`. Losses are held-out means of −log q(x | y), in
nats, over all latents x of the model in its own coordinates, so that they can be compared whatever
the networks make of x inside; for the factorial HMM they are of one step given the one before.
Seconds are from the start, with tracing and XLA's compiling in them; simulations are in ours and
in the recipe's, not in sbi's, which gets them in a file. Networks of a model that learn are given
equal time. The recipe, and what was kept of ours in it, is described in `benchmarks/learning.py`.
sbi trains its default masked autoregressive flow; it has no density for the factorial HMM's binary
latents.
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
from benchmarks.learning import SETUPS
from benchmarks.newdata import FOLDER, SBI
from benchmarks.peers import environment

RECIPES = {
    "ours": "retrodict's defaults",
    "raw": "the paper's recipe",
    "scaled": "the same, inputs and latents scaled as ours",
}


class Curve(NamedTuple):
    """The best loss so far, by seconds."""

    seconds: np.ndarray
    loss: np.ndarray

    @property
    def end(self) -> tuple[float, float]:
        """When the last loss was first reached, and that loss."""
        last = float(self.loss[-1])
        return self.until(last), last

    def until(self, loss: float) -> float:
        """Seconds until a loss is reached; infinite if it never is."""
        reached = np.flatnonzero(self.loss <= loss)
        return float(self.seconds[reached[0]]) if len(reached) else float("inf")


def together(found: Any) -> Curve:
    """The loss of all networks: those that learn are given the same time, one after the other.

    What has nothing to learn is done once its loss is measured, and takes the time for that.
    """
    parts = found["networks"]
    curves = [np.array(part["curve"], float).reshape(-1, 2) for part in parts]
    known = [c for c, part in zip(curves, parts, strict=True) if not part["learns"]]
    learned = [c for c, part in zip(curves, parts, strict=True) if part["learns"]]
    done = sum(float(curve[0, 0]) for curve in known)
    shares = np.unique(np.concatenate([[0.0], *(curve[:, 0] for curve in learned)]))
    total = np.zeros(len(shares))
    for part, curve in zip(parts, curves, strict=True):
        losses = np.where(np.isfinite(curve[:, 1]), curve[:, 1], np.inf)
        best = np.concatenate([[np.inf], np.minimum.accumulate(losses)])
        at = np.searchsorted(curve[:, 0], shares, side="right") if part["learns"] else -1
        total += part["copies"] * best[at]
    return Curve(found["setup"] + done + len(learned) * shares, total)


def learned(recipe: str, name: str, seconds: float) -> Curve:
    """By one of our recipes, in a process of its own."""
    report.note(f"{name}: {RECIPES[recipe]}, {seconds:.0f} s")
    command = [sys.executable, "-m", "benchmarks.learning", recipe, name, str(seconds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return together(json.loads(done.stdout))


def learned_by_sbi(name: str, number: int, seconds: float) -> Curve:
    """By sbi, from simulations of the model."""
    report.note(f"{name}: sbi, {seconds:.0f} s")
    graph = rd.trace(SETUPS[name].model, SETUPS[name].observed)
    values = simulations.simulated(graph, number)
    with tempfile.TemporaryDirectory() as text:
        path = Path(text) / f"{name}.npz"
        simulations.write(path, name, values, None)
        command = [environment(*SBI), FOLDER / "newdata_sbi.py", "train", path, str(seconds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows = np.array([line.split() for line in done.stdout.splitlines()], float)
    loss = np.minimum.accumulate(rows[:, 1]) + simulations.log_slope(name, values)
    return Curve(rows[:, 0], loss)


def section(name: str, seconds: float, ours_seconds: float, number: int) -> tuple[float, float]:
    """A table for one model; how many times faster ours is than each recipe, to its own end."""
    curves = {
        title: learned(recipe, name, ours_seconds if recipe == "ours" else seconds)
        for recipe, title in RECIPES.items()
    }
    if name in simulations.LATENTS:
        label = f"sbi's flow, {number} simulations"
        curves[label] = learned_by_sbi(name, number, seconds)
    goals = [curves[RECIPES[recipe]].end for recipe in ("raw", "scaled")]
    rows = []
    for label, curve in curves.items():
        when, loss = curve.end
        rows.append(
            [
                label,
                f"{loss:.3f}",
                report.short(when),
                *(report.short(curve.until(goal)) for _, goal in goals),
            ]
        )
    print(f"\n### {name}")
    header = ["", "loss at its end", "reached after, s"]
    header += ["s to the recipe's end", "s to the scaled recipe's end"]
    report.table(header, rows)
    ours = curves[RECIPES["ours"]]
    # a recipe that never gets to a finite loss has no end to be compared with
    raw, scaled = (
        when / ours.until(goal) if np.isfinite(goal) else float("inf") for when, goal in goals
    )
    print(f"retrodict reaches the final loss of the recipe {report.short(raw)} times faster, and")
    print(f"that of the scaled recipe {report.short(scaled)} times faster.")
    return raw, scaled


def main() -> None:
    """All three models."""
    full = report.full(__doc__)
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
    for place, recipe in enumerate(("the paper's recipe", "the recipe with scaled inputs")):
        each = {name: found[place] for name, found in ratios.items()}
        said = ", ".join(f"{name} {report.short(ratio)}" for name, ratio in each.items())
        report.target(
            f"at least 5 times faster than {recipe} to the recipe's final loss",
            f"speed-up: {said}",
            min(each.values()) >= 5,
        )


if __name__ == "__main__":
    main()
