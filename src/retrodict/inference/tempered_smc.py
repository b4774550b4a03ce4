"""Draws from networks and prior in; a population brought to the posterior by tempering out.

The path is p(x) p(y | x)^λ with λ from 0 to 1: reweigh, resample, and move every particle by MCMC
(Neal 2001; Del Moral, Doucet & Jasra 2006). The next λ is as far as leaves the wanted share of
particles effective, so a posterior that is ten thousand times narrower than the prior takes more
temperatures, not more particles.

The start is what there is: a pool of draws, half from the networks and half from the prior,
weighted together as one mixture (½ q + ½ p) with respect to the path. If q is nearly right, the
first λ is nearly 1; if it is wrong, its draws have no weight and the prior's take over. The path
q^{1−λ} γ^λ would be shorter at times, but a q that is narrow and in the wrong place stays a spike
on it at every λ < 1, and one whose tails are too thin stays without them.

Pilots choose temperatures and steps of the moves; followers repeat what they are told. So the
followers' product of mean weights is unbiased for the evidence, which adapting to one's own weights
would spoil. Both consist of islands that have no draw in common, only the path: how islands differ
tells the error of the answer, whatever its cause.

A model with time is treated alike: its whole trajectory is the particle. Gradients run through the
scan, so that one move changes all steps, at a cost linear in their number; discrete states are
drawn anew by the networks of their steps. Conditional SMC would need a filter for every particle;
resample-move on the parameters alone would leave the states what a poor proposal made them. What
mixes badly by these moves shows in the verdict.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from retrodict.inference.mcmc_kernels import Acceptance, Moves, Place, Tuning, Walker, adapted
from retrodict.inference.tempered_target import Particle
from retrodict.particles.resampling import Resampler
from retrodict.particles.weights import LogEvidence, drop_nonfinite, ess
from retrodict.proposal.factor_proposals import Networks
from retrodict.types import Values

MOST_TEMPERATURES = 300
# Draws at the start for each particle; they are cheap beside moves.
POOL = 8
# Sweeps at one temperature, and at the last: until no coordinate is more correlated with where it
# was than this, at most so many.
CORRELATION, SWEEPS = 0.3, 12
LAST_CORRELATION, LAST_SWEEPS = 0.15, 30
# Up to this many reals, correlations between them are learned.
LARGEST_DENSE = 100
NEIGHBOURS = 256


class Pool(NamedTuple):
    """Draws to start from, islands one after the other, and their log density as a mixture."""

    walkers: Walker
    log_start: Float[Array, " draws"]


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
        lam: the temperature they are at.
        eves: which draw of its island's pool each descends from.
        log_evidence: so far, of each island.
        variance: of each, the sum of the relative variances of the mean weights.
        stops: how many there were.
        correlation: of each coordinate with itself before the last moves.
        guide, record: of all stops.
        dead: whether no island has a particle left with any weight.
    """

    walkers: Walker
    lam: Float[Array, ""]
    eves: Int[Array, " particles"]
    log_evidence: LogEvidence
    variance: Float[Array, " islands"]
    stops: Int[Array, ""]
    correlation: Float[Array, " coordinates"]
    guide: Guide
    record: Record
    dead: Bool[Array, ""]


