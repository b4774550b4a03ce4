"""The proposal of one factor: its prior, a learned network, or a conditional in closed form.

`FactorProposal` is the one protocol that everything above knows. A factor on which no observation
depends is drawn from the model's own conditional (`PriorProposal`). Every other factor has an
estimator for each of its copies (`EstimatedProposal`): a network that sees the factor's context, a
network guided by the model's linear estimate, or the analytic conditional.

A proposal has a structure, which is fixed when the model is compiled, and the estimator's weights,
which are arguments of compiled programs: `bind` joins the two.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from retrodict.estimators.conditional import MADE, ConditionalMADE
from retrodict.estimators.encoders import Conditions, Elements
from retrodict.estimators.estimator import Estimator
from retrodict.graph.graph import Graph
from retrodict.inverse.factors import Factor, network_name
from retrodict.proposal.context_views import Branch, InputName, read
from retrodict.proposal.contexts import ContextTree, follows_time
from retrodict.proposal.copies import Copies, over_copies
from retrodict.proposal.model_knowledge import NO_KNOWLEDGE, ModelKnowledge
from retrodict.proposal.scope import Scope, model_at
from retrodict.types import Values

Networks: TypeAlias = Mapping[str, Estimator]
Summaries: TypeAlias = Mapping[InputName, Array]


class FactorProposal(Protocol):
    """q(x_f | PaH(x_f)) of one factor, all of its copies along plates at once.

    In time it is the proposal of one step. All methods are of one particle; `jax.vmap` gives a
    population.
    """

    def summarise(self, scope: Scope) -> Summaries:
        """Summaries of the data's series as seen from every step, time first: once per data set."""

    def prepare(
        self, scope: Scope, summaries: Summaries | None = None, *, differentiable: bool = False
    ) -> PyTree:
        """Everything but the latents themselves: encodings, estimates, parameters.

        Args:
            scope: the values that it depends on, of one step in time.
            summaries: this step's, from `summarise`; without them series are encoded here.
            differentiable: whether gradients will be taken.
        """

    def noise(self, rng_key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> PyTree:
        """The randomness of draws, with leading axes of the given shape.

        That of a population is generated in one call, which costs less than a key for each
        particle.
        """

    def sample(self, prepared: PyTree, noise: PyTree) -> tuple[dict[str, Array], Array]:
        """The factor's sites (of one step in time), and log q by copy along plates."""

    def log_prob(self, prepared: PyTree, latents: Values) -> Array:
        """log q of the factor's sites (of one step in time), by copy along plates."""


@dataclass(frozen=True)
class PriorProposal:
    """Draws from the model's own conditional; it has no weights, and is its own structure."""

    graph: Graph
    factor: Factor

    @property
    def parents(self) -> frozenset[str]:
        """The sites whose values it is drawn from."""
        return frozenset(p for name in self.factor.latents for p in self.graph.parents(name))

    def working_bytes(self, networks: Networks) -> int:
        """Approximate memory for networks to draw one particle, of one step in time."""
        return 0

    def bind(self, networks: Networks) -> "PriorProposal":
        """The proposal with these weights."""
        return self

    def summarise(self, scope: Scope) -> Summaries:  # noqa: D102
        return {}

    def prepare(  # noqa: D102
        self, scope: Scope, summaries: Summaries | None = None, *, differentiable: bool = False
    ) -> Scope:
        return scope

    def noise(self, rng_key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> PRNGKeyArray:  # noqa: D102
        return jax.random.split(rng_key, shape) if shape else rng_key

    def sample(  # noqa: D102
        self, prepared: Scope, noise: PRNGKeyArray
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        names = self.factor.latents
        keys = {name: jax.random.fold_in(noise, number) for number, name in enumerate(names)}
        return self._run(prepared, {}, keys)

    def log_prob(self, prepared: Scope, latents: Values) -> Float[Array, ""]:  # noqa: D102
        return self._run(prepared, latents, {})[1]

    def _run(
        self, scope: Scope, latents: Values, keys: Mapping[str, PRNGKeyArray]
    ) -> tuple[dict[str, Array], Float[Array, ""]]:
        names = self.factor.latents
        scan = self.graph.sites[names[0]].scan if self.factor.time else None
        run = model_at(self.graph, names, scan, scope)
        result = run(latents, keys=keys, only=names)
        log_q = sum((result.log_density[name].sum() for name in names), jnp.zeros(()))
        return {name: result.values[name] for name in names}, log_q


class FactorRow(NamedTuple):
    """What a network is trained on: the latents of one copy, and what they are conditioned on."""

    latents: dict[str, Array]
    conditions: Conditions


@dataclass(frozen=True)
class EstimatedStructure:
    """The fixed part of a proposal that has an estimator for each copy.

    Attributes:
        copies: of the factor.
        network: the name of the estimator, equal for factors that share weights.
        context: how the estimator's inputs are read.
        knowledge: what the model itself says of the latents.
        forward: whether the factor is drawn in the direction of time.
        reverse: whether time runs from the last element of a series to the first.
    """

    copies: Copies
    network: str
    context: ContextTree
    knowledge: ModelKnowledge
    forward: bool = False
    reverse: bool = False

    @staticmethod
    def of(
        graph: Graph, copies: Copies, context: ContextTree, knowledge: ModelKnowledge
    ) -> "EstimatedStructure":
        """The structure of one of the graph's factors."""
        factor = copies.factor
        scan = graph.sites[factor.latents[0]].scan
        forward = follows_time(graph, factor) is not None
        reverse = scan is not None and graph.reversed_scans[scan]
        return EstimatedStructure(copies, str(factor.network), context, knowledge, forward, reverse)

    def marginal(self) -> "EstimatedStructure":
        """The estimator of the latents without any context."""
        factor = self.factor
        network = network_name(factor.latents, None)
        return EstimatedStructure(self.copies, network, ContextTree(factor), NO_KNOWLEDGE)

    @property
    def factor(self) -> Factor:
        """The factor."""
        return self.copies.factor

    @property
    def parents(self) -> frozenset[str]:
        """The sites whose values it is drawn from."""
        return self.context.sites | self.knowledge.parents

    def working_bytes(self, networks: Networks) -> int:
        """Approximate memory needed to draw one particle, of one step in time."""
        # Every unit of the network, twice for every copy; each unit has a bias.
        leaves = jax.tree.leaves(networks[self.network])
        units = sum(int(leaf.size) for leaf in leaves if jnp.ndim(leaf) == 1)
        network = 2 * 4 * units * int(np.prod(self.copies.plate_sizes))
        return max(network, self.knowledge.working_bytes)

    def bind(self, networks: Networks) -> "EstimatedProposal":
        """The proposal with these weights."""
        return EstimatedProposal(self, self.knowledge.bind(networks[self.network]))

    @property
    def requirements(self) -> Hashable:
        """What an estimator must have been built for, equal if it can be used again."""
        return self.copies.latents, self.context.inputs, self.knowledge.requirements

    def build(self, rng_key: PRNGKeyArray, estimator: MADE, number: int) -> Estimator:
        """An untrained estimator that a draw uses `number` times."""
        latents, inputs = self.copies.latents, self.context.inputs
        return self.knowledge.build(rng_key, estimator, latents, inputs, number)

    def row(self, scope: Scope, index: Sequence[Array]) -> FactorRow:
        """The latents of one copy in a joint draw, and what they are conditioned on.

        Args:
            scope: of the joint draw, where arrays hold the whole series.
            index: along time, if any, and plates.
        """
        latents = self.copies.one(scope.values, index)
        plates = tuple(index)
        if self.factor.time:
            scope, plates = scope.at_step(index[0]), plates[1:]
        from_model = jax.tree.map(lambda leaf: leaf[plates], self.knowledge.at(scope))
        return FactorRow(latents, Conditions(self.context.read(scope, index), from_model))


@dataclass(frozen=True)
class EstimatedProposal:
    """Draws every copy from its estimator."""

    structure: EstimatedStructure
    estimator: Estimator

    def summarise(self, scope: Scope) -> Summaries:  # noqa: D102
        structure = self.structure
        if not structure.forward or not structure.context.series:
            return {}
        summaries = {
            branch.group.name: self._suffixes(branch, scope) for branch in structure.context.series
        }
        # Axes of plates come first here, then time.
        return {name: jnp.moveaxis(array, -2, 0) for name, array in summaries.items()}

    def _suffixes(self, branch: Branch, scope: Scope) -> Float[Array, "*plates time features"]:
        """Summaries of steps t, t+1, … in the direction of time, for every t."""
        network, name = self.estimator, branch.group.name
        assert isinstance(network, ConditionalMADE)

        def series(time: Array, plates: tuple[Array, ...]) -> Elements:
            elements = read((branch,), scope, (time, *plates))[name]
            assert isinstance(elements, Elements)
            return elements

        def one(plates: tuple[Array, ...]) -> Array:
            if not self.structure.reverse:
                whole = series(jnp.array(0), plates)._replace(mask=None)
                return network.suffixes(name, whole)
            times = jnp.arange(self.structure.copies.sizes[0])
            return jax.vmap(lambda time: network.summary(name, series(time, plates)))(times)

        summaries: Array = over_copies(one, self.structure.copies.plate_sizes)
        return summaries

    def prepare(  # noqa: D102
        self, scope: Scope, summaries: Summaries | None = None, *, differentiable: bool = False
    ) -> PyTree:
        structure = self.structure
        leading = () if scope.position is None else (scope.position,)

        def encoded(index: tuple[Array, ...], summaries: Summaries, from_model: PyTree) -> PyTree:
            inputs = structure.context.read(scope, (*leading, *index), summaries)
            conditions = Conditions(inputs, from_model)
            return self.estimator.encode(conditions, differentiable=differentiable)

        sizes = structure.copies.plate_sizes
        return over_copies(encoded, sizes, summaries or {}, structure.knowledge.at(scope))

    def noise(self, rng_key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> PyTree:  # noqa: D102
        return self.estimator.noise(rng_key, (*shape, *self.structure.copies.plate_sizes))

    def sample(  # noqa: D102
        self, prepared: PyTree, noise: PyTree
    ) -> tuple[dict[str, Array], Float[Array, "*plates"]]:
        copies = self.structure.copies

        def one(_: Any, encoding: PyTree, noise: PyTree) -> Any:
            return self.estimator.sample(encoding, noise)

        x, log_q = over_copies(one, copies.plate_sizes, prepared, noise)
        return copies.to_step(x), log_q

    def log_prob(self, prepared: PyTree, latents: Values) -> Float[Array, "*plates"]:  # noqa: D102
        copies = self.structure.copies

        def one(index: tuple[Array, ...], encoding: PyTree) -> Array:
            return self.estimator.log_prob(encoding, copies.one_of_step(latents, index))

        log_q: Array = over_copies(one, copies.plate_sizes, prepared)
        return log_q


FactorStructure: TypeAlias = PriorProposal | EstimatedStructure
