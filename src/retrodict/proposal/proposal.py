"""Networks and data in; draws of all latents from the inverse, with their log q, out.

q(x | y) = ∏ q(x_i | PaH(x_i)) in the order of the inverse, Paige & Wood (2016), sec. 3.1: copies
along plates at once, steps of a scan one after the other. All functions are of one particle;
`vmap` over keys gives a population, and what depends on the data alone is then computed once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from retrodict._xla.batch_last import sum_of_all
from retrodict._xla.scan import scan
from retrodict.estimators.conditional import MADE, ConditionalMADE, Network
from retrodict.graph.element_covariates import designs
from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import Draws, joint_draws
from retrodict.graph.program import Evaluation, carry_leaves
from retrodict.inverse.factors import Factor
from retrodict.inverse.inverse import Inverse
from retrodict.inverse.plate_tree import needing_marginals
from retrodict.proposal.conjugacy import Conditional
from retrodict.proposal.contexts import Assembly, assemble, follows_time
from retrodict.proposal.linear_guide import Facts
from retrodict.types import Values

Networks: TypeAlias = Mapping[str, Network]
Noise: TypeAlias = Any  # what a network draws from: arrays, axes of copies first


@dataclass(frozen=True)
class Stage:
    """Factors drawn together: one outside of time, or all those of a scan's step."""

    factors: tuple[Factor, ...]
    scan: int | None = None

    @property
    def own(self) -> tuple[str, ...]:
        """Latents drawn from the model's own conditional: their density and log q are the same."""
        return tuple(name for factor in self.factors if factor.own for name in factor.latents)


