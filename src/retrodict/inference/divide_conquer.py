"""Divide-and-conquer SMC over the plates of a model.

Every element of a plate has a population of its own, which is weighted and resampled by itself.
Where a factor outside of the plate is sampled, the populations of the elements are merged (Lindsten
et al. 2014; Paige & Wood 2016, sec. 5.2). Nested plates make a tree. All elements of a plate are
processed in one vectorised operation.

Densities are counted by the stages of `DensitySchedule.merging`, in the population of the element
they belong to. A leaf whose prior is counted only higher up in the tree has no proper target of its
own: a learned marginal m of its latents replaces the prior, and is divided out where the prior is
counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from retrodict.inference.site_densities import SiteDensities, any_possible
from retrodict.inference.smc import LatentPopulation, SMCInfo
from retrodict.inverse.density_schedule import DensitySchedule
from retrodict.inverse.factors import Factor
from retrodict.particles.population import initial_population, reweight
from retrodict.particles.resampling import Resampler
from retrodict.particles.weights import LogEvidence, drop_nonfinite, ess, normalise
from retrodict.proposal.factor_proposals import Networks
from retrodict.proposal.proposal import Proposal
from retrodict.types import Values


class Subtree(NamedTuple):
    """Populations that have not been merged yet: one for each element of some plates.

    Attributes:
        sites: the latents in them.
        plates: the plates whose elements have a population each.
        log_weights: not normalised; plates first, then particles.
        log_evidence: log Ẑ of what was merged into each population.
    """

    sites: tuple[str, ...]
    plates: tuple[str, ...]
    log_weights: Float[Array, "*plates particles"]
    log_evidence: Float[Array, "*plates"]


class ResamplingCost(NamedTuple):
    """What resampling has cost, summed over all merges.

    Attributes:
        log_evidence_variance: variance of the log evidence.
        duplication: for each latent, the share of pairs of particles, by weight, that resampling
            turned into copies of one draw.
        smallest_ess: the smallest effective sample size of the populations of each merge.
    """

    log_evidence_variance: Float[Array, ""]
    duplication: dict[str, Array]
    smallest_ess: tuple[Array, ...]


class TreeState(NamedTuple):
    """What the next stage needs.

    Attributes:
        latents: the values of all latents sampled so far, particles first.
        subtrees: the populations that are still to be merged.
        cost: of the merges so far.
        possible: for each site counted, whether any particle gives it a positive density.
    """

    latents: dict[str, Array]
    subtrees: tuple[Subtree, ...]
    cost: ResamplingCost
    possible: dict[str, Bool[Array, ""]]


@dataclass(frozen=True)
class DivideAndConquer:
    """Runs a proposal as divide-and-conquer SMC.

    Attributes:
        proposal: samples the latents of each factor; its inverse is `divisible`.
        num_particles: K, of every population.
        resampler: the scheme that chooses ancestors.
    """

    proposal: Proposal
    num_particles: int
    resampler: Resampler

    @cached_property
    def schedule(self) -> DensitySchedule:
        """Which densities are counted at which stage."""
        return DensitySchedule(self.proposal.inverse)

    @property
    def _factors(self) -> tuple[Factor, ...]:
        return self.proposal.inverse.factors

    @cached_property
    def _densities(self) -> SiteDensities:
        return SiteDensities(self.proposal.graph)

    def run(
        self, networks: Networks, rng_key: PRNGKeyArray, data: Values
    ) -> tuple[LatentPopulation, SMCInfo]:
        """Run all stages for one data set: the weighted particles, and what the run reports."""
        state = TreeState({}, (), ResamplingCost(jnp.zeros(()), {}, ()), {})
        for number in range(len(self._factors)):
            stage_key = jax.random.fold_in(rng_key, number)
            state = self._stage(networks, stage_key, number, state, data)
        root_key = jax.random.fold_in(rng_key, len(self._factors))
        return self._root(networks, root_key, state, data)

    def _stage(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        number: int,
        state: TreeState,
        data: Values,
    ) -> TreeState:
        """Sample one factor in one population for each element of its plates."""
        factor = self._factors[number]
        merge_key, propagate_key = jax.random.split(rng_key)

        # Merge
        needed = self._needed_sites(number)
        merged = [tree for tree in state.subtrees if needed.intersection(tree.sites)]
        rest = [tree for tree in state.subtrees if needed.isdisjoint(tree.sites)]
        latents, log_evidence, cost = self._merge(
            merge_key, state.latents, merged, factor.plates, state.cost
        )

        # Propagate
        samples, log_q = self._propagate(networks, propagate_key, factor, latents, data)
        latents = {**latents, **samples}

        # Reweight
        log_target, possible = self._log_target_change(networks, number, latents, data)
        sites = (*factor.latents, *(name for tree in merged for name in tree.sites))
        subtree = Subtree(sites, factor.plates, log_target - log_q, log_evidence)
        return TreeState(latents, (*rest, subtree), cost, state.possible | possible)

    def _needed_sites(self, number: int) -> set[str]:
        """The sites that a stage reads, to sample its factor or to count densities."""
        parents = self.proposal.graph.parents
        inputs = {entry.site for entry in self._factors[number].inputs}
        closing = self.schedule.merging[number]
        return inputs.union(closing, *(parents(name) for name in closing))

    def _root(
        self, networks: Networks, rng_key: PRNGKeyArray, state: TreeState, data: Values
    ) -> tuple[LatentPopulation, SMCInfo]:
        """Merge the remaining populations, and count the densities that belong to none of them."""
        # Merge
        roots = [tree for tree in state.subtrees if not tree.plates]
        leaves = [tree for tree in state.subtrees if tree.plates]
        latents, log_evidence, cost = self._merge(rng_key, state.latents, leaves, (), state.cost)

        # Reweight
        number = len(self._factors)
        log_target, possible = self._log_target_change(networks, number, latents, data)
        log_weights = sum((tree.log_weights for tree in roots), log_target)
        log_evidence = sum((tree.log_evidence for tree in roots), log_evidence)
        population = initial_population(self.num_particles)._replace(
            values=latents, log_evidence=LogEvidence.zero().add(log_evidence)
        )
        population = reweight(population, log_weights, number - 1)
        population = population._replace(
            num_resamplings=jnp.asarray(len(cost.smallest_ess) > 0, jnp.int32),
            lineage=population.lineage._replace(past_variance=cost.log_evidence_variance),
        )
        return population, self._info(population, cost, state.possible | possible)

    def _info(
        self,
        population: LatentPopulation,
        cost: ResamplingCost,
        possible: dict[str, Bool[Array, ""]],
    ) -> SMCInfo:
        size = ess(population.log_weights)
        shared = {n: 1.0 / size + cost.duplication.get(n, 0.0) for n in self.proposal.graph.latent}
        return SMCInfo(
            log_evidence_se=population.log_evidence_se(),
            survivors={name: 1.0 / jnp.minimum(pairs, 1.0) for name, pairs in shared.items()},
            ess_by_stage=jnp.stack([*cost.smallest_ess, size]),
            ancestors=jnp.zeros((0, self.num_particles), jnp.int32),
            filtered=None,
            filtered_log_weights=None,
            possible=possible,
        )

    def _merge(
        self,
        rng_key: PRNGKeyArray,
        latents: dict[str, Array],
        subtrees: Sequence[Subtree],
        plates: tuple[str, ...],
        cost: ResamplingCost,
    ) -> tuple[dict[str, Array], Float[Array, "*plates"], ResamplingCost]:
        """Resample every population by itself, and pair its particles at random with the others'.

        Returns:
            the latents, so that particle k of all populations together is one particle; the log
            evidence of what was merged, by element of `plates`; and the cost so far.
        """
        log_evidence = jnp.zeros(self._sizes(plates))
        for number, tree in enumerate(subtrees):
            log_weights = tree.log_weights.reshape(-1, self.num_particles)
            log_weights, log_mean = jax.vmap(normalise)(log_weights)
            keys = jax.random.split(jax.random.fold_in(rng_key, number), (len(log_weights), 2))
            ancestors = jax.vmap(self._random_pairing)(keys, log_weights)
            latents = latents | {
                name: self._gather(name, latents[name], tree.plates, ancestors)
                for name in tree.sites
            }
            of_tree = tree.log_evidence + log_mean.reshape(self._sizes(tree.plates))
            summed = tuple(i for i, plate in enumerate(tree.plates) if plate not in plates)
            log_evidence = log_evidence + of_tree.sum(summed)
            cost = self._add_cost(cost, tree, jax.vmap(ess)(log_weights))
        return latents, log_evidence, cost

    def _random_pairing(
        self, keys: PRNGKeyArray, log_weights: Float[Array, " particles"]
    ) -> Int[Array, " particles"]:
        """Ancestors in random order."""
        resample_key, permute_key = keys
        ancestors = self.resampler(resample_key, log_weights, self.num_particles)
        return jax.random.permutation(permute_key, ancestors)

    def _add_cost(
        self, cost: ResamplingCost, tree: Subtree, sizes: Float[Array, " elements"]
    ) -> ResamplingCost:
        copies = 1.0 / sizes - 1.0 / self.num_particles
        worst = jnp.max(copies)
        duplication = {name: cost.duplication.get(name, 0.0) + worst for name in tree.sites}
        return ResamplingCost(
            cost.log_evidence_variance + jnp.sum(copies),
            cost.duplication | duplication,
            (*cost.smallest_ess, jnp.min(sizes)),
        )

    def _sizes(self, plates: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.proposal.graph.plates[plate] for plate in plates)

    def _gather(
        self,
        name: str,
        value: Array,
        plates: tuple[str, ...],
        ancestors: Int[Array, "elements particles"],
    ) -> Array:
        """Values of a site's particles at the ancestors of each element of `plates`."""
        site = self.proposal.graph.sites[name]
        axes = [1 + site.axes[site.plates.index(plate)] for plate in plates]
        by_element = jnp.moveaxis(value, axes, range(len(plates)))
        flat = by_element.reshape(-1, *by_element.shape[len(plates) :])
        gathered = jax.vmap(lambda particles, chosen: particles[chosen])(flat, ancestors)
        return jnp.moveaxis(gathered.reshape(by_element.shape), range(len(plates)), axes)

    def _propagate(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        factor: Factor,
        latents: Values,
        data: Values,
    ) -> tuple[dict[str, Array], Float[Array, "*plates particles"]]:
        """Sample all copies of a factor, and log q of each."""

        def propagate_one(noise: Any, latents: Values) -> tuple[dict[str, Array], Array]:
            return self.proposal.draw_copies(networks, noise, factor, {**data, **latents})

        noise = self.proposal.noise(networks, rng_key, factor, (self.num_particles,))
        samples, log_q = jax.vmap(propagate_one)(noise, dict(latents))
        return samples, jnp.moveaxis(log_q, 0, -1)

    def _log_target_change(
        self, networks: Networks, number: int, latents: Values, data: Values
    ) -> tuple[Float[Array, "*plates particles"], dict[str, Bool[Array, ""]]]:
        """log γ_n − log γ_{n−1} at a stage, or at the root; and which sites are possible.

        These are the densities counted at the stage, the marginal that begins to replace a prior
        there, and, divided out, those that cease to.
        """
        plates = self._factors[number].plates if number < len(self._factors) else ()
        total = jnp.zeros((*self._sizes(plates), self.num_particles))
        possible: dict[str, Bool[Array, ""]] = {}
        if closing := self.schedule.merging[number]:
            densities = self._densities.population_by_element(
                closing, data, latents, self.num_particles
            )
            densities = {name: drop_nonfinite(d)[0] for name, d in densities.items()}
            possible = any_possible(densities)
            for name, density in densities.items():
                total += _sum_over_plates(density, self.proposal.graph.sites[name].plates, plates)
        for first, last in self.schedule.marginal_stages.items():
            if number in (first, last):
                factor = self._factors[first]
                log_marginal = self._log_marginal(networks, factor, latents)
                log_marginal = _sum_over_plates(log_marginal, factor.plates, plates)
                total += log_marginal if number == first else -log_marginal
        return total, possible

    def _log_marginal(
        self, networks: Networks, factor: Factor, latents: Values
    ) -> Float[Array, "particles *plates"]:
        """log m of a factor's latents, by particle and element of the factor's plates."""
        return jax.vmap(lambda values: self.proposal.log_marginal(networks, factor, values))(
            dict(latents)
        )


def _sum_over_plates(
    values: Float[Array, "particles *plates"], plates: Sequence[str], kept: Sequence[str]
) -> Float[Array, "*kept particles"]:
    """Sum over all plates but those to keep; particles become the last axis."""
    summed = tuple(1 + axis for axis, plate in enumerate(plates) if plate not in kept)
    remaining = [plate for plate in plates if plate in kept]
    order = [1 + remaining.index(plate) for plate in kept]
    return jnp.transpose(values.sum(summed), (*order, 0))