@dataclass(frozen=True)
class Temperer:
    """Leads one population along a path.

    Attributes:
        moves: at one temperature.
        islands: how many populations that do not mix.
        size: particles of each.
        resample: how to choose ancestors.
        share: of particles that stay effective from one temperature to the next.
        together: particles that are worked on at a time.
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

    def draw(self, networks: Networks, rng_key: PRNGKeyArray, data: Values) -> Pool:
        """Every other draw from the networks, the others from the prior."""
        target = self.moves.target
        keys = jax.random.split(rng_key, (POOL // 2 * self.num, 2))

        def weigh(particle: Particle) -> tuple[Walker, Array]:
            walker = Walker(particle, target.densities(data, particle))
            log_q = target.log_q(networks, data, particle)
            return walker, jnp.logaddexp(log_q, walker.densities.prior) - np.log(2.0)

        def both(keys: PRNGKeyArray) -> Any:
            drawn = target.draw(networks, keys[0], data), target.draw_prior(keys[1], data)
            return jax.vmap(weigh)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn))

        pool = self._each(both, keys)
        return Pool(*jax.tree.map(lambda leaf: _merged(leaf), pool))

    def blank(self) -> Guide:
        """A guide for pilots, to be filled in."""
        reals, stops = self.moves.target.num_reals, MOST_TEMPERATURES
        shape = (2, reals, reals) if 0 < reals <= LARGEST_DENSE else (2, reals)
        tuning = Tuning(
            jnp.zeros((stops, *shape)),
            jnp.full((stops, 2), 0.3),
            jnp.ones((stops, len(self.moves.limits))),
        )
        return Guide(jnp.full(stops, jnp.nan), jnp.zeros(stops, jnp.int32), tuning)

    def climb(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        data: Values,
        pool: Pool,
        guide: Guide,
        follow: Bool[Array, ""],
    ) -> Climb:
        """From the pool to the posterior; as the guide says, or finding the way."""
        blank, zero = jnp.full(MOST_TEMPERATURES, jnp.nan), jnp.zeros(self.islands)
        begun = Climb(
            jax.tree.map(lambda leaf: leaf[: self.num], pool.walkers),
            jnp.zeros(()),
            jnp.zeros(self.num, jnp.int32),
            LogEvidence(zero, zero),
            zero,
            jnp.zeros((), jnp.int32),
            jnp.ones(features(pool.walkers.particle).shape[1]),
            guide,
            Record(blank, blank, blank, blank),
            jnp.zeros((), bool),
        )
        place = Place(networks, data, jnp.zeros(()))

        def going(climb: Climb) -> Array:
            return (climb.lam < 1.0) & (climb.stops < MOST_TEMPERATURES) & ~climb.dead

        end: Climb = jax.lax.while_loop(
            going, lambda climb: self._stop(rng_key, climb, pool, place, follow), begun
        )
        return end

    def _stop(
        self, rng_key: PRNGKeyArray, climb: Climb, pool: Pool, place: Place, follow: Array
    ) -> Climb:
        """The next temperature: reweigh, resample, move."""
        stop, first = climb.stops, climb.stops == 0
        resample_key, move_key = jax.random.split(jax.random.fold_in(rng_key, stop))
        candidates = Candidates.of(self, pool, climb)
        share = jnp.where(first, self.share / POOL, self.share)
        found = next_temperature(candidates, climb.lam, share, first)
        lam = jnp.where(follow, climb.guide.lam[stop], found)
        log_weights = candidates.log_weights(lam)
        sizes = jax.vmap(ess)(log_weights)
        number = jnp.where(first, POOL * self.size, self.size)
        log_means = jax.nn.logsumexp(log_weights, 1) - jnp.log(number)
        tuning = self._tuning(climb, candidates, log_weights, follow)
        keys = jax.random.split(resample_key, self.islands)
        chosen = jax.vmap(lambda key, weights: self.resample(key, weights, self.size))(
            keys, log_weights
        )
        walkers, eves = candidates.take(chosen)
        walkers, tuning, seen = self._rejuvenate(
            move_key, walkers, place._replace(lam=lam), tuning, stop, climb.guide, follow
        )
        return Climb(
            walkers,
            lam,
            eves,
            climb.log_evidence.add(log_means),
            climb.variance + jnp.where(sizes > 0, 1 / jnp.maximum(sizes, 1.0) - 1 / number, 0.0),
            stop + 1,
            seen.correlation,
            Guide(
                climb.guide.lam.at[stop].set(lam),
                climb.guide.sweeps.at[stop].set(seen.number),
                jax.tree.map(lambda kept, new: kept.at[stop].set(new), climb.guide.tuning, tuning),
            ),
            Record(
                climb.record.ess.at[stop].set(sizes.sum()),
                climb.record.trajectory.at[stop].set(seen.acceptance.trajectory),
                climb.record.changes.at[stop].set(seen.acceptance.changes.mean()),
                climb.record.correlation.at[stop].set(jnp.max(jnp.abs(seen.correlation))),
            ),
            jnp.all(sizes == 0.0),
        )

    def _tuning(
        self, climb: Climb, candidates: "Candidates", log_weights: Array, follow: Array
    ) -> Tuning:
        """As the guide says; or metrics from the weighted population, the rest as it was."""
        stop = climb.stops
        told = jax.tree.map(lambda kept: kept[stop], climb.guide.tuning)
        last = jax.tree.map(lambda kept: kept[jnp.maximum(stop - 1, 0)], climb.guide.tuning)
        heaviest = jnp.argsort(-log_weights, 1)[:, : 2 * self.size]
        rows = _rows(candidates.walkers.particle.z, heaviest)
        weights = jnp.take_along_axis(log_weights, heaviest, 1).reshape(-1)
        last = last._replace(metrics=_metrics(rows, jax.nn.softmax(weights)))
        tuning: Tuning = jax.tree.map(lambda a, b: jnp.where(follow, a, b), told, last)
        return tuning

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
        before, last = features(walkers.particle), place.lam >= 1.0
        enough = jnp.where(last, LAST_CORRELATION, CORRELATION)
        most = jnp.where(last, LAST_SWEEPS, SWEEPS)
        most = jnp.where(follow, guide.sweeps[stop], most)

        def sweep(state: tuple[Walker, Tuning, Sweeps]) -> tuple[Walker, Tuning, Sweeps]:
            walkers, tuning, seen = state
            keys = jax.random.split(jax.random.fold_in(rng_key, seen.number), self.num)
            metric = (stop + seen.number) % 2
            walkers, accepted = self._each(
                lambda key, walker: self.moves.sweep(key, walker, place, tuning, metric),
                keys,
                walkers,
            )
            mean = jax.tree.map(lambda chance: chance.mean(0), accepted)
            learned = adapted(self.moves, tuning, metric, accepted)
            tuning = jax.tree.map(lambda a, b: jnp.where(follow, a, b), tuning, learned)
            count = seen.number + 1
            seen = Sweeps(
                count,
                correlations(before, features(walkers.particle)),
                jax.tree.map(lambda a, b: a + (b - a) / count, seen.acceptance, mean),
            )
            return walkers, tuning, seen

        begin = Sweeps(
            jnp.zeros((), jnp.int32),
            jnp.ones(before.shape[1]),
            Acceptance(
                jnp.zeros(()), jnp.zeros(tuning.changes.shape), jnp.zeros(()), jnp.zeros(())
            ),
        )

        def going(state: tuple[Walker, Tuning, Sweeps]) -> Array:
            unlike = jnp.max(jnp.abs(state[2].correlation)) <= enough
            return (state[2].number < most) & (follow | ~unlike)

        result: tuple[Walker, Tuning, Sweeps] = jax.lax.while_loop(
            going, sweep, (walkers, tuning, begin)
        )
        return result

    def _each(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function of every particle, so many at a time."""
        if self.together >= jax.tree.leaves(arguments)[0].shape[0]:
            return jax.vmap(function)(*arguments)
        return jax.lax.map(lambda args: function(*args), arguments, batch_size=self.together)