@dataclass(frozen=True)
class Proposal:
    """An inverse made ready to draw from.

    Attributes:
        inverse: the model turned round, with its Python loops as scans and plates.
        assemblies: for each factor that has a network, how it gets its inputs.
        marginals: for factors whose prior is counted later than they are drawn, where the inverse
            allows divide and conquer: the same without inputs.
        designs: constants that tell elements apart.
        stages: the factors in the order drawn.
        draws: joint draws of the model.
    """

    inverse: Inverse
    assemblies: Mapping[tuple[str, ...], Assembly]
    marginals: Mapping[tuple[str, ...], Assembly]
    designs: dict[str, Array]
    stages: tuple[Stage, ...]
    draws: Draws = field(compare=False)

    @staticmethod
    def of(
        inverse: Inverse, facts: Mapping[str, Facts] | None = None, *, exact: bool = True
    ) -> "Proposal":
        """Work out contexts and stages.

        Args:
            inverse: the model turned round.
            facts: by network, those of the guides that were found before, if they were.
            exact: whether to do without networks where conditionals are known.
        """
        inverse = inverse.lifted
        graph = inverse.graph
        constants, draws = designs(graph), joint_draws(graph)
        drawn = [factor for factor in inverse.factors if not factor.own]

        def made(factor: Factor) -> Assembly:
            before = None if facts is None else facts.get(str(factor.network))
            guided = facts is None or before is not None
            return assemble(graph, factor, constants, draws if guided else None, before, exact)

        assemblies = {factor.latents: made(factor) for factor in drawn}
        stages: list[Stage] = []
        for factor in inverse.factors:
            scan = graph.sites[factor.latents[0]].scan if factor.time else None
            if scan is not None and stages and stages[-1].scan == scan:
                stages[-1] = Stage((*stages[-1].factors, factor), scan)
            else:
                stages.append(Stage((factor,), scan))
        marginals = {
            f.latents: replace(
                assemblies[f.latents],
                factor=replace(f, network=f"{' '.join(f.latents)} |"),
                inputs=(),
                tree=(),
                guide=None,
            )
            for f in needing_marginals(inverse)
        }
        return Proposal(inverse, assemblies, marginals, constants, tuple(stages), draws)

    @staticmethod
    def bootstrap(inverse: Inverse) -> "Proposal":
        """Without networks: every latent from the model's own conditional (Gordon et al. 1993).

        The inverse must draw in the program's order, as "filter" does.
        """
        own = tuple(replace(factor, own=True) for factor in inverse.lifted_factors)
        return Proposal.of(replace(inverse, lifted_factors=own))

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.inverse.graph

    @property
    def facts(self) -> dict[str, Facts]:
        """What is known of the guides, by network."""
        return {
            str(a.factor.network): a.guide.facts
            for a in self.assemblies.values()
            if a.guide is not None
        }

    def networks(self) -> dict[str, list[Assembly]]:
        """The assemblies of the factors that share each network."""
        shared: dict[str, list[Assembly]] = {}
        for assembly in (*self.assemblies.values(), *self.marginals.values()):
            shared.setdefault(str(assembly.factor.network), []).append(assembly)
        return shared

    def build(
        self, estimator: MADE, rng_key: PRNGKeyArray, assemblies: Sequence[Assembly]
    ) -> Network:
        """An untrained network for the factors that share it."""
        first = assemblies[0]
        copies = sum(int(np.prod(assembly.copies)) for assembly in assemblies)
        return estimator.build(rng_key, first.latents, first.inputs, first.guided, copies)

    def draw(
        self, networks: Networks, rng_key: PRNGKeyArray, data: Values
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        """All latents given the data, and log q of the draw."""
        values: dict[str, Array] = dict(data)
        log_q = jnp.zeros(())
        for number, stage in enumerate(self.stages):
            stage_key = jax.random.fold_in(rng_key, number)
            drawn, stage_log_q = self.draw_stage(networks, stage_key, stage, values)
            values |= drawn
            log_q = log_q + stage_log_q
        latents = {name: values[name] for name in self.graph.latent}
        return latents, log_q

    def runs_forward(self, stage: Stage) -> bool:
        """Whether a stage is a series drawn in the direction of time."""
        return follows_time(self.graph, stage.factors[0]) is not None

    def looks_at(self, stage: Stage) -> set[str] | None:
        """Names of the values that a stage is drawn from, if it does not take all there are."""
        if stage.scan is not None or stage.own:
            return None
        assembly = self.assemblies[stage.factors[0].latents]
        return assembly.keys() if assembly.guide is None else None

    def working_bytes(self, networks: Networks, stage: Stage) -> int:
        """About how much is held at a time to draw one particle of a stage, or of its step.

        Every unit of a network, of which there is a bias each, twice, for every copy.
        """
        total = 0
        for factor in stage.factors:
            if factor.own:
                continue
            copies = self.assemblies[factor.latents].copies[1 if stage.scan is not None else 0 :]
            leaves = jax.tree.leaves(networks[str(factor.network)])
            units = sum(leaf.size for leaf in leaves if jnp.ndim(leaf) == 1)
            total = max(total, 2 * 4 * units * int(np.prod(copies)))
            guide = self.assemblies[factor.latents].guide
            if isinstance(guide, Conditional):
                total = max(total, guide.working_bytes)
        return total

    def draw_stage(
        self, networks: Networks, rng_key: PRNGKeyArray, stage: Stage, values: Values
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        """The latents of one stage given what has been drawn before, and their log q."""
        if stage.scan is None:
            return self._draw_factor(networks, rng_key, stage.factors[0], values)
        if self.runs_forward(stage):
            return self._draw_forward(networks, rng_key, stage, values)
        return self._draw_backward(networks, rng_key, stage, values)

    def _draw_factor(
        self, networks: Networks, rng_key: PRNGKeyArray, factor: Factor, values: Values
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        """The latents of one factor outside of time, all copies at once."""
        if factor.own:
            return self._draw_own(rng_key, factor.latents, values)
        noise = self.noise(networks, rng_key, factor)
        drawn, log_q = self.draw_copies(networks, noise, factor, values)
        return drawn, sum_of_all(log_q)

    def noise(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        factor: Factor,
        shape: tuple[int, ...] = (),
    ) -> Noise:
        """The chance that draws of all copies of a factor need, or of those of one step.

        For a population it is made at once: to make a key for each particle, and numbers from
        each, would be dearer than what is drawn with them.
        """
        copies = self.assemblies[factor.latents].copies[1 if factor.time else 0 :]
        return networks[str(factor.network)].noise(rng_key, (*shape, *copies))

    def step_noise(
        self, networks: Networks, rng_key: PRNGKeyArray, stage: Stage, shape: tuple[int, ...] = ()
    ) -> dict[str, Noise]:
        """Noise for every network of a step, by its first latent; leading axes have some shape."""
        return {
            factor.latents[0]: self.noise(
                networks, jax.random.fold_in(rng_key, number), factor, shape
            )
            for number, factor in enumerate(stage.factors)
            if not factor.own
        }

    @staticmethod
    def own_keys(
        rng_key: PRNGKeyArray, stage: Stage, shape: tuple[int, ...] = ()
    ) -> dict[str, Array]:
        """Keys for the latents of a step that are drawn from the model's own conditional."""
        bases = {name: jax.random.fold_in(rng_key, n) for n, name in enumerate(stage.own)}
        return {name: jax.random.split(key, shape) if shape else key for name, key in bases.items()}

    def draw_copies(
        self, networks: Networks, noise: Noise, factor: Factor, values: Values
    ) -> tuple[dict[str, Array], Float[Array, "*plates"]]:
        """The latents of one factor outside of time, and log q of every copy by itself."""
        assembly = self.assemblies[factor.latents]
        known = {**values, **self.designs}
        expected = None if assembly.guide is None else assembly.guide.everywhere(known)
        x, log_q = self._copies(networks, noise, assembly, known, (), expected=expected)
        return assembly.gather(x, self.graph.sites), log_q

    def log_marginal(
        self, networks: Networks, factor: Factor, values: Values
    ) -> Float[Array, "*plates"]:
        """log m of the latents of every copy of a factor, by the network that sees no context."""
        assembly = self.marginals[factor.latents]
        network = networks[str(assembly.factor.network)]

        def one(*index: Array) -> Array:
            return network.log_prob({}, assembly.x(values, index))

        return over_copies(one, assembly.copies)

    def _draw_own(
        self, rng_key: PRNGKeyArray, names: Sequence[str], values: Values
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        """From the model's own conditional; what else the run draws is not used."""
        keys = {name: jax.random.fold_in(rng_key, number) for number, name in enumerate(names)}
        found = self.graph.program.run(jax.random.key(0), values, keys=keys, only=names)
        log_q = sum((found.log_density[name].sum() for name in names), jnp.zeros(()))
        return {name: found.values[name] for name in names}, log_q

    def _copies(
        self,
        networks: Networks,
        noise: Noise,
        assembly: Assembly,
        values: Values,
        leading: tuple[Any, ...],
        summaries: Values | None = None,
        expected: Any = None,
    ) -> tuple[dict[str, Array], Float[Array, "*plates"]]:
        """Draw every copy along plates, copy axes first; `leading` is the index in time, if any.

        Noise, summaries, and what the model expects have axes of copies first.
        """
        network = networks[str(assembly.factor.network)]
        sizes = assembly.copies[len(leading) :]

        def one(index: tuple[Array, ...], noise: Noise, given: Values, expected: Any) -> Any:
            context = assembly.context(values, (*leading, *index), given, expected)
            return network.draw(network.encode(context, to_draw=True), noise)

        own = (noise, summaries or {}, expected)
        if not sizes:
            x, log_q = one((), *own)
            return x, log_q
        number = int(np.prod(sizes))
        index = jnp.unravel_index(jnp.arange(number), sizes)
        flat = jax.tree.map(lambda s: s.reshape(number, *s.shape[len(sizes) :]), own)
        x, log_q = jax.vmap(one)(index, *flat)
        x = jax.tree.map(lambda leaf: leaf.reshape(*sizes, *leaf.shape[1:]), x)
        return x, log_q.reshape(sizes)

    def _draw_forward(
        self, networks: Networks, rng_key: PRNGKeyArray, stage: Stage, values: Values
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        assert stage.scan is not None
        length = self.graph.scan_lengths[stage.scan]
        summaries = self.summaries(networks, stage, values)
        carry = self.graph.program.initial_carry(stage.scan, values)

        outer, series = self.split(stage.scan, values)

        def step(carry: Any, inputs: Any) -> tuple[Any, Any]:
            time, key, given, now = inputs
            noise_key, own_key = jax.random.split(key)
            chance = self.step_noise(networks, noise_key, stage) | self.own_keys(own_key, stage)
            carry, drawn, log_q, found = self.draw_step(
                networks, chance, stage, outer, given, time, carry, now
            )
            own = (found.log_density[name].sum() for name in stage.own)
            return carry, (drawn, sum(own, log_q))

        times, keys = jnp.arange(length), jax.random.split(rng_key, length)
        backward = self.graph.reversed_scans[stage.scan]
        entries = (times, keys, series, by_time(summaries))
        _, (drawn, log_q) = scan(step, carry, entries, reverse=backward)
        return drawn, log_q.sum()

    def split(self, scan: int, values: Values) -> tuple[dict[str, Array], dict[str, Array]]:
        """Values of the sites outside a scan, and of those inside."""
        inside = set(self.graph.program.scan_sites[scan])
        outer = {name: v for name, v in values.items() if name not in inside}
        return outer, {name: jnp.asarray(v) for name, v in values.items() if name in inside}

    def draw_step(
        self,
        networks: Networks,
        chance: Mapping[str, Noise],
        stage: Stage,
        outer: Values,
        given: Values,
        time: Array,
        carry: Any,
        summaries: Mapping[tuple[str, ...], Values],
    ) -> tuple[Any, dict[str, Array], Float[Array, ""], Evaluation]:
        """One step of a scan, drawn given the carry, at a cost that does not depend on its length.

        Args:
            networks: by name.
            chance: of this step, from `step_noise` and `own_keys`.
            stage: the factors of the step.
            outer: values of the sites outside of the scan.
            given: this step's observed values.
            time: which step, for the constants of the model.
            carry: what the step before left.
            summaries: what there is to be known of the rest of the series, seen from this step.

        Returns:
            the carry after the step, its latents, log q of those drawn by networks, and the step's
            densities.
        """
        assert stage.scan is not None
        program, sites = self.graph.program, self.graph.sites
        known_here: dict[str, Array] = dict(given)
        # In a step, arrays of time hold one entry, that of the step.
        constants = {
            key: value[time][None] if sites[key.rpartition(" ")[0]].time else value
            for key, value in self.designs.items()
        }
        constants |= {n: leaf[None] for n, leaf in carry_leaves(stage.scan, carry).items()}
        log_q = jnp.zeros(())
        for factor in stage.factors:
            if factor.own:
                continue
            assembly = self.assemblies[factor.latents]
            known = {**outer, **constants, **{n: v[None] for n, v in known_here.items()}}
            now = summaries.get(factor.latents, {})
            expected = None
            if assembly.guide is not None:
                expected = assembly.guide.step(outer, known_here, time, carry)
            noise = chance[factor.latents[0]]
            x, factor_log_q = self._copies(
                networks, noise, assembly, known, (jnp.array(0),), now, expected
            )
            known_here |= _one_step(assembly, x, sites)
            log_q = log_q + sum_of_all(factor_log_q)
        keys = {name: chance[name] for name in stage.own}
        carry, found = program.step(None, stage.scan, outer, time, carry, known_here, keys=keys)
        latents = {n: v for n, v in found.values.items() if not sites[n].observed}
        return carry, latents, log_q, found

    def summaries(
        self, networks: Networks, stage: Stage, values: Values
    ) -> dict[tuple[str, ...], dict[str, Array]]:
        """For each factor of a scan, its series as seen from every step: plates, time, features."""
        found: dict[tuple[str, ...], dict[str, Array]] = {}
        known = {**values, **self.designs}
        for factor in stage.factors:
            if factor.own or not self.assemblies[factor.latents].series:
                continue
            assembly = self.assemblies[factor.latents]
            found[factor.latents] = {
                name: self._suffixes(networks, assembly, name, known) for name in assembly.series
            }
        return found

    def _suffixes(self, networks: Networks, assembly: Assembly, name: str, values: Values) -> Array:
        network, factor = networks[str(assembly.factor.network)], assembly.factor
        scan = self.graph.sites[factor.latents[0]].scan
        assert scan is not None and isinstance(network, ConditionalMADE)
        length, sizes = assembly.copies[0], assembly.copies[1:]

        def one(*plates: Array) -> Array:
            if not self.graph.reversed_scans[scan]:
                whole = assembly.whole_series(name, values, (jnp.array(0), *plates), masked=False)
                return network.suffixes(name, whole)

            def at(time: Array) -> Array:
                seen = assembly.whole_series(name, values, (time, *plates), masked=True)
                return network.summary(name, seen)

            return jax.vmap(at)(jnp.arange(length))

        return over_copies(one, sizes)

    def _draw_backward(
        self, networks: Networks, rng_key: PRNGKeyArray, stage: Stage, values: Values
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        """Against the direction of time: a step sees those after it, which are kept whole."""
        assert stage.scan is not None
        sites, length = self.graph.sites, self.graph.scan_lengths[stage.scan]
        names = [name for factor in stage.factors for name in factor.latents]
        blank = {n: jnp.zeros(sites[n].shape, sites[n].dtype) for n in names}

        def step(drawn: dict[str, Array], inputs: Any) -> tuple[dict[str, Array], Array]:
            time, key = inputs
            log_q = jnp.zeros(())
            for number, factor in enumerate(stage.factors):
                assembly = self.assemblies[factor.latents]
                known = {**values, **self.designs, **drawn}
                noise = self.noise(networks, jax.random.fold_in(key, number), factor)
                x, factor_log_q = self._copies(networks, noise, assembly, known, (time,))
                now = _one_step(assembly, x, sites)
                drawn = drawn | {n: drawn[n].at[time].set(v) for n, v in now.items()}
                log_q = log_q + factor_log_q.sum()
            return drawn, log_q

        forward = self.graph.reversed_scans[stage.scan]
        times, keys = jnp.arange(length), jax.random.split(rng_key, length)
        drawn, log_q = scan(step, blank, (times, keys), reverse=not forward)
        return drawn, log_q.sum()

    def log_prob(self, networks: Networks, values: Values) -> Float[Array, ""]:
        """log q of the latents among `values`, which holds the data as well."""
        found = self.graph.program.run(None, values)
        known = {**values, **found.carries, **self.designs}
        log_q = jnp.zeros(())
        for factor in self.inverse.factors:
            if factor.own:
                log_q += sum(found.log_density[name].sum() for name in factor.latents)
                continue
            assembly = self.assemblies[factor.latents]
            network = networks[str(factor.network)]

            def one(*index: Array, assembly: Assembly = assembly, network: Any = network) -> Array:
                x, context = assembly.x(known, index), assembly.context(known, index)
                density: Array = network.log_prob(context, x)
                return density

            log_q += over_copies(one, assembly.copies).sum()
        return log_q


def over_copies(fn: Callable[..., Array], sizes: tuple[int, ...]) -> Array:
    """A function of an index, at every index of the given sizes; copy axes first."""
    if not sizes:
        return fn()
    made = jax.vmap(fn)(*jnp.unravel_index(jnp.arange(int(np.prod(sizes))), sizes))
    return made.reshape(*sizes, *made.shape[1:])


def by_time(
    summaries: Mapping[tuple[str, ...], Values],
) -> dict[tuple[str, ...], dict[str, Array]]:
    """Summaries with the axis of steps first."""
    return {
        factor: {name: jnp.moveaxis(seen, -2, 0) for name, seen in named.items()}
        for factor, named in summaries.items()
    }


def _one_step(assembly: Assembly, x: Values, sites: Mapping[str, Any]) -> dict[str, Array]:
    """Values of one step's latent sites from those of its copies along plates."""
    found = {}
    for latent, name, axes in zip(
        assembly.latents, assembly.factor.latents, assembly.own_axes, strict=True
    ):
        places = [axis - 1 for axis in axes[1:]]  # without the axis of time
        array = jnp.moveaxis(x[latent.name], range(len(places)), places)
        found[name] = array.reshape(sites[name].shape[1:]).astype(sites[name].dtype)
    return found
