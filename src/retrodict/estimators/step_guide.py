"""The linear estimate of each step of the sampler, given the steps before it."""

from typing import NamedTuple

from jaxtyping import Array, Float

from retrodict.estimators import guide_inputs, linear_estimate
from retrodict.estimators.heads import Head
from retrodict.estimators.linear_estimate import (
    CoordinateView,
    GuideState,
    LinearEstimate,
    Position,
)
from retrodict.estimators.scalar_bijections import Coordinate


class StepView(NamedTuple):
    """The estimate of a step given those before it.

    Attributes:
        c: constants of its coordinates, with anchors.
        inputs: of the network; None without an estimate.
        logits: of the patterns of a few bits, to add to the parameters.
        coordinate: the view of a single coordinate.
    """

    c: Coordinate[Array]
    inputs: Float[Array, "inputs rows"] | None = None
    logits: Float[Array, "params rows"] | float = 0.0
    coordinate: CoordinateView | None = None


class StepGuide(NamedTuple):
    """A linear estimate that is conditioned step by step."""

    estimate: LinearEstimate
    innovation_variance: Float[Array, "coordinates channels rows"]

    @staticmethod
    def of(estimate: LinearEstimate) -> "StepGuide":
        """Compute what all steps share."""
        return StepGuide(estimate, estimate.innovation_variance)

    def view(
        self, state: GuideState, head: Head, c: Coordinate[Array], position: Position
    ) -> StepView:
        """The estimate of the step that starts at `position`."""
        if head.span > 1:
            bits = guide_inputs.condition_bits(*self, state, position, head.span)
            return StepView(c, bits.inputs, bits.logits)
        view = linear_estimate.condition(*self, state, position)
        c = guide_inputs.anchor(view.mean, view.scale, c)
        return StepView(c, guide_inputs.coordinate_inputs(view, c), coordinate=view)

    def update(
        self, state: GuideState, view: StepView, position: Position, value: Array
    ) -> GuideState:
        """The state once the step is drawn."""
        if view.coordinate is None:
            return linear_estimate.update_bits(self.estimate, state, position, value)
        return linear_estimate.update(self.estimate, state, view.coordinate, position, value)
