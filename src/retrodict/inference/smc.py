"""Sequential Monte Carlo over the stages of an inverse.

Stage n samples the latents of its factors from the proposal, and multiplies the weights by
γ_n / (γ_{n−1} q_n), where the target γ_n is the product of the densities whose variables are all
known (`DensitySchedule`). Without resampling this is importance sampling; with resampling in the
order of the inverse it is SMC (Paige & Wood 2016, sec. 2.1, eq. 3); a stage that is a series in
time is a particle filter.

Latents θ that are sampled before a series, from a proposal that has read all of it, need a target
of their own. If p(θ) / q(θ | y) were counted at once, the target of the first stage would be the
prior, and resampling would discard what the network has learned from the data. If it were counted
at the end, the intermediate targets would contain the data twice. So each of the T steps counts an
equal part, and the target after step t is

    γ_t(θ, x_1:t) = q(θ | y) [p(θ) / q(θ | y)]^{t/T} p(x_1:t, y_1:t | θ).

It is q(θ | y) at first and p(θ, x, y) at last. In between it is nearly free of θ, because
q(θ | y) / p(θ) is about p(y | θ), and each step contributes about one T-th of log p(y | θ).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from retrodict._xla.batch_last import sum_all
from retrodict.inference.adaptive_resampling import AdaptiveResampling, ResamplingInfo
from retrodict.inference.latent_archive import LatentArchive
from retrodict.inference.particle_filter import ParticleFilter, SeriesInfo
from retrodict.inference.site_densities import SiteDensities, any_possible
from retrodict.inference.vmap_batches import batched_vmap
from retrodict.inverse.density_schedule import DensitySchedule
from retrodict.particles.genealogy import surviving_draws
from retrodict.particles.population import Population, initial_population, reweight
from retrodict.particles.resampling import Resampler
from retrodict.particles.weights import ess
from retrodict.proposal.factor_proposals import Networks
from retrodict.proposal.proposal import Proposal, Stage
from retrodict.types import Values

LatentPopulation = Population[dict[str, Array]]


class SMCState(NamedTuple):
    """What the next stage needs.

    Attributes:
        population: the particles, with the latents that later stages read.
        archive: the latents that no later stage reads.
        deferred: log weights of latents sampled before a series that are not counted yet, see the
            module's docstring; None if there are none.
    """

    population: LatentPopulation
    archive: LatentArchive
    deferred: Float[Array, " particles"] | None


class StageInfo(NamedTuple):
    """What one stage reports.

    Attributes:
        resampling: the decisions of the stage, with a leading axis: none at the first stage, one
            before each step of a series, otherwise one.
        possible: for each site counted, whether any particle gives it a positive density.
        series: what the particle filter reported, if the stage is a series.
    """

    resampling: ResamplingInfo
    possible: dict[str, Bool[Array, ""]]
    series: SeriesInfo | None = None


class SMCInfo(NamedTuple):
    """What a run reports beside the last population.

    Attributes:
        log_evidence_se: standard error of the log evidence.
        survivors: for each latent, the effective number of its draws that survive in the last
            population: one number, or one for each step of a series.
        ess_by_stage: effective sample size before each resampling decision, and at the end.
        ancestors: ancestor indices of each resampling decision.
        filtered, filtered_log_weights: of the last series, see `SeriesInfo`; None without a series.
        possible: for each site counted, whether any particle gives it a positive density.
    """

    log_evidence_se: Float[Array, ""]
    survivors: dict[str, Array]
    ess_by_stage: Float[Array, " stages"]
    ancestors: Int[Array, "stages particles"]
    filtered: dict[str, Array] | None
    filtered_log_weights: Float[Array, "time particles"] | None
    possible: dict[str, Bool[Array, "*time"]]


@dataclass(frozen=True)
class SMC:
    """Runs a proposal as sequential Monte Carlo.

    Attributes:
        proposal: samples the latents of each stage.
        num_particles: K.
        resampler: the scheme that chooses ancestors.
        ess_threshold: resample when the effective sample size is below this share of K; 0 is never.
            It may be a traced array.
    """

    proposal: Proposal
    num_particles: int
    resampler: Resampler
    ess_threshold: float | Float[Array, ""]

    @cached_property
    def schedule(self) -> DensitySchedule:
        """Which densities are counted at which stage."""
        return DensitySchedule(self.proposal.inverse)

    @cached_property
    def _densities(self) -> SiteDensities:
        return SiteDensities(self.proposal.graph)

    @cached_property
    def _resampling(self) -> AdaptiveResampling:
        return AdaptiveResampling(self.resampler, self.ess_threshold)

    @cached_property
    def _last_series(self) -> int:
        """The number of the last stage that is a particle filter, or −1."""
        stages = enumerate(self.proposal.stages)
        return max((n for n, s in stages if self.proposal.runs_forward(s)), default=-1)

    @cached_property
    def _last_reads(self) -> dict[str, int]:
        return self.schedule.last_reads(list(map(self.proposal.parents, self.proposal.stages)))

    def run(
        self, networks: Networks, rng_key: PRNGKeyArray, data: Values
    ) -> tuple[LatentPopulation, SMCInfo]:
        """Run all stages for one data set: the weighted particles, and what the run reports."""
        if self._resampling.never and self._last_series < 0:
            return self._importance_sampling(networks, rng_key, data)
        state = SMCState(initial_population(self.num_particles), LatentArchive(), None)
        decisions, series = [], None
        possible: dict[str, Bool[Array, ""]] = {}
        for number, stage in enumerate(self.proposal.stages):
            stage_key = jax.random.fold_in(rng_key, number)
            run_stage = self._series if self.proposal.runs_forward(stage) else self._stage
            state, info = run_stage(networks, stage_key, number, state, data)
            decisions.append(info.resampling)
            possible |= info.possible
            series = series if info.series is None else info.series
        latents = {**state.archive.values(), **state.population.values}
        population = state.population._replace(values=latents)
        return population, self._info(population, decisions, possible, series)

    def _stage(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        number: int,
        state: SMCState,
        data: Values,
    ) -> tuple[SMCState, StageInfo]:
        """A stage that is sampled at once: a factor outside of time, or a whole series."""
        stage, closing = self.proposal.stages[number], self.schedule.closing[number]
        resample_key, propagate_key = jax.random.split(rng_key)

        # Resample
        state, resampling = self._resample(resample_key, number, state)

        # Propagate
        population, log_q = self._propagate(networks, propagate_key, stage, state.population, data)

        # Reweight
        densities = self._densities.population_totals(
            closing, data, population.values, self.num_particles
        )
        increment = self._total(densities, closing) - log_q
        info = StageInfo(resampling, any_possible(densities))
        if number < self._last_series:
            deferred = increment if state.deferred is None else state.deferred + increment
            return state._replace(population=population, deferred=deferred), info
        population = _reweight_values_apart(population, increment, number)
        return state._replace(population=population), info

    def _series(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        number: int,
        state: SMCState,
        data: Values,
    ) -> tuple[SMCState, StageInfo]:
        """A stage that is a series in the direction of time: a particle filter."""
        # Resample, propagate and reweight at every step
        stage = self.proposal.stages[number]
        particle_filter = ParticleFilter(
            self.proposal, stage, self.num_particles, self._resampling, number
        )
        population, series = particle_filter.run(
            networks, rng_key, state.population, data, state.deferred
        )
        resampling = series.resampling
        if number == 0:  # there are no weights before the first step
            resampling = ResamplingInfo(*(entries[1:] for entries in resampling))

        # Reweight by the densities outside of the scan that close with it
        closing = [name for name in self.schedule.closing[number] if name not in series.possible]
        if closing:
            densities = self._densities.population_totals(
                closing, data, population.values, self.num_particles
            )
            increment = self._total(densities, closing)
            population = _reweight_values_apart(population, increment, number)
            series = series._replace(possible=series.possible | any_possible(densities))
        state = state._replace(population=population, deferred=None)
        return state, StageInfo(resampling, series.possible, series)

    def _resample(
        self, rng_key: PRNGKeyArray, number: int, state: SMCState
    ) -> tuple[SMCState, ResamplingInfo]:
        """Resample the latents that this or a later stage reads, and the deferred weights."""
        if number == 0:
            return state, _no_decision(self.num_particles)
        values = state.population.values
        needed = {n: value for n, value in values.items() if self._last_reads[n] >= number}
        unread = {n: value for n, value in values.items() if n not in needed}
        # Values are passed by position, not by name: stages of equal shapes are traced once.
        population, info = self._resample_traced(
            rng_key, state.population.with_values(list(needed.values()))
        )
        values = dict(zip(needed, population.values, strict=True))
        deferred = None if state.deferred is None else state.deferred[info.ancestors]
        state = SMCState(
            population.with_values(values), state.archive.add(unread, info.ancestors), deferred
        )
        return state, ResamplingInfo(*(entry[None] for entry in info))

    @cached_property
    def _resample_traced(self) -> Callable[..., tuple[Population[list[Array]], ResamplingInfo]]:
        return jax.jit(lambda rng_key, population: self._resampling(rng_key, population))

    def _propagate(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        stage: Stage,
        population: LatentPopulation,
        data: Values,
    ) -> tuple[LatentPopulation, Float[Array, " particles"]]:
        """Sample the latents of a stage that is no particle filter, and their log q.

        Latents sampled from the model's own conditional are not counted, so that their log q is 0.
        """
        proposal, factor = self.proposal, stage.factors[0]
        # Noise for the whole population takes one operation, a key for each particle takes many.
        shared_noise = stage.scan is None
        if shared_noise:
            randomness = proposal.noise(networks, rng_key, factor, (self.num_particles,))
        else:
            randomness = jax.random.split(rng_key, self.num_particles)

        def propagate_one(randomness: Array, latents: Values) -> tuple[dict[str, Array], Array]:
            values = {**data, **latents}
            if not shared_noise:
                return proposal.draw_stage(networks, randomness, stage, values)
            samples, log_q = proposal.draw_copies(networks, randomness, factor, values)
            return samples, sum_all(log_q)

        # Each batch would repeat what depends on the data alone; without latents that is all.
        bytes_each = proposal.working_bytes(networks, stage) if population.values else 0
        parents = proposal.parents(stage)
        latents = {name: v for name, v in population.values.items() if name in parents}
        samples, log_q = batched_vmap(propagate_one, bytes_each, randomness, latents)
        not_counted = self.schedule.prior_latents.intersection(samples)
        if not_counted:
            assert len(not_counted) == len(samples), (
                "a stage samples either all or none from the prior"
            )
            log_q = jnp.zeros_like(log_q)
        return population._replace(values={**population.values, **samples}), log_q

    def _importance_sampling(
        self, networks: Networks, rng_key: PRNGKeyArray, data: Values
    ) -> tuple[LatentPopulation, SMCInfo]:
        """All stages without resampling: one run of the model evaluates all densities."""
        # Propagate
        population, log_qs = initial_population(self.num_particles), []
        for number, stage in enumerate(self.proposal.stages):
            _, propagate_key = jax.random.split(jax.random.fold_in(rng_key, number))
            population, log_q = self._propagate(networks, propagate_key, stage, population, data)
            log_qs.append(log_q)

        # Reweight
        densities = self._densities.population_totals(
            self.schedule.counted, data, population.values, self.num_particles
        )
        identity = jnp.arange(self.num_particles, dtype=jnp.int32)
        decisions = [_no_decision(self.num_particles)]
        for number, (closing, log_q) in enumerate(zip(self.schedule.closing, log_qs, strict=True)):
            if number > 0:
                sizes = ess(population.log_weights)
                decisions.append(ResamplingInfo(sizes[None], identity[None]))
            increment = self._total(densities, closing) - log_q
            population = _reweight_values_apart(population, increment, number)
        return population, self._info(population, decisions, any_possible(densities))

    def _total(
        self, densities: dict[str, Array], names: Sequence[str]
    ) -> Float[Array, " particles"]:
        return sum((densities[name] for name in names), jnp.zeros(self.num_particles))

    def _info(
        self,
        population: LatentPopulation,
        decisions: Sequence[ResamplingInfo],
        possible: dict[str, Bool[Array, ""]],
        series: SeriesInfo | None = None,
    ) -> SMCInfo:
        ancestors = jnp.concatenate([decision.ancestors for decision in decisions])
        sizes = [decision.ess for decision in decisions]
        return SMCInfo(
            log_evidence_se=population.log_evidence_se(),
            survivors=self._survivors(ancestors, population.log_weights),
            ess_by_stage=jnp.concatenate([*sizes, ess(population.log_weights)[None]]),
            ancestors=ancestors,
            filtered=None if series is None else series.filtered,
            filtered_log_weights=None if series is None else series.filtered_log_weights,
            possible=possible,
        )

    def _survivors(
        self, ancestors: Int[Array, "stages particles"], log_weights: Float[Array, " particles"]
    ) -> dict[str, Array]:
        """By latent, the effective number of surviving draws of its stage, or of its steps."""
        graph, generation = self.proposal.graph, 0
        if self._resampling.never:
            surviving = jnp.full(ancestors.shape[0] + 1, ess(log_weights))
        else:
            surviving = surviving_draws(ancestors, log_weights)
        survivors: dict[str, Array] = {}
        for stage in self.proposal.stages:
            of_stage, length = surviving[generation], 1
            if stage.scan is not None and self.proposal.runs_forward(stage):
                length = graph.scan_lengths[stage.scan]
                of_stage = surviving[generation : generation + length]
                of_stage = of_stage[::-1] if graph.reversed_scans[stage.scan] else of_stage
            survivors |= {name: of_stage for factor in stage.factors for name in factor.latents}
            generation += length
        return survivors


def _no_decision(num_particles: int) -> ResamplingInfo:
    """The resampling decisions of the first stage, which are none."""
    return ResamplingInfo(jnp.zeros(0), jnp.zeros((0, num_particles), jnp.int32))


_reweight_traced = jax.jit(reweight)


def _reweight_values_apart(
    population: LatentPopulation, increment: Float[Array, " particles"], stage: int
) -> LatentPopulation:
    """`reweight` without the values, so that it is traced once for all stages."""
    weighted: Population[None] = _reweight_traced(population.with_values(None), increment, stage)
    return weighted.with_values(population.values)
