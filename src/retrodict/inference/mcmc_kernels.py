"""MCMC moves of one particle at a temperature λ.

Every move leaves p(x) p(y | x)^λ invariant, whatever the networks say.

- Continuous latents: Hamiltonian Monte Carlo from BlackJAX on the unconstrained coordinates.
- Discrete latents: some copies of a factor are sampled again by the factor's network given all else
  (Metropolis within the factors), and some coordinates are changed at random, which works even
  where the network is useless. Both are accepted or rejected by the whole density, so that no
  independence between copies is assumed. How many change at once is adapted to the acceptance rate.
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
from retrodict.inference.tempered_target import LogDensities, Particle, TemperedTarget
from retrodict.inverse.factors import Factor
from retrodict.proposal.copies import Copies
from retrodict.proposal.factor_proposals import FactorProposal, Networks
from retrodict.types import Values

# Length of a trajectory in units of the population's standard deviations; a quarter period is π/2.
TRAJECTORY_LENGTH = 1.5
MAX_LEAPFROG_STEPS = 16
# The metric of neighbours has no definite scale, so its trajectories have a fixed number of steps.
LOCAL_LEAPFROG_STEPS = 4
MIN_STEP_SIZE, MAX_STEP_SIZE = np.array([1e-5, 1e-3]), np.array([0.75, 1e3])
# Log density that a trajectory may lose, in addition to one for every real coordinate.
MAX_LOG_DENSITY_LOSS = 200.0
# Target acceptance rate of changes of discrete latents.
TARGET_ACCEPTANCE = 0.35


class MoveContext(NamedTuple):
    """What a move is conditioned on.

    Attributes:
        networks: by name.
        data: observed values.
        lam: the temperature λ.
        log_step_sd: standard deviation of the log step size of trajectories over particles. A large
            one shows which step size is best; a small one lets all trajectories end about a
            quarter period from their start, where energies are least correlated.
    """

    networks: Networks
    data: Values
    lam: Float[Array, ""]
    log_step_sd: float | Float[Array, ""]


class ScoredParticle(NamedTuple):
    """A particle with its log densities."""

    particle: Particle
    densities: LogDensities


class Tuning(NamedTuple):
    """Parameters of the moves, adapted to a population.

    Attributes:
        metrics: two inverse mass matrices, or their diagonals: the covariance of all particles, and
            of differences between neighbours.
        step_sizes: of trajectories, for each metric.
        num_changes: how many copies of each discrete factor, and last how many single coordinates,
            are changed at once.
    """

    metrics: Float[Array, "metrics reals *reals"]
    step_sizes: Float[Array, " metrics"]
    num_changes: Float[Array, " kinds"]


class SweepInfo(NamedTuple):
    """What one sweep reports of one particle.

    Attributes:
        trajectory_acceptance: acceptance probability of the HMC trajectory.
        change_acceptance: acceptance probability of each kind of discrete change.
        log_step_size: of the trajectory.
        expected_jump: the expected squared length of the trajectory's jump.
    """

    trajectory_acceptance: Float[Array, ""]
    change_acceptance: Float[Array, " kinds"]
    log_step_size: Float[Array, ""]
    expected_jump: Float[Array, ""]

    @staticmethod
    def initial(num_kinds: int, acceptance: float) -> "SweepInfo":
        """Before any move, with a given acceptance probability."""
        return SweepInfo(
            jnp.full((), acceptance),
            jnp.full(num_kinds, acceptance),
            jnp.zeros(()),
            jnp.zeros(()),
        )


@dataclass(frozen=True)
class MCMCKernels:
    """The moves for a model's latents, of one particle.

    Attributes:
        target: gives the densities.
    """

    target: TemperedTarget

    @property
    def discrete_factors(self) -> tuple[Factor, ...]:
        """The factors with a discrete latent."""
        names = {latent.name for latent in self.target.discrete}
        return tuple(f for f in self.target.factors if names & set(f.latents))

    @property
    def max_changes(self) -> np.ndarray[Any, Any]:
        """The most that can change at once, for each kind of discrete change."""
        sizes = [self._copies(factor).number for factor in self.discrete_factors]
        return np.array([*sizes, sum(block.size for block in self._independent_blocks)], float)

    def sweep(
        self,
        rng_key: PRNGKeyArray,
        state: ScoredParticle,
        context: MoveContext,
        tuning: Tuning,
        metric: Int[Array, ""],
    ) -> tuple[ScoredParticle, SweepInfo]:
        """One move of every kind.

        Args:
            rng_key: random key.
            state: the particle.
            context: what the target is conditioned on.
            tuning: parameters of the moves.
            metric: which of the two metrics the trajectory uses.
        """
        trajectory_key, change_key = jax.random.split(rng_key)
        info = SweepInfo.initial(len(self.max_changes), 1.0)
        if self.target.continuous:
            state, info = self._hmc(trajectory_key, state, context, tuning, metric, info)
        if not self.target.discrete:
            return state, info
        moves: list[Callable[..., tuple[ScoredParticle, Array]]] = [
            *(partial(self._redraw_copies, factor) for factor in self.discrete_factors),
            self._change_coordinates,
        ]
        keys, acceptance = jax.random.split(change_key, len(moves)), []
        for key, move, number in zip(keys, moves, tuning.num_changes, strict=True):
            state, probability = move(key, state, context, number)
            acceptance.append(probability)
        return state, info._replace(change_acceptance=jnp.stack(acceptance))

    def score(self, particle: Particle, data: Values) -> ScoredParticle:
        """The particle with its log densities."""
        return ScoredParticle(particle, self.target.log_densities(data, particle))

    def _hmc(
        self,
        rng_key: PRNGKeyArray,
        state: ScoredParticle,
        context: MoveContext,
        tuning: Tuning,
        metric: Int[Array, ""],
        info: SweepInfo,
    ) -> tuple[ScoredParticle, SweepInfo]:
        """One transition of Hamiltonian Monte Carlo."""
        from blackjax.mcmc import hmc  # slow to import, and seldom needed

        step_key, move_key = jax.random.split(rng_key)
        # Random step sizes, so that no trajectory is a whole period of any coordinate.
        noise = context.log_step_sd * jax.random.normal(step_key)
        log_step_size = jnp.log(tuning.step_sizes[metric]) + noise
        num_steps = jnp.round(TRAJECTORY_LENGTH / tuning.step_sizes[metric])
        num_steps = jnp.clip(num_steps, 1, MAX_LEAPFROG_STEPS)
        num_steps = jnp.where(metric == 0, num_steps, LOCAL_LEAPFROG_STEPS).astype(int)

        def log_density(z: Array) -> Array:
            particle = state.particle._replace(z=z)
            densities = self.target.log_densities(context.data, particle)
            return tempered_log_density(densities, context.lam)

        inverse_mass = tuning.metrics[metric]
        moved, hmc_info = hmc.build_kernel()(
            move_key,
            hmc.init(state.particle.z, log_density),
            log_density,
            jnp.exp(log_step_size),
            inverse_mass,
            num_steps,
        )
        variances = jnp.diagonal(inverse_mass) if inverse_mass.ndim == 2 else inverse_mass
        jump = jnp.sum((hmc_info.proposal.position - state.particle.z) ** 2 / variances)
        end = self.score(state.particle._replace(z=moved.position), context.data)
        failed = diverged(
            tempered_log_density(state.densities, context.lam),
            tempered_log_density(end.densities, context.lam),
            variances.size,
        )
        acceptance = jnp.where(failed, 0.0, hmc_info.acceptance_rate)
        info = info._replace(
            trajectory_acceptance=acceptance,
            log_step_size=log_step_size,
            expected_jump=jnp.where(acceptance > 0, acceptance * jump, 0.0),
        )
        return jax.tree.map(partial(jnp.where, failed), state, end), info

    def _copies(self, factor: Factor) -> Copies:
        return self.target.proposal.estimated[factor.latents].copies

    def _redraw_copies(
        self,
        factor: Factor,
        rng_key: PRNGKeyArray,
        state: ScoredParticle,
        context: MoveContext,
        number: Float[Array, ""],
    ) -> tuple[ScoredParticle, Float[Array, ""]]:
        """Sample some copies of a factor again by its network, given all else."""
        choice_key, sample_key, accept_key = jax.random.split(rng_key, 3)
        target, proposal, copies = self.target, self.target.proposal, self._copies(factor)
        values, log_jacobian, _ = target.constrain(state.particle)
        chosen = _choose(choice_key, copies.number, number).reshape(copies.sizes)
        steps = copies.sizes[:1] if factor.time else ()
        noise = proposal.noise(context.networks, sample_key, factor, steps)

        def sample(bound: FactorProposal, prepared: Any, noise: Any) -> Any:
            return bound.sample(prepared, noise)

        scope = target.scope(context.data, values)
        samples, log_q_forward = proposal.at_all_steps(
            context.networks, factor, scope, sample, noise
        )
        proposed = {**values, **copies.select(chosen, samples, values)}
        # Copies may be in one another's context, so the reverse move has the proposed context.
        reverse = target.scope(context.data, proposed)
        log_q_reverse = target.factor_log_q(context.networks, factor, reverse, values)
        end = self.score(target.unconstrain(proposed), context.data)
        # log q is a density of the latents, the target one of their coordinates.
        log_jacobian = log_jacobian - target.constrain(end.particle).log_jacobian
        log_q_ratio = jnp.sum(jnp.where(chosen, log_q_reverse - log_q_forward, 0.0)) + log_jacobian
        return _accept_or_reject(accept_key, state, end, log_q_ratio, context.lam)

    @property
    def _independent_blocks(self) -> tuple[Block, ...]:
        """Discrete latents whose coordinates can be changed one by one."""
        all_blocks = [blocks((latent,))[0] for latent in self.target.discrete]
        return tuple(block for block in all_blocks if not block.table.continues_total.any())

    def _change_coordinates(
        self,
        rng_key: PRNGKeyArray,
        state: ScoredParticle,
        context: MoveContext,
        number: Float[Array, ""],
    ) -> tuple[ScoredParticle, Float[Array, ""]]:
        """Change some discrete coordinates by a symmetric random step."""
        choice_key, step_key, accept_key = jax.random.split(rng_key, 3)
        if not self._independent_blocks:
            return state, jnp.zeros(())
        sizes = [block.size for block in self._independent_blocks]
        chosen = jnp.split(_choose(choice_key, sum(sizes), number), np.cumsum(sizes)[:-1])
        keys = jax.random.split(step_key, len(sizes))
        discrete = state.particle.discrete
        proposed = dict(discrete)
        inside = jnp.ones((), bool)
        for key, block, mask in zip(keys, self._independent_blocks, chosen, strict=True):
            name = block.latent.name
            current, _ = block.flatten(jnp.asarray(discrete[name]).astype(float))
            new = jnp.where(mask, _random_step(key, block, current), current)
            inside &= jnp.all((new >= 0) & (new <= block.table.max_value))
            proposed[name] = block.unflatten(new).astype(discrete[name].dtype)
        proposal = self.score(Particle(state.particle.z, proposed), context.data)
        log_q_ratio = jnp.where(inside, 0.0, -jnp.inf)
        return _accept_or_reject(accept_key, state, proposal, log_q_ratio, context.lam)


def tempered_log_density(densities: LogDensities, lam: Float[Array, ""]) -> Float[Array, ""]:
    """log p(x) + λ log p(y | x); −inf where either density is zero."""
    log_density = densities.prior + lam * densities.likelihood
    impossible = jnp.isneginf(densities.likelihood) | jnp.isnan(log_density)
    return jnp.where(impossible, -jnp.inf, log_density)


def diverged(before: Float[Array, ""], after: Float[Array, ""], num_reals: int) -> Bool[Array, ""]:
    """Whether a trajectory ended where it cannot have been accepted.

    It may lose no more log density than the kinetic energy it began with, which is about half the
    number of coordinates. The momentum of a divergent trajectory may have a square that overflows,
    and with a dense metric the overflow may be negative: an energy of −inf, which is accepted.
    """
    return after < before - (num_reals + MAX_LOG_DENSITY_LOSS)


def _accept_or_reject(
    rng_key: PRNGKeyArray,
    state: ScoredParticle,
    proposal: ScoredParticle,
    log_q_ratio: Float[Array, ""],
    lam: Float[Array, ""],
) -> tuple[ScoredParticle, Float[Array, ""]]:
    """Metropolis–Hastings: the next state, and the acceptance probability.

    `log_q_ratio` is log of the probability of the reverse move over that of the move.
    """
    log_ratio = tempered_log_density(proposal.densities, lam)
    log_ratio = log_ratio - tempered_log_density(state.densities, lam) + log_q_ratio
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
    probability = jnp.exp(jnp.minimum(log_ratio, 0.0))
    accept = jax.random.uniform(rng_key) < probability
    return jax.tree.map(partial(jnp.where, accept), proposal, state), probability


def adapt(kernels: MCMCKernels, tuning: Tuning, metric: Int[Array, ""], infos: SweepInfo) -> Tuning:
    """Adapt step size and number of changes to a sweep of a population.

    The step size is the mean of the log step sizes weighted by the jumps they led to (Fearnhead &
    Taylor 2013). So particles that no step moves, as in the neck of a funnel, have no influence.
    """
    total = jnp.sum(infos.expected_jump)
    mean_log_step = jnp.sum(infos.expected_jump * infos.log_step_size)
    mean_log_step = mean_log_step / jnp.where(total > 0, total, 1.0)
    # If no particle has moved, all steps were too long.
    step_size = jnp.where(total > 0, jnp.exp(mean_log_step), 0.1 * tuning.step_sizes[metric])
    step_sizes = tuning.step_sizes.at[metric].set(step_size)
    excess = infos.change_acceptance.mean(0) - TARGET_ACCEPTANCE
    num_changes = tuning.num_changes * jnp.exp(excess)
    return tuning._replace(
        step_sizes=jnp.clip(step_sizes, MIN_STEP_SIZE, MAX_STEP_SIZE),
        num_changes=jnp.clip(num_changes, 1.0, jnp.maximum(kernels.max_changes, 1.0)),
    )


def _choose(rng_key: PRNGKeyArray, total: int, number: Float[Array, ""]) -> Bool[Array, " total"]:
    """A random subset of `total` elements, of expected size `number`."""
    order_key, round_key = jax.random.split(rng_key)
    size = jnp.floor(number + jax.random.uniform(round_key))
    order = jnp.argsort(jax.random.uniform(order_key, (total,)))
    return jnp.zeros(total, bool).at[order].set(jnp.arange(total) < size)


def _random_step(rng_key: PRNGKeyArray, block: Block, current: Array) -> Array:
    """Another category, uniformly; or a count plus or minus a number that is mostly small."""
    if block.kind != "count":
        upper = jnp.asarray(block.table.upper)
        shift = jnp.floor(jax.random.uniform(rng_key, current.shape) * jnp.maximum(upper, 1.0)) + 1
        return jnp.mod(current + shift, upper + 1)
    size_key, sign_key = jax.random.split(rng_key)
    size = jnp.floor(jnp.exp(1.5 * jnp.abs(jax.random.normal(size_key, current.shape))))
    return current + size * jax.random.rademacher(sign_key, current.shape, current.dtype)
