"""Cost of inference from a new data set: `infer`, NUTS, sbi and PyMC, warm and cold.

Run as `python -m benchmarks.newdata [--full]`. Each method runs in its own process. Cold is the
first inference: it includes loading what was prepared and all compilation, but not imports. Warm
are later ones, measured in turn; `infer` and sbi, which take milliseconds, run five times in a row,
of which the median counts. Effective samples are of the means of all scalars, (sd / standard
error)²: by ArviZ for NUTS, from the weights for `infer` and sbi, and from the differences between
independent runs for PyMC's SMC. NUTS runs 4 vectorised chains of 1 000 after 500 steps of warm-up,
which every new data set requires; the eight schools are non-centred for NUTS and PyMC. sbi trains
its default NPE for as long as retrodict compiles, on simulations made beforehand, and corrects its
draws by importance sampling with the model's density.
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
from benchmarks.newdata_worker import CASES, ERRORS, Case
from benchmarks.peers import Peer, environment, run_interleaved

SBI = ("sbi==0.27.0", "torch==2.13.0")
PYMC = ("pymc==5.28.5",)
FOLDER = Path(__file__).parent
SIZES = (1000, 10_000)
# Data sets of `infer_many`.
NUM_DATASETS = 1000


class MethodResult(NamedTuple):
    """Measurements of one method.

    Attributes:
        cold: seconds of the first inference.
        seconds: of later ones, with everything that a new data set requires.
        sampling_seconds: the same without warm-up.
        min_ess, mean_ess: minimum and mean over scalars of the effective samples of an inference.
        means: of the scalars, averaged over inferences.
    """

    cold: float
    seconds: np.ndarray
    sampling_seconds: np.ndarray
    min_ess: float
    mean_ess: float
    means: np.ndarray

    def cost(self, seconds: np.ndarray) -> np.ndarray:
        """Seconds for 1 000 effective samples, by their minimum and by their mean."""
        return 1000 * float(np.median(seconds)) / np.array([self.min_ess, self.mean_ess])


class Files(NamedTuple):
    """The compiled model, simulations for sbi, and sbi's posterior."""

    compiled: Path
    simulations: Path
    sbi_posterior: Path


def compile_case(name: str, case: Case, seconds: float, path: Path) -> tuple[Any, float]:
    """Compile and save a model; return it with the seconds that it took."""
    report.log_progress(f"{name}: compiling for {seconds:.0f} s")
    start_time = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = rd.compile(
            jax.random.key(0),
            case.model,
            tuple(case.data),
            training=rd.Training(max_steps=1_000_000, max_seconds=seconds),
            progress_bar=False,
        )
    compiled.save(path)
    return compiled, time.perf_counter() - start_time


def train_sbi(name: str, files: Files, seconds: float) -> str:
    """Train and save sbi's posterior; return a description of the training."""
    report.log_progress(f"{name}: sbi trains for up to {seconds:.0f} s")
    arguments = ("train", str(files.simulations), str(seconds), str(files.sbi_posterior))
    with Peer(environment(*SBI), FOLDER / "newdata_sbi.py", *arguments) as peer:
        assert peer.process.stdout is not None
        curve = [line.split() for line in peer.process.stdout]
    return f"sbi was trained for {float(curve[-1][0]):.0f} s, {len(curve)} epochs"


def ask_numbers(peer: Peer, *words: object) -> list[float]:
    """Send a request to a peer and read numbers."""
    return [float(word) for word in peer.ask(*words)]


def summarise(first: list[float], load_seconds: float, rows: list[list[float]]) -> MethodResult:
    """Summarise a method that reports its effective samples."""
    results = np.array(rows)
    min_ess, mean_ess = np.median(results[:, 1:3], 0)
    cold = load_seconds + first[3]
    means = results[:, 4:].mean(0)
    return MethodResult(cold, results[:, 3], results[:, 0], min_ess, mean_ess, means)


def summarise_chains(first: list[float], rows: list[list[float]], size: int) -> MethodResult:
    """Summarise PyMC: the variance between independent chains gives the effective samples."""
    results = np.array(rows)
    chains = results[:, 1 : 1 + 2 * size].reshape(-1, size)
    ratio = chains.var(0, ddof=1) / np.mean(results[:, 1 + 2 * size :] ** 2, 0)
    mean_ess = 2 / ratio.mean()
    seconds = results[:, 0]
    return MethodResult(first[0], seconds, seconds, float("nan"), mean_ess, chains.mean(0))


