"""Streaming particle filter: one observation at a time, at constant cost and memory.

The proposal is the learned p(x_t | past, y_t), see Paige & Wood (2016), fig. 4 and sec. 5.3.
Latents outside of time cannot be proposed from a series that is still to come: they are sampled
from the prior at the start.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from retrodict._xla.jit import low_latency_jit, run_once
from retrodict.errors import DataError
from retrodict.graph.graph import Graph
from retrodict.graph.validate import validate_data
from retrodict.inference.adaptive_resampling import AdaptiveResampling
from retrodict.inference.impossible_data import ImpossibleData
from retrodict.inference.particle_filter import (
    ParticleFilter,
    SeriesParticles,
    StepInputs,
    StepKeys,
)
from retrodict.particles.population import Population, initial_population
from retrodict.particles.resampling import resampler
from retrodict.proposal.factor_proposals import Networks
from retrodict.proposal.proposal import Proposal, Stage


class FilterState(eqx.Module):
    """A filter between two observations.

    Attributes:
        population: the particles as the next step needs them.
        samples: site → `(particles, *shape)`: latents of the last step and latents outside of
            time.
        time: how many steps have been taken.
    """

    population: Population[SeriesParticles]
    samples: dict[str, Array]
    time: Int[Array, ""]

    @property
    def log_weights(self) -> Float[Array, " particles"]:
        """Normalised log weights."""
        return self.population.log_weights

    @property
    def log_evidence(self) -> float:
        """log p̂ of all observations so far, in double precision."""
        return float(self.population.log_evidence.value())

    @property
    def log_evidence_se(self) -> float:
        """Standard error of the log evidence, estimated from the genealogy."""
        return float(self.population.log_evidence_se())


class FilterInfo(NamedTuple):
    """What one step reports.

    Attributes:
        ess: effective sample size before the resampling decision.
        resampled: whether the particles were resampled.
    """

    ess: Float[Array, ""]
    resampled: Bool[Array, ""]


class StreamingFilter:
    """The functions of a streaming filter, each compiled once.

    Args:
        proposal: with an inverse of method "filter", for a model with one scan.
        resampling: the resampling scheme.
        ess_threshold: resample when the effective sample size is below this share of K.

    Raises:
        ValueError: the model cannot be filtered one observation at a time.
    """

    def __init__(
        self, proposal: Proposal, resampling: str = "systematic", ess_threshold: float = 0.5
    ) -> None:
        self.proposal = proposal
        self.resampling = AdaptiveResampling(resampler(resampling), ess_threshold)
        graph = proposal.graph
        series = [stage for stage in proposal.stages if stage.scan is not None]
        if graph.loops:
            raise ValueError(
                "filter_init needs a model with a scan; this one is written as a Python loop, of "
                "which every step has sites of its own. Write it with "
                "numpyro.contrib.control_flow.scan"
            )
        if len(series) != 1 or proposal.inverse.method != "filter":
            raise ValueError(
                "filter_init needs a model with one scan that alternates latents and observations, "
                f"compiled with inverse='filter'; this one has {len(series)} scans with latents, "
                f"and its inverse is '{proposal.inverse.method}'"
            )
        outside = [name for name in graph.observed if not graph.sites[name].time]
        if outside:
            raise ValueError(
                f"filter_init cannot stream a model that observes '{outside[0]}' outside of its "
                "scan. Make it a plain argument of the model, or use infer"
            )
        for argument, site, _, _ in graph.shared_arguments:
            raise DataError(
                f"filter_init cannot stream site '{site}': the argument '{argument}' of the model "
                "holds its values and enters other densities too. Use the value that "
                "numpyro.sample returns for the site in place of the argument, and compile the "
                "model without data"
            )
        self.stage: Stage = series[0]

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.proposal.graph

    @property
    def _scan(self) -> int:
        return self.stage.scan or 0

    @property
    def _length(self) -> int:
        """The number of steps that the model was compiled with."""
        return self.graph.scan_lengths[self._scan]

    def _step_graph(self, time: int) -> Graph:
        """The graph of the observed sites, as they are in one step."""
        if not any(self.graph.sites[name].mask is not None for name in self.graph.observed):
            time = 0
        if time not in self._step_graphs:
            self._step_graphs[time] = self._make_step_graph(time)
        return self._step_graphs[time]

    @cached_property
    def _step_graphs(self) -> dict[int, Graph]:
        return {}

    def _make_step_graph(self, time: int) -> Graph:
        sites = {}
        for name in self.graph.observed:
            site = self.graph.sites[name]
            axes = tuple(axis - 1 for axis in site.axes[1:])
            mask = None if site.mask is None else site.mask[time]
            sites[name] = replace(site, shape=site.shape[1:], time=False, axes=axes, mask=mask)
        return replace(self.graph, sites=sites, constant_data={})

    @cached_property
    def _has_fixed_length(self) -> bool:
        """Whether the model has inputs for a fixed number of steps only."""
        return bool(self.graph.constant_data) or any(
            site.time and (0 in site.heterogeneous_axes or site.mask is not None)
            for site in self.graph.sites.values()
        )

    def init(self, rng_key: PRNGKeyArray, num_particles: int) -> FilterState:
        """The state before the first observation.

        Args:
            rng_key: random key for the latents outside of time.
            num_particles: K.
        """
        if num_particles < 1:
            raise ValueError(f"num_particles is {num_particles}; at least one is needed")
        program, sites = self.graph.program, self.graph.sites
        outer_names = [name for name in self.graph.latent if not sites[name].time]

        def sample_outer(key: PRNGKeyArray) -> SeriesParticles:
            values = program.simulate(key)
            outer = {name: values[name] for name in outer_names}
            return SeriesParticles(outer, program.initial_carry(self._scan, outer))

        keys = jax.random.split(rng_key, num_particles)
        particles: SeriesParticles = run_once(jax.vmap(sample_outer), keys)
        blank = {
            name: jnp.zeros((num_particles, *sites[name].shape[1:]), sites[name].dtype)
            for name in self.graph.latent
            if sites[name].time
        }
        population = initial_population(num_particles).with_values(particles)
        return FilterState(population, {**particles.outer, **blank}, jnp.zeros((), jnp.int32))

    def step(
        self, networks: Networks, rng_key: PRNGKeyArray, state: FilterState, data: Mapping[str, Any]
    ) -> tuple[FilterState, FilterInfo]:
        """Take in the observations of one step.

        Args:
            networks: by name.
            rng_key: random key of the step.
            state: from `init` or from the step before.
            data: observed site → values, without the axis of time.

        Raises:
            DataError: the data do not fit the model, or the model has no inputs for another step.
            ImpossibleData: no particle gives the data a positive density.
        """
        if self._has_fixed_length and int(state.time) >= self._length:
            raise DataError(
                f"the model has inputs for {self._length} steps, and all of them have been taken. "
                "Call the model with inputs for more steps"
            )
        constants = {name: v[int(state.time)] for name, v in self.graph.constant_data.items()}
        arrays = validate_data(self._step_graph(int(state.time)), {**constants, **data})
        num_particles = state.log_weights.shape[0]
        state, info, possible = self._program(num_particles)(networks, rng_key, state, arrays)
        if int(state.population.failed_stage) >= 0:
            failure = f"every particle has weight zero after step {int(state.time)}"
            raise ImpossibleData(failure, possible)
        return state, info

    def _program(self, num_particles: int) -> Callable[..., Any]:
        """One step, compiled for a number of particles."""
        if num_particles not in self._programs:
            particle_filter = ParticleFilter(
                self.proposal, self.stage, num_particles, self.resampling
            )

            def step(networks: Any, key: PRNGKeyArray, state: FilterState, observed: Any) -> Any:
                resample_key, propagate_key = jax.random.split(key)
                inputs = StepInputs(jnp.minimum(state.time, self._length - 1), observed, {})
                before = state.population
                population, info = particle_filter.step(
                    networks, StepKeys(resample_key, propagate_key), before, {}, inputs
                )
                resampled = population.num_resamplings > before.num_resamplings
                # Resampling may have changed the latents outside of time as well.
                samples = {**population.values.outer, **info.samples}
                state = FilterState(population, samples, state.time + 1)
                return state, FilterInfo(info.resampling.ess, resampled), info.possible

            self._programs[num_particles] = low_latency_jit(step)
        return self._programs[num_particles]

    @cached_property
    def _programs(self) -> dict[int, Callable[..., Any]]:
        return {}
