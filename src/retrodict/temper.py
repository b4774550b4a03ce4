"""Networks and a data set in; a population brought to the posterior by tempering out.

The path is b^{1−λ} γ^λ with λ from 0 to 1 (Neal 2001; Del Moral, Doucet & Jasra 2006): reweigh by
(γ / b)^{λ' − λ}, resample, and move every particle by MCMC (`retrodict.moves`). λ' is as far as
leaves the wanted share of particles effective, so a posterior that is ten thousand times narrower
than b takes more temperatures, not more particles. Draws from b are cheap beside moves: the first
choice is among several times as many.

Pilots choose temperatures and steps of the moves; followers repeat what they are told. So the
followers' product of mean weights is unbiased for the evidence, which adapting to one's own weights
would spoil. Both consist of islands that have no draw in common, only the path: how islands differ
tells the error of the answer, whatever its cause.

A model with time is treated alike: its whole trajectory is the particle. Gradients run through the
scan, so that one move changes all steps, at a cost linear in their number; discrete states are
drawn anew by the networks of their steps. Conditional SMC would need a filter for every particle,
and a q that is drawn forward in time; resample-move on the parameters alone would leave the states
what a poor proposal made them. What mixes badly by these moves shows in the verdict.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from retrodict.moves import Acceptance, Moves, Place, Tuning, Walker, adapted
from retrodict.resampling import Resampler
from retrodict.targets import Particle
from retrodict.weights import LogEvidence, drop_nonfinite, ess, normalise

MOST_TEMPERATURES = 300
# Draws from the start, for each particle.
POOL = 8
# Sweeps at one temperature, and at the last: until no coordinate is more correlated with where it
# was than this, at most so many.
CORRELATION, SWEEPS = 0.4, 8
LAST_CORRELATION, LAST_SWEEPS = 0.15, 30
# Up to this many reals, correlations between them are learned.
LARGEST_DENSE = 100
NEIGHBOURS = 256
# A path is given up when so much fewer first draws have descendants than chance would leave.
COLLAPSED = 0.15


class Guide(NamedTuple):
    """A path to follow: for each stop, λ, how many sweeps, and how to move."""

    lam: Float[Array, " stops"]
    sweeps: Int[Array, " stops"]
    tuning: Tuning


class Record(NamedTuple):
    """What was seen at each stop."""

    ess: Float[Array, " stops"]
    trajectory: Float[Array, " stops"]
    changes: Float[Array, " stops"]
    correlation: Float[Array, " stops"]


class Climb(NamedTuple):
    """Where a population stands.

    Attributes:
        walkers: the particles, with their densities; islands one after the other.
        pool: the draws from the start, likewise.
        lam: the temperature the walkers are at.
        eves: which draw of its island's pool each walker descends from.
        log_evidence: so far, of each island.
        variance: of each, the sum of the relative variances of the mean weights.
        stops: how many there were; at the first ones parts of the pool are weighed.
        correlation: of each coordinate with itself before the last moves.
        guide, record: of all stops.
        dead: whether an island has no particle left with any weight.
        collapsed: whether hardly any draw of the pool has descendants left.
    """

    walkers: Walker
    pool: Walker
    lam: Float[Array, ""]
    eves: Int[Array, " particles"]
    log_evidence: LogEvidence
    variance: Float[Array, " islands"]
    stops: Int[Array, ""]
    correlation: Float[Array, " coordinates"]
    guide: Guide
    record: Record
    dead: Bool[Array, ""]
    collapsed: Bool[Array, ""]


@dataclass(frozen=True)
class Temperer:
    """Leads one population along a path.

    Attributes:
        moves: at one temperature.
        islands: how many populations that do not mix.
        size: particles of each.
        resample: how to choose ancestors.
        share: of particles that stay effective from one temperature to the next.
        together: particles that are moved at a time.
    """

    moves: Moves
    islands: int
    size: int
    resample: Resampler
    share: float
    together: int

    @property
    def num(self) -> int:
        """Of particles on all islands."""
        return self.islands * self.size

    @property
    def stops(self) -> int:
        """The most that there can be."""
        return POOL + MOST_TEMPERATURES

    def blank(self) -> Guide:
        """A guide for pilots, to be filled in."""
        reals = self.moves.target.num_reals
        shape = (2, reals, reals) if 0 < reals <= LARGEST_DENSE else (2, reals)
        tuning = Tuning(
            jnp.zeros((self.stops, *shape)),
            jnp.full((self.stops, 2), 0.3),
            jnp.ones((self.stops, len(self.moves.limits))),
        )
        return Guide(jnp.full(self.stops, jnp.nan), jnp.zeros(self.stops, jnp.int32), tuning)

    def climb(
        self,
        rng_key: PRNGKeyArray,
        pool: Particle,
        start: Place,
        guide: Guide,
        follow: Bool[Array, ""],
    ) -> Climb:
        """From the start to the posterior.

        Args:
            rng_key: of this population.
            pool: draws from the start, `POOL` times as many as particles.
            start: the path's, with λ = 0.
            guide: the pilots', to follow; or blank.
            follow: which of the two.
        """
        blank = jnp.full(self.stops, jnp.nan)
        many = POOL * self.num
        # not weighed yet: with no densities, the first sweep accepts where a particle stands
        nowhere = Walker(
            pool, jnp.zeros(many), jnp.full(many, -jnp.inf), jnp.zeros_like(pool.z)
        )
        zero = jnp.zeros(self.islands)
        begun = Climb(
            jax.tree.map(lambda leaf: leaf[: self.num], nowhere),
            nowhere,
            jnp.zeros(()),
            jnp.zeros(self.num, jnp.int32),
            LogEvidence(zero, zero),
            zero,
            jnp.zeros((), jnp.int32),
            jnp.ones(features(pool).shape[1]),
            guide,
            Record(blank, blank, blank, blank),
            jnp.zeros((), bool),
            jnp.zeros((), bool),
        )

        def going(climb: Climb) -> Array:
            allowed = climb.stops < self.stops
            return (climb.lam < 1.0) & allowed & ~climb.dead & ~climb.collapsed

        end: Climb = jax.lax.while_loop(
            going, lambda climb: self._stop(rng_key, climb, start, follow), begun
        )
        return end

    def _stop(self, rng_key: PRNGKeyArray, climb: Climb, start: Place, follow: Array) -> Climb:
        """The next temperature: reweigh, resample, move. At first, a part of the pool is weighed."""
        stop, arriving, first = climb.stops, climb.stops < POOL, climb.stops == POOL
        resample_key, move_key = jax.random.split(jax.random.fold_in(rng_key, stop))
        # Whom to choose from: the pool at first, the walkers ever after.
        everyone = jax.tree.map(self._joined, climb.pool, climb.walkers)
        gain, _ = drop_nonfinite(everyone.end - everyone.start)
        pooled = jnp.arange(gain.shape[1]) < POOL * self.size
        gain = jnp.where(pooled == first, gain, -jnp.inf)
        share = jnp.where(first, 1 / POOL, self.share)
        found = jnp.where(arriving, 0.0, next_temperature(gain.reshape(-1), climb.lam, share))
        lam = jnp.where(follow, climb.guide.lam[stop], found)
        # where the weight is zero it stays so, even if rounding makes the step of λ zero
        log_weights = jnp.where(jnp.isneginf(gain), gain, (lam - climb.lam) * gain)
        sizes = jax.vmap(ess)(log_weights)
        number = jnp.where(first, POOL * self.size, self.size)
        log_means = jax.nn.logsumexp(log_weights, 1) - jnp.log(number)
        tuning = self._tuning(climb, everyone, log_weights, follow)

        keys = jax.random.split(resample_key, self.islands)
        chosen = jax.vmap(lambda key, weights: self.resample(key, weights, self.size))(
            keys, log_weights
        )
        # while the pool is being weighed, the next part of it stands for the walkers
        part = stop * self.size + jnp.arange(self.size)
        chosen = jnp.where(arriving, part, chosen).astype(jnp.int32)
        walkers = jax.tree.map(
            lambda leaf: jax.vmap(lambda rows, places: rows[places])(leaf, chosen).reshape(
                self.num, *leaf.shape[2:]
            ),
            everyone,
        )
        eves = jax.vmap(lambda rows, places: rows[places])(
            self._joined(
                jnp.tile(jnp.arange(POOL * self.size, dtype=jnp.int32), self.islands), climb.eves
            ),
            chosen,
        )
        walkers, tuning, seen = self._rejuvenate(
            move_key, walkers, start._replace(lam=lam), tuning, stop, climb.guide, follow
        )
        variance = climb.variance + 1 / jnp.maximum(sizes, 1e-30) - 1 / number
        variance = jnp.where(arriving, 0.0, variance)
        # If weights are not inherited, of n particles whose ancestors are chosen with these
        # variances so many families are left (Kingman's coalescent).
        chance = 2 * self.size / (2 + self.size * variance)
        families = jax.vmap(partial(num_families_of, POOL * self.size))(eves)
        dead = jnp.any(sizes == 0.0) & ~arriving
        return Climb(
            walkers,
            jax.tree.map(lambda old, new: self._weighed(stop, old, new), climb.pool, walkers),
            lam,
            eves.reshape(-1),
            climb.log_evidence.add(jnp.where(arriving, 0.0, log_means)),
            variance,
            stop + 1,
            seen.correlation,
            Guide(
                climb.guide.lam.at[stop].set(lam),
                climb.guide.sweeps.at[stop].set(seen.count),
                jax.tree.map(lambda kept, new: kept.at[stop].set(new), climb.guide.tuning, tuning),
            ),
            Record(
                climb.record.ess.at[stop].set(sizes.sum()),
                climb.record.trajectory.at[stop].set(seen.acceptance.trajectory),
                climb.record.changes.at[stop].set(seen.acceptance.changes.mean()),
                climb.record.correlation.at[stop].set(jnp.max(jnp.abs(seen.correlation))),
            ),
            dead,
            ~follow & ~arriving & (families.sum() < COLLAPSED * chance.sum()),
        )

    def _joined(self, pool: Array, walkers: Array) -> Array:
        """Of each island, the pool and then the walkers."""
        by_island = [leaf.reshape(self.islands, -1, *leaf.shape[1:]) for leaf in (pool, walkers)]
        return jnp.concatenate(by_island, 1)

    def _weighed(self, stop: Array, pool: Array, walkers: Array) -> Array:
        """The pool with one part replaced; at later stops as it was."""
        pools, parts = (leaf.reshape(self.islands, -1, *leaf.shape[1:]) for leaf in (pool, walkers))
        new = jax.lax.dynamic_update_slice_in_dim(pools, parts, stop * self.size, 1)
        return jnp.where(stop < POOL, new, pools).reshape(pool.shape)

    def _tuning(
        self, climb: Climb, everyone: Walker, log_weights: Array, follow: Array
    ) -> Tuning:
        """As the guide says; or metrics from the weighted population, the rest as it was."""
        stop = climb.stops
        told = jax.tree.map(lambda kept: kept[stop], climb.guide.tuning)
        last = jax.tree.map(lambda kept: kept[jnp.maximum(stop - 1, 0)], climb.guide.tuning)
        rows = everyone.particle.z
        order = jnp.argsort(-log_weights, 1)[:, : 2 * self.size]  # those of weight zero last
        rows = jax.vmap(lambda row, places: row[places])(rows, order)
        weights = jnp.take_along_axis(log_weights, order, 1)
        last = last._replace(
            metrics=self._metrics(rows.reshape(-1, rows.shape[-1]), weights.reshape(-1))
        )
        return jax.tree.map(lambda a, b: jnp.where(follow, a, b), told, last)

    def _metrics(self, rows: Float[Array, "particles reals"], log_weights: Array) -> Array:
        """Covariances of the weighted rows: of all, and of neighbours.

        Where there are modes far apart, neighbours still tell the shape of each.
        """
        weights = jnp.exp(normalise(log_weights)[0])
        alive = weights > 0
        mean = weights @ jnp.where(alive[:, None], rows, 0.0)
        centred = jnp.where(alive[:, None], rows - mean, 0.0)
        overall = _covariance(centred, weights)
        spread = np.linspace(0, len(rows) - 1, min(NEIGHBOURS, len(rows))).astype(int)
        some, few = centred[spread], weights[spread]
        scaled = some / jnp.sqrt(_variances(centred, weights))
        squares = jnp.sum(scaled**2, 1)
        distances = squares[:, None] + squares - 2 * scaled @ scaled.T
        # copies of a particle, and those without weight, are nobody's neighbours
        apart = (distances > 1e-10) & alive[spread]
        nearest = jnp.argmin(jnp.where(apart, distances, jnp.inf), 1)
        few = jnp.where(jnp.any(apart, 1), few, 0.0)
        local = _covariance(some - some[nearest], few / jnp.maximum(few.sum(), 1e-30))
        return jnp.stack([overall, local])

    def _rejuvenate(
        self,
        rng_key: PRNGKeyArray,
        walkers: Walker,
        place: Place,
        tuning: Tuning,
        stop: Int[Array, ""],
        guide: Guide,
        follow: Array,
    ) -> tuple[Walker, Tuning, "Sweeps"]:
        """Sweeps until the pilots have forgotten where they were; followers make as many."""
        before, first, last = features(walkers.particle), stop < POOL, place.lam >= 1.0
        enough = jnp.where(last, LAST_CORRELATION, CORRELATION)
        most = jnp.where(first, 1, jnp.where(last, LAST_SWEEPS, SWEEPS))
        most = jnp.where(follow, guide.sweeps[stop], most)
        still = jnp.where(first, 0.0, 1.0)

        def sweep(state: tuple[Walker, Tuning, Sweeps]) -> tuple[Walker, Tuning, Sweeps]:
            walkers, tuning, seen = state
            keys = jax.random.split(jax.random.fold_in(rng_key, seen.count), self.num)
            metric = (stop + seen.count) % 2
            used = tuning._replace(steps=still * tuning.steps, changes=still * tuning.changes)
            walkers, accepted = self._each(
                lambda key, walker: self.moves.sweep(key, walker, place, used, metric),
                keys,
                walkers,
            )
            mean = jax.tree.map(lambda chance: chance.mean(0), accepted)
            learned = adapted(self.moves, tuning, metric, mean)
            kept = follow | first
            tuning = jax.tree.map(lambda a, b: jnp.where(kept, a, b), tuning, learned)
            count = seen.count + 1
            seen = Sweeps(
                count,
                correlations(before, features(walkers.particle)),
                jax.tree.map(lambda a, b: a + (b - a) / count, seen.acceptance, mean),
            )
            return walkers, tuning, seen

        begin = Sweeps(
            jnp.zeros((), jnp.int32),
            jnp.ones(before.shape[1]),
            Acceptance(jnp.zeros(()), jnp.zeros(tuning.changes.shape)),
        )

        def going(state: tuple[Walker, Tuning, Sweeps]) -> Array:
            unlike = jnp.max(jnp.abs(state[2].correlation), initial=0.0) <= enough
            return (state[2].count < most) & (follow | ~unlike)

        result: tuple[Walker, Tuning, Sweeps] = jax.lax.while_loop(
            going, sweep, (walkers, tuning, begin)
        )
        return result

    def _each(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function of every particle, so many at a time."""
        if self.together >= self.num:
            return jax.vmap(function)(*arguments)
        return jax.lax.map(lambda args: function(*args), arguments, batch_size=self.together)


