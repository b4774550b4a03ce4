"""Segments of a factor's coordinates that share a head."""

from functools import cache
from itertools import groupby
from typing import NamedTuple

from jaxtyping import Array

from retrodict.estimators.bit_patterns import block_sizes
from retrodict.estimators.coordinates import Block, Latent, blocks
from retrodict.estimators.discrete_heads import Bernoulli, Bits, Categorical
from retrodict.estimators.heads import Head
from retrodict.estimators.mixture_heads import Count, Mixture
from retrodict.estimators.scalar_bijections import Coordinate


class Segment(NamedTuple):
    """Consecutive coordinates with the same head, drawn step by step.

    Attributes:
        start, stop: its range of coordinates.
        head: that draws `head.span` coordinates a step.
        first_step, first_feature, first_param: its position among all steps, features of drawn
            coordinates and parameters.
    """

    start: int
    stop: int
    head: Head
    first_step: int
    first_feature: int
    first_param: int

    @property
    def coordinates(self) -> slice:
        """Its range of coordinates."""
        return slice(self.start, self.stop)

    @property
    def num_steps(self) -> int:
        """The number of steps."""
        return (self.stop - self.start) // self.head.span

    @property
    def steps(self) -> slice:
        """Its range of steps."""
        return slice(self.first_step, self.first_step + self.num_steps)

    def part(self, first: int, last: int) -> "Segment":
        """Its steps from `first` to before `last`."""
        return self._replace(
            start=self.start + first * self.head.span,
            stop=self.start + last * self.head.span,
            first_step=self.first_step + first,
            first_feature=self.first_feature + first * self.head.num_features,
            first_param=self.first_param + first * self.head.num_params,
        )

    def by_step(self, values: Array) -> Array:
        """Its part of an array over all coordinates, with a first axis of steps."""
        if self.head.span == 1:
            return values[self.coordinates]
        return values[self.coordinates].reshape(self.num_steps, self.head.span, *values.shape[1:])

    def constants(self, c: Coordinate[Array]) -> Coordinate[Array]:
        """The constants of its coordinates, with a first axis of steps."""
        return Coordinate(*map(self.by_step, c))


@cache
def make_segments(
    latents: tuple[Latent, ...],
    components: int,
    defensive_share: float,
    floor: float,
    bits_per_step: int = 1,
) -> tuple[Segment, ...]:
    """Group consecutive coordinates with the same kind of density.

    Args:
        latents: of the factor.
        components: of each mixture.
        defensive_share: probability that a draw uses any defensive component. It is divided among
            the coordinates, so that it does not grow with their number.
        floor: the same for the uniform distributions of discrete coordinates.
        bits_per_step: the number of bits that are drawn at once.
    """
    number = sum(block.size for block in blocks(latents))
    segments: list[Segment] = []
    start = step = feature = param = 0
    for _, group in groupby(blocks(latents), lambda block: block.kind):
        members = list(group)
        size = sum(block.size for block in members)
        single = _head(members, components, defensive_share / number, floor / number)
        heads = [(single, size)]
        if bits_per_step > 1 and members[0].kind == "bernoulli":
            heads = [
                (Bits(span, floor * span / number) if span > 1 else single, sum(spans))
                for span, spans in groupby(block_sizes(size, bits_per_step))
            ]
        for head, coordinates in heads:
            segment = Segment(start, start + coordinates, head, step, feature, param)
            segments.append(segment)
            start, step = segment.stop, segment.steps.stop
            feature += segment.num_steps * head.num_features
            param += segment.num_steps * head.num_params
    return tuple(segments)


def _head(members: list[Block], components: int, defensive_share: float, floor: float) -> Head:
    kind = members[0].kind
    if kind == "mixture":
        codes = sorted({int(code) for block in members for code in block.table.bijection})
        return Mixture(components, defensive_share, tuple(codes))
    if kind == "bernoulli":
        return Bernoulli(floor)
    if kind == "categorical":
        return Categorical(1 + max(int(block.table.upper.max()) for block in members), floor)
    return Count(components, defensive_share)
