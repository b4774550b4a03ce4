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
these fixed gives an unbiased Ẑ. Where the pilot's weights predict a large error of log Ẑ, the
second run divides each of its steps: the variance of log Ẑ falls with the number of temperatures as
it does with the number of particles. Both runs consist of islands, which share the path but no
draw: the spread between islands estimates the error of the result, whatever its cause.

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
    coordinate_matrix,
    correlations,
    hmc_metrics,
)
from retrodict.inference.tempered_target import Particle
from retrodict.particles.resampling import Resampler
from retrodict.particles.weights import LogEvidence, drop_nonfinite, ess
from retrodict.proposal.factor_proposals import Networks
from retrodict.types import Values

# Initial draws for each particle; they are cheap compared with moves.
INITIAL_DRAWS = 8
# Moves at one temperature end when no coordinate is more correlated with its value before them than
# this, or after so many sweeps; the last temperature has limits of its own.
MAX_CORRELATION, MAX_SWEEPS = 0.3, 12
LAST_MAX_CORRELATION, LAST_MAX_SWEEPS = 0.15, 30
# Standard deviation of log step sizes while they are adapted, and on a fixed path.
ADAPTIVE_LOG_STEP_SD, FIXED_LOG_STEP_SD = 0.5, 0.2


class InitialDraws(NamedTuple):
    """Draws from proposal and prior, islands one after the other.

    Attributes:
        particles: with their densities.
        log_mixture: log (½ q + ½ p) of each.
    """

    particles: ScoredParticle
    log_mixture: Float[Array, " draws"]


class PathStage(NamedTuple):
    """A stage of a path: its temperature, number of sweeps and parameters of the moves."""

    lam: Float[Array, ""]
    num_sweeps: Int[Array, ""]
    tuning: Tuning


class TemperingState(NamedTuple):
    """What the next stage needs: particles that are resampled for its temperature.

    Attributes:
        particles: with their densities, islands one after the other.
        lam: the temperature they are at.
        log_evidence: log Ẑ of each island so far.
        variance: for each island, the sum of the relative variances of its mean weights.
        ess: effective sample size before they were resampled, summed over islands.
        tuning: parameters of the moves that an adaptive run begins with.
        failed: whether no particle has any weight.
    """

    particles: ScoredParticle
    lam: Float[Array, ""]
    log_evidence: LogEvidence
    variance: Float[Array, " islands"]
    ess: Float[Array, ""]
    tuning: Tuning
    failed: Bool[Array, ""]


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


class TemperingStageInfo(NamedTuple):
    """What one stage reports: itself, with adapted parameters, its ESS over islands, its moves."""

    stage: PathStage
    ess: Float[Array, ""]
    moves: MovesInfo


class TemperingRun(NamedTuple):
    """The end of a run, and what its stages report."""

    state: TemperingState
    stages: tuple[TemperingStageInfo, ...]


