"""The tempered target in unconstrained coordinates.

The continuous latents of a particle are one vector z of real numbers, by the bijections that the
networks use; discrete latents keep their values. Densities are those of z, with the Jacobian of the
bijections.

Latents that nothing observed depends on are sampled from the model's own conditional. They are no
coordinates of the target, and are sampled when all else is known.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from retrodict.estimators.coordinates import Latent, blocks, coordinate_table, flatten, unflatten
from retrodict.estimators.scalar_bijections import Coordinate, constrain, unconstrain
from retrodict.graph.graph import Graph
from retrodict.inference.site_densities import SiteDensities
from retrodict.inverse.density_schedule import DensitySchedule
from retrodict.inverse.factors import Factor
from retrodict.proposal.factor_proposals import Networks
from retrodict.proposal.proposal import Proposal
from retrodict.proposal.scope import Scope
from retrodict.types import Values


class Particle(NamedTuple):
    """The coordinates of one particle.

    Attributes:
        z: unconstrained coordinates of the continuous latents.
        discrete: values of the discrete latents, by site.
    """

    z: Float[Array, " reals"]
    discrete: dict[str, Array]


class Constrained(NamedTuple):
    """The latents at some coordinates.

    Attributes:
        values: by site.
        log_jacobian: log |dx/dz|.
        representable: whether floats can hold the values. Beyond the range of floats the values
            are constant in z, and a density of z would not be integrable.
    """

    values: dict[str, Array]
    log_jacobian: Float[Array, ""]
    representable: Bool[Array, ""]


class LogDensities(NamedTuple):
    """Log density of a particle's coordinates under the prior, and log p(y | x)."""

    prior: Float[Array, ""]
    likelihood: Float[Array, ""]


@dataclass(frozen=True)
class TemperedTarget:
    """Densities of particles given data.

    Attributes:
        proposal: of the model; its networks give log q.
    """

    proposal: Proposal

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.proposal.graph

    @cached_property
    def schedule(self) -> DensitySchedule:
        """Which densities are counted."""
        return DensitySchedule(self.proposal.inverse)

    @cached_property
    def site_densities(self) -> SiteDensities:
        """Evaluates the model's densities."""
        return SiteDensities(self.graph)

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The factors that are not sampled from the model's own conditional."""
        return tuple(
            factor
            for factor in self.proposal.inverse.factors
            if self.schedule.prior_latents.isdisjoint(factor.latents)
        )

    @cached_property
    def continuous(self) -> tuple[Latent, ...]:
        """The latents with real coordinates."""
        return tuple(latent for latent in self._latents if _is_continuous(latent))

    @cached_property
    def discrete(self) -> tuple[Latent, ...]:
        """The discrete latents."""
        return tuple(latent for latent in self._latents if not _is_continuous(latent))

    @cached_property
    def _latents(self) -> tuple[Latent, ...]:
        sites = self.graph.sites
        names = [name for name in self.graph.latent if name in self.schedule.counted]
        return tuple(Latent(name, sites[name].support, sites[name].shape) for name in names)

    @property
    def num_reals(self) -> int:
        """The length of z."""
        return sum(block.size for block in blocks(self.continuous)) if self.continuous else 0

    def unconstrain(self, values: Values) -> Particle:
        """The coordinates of latents."""
        discrete = {latent.name: jnp.asarray(values[latent.name]) for latent in self.discrete}
        if not self.continuous:
            return Particle(jnp.zeros(0), discrete)
        row, _ = flatten(self.continuous, values)
        z, _ = unconstrain(row, self._constants, self._bijections)
        return Particle(z, discrete)

    def constrain(self, particle: Particle) -> Constrained:
        """The latents at some coordinates."""
        values = dict(particle.discrete)
        if not self.continuous:
            return Constrained(values, jnp.zeros(()), jnp.ones((), bool))
        row = constrain(particle.z, self._constants, self._bijections)
        z, log_slope = unconstrain(row, self._constants, self._bijections)
        latents = unflatten(self.continuous, row)
        _, log_slope_of_vectors = flatten(self.continuous, latents)
        values |= {n: v.astype(self.graph.sites[n].dtype) for n, v in latents.items()}
        representable = jnp.all(jnp.abs(z - particle.z) <= 0.01 * (1 + jnp.abs(particle.z)))
        return Constrained(values, log_slope.sum() + log_slope_of_vectors, representable)

    @property
    def _constants(self) -> Coordinate[Array]:
        return Coordinate(*(jnp.asarray(column) for column in coordinate_table(self.continuous)))

    @property
    def _bijections(self) -> tuple[int, ...]:
        return tuple(int(code) for code in np.unique(coordinate_table(self.continuous).bijection))

    def log_densities(self, data: Values, particle: Particle) -> LogDensities:
        """The model's densities; −inf where values are not representable or arithmetic failed."""
        values, log_jacobian, representable = self.constrain(particle)
        densities = self.site_densities.totals(self.schedule.counted, {**data, **values})
        observed = set(self.graph.observed)
        prior = (density for name, density in densities.items() if name not in observed)
        likelihood = (density for name, density in densities.items() if name in observed)
        log_prior = _reject_failures(sum(prior, jnp.zeros(())) + log_jacobian)
        return LogDensities(
            jnp.where(representable, log_prior, -jnp.inf),
            _reject_failures(sum(likelihood, jnp.zeros(()))),
        )

    def log_q(self, networks: Networks, data: Values, particle: Particle) -> Float[Array, ""]:
        """The proposal's log density of the coordinates."""
        values, log_jacobian, _ = self.constrain(particle)
        scope = self.scope(data, values)
        log_qs = (self.factor_log_q(networks, f, scope, values) for f in self.factors)
        return _reject_failures(sum((log_q.sum() for log_q in log_qs), log_jacobian))

    def scope(self, data: Values, values: Values) -> Scope:
        """What the factors are conditioned on, with the carries of scans."""
        carries = self.graph.program.run(jax.random.key(0), {**data, **values}).carries
        return self.proposal.scope({**data, **values}, carries)

    def factor_log_q(
        self, networks: Networks, factor: Factor, scope: Scope, latents: Values
    ) -> Float[Array, "*copies"]:
        """log q of every copy of a factor at some values of its latents."""
        return self.proposal.log_prob_of(networks, factor, scope, latents)

    def sample_proposal(self, networks: Networks, rng_key: PRNGKeyArray, data: Values) -> Particle:
        """A particle from the proposal."""
        return self.unconstrain(self.proposal.draw(networks, rng_key, data)[0])

    def sample_prior(self, rng_key: PRNGKeyArray, data: Values) -> Particle:
        """A particle from the prior; covariates that are observed sites keep their values."""
        return self.unconstrain(self.graph.program.run(rng_key, data).values)

    def complete(self, rng_key: PRNGKeyArray, data: Values, particle: Particle) -> dict[str, Array]:
        """All latents of a particle, those from the model's own conditional sampled now.

        The model's deterministic sites are included.
        """
        values = self.constrain(particle).values
        evaluation = self.graph.program.run(rng_key, {**data, **values})
        latents = {name: evaluation.values[name] for name in self.graph.latent}
        return {**latents, **evaluation.deterministic}


def _is_continuous(latent: Latent) -> bool:
    return blocks((latent,))[0].kind == "mixture"


def _reject_failures(log_density: Array) -> Array:
    """−inf in place of NaN and +inf, which show that arithmetic failed."""
    failed = jnp.isnan(log_density) | jnp.isposinf(log_density)
    return jnp.where(failed, -jnp.inf, log_density)