class Methods:
    """All methods for one model, in processes that stay alive.

    Args:
        stack: ends the processes.
        name: of the model.
        files: what was prepared.
    """

    def __init__(self, stack: ExitStack, name: str, files: Files) -> None:
        self.name, self.files, self._stack = name, files, stack
        self.calls: dict[str, Callable[[int], list[float]]] = {}
        self.first: dict[str, list[float]] = {}
        self.load_seconds: dict[str, float] = {"NUTS": 0.0, "PyMC": 0.0}
        data = {site: value.tolist() for site, value in CASES[name].data.items()}
        if name == "schools":
            data["sigma"] = ERRORS.tolist()
        script, arguments = str(FOLDER / "newdata_sbi.py"), (files.simulations, files.sbi_posterior)
        sbi = self._start(environment(*SBI), script, "serve", name, *map(str, arguments))
        script = str(FOLDER / "newdata_pymc.py")
        pymc = self._start(environment(*PYMC), script, name, json.dumps(data))
        nuts = self._start(sys.executable, "-m", "benchmarks.newdata_worker", "nuts", name)
        for size in SIZES:
            peer, load_seconds = self.start_retrodict()
            self._add_sampler(f"infer, {size}", peer, size, load_seconds)
        load_seconds = float(sbi.read()[0])
        for size in SIZES:
            self._add_sampler(f"sbi, {size}", sbi, size, load_seconds)
        self.calls["NUTS"] = lambda seed: ask_numbers(nuts, "one", 0, seed)
        self.calls["PyMC"] = lambda seed: ask_numbers(pymc, 1000, seed)
        for label in ("NUTS", "PyMC"):
            report.log_progress(f"{name}: {label}, cold")
            self.first[label] = self.calls[label](1000)

    def _start(self, python: str | Path, *words: str) -> Peer:
        return self._stack.enter_context(Peer(Path(python), *words))

    def start_retrodict(self) -> tuple[Peer, float]:
        """Start a process that loads the compiled model; return the seconds of loading as well."""
        arguments = ("ours", self.name, str(self.files.compiled))
        peer = self._start(sys.executable, "-m", "benchmarks.newdata_worker", *arguments)
        return peer, float(peer.read()[0])

    def _add_sampler(self, label: str, peer: Peer, size: int, load_seconds: float) -> None:
        self.load_seconds[label] = load_seconds
        self.calls[label] = lambda seed: ask_numbers(peer, "one", size, seed)
        self.first[label] = ask_numbers(peer, "first", size, 1000)


def run_methods(
    name: str, files: Files, repeats: int
) -> tuple[dict[str, MethodResult], list[list[float]]]:
    """Measure all methods; return their results and those of `infer_many`."""
    results: dict[str, MethodResult] = {}
    with ExitStack() as stack:
        methods = Methods(stack, name, files)
        report.log_progress(f"{name}: all, warm")
        rows = run_interleaved(methods.calls, repeats)
        num_scalars = len(rows["NUTS"][0]) - 4
        for label, first in methods.first.items():
            if label == "PyMC":
                results[label] = summarise_chains(first, rows[label], num_scalars)
            else:
                results[label] = summarise(first, methods.load_seconds[label], rows[label])
        report.log_progress(f"{name}: infer_many, {NUM_DATASETS} data sets")
        peer, _ = methods.start_retrodict()
        many = [ask_numbers(peer, f"many-{NUM_DATASETS}", 1000, seed) for seed in range(4)]
    return results, many


