"""The protocol of families of densities that a closed-form conditional may belong to.

Where every density in which some latents take part can be evaluated when they are drawn, the
product of these densities is the latents' conditional up to a constant. In many models it belongs
to a family that can be sampled directly, and its parameters follow from its derivatives or moments:
there is nothing for a network to learn. Gelfand & Smith (1990) sample such conditionals in turn;
here each is sampled once, in the order of the inverse.

Arrays have the batch axis last (see `retrodict._xla.batch_last`); targets are functions of all
copies of a factor at once, with coordinates last.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from retrodict.estimators.scalar_bijections import Coordinate


class ConditionalMoments(NamedTuple):
    """Moments of the model's distributions at some value of the latents, by copy.

    Attributes:
        prior_mean, prior_variance: of the latents given their own parents.
        mean, variance: of each observation that depends on the latents.
        log_density: of each of these observations.
        observed: their values.
    """

    prior_mean: Float[Array, "*copies coordinates"]
    prior_variance: Float[Array, "*copies coordinates"]
    mean: Float[Array, "*copies observations"]
    variance: Float[Array, "*copies observations"]
    log_density: Float[Array, "*copies observations"]
    observed: Float[Array, "*copies observations"]


class ConditionalTarget(NamedTuple):
    """A conditional γ(x), known up to a constant; x is measured from the support's lower bound.

    Attributes:
        log_density: log γ of every copy.
        moments: of the distributions that γ is the product of.
    """

    log_density: Callable[[Float[Array, "*copies coordinates"]], Float[Array, "*copies"]]
    moments: Callable[[Float[Array, "*copies coordinates"]], ConditionalMoments]

    @property
    def score(self) -> Callable[[Array], Array]:
        """∇ log γ of every copy in its own coordinates."""
        gradient: Callable[[Array], Array] = jax.grad(lambda x: jnp.sum(self.log_density(x)))
        return gradient


class Randomness(NamedTuple):
    """The random numbers of a draw: uniform ones, and standard normal ones if `defensive`."""

    uniform: Float[Array, "numbers rows"]
    normal: Float[Array, "numbers rows"]


class Family(Protocol):
    """A family of densities with parameters that follow from a target."""

    @property
    def name(self) -> str:
        """The name under which artefacts store it."""

    @property
    def evaluations(self) -> int:
        """The approximate cost of the parameters, in evaluations of the target."""

    @property
    def defensive(self) -> bool:
        """Whether draws are mixed with a heavy-tailed component, as the family may be inexact."""

    def num_uniforms(self, coordinates: int) -> int:
        """The number of uniform numbers that a draw needs; as many normal ones if `defensive`."""

    def parameters(
        self, target: ConditionalTarget, start: Float[Array, "*copies coordinates"]
    ) -> PyTree:
        """The parameters of every copy if the target belongs to the family.

        Args:
            target: the conditional.
            start: a typical value, at which derivatives may be taken.
        """

    def sample(
        self, parameters: PyTree, randomness: Randomness, c: Coordinate[Array]
    ) -> tuple[Float[Array, "coordinates rows"], Float[Array, " rows"]]:
        """A draw for each row, and its log density."""

    def log_prob(
        self, parameters: PyTree, row: Float[Array, "coordinates rows"], c: Coordinate[Array]
    ) -> Float[Array, " rows"]:
        """The log density of values."""
