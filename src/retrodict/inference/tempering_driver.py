"""Posterior inference by tempered SMC, for several data sets at a time.

A pilot run of tempered SMC chooses the path, and a second run with this path fixed gives the
evidence. The posterior consists of the particles of both. Each program advances one stage of every
run in a batch. A run that has ended is replaced by the next, so that no data set waits for those
that take more temperatures.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray
from tqdm.auto import tqdm

from retrodict._xla.jit import CompiledFunction, run_once
from retrodict._xla.tuning import FAST_COMPILE, LOW_LATENCY
from retrodict.graph.loop_surface import by_user_site
from retrodict.inference.impossible_data import ImpossibleData
from retrodict.inference.mcmc_kernels import MCMCKernels
from retrodict.inference.site_densities import any_possible
from retrodict.inference.tempered_smc import (
    INITIAL_DRAWS,
    PathStage,
    TemperedSMC,
    TemperingRun,
    TemperingStageInfo,
    TemperingState,
)
from retrodict.inference.tempered_target import Particle, TemperedTarget
from retrodict.inference.tempering_summary import TemperingSummary
from retrodict.particles.diagnostics import TemperingReport
from retrodict.particles.make_posterior import make_posterior
from retrodict.particles.posterior import Posterior
from retrodict.particles.resampling import Resampler, resampler
from retrodict.proposal.factor_proposals import Networks
from retrodict.proposal.proposal import Proposal
from retrodict.types import Values

# Fewer particles cannot show the shape of a posterior, nor be divided into islands.
FEWEST_PARTICLES_TO_TEMPER = 40
# Numbers of islands, and the fewest particles for each.
FEWEST_PARTICLES = ((16, 3200), (8, 800), (4, 200), (2, 0))
# About how much memory a particle takes while it is moved, for each number of the model's sites.
BYTES_PER_MOVED_VALUE = 4 * 100
# Data sets in a batch, and values of all its particles. Beyond this, a larger batch is not faster.
MAX_BATCH_SIZE, MAX_BATCH_VALUES = 16, 2**18
# A pilot run ends after this many temperatures, whether or not it has reached the posterior.
MAX_TEMPERATURES = 300
# If the pilot run predicts a larger standard error of log Ẑ, each step of the path is divided, into
# at most this many parts.
MAX_PREDICTED_SE, MAX_PARTS = 0.08, 5
# Added to the numbers of stages of the run with the fixed path, so that its random numbers differ.
FIXED_PATH_OFFSET = 2**20


@dataclass(frozen=True)
class DataSets:
    """Data sets with the keys and networks to infer them.

    Attributes:
        networks: by name.
        keys: one for each data set.
        data: from `check_data`, with the data sets on the first axis.
    """

    networks: Networks
    keys: PRNGKeyArray
    data: Mapping[str, Any]

    # Typed keys would be selected by a program that is compiled for each number of data sets.
    @cached_property
    def _key_data(self) -> np.ndarray[Any, Any]:
        return np.asarray(jax.random.key_data(self.keys))

    def inputs(self, number: int | list[int]) -> tuple[Networks, PRNGKeyArray, Values]:
        """Networks, keys and data of one data set, or of some."""
        key_data = jnp.asarray(self._key_data[number])
        keys = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(self.keys))
        data: dict[str, Any] = {n: np.asarray(v)[number] for n, v in self.data.items()}
        return self.networks, keys, data


@dataclass
class OngoingRun:
    """A run of one data set that is under way.

    Attributes:
        dataset: its number.
        state: for the next stage.
        path: to follow; None for a pilot run.
        pilot: the run that chose the path; None for a pilot run.
        start_time: of the pilot run.
        stages: reports of the stages so far.
    """

    dataset: int
    state: TemperingState
    path: tuple[PathStage, ...] | None
    pilot: "OngoingRun | None"
    start_time: float
    stages: list[TemperingStageInfo] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether there is no further stage."""
        if not self.stages:
            return False
        limit = MAX_TEMPERATURES if self.path is None else len(self.path)
        reached = self.stages[-1].stage.lam >= 1.0
        return bool(reached or self.state.failed or len(self.stages) >= limit)

    @property
    def run(self) -> TemperingRun:
        """The finished run."""
        return TemperingRun(self.state, tuple(self.stages))

    def arguments(self) -> tuple[TemperingState, Any, tuple[PathStage, Any], Any]:
        """Arguments of `TemperedSMC.advance` for the next stage."""
        index = len(self.stages)
        if self.path is None:
            # An adaptive run ignores the path.
            stage = PathStage(self.state.lam, jnp.int32(0), self.state.tuning)
            return self.state, np.int32(index + 1), (stage, stage.lam), np.array(False)
        stage = self.path[index]
        next_lam = self.path[min(index + 1, len(self.path) - 1)].lam
        number = np.int32(FIXED_PATH_OFFSET + index + 1)
        return self.state, number, (stage, next_lam), np.array(True)


