"""Genealogy of resampled particles: surviving draws, ancestral lineages and trajectories.

Resampling copies particles, and copies carry no new information: an estimate about a variable drawn
at some stage rests on the draws of that stage which still have descendants. In a long series all
lineages coalesce in one early ancestor (path degeneracy). That limits the trajectories of a
particle filter, but neither its filtered marginals nor its evidence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from retrodict.particles.weights import descendant_weights

# Largest share of coalesced pairs of particles, by weight, before the lag is shortened.
MAX_COALESCENCE = 0.1


class Lineage(NamedTuple):
    """Ancestors of each particle at two reference generations, for the variance of log Ẑ.

    Let F_e be the total weight of the descendants of ancestor e of generation s. Then
    Σ_e F_e² - 1/K estimates the part of the variance of log Ẑ due to draws at s and later (Chan &
    Lai 2013, Ann. Statist. 41:2877). The estimate breaks down when s lies so far back that all
    particles share one ancestor. So there are two reference generations. When too many lineages
    have coalesced since the older one, the variance due to draws between the two is added to
    `past_variance`, as the difference of their sums of squares; the newer generation becomes the
    older one, and the current generation the newer one. This is a fixed-lag estimator (Olsson &
    Douc 2019, Bernoulli 25:1504) with the longest lag that the genealogy allows. A filter forgets
    its past, so that the truncation costs little.

    Summing over descendants at every stage would be expensive. Coalescence is estimated from the
    weights instead: resampling gives about 1 / ESS - 1 / K of all pairs the same parent.

    Attributes:
        ancestors: index of each particle's ancestor in the older reference generation.
        recent_ancestors: index of each particle's ancestor in the newer reference generation.
        coalescence: estimated share of pairs that coalesced since the older generation.
        recent_coalescence: estimated share of pairs that coalesced since the newer generation.
        has_recent: whether the newer reference generation has been chosen.
        past_variance: variance of log Ẑ due to draws before the older reference generation.
    """

    ancestors: Int[Array, " particles"]
    recent_ancestors: Int[Array, " particles"]
    coalescence: Float[Array, ""]
    recent_coalescence: Float[Array, ""]
    has_recent: Bool[Array, ""]
    past_variance: Float[Array, ""]

    @classmethod
    def initial(cls, num: int) -> "Lineage":
        """Lineage of the first generation, in which every particle is its own ancestor."""
        identity, zero = jnp.arange(num, dtype=jnp.int32), jnp.zeros(())
        return cls(identity, identity, zero, zero, jnp.zeros((), bool), zero)

    def resample(
        self,
        log_weights: Float[Array, " particles"],
        ess: Float[Array, ""],
        parents: Int[Array, " particles"],
    ) -> "Lineage":
        """Lineage of the particles `parents`, chosen by normalised weights of this ESS."""
        same_parent = 1.0 / jnp.maximum(ess, 1e-30) - 1.0 / log_weights.shape[0]
        coalescence = self.coalescence + same_parent
        advance = self.has_recent & (coalescence > MAX_COALESCENCE)
        choose_recent = advance | (~self.has_recent & (coalescence > MAX_COALESCENCE / 2))

        def variance_between() -> Array:
            older = descendant_weights(log_weights, self.ancestors)
            newer = descendant_weights(log_weights, self.recent_ancestors)
            # With a single ancestor left, the variance cannot be estimated.
            degenerate = jnp.max(older) > 1.0 - 1e-6
            return jnp.where(degenerate, jnp.inf, jnp.sum(older**2) - jnp.sum(newer**2))

        return Lineage(
            ancestors=jnp.where(advance, self.recent_ancestors, self.ancestors)[parents],
            recent_ancestors=jnp.where(choose_recent, parents, self.recent_ancestors[parents]),
            coalescence=jnp.where(advance, self.recent_coalescence + same_parent, coalescence),
            recent_coalescence=jnp.where(
                choose_recent, same_parent, self.recent_coalescence + same_parent
            ),
            has_recent=self.has_recent | choose_recent,
            past_variance=self.past_variance
            + jax.lax.cond(advance, variance_between, lambda: jnp.zeros(())),
        )


def surviving_draws(
    ancestors: Int[Array, "stages particles"], log_weights: Float[Array, " particles"]
) -> Float[Array, " generations"]:
    """Effective number of draws of each generation that survive in the last one, 1 / Σ_e F_e².

    F_e is the total normalised weight of the descendants of draw e. There is one generation more
    than rows of `ancestors`; the entry of the last one is the effective sample size.
    """

    def effective_number(lineage: Array) -> Array:
        squares = jnp.sum(descendant_weights(log_weights, lineage) ** 2)
        return jnp.where(squares > 0.0, 1.0 / jnp.where(squares > 0.0, squares, 1.0), 0.0)

    def step_back(lineage: Array, parents: Array) -> tuple[Array, Array]:
        lineage = parents[lineage]
        return lineage, effective_number(lineage)

    identity = jnp.arange(log_weights.shape[0], dtype=ancestors.dtype)
    _, earlier = jax.lax.scan(step_back, identity, ancestors, reverse=True)
    return jnp.append(earlier, effective_number(identity))


def trace_trajectories(
    draws: dict[str, Array], parents: Int[Array, "time particles"], backward: bool
) -> dict[str, Array]:
    """Trace every particle of the last step back through its ancestors.

    Args:
        draws: site → values drawn at each step, `(time, particles, *shape)`.
        parents: `parents[s]` are the ancestors chosen before step s was drawn, in sampling order.
        backward: whether sampling ran from the last time step to the first.

    Returns:
        Site → trajectories, `(particles, time, *shape)`.
    """
    if backward:
        draws = {name: value[::-1] for name, value in draws.items()}
    identity = jnp.arange(parents.shape[1], dtype=parents.dtype)

    def step_back(lineage: Array, step_parents: Array) -> tuple[Array, Array]:
        return step_parents[lineage], lineage

    _, lineages = jax.lax.scan(step_back, identity, parents, reverse=True)
    paths = jax.vmap(lambda values, line: jax.tree.map(lambda v: v[line], values))(draws, lineages)
    if backward:
        paths = {name: path[::-1] for name, path in paths.items()}
    return {name: jnp.moveaxis(path, 0, 1) for name, path in paths.items()}
