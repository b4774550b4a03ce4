"""The proposal q(x | y) = ∏ q(x_i | PaH(x_i)) as a product of factors.

Factors are drawn in the order of the inverse (Paige & Wood 2016, sec. 3.1): copies along plates at
once, steps of a scan one after the other. All functions are of one particle; `vmap` over keys or
noise gives a population, and what depends on the data alone is then computed once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from retrodict._xla.batch_last import sum_all
from retrodict._xla.scan import scan
from retrodict.estimators.conditional import MADE
from retrodict.estimators.estimator import Estimator
from retrodict.graph.element_covariates import CovariateKey, element_covariates
from retrodict.graph.evaluation import CarryKey, Evaluation
from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import PriorSampler, prior_sampler
from retrodict.inverse.factors import Factor
from retrodict.inverse.inverse import Inverse
from retrodict.inverse.plate_tree import needing_marginals
from retrodict.proposal.choose_knowledge import find_knowledge, restore_knowledge
from retrodict.proposal.contexts import ContextTree, context_tree, follows_time
from retrodict.proposal.copies import Copies
from retrodict.proposal.factor_proposals import (
    EstimatedStructure,
    FactorProposal,
    FactorStructure,
    Networks,
    PriorProposal,
    Summaries,
)
from retrodict.proposal.model_knowledge import Facts
from retrodict.proposal.scope import Scope
from retrodict.types import Values

StepSummaries = Mapping[tuple[str, ...], Summaries]
StepNoise = Mapping[tuple[str, ...], PyTree]


@dataclass(frozen=True)
class Stage:
    """Factors drawn together: one outside of time, or all those of a scan's step."""

    factors: tuple[Factor, ...]
    scan: int | None = None


class StepDraw(NamedTuple):
    """One step of a scan, drawn.

    Attributes:
        carry: for the next step.
        latents: of the step.
        log_q: by factor.
        evaluation: the model's densities of the step.
    """

    carry: Any
    latents: dict[str, Array]
    log_q: dict[tuple[str, ...], Float[Array, ""]]
    evaluation: Evaluation