class Sweeps(NamedTuple):
    """How the moves at one temperature went."""

    count: Int[Array, ""]
    correlation: Float[Array, " coordinates"]
    acceptance: Acceptance


def next_temperature(
    gain: Float[Array, " particles"], lam: Float[Array, ""], share: Array | float
) -> Float[Array, ""]:
    """The largest λ' ≤ 1 at which the wanted share of those with any weight stays effective.

    Bisection of log (λ' − λ), for the first step may have to be tiny.
    """
    alive = jnp.sum(jnp.isfinite(gain))
    left = jnp.log(1.0 - lam)

    def fits(log_step: Array) -> Array:
        weights = jnp.where(jnp.isfinite(gain), jnp.exp(log_step) * gain, -jnp.inf)
        return ess(weights) >= share * alive

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        fit = fits(middle)
        return jnp.where(fit, middle, low), jnp.where(fit, high, middle)

    low, _ = jax.lax.fori_loop(0, 30, halve, (left - 40.0, left))
    return jnp.where(fits(left), 1.0, jnp.minimum(lam + jnp.exp(low), 1.0))


def correlations(
    before: Float[Array, "particles coordinates"], now: Float[Array, "particles coordinates"]
) -> Float[Array, " coordinates"]:
    """Of each coordinate before and after moves; 0 where nearly all particles have one value."""
    x, y = before - before.mean(0), now - now.mean(0)
    scale = jnp.sqrt(jnp.mean(x**2, 0) * jnp.mean(y**2, 0))
    common = jnp.mean(before == jnp.median(before, 0), 0) > 0.99
    found = jnp.mean(x * y, 0) / jnp.where(scale > 0, scale, 1.0)
    return jnp.where(common | (scale == 0), 0.0, found)


