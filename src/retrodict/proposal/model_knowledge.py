"""The protocol of what a model itself says of a factor's latents when they are drawn."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import PRNGKeyArray, PyTree

from retrodict.estimators.conditional import MADE
from retrodict.estimators.encoders import Input
from retrodict.estimators.estimator import Estimator
from retrodict.proposal.copies import Copies
from retrodict.proposal.facts import FactorFacts
from retrodict.proposal.scope import Scope


class ModelKnowledge(Protocol):
    """What the model says of the latents: nothing, a linear estimate, or their conditional."""

    @property
    def sufficient(self) -> bool:
        """Whether it determines the proposal, so that no further context is needed."""

    @property
    def factor_facts(self) -> FactorFacts:
        """What is kept with the artefact."""

    @property
    def requirements(self) -> Hashable:
        """What an estimator must have been built for, equal if it can be used again."""

    @property
    def parents(self) -> frozenset[str]:
        """The sites whose values it depends on."""

    @property
    def working_bytes(self) -> int:
        """Approximate memory needed for all copies of one draw."""

    def at(self, scope: Scope) -> PyTree:
        """What is known of all copies (of one step in time), axes of copies first."""

    def build(
        self,
        estimator: MADE,
        rng_key: PRNGKeyArray,
        copies: Copies,
        inputs: tuple[Input, ...],
        number: int,
    ) -> Estimator:
        """An untrained estimator of the latents.

        Args:
            estimator: its size.
            rng_key: for its initial weights.
            copies: of the factor.
            inputs: of the context.
            number: how many times a draw uses it.
        """

    def bind(self, estimator: Estimator) -> Estimator:
        """The estimator with the constants of this model's arguments."""


@dataclass(frozen=True)
class NoKnowledge:
    """The model says nothing: the network has its context alone."""

    sufficient: bool = False
    factor_facts: FactorFacts = FactorFacts()  # noqa: RUF009 (immutable)
    requirements: Hashable = None
    parents: frozenset[str] = frozenset()
    working_bytes: int = 0

    def at(self, scope: Scope) -> None:
        """Nothing."""

    def build(  # noqa: D102
        self,
        estimator: MADE,
        rng_key: PRNGKeyArray,
        copies: Copies,
        inputs: tuple[Input, ...],
        number: int,
    ) -> Estimator:
        return estimator.build(rng_key, copies.latents, inputs, None, number)

    def bind(self, estimator: Estimator) -> Estimator:  # noqa: D102
        return estimator
