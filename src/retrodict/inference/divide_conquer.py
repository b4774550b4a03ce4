"""A proposal over plates and data in; a weighted population by divide and conquer out.

One population a plate element, each weighted and resampled by itself, and merged where a factor
outside of the plate is drawn (Lindsten et al. 2014; Paige & Wood 2016, sec. 5.2). Nested plates
make a tree. All elements of a plate go at once.

The one rule holds: a density is counted where its last variable arrives, in the population of the
element it belongs to. A leaf whose own prior is still open has no proper target: there a learned
marginal m of the leaf's latents stands in for it, and is divided out when the prior is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from retrodict.inference.smc import Outcome
from retrodict.inverse.factors import Factor
from retrodict.inverse.plate_tree import counted
from retrodict.particles.population import initial_population, reweight
from retrodict.particles.resampling import Resampler
from retrodict.particles.weights import LogEvidence, drop_nonfinite, ess, normalise
from retrodict.proposal.proposal import Networks, Proposal
from retrodict.types import Values


class Loss(NamedTuple):
    """What resampling has cost so far.

    Attributes:
        variance: of the log evidence, summed over all populations that were merged.
        shared: by latent, how much more than 1/K of all pairs, by weight, is copies of one draw.
        sizes: the least effective sample size of each plate merged.
    """

    variance: Float[Array, ""]
    shared: dict[str, Array]
    sizes: list[Array]


class Branch(NamedTuple):
    """Populations that have not been merged yet: one for each element of some plates.

    Attributes:
        sites: the latents in them.
        plates: what there is a population for each element of.
        log_weights: plates first, then particles.
        log_evidence: of each population's own subtree, what was merged into it included.
    """

    sites: tuple[str, ...]
    plates: tuple[str, ...]
    log_weights: Float[Array, "*plates particles"]
    log_evidence: Float[Array, "*plates"]


@dataclass(frozen=True)
class Divider:
    """Runs a proposal by divide and conquer.

    Attributes:
        proposal: what to draw from.
        num_particles: K, of every population.
        resample: how to choose ancestors.
    """

    proposal: Proposal
    num_particles: int
    resample: Resampler

    def run(self, networks: Networks, rng_key: PRNGKeyArray, data: Values) -> Outcome:
        """All stages, for one data set."""
        graph, factors = self.proposal.graph, self.proposal.inverse.factors
        when = counted(self.proposal.inverse)
        values: dict[str, Array] = {}
        open_branches: list[Branch] = []
        stood_in: dict[str, Factor] = {}
        loss = Loss(jnp.zeros(()), {}, [])
        possible: dict[str, Array] = {}
        for number, factor in enumerate(factors):
            merge_key, draw_key = jax.random.split(jax.random.fold_in(rng_key, number))
            closing = [name for name, stage in when.items() if stage == number]
            if number == 0:
                closing += [name for name, stage in when.items() if stage == -1]
            needed = {i.site for i in factor.inputs} | {
                parent for name in closing for parent in (name, *graph.parents(name))
            }
            merged = [b for b in open_branches if needed & set(b.sites)]
            open_branches = [b for b in open_branches if b not in merged]
            values, evidence, loss = self._merge(merge_key, values, merged, factor.plates, loss)
            drawn, log_q = self._draw(networks, draw_key, factor, data, values)
            values = {**values, **drawn}

            density, can = self._densities(data, values, closing, factor.plates)
            possible |= can
            log_weights = density - log_q
            # What stood in for a prior goes when the prior comes.
            for name in [n for n in closing if n in stood_in]:
                other = stood_in.pop(name)
                if name == other.latents[0]:
                    log_weights -= self._marginal(networks, other, values, factor.plates)
            waiting = [name for name in factor.latents if when[name] > number]
            if waiting:
                log_weights += self._marginal(networks, factor, values, factor.plates)
                stood_in |= dict.fromkeys(factor.latents, factor)
            sites = (*factor.latents, *(name for b in merged for name in b.sites))
            open_branches.append(Branch(sites, factor.plates, log_weights, evidence))
        return self._finish(
            networks, rng_key, data, values, open_branches, stood_in, when, loss, possible
        )

    def _finish(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        data: Values,
        values: dict[str, Array],
        branches: Sequence[Branch],
        stood_in: dict[str, Factor],
        when: dict[str, int],
        loss: Loss,
        possible: dict[str, Array],
    ) -> Outcome:
        """Bring what is left together; count what could not be counted in any one population."""
        roots = [b for b in branches if not b.plates]
        leaves = [b for b in branches if b.plates]
        last_key = jax.random.fold_in(rng_key, len(self.proposal.inverse.factors))
        values, evidence, loss = self._merge(last_key, values, leaves, (), loss)
        rest = [n for n, stage in when.items() if stage == len(self.proposal.inverse.factors)]
        density, can = self._densities(data, values, rest, ())
        log_weights = sum((b.log_weights for b in roots), density)
        for factor in {f.latents: f for name, f in stood_in.items() if name in rest}.values():
            log_weights -= self._marginal(networks, factor, values, ())
        constant = evidence + sum((b.log_evidence for b in roots), jnp.zeros(()))
        particles = initial_population(self.num_particles)._replace(values=values)
        particles = particles._replace(log_evidence=LogEvidence.zero().add(constant))
        particles = reweight(particles, log_weights, len(self.proposal.stages) - 1)
        size = ess(particles.log_weights)
        shared = {name: 1.0 / size + loss.shared.get(name, 0.0) for name in values}
        particles = particles._replace(
            num_resamplings=jnp.asarray(len(loss.sizes) > 0, jnp.int32),
            lineage=particles.lineage._replace(past_variance=loss.variance),
        )
        return Outcome(
            particles,
            particles.log_evidence_se(),
            {name: 1.0 / jnp.minimum(shared[name], 1.0) for name in self.proposal.graph.latent},
            jnp.stack([*loss.sizes, size]),
            jnp.zeros((0, self.num_particles), jnp.int32),
            None,
            None,
            {**possible, **can},
        )

    def _merge(
        self,
        rng_key: PRNGKeyArray,
        values: dict[str, Array],
        branches: Sequence[Branch],
        plates: tuple[str, ...],
        loss: Loss,
    ) -> tuple[dict[str, Array], Array, Loss]:
        """Resample every population by itself, and pair its particles at random with the others'.

        Returns:
            the values, so that particle k of all populations together is one particle; the log
            evidence of what was merged, by element of `plates`; and what it cost.
        """
        evidence = jnp.zeros(self._sizes(plates))
        for number, branch in enumerate(branches):
            flat = branch.log_weights.reshape(-1, self.num_particles)
            log_weights, log_mean = jax.vmap(normalise)(flat)
            keys = jax.random.split(jax.random.fold_in(rng_key, number), (flat.shape[0], 2))

            def choose(key: PRNGKeyArray, log_weights: Array) -> Array:
                chosen = self.resample(key[0], log_weights, self.num_particles)
                return jax.random.permutation(key[1], chosen)

            ancestors = jax.vmap(choose)(keys, log_weights)
            ancestors = ancestors.reshape(*self._sizes(branch.plates), self.num_particles)
            values = {
                name: self._follow(name, value, branch.plates, ancestors)
                if name in branch.sites
                else value
                for name, value in values.items()
            }
            own = branch.log_evidence + log_mean.reshape(self._sizes(branch.plates))
            gone = tuple(i for i, plate in enumerate(branch.plates) if plate not in plates)
            evidence = evidence + own.sum(gone)
            sizes = jax.vmap(ess)(flat)
            copies = 1.0 / sizes - 1.0 / self.num_particles
            worst = jnp.max(copies)
            loss = Loss(
                loss.variance + jnp.sum(copies),
                loss.shared | {n: loss.shared.get(n, 0.0) + worst for n in branch.sites},
                [*loss.sizes, jnp.min(sizes)],
            )
        return values, evidence, loss

    def _sizes(self, plates: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.proposal.graph.plates[plate] for plate in plates)

    def _follow(self, name: str, value: Array, plates: tuple[str, ...], ancestors: Array) -> Array:
        """Values of a site, each element of `plates` by its own ancestors."""
        site = self.proposal.graph.sites[name]
        places = [1 + site.axes[site.plates.index(plate)] for plate in plates]
        moved = jnp.moveaxis(value, places, range(len(plates)))
        flat = moved.reshape(-1, *moved.shape[len(plates) :])
        lines = ancestors.reshape(-1, self.num_particles)
        followed = jax.vmap(lambda v, line: v[line])(flat, lines).reshape(moved.shape)
        return jnp.moveaxis(followed, range(len(plates)), places)

    def _draw(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        factor: Factor,
        data: Values,
        values: Values,
    ) -> tuple[dict[str, Array], Float[Array, "*plates particles"]]:
        def one(noise: Array, latents: Values) -> Any:
            return self.proposal.draw_copies(networks, noise, factor, {**data, **latents})

        noise = self.proposal.noise(networks, rng_key, factor, (self.num_particles,))
        drawn, log_q = jax.vmap(one)(noise, dict(values))
        return drawn, jnp.moveaxis(log_q, 0, -1)

    def _densities(
        self, data: Values, values: Values, names: Sequence[str], plates: tuple[str, ...]
    ) -> tuple[Float[Array, "*plates particles"], dict[str, Array]]:
        """Log density of some sites, by element of `plates` and particle."""
        total = jnp.zeros((*self._sizes(plates), self.num_particles))
        if not names:
            return total, {}
        sites = self.proposal.graph.sites

        def one(latents: Values) -> dict[str, Array]:
            found = self.proposal.graph.program.run(
                jax.random.key(0), {**data, **latents}, only=names
            )
            return {name: found.log_density[name] for name in names}

        possible = {}
        for name, density in jax.vmap(one)(dict(values)).items():
            density, _ = drop_nonfinite(density)
            total += _reduced(density, sites[name].plates, plates)
            possible[name] = jnp.all(jnp.any(density > -jnp.inf, 0))
        return total, possible

    def _marginal(
        self, networks: Networks, factor: Factor, values: Values, plates: tuple[str, ...]
    ) -> Float[Array, "*plates particles"]:
        """log m of a factor's latents, by element of `plates` and particle."""
        density = jax.vmap(lambda v: self.proposal.log_marginal(networks, factor, v))(dict(values))
        return _reduced(density, factor.plates, plates)


def _reduced(density: Array, have: Sequence[str], want: Sequence[str]) -> Array:
    """Particles and plates in; wanted plates first, then particles, the other plates summed."""
    gone = tuple(1 + i for i, plate in enumerate(have) if plate not in want)
    density = density.sum(gone)
    left = [plate for plate in have if plate in want]
    order = [1 + left.index(plate) for plate in want]
    return jnp.transpose(density, (*order, 0))
