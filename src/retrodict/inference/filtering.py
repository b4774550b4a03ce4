"""One observation at a time in; the filtering distribution out, at a constant cost and memory.

A particle filter whose proposal is the learned p(x_t | past, y_t): Paige & Wood (2016), fig. 4 and
sec. 5.3. Latents outside of time cannot be proposed from a series that is still to come: they are
drawn from the prior at the start.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from retrodict._xla.jit import run_often
from retrodict.errors import DataError
from retrodict.graph.graph import Graph
from retrodict.graph.validate import checked_data
from retrodict.inference.smc import Engine, carried
from retrodict.particles.population import Population, blame, start
from retrodict.particles.resampling import resampler
from retrodict.proposal.proposal import Networks, Proposal, Stage


class FilterState(eqx.Module):
    """A filter between two observations.

    Attributes:
        samples: site → (particles, *shape of one step), and the latents outside of time.
        time: how many steps have been taken.
    """

    population: Population
    samples: dict[str, Array]
    time: Int[Array, ""]

    @property
    def log_weights(self) -> Float[Array, " particles"]:
        """Normalised."""
        return self.population.log_weights

    @property
    def log_evidence(self) -> float:
        """log p̂ of all observations so far, in double precision."""
        return float(self.population.log_evidence.value())

    @property
    def log_evidence_se(self) -> float:
        """Its standard error, by what is left of the particles' families."""
        return float(self.population.log_evidence_se())


class FilterInfo(NamedTuple):
    """What one step reports: ESS before the resampling decision, and whether it was to resample."""

    ess: Float[Array, ""]
    resampled: Bool[Array, ""]


class StreamingFilter:
    """The functions of a filter, compiled once."""

    def __init__(
        self, proposal: Proposal, resampling: str = "systematic", ess_threshold: float = 0.5
    ) -> None:
        self.proposal = proposal
        self.resampling, self.ess_threshold = resampling, ess_threshold
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
        self.stage: Stage = series[0]

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.proposal.graph

    @cached_property
    def _step_graph(self) -> Graph:
        """The graph of the observed sites as one step has them."""
        sites = {}
        for name in self.graph.observed:
            site = self.graph.sites[name]
            axes = tuple(axis - 1 for axis in site.axes[1:])
            sites[name] = replace(site, shape=site.shape[1:], time=False, axes=axes)
        return replace(self.graph, sites=sites)

    @cached_property
    def _ends(self) -> bool:
        """Whether the model has inputs for a fixed number of steps only."""
        return any(site.time and 0 in site.unlike for site in self.graph.sites.values())

    def init(self, rng_key: PRNGKeyArray, num_particles: int) -> FilterState:
        """Before the first observation."""
        if num_particles < 1:
            raise ValueError(f"num_particles is {num_particles}; at least one is needed")
        program, scan = self.graph.program, self.stage.scan or 0
        outer = [name for name in self.graph.latent if not self.graph.sites[name].time]

        def one(key: PRNGKeyArray) -> Any:
            values = program.simulate(key)
            leading = {name: values[name] for name in outer}
            return leading, program.initial_carry(scan, leading)

        leading, carry = jax.jit(jax.vmap(one))(jax.random.split(rng_key, num_particles))
        population = start(num_particles)._replace(values=leading)
        moving = carried(population, carry)
        blank = {
            name: jnp.zeros((num_particles, *site.shape[1:]), site.dtype)
            for name, site in self.graph.sites.items()
            if site.time and not site.observed
        }
        return FilterState(moving, {**leading, **blank}, jnp.zeros((), jnp.int32))

    def step(
        self, networks: Networks, rng_key: PRNGKeyArray, state: FilterState, data: Mapping[str, Any]
    ) -> tuple[FilterState, FilterInfo]:
        """Take in one observation."""
        checked = checked_data(self._step_graph, data)
        length = self.graph.scan_lengths[self.stage.scan or 0]
        if self._ends and int(state.time) >= length:
            raise DataError(
                f"the model has inputs for {length} steps, and all of them have been taken. Call "
                "the model with inputs for more steps"
            )
        num_particles = state.log_weights.shape[0]
        state, info, possible = self._advance(num_particles)(networks, rng_key, state, checked)
        if int(state.population.failed) >= 0:
            raise DataError(
                f"every particle has weight zero after step {int(state.time)}: no particle makes "
                f"these sites possible: {blame(possible)}. Check that their values can come from "
                "the model; if they can, but only barely, use more particles"
            )
        return state, info

    def _advance(self, num_particles: int) -> Callable[..., Any]:
        if num_particles not in self._compiled:
            choose = resampler(self.resampling)
            engine = Engine(self.proposal, num_particles, choose, self.ess_threshold)
            length = self.graph.scan_lengths[self.stage.scan or 0]

            def advance(networks: Any, key: PRNGKeyArray, state: FilterState, given: Any) -> Any:
                time = jnp.minimum(state.time, length - 1)
                keys, before = jax.random.split(key), state.population
                population, seen = engine.advance(
                    networks, (keys[0], keys[1]), self.stage, before, {}, given, time, {}
                )
                values: Any = population.values
                # Resampling may have changed the leading latents as well.
                samples = {**values["outer"], **seen.drawn}
                resampled = population.num_resamplings > before.num_resamplings
                info = FilterInfo(seen.ess, resampled)
                return FilterState(population, samples, state.time + 1), info, seen.possible

            self._compiled[num_particles] = run_often(advance)
        return self._compiled[num_particles]

    @cached_property
    def _compiled(self) -> dict[int, Callable[..., Any]]:
        return {}
