"""A proposal and data in; a weighted population, its evidence and its history out.

The one rule of the targets γ_n: a density of the model is counted at the stage at which the last of
its variables arrives. Without resampling that is importance sampling; with it, in the order of the
inverse, sequential Monte Carlo (Paige & Wood 2016, sec. 2.1, eq. 3); in time, a particle filter,
whose step closes x_t | x_{t−1} and y_t | x_t.

Latents drawn before a series, from a proposal that has seen all of it, are treated apart. Counting
p(θ) / q(θ | y) at once would make the prior the target of the first stage, and resampling would
throw away what the network knows; counting it at the end would count the data twice on the way. So
it is counted in equal parts over the T steps: the target after step t is

    γ_t(θ, x_1:t) = q(θ | y) [p(θ) / q(θ | y)]^{t/T} p(x_1:t, y_1:t | θ),

which is q(θ | y) at first and p(θ, x, y) at last, and between them nearly free of θ, because
q(θ | y) / p(θ) is about p(y | θ) and each step brings about one T-th of its logarithm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from retrodict._xla.batch_last import sum_of_all
from retrodict._xla.scan import one_by_one, scan
from retrodict.particles.genealogy import Lineage, paths, survivors
from retrodict.particles.population import Population, reweigh, start
from retrodict.particles.resampling import Resampler
from retrodict.particles.weights import ess
from retrodict.proposal.proposal import Networks, Proposal, Stage, by_time
from retrodict.types import Values

# Particles are drawn by parts that need no more than this: beyond it, caches are too small, and
# memory would grow with the number of particles times the size of the networks.
WORKING_BYTES = 16 * 2**20


class Outcome(NamedTuple):
    """The last population, and what was seen on the way.

    Attributes:
        population: after the last stage.
        survivors: for every latent, the effective number of its draws that are left: one number,
            or one for each step of a series.
        possible: for every site whether any particle makes it possible: one, or one for each step.
    """

    population: Population
    log_evidence_se: Float[Array, ""]
    survivors: dict[str, Array]
    ess_by_stage: Float[Array, " stages"]
    ancestors: Int[Array, "stages particles"]
    filtered: dict[str, Array] | None
    filtered_log_weights: Float[Array, "time particles"] | None
    possible: dict[str, Bool[Array, "*time"]]


@dataclass(frozen=True)
class Engine:
    """Runs a proposal as sequential Monte Carlo.

    Attributes:
        proposal: what to draw from.
        num_particles: K.
        resample: how to choose ancestors.
        threshold: resample when the effective sample size falls below this part of K; 0 never.
            An array stands for one that is not known before it runs.
    """

    proposal: Proposal
    num_particles: int
    resample: Resampler
    threshold: float | Float[Array, ""]

    @property
    def _never(self) -> bool:
        """Whether it is known that nothing will be resampled."""
        return isinstance(self.threshold, float | int) and self.threshold <= 0

    def closes(self) -> dict[str, int]:
        """For each site, the stage at which the last variable of its density arrives; −1: none.

        Latents drawn from their own conditional are left out: their weight is one.
        """
        graph = self.proposal.graph
        own = {name for stage in self.proposal.stages for name in stage.own}
        drawn = {
            name: number
            for number, stage in enumerate(self.proposal.stages)
            for factor in stage.factors
            for name in factor.latents
        }
        return {
            name: max(drawn.get(n, -1) for n in (name, *graph.parents(name)))
            for name in graph.sites
            if name not in own
        }

    def _closing(self) -> list[list[str]]:
        """For each stage, the sites whose densities it counts."""
        found: list[list[str]] = [[] for _ in self.proposal.stages]
        for name, when in self.closes().items():
            found[max(when, 0)].append(name)
        return found

    def run(self, networks: Networks, rng_key: PRNGKeyArray, data: Values) -> Outcome:
        """All stages, for one data set."""
        stages, closes = self.proposal.stages, self._closing()
        if self._never and not any(map(self.proposal.runs_forward, stages)):
            return self._unresampled(networks, rng_key, data)
        particles = start(self.num_particles)
        held = jnp.zeros(self.num_particles)  # log weight of what leads a series, see above
        sizes, ancestors = [], []
        filtered: dict[str, Array] | None = None
        filtered_log_weights = None
        possible: dict[str, Array] = {}
        forward = [n for n, s in enumerate(stages) if self.proposal.runs_forward(s)]
        last_series = max(forward, default=-1)
        last, aside, parents_at = self._last_needed(closes), _Aside(), {}
        choose = jax.jit(lambda key, state: self._resample(key, state))
        for number, stage in enumerate(stages):
            stage_key = jax.random.fold_in(rng_key, number)
            resample_key, draw_key = jax.random.split(stage_key)
            closing = closes[number]
            if self.proposal.runs_forward(stage):
                particles, series = self._series(
                    networks, stage_key, stage, data, particles, held, number
                )
                held = jnp.zeros_like(held)
                sizes.append(series.sizes)
                ancestors.append(series.ancestors)
                filtered, filtered_log_weights = series.filtered, series.log_weights
                possible |= series.possible
                counted = [n for n in closing if n not in series.possible]
                density, seen = self._densities(data, particles.values, counted)
                possible |= seen
                particles = _reweigh(particles, self._total(density, counted), number)
                continue
            if number > 0:
                particles = aside.put(particles, number, last)
                # by number, not by name, so that stages that are alike are traced once
                names = list(particles.values)
                bare: Any = particles._replace(values=list(particles.values.values()))  # type: ignore[arg-type]
                bare, size, parents = choose(resample_key, bare)
                particles = bare._replace(values=dict(zip(names, bare.values, strict=True)))
                parents_at[number] = parents
                held = held[parents] if number <= last_series else held
                sizes.append(size[None])
                ancestors.append(parents[None])
            particles, log_q = self._draw(networks, draw_key, stage, data, particles)
            density, seen = self._densities(data, particles.values, closing)
            possible |= seen
            increment = self._total(density, closing) - log_q
            if number < last_series:
                held = held + increment
            else:
                particles = _reweigh(particles, increment, number)
        particles = aside.fetched(particles, parents_at)
        return self._outcome(particles, sizes, ancestors, filtered, filtered_log_weights, possible)

    def _last_needed(self, closes: list[list[str]]) -> dict[str, int]:
        """For each latent, the last stage that looks at its value."""
        graph, stages = self.proposal.graph, self.proposal.stages
        last = dict.fromkeys(graph.latent, -1)
        for number, (stage, closing) in enumerate(zip(stages, closes, strict=True)):
            seen = self.proposal.looks_at(stage)
            if seen is None:
                last = dict.fromkeys(last, number)
                continue
            named = (n for name in closing for n in (name, *graph.parents(name)))
            last |= {name: number for name in (*seen, *named) if name in last}
        return last

    def _unresampled(self, networks: Networks, rng_key: PRNGKeyArray, data: Values) -> Outcome:
        """All stages, where nothing is resampled: one run of the model gives all densities."""
        particles, log_qs = start(self.num_particles), []
        for number, stage in enumerate(self.proposal.stages):
            _, draw_key = jax.random.split(jax.random.fold_in(rng_key, number))
            particles, log_q = self._draw(networks, draw_key, stage, data, particles)
            log_qs.append(log_q)
        closes = self._closing()
        counted = [name for closing in closes for name in closing]
        densities, possible = self._densities(data, particles.values, counted)
        sizes, ancestors = [], []
        for number, (closing, log_q) in enumerate(zip(closes, log_qs, strict=True)):
            if number > 0:
                sizes.append(ess(particles.log_weights)[None])
                ancestors.append(jnp.arange(self.num_particles, dtype=jnp.int32)[None])
            particles = _reweigh(particles, self._total(densities, closing) - log_q, number)
        return self._outcome(particles, sizes, ancestors, None, None, possible)

    def _outcome(
        self,
        particles: Population,
        sizes: list[Array],
        ancestors: list[Array],
        filtered: dict[str, Array] | None,
        filtered_log_weights: Array | None,
        possible: dict[str, Array],
    ) -> Outcome:
        chosen = jnp.zeros((0, self.num_particles), jnp.int32)
        chosen = jnp.concatenate([chosen, *ancestors])
        return Outcome(
            particles,
            particles.log_evidence_se(),
            self._survivors(chosen, particles.log_weights),
            jnp.concatenate([*sizes, ess(particles.log_weights)[None]]),
            chosen,
            filtered,
            filtered_log_weights,
            possible,
        )

    def _survivors(
        self, ancestors: Int[Array, "stages particles"], log_weights: Float[Array, " particles"]
    ) -> dict[str, Array]:
        """By latent, the effective number of draws that are left of its stage, or of its steps."""
        graph, generation = self.proposal.graph, 0
        found: dict[str, Array] = {}
        if self._never:
            left = jnp.full(ancestors.shape[0] + 1, ess(log_weights))
        else:
            left = survivors(ancestors, log_weights)
        for stage in self.proposal.stages:
            own: Array = left[generation]
            length = 1
            if stage.scan is not None and self.proposal.runs_forward(stage):
                length = graph.scan_lengths[stage.scan]
                generation = max(generation - 1, 0)  # nothing is resampled before the first step
                own = left[generation : generation + length]
                own = own[::-1] if graph.reversed_scans[stage.scan] else own
            found |= {name: own for factor in stage.factors for name in factor.latents}
            generation += length
        return found

    def _draw(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        stage: Stage,
        data: Values,
        particles: Population,
    ) -> tuple[Population, Float[Array, " particles"]]:
        chance, factor = jax.random.split(rng_key, self.num_particles), stage.factors[0]
        together = stage.scan is None and not factor.own
        if together:
            chance = self.proposal.noise(networks, rng_key, factor, (self.num_particles,))

        def one(chance: Array, latents: Values) -> tuple[dict[str, Array], Array]:
            known = {**data, **latents}
            if not together:
                return self.proposal.draw_stage(networks, chance, stage, known)
            drawn, log_q = self.proposal.draw_copies(networks, chance, factor, known)
            return drawn, sum_of_all(log_q)

        # what depends on data alone is worked out once for all particles, but once for each part
        each = self.proposal.working_bytes(networks, stage) if particles.values else 0
        seen = self.proposal.looks_at(stage)
        before = {n: v for n, v in particles.values.items() if seen is None or n in seen}
        drawn, log_q = by_parts(one, each, chance, before)
        if stage.own:  # a factor outside of time stands alone, and is all own or not at all
            log_q = jnp.zeros_like(log_q)
        return particles._replace(values={**particles.values, **drawn}), log_q

    def _densities(
        self, data: Values, latents: Values, names: list[str]
    ) -> tuple[dict[str, Float[Array, " particles"]], dict[str, Array]]:
        """Log densities of some sites, and whether any particle makes each of them possible."""
        if not names:
            return {}, {}

        def one(latents: Values) -> dict[str, Array]:
            # Sites not drawn yet are drawn here; nothing that is counted depends on them.
            found = self.proposal.graph.program.run(
                jax.random.key(0), {**data, **latents}, only=names
            )
            return {name: found.log_density[name].sum() for name in names}

        if latents:
            densities = jax.vmap(one)(latents)
        else:
            densities = jax.tree.map(
                lambda d: jnp.broadcast_to(d, (self.num_particles,)), one(latents)
            )
        return densities, {name: jnp.any(d > -jnp.inf) for name, d in densities.items()}

    def _total(
        self, densities: Mapping[str, Array], names: list[str]
    ) -> Float[Array, " particles"]:
        return sum((densities[name] for name in names), jnp.zeros(self.num_particles))

    def _resample(
        self, rng_key: PRNGKeyArray, particles: Population
    ) -> tuple[Population, Float[Array, ""], Int[Array, " particles"]]:
        """Choose ancestors if the weights have become too unequal."""
        size = ess(particles.log_weights)
        needed = size < self.threshold * self.num_particles

        def everyone() -> Int[Array, " particles"]:
            return jnp.arange(self.num_particles, dtype=jnp.int32)

        if self._never:
            return particles, size, everyone()

        def chosen() -> tuple[Any, Lineage, Array]:
            parents = self.resample(rng_key, particles.log_weights, self.num_particles)
            parents = parents.astype(jnp.int32)
            values = jax.tree.map(lambda leaf: leaf[parents], particles.values)
            lineage = particles.lineage.resampled(particles.log_weights, size, parents)
            return values, lineage, parents

        values, lineage, parents = jax.lax.cond(
            needed, chosen, lambda: (particles.values, particles.lineage, everyone())
        )
        equal = jnp.full(self.num_particles, -np.log(self.num_particles), jnp.float32)
        return (
            particles._replace(
                values=values,
                log_weights=jnp.where(needed, equal, particles.log_weights),
                num_resamplings=particles.num_resamplings + needed,
                lineage=lineage,
            ),
            size,
            parents,
        )

    def _series(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        stage: Stage,
        data: Values,
        particles: Population,
        held: Float[Array, " particles"],
        number: int,
    ) -> tuple[Population, "Series"]:
        """A particle filter over the steps of a scan."""
        assert stage.scan is not None
        graph = self.proposal.graph
        length, backward = graph.scan_lengths[stage.scan], graph.reversed_scans[stage.scan]
        outer_data, series_data = self.proposal.split(stage.scan, data)
        summaries = self.proposal.summaries(networks, stage, data)

        def before(latents: Values) -> Any:
            return graph.program.initial_carry(stage.scan or 0, {**data, **latents})

        carry = _population(before, particles.values, self.num_particles)
        moving = carried(particles, carry, held / length if particles.values else None)

        # In one go it is made quicker than step by step, and is no larger than what is kept.
        resample_key, draw_key = jax.random.split(rng_key)
        noise = self.proposal.step_noise(networks, draw_key, stage, (length, self.num_particles))

        def step(state: Population, inputs: Any) -> tuple[Population, Any]:
            time, keys_now, noise_now, given, now = inputs
            state, seen = self.advance(
                networks, keys_now, stage, state, outer_data, given, time, now, number, noise_now
            )
            return state, (seen, state.log_weights)

        keys = jax.random.split(resample_key, (length, 2))
        now = (keys[:, 0], keys[:, 1]), noise, series_data, by_time(summaries)
        entries = (jnp.arange(length), *now)
        moving, (seen, log_weights) = scan(step, moving, entries, reverse=backward)
        sizes, parents = seen.ess, seen.ancestors
        if backward:
            sizes, parents = sizes[::-1], parents[::-1]
        values: Any = moving.values
        followed = paths(seen.drawn, parents, backward)
        ended = moving._replace(values={**values["outer"], **followed})
        return ended, Series(sizes[1:], parents[1:], seen.drawn, log_weights, seen.possible)

    def advance(
        self,
        networks: Networks,
        rng_keys: tuple[PRNGKeyArray, PRNGKeyArray],
        stage: Stage,
        state: Population,
        outer_data: Values,
        given: Values,
        time: Array,
        summaries: Mapping[tuple[str, ...], Values],
        number: int = 0,
        noise: dict[str, Array] | None = None,
    ) -> tuple[Population, "Seen"]:
        """One step of a particle filter: resample, propagate, reweigh.

        Args:
            networks: by name.
            rng_keys: of this step, to resample and to draw.
            stage: the factors of the step.
            state: see `carried`.
            outer_data: observed values outside of the series.
            given: this step's observed values.
            time: which step.
            summaries: of the rest of the series, seen from this step.
            number: of the stage, for messages.
            noise: what networks draw with, if it was made before: see `Proposal.step_noise`.
        """
        resample_key, draw_key = rng_keys
        state, size, parents = self._resample(resample_key, state)

        def one(chance: Mapping[str, Array], outer: Values, carry: Any) -> Any:
            known = {**outer_data, **outer}
            carry, drawn, log_q, found = self.proposal.draw_step(
                networks, chance, stage, known, given, time, carry, summaries
            )
            # A latent's own conditional is both its density and its log q, and so is not counted.
            counted = {n: sum_of_all(d) for n, d in found.log_density.items() if n not in stage.own}
            return carry, drawn, log_q, counted

        values: Any = state.values
        chance = self.proposal.own_keys(draw_key, stage, (self.num_particles,))
        noise_key = jax.random.fold_in(draw_key, len(chance))
        chance |= noise or self.proposal.step_noise(
            networks, noise_key, stage, (self.num_particles,)
        )
        each = self.proposal.working_bytes(networks, stage)
        carry, drawn, log_q, density = by_parts(one, each, chance, values["outer"], values["carry"])
        share = jnp.zeros(()) if values["share"] is None else values["share"]
        increment = sum(density.values(), share) - log_q
        state = reweigh(state._replace(values={**values, "carry": carry}), increment, number)
        possible = {name: jnp.any(d > -jnp.inf) for name, d in density.items()}
        return state, Seen(drawn, size, parents, possible)


def _reweigh(particles: Population, increment: Array, stage: int) -> Population:
    """As `reweigh`, but traced once for all stages."""
    bare: Population = _weigh(particles._replace(values={}), increment, stage)
    return bare._replace(values=particles.values)


_weigh = jax.jit(reweigh)


class _Aside:
    """Values that no later stage looks at, as they were when they were put aside.

    They need not be resampled at every stage: at the end, those of every last particle are found by
    following its ancestors back.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[str, Array]] = {}

    def put(self, particles: Population, stage: int, last: Mapping[str, int]) -> Population:
        """Keep what is not needed from a stage on, before anything is resampled there."""
        done = {n: v for n, v in particles.values.items() if last[n] < stage}
        self._values[stage] = done
        return particles._replace(
            values={n: v for n, v in particles.values.items() if n not in done}
        )

    def fetched(self, particles: Population, ancestors: Mapping[int, Array]) -> Population:
        """With all that was put aside; `ancestors` are those chosen at each stage."""
        line: Array | None = None
        found: dict[str, Array] = {}
        for stage in sorted(self._values, reverse=True):
            line = (
                ancestors[stage] if line is None else jnp.take(ancestors[stage], line, mode="clip")
            )
            for name, value in self._values[stage].items():
                found[name] = jnp.take(value, line, 0, mode="clip")
        return particles._replace(values={**dict(reversed(found.items())), **particles.values})


