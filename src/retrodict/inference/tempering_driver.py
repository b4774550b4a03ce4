"""Posterior inference by tempered SMC, for one data set at a time.

A pilot run of tempered SMC chooses the path, and a second run with this path fixed gives the
evidence. The posterior consists of the particles of both.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from retrodict._xla.jit import low_latency_jit, run_once
from retrodict.graph.loop_surface import by_user_site
from retrodict.inference.impossible_data import ImpossibleData
from retrodict.inference.mcmc_kernels import MCMCKernels
from retrodict.inference.site_densities import any_possible
from retrodict.inference.tempered_smc import (
    INITIAL_DRAWS,
    InitialDraws,
    TemperedSMC,
    TemperingRun,
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
# About how much memory a particle takes while it is moved, for each number of the model's sites.
BYTES_PER_MOVED_VALUE = 4 * 100


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
        return 8 if self.num_particles >= 800 else 4 if self.num_particles >= 200 else 2

    @cached_property
    def sampler(self) -> TemperedSMC:
        """Tempered SMC with half of the particles."""
        island_size = -(-self.num_particles // (2 * self.num_islands))
        # Without any resampling the posterior would not be reached.
        ess_share = float(np.clip(self.ess_share, 0.1, 0.95))
        num_values = sum(int(np.prod(site.shape)) for site in self.proposal.graph.sites.values())
        batch_size = max(self.memory // (BYTES_PER_MOVED_VALUE * max(num_values, 1)), 1)
        kernels = MCMCKernels(TemperedTarget(self.proposal))
        scheme = resampler(self.resampling)
        return TemperedSMC(kernels, self.num_islands, island_size, scheme, ess_share, batch_size)

    @cached_property
    def _draw(self) -> Callable[..., InitialDraws]:
        return low_latency_jit(self.sampler.draw)

    @cached_property
    def _run(self) -> Callable[..., TemperingRun]:
        return low_latency_jit(self.sampler.run)

    @cached_property
    def _complete(self) -> Callable[..., dict[str, Array]]:
        target = self.sampler.kernels.target

        def complete(rng_key: PRNGKeyArray, data: Values, particles: Particle) -> dict[str, Array]:
            keys = jax.random.split(rng_key, self.sampler.num_particles)
            return jax.vmap(lambda key, p: target.complete(key, data, p))(keys, particles)

        return low_latency_jit(complete)

    def __call__(
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
        start = time.perf_counter()
        keys = jax.random.split(rng_key, 6)
        draws = self._draw(networks, keys[0], data)
        self._check_possible(data, draws)
        path = self.sampler.blank_path()
        pilot = self._run(networks, keys[1], data, draws, path, jnp.array(False))
        draws = self._draw(networks, keys[2], data)
        fixed = self._run(networks, keys[3], data, draws, pilot.path, jnp.array(True))
        # The fixed-path run comes first: if there is a particle too many, it is one of the pilot's.
        parts = [
            self._complete(key, data, run.state.particles.particle)
            for key, run in ((keys[4], fixed), (keys[5], pilot))
        ]
        samples = {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0]}
        summary = TemperingSummary.of(jax.device_get(fixed), jax.device_get(pilot))
        seconds = time.perf_counter() - start
        return self._posterior(samples, summary, data, dims, seconds)

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

    def _check_possible(self, data: Values, draws: InitialDraws) -> None:
        possible = np.isfinite(np.asarray(draws.particles.densities.likelihood))
        if possible.any():
            return
        target = self.sampler.kernels.target

        def observed_densities(particle: Particle) -> dict[str, Array]:
            values = target.constrain(particle).values
            return target.site_densities.by_element(target.graph.observed, {**data, **values})

        densities = run_once(jax.vmap(observed_densities), draws.particles.particle)
        by_step = {
            name: jnp.any(density > -jnp.inf, 0).reshape(len(target.graph.sites[name].steps), -1)
            for name, density in densities.items()
            if target.graph.sites[name].steps
        }
        flags = any_possible(densities) | {name: ok.all(1) for name, ok in by_step.items()}
        failure = f"none of {len(possible)} draws from networks and prior fits the data"
        raise ImpossibleData(failure, by_user_site(target.graph, flags))
