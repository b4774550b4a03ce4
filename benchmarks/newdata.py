"""What does the answer for a new data set cost: by `infer`, NUTS, sbi and PyMC, warm and cold.

Run as `python -m benchmarks.newdata [--full]`. Each contender is in a process of its own. Cold is
its first answer: what was prepared is loaded, and all that has to be compiled is compiled; imports
are not counted. Warm are later answers, taken in turn; `infer` and sbi, whose answers take
milliseconds, give five in a row, of which the median counts. Effective samples are of the means of
all scalars, (sd / standard error)²: by ArviZ for NUTS, by the weights for `infer` and sbi, and for
PyMC's SMC by how the means of independent runs differ. NUTS runs 4 vectorised chains of 1 000 after
500 steps of warm-up, which a new data set needs anew; eight schools are non-centred for NUTS and
PyMC. sbi trains its default NPE for as long as retrodict compiles, on simulations made beforehand,
and corrects its draws by importance sampling with the model's density.
"""

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import retrodict as rd
from benchmarks import report, simulations
from benchmarks.inferring import CASES, ERRORS, Case
from benchmarks.peers import Peer, environment, in_turn

SBI = ("sbi==0.27.0", "torch==2.13.0")
PYMC = ("pymc==5.28.5",)
FOLDER = Path(__file__).parent
MANY = 1000


class Found(NamedTuple):
    """Of one contender.

    Attributes:
        cold: seconds of the first answer.
        seconds: of later answers, with all that a new data set needs.
        bare: the same without warm-up.
        least, mean: effective samples of an answer over scalars.
        means: of the scalars, averaged over answers.
    """

    cold: float
    seconds: np.ndarray
    bare: np.ndarray
    least: float
    mean: float
    means: np.ndarray


def compiled(name: str, case: Case, seconds: float, path: Path) -> tuple[Any, float]:
    """The model compiled and saved, and the seconds that took."""
    report.note(f"{name}: compiling for {seconds:.0f} s")
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = rd.compile(
            jax.random.key(0),
            case.model,
            tuple(case.data),
            training=rd.Training(max_steps=1_000_000, max_seconds=seconds),
            progress_bar=False,
        )
    made.save(path)
    return made, time.perf_counter() - begun


def numbers(peer: Peer, *words: object) -> list[float]:
    """A peer's answer."""
    return [float(word) for word in peer.ask(*words)]


def summary(first: list[float], loaded: float, rows: list[list[float]]) -> Found:
    """Of a contender that says its effective samples."""
    found = np.array(rows)
    least, mean = np.median(found[:, 1:3], 0)
    cold = loaded + first[3]
    return Found(cold, found[:, 3], found[:, 0], least, mean, found[:, 4:].mean(0))


def summary_of_chains(first: list[float], rows: list[list[float]], size: int) -> Found:
    """Of PyMC: chains are independent, so their means tell the effective samples of one."""
    found = np.array(rows)
    chains = found[:, 1 : 1 + 2 * size].reshape(-1, size)
    ratio = chains.var(0, ddof=1) / np.mean(found[:, 1 + 2 * size :] ** 2, 0)
    mean = 2 / ratio.mean()
    return Found(first[0], found[:, 0], found[:, 0], float("nan"), mean, chains.mean(0))


def trained_by_sbi(name: str, path: Path, seconds: float) -> tuple[Path, str]:
    """sbi's posterior, and what is to be said of its training."""
    report.note(f"{name}: sbi trains for up to {seconds:.0f} s")
    saved = path.with_suffix(".sbi")
    script = FOLDER / "newdata_sbi.py"
    with Peer(environment(*SBI), script, "train", str(path), str(seconds), str(saved)) as peer:
        assert peer.process.stdout is not None
        curve = [line.split() for line in peer.process.stdout]
    return saved, f"sbi was trained for {float(curve[-1][0]):.0f} s, {len(curve)} epochs"