class Candidates(NamedTuple):
    """Whom to choose the next population from: the pool at first, the walkers ever after.

    Axes are islands, then the pool's draws, then the walkers; the log weight at the next λ is
    `base` + λ log p(y | x), and −inf for those who are not to be chosen.
    """

    walkers: Walker
    base: Float[Array, "islands candidates"]
    eves: Int[Array, "islands candidates"]

    @staticmethod
    def of(temperer: Temperer, pool: Pool, climb: Climb) -> "Candidates":
        """Of each island, those that have come furthest."""

        def joined(pool: Array, walkers: Array) -> Array:
            shape = (temperer.islands, pool.shape[0] // temperer.islands, *pool.shape[1:])
            return jnp.concatenate(
                [pool.reshape(shape), walkers.reshape(shape[0], temperer.size, *shape[2:])], 1
            )

        first = climb.stops == 0
        at_start = pool.walkers.densities.prior - pool.log_start
        at_walkers = -climb.lam * climb.walkers.densities.likelihood
        base = joined(jnp.where(first, at_start, -jnp.inf), jnp.where(first, -jnp.inf, at_walkers))
        founders = jnp.tile(jnp.arange(POOL * temperer.size, dtype=jnp.int32), temperer.islands)
        walkers = jax.tree.map(joined, pool.walkers, climb.walkers)
        return Candidates(walkers, base, joined(founders, climb.eves))

    def log_weights(self, lam: Array) -> Float[Array, "islands candidates"]:
        """At a temperature."""
        likelihood = self.walkers.densities.likelihood
        log_weights, _ = drop_nonfinite(self.base + lam * likelihood)
        return jnp.where(jnp.isneginf(likelihood), -jnp.inf, log_weights)

    def take(
        self, chosen: Int[Array, "islands particles"]
    ) -> tuple[Walker, Int[Array, " particles"]]:
        """The chosen of each island, islands one after the other."""
        walkers: Walker = jax.tree.map(lambda leaf: _rows(leaf, chosen), self.walkers)
        return walkers, _rows(self.eves, chosen)


class Sweeps(NamedTuple):
    """How the moves at one temperature went."""

    number: Int[Array, ""]
    correlation: Float[Array, " coordinates"]
    acceptance: Acceptance


def next_temperature(
    candidates: Candidates, lam: Float[Array, ""], share: Array, first: Array
) -> Float[Array, ""]:
    """The largest λ' ≤ 1 found at which the wanted share of those with any weight is effective.

    Among steps over forty powers of e; then between the best and the next by bisection. From the
    pool a step may fit that is longer than one that does not: if q is right, but the prior far off.
    """
    alive = jnp.sum(jnp.isfinite(candidates.log_weights(lam)))
    left = 1.0 - lam

    def fits(log_step: Array) -> Array:
        log_weights = candidates.log_weights(lam + left * jnp.exp(log_step))
        return ess(log_weights.reshape(-1)) >= share * alive

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        fit = fits(middle)
        return jnp.where(fit, middle, low), jnp.where(fit, high, middle)

    grid = jnp.linspace(-40.0, 0.0, 81)
    fit = jax.lax.map(fits, grid)
    # walkers lose ever more from where they are; only the pool has a second chance
    fit = jnp.where(first, fit, jnp.cumprod(fit) == 1)
    best = jnp.max(jnp.where(fit, jnp.arange(grid.size), 0))
    start = (grid[best], grid[jnp.minimum(best + 1, grid.size - 1)])
    low, _ = jax.lax.fori_loop(0, 12, halve, start)
    return jnp.where(fit[-1], 1.0, jnp.minimum(lam + left * jnp.exp(low), 1.0))


def correlations(
    before: Float[Array, "particles coordinates"], now: Float[Array, "particles coordinates"]
) -> Float[Array, " coordinates"]:
    """Of each coordinate before and after moves; 0 where nearly all particles have one value."""
    x, y = before - before.mean(0), now - now.mean(0)
    scale = jnp.sqrt(jnp.mean(x**2, 0) * jnp.mean(y**2, 0))
    common = jnp.mean(before == jnp.median(before, 0), 0) > 0.99
    found = jnp.mean(x * y, 0) / jnp.where(scale > 0, scale, 1.0)
    return jnp.where(common | (scale == 0), 0.0, found)


def features(particles: Particle) -> Float[Array, "particles coordinates"]:
    """All coordinates of particles as numbers."""
    number = particles.z.shape[0]
    parts = [value.reshape(number, -1).astype(float) for value in particles.discrete.values()]
    return jnp.concatenate([particles.z, *parts], 1)


def _rows(leaf: Array, places: Int[Array, "islands number"]) -> Array:
    """Entries of each island, islands one after the other."""
    taken = jax.vmap(lambda rows, chosen: rows[chosen])(leaf, places)
    return _merged(taken)


def _merged(leaf: Array) -> Array:
    """The first two axes as one."""
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _metrics(rows: Float[Array, "rows reals"], weights: Float[Array, " rows"]) -> Array:
    """Covariances of weighted rows: of all, and of neighbours.

    Where there are modes far apart, neighbours still tell the shape of each.
    """
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
