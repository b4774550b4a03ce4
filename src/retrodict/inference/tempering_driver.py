"""Networks and a data set in; a `Posterior` found by tempering, with a verdict of its own, out.

Weights tell nothing here: after the last resampling all are equal. The verdict rests on the islands
of `retrodict.temper` instead. They share the path and no draw, so the spread of their means is the
error of the mean, and the spread of their evidences that of the evidence, whether it comes from
weights, from moves that get nowhere, or from modes that few draws found. What all islands miss,
none can show.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from retrodict._xla.jit import run_often
from retrodict.errors import DataError
from retrodict.graph.graph import Site
from retrodict.graph.loop_surface import by_user_site
from retrodict.inference.mcmc_kernels import Moves
from retrodict.inference.tempered_smc import POOL, Climb, Guide, Pool, Temperer, features
from retrodict.inference.tempered_target import Target
from retrodict.particles.diagnostics import Limit
from retrodict.particles.population import blame
from retrodict.particles.posterior import Posterior, make_posterior
from retrodict.particles.resampling import Resampler, resampler
from retrodict.proposal.proposal import Networks, Proposal
from retrodict.types import Values

# Fewer particles than this cannot tell a posterior's shape, nor be told apart into islands.
FEWEST = 40
# Moves that leave no coordinate more correlated with where it was than this have mixed the islands
# at the last temperature, and particles of all count alike.
MIXED = 0.3
# Islands have the path in common, and with it some of their error: on data sets with exact answers,
# 40 runs each, the evidence was off by up to this many times what they claimed.
PATH = 1.25

LIMITS = (
    Limit("last temperature λ", "least", 1.0, 1.0, "the path did not end at the posterior"),
    Limit("effective sample size by islands", "least", 150.0, 30.0, "islands disagree on means"),
    Limit("standard error of the log evidence", "most", 0.15, 1.0, "islands disagree on it"),
    Limit("acceptance of trajectories", "least", 0.3, 0.05, "moves are mostly refused"),
)


@dataclass(frozen=True)
class Rescuer:
    """Tempering for one data set at a time.

    Attributes:
        proposal: whose networks give half of the first draws, and moves of discrete latents.
        num_particles: K.
        resampling: how to choose ancestors.
        share: of particles that stay effective from one temperature to the next.
        memory: bytes that the particles worked on at a time may take.
    """

    proposal: Proposal
    num_particles: int
    resampling: str | Resampler = "systematic"
    share: float = 0.5
    memory: int = 256 * 2**20

    def __post_init__(self) -> None:
        if self.num_particles < FEWEST:
            raise ValueError(
                f"num_particles is {self.num_particles}; tempering needs at least {FEWEST}, for it "
                "learns from the particles how to move them"
            )

    @property
    def islands(self) -> int:
        """Of pilots, and of followers."""
        return 8 if self.num_particles >= 800 else 4 if self.num_particles >= 200 else 2

    @cached_property
    def temperer(self) -> Temperer:
        """The path for one half of the particles."""
        size = -(-self.num_particles // (2 * self.islands))
        # no resampling at all would leave no way to the posterior
        share = float(np.clip(self.share, 0.1, 0.95))
        values = sum(int(np.prod(site.shape)) for site in self.proposal.graph.sites.values())
        together = max(self.memory // (4 * 100 * max(values, 1)), 1)
        moves = Moves(Target(self.proposal))
        return Temperer(moves, self.islands, size, resampler(self.resampling), share, together)

    @cached_property
    def _draw(self) -> Callable[..., Pool]:
        return run_often(self.temperer.draw)

    @cached_property
    def _climb(self) -> Callable[..., Climb]:
        return run_often(self.temperer.climb)

    @cached_property
    def _complete(self) -> Callable[..., dict[str, Array]]:
        target = self.temperer.moves.target

        def complete(rng_key: PRNGKeyArray, data: Values, climb: Climb) -> dict[str, Array]:
            keys = jax.random.split(rng_key, self.temperer.num)
            particles = climb.walkers.particle
            return jax.vmap(lambda key, p: target.complete(key, data, p))(keys, particles)

        return run_often(complete)

    def __call__(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        data: Values,
        dims: Mapping[str, tuple[str, ...]],
    ) -> Posterior:
        """The posterior of one data set, checked before."""
        begun = time.perf_counter()
        keys = jax.random.split(rng_key, 6)
        pool = self._draw(networks, keys[0], data)
        self._check_possible(data, pool)
        blank = self.temperer.blank()
        pilots = self._climb(networks, keys[1], data, pool, blank, jnp.array(False))
        pool = self._draw(networks, keys[2], data)
        followers = self._climb(networks, keys[3], data, pool, pilots.guide, jnp.array(True))
        # followers first: where there is a particle too many, a pilot goes
        parts = [self._complete(keys[4], data, followers), self._complete(keys[5], data, pilots)]
        samples = {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0]}
        found = Findings.of(jax.device_get(followers), jax.device_get(pilots), self.islands)
        seconds = time.perf_counter() - begun
        return self._posterior(samples, found, data, dims, seconds)

    def _posterior(
        self,
        samples: Mapping[str, Array],
        found: "Findings",
        data: Values,
        dims: Mapping[str, tuple[str, ...]],
        seconds: float,
    ) -> Posterior:
        kept = self.num_particles
        grade, said = found.verdict()
        posterior = make_posterior(
            {name: value[:kept] for name, value in samples.items()},
            jnp.asarray(found.log_weights[:kept], jnp.float32),
            log_evidence_se=jnp.asarray(found.log_evidence_se, jnp.float32),
            num_resamplings=jnp.asarray(found.stops),
            ess_by_stage=jnp.asarray(found.ess_by_stop),
            method="temper",
            data=data,
            dims=dims,
        )
        extra = {
            "reasons": said,
            "note": f"tempered: {found.stops} temperatures",
            "temperatures": found.temperatures,
            "acceptance": found.acceptance,
            "sweeps": found.sweeps,
            "seconds": seconds,
            "ess_by_islands": found.effective,
            "draws": 2 * POOL * self.temperer.num,
        }
        islands = jnp.asarray(found.island[:kept])
        worst = np.maximum(posterior.grade, grade)
        evidence = np.asarray(found.log_evidence, np.float64)[()]
        return replace(posterior, grade=worst, eves=islands, log_evidence=evidence, extra=extra)

    def _check_possible(self, data: Values, pool: Pool) -> None:
        """Say which site is at fault, if no draw could have made the data."""
        possible = np.isfinite(np.asarray(pool.walkers.densities.likelihood))
        if possible.any():
            return
        target, graph = self.temperer.moves.target, self.proposal.graph

        def densities(particle: Any) -> dict[str, Array]:
            values, _, _ = target.join(particle)
            found = graph.program.run(jax.random.key(0), {**data, **values}).log_density
            return {name: _by_step(found[name], graph.sites[name]) for name in graph.observed}

        by_site = jax.jit(jax.vmap(densities))(pool.walkers.particle)
        finite = {name: np.isfinite(np.asarray(d)).any(0) for name, d in by_site.items()}
        seen = by_user_site(graph, finite)
        raise DataError(
            f"none of {len(possible)} draws from networks and prior makes these sites possible: "
            f"{blame(seen)}. Check that their values can come from the model"
        )


def _by_step(density: Array, site: Site) -> Array:
    """The log density of a site, or of each step of a Python loop."""
    return density.reshape(len(site.steps), -1).sum(1) if site.steps else density.sum()


class Findings(NamedTuple):
    """What a tempered population tells of itself; followers come first.

    Attributes:
        stops: how many temperatures.
        temperatures, ess_by_stop: λ and effective sample size at each.
        log_weights: of the particles.
        island: of each particle.
        log_evidence, log_evidence_se: by the followers; the error from all islands.
        effective: (sd / se)² of the worst coordinate, with the error from the spread of islands.
        acceptance: of trajectories, and of changes of discrete latents; None if there are none.
        sweeps: of moves, of every particle.
        reached: the last λ.
    """

    stops: int
    temperatures: tuple[float, ...]
    ess_by_stop: np.ndarray[Any, Any]
    log_weights: np.ndarray[Any, Any]
    island: np.ndarray[Any, Any]
    log_evidence: float
    log_evidence_se: float
    effective: float
    acceptance: Mapping[str, float | None]
    sweeps: int
    reached: float

    @staticmethod
    def of(followers: Climb, pilots: Climb, islands: int) -> "Findings":
        """Read it from both populations."""
        both = (followers, pilots)
        stops = int(followers.stops)
        rows = np.concatenate([np.asarray(features(c.walkers.particle), np.float64) for c in both])
        evidence = np.concatenate([c.log_evidence.value() for c in both])
        size = rows.shape[0] // evidence.size
        island = np.repeat(np.arange(evidence.size), size)
        correlation = max(float(np.max(np.abs(c.correlation))) for c in both)
        alike = correlation <= MIXED and bool(np.all(np.isfinite(evidence)))
        weights = np.zeros(evidence.size) if alike else evidence
        lam = float(followers.lam)
        guide: Guide = pilots.guide
        continuous = followers.walkers.particle.z.shape[1] > 0
        discrete = bool(followers.walkers.particle.discrete)
        last = (float(pilots.record.trajectory[stops - 1]), float(pilots.record.changes[stops - 1]))
        return Findings(
            stops,
            tuple(float(value) for value in guide.lam[:stops]),
            np.sum([np.asarray(c.record.ess[:stops]) for c in both], axis=0),
            weights[island],
            island,
            _log_mean(evidence[:islands]),
            _evidence_error(evidence, np.asarray(followers.variance, float), islands)
            if lam >= 1.0
            else float("inf"),
            _effective(rows, weights, island),
            {
                "trajectories": last[0] if continuous else None,
                "changes": last[1] if discrete else None,
            },
            int(np.sum(guide.sweeps[:stops])),
            lam,
        )

    def verdict(self) -> tuple[int, tuple[str, ...]]:
        """The grade, 0 good to 2 poor, and what it rests on in words."""
        accepted = self.acceptance["trajectories"]
        measures = (
            self.reached,
            self.effective,
            self.log_evidence_se,
            1.0 if accepted is None else accepted,
        )
        grade = 0
        said = [
            f"Found by tempering: {self.stops} temperatures, {self.sweeps} sweeps of moves"
            f"{_accepted(self.acceptance)}."
        ]
        for value, limit in zip(measures, LIMITS, strict=True):
            sign = 1.0 if limit.at == "most" else -1.0
            for level, bound, name in ((2, limit.fair, "fair"), (1, limit.good, "good")):
                if not sign * value <= sign * bound:
                    side = "above" if limit.at == "most" else "below"
                    said.append(
                        f"The {limit.name} is {value:.3g}, {side} the {bound:g} that is needed to "
                        f"be {name}: {limit.meaning}."
                    )
                    grade = max(grade, level)
                    break
        return grade, tuple(said)


def _accepted(acceptance: Mapping[str, float | None]) -> str:
    parts = [f"{share:.0%} of {what}" for what, share in acceptance.items() if share is not None]
    return f"; at the last, {' and '.join(parts)} were accepted" if parts else ""


def _log_mean(values: np.ndarray[Any, Any]) -> float:
    if not np.isfinite(values).any():
        return -np.inf
    most = float(np.max(values))
    return most + float(np.log(np.mean(np.exp(values - most))))


def _evidence_error(
    evidence: np.ndarray[Any, Any], variance: np.ndarray[Any, Any], islands: int
) -> float:
    """Of the log of the followers' mean; by how islands differ, and at least by their weights.

    What islands are short of is mostly the rare one with far more evidence, so their ratios differ
    less than they should. Their logarithms are nearly normal, and so tell of it what they can.
    """
    alive = evidence[np.isfinite(evidence)]
    if not alive.size:
        return float("inf")
    ratios = np.exp(evidence - np.max(evidence))
    spread = float(np.var(ratios, ddof=1) / np.mean(ratios) ** 2)
    if alive.size > 1:
        spread = max(spread, float(np.expm1(min(np.var(alive, ddof=1), 100.0))))
    return PATH * float(np.sqrt(max(spread, float(np.mean(variance))) / islands))


def _effective(
    rows: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], island: np.ndarray[Any, Any]
) -> float:
    """How many independent draws would know the worst coordinate's mean as well."""
    number = int(island[-1]) + 1
    shares = np.exp(weights - np.max(weights))
    shares = shares / shares.sum()
    # islands without any weight may stand anywhere
    by_island = rows.reshape(number, -1, rows.shape[1])[shares > 0]
    means, squares = by_island.mean(1), (by_island**2).mean(1)
    alive = shares[shares > 0]
    if len(alive) < 2:
        return 0.0
    mean = alive @ means
    variance = alive @ squares - mean**2
    error = len(alive) / (len(alive) - 1) * (alive**2 @ (means - mean) ** 2)
    moving = variance > 1e-9 * (1e-30 + alive @ squares)
    if not moving.any():
        return float(len(rows))
    return float(np.min(variance[moving] / np.maximum(error[moving], 1e-30)))