def answers(
    name: str, saved: tuple[Path, Path, Path], sets: int, repeats: int
) -> tuple[dict[str, Found], list[list[float]]]:
    """What each contender found, and the rows of `infer_many`."""
    case, (artefact, draws, posterior) = CASES[name], saved
    module = ("-m", "benchmarks.inferring")
    data = {site: value.tolist() for site, value in case.data.items()}
    if name == "schools":
        data["sigma"] = ERRORS.tolist()
    found: dict[str, Found] = {}
    with ExitStack() as stack:

        def process(python: str | Path, *words: str) -> Peer:
            return stack.enter_context(Peer(Path(python), *words))

        serve = (str(FOLDER / "newdata_sbi.py"), "serve", name, str(draws), str(posterior))
        sbi = process(environment(*SBI), *serve)
        pymc = process(environment(*PYMC), str(FOLDER / "newdata_pymc.py"), name, json.dumps(data))
        nuts = process(sys.executable, *module, "nuts", name)
        calls: dict[str, Callable[[int], list[float]]] = {}
        firsts: dict[str, list[float]] = {}
        loads: dict[str, float] = {"NUTS": 0.0, "PyMC": 0.0}
        for size in (1000, 10_000):
            peer = process(sys.executable, *module, "ours", name, str(artefact))
            label = f"infer, {size}"
            loads[label] = float(peer.read()[0])
            calls[label] = lambda seed, p=peer, k=size: numbers(p, "one", k, seed)
            firsts[label] = numbers(peer, "first", size, 1000)
        loads["sbi, 1000"] = loads["sbi, 10000"] = float(sbi.read()[0])
        for size in (1000, 10_000):
            label = f"sbi, {size}"
            calls[label] = lambda seed, k=size: numbers(sbi, "one", k, seed)
            firsts[label] = numbers(sbi, "first", size, 1000)
        calls["NUTS"] = lambda seed: numbers(nuts, "one", 0, seed)
        calls["PyMC"] = lambda seed: numbers(pymc, 1000, seed)
        for label in ("NUTS", "PyMC"):
            report.note(f"{name}: {label}, cold")
            firsts[label] = calls[label](1000)
        report.note(f"{name}: all, warm")
        rows = in_turn(calls, repeats)
        for label in calls:
            if label != "PyMC":
                found[label] = summary(firsts[label], loads[label], rows[label])
            else:
                size = len(rows["NUTS"][0]) - 4
                found[label] = summary_of_chains(firsts[label], rows[label], size)
        report.note(f"{name}: infer_many, {sets} data sets")
        peer = process(sys.executable, *module, "ours", name, str(artefact))
        peer.read()
        many = [numbers(peer, f"many-{sets}", 1000, seed) for seed in range(4)]
    return found, many


