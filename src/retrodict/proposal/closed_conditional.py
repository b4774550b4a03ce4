"""Conditionals known in closed form, as proposals of their factors."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from retrodict.estimators.analytic.estimator import AnalyticEstimator
from retrodict.estimators.analytic.family import Family
from retrodict.estimators.conditional import MADE, MIN_DEFENSIVE_SHARE
from retrodict.estimators.coordinates import Latent
from retrodict.estimators.encoders import Input
from retrodict.estimators.estimator import Estimator
from retrodict.proposal.factor_model import FactorModel
from retrodict.proposal.model_knowledge import FamilyFacts, ModelKnowledge
from retrodict.proposal.scope import Scope


@dataclass(frozen=True)
class ClosedConditional(ModelKnowledge):
    """Computes the parameters of a factor's conditional from the model's densities.

    Attributes:
        facts: what simulation showed.
        model: the part of the model that the factor takes part in.
        family: that the conditional belongs to.
    """

    facts: FamilyFacts
    model: FactorModel
    family: Family
    sufficient: ClassVar[bool] = True

    @property
    def parents(self) -> frozenset[str]:  # noqa: D102
        return self.model.parents

    @property
    def working_bytes(self) -> int:  # noqa: D102
        entries = self.model.num_observations + len(self.facts.start)
        copies = int(np.prod(self.model.copies.plate_sizes))
        return 2 * 4 * copies * self.family.evaluations * entries

    def at(self, scope: Scope) -> PyTree:
        """The parameters of all copies."""
        start = jnp.asarray(np.array(self.facts.start), float)
        everywhere = jnp.broadcast_to(start, (*self.model.copies.plate_sizes, start.size))
        return self.family.parameters(self.model.target(scope), everywhere)

    def build(  # noqa: D102
        self,
        rng_key: PRNGKeyArray,
        estimator: MADE,
        latents: tuple[Latent, ...],
        inputs: tuple[Input, ...],
        number: int,
    ) -> Estimator:
        share = max(estimator.wide / number, MIN_DEFENSIVE_SHARE)
        return AnalyticEstimator.of(self.family, latents, share)

    @property
    def requirements(self) -> str:
        """The family's name."""
        return self.family.name

    def bind(self, estimator: Estimator) -> Estimator:  # noqa: D102
        assert isinstance(estimator, AnalyticEstimator)
        return replace(estimator, family=self.family)