@dataclass(frozen=True)
class TemperedSMC:
    """One run of tempered SMC, of several islands of particles, stage by stage.

    `start` draws particles and resamples them for the first temperature. `advance` moves them, and
    resamples them for the next one; at the last temperature it only moves them.

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

    def start(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        data: Values,
        number: Int[Array, ""],
        lam: Float[Array, ""],
        fixed_path: Bool[Array, ""],
    ) -> TemperingState:
        """Draw particles and resample them for the first temperature.

        Args:
            networks: by name.
            rng_key: random key.
            data: observed values.
            number: selects the random numbers, as in `advance`.
            lam: the first temperature of the path.
            fixed_path: whether to follow the path; otherwise it is chosen adaptively.
        """
        draw_key, resample_key = jax.random.split(jax.random.fold_in(rng_key, number))
        draws = self.draw(networks, draw_key, data)
        log_base = draws.particles.densities.prior - draws.log_mixture
        candidates = Candidates.of(draws.particles, log_base, self.num_islands)
        adaptive = next_temperature(
            candidates, jnp.zeros(()), self.ess_share / INITIAL_DRAWS, monotone=False
        )
        zero = jnp.zeros(self.num_islands)
        tuning = Tuning(jnp.zeros(()), jnp.full(2, 0.3), jnp.ones(len(self.kernels.max_changes)))
        return self._resample(
            resample_key,
            candidates,
            jnp.where(fixed_path, lam, adaptive),
            LogEvidence(zero, zero),
            zero,
            tuning,
        )

    def advance(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        data: Values,
        state: TemperingState,
        number: Int[Array, ""],
        path: tuple[PathStage, Float[Array, ""]],
        fixed_path: Bool[Array, ""],
    ) -> tuple[TemperingState, TemperingStageInfo]:
        """Move the particles, and resample them for the next temperature.

        Args:
            networks: by name.
            rng_key: random key.
            data: observed values.
            state: from `start` or `advance`.
            number: of the stage; each number selects other random numbers.
            path: the stage, and the temperature of the next.
            fixed_path: whether to follow the path; otherwise it is chosen adaptively.
        """
        move_key, resample_key = jax.random.split(jax.random.fold_in(rng_key, number))
        stage, next_lam = path

        # Move
        log_step_sd = jnp.where(fixed_path, FIXED_LOG_STEP_SD, ADAPTIVE_LOG_STEP_SD)
        context = MoveContext(networks, data, state.lam, log_step_sd)
        tuning = jax.tree.map(partial(jnp.where, fixed_path), stage.tuning, state.tuning)
        particles, tuning, moves = self._move(
            move_key, state.particles, context, tuning, number, stage.num_sweeps, fixed_path
        )
        info = TemperingStageInfo(PathStage(state.lam, moves.num_sweeps, tuning), state.ess, moves)

        # Reweight and resample
        log_base = -state.lam * particles.densities.likelihood
        candidates = Candidates.of(particles, log_base, self.num_islands)
        adaptive = next_temperature(candidates, state.lam, self.ess_share, monotone=True)
        next_state = self._resample(
            resample_key,
            candidates,
            jnp.where(fixed_path, next_lam, adaptive),
            state.log_evidence,
            state.variance,
            tuning,
        )
        # After the last moves, resampling would only make copies.
        keep = partial(jnp.where, state.lam >= 1.0)
        return jax.tree.map(keep, state._replace(particles=particles), next_state), info

    def _resample(
        self,
        rng_key: PRNGKeyArray,
        candidates: "Candidates",
        lam: Float[Array, ""],
        log_evidence: LogEvidence,
        variance: Float[Array, " islands"],
        tuning: Tuning,
    ) -> TemperingState:
        """The state at a temperature; its moves have metrics of the weighted candidates."""
        log_weights = candidates.log_weights(lam)
        number = log_weights.shape[1]
        sizes = jax.vmap(ess)(log_weights)
        log_means = jax.nn.logsumexp(log_weights, 1) - np.log(number)
        added = jnp.where(sizes > 0, 1 / jnp.maximum(sizes, 1.0) - 1 / number, 0.0)
        z = candidates.particles.particle.z
        if number > 2 * self.island_size:
            heaviest = jnp.argsort(-log_weights, 1)[:, : 2 * self.island_size]
            z = jax.vmap(lambda rows, chosen: rows[chosen])(z, heaviest)
            metric_weights = jnp.take_along_axis(log_weights, heaviest, 1)
        else:
            metric_weights = log_weights
        metrics = hmc_metrics(_merge_axes(z), jax.nn.softmax(metric_weights.reshape(-1)))
        keys = jax.random.split(rng_key, self.num_islands)
        ancestors = jax.vmap(lambda k, weights: self.resampler(k, weights, self.island_size))(
            keys, log_weights
        )
        return TemperingState(
            jax.tree.map(lambda leaf: _gather(leaf, ancestors), candidates.particles),
            lam,
            log_evidence.add(log_means),
            variance + added,
            sizes.sum(),
            tuning._replace(metrics=metrics),
            jnp.all(sizes == 0.0),
        )

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
    """Particles from which those of a temperature λ are resampled, by island.

    Their log weight at λ is `log_base` + λ log p(y | x).
    """

    particles: ScoredParticle
    log_base: Float[Array, "islands candidates"]

    @staticmethod
    def of(particles: ScoredParticle, log_base: Array, num_islands: int) -> "Candidates":
        """Candidates from arrays in which islands are one after the other."""
        by_island: Candidates = jax.tree.map(
            lambda leaf: leaf.reshape(num_islands, len(leaf) // num_islands, *leaf.shape[1:]),
            Candidates(particles, log_base),
        )
        return by_island

    def log_weights(self, lam: Float[Array, ""]) -> Float[Array, "islands candidates"]:
        """Log weights at a temperature."""
        likelihood = self.particles.densities.likelihood
        log_weights, _ = drop_nonfinite(self.log_base + lam * likelihood)
        return jnp.where(jnp.isneginf(likelihood), -jnp.inf, log_weights)


def next_temperature(
    candidates: Candidates,
    lam: Float[Array, ""],
    share: float,
    *,
    monotone: bool,
) -> Float[Array, ""]:
    """The largest λ' ≤ 1 at which the wanted share of the candidates with weight is effective.

    A grid of log steps is searched, and then the interval above the best of them by bisection.

    Args:
        candidates: weighted at λ.
        lam: λ.
        share: the wanted share.
        monotone: whether the effective sample size falls with the step. It does not for initial
            draws: if q is right, but the prior is far off, only a long step is possible.
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
    possible = jnp.cumprod(possible) == 1 if monotone else possible
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
