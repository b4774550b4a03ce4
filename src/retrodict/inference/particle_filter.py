"""A particle filter over the steps of a scan.

Each step resamples, propagates and reweights: it samples the step's latents given the carry of the
step before and the step's observations, and counts the densities x_t | x_{t−1} and y_t | x_t
(Paige & Wood 2016, fig. 4 and sec. 5.3).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from retrodict._xla.batch_last import sum_all
from retrodict._xla.scan import scan
from retrodict.graph.graph import Graph
from retrodict.inference.adaptive_resampling import AdaptiveResampling, ResamplingInfo
from retrodict.inference.site_densities import any_possible, map_particles
from retrodict.inference.vmap_batches import batched_vmap
from retrodict.inverse.density_schedule import DensitySchedule
from retrodict.particles.genealogy import trace_trajectories
from retrodict.particles.population import Population, reweight
from retrodict.proposal.factor_proposals import Networks
from retrodict.proposal.proposal import Proposal, Stage, StepNoise, StepSummaries
from retrodict.types import Values


class SeriesParticles(NamedTuple):
    """What a particle filter carries from step to step; resampling gathers all of it.

    Attributes:
        outer: latents sampled before the series, by site.
        carry: the carry of the model's scan.
        log_weight_share: the part of the log weight of `outer` that each step counts, or None.
    """

    outer: dict[str, Array]
    carry: Any
    log_weight_share: Float[Array, " particles"] | None = None


class StepInputs(NamedTuple):
    """What one step of the series is given.

    Attributes:
        time: number of the step.
        observed: the step's observations, by site.
        summaries: what the proposal reads of the rest of the series, by factor.
        noise: randomness of the proposal, if it was made beforehand.
    """

    time: Array
    observed: Values
    summaries: StepSummaries
    noise: StepNoise | None = None


class StepKeys(NamedTuple):
    """Random keys of one step."""

    resample: PRNGKeyArray
    propagate: PRNGKeyArray


class StepInfo(NamedTuple):
    """What one step reports, or with a leading axis of time what a series reports.

    Attributes:
        samples: the step's latents, by site.
        resampling: the decision before the step.
        possible: for each site of the step, whether any particle gives it a positive density.
    """

    samples: dict[str, Array]
    resampling: ResamplingInfo
    possible: dict[str, Bool[Array, "*steps"]]


class SeriesInfo(NamedTuple):
    """What a particle filter reports of a whole series.

    Attributes:
        resampling: the decision before every step, in sampling order.
        filtered: latents of every step before later steps resampled them: time, particles, shape.
        filtered_log_weights: the weights that belong to them.
        possible: for each site of the scan, whether it was possible at each step.
    """

    resampling: ResamplingInfo
    filtered: dict[str, Array]
    filtered_log_weights: Float[Array, "time particles"]
    possible: dict[str, Bool[Array, "*time"]]


@dataclass(frozen=True)
class ParticleFilter:
    """A particle filter for one scan of a model.

    Attributes:
        proposal: samples the latents of each step.
        stage: the factors of the scan's steps.
        num_particles: K.
        resampling: when and how to resample.
        stage_number: of the stage among all stages, recorded if no particle keeps any weight.
    """

    proposal: Proposal
    stage: Stage
    num_particles: int
    resampling: AdaptiveResampling
    stage_number: int = 0

    @cached_property
    def schedule(self) -> DensitySchedule:
        """Which densities are counted."""
        return DensitySchedule(self.proposal.inverse)

    @property
    def _graph(self) -> Graph:
        return self.proposal.graph

    @property
    def _scan(self) -> int:
        assert self.stage.scan is not None
        return self.stage.scan

    def run(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        population: Population[dict[str, Array]],
        data: Values,
        deferred: Float[Array, " particles"] | None,
    ) -> tuple[Population[dict[str, Array]], SeriesInfo]:
        """Filter a whole series.

        Args:
            networks: by name.
            rng_key: random key.
            population: the particles before the series.
            data: observed values of all sites.
            deferred: log weights of the latents sampled before the series, which its steps count
                in equal parts; None if nothing was deferred.

        Returns:
            the population with whole trajectories, and what the steps reported.
        """
        graph, scan_number = self._graph, self._scan
        length, backward = graph.scan_lengths[scan_number], graph.reversed_scans[scan_number]
        outer_data, inputs = self._inputs(networks, data)
        carry = map_particles(
            lambda latents: graph.program.initial_carry(scan_number, {**data, **latents}),
            population.values,
            self.num_particles,
        )
        share = None if deferred is None else deferred / length
        state = population.with_values(SeriesParticles(population.values, carry, share))
        resample_key, propagate_key = jax.random.split(rng_key)
        # One call for all steps is faster than one in each, and the noise takes no more memory than
        # the trajectories.
        shape = (length, self.num_particles)
        noise = self.proposal.step_noise(networks, propagate_key, self.stage, shape)
        keys = jax.random.split(resample_key, (length, 2))

        def step(state: Population[SeriesParticles], entry: Any) -> tuple[Any, Any]:
            step_keys, step_inputs = entry
            state, info = self.step(networks, step_keys, state, outer_data, step_inputs)
            return state, (info, state.log_weights)

        entries = StepKeys(keys[:, 0], keys[:, 1]), inputs._replace(noise=noise)
        state, (infos, log_weights) = scan(step, state, entries, reverse=backward)
        return self._finish(state, infos, log_weights, backward)

    def _inputs(self, networks: Networks, data: Values) -> tuple[dict[str, Array], StepInputs]:
        """The data outside of the series, and the inputs of all steps, time first."""
        outer_data, series_data = self.proposal.split(self._scan, data)
        summaries = self.proposal.summaries(networks, self.stage, data)
        times = jnp.arange(self._graph.scan_lengths[self._scan])
        return outer_data, StepInputs(times, series_data, summaries)

    @staticmethod
    def _finish(
        state: Population[SeriesParticles],
        infos: StepInfo,
        log_weights: Float[Array, "time particles"],
        backward: bool,
    ) -> tuple[Population[dict[str, Array]], SeriesInfo]:
        resampling = infos.resampling
        if backward:
            resampling = ResamplingInfo(*(entries[::-1] for entries in resampling))
        trajectories = trace_trajectories(infos.samples, resampling.ancestors, backward)
        population = state.with_values({**state.values.outer, **trajectories})
        return population, SeriesInfo(resampling, infos.samples, log_weights, infos.possible)

    def step(
        self,
        networks: Networks,
        rng_keys: StepKeys,
        state: Population[SeriesParticles],
        outer_data: Values,
        inputs: StepInputs,
    ) -> tuple[Population[SeriesParticles], StepInfo]:
        """One step of the filter.

        Args:
            networks: by name.
            rng_keys: of this step.
            state: the particles after the step before.
            outer_data: observed values outside of the series.
            inputs: what the step is given.
        """
        # Resample
        state, resampling = self.resampling(rng_keys.resample, state)

        # Propagate
        carry, samples, log_q, densities = self._propagate(
            networks, rng_keys.propagate, state.values, outer_data, inputs
        )
        share = state.values.log_weight_share
        state = state._replace(values=state.values._replace(carry=carry))

        # Reweight
        increment = sum(densities.values(), jnp.zeros(()) if share is None else share) - log_q
        state = reweight(state, increment, self.stage_number)
        return state, StepInfo(samples, resampling, any_possible(densities))

    def _propagate(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        particles: SeriesParticles,
        outer_data: Values,
        inputs: StepInputs,
    ) -> tuple[Any, dict[str, Array], Float[Array, " particles"], dict[str, Array]]:
        """Sample the step's latents: carry after the step, latents, log q, and log densities.

        Latents sampled from the model's own conditional are counted neither in log q nor in the
        densities, because the two cancel.
        """
        proposal, stage = self.proposal, self.stage
        noise = inputs.noise
        if noise is None:
            noise = proposal.step_noise(networks, rng_key, stage, (self.num_particles,))

        def propagate_one(noise: StepNoise, outer: Values, carry: Any) -> Any:
            step = proposal.draw_step(
                networks,
                noise,
                stage,
                {**outer_data, **outer},
                inputs.observed,
                inputs.time,
                carry,
                inputs.summaries,
            )
            densities = {
                name: sum_all(density)
                for name, density in step.evaluation.log_density.items()
                if name in self.schedule.counted
            }
            log_qs = (
                log_q
                for latents, log_q in step.log_q.items()
                if self.schedule.prior_latents.isdisjoint(latents)
            )
            return step.carry, step.latents, sum(log_qs, jnp.zeros(())), densities

        bytes_each = proposal.working_bytes(networks, stage)
        result: tuple[Any, dict[str, Array], Array, dict[str, Array]] = batched_vmap(
            propagate_one, bytes_each, noise, particles.outer, particles.carry
        )
        return result
