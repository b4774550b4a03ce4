"""What a model itself says of a factor's latents when they are drawn."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

from jaxtyping import PRNGKeyArray, PyTree

from retrodict.estimators.conditional import MADE, GuideSpec
from retrodict.estimators.coordinates import Latent
from retrodict.estimators.encoders import Input
from retrodict.estimators.estimator import Estimator
from retrodict.proposal.scope import Scope


class GuideFacts(NamedTuple):
    """What simulation from the prior shows of a linear guide; saved with the compiled model.

    Attributes:
        order: the coordinates in sampling order, within one kind of density by how much they move
            the observations.
        children: the sites that carry information on them.
        centre, variance: from simulation, of coordinates whose distribution has no moments; NaN
            elsewhere.
        slope: derivatives of the children's means by binary coordinates, by observation, if they
            are the same for all values; empty otherwise.
    """

    order: tuple[int, ...]
    children: tuple[str, ...]
    centre: tuple[float, ...]
    variance: tuple[float, ...]
    slope: tuple[float, ...] = ()

    def with_other_arguments(self) -> "GuideFacts":
        """Without what depends on the model's arguments."""
        return self._replace(slope=())


class FamilyFacts(NamedTuple):
    """What simulation from the prior shows of a conditional; saved with the compiled model.

    Attributes:
        name: of the family that it belongs to.
        start: a typical value of each coordinate, measured from its lower bound.
        constants: of the family itself, if it has any.
    """

    name: str
    start: tuple[float, ...]
    constants: tuple[float, ...] = ()

    def with_other_arguments(self) -> "FamilyFacts":
        """Without what depends on the model's arguments."""
        return self._replace(constants=())


Facts: TypeAlias = GuideFacts | FamilyFacts


@dataclass(frozen=True)
class ModelKnowledge:
    """What the model says of the latents; this class says nothing, and its subclasses more.

    Attributes:
        facts: what simulation showed, if anything.
        sufficient: whether the proposal needs no further context.
    """

    facts: Facts | None
    sufficient: ClassVar[bool] = False

    @property
    def guide_spec(self) -> GuideSpec | None:
        """The form of the linear estimate that a network is built for."""
        return None

    @property
    def requirements(self) -> Hashable:
        """What an estimator must have been built for, equal if it can be used again."""
        return self.guide_spec

    @property
    def parents(self) -> frozenset[str]:
        """The sites whose values it depends on."""
        return frozenset()

    @property
    def working_bytes(self) -> int:
        """Approximate memory for all copies of one draw."""
        return 0

    def at(self, scope: Scope) -> PyTree:
        """What the model says of all copies (of one step in time), axes of copies first."""
        return None

    def build(
        self,
        rng_key: PRNGKeyArray,
        estimator: MADE,
        latents: tuple[Latent, ...],
        inputs: tuple[Input, ...],
        number: int,
    ) -> Estimator:
        """An untrained estimator of the latents.

        Args:
            rng_key: for its initial weights.
            estimator: its size.
            latents: of one copy.
            inputs: of the context.
            number: how many times a draw uses it.
        """
        return estimator.build(rng_key, latents, inputs, self.guide_spec, number)

    def bind(self, estimator: Estimator) -> Estimator:
        """The estimator with the constants of this model's arguments."""
        return estimator


NO_KNOWLEDGE = ModelKnowledge(None)