def num_families_of(founders: int, eves: Int[Array, " particles"]) -> Int[Array, ""]:
    """How many founders have descendants."""
    return jnp.sum(jnp.zeros(founders, bool).at[eves].set(True))


def features(particles: Particle) -> Float[Array, "particles coordinates"]:
    """All coordinates of particles as numbers."""
    number = particles.z.shape[0]
    parts = [value.reshape(number, -1).astype(float) for value in particles.discrete.values()]
    return jnp.concatenate([particles.z, *parts], 1)


def _variances(centred: Array, weights: Array) -> Float[Array, " reals"]:
    return jnp.maximum(weights @ centred**2, 1e-12)


def _covariance(centred: Float[Array, "rows reals"], weights: Float[Array, " rows"]) -> Array:
    """Of weighted rows, or its diagonal; correlations are shrunk by as much as is noise."""
    variances, number = _variances(centred, weights), centred.shape[1]
    if number > LARGEST_DENSE or number == 0:
        return variances
    scales = jnp.sqrt(variances)
    scaled = centred / scales
    correlations = (weights[:, None] * scaled).T @ scaled
    effective = 1 / jnp.maximum(jnp.sum(weights**2), 1e-30)
    shrunk = correlations * effective / (effective + number)
    correlations = jnp.where(np.eye(number, dtype=bool), 1.0, shrunk)
    return scales[:, None] * correlations * scales