def section(name: str, seconds: float, num_simulations: int, repeats: int) -> None:
    """Print the tables and targets of one model, and the break-even point of compiling."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        files = Files(*(Path(folder) / f"{name}{suffix}" for suffix in (".rd", ".npz", ".sbi")))
        compiled, compile_seconds = compile_case(name, case, seconds, files.compiled)
        values = simulations.simulate(compiled.graph, num_simulations)
        simulations.write(files.simulations, name, values, case.data)
        sbi_training = train_sbi(name, files, compile_seconds)
        results, many = run_methods(name, files, repeats)
    print(f"\n### {name}\n")
    print(f"Compiled in {compile_seconds:.0f} s; {sbi_training}, on {num_simulations} simulations.")
    _print_results(results, _posterior_sds(compiled, case))
    _print_infer_many(many, results["infer, 1000"])
    if name == "pumps":
        _print_nuts_targets(results)
    _print_peer_target(name, results)
    _print_break_even(results, compile_seconds)


def _posterior_sds(compiled: Any, case: Case) -> np.ndarray:
    """Posterior standard deviations of all scalars."""
    posterior = compiled.infer(jax.random.key(9), case.data, 10_000)
    return np.concatenate([np.ravel(np.asarray(posterior.sd(site))) for site in case.sites])


def _print_results(results: dict[str, MethodResult], sds: np.ndarray) -> None:
    infer, nuts, pymc = results["infer, 1000"], results["NUTS"], results["PyMC"]
    infer_cost = infer.cost(infer.seconds)

    def pair(values: Any) -> str:
        return ", ".join(map(report.format_number, values))

    def row(label: str, result: MethodResult, seconds: np.ndarray, cold: float) -> list[str]:
        cost = result.cost(seconds)
        return [
            label,
            report.format_quartiles(seconds, 1e3),
            report.format_number(cold),
            pair((result.min_ess, result.mean_ess)),
            pair(cost),
            pair(cost / infer_cost),
            f"{np.max(np.abs(result.means - nuts.means) / sds):.2f}",
        ]

    infers = {size: results[f"infer, {size}"] for size in SIZES}
    sbis = {size: results[f"sbi, {size}"] for size in SIZES}
    rows = [
        *(row(f"`infer`, {k} particles", r, r.seconds, r.cold) for k, r in infers.items()),
        row("NUTS, 4 × 1 000, with warm-up", nuts, nuts.seconds, nuts.cold),
        row("NUTS, its warm-up not counted", nuts, nuts.sampling_seconds, float("nan")),
        *(row(f"sbi, {k} draws, weighted", r, r.seconds, r.cold) for k, r in sbis.items()),
        row("PyMC's SMC, 2 × 1 000 draws", pymc, pymc.seconds, pymc.cold),
    ]
    header = [
        "",
        "warm, ms",
        "cold, s",
        "effective samples: least, mean",
        "s for 1 000 effective: least, mean",
        "times `infer`'s: least, mean",
        "farthest mean from NUTS's, in sd",
    ]
    report.print_table(header, rows)


def _print_infer_many(many: list[list[float]], infer: MethodResult) -> None:
    cold, *warm = many
    seconds, _, mean_ess, poor_share = np.array(warm).T
    cost = report.format_number(float(np.median(1000 * seconds / mean_ess)))
    single_cost = report.format_number(infer.cost(infer.seconds)[1])
    ess = report.format_number(mean_ess.mean() / NUM_DATASETS)
    per_dataset = report.format_quartiles(1e3 * seconds / NUM_DATASETS)
    print(f"`infer_many` on {NUM_DATASETS} data sets simulated from the model, 1 000 particles")
    print(f"each: {report.format_quartiles(seconds)} s, {per_dataset} ms per data set")
    print(f"(cold {cold[0]:.1f} s in total), {ess} effective")
    print(f"samples per data set; {cost} s per 1 000 effective samples, compared with")
    print(f"{single_cost} s by separate calls of `infer`; {poor_share[0]:.1%} graded poor.\n")


def _print_nuts_targets(results: dict[str, MethodResult]) -> None:
    nuts = results["NUTS"]
    for size in SIZES:
        infer = results[f"infer, {size}"]
        infer_cost = infer.cost(infer.seconds)
        ratio = nuts.cost(nuts.seconds) / infer_cost
        sampling_ratio = nuts.cost(nuts.sampling_seconds) / infer_cost
        by_min, by_mean, sampling_by_min, sampling_by_mean = map(
            report.format_number, (*ratio, *sampling_ratio)
        )
        report.print_target(
            "on pumps at least 200 times as many effective samples per second as NUTS, warm, "
            f"with {size} particles",
            f"{by_min} times by the minimum over scalars and {by_mean} times by their mean, "
            f"including the warm-up that a new data set needs; {sampling_by_min} and "
            f"{sampling_by_mean} without it",
            bool(min(ratio) >= 200),
        )


def _print_peer_target(name: str, results: dict[str, MethodResult]) -> None:
    infer = results["infer, 1000"]
    infer_cost = infer.cost(infer.seconds)
    ratios = {
        label: float(np.nanmin(result.cost(result.seconds) / infer_cost))
        for label, result in results.items()
        if not label.startswith("infer")
    }
    closest = min(ratios, key=ratios.__getitem__)
    report.print_target(
        f"faster than every peer on {name}",
        f"the closest is {closest}, at {report.format_number(ratios[closest])} times the time per "
        "effective sample",
        ratios[closest] > 1,
    )


def _print_break_even(results: dict[str, MethodResult], compile_seconds: float) -> None:
    infer, nuts = results["infer, 1000"], results["NUTS"]
    sampling = float(np.median(nuts.sampling_seconds))
    warmup = float(np.median(nuts.seconds)) - sampling
    nuts_seconds = warmup + sampling * infer.mean_ess / nuts.mean_ess
    num_datasets = compile_seconds / (nuts_seconds - float(np.median(infer.seconds)))
    print(
        f"\nBreak-even after {np.ceil(num_datasets):.0f} data sets: for as many effective samples "
        f"as `infer` gives with 1 000 particles, NUTS takes "
        f"{report.format_number(1e3 * nuts_seconds)} ms, of which "
        f"{report.format_number(1e3 * warmup)} ms are warm-up.",
        flush=True,
    )


def main() -> None:
    """Run both models."""
    full = report.parse_full_flag(__doc__)
    for name in CASES:
        section(name, 240 if full else 60, 200_000 if full else 30_000, 15 if full else 5)


if __name__ == "__main__":
    main()
