"""A particle in; a particle near it that is distributed alike out: MCMC moves at one temperature.

All moves leave p(x) p(y | x)^λ as it is, whatever the networks say.

- Continuous latents: Hamiltonian Monte Carlo from BlackJAX on the unconstrained row.
- Discrete latents: some copies of a factor are drawn anew by its own network given all else
  (Metropolis within the factors), and some coordinates are changed at random, which still works
  where the network has no idea. Both are judged by the whole density, so no independence between
  copies is taken for granted; how many change at once follows from how many are accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from retrodict.estimators.coordinates import Block, blocks
from retrodict.inference.tempered_target import Densities, Particle, Target
from retrodict.inverse.factors import Factor
from retrodict.proposal.factor_proposals import FactorProposal, Networks
from retrodict.types import Values

# In units of the population's own standard deviations, a quarter turn takes π/2.
TRAJECTORY = 1.5
MOST_STEPS = 16
# What neighbours tell of the scale depends on how many there are, so there it is only a shape.
LOCAL_STEPS = 4
LEAST_STEP, LARGEST_STEP = np.array([1e-5, 1e-3]), np.array([0.75, 1e3])
# Steps differ from particle to particle by so many powers of e.
SPREAD = 0.5
# Log density that a trajectory may lose, beside one for every real number.
MOST_LOST = 200.0
# Acceptance aimed at by changes of discrete latents.
GOOD_CHANGES = 0.35


class Place(NamedTuple):
    """Where a move is made: what densities are given, and λ."""

    networks: Networks
    data: Values
    lam: Float[Array, ""]


class Walker(NamedTuple):
    """A particle with its densities."""

    particle: Particle
    densities: Densities


class Tuning(NamedTuple):
    """What moves learn from a population.

    Attributes:
        metrics: two inverse mass matrices, or their diagonals: the covariance of all rows, and of
            neighbours.
        steps: of trajectories, for each metric.
        changes: how many copies of each discrete factor, and last how many single coordinates, to
            change at once.
    """

    metrics: Array
    steps: Float[Array, " metrics"]
    changes: Float[Array, " kinds"]


class Acceptance(NamedTuple):
    """Chances with which the moves of one sweep were accepted.

    Attributes:
        trajectory: of that of Hamiltonian Monte Carlo.
        changes: of discrete latents.
        log_step: of the trajectory.
        jump: the squared distance that it may be expected to lead.
    """

    trajectory: Float[Array, ""]
    changes: Float[Array, " kinds"]
    log_step: Float[Array, ""]
    jump: Float[Array, ""]


@dataclass(frozen=True)
class Moves:
    """The moves that a model's latents ask for; of one particle."""

    target: Target

    @property
    def jumping(self) -> tuple[Factor, ...]:
        """Factors with a discrete latent."""
        names = {latent.name for latent in self.target.discrete}
        return tuple(f for f in self.target.factors if names & set(f.latents))

    @property
    def limits(self) -> np.ndarray[Any, Any]:
        """The most that can change at once, for each kind of change."""
        sizes = [int(np.prod(self._copies(factor))) for factor in self.jumping]
        return np.array([*sizes, sum(block.size for block in self._flippable)], float)

    def sweep(
        self, rng_key: PRNGKeyArray, walker: Walker, place: Place, tuning: Tuning, metric: Array
    ) -> tuple[Walker, Acceptance]:
        """One move of every kind."""
        row_key, change_key = jax.random.split(rng_key)
        how = Acceptance(jnp.ones(()), jnp.ones(len(self.limits)), jnp.zeros(()), jnp.zeros(()))
        if self.target.continuous:
            walker, how = self._trajectory(row_key, walker, place, tuning, metric, how)
        accepted = []
        if self.target.discrete:
            keys = jax.random.split(change_key, len(self.limits))
            redraws: list[Callable[..., Any]] = [partial(self._redraw, f) for f in self.jumping]
            for key, change, n in zip(keys, [*redraws, self._flip], tuning.changes, strict=True):
                walker, chance = change(key, walker, place, n)
                accepted.append(chance)
        return walker, how._replace(changes=jnp.stack(accepted)) if accepted else how

    def _weigh(self, particle: Particle, place: Place) -> Walker:
        return Walker(particle, self.target.densities(place.data, particle))

    def _trajectory(
        self,
        rng_key: PRNGKeyArray,
        walker: Walker,
        place: Place,
        tuning: Tuning,
        metric: Array,
        how: Acceptance,
    ) -> tuple[Walker, Acceptance]:
        """One transition of Hamiltonian Monte Carlo."""
        from blackjax.mcmc import hmc  # slow to import, and seldom needed

        step_key, move_key = jax.random.split(rng_key)
        # steps of many lengths, for no coordinate to come back to where it was
        log_step = jnp.log(tuning.steps[metric]) + SPREAD * jax.random.normal(step_key)
        turn = jnp.clip(jnp.round(TRAJECTORY / tuning.steps[metric]), 1, MOST_STEPS)
        number = jnp.where(metric == 0, turn, LOCAL_STEPS).astype(int)

        def log_density(z: Array) -> Array:
            return level(self._weigh(walker.particle._replace(z=z), place).densities, place)

        state = hmc.init(walker.particle.z, log_density)
        moved, info = hmc.build_kernel()(
            move_key, state, log_density, jnp.exp(log_step), tuning.metrics[metric], number
        )
        scales = tuning.metrics[metric]
        scales = jnp.diagonal(scales) if scales.ndim == 2 else scales
        jump = jnp.sum((info.proposal.position - walker.particle.z) ** 2 / scales)
        there = self._weigh(walker.particle._replace(z=moved.position), place)
        fell = fallen(level(walker.densities, place), level(there.densities, place), scales.size)
        rate = jnp.where(fell, 0.0, info.acceptance_rate)
        how = how._replace(
            trajectory=rate, log_step=log_step, jump=jnp.where(rate > 0, rate * jump, 0.0)
        )
        return jax.tree.map(partial(jnp.where, fell), walker, there), how

    def _copies(self, factor: Factor) -> tuple[int, ...]:
        return self.target.proposal.estimated[factor.latents].copies.sizes

    def _redraw(
        self, factor: Factor, rng_key: PRNGKeyArray, walker: Walker, place: Place, number: Array
    ) -> tuple[Walker, Float[Array, ""]]:
        """Draw some copies of a factor anew, given all else."""
        choice_key, draw_key, test_key = jax.random.split(rng_key, 3)
        target, proposal = self.target, self.target.proposal
        copies = proposal.estimated[factor.latents].copies
        values, volume, _ = target.join(walker.particle)
        chosen = _choose(choice_key, copies.number, number).reshape(copies.sizes)
        steps = copies.sizes[:1] if factor.time else ()
        noise = proposal.noise(place.networks, draw_key, factor, steps)

        def sample(bound: FactorProposal, prepared: Any, noise: Any) -> Any:
            return bound.sample(prepared, noise)

        scope = target.scope(place.data, values)
        drawn, log_q = proposal.at_all_steps(place.networks, factor, scope, sample, noise)
        proposed = {**values, **copies.select(chosen, drawn, values)}
        # Copies may see one another: the reverse move is evaluated in the context they would have.
        reverse = target.scope(place.data, proposed)
        back = target.copies(place.networks, factor, reverse, values)
        there = self._weigh(target.split(proposed), place)
        # Densities of networks are of the latents, those of walkers of their coordinates.
        volume = volume - target.join(there.particle)[1]
        gain = jnp.sum(jnp.where(chosen, back - log_q, 0.0)) + volume
        return _test(test_key, walker, there, gain, place)

    @property
    def _flippable(self) -> tuple[Block, ...]:
        """Discrete latents whose coordinates can be changed one by one."""
        found = [blocks((latent,))[0] for latent in self.target.discrete]
        return tuple(block for block in found if not block.table.continues_total.any())

    def _flip(
        self, rng_key: PRNGKeyArray, walker: Walker, place: Place, number: Array
    ) -> tuple[Walker, Float[Array, ""]]:
        """Change some discrete coordinates at random: a step as likely back as there."""
        choice_key, step_key, test_key = jax.random.split(rng_key, 3)
        if not self._flippable:
            return walker, jnp.zeros(())
        sizes = [block.size for block in self._flippable]
        chosen = jnp.split(_choose(choice_key, sum(sizes), number), np.cumsum(sizes)[:-1])
        keys = jax.random.split(step_key, len(sizes))
        discrete = walker.particle.discrete
        changed = dict(discrete)
        inside = jnp.ones((), bool)
        for key, block, here in zip(keys, self._flippable, chosen, strict=True):
            name = block.latent.name
            old, _ = block.flatten(jnp.asarray(discrete[name]).astype(float))
            new = jnp.where(here, _step(key, block, old), old)
            inside &= jnp.all((new >= 0) & (new <= block.table.max_value))
            changed[name] = block.unflatten(new).astype(discrete[name].dtype)
        there = self._weigh(Particle(walker.particle.z, changed), place)
        return _test(test_key, walker, there, jnp.where(inside, 0.0, -jnp.inf), place)