@dataclass(frozen=True)
class Proposal:
    """An inverse with a proposal for each of its factors.

    Attributes:
        inverse: the inverse of the model's graph, in which Python loops are scans and plates.
        priors: factors drawn from the model's own conditional, by their latents.
        estimated: factors that have an estimator, by their latents.
        marginals: estimators without context, for factors whose prior is counted later than they
            are drawn, where the inverse allows divide and conquer.
        covariates: constants that distinguish elements.
        stages: the factors in sampling order.
        sample_prior: joint draws of the model.
    """

    inverse: Inverse
    priors: Mapping[tuple[str, ...], PriorProposal]
    estimated: Mapping[tuple[str, ...], EstimatedStructure]
    marginals: Mapping[tuple[str, ...], EstimatedStructure]
    covariates: Mapping[CovariateKey, Array]
    stages: tuple[Stage, ...]
    sample_prior: PriorSampler = field(compare=False)

    @staticmethod
    def of(
        inverse: Inverse,
        facts: Mapping[str, Facts] | None = None,
        *,
        analytic: bool = True,
    ) -> "Proposal":
        """Work out contexts, guides and stages.

        Args:
            inverse: the inverse of the model's graph.
            facts: by network, those of a proposal of the same model; None to determine them.
            analytic: whether closed-form conditionals replace networks.
        """
        inverse = inverse.lifted
        graph = inverse.graph
        covariates, sample_prior = element_covariates(graph), prior_sampler(graph)

        def structure(factor: Factor) -> EstimatedStructure:
            copies, context = Copies.of(graph, factor), context_tree(graph, factor, covariates)
            if facts is None:
                knowledge = find_knowledge(graph, copies, context, sample_prior, analytic)
            else:
                network_facts = facts.get(str(factor.network))
                knowledge = restore_knowledge(graph, copies, network_facts, sample_prior)
            context = ContextTree(factor) if knowledge.sufficient else context
            return EstimatedStructure.of(graph, copies, context, knowledge)

        priors = {f.latents: PriorProposal(graph, f) for f in inverse.factors if f.from_prior}
        estimated = {f.latents: structure(f) for f in inverse.factors if not f.from_prior}
        marginals = {f.latents: estimated[f.latents].marginal() for f in needing_marginals(inverse)}
        stages = _stages(inverse)
        return Proposal(inverse, priors, estimated, marginals, covariates, stages, sample_prior)

    @staticmethod
    def bootstrap(inverse: Inverse) -> "Proposal":
        """Without networks: every latent from the model's own conditional (Gordon et al. 1993).

        The inverse must draw in the program's order, as "filter" does.
        """
        factors = tuple(replace(factor, from_prior=True) for factor in inverse.lifted_factors)
        return Proposal.of(replace(inverse, lifted_factors=factors))

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.inverse.graph

    @cached_property
    def structures(self) -> Mapping[tuple[str, ...], FactorStructure]:
        """The structures of all factors, by their latents."""
        return {**self.priors, **self.estimated}

    @property
    def facts(self) -> dict[str, Facts]:
        """What simulation showed of guides and families, by network."""
        pairs = ((s.network, s.knowledge.facts) for s in self.estimated.values())
        return {network: facts for network, facts in pairs if facts is not None}

    def networks(self) -> dict[str, list[EstimatedStructure]]:
        """The structures that share each network."""
        shared: dict[str, list[EstimatedStructure]] = {}
        for structure in (*self.estimated.values(), *self.marginals.values()):
            shared.setdefault(structure.network, []).append(structure)
        return shared

    def build(
        self, estimator: MADE, rng_key: PRNGKeyArray, structures: Sequence[EstimatedStructure]
    ) -> Estimator:
        """An untrained estimator for the structures that share it."""
        number = sum(structure.copies.number for structure in structures)
        return structures[0].build(rng_key, estimator, number)

    def bind(self, networks: Networks, factor: Factor) -> FactorProposal:
        """The proposal of one factor with these weights."""
        return self.structures[factor.latents].bind(networks)

    def parents(self, stage: Stage) -> frozenset[str]:
        """The sites from whose values a stage is drawn; in time, all that are outside of it."""
        if stage.scan is not None:
            return frozenset(self.graph.sites)
        return self.structures[stage.factors[0].latents].parents

    def working_bytes(self, networks: Networks, stage: Stage) -> int:
        """Approximate memory to draw one particle of a stage, or of its step."""
        structures = (self.structures[factor.latents] for factor in stage.factors)
        return max(structure.working_bytes(networks) for structure in structures)

    def runs_forward(self, stage: Stage) -> bool:
        """Whether a stage is a series drawn in the direction of time."""
        return follows_time(self.graph, stage.factors[0]) is not None

    def scope(self, values: Values, carries: Mapping[CarryKey, Array] | None = None) -> Scope:
        """The scope of values outside of time, or of whole series."""
        return Scope(values, self.covariates, carries or {})

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
        return {name: values[name] for name in self.graph.latent}, log_q

    def draw_stage(
        self, networks: Networks, rng_key: PRNGKeyArray, stage: Stage, values: Values
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        """The latents of one stage given what has been drawn before, and their log q."""
        if stage.scan is None:
            (factor,) = stage.factors
            noise = self.noise(networks, rng_key, factor)
            drawn, log_q = self.draw_copies(networks, noise, factor, values)
            return drawn, sum_all(log_q)
        if self.runs_forward(stage):
            return self._draw_forward(networks, rng_key, stage, values)
        return self._draw_backward(networks, rng_key, stage, values)

    def noise(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        factor: Factor,
        shape: tuple[int, ...] = (),
    ) -> PyTree:
        """The randomness of all copies of a factor, or of those of one step."""
        return self.bind(networks, factor).noise(rng_key, shape)

    def draw_copies(
        self, networks: Networks, noise: PyTree, factor: Factor, values: Values
    ) -> tuple[dict[str, Array], Float[Array, "*plates"]]:
        """The latents of one factor outside of time, and log q of every copy."""
        proposal = self.bind(networks, factor)
        return proposal.sample(proposal.prepare(self.scope(values)), noise)

    def log_marginal(
        self, networks: Networks, factor: Factor, values: Values
    ) -> Float[Array, "*plates"]:
        """log m of the latents of every copy, by the estimator without context."""
        marginal = self.marginals[factor.latents].bind(networks)
        return marginal.log_prob(marginal.prepare(self.scope(values)), values)

    def step_noise(
        self, networks: Networks, rng_key: PRNGKeyArray, stage: Stage, shape: tuple[int, ...] = ()
    ) -> dict[tuple[str, ...], PyTree]:
        """The randomness of every factor of a step, with leading axes of the given shape."""
        return {
            factor.latents: self.noise(networks, jax.random.fold_in(rng_key, n), factor, shape)
            for n, factor in enumerate(stage.factors)
        }

    def summaries(
        self, networks: Networks, stage: Stage, values: Values
    ) -> dict[tuple[str, ...], Summaries]:
        """For each factor of a scan, its series as seen from every step, time first."""
        scope = self.scope(values)
        return {f.latents: self.bind(networks, f).summarise(scope) for f in stage.factors}

    def split(self, scan: int, values: Values) -> tuple[dict[str, Array], dict[str, Array]]:
        """Values of the sites outside a scan, and of those inside."""
        inside = set(self.graph.program.scan_sites[scan])
        outer = {name: v for name, v in values.items() if name not in inside}
        return outer, {name: jnp.asarray(v) for name, v in values.items() if name in inside}

    def draw_step(
        self,
        networks: Networks,
        noise: StepNoise,
        stage: Stage,
        outer: Values,
        observed: Values,
        time: Array,
        carry: Any,
        summaries: StepSummaries,
    ) -> StepDraw:
        """One step of a scan given the carry, at a cost that does not depend on its length.

        Args:
            networks: by name.
            noise: of this step, from `step_noise`.
            stage: the factors of the step.
            outer: values of the sites outside of the scan.
            observed: this step's observed values.
            time: which step, for the constants of the model.
            carry: from the step before.
            summaries: of the rest of the series, as seen from this step.
        """
        assert stage.scan is not None
        sites = self.graph.sites
        covariates = {
            key: array[time][None] if sites[key.site].time else array
            for key, array in self.covariates.items()
        }
        scope = Scope.of_step(outer, observed, covariates, stage.scan, time, carry)
        latents: dict[str, Array] = {}
        log_q = {}
        for factor in stage.factors:
            proposal = self.bind(networks, factor)
            prepared = proposal.prepare(scope, summaries.get(factor.latents))
            drawn, factor_log_q = proposal.sample(prepared, noise[factor.latents])
            log_q[factor.latents] = sum_all(factor_log_q)
            scope = scope.with_values(drawn)
            latents |= drawn
        carry, evaluation = self.graph.program.step(
            None, stage.scan, outer, time, carry, {**observed, **latents}
        )
        return StepDraw(carry, latents, log_q, evaluation)

    def _draw_forward(
        self, networks: Networks, rng_key: PRNGKeyArray, stage: Stage, values: Values
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        assert stage.scan is not None
        length = self.graph.scan_lengths[stage.scan]
        summaries = self.summaries(networks, stage, values)
        carry = self.graph.program.initial_carry(stage.scan, values)
        outer, series = self.split(stage.scan, values)

        def step(carry: Any, inputs: Any) -> tuple[Any, Any]:
            time, key, observed, suffix = inputs
            noise = self.step_noise(networks, key, stage)
            draw = self.draw_step(networks, noise, stage, outer, observed, time, carry, suffix)
            return draw.carry, (draw.latents, sum(draw.log_q.values(), jnp.zeros(())))

        times, keys = jnp.arange(length), jax.random.split(rng_key, length)
        backward = self.graph.reversed_scans[stage.scan]
        entries = (times, keys, series, summaries)
        _, (drawn, log_q) = scan(step, carry, entries, reverse=backward)
        return drawn, log_q.sum()

    def _draw_backward(
        self, networks: Networks, rng_key: PRNGKeyArray, stage: Stage, values: Values
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        """Against the direction of time: a step sees those after it, which are kept whole."""
        assert stage.scan is not None
        sites, length = self.graph.sites, self.graph.scan_lengths[stage.scan]
        names = [name for factor in stage.factors for name in factor.latents]
        zeros = {n: jnp.zeros(sites[n].shape, sites[n].dtype) for n in names}

        def step(drawn: dict[str, Array], inputs: Any) -> tuple[dict[str, Array], Array]:
            time, key = inputs
            log_q = jnp.zeros(())
            for number, factor in enumerate(stage.factors):
                proposal = self.bind(networks, factor)
                scope = self.scope({**values, **drawn}).at_step(time)
                noise = proposal.noise(jax.random.fold_in(key, number))
                now, factor_log_q = proposal.sample(proposal.prepare(scope), noise)
                drawn = drawn | {n: drawn[n].at[time].set(v) for n, v in now.items()}
                log_q = log_q + factor_log_q.sum()
            return drawn, log_q

        forward = self.graph.reversed_scans[stage.scan]
        times, keys = jnp.arange(length), jax.random.split(rng_key, length)
        drawn, log_q = scan(step, zeros, (times, keys), reverse=not forward)
        return drawn, log_q.sum()

    def log_prob(self, networks: Networks, values: Values) -> Float[Array, ""]:
        """log q of the latents among `values`, which holds the data as well."""
        evaluation = self.graph.program.run(None, values)
        scope = self.scope(values, evaluation.carries)
        parts = (self.log_prob_of(networks, f, scope, values) for f in self.inverse.factors)
        return sum((part.sum() for part in parts), jnp.zeros(()))

    def log_prob_of(
        self, networks: Networks, factor: Factor, scope: Scope, latents: Values
    ) -> Float[Array, "*copies"]:
        """log q of every copy of a factor, in time as well, at some values of its latents."""
        x = {name: jnp.asarray(latents[name]) for name in factor.latents}

        def step(proposal: FactorProposal, prepared: PyTree, x: Values) -> Array:
            return proposal.log_prob(prepared, x)

        log_q: Array = self.at_all_steps(networks, factor, scope, step, x)
        return log_q

    def at_all_steps(
        self,
        networks: Networks,
        factor: Factor,
        scope: Scope,
        fn: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """A function of a factor's prepared proposal, at every step given the whole series.

        Args:
            networks: by name.
            factor: which.
            scope: where arrays hold the whole series.
            fn: of the proposal, what it has prepared, and the entries of the arguments.
            arguments: trees of arrays, with an axis of time first if the factor lies in time.
        """
        proposal = self.bind(networks, factor)
        if not factor.time:
            return fn(proposal, proposal.prepare(scope, differentiable=True), *arguments)

        def step(time: Array, summaries: Summaries, arguments: Any) -> Any:
            prepared = proposal.prepare(scope.at_step(time), summaries, differentiable=True)
            return fn(proposal, prepared, *arguments)

        length = self.graph.sites[factor.latents[0]].shape[0]
        return jax.vmap(step)(jnp.arange(length), proposal.summarise(scope), arguments)


def _stages(inverse: Inverse) -> tuple[Stage, ...]:
    """The factors in sampling order, those of one scan together."""
    stages: list[Stage] = []
    for factor in inverse.factors:
        number = inverse.graph.sites[factor.latents[0]].scan if factor.time else None
        if number is not None and stages and stages[-1].scan == number:
            stages[-1] = Stage((*stages[-1].factors, factor), number)
        else:
            stages.append(Stage((factor,), number))
    return tuple(stages)