def section(name: str, seconds: float, number: int, repeats: int) -> None:
    """One model: tables, targets, and when compiling has paid for itself."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        artefact, draws = folder / f"{name}.rd", folder / f"{name}.npz"
        made, compile_seconds = compiled(name, case, seconds, artefact)
        values = simulations.simulated(made.graph, number)
        simulations.write(draws, name, values, case.data)
        posterior, said = trained_by_sbi(name, draws, compile_seconds)
        found, many = answers(name, (artefact, draws, posterior), MANY, repeats)
    base, nuts = found["infer, 1000"], found["NUTS"]

    def row(label: str, of: Found, seconds: np.ndarray, cold: float) -> list[str]:
        middle = float(np.median(seconds))
        costs = [1000 * middle / size for size in (of.least, of.mean)]
        own = [1000 * float(np.median(base.seconds)) / size for size in (base.least, base.mean)]
        off = np.abs(of.means - nuts.means) / spreads
        return [
            label,
            report.spread(seconds, 1e3),
            report.short(cold),
            f"{report.short(of.least)}, {report.short(of.mean)}",
            f"{report.short(costs[0])}, {report.short(costs[1])}",
            f"{report.short(costs[0] / own[0])}, {report.short(costs[1] / own[1])}",
            f"{off.max():.2f}",
        ]

    spreads = _spreads(made, case)
    rows = [
        row(f"`infer`, {k} particles", found[f"infer, {k}"], found[f"infer, {k}"].seconds,
            found[f"infer, {k}"].cold)
        for k in (1000, 10_000)
    ]  # fmt: skip
    rows.append(row("NUTS, 4 × 1 000, with warm-up", nuts, nuts.seconds, nuts.cold))
    rows.append(row("NUTS, its warm-up not counted", nuts, nuts.bare, float("nan")))
    for k in (1000, 10_000):
        of = found[f"sbi, {k}"]
        rows.append(row(f"sbi, {k} draws, weighted", of, of.seconds, of.cold))
    of = found["PyMC"]
    rows.append(row("PyMC's SMC, 2 × 1 000 draws", of, of.seconds, of.cold))
    print(f"\n### {name}\n")
    print(f"Compiled in {compile_seconds:.0f} s; {said}, on {number} simulations.")
    report.table(
        [
            "",
            "warm, ms",
            "cold, s",
            "effective samples: least, mean",
            "s for 1 000 effective: least, mean",
            "times `infer`'s: least, mean",
            "farthest mean from NUTS's, in sd",
        ],
        rows,
    )
    _many(many, base)
    _verdicts(name, found, compile_seconds)


def _spreads(made: Any, case: Case) -> np.ndarray:
    """Posterior standard deviations of all scalars."""
    found = made.infer(jax.random.key(9), case.data, 10_000)
    return np.concatenate([np.ravel(np.asarray(found.sd(site))) for site in case.sites])


def _many(many: list[list[float]], base: Found) -> None:
    cold, *warm = many
    rows = np.array(warm)
    cost = float(np.median(1000 * rows[:, 0] / rows[:, 2]))
    single = 1000 * float(np.median(base.seconds)) / base.mean
    print(f"`infer_many` on {MANY} data sets simulated from the model, 1 000 particles each:")
    print(
        f"{report.spread(rows[:, 0])} s, {report.spread(1e3 * rows[:, 0] / MANY)} ms per data set"
    )
    print(f"(cold {cold[0]:.1f} s in total), {report.short(rows[:, 2].mean() / MANY)} effective")
    print(
        f"samples per data set; {report.short(cost)} s per 1 000 effective samples, compared with"
    )
    print(f"{report.short(single)} s by separate calls of `infer`; {rows[0, 3]:.1%} graded poor.\n")


def _verdicts(name: str, found: dict[str, Found], compile_seconds: float) -> None:
    def cost(of: Found, seconds: np.ndarray) -> np.ndarray:
        return 1000 * float(np.median(seconds)) / np.array([of.least, of.mean])

    base, nuts = found["infer, 1000"], found["NUTS"]
    own = cost(base, base.seconds)
    if name == "pumps":
        for size in (1000, 10_000):
            each = cost(found[f"infer, {size}"], found[f"infer, {size}"].seconds)
            ratio, bare = (cost(nuts, seconds) / each for seconds in (nuts.seconds, nuts.bare))
            report.target(
                "on pumps at least 200 times as many effective samples per second as NUTS, warm, "
                f"with {size} particles",
                f"{report.short(ratio[0])} times by the minimum over scalars and "
                f"{report.short(ratio[1])} times by their mean, including the warm-up that a new "
                f"data set needs; {report.short(bare[0])} and {report.short(bare[1])} without it",
                bool(min(ratio) >= 200),
            )
    others = {label: of for label, of in found.items() if not label.startswith("infer")}
    ratios = {label: float(np.nanmin(cost(of, of.seconds) / own)) for label, of in others.items()}
    nearest = min(ratios, key=ratios.__getitem__)
    report.target(
        f"faster than every peer on {name}",
        f"the closest is {nearest}, at {report.short(ratios[nearest])} times the time per "
        "effective sample",
        ratios[nearest] > 1,
    )
    infer = float(np.median(base.seconds))
    bare_seconds = float(np.median(nuts.bare))
    warm_up = float(np.median(nuts.seconds)) - bare_seconds
    equal = warm_up + bare_seconds * base.mean / nuts.mean
    sets = compile_seconds / (equal - infer)
    print(
        f"\nBreak-even after {np.ceil(sets):.0f} data sets: for as many effective samples as "
        f"`infer` gives with 1 000 particles, NUTS takes {report.short(1e3 * equal)} ms, of which "
        f"{report.short(1e3 * warm_up)} ms are warm-up.",
        flush=True,
    )


def main() -> None:
    """Both models."""
    full = report.full(__doc__)
    for name in CASES:
        section(name, 240 if full else 60, 200_000 if full else 30_000, 15 if full else 5)


if __name__ == "__main__":
    main()