def level(densities: Densities, place: Place) -> Float[Array, ""]:
    """log p(x) + λ log p(y | x); −inf where either is impossible."""
    mixed = densities.prior + place.lam * densities.likelihood
    return jnp.where(jnp.isneginf(densities.likelihood) | jnp.isnan(mixed), -jnp.inf, mixed)


def fallen(before: Array, after: Array, reals: int) -> Bool[Array, ""]:
    """Whether a trajectory has ended where it cannot have been accepted.

    It may lose no more than the kinetic energy it began with, half as much as there are reals give
    or take a few roots of that. One that flies off has a momentum whose square overflows, and with
    a dense metric the overflow may be negative: an energy of −inf, which is accepted.
    """
    return after < before - (reals + MOST_LOST)


def _test(
    rng_key: PRNGKeyArray, here: Walker, there: Walker, gain: Array, place: Place
) -> tuple[Walker, Float[Array, ""]]:
    """Metropolis and Hastings; `gain` is log of the chance to propose back over there."""
    log_ratio = gain + level(there.densities, place) - level(here.densities, place)
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
    chance = jnp.exp(jnp.minimum(log_ratio, 0.0))
    accept = jax.random.uniform(rng_key) < chance
    return jax.tree.map(partial(jnp.where, accept), there, here), chance