class Seen(NamedTuple):
    """What one step of a particle filter saw: its draws, and how they came to be."""

    drawn: dict[str, Array]
    ess: Float[Array, ""]
    ancestors: Int[Array, " particles"]
    possible: dict[str, Bool[Array, ""]]


class Series(NamedTuple):
    """What a particle filter leaves beside its population."""

    sizes: Float[Array, " time"]
    ancestors: Int[Array, "time particles"]
    filtered: dict[str, Array]
    log_weights: Float[Array, "time particles"]
    possible: dict[str, Bool[Array, " time"]]


def carried(
    particles: Population, carry: Any, share: Float[Array, " particles"] | None = None
) -> Population:
    """What goes from step to step, and along with it when ancestors are chosen.

    That is the latents drawn before the series, the scan's carry, and the part of the leading
    latents' weight that every step counts, if there is any.
    """
    moving: Any = {"outer": particles.values, "carry": carry, "share": share}
    return particles._replace(values=moving)


def by_parts(fn: Callable[..., Any], each: int, *arguments: Any) -> Any:
    """The function of every row, of as many at a time as may be if one takes `each` bytes."""
    number = jax.tree.leaves(arguments)[0].shape[0]
    least = min(-(-number * each // WORKING_BYTES), number)
    if least <= 1:
        return jax.vmap(fn)(*arguments)
    # parts of one size are compiled once
    even = (parts for parts in range(least, 2 * least) if number % parts == 0)
    parts = next(even, least)
    size = number // parts
    done = parts * size
    batched = jax.vmap(fn)
    cut = jax.tree.map(lambda a: a[:done].reshape(parts, size, *a.shape[1:]), arguments)
    made = one_by_one(lambda part: batched(*part), cut)
    made = jax.tree.map(lambda a: a.reshape(done, *a.shape[2:]), made)
    if done == number:
        return made
    rest = batched(*jax.tree.map(lambda a: a[done:], arguments))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), made, rest)


def _population(fn: Any, latents: Values, num_particles: int) -> Any:
    """The function of every particle, or of none where there are no latents yet."""
    if latents:
        return jax.vmap(fn)(latents)
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (num_particles, *jnp.shape(leaf))), fn(latents)
    )