def divided_path(pilot: TemperingRun) -> tuple[PathStage, ...]:
    """The path of a pilot run, with its steps divided where the error of log Ẑ would be large.

    With n temperatures in place of one, the relative variance of the mean weights falls to 1/n. It
    takes no more sweeps, unless there was only one: these are distributed over the temperatures.
    """
    variance = np.asarray(pilot.state.variance)
    # Moves leave particles correlated, which about doubles the variance.
    predicted = 2 * variance.mean() / variance.size
    parts = int(np.clip(np.ceil(predicted / MAX_PREDICTED_SE**2), 1, MAX_PARTS))
    stages = [info.stage for info in pilot.stages]
    path = stages[:1]
    for stage, following in pairwise(stages):
        sweeps = -(-following.num_sweeps // parts)
        for lam in np.geomspace(stage.lam, following.lam, parts + 1, dtype=np.float32)[1:-1]:
            path.append(following._replace(lam=lam, num_sweeps=sweeps))
        path.append(following._replace(num_sweeps=sweeps))
    return (*path[:-1], stages[-1])


@dataclass(frozen=True)
class Tempering:
    """Inference by tempered SMC, with its compiled programs.

    Attributes:
        proposal: its networks give half of the initial draws, and moves of discrete latents.
        num_particles: K.
        resampling: the resampling scheme.
        ess_share: the share of particles that stays effective from one temperature to the next.
        memory: bytes for the particles that are processed at a time.

    Raises:
        ValueError: there are too few particles.
    """

    proposal: Proposal
    num_particles: int
    resampling: str | Resampler = "systematic"
    ess_share: float = 0.5
    memory: int = 256 * 2**20

    def __post_init__(self) -> None:
        if self.num_particles < FEWEST_PARTICLES_TO_TEMPER:
            raise ValueError(
                f"num_particles is {self.num_particles}; tempering needs at least "
                f"{FEWEST_PARTICLES_TO_TEMPER}, because its moves are adapted to the particles"
            )

    @property
    def num_islands(self) -> int:
        """Islands of each of the two runs."""
        return next(n for n, least in FEWEST_PARTICLES if self.num_particles >= least)

    @cached_property
    def sampler(self) -> TemperedSMC:
        """Tempered SMC with half of the particles."""
        island_size = -(-self.num_particles // (2 * self.num_islands))
        # Without any resampling the posterior would not be reached.
        ess_share = float(np.clip(self.ess_share, 0.1, 0.95))
        batch_size = max(self.memory // (BYTES_PER_MOVED_VALUE * self._num_values), 1)
        kernels = MCMCKernels(TemperedTarget(self.proposal))
        scheme = resampler(self.resampling)
        return TemperedSMC(kernels, self.num_islands, island_size, scheme, ess_share, batch_size)

    @property
    def _num_values(self) -> int:
        """Values of one particle and its data."""
        return sum(int(np.prod(site.shape)) for site in self.proposal.graph.sites.values())

    @cached_property
    def _start(self) -> Callable[..., TemperingState]:
        return _compile(self.sampler.start)

    @cached_property
    def _advance(self) -> Callable[..., tuple[TemperingState, TemperingStageInfo]]:
        return _compile(jax.vmap(self.sampler.advance, in_axes=(None, 0, 0, 0, 0, 0, 0)))

    @cached_property
    def _complete(self) -> Callable[..., dict[str, Array]]:
        target = self.sampler.kernels.target

        def complete(
            networks: Networks,
            rng_key: PRNGKeyArray,
            data: Values,
            number: Int[Array, ""],
            particles: Particle,
        ) -> dict[str, Array]:
            rng_key = jax.random.fold_in(rng_key, number)
            keys = jax.random.split(rng_key, self.sampler.num_particles)
            return jax.vmap(lambda key, p: target.complete(key, data, p))(keys, particles)

        return _compile(complete)

    def one(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        data: Values,
        dims: Mapping[str, tuple[str, ...]],
    ) -> Posterior:
        """The posterior of one data set.

        Args:
            networks: by name.
            rng_key: random key.
            data: from `check_data`.
            dims: names of the axes of every site.

        Raises:
            ImpossibleData: no initial draw gives the data a positive density.
        """
        row: dict[str, Any] = {name: np.asarray(value)[None] for name, value in data.items()}
        result = self.many(networks, rng_key.reshape(1), row, [0], dims, batch_size=1)[0]
        if isinstance(result, ImpossibleData):
            raise result
        return result

    def many(
        self,
        networks: Networks,
        keys: PRNGKeyArray,
        data: Values,
        rows: Sequence[int],
        dims: Mapping[str, tuple[str, ...]],
        *,
        batch_size: int,
        max_seconds: float = float("inf"),
        progress_bar: bool = False,
    ) -> dict[int, Posterior | ImpossibleData]:
        """The posteriors of some data sets. Each depends on its own key and data only.

        Args:
            networks: by name.
            keys: one for each data set.
            data: from `check_data`, with the data sets on the first axis.
            rows: numbers of the data sets to infer.
            dims: names of the axes of every site.
            batch_size: data sets that are processed at a time.
            max_seconds: no stage begins after this time.
            progress_bar: whether to show how many data sets are done.

        Returns:
            Number of a data set → its posterior, or the error if no initial draw gives the data a
            positive density. Data sets for which there was no time are missing.
        """
        deadline = time.perf_counter() + max_seconds
        datasets = DataSets(networks, keys, data)
        waiting, running = deque(rows), list[OngoingRun]()
        results: dict[int, Posterior | ImpossibleData] = {}
        with tqdm(total=len(rows), desc="tempering", disable=not progress_bar) as bar:
            while (waiting or running) and time.perf_counter() < deadline:
                while waiting and len(running) < batch_size:
                    run = self._begin(datasets, waiting.popleft())
                    if run.state.failed:
                        results[run.dataset] = self._impossible(datasets, run.dataset)
                    else:
                        running.append(run)
                self._advance_all(datasets, running, batch_size)
                for run in [run for run in running if run.finished]:
                    running.remove(run)
                    if run.pilot is None:
                        running.append(self._begin(datasets, run.dataset, run))
                    else:
                        results[run.dataset] = self._finish(datasets, run, dims)
                if len(results) > bar.n:
                    bar.update(len(results) - bar.n)
        return results

    def batch_size(self, memory: int) -> int:
        """Data sets that are processed at a time.

        It does not depend on their number: another size is another program, whose rounding differs.
        """
        num_values = self._num_values * self.sampler.num_particles
        allowed = min(MAX_BATCH_VALUES, memory // BYTES_PER_MOVED_VALUE) // num_values
        return int(np.clip(allowed, 1, MAX_BATCH_SIZE))

    def _begin(
        self, datasets: DataSets, dataset: int, pilot: OngoingRun | None = None
    ) -> OngoingRun:
        """Start the pilot run of a data set, or the run with its path fixed."""
        start_time = time.perf_counter() if pilot is None else pilot.start_time
        path = None if pilot is None else divided_path(pilot.run)
        lam, number = (np.float32(np.nan), 0) if path is None else (path[0].lam, FIXED_PATH_OFFSET)
        state = self._start(
            *datasets.inputs(dataset), np.int32(number), lam, np.array(path is not None)
        )
        return OngoingRun(dataset, jax.device_get(state), path, pilot, start_time)

    def _advance_all(self, datasets: DataSets, running: list[OngoingRun], size: int) -> None:
        """One stage of every run. The first run is repeated to fill up the batch."""
        if not running:
            return
        runs = running + running[:1] * (size - len(running))
        arguments = jax.tree.map(lambda *rows: np.stack(rows), *(run.arguments() for run in runs))
        inputs = datasets.inputs([run.dataset for run in runs])
        states, infos = jax.device_get(self._advance(*inputs, *arguments))
        for row, run in enumerate(running):
            run.state, info = jax.tree.map(lambda leaf, row=row: leaf[row], (states, infos))
            run.stages.append(info)

    def _finish(
        self, datasets: DataSets, fixed: OngoingRun, dims: Mapping[str, tuple[str, ...]]
    ) -> Posterior:
        assert fixed.pilot is not None
        inputs = datasets.inputs(fixed.dataset)
        # The fixed-path run comes first: if there is a particle too many, it is one of the pilot's.
        parts = [
            self._complete(*inputs, np.int32(number), run.state.particles.particle)
            for number, run in (
                (FIXED_PATH_OFFSET - 1, fixed),
                (FIXED_PATH_OFFSET - 2, fixed.pilot),
            )
        ]
        samples = {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0]}
        summary = TemperingSummary.of(fixed.run, fixed.pilot.run)
        seconds = time.perf_counter() - fixed.start_time
        return self._posterior(samples, summary, inputs[-1], dims, seconds)

    def _posterior(
        self,
        samples: Mapping[str, Array],
        summary: TemperingSummary,
        data: Values,
        dims: Mapping[str, tuple[str, ...]],
        seconds: float,
    ) -> Posterior:
        num = self.num_particles
        grade, reasons = summary.grade()
        posterior = make_posterior(
            {name: value[:num] for name, value in samples.items()},
            jnp.asarray(summary.log_weights[:num], jnp.float32),
            log_evidence_se=jnp.asarray(summary.log_evidence_se, jnp.float32),
            num_resamplings=jnp.asarray(summary.num_temperatures),
            ess_by_stage=jnp.asarray(summary.ess_by_stage),
            method="temper",
            data=data,
            dims=dims,
        )
        return replace(
            posterior,
            grade=np.maximum(posterior.grade, grade),
            eves=jnp.asarray(summary.island[:num]),
            log_evidence=np.asarray(summary.log_evidence, np.float64)[()],
            remarks=reasons,
            tempering=TemperingReport(
                temperatures=summary.temperatures,
                acceptance=summary.trajectory_acceptance,
                discrete_acceptance=summary.change_acceptance,
                sweeps=summary.num_sweeps,
                seconds=seconds,
                ess_by_islands=summary.ess_by_islands,
                num_draws=2 * INITIAL_DRAWS * self.sampler.num_particles,
            ),
        )

    def _impossible(self, datasets: DataSets, dataset: int) -> ImpossibleData:
        """The error for data that no initial draw gives a positive density."""
        target = self.sampler.kernels.target

        def possible(networks: Networks, rng_key: PRNGKeyArray, data: Values) -> dict[str, Array]:
            def observed_densities(particle: Particle) -> dict[str, Array]:
                values = target.constrain(particle).values
                return target.site_densities.by_element(target.graph.observed, {**data, **values})

            draws = self.sampler.draw(networks, rng_key, data).particles.particle
            densities = jax.vmap(observed_densities)(draws)
            by_step = {
                name: jnp.any(density > -jnp.inf, 0).reshape(len(site.steps), -1).all(1)
                for name, density in densities.items()
                if (site := target.graph.sites[name]).steps
            }
            return any_possible(densities) | by_step

        flags = run_once(possible, *datasets.inputs(dataset))
        num_draws = INITIAL_DRAWS * self.sampler.num_particles
        failure = f"none of {num_draws} draws from networks and prior fits the data"
        return ImpossibleData(failure, by_user_site(target.graph, flags))


def _compile(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a program that takes longer to compile than it runs for most users."""
    return CompiledFunction(fn, {**LOW_LATENCY, **FAST_COMPILE})