def adapted(moves: Moves, tuning: Tuning, metric: Int[Array, ""], seen: Acceptance) -> Tuning:
    """The steps that led furthest (Fearnhead & Taylor 2013); more changes where most are accepted.

    Particles that no step moves, as in the neck of a funnel, have no say in it.
    """
    total = jnp.sum(seen.jump)
    best = jnp.sum(seen.jump * seen.log_step) / jnp.where(total > 0, total, 1.0)
    # where none has moved, all steps were too long
    step = jnp.where(total > 0, jnp.exp(best), 0.1 * tuning.steps[metric])
    changes = tuning.changes * jnp.exp(seen.changes.mean(0) - GOOD_CHANGES)
    return tuning._replace(
        steps=jnp.clip(tuning.steps.at[metric].set(step), LEAST_STEP, LARGEST_STEP),
        changes=jnp.clip(changes, 1.0, jnp.maximum(moves.limits, 1.0)),
    )


def _choose(rng_key: PRNGKeyArray, total: int, number: Array) -> Array:
    """About `number` of `total` places, at random."""
    place_key, round_key = jax.random.split(rng_key)
    wanted = jnp.floor(number + jax.random.uniform(round_key))
    order = jnp.argsort(jax.random.uniform(place_key, (total,)))
    return jnp.zeros(total, bool).at[order].set(jnp.arange(total) < wanted)


def _step(rng_key: PRNGKeyArray, block: Block, old: Array) -> Array:
    """Another category, all alike; or a count up or down, mostly by little."""
    if block.kind != "count":
        upper = jnp.asarray(block.table.upper)
        turn = jnp.floor(jax.random.uniform(rng_key, old.shape) * jnp.maximum(upper, 1.0)) + 1
        return jnp.mod(old + turn, upper + 1)
    size_key, sign_key = jax.random.split(rng_key)
    size = jnp.floor(jnp.exp(1.5 * jnp.abs(jax.random.normal(size_key, old.shape))))
    return old + size * jax.random.rademacher(sign_key, old.shape, old.dtype)
