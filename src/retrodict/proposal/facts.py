"""What was found of a factor's guide or family on draws from the prior; kept with the artefact."""

from typing import NamedTuple


class GuideFacts(NamedTuple):
    """What simulation tells of a linear guide.

    Attributes:
        order: the coordinates in sampling order, within one kind of density by how much they move
            the observations.
        children: the sites that carry information on them.
        centre, variance: from simulation, of coordinates whose distribution has no moments; NaN
            elsewhere.
        slope: how the children's means move with binary coordinates, by observation, if that is
            the same for all values; empty otherwise.
    """

    order: tuple[int, ...]
    children: tuple[str, ...]
    centre: tuple[float, ...]
    variance: tuple[float, ...]
    slope: tuple[float, ...] = ()


class RecognisedFamily(NamedTuple):
    """What is known of a recognised conditional.

    Attributes:
        name: of the family.
        start: a typical value of each coordinate, measured from its lower bound.
        constants: of the family itself, if it has any.
    """

    name: str
    start: tuple[float, ...]
    constants: tuple[float, ...] = ()


class FactorFacts(NamedTuple):
    """What is known of a factor: a guide, a family, or neither."""

    guide: GuideFacts | None = None
    family: RecognisedFamily | None = None

    def with_other_arguments(self) -> "FactorFacts":
        """Without what depends on the model's arguments."""
        guide = None if self.guide is None else self.guide._replace(slope=())
        family = None if self.family is None else self.family._replace(constants=())
        return FactorFacts(guide, family)
