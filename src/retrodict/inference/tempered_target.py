"""A proposal and a data set in; particles as coordinates that moves can change, and back, out.

The continuous latents of a particle are one row of real numbers z, by the bijections that the
networks use; the discrete latents stay as they are. Densities are of these coordinates, with the
Jacobian of the bijections.

Latents that nothing observed depends on are drawn from the model's own conditional. They do not
take part here, and are drawn when all else is known.
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
from retrodict.graph.program import Evaluation
from retrodict.inverse.factors import Factor
from retrodict.proposal.factor_proposals import Networks
from retrodict.proposal.proposal import Proposal
from retrodict.proposal.scope import Scope
from retrodict.types import Values


class Particle(NamedTuple):
    """The latents of one particle: reals in a row, the others as they are."""

    z: Float[Array, " reals"]
    discrete: dict[str, Array]


class Densities(NamedTuple):
    """Logarithms at one particle: of its coordinates under the prior, and of the data given it."""

    prior: Float[Array, ""]
    likelihood: Float[Array, ""]


@dataclass(frozen=True)
class Target:
    """Densities of particles, given networks and data."""

    proposal: Proposal

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.proposal.graph

    @cached_property
    def own(self) -> frozenset[str]:
        """Latents drawn from the model's own conditional."""
        return frozenset(n for f in self.proposal.inverse.factors if f.own for n in f.latents)

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The factors that have a network."""
        return tuple(f for f in self.proposal.inverse.factors if not f.own)

    @cached_property
    def continuous(self) -> tuple[Latent, ...]:
        """The latents whose coordinates are real."""
        return tuple(latent for latent in self._latents if _is_real(latent))

    @cached_property
    def discrete(self) -> tuple[Latent, ...]:
        """The other latents."""
        return tuple(latent for latent in self._latents if not _is_real(latent))

    @cached_property
    def _latents(self) -> tuple[Latent, ...]:
        sites = self.graph.sites
        names = [name for name in self.graph.latent if name not in self.own]
        return tuple(Latent(name, sites[name].support, sites[name].shape) for name in names)

    @property
    def num_reals(self) -> int:
        """The length of z."""
        return sum(block.size for block in blocks(self.continuous)) if self.continuous else 0

    def split(self, values: Values) -> Particle:
        """Coordinates of a draw of the latents."""
        discrete = {latent.name: jnp.asarray(values[latent.name]) for latent in self.discrete}
        if not self.continuous:
            return Particle(jnp.zeros(0), discrete)
        row, _ = flatten(self.continuous, values)
        z, _ = unconstrain(row, self._constants, self._bijections)
        return Particle(z, discrete)

    def join(
        self, particle: Particle
    ) -> tuple[dict[str, Array], Float[Array, ""], Bool[Array, ""]]:
        """The latents at some coordinates, log |dx/dz|, and whether floats reach that far.

        Beyond the range of floats values stop at the last one, and a density of z would go on
        without end.
        """
        values = dict(particle.discrete)
        if not self.continuous:
            return values, jnp.zeros(()), jnp.ones((), bool)
        row = constrain(particle.z, self._constants, self._bijections)
        back, log_slope = unconstrain(row, self._constants, self._bijections)
        drawn = unflatten(self.continuous, row)
        _, log_slope_of_vectors = flatten(self.continuous, drawn)
        values |= {n: v.astype(self.graph.sites[n].dtype) for n, v in drawn.items()}
        reached = jnp.all(jnp.abs(back - particle.z) <= 0.01 * (1 + jnp.abs(particle.z)))
        return values, log_slope.sum() + log_slope_of_vectors, reached

    @property
    def _constants(self) -> Coordinate[Array]:
        return Coordinate(*(jnp.asarray(column) for column in coordinate_table(self.continuous)))

    @property
    def _bijections(self) -> tuple[int, ...]:
        return tuple(int(code) for code in np.unique(coordinate_table(self.continuous).bijection))

    def _run(self, data: Values, values: Values) -> Evaluation:
        """The model at some latents; those of `own` are drawn, and not to be used."""
        return self.graph.program.run(jax.random.key(0), {**data, **values})

    def densities(self, data: Values, particle: Particle) -> Densities:
        """The model's; −inf where floats do not reach, or arithmetic failed."""
        values, volume, reached = self.join(particle)
        found = self._run(data, values).log_density
        sums: dict[bool, Array] = {True: jnp.zeros(()), False: jnp.zeros(())}
        for name, density in found.items():
            if name not in self.own:
                observed = self.graph.sites[name].observed
                sums[observed] = sums[observed] + density.sum()
        prior = jnp.where(reached, _sound(sums[False] + volume), -jnp.inf)
        return Densities(prior, _sound(sums[True]))

    def log_q(self, networks: Networks, data: Values, particle: Particle) -> Float[Array, ""]:
        """The networks' density of the coordinates."""
        values, volume, _ = self.join(particle)
        scope = self.scope(data, values)
        copies = (self.copies(networks, factor, scope, values) for factor in self.factors)
        return _sound(sum((log_q.sum() for log_q in copies), volume))

    def scope(self, data: Values, values: Values) -> Scope:
        """What the factors are conditioned on."""
        carries = self._run(data, values).carries
        return self.proposal.scope({**data, **values}, carries)

    def copies(
        self, networks: Networks, factor: Factor, scope: Scope, latents: Values
    ) -> Float[Array, "*copies"]:
        """log q of every copy of a factor at some values of its latents."""
        return self.proposal.log_prob_of(networks, factor, scope, latents)

    def draw(self, networks: Networks, rng_key: PRNGKeyArray, data: Values) -> Particle:
        """A particle from the networks."""
        return self.split(self.proposal.draw(networks, rng_key, data)[0])

    def draw_prior(self, rng_key: PRNGKeyArray, data: Values) -> Particle:
        """A particle from the prior; covariates that are observed sites are as observed."""
        return self.split(self.graph.program.run(rng_key, data).values)

    def complete(self, rng_key: PRNGKeyArray, data: Values, particle: Particle) -> dict[str, Array]:
        """All latents, those of `own` drawn now, and the deterministic sites."""
        values, _, _ = self.join(particle)
        found = self.graph.program.run(rng_key, {**data, **values})
        return {**{name: found.values[name] for name in self.graph.latent}, **found.deterministic}


def _is_real(latent: Latent) -> bool:
    return blocks((latent,))[0].kind == "mixture"


def _sound(log_density: Array) -> Array:
    """NaN and +inf tell of arithmetic that failed: no particle may stand there."""
    failed = jnp.isnan(log_density) | jnp.isposinf(log_density)
    return jnp.where(failed, -jnp.inf, log_density)
