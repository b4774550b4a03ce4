"""Tempered SMC: a population is moved from proposal and prior to the posterior.

The path is p(x) p(y | x)^λ with λ from 0 to 1. Each stage reweights, resamples, and moves every
particle by MCMC (Neal 2001; Del Moral, Doucet & Jasra 2006). The next λ is the largest one that
keeps the wanted share of particles effective, so that a posterior which is ten thousand times
narrower than the prior takes more temperatures, not more particles.

The initial draws come half from the networks and half from the prior, and are weighted as draws
from the mixture ½ q + ½ p. If q is nearly right, the first λ is nearly 1; if it is wrong, its draws
get no weight, and those of the prior remain. The path q^{1−λ} γ^λ would be shorter at times, but a
q that is narrow and in the wrong place remains a spike on it at every λ < 1, and a q with thin
tails keeps them thin.

An adaptive pilot run chooses the temperatures and the parameters of the moves; a second run with
these fixed gives an unbiased Ẑ. Both consist of islands, which share the path but no draw: the
spread between islands estimates the error of the result, whatever its cause.

A model with time is treated alike: its whole trajectory is the particle. Gradients run through the
scan, so that one move changes all steps at a cost linear in their number; discrete states are
sampled again by the networks of their steps. Conditional SMC would need a filter for every
particle, and resample-move on the parameters alone would keep the states of a poor proposal. Poor
mixing of these moves shows in the grade.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from retrodict.inference.mcmc_kernels import (
    MCMCKernels,
    MoveContext,
    ScoredParticle,
    SweepInfo,
    Tuning,
    adapt,
)
from retrodict.inference.population_metrics import (
    MAX_DENSE_REALS,
    coordinate_matrix,
    correlations,
    hmc_metrics,
)
from retrodict.inference.tempered_target import Particle
from retrodict.particles.resampling import Resampler
from retrodict.particles.weights import LogEvidence, drop_nonfinite, ess
from retrodict.proposal.factor_proposals import Networks
from retrodict.types import Values

MAX_TEMPERATURES = 300
# Initial draws for each particle; they are cheap compared with moves.
INITIAL_DRAWS = 8
# Moves at one temperature end when no coordinate is more correlated with its value before them than
# this, or after so many sweeps; the last temperature has limits of its own.
MAX_CORRELATION, MAX_SWEEPS = 0.3, 12
LAST_MAX_CORRELATION, LAST_MAX_SWEEPS = 0.15, 30


class InitialDraws(NamedTuple):
    """Draws from proposal and prior, islands one after the other.

    Attributes:
        particles: with their densities.
        log_mixture: log (½ q + ½ p) of each.
    """

    particles: ScoredParticle
    log_mixture: Float[Array, " draws"]


class TemperingPath(NamedTuple):
    """Temperature, number of sweeps and parameters of the moves at each stage."""

    lam: Float[Array, " stages"]
    num_sweeps: Int[Array, " stages"]
    tuning: Tuning


class TemperingState(NamedTuple):
    """What the next stage needs.

    Attributes:
        particles: with their densities, islands one after the other.
        lam: the temperature they are at.
        log_evidence: log Ẑ of each island so far.
        stage: number of the next stage.
        failed: whether no particle has any weight.
    """

    particles: ScoredParticle
    lam: Float[Array, ""]
    log_evidence: LogEvidence
    stage: Int[Array, ""]
    failed: Bool[Array, ""]


class TemperingInfo(NamedTuple):
    """What a run reports.

    Attributes:
        variance: for each island, the sum of the relative variances of its mean weights.
        correlation: of each coordinate with itself before the moves of the last stage.
        ess: effective sample size of each stage, summed over islands.
        trajectory_acceptance: mean acceptance of trajectories at each stage.
        change_acceptance: mean acceptance of discrete changes at each stage.
    """

    variance: Float[Array, " islands"]
    correlation: Float[Array, " coordinates"]
    ess: Float[Array, " stages"]
    trajectory_acceptance: Float[Array, " stages"]
    change_acceptance: Float[Array, " stages"]


class TemperingRun(NamedTuple):
    """A run of tempered SMC, finished or not."""

    state: TemperingState
    path: TemperingPath
    info: TemperingInfo


class MovesInfo(NamedTuple):
    """What the moves of one stage report.

    Attributes:
        num_sweeps: how many there were.
        correlation: of each coordinate with itself before the moves.
        sweeps: mean over sweeps and particles.
    """

    num_sweeps: Int[Array, ""]
    correlation: Float[Array, " coordinates"]
    sweeps: SweepInfo


@dataclass(frozen=True)
class TemperedSMC:
    """Runs tempered SMC for several islands of particles at once.

    Attributes:
        kernels: the MCMC moves.
        num_islands: populations that share the path but no draw.
        island_size: particles of each.
        resampler: the scheme that chooses ancestors.
        ess_share: the share of particles that stays effective from one temperature to the next.
        batch_size: particles that are processed at a time.
    """

    kernels: MCMCKernels
    num_islands: int
    island_size: int
    resampler: Resampler
    ess_share: float
    batch_size: int

    @property
    def num_particles(self) -> int:
        """Particles of all islands."""
        return self.num_islands * self.island_size

    def draw(self, networks: Networks, rng_key: PRNGKeyArray, data: Values) -> InitialDraws:
        """Initial draws, alternately from the networks and from the prior."""
        target = self.kernels.target
        keys = jax.random.split(rng_key, (INITIAL_DRAWS // 2 * self.num_particles, 2))

        def score(particle: Particle) -> tuple[ScoredParticle, Array]:
            scored = self.kernels.score(particle, data)
            log_q = target.log_q(networks, data, particle)
            return scored, jnp.logaddexp(log_q, scored.densities.prior) - np.log(2.0)

        def draw_pair(keys: PRNGKeyArray) -> tuple[ScoredParticle, Array]:
            pair = (
                target.sample_proposal(networks, keys[0], data),
                target.sample_prior(keys[1], data),
            )
            return jax.vmap(score)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *pair))

        return InitialDraws(*jax.tree.map(_merge_axes, self._map_particles(draw_pair, keys)))

    def blank_path(self) -> TemperingPath:
        """A path for an adaptive run to fill in."""
        reals, stages = self.kernels.target.num_reals, MAX_TEMPERATURES
        shape = (2, reals, reals) if 0 < reals <= MAX_DENSE_REALS else (2, reals)
        tuning = Tuning(
            jnp.zeros((stages, *shape)),
            jnp.full((stages, 2), 0.3),
            jnp.ones((stages, len(self.kernels.max_changes))),
        )
        return TemperingPath(jnp.full(stages, jnp.nan), jnp.zeros(stages, jnp.int32), tuning)

    def run(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        data: Values,
        initial: InitialDraws,
        path: TemperingPath,
        fixed_path: Bool[Array, ""],
    ) -> TemperingRun:
        """All stages, from the initial draws to the posterior.

        Args:
            networks: by name.
            rng_key: random key.
            data: observed values.
            initial: from `draw`.
            path: of an earlier run, or from `blank_path`.
            fixed_path: whether to follow the path; otherwise it is chosen adaptively.
        """
        blank, zero = jnp.full(MAX_TEMPERATURES, jnp.nan), jnp.zeros(self.num_islands)
        num_coordinates = coordinate_matrix(initial.particles.particle).shape[1]
        state = TemperingState(
            jax.tree.map(lambda leaf: leaf[: self.num_particles], initial.particles),
            jnp.zeros(()),
            LogEvidence(zero, zero),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), bool),
        )
        info = TemperingInfo(zero, jnp.ones(num_coordinates), blank, blank, blank)
        context = MoveContext(networks, data, jnp.zeros(()))

        def unfinished(run: TemperingRun) -> Array:
            state = run.state
            return (state.lam < 1.0) & (state.stage < MAX_TEMPERATURES) & ~state.failed

        end: TemperingRun = jax.lax.while_loop(
            unfinished,
            lambda run: self._stage(rng_key, run, initial, context, fixed_path),
            TemperingRun(state, path, info),
        )
        return end

    def _stage(
        self,
        rng_key: PRNGKeyArray,
        run: TemperingRun,
        initial: InitialDraws,
        context: MoveContext,
        fixed_path: Bool[Array, ""],
    ) -> TemperingRun:
        state, path = run.state, run.path
        stage, first = state.stage, state.stage == 0
        resample_key, move_key = jax.random.split(jax.random.fold_in(rng_key, stage))

        # Reweight
        candidates = Candidates.of(initial, state, self.num_islands)
        share = jnp.where(first, self.ess_share / INITIAL_DRAWS, self.ess_share)
        adaptive = next_temperature(candidates, state.lam, share, first)
        lam = jnp.where(fixed_path, path.lam[stage], adaptive)
        log_weights = candidates.log_weights(lam)
        sizes = jax.vmap(ess)(log_weights)
        num_weighted = jnp.where(first, INITIAL_DRAWS * self.island_size, self.island_size)
        log_means = jax.nn.logsumexp(log_weights, 1) - jnp.log(num_weighted)
        variance = jnp.where(sizes > 0, 1 / jnp.maximum(sizes, 1.0) - 1 / num_weighted, 0.0)

        # Resample
        tuning = self._initial_tuning(run, candidates, log_weights, fixed_path)
        keys = jax.random.split(resample_key, self.num_islands)
        ancestors = jax.vmap(lambda k, weights: self.resampler(k, weights, self.island_size))(
            keys, log_weights
        )
        particles = jax.tree.map(lambda leaf: _gather(leaf, ancestors), candidates.particles)

        # Move
        context = context._replace(lam=lam)
        particles, tuning, moves = self._move(
            move_key, particles, context, tuning, stage, path.num_sweeps[stage], fixed_path
        )
        state = TemperingState(
            particles, lam, state.log_evidence.add(log_means), stage + 1, jnp.all(sizes == 0.0)
        )
        stage_path = TemperingPath(lam, moves.num_sweeps, tuning)
        info = TemperingInfo(
            run.info.variance + variance,
            moves.correlation,
            run.info.ess.at[stage].set(sizes.sum()),
            run.info.trajectory_acceptance.at[stage].set(moves.sweeps.trajectory_acceptance),
            run.info.change_acceptance.at[stage].set(moves.sweeps.change_acceptance.mean()),
        )
        path = jax.tree.map(lambda stages, new: stages.at[stage].set(new), path, stage_path)
        return TemperingRun(state, path, info)

    def _initial_tuning(
        self,
        run: TemperingRun,
        candidates: "Candidates",
        log_weights: Float[Array, "islands candidates"],
        fixed_path: Bool[Array, ""],
    ) -> Tuning:
        """Parameters of the first sweep: those of the path, or metrics of the population.

        An adaptive run takes step sizes and numbers of changes from the stage before.
        """
        stage, stages = run.state.stage, run.path.tuning
        fixed = jax.tree.map(lambda leaf: leaf[stage], stages)
        previous = jax.tree.map(lambda leaf: leaf[jnp.maximum(stage - 1, 0)], stages)
        heaviest = jnp.argsort(-log_weights, 1)[:, : 2 * self.island_size]
        z = _gather(candidates.particles.particle.z, heaviest)
        weights = jnp.take_along_axis(log_weights, heaviest, 1).reshape(-1)
        adaptive = previous._replace(metrics=hmc_metrics(z, jax.nn.softmax(weights)))
        tuning: Tuning = jax.tree.map(partial(jnp.where, fixed_path), fixed, adaptive)
        return tuning

    def _move(
        self,
        rng_key: PRNGKeyArray,
        particles: ScoredParticle,
        context: MoveContext,
        tuning: Tuning,
        stage: Int[Array, ""],
        num_sweeps: Int[Array, ""],
        fixed_path: Bool[Array, ""],
    ) -> tuple[ScoredParticle, Tuning, MovesInfo]:
        """Sweeps of moves: `num_sweeps` on a fixed path, otherwise until particles are mixed."""
        before, last = coordinate_matrix(particles.particle), context.lam >= 1.0
        max_correlation = jnp.where(last, LAST_MAX_CORRELATION, MAX_CORRELATION)
        max_sweeps = jnp.where(last, LAST_MAX_SWEEPS, MAX_SWEEPS)
        max_sweeps = jnp.where(fixed_path, num_sweeps, max_sweeps)

        def sweep(
            carry: tuple[ScoredParticle, Tuning, MovesInfo],
        ) -> tuple[ScoredParticle, Tuning, MovesInfo]:
            particles, tuning, info = carry
            sweep_key = jax.random.fold_in(rng_key, info.num_sweeps)
            keys = jax.random.split(sweep_key, self.num_particles)
            metric = (stage + info.num_sweeps) % 2
            particles, sweeps = self._map_particles(
                lambda key, particle: self.kernels.sweep(key, particle, context, tuning, metric),
                keys,
                particles,
            )
            adapted = adapt(self.kernels, tuning, metric, sweeps)
            tuning = jax.tree.map(partial(jnp.where, fixed_path), tuning, adapted)
            count = info.num_sweeps + 1
            mean = jax.tree.map(lambda a, b: a + (b.mean(0) - a) / count, info.sweeps, sweeps)
            correlation = correlations(before, coordinate_matrix(particles.particle))
            return particles, tuning, MovesInfo(count, correlation, mean)

        def unfinished(carry: tuple[ScoredParticle, Tuning, MovesInfo]) -> Array:
            info = carry[2]
            mixed = jnp.max(jnp.abs(info.correlation)) <= max_correlation
            return (info.num_sweeps < max_sweeps) & (fixed_path | ~mixed)

        info = MovesInfo(
            jnp.zeros((), jnp.int32),
            jnp.ones(before.shape[1]),
            SweepInfo.initial(len(self.kernels.max_changes), 0.0),
        )
        result: tuple[ScoredParticle, Tuning, MovesInfo] = jax.lax.while_loop(
            unfinished, sweep, (particles, tuning, info)
        )
        return result

    def _map_particles(self, fn: Callable[..., Any], *arguments: Any) -> Any:
        """The function of every particle, `batch_size` of them at a time."""
        if self.batch_size >= jax.tree.leaves(arguments)[0].shape[0]:
            return jax.vmap(fn)(*arguments)
        return jax.lax.map(lambda args: fn(*args), arguments, batch_size=self.batch_size)


class Candidates(NamedTuple):
    """The particles from which a stage resamples.

    The candidates of each island are the initial draws, followed by the particles of the stage
    before. Their log weight at λ is `log_base` + λ log p(y | x), and −inf for particles at the
    first stage and for initial draws later on.
    """

    particles: ScoredParticle
    log_base: Float[Array, "islands candidates"]

    @staticmethod
    def of(initial: InitialDraws, state: TemperingState, num_islands: int) -> "Candidates":
        """The candidates of the next stage."""

        def by_island(leaf: Array) -> Array:
            return leaf.reshape(num_islands, leaf.shape[0] // num_islands, *leaf.shape[1:])

        def join(of_draws: Array, of_particles: Array) -> Array:
            return jnp.concatenate([by_island(of_draws), by_island(of_particles)], 1)

        first = state.stage == 0
        of_draws = initial.particles.densities.prior - initial.log_mixture
        of_particles = -state.lam * state.particles.densities.likelihood
        log_base = join(
            jnp.where(first, of_draws, -jnp.inf), jnp.where(first, -jnp.inf, of_particles)
        )
        return Candidates(jax.tree.map(join, initial.particles, state.particles), log_base)

    def log_weights(self, lam: Float[Array, ""]) -> Float[Array, "islands candidates"]:
        """Log weights at a temperature."""
        likelihood = self.particles.densities.likelihood
        log_weights, _ = drop_nonfinite(self.log_base + lam * likelihood)
        return jnp.where(jnp.isneginf(likelihood), -jnp.inf, log_weights)


def next_temperature(
    candidates: Candidates,
    lam: Float[Array, ""],
    share: Float[Array, ""],
    first: Bool[Array, ""],
) -> Float[Array, ""]:
    """The largest λ' ≤ 1 at which the wanted share of the candidates with weight is effective.

    A grid of log steps is searched, and then the interval above the best of them by bisection. From
    the initial draws a long step may be possible where a shorter one is not: if q is right, but the
    prior is far off. Later the effective sample size falls with the step.
    """
    num_alive = jnp.sum(jnp.isfinite(candidates.log_weights(lam)))
    remaining = 1.0 - lam

    def is_possible(log_step: Array) -> Array:
        log_weights = candidates.log_weights(lam + remaining * jnp.exp(log_step))
        return ess(log_weights.reshape(-1)) >= share * num_alive

    def bisect(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        possible = is_possible(middle)
        return jnp.where(possible, middle, low), jnp.where(possible, high, middle)

    grid = jnp.linspace(-40.0, 0.0, 81)
    possible = jax.lax.map(is_possible, grid)
    possible = jnp.where(first, possible, jnp.cumprod(possible) == 1)
    best = jnp.max(jnp.where(possible, jnp.arange(grid.size), 0))
    interval = (grid[best], grid[jnp.minimum(best + 1, grid.size - 1)])
    log_step, _ = jax.lax.fori_loop(0, 12, bisect, interval)
    longest = jnp.minimum(lam + remaining * jnp.exp(log_step), 1.0)
    return jnp.where(possible[-1], 1.0, longest)


def _gather(leaf: Array, indices: Int[Array, "islands number"]) -> Array:
    """Rows of each island, islands one after the other."""
    return _merge_axes(jax.vmap(lambda rows, chosen: rows[chosen])(leaf, indices))


def _merge_axes(leaf: Array) -> Array:
    """The first two axes as one."""
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])
