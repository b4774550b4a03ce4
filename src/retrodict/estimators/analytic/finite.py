"""Conditionals on finitely many states, and inverse-transform sampling of discrete choices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.batch_last import along_first, sum_features
from retrodict.estimators.analytic.family import ConditionalTarget, Randomness
from retrodict.estimators.scalar_bijections import Coordinate


@dataclass(frozen=True)
class Finite:
    """Any density on finitely many states: all of them are evaluated.

    Attributes:
        sizes: the number of values of each coordinate.
    """

    sizes: tuple[int, ...]
    name: str = "finite"
    defensive: bool = False

    @property
    def evaluations(self) -> int:  # noqa: D102
        return len(self.states)

    @cached_property
    def states(self) -> Float[np.ndarray, "states coordinates"]:
        """All states, the last coordinate changing fastest."""
        table: np.ndarray = np.array(list(product(*map(range, self.sizes))), float)
        return table

    def num_uniforms(self, coordinates: int) -> int:  # noqa: D102
        return 1

    def parameters(self, target: ConditionalTarget, start: Array) -> Float[Array, "*copies states"]:
        """Log densities of all states, up to a constant."""

        def at(state: Array) -> Array:
            return target.log_density(jnp.broadcast_to(state, start.shape))

        logits = jnp.moveaxis(jax.vmap(at)(jnp.asarray(self.states, start.dtype)), 0, -1)
        logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
        possible = jnp.any(logits > -jnp.inf, -1, keepdims=True)
        return jnp.where(possible, logits, 0.0)

    def sample(  # noqa: D102
        self, parameters: Array, randomness: Randomness, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        choice = Choice.sample(jnp.exp(parameters - jnp.max(parameters, 0)), randomness.uniform[0])
        row = jnp.tensordot(self.states.T.astype(parameters.dtype), choice.one_hot, 1)
        return row, log_prob_of_choices([choice])

    def log_prob(self, parameters: Array, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        radix = np.append(np.cumprod(self.sizes[:0:-1])[::-1], 1).astype(float)
        state = jnp.tensordot(radix, row, 1)
        states = along_first(np.arange(len(self.states)), parameters)
        logit = jnp.max(jnp.where(states == state, parameters, -jnp.inf), 0)
        largest = jnp.max(parameters, 0)
        return logit - largest - jnp.log(sum_features(jnp.exp(parameters - largest)))


class Choice(NamedTuple):
    """A state chosen in every row, with the unnormalised weights of all states.

    Attributes:
        weights: unnormalised probabilities.
        one_hot: one for the chosen state, zero for the others.
        normaliser: the sum of the weights.
    """

    weights: Float[Array, "states *rows"]
    one_hot: Float[Array, "states *rows"]
    normaliser: Float[Array, "*rows"]

    @staticmethod
    def sample(weights: Array, uniform: Array) -> "Choice":
        """Choose a state by inverse transform."""
        # A short cumulative sum is faster as a matrix product than as a scan.
        lower = np.tril(np.ones((len(weights),) * 2, weights.dtype))
        cumulative = jnp.tensordot(lower, weights, 1)
        passed = (cumulative[:-1] <= uniform * cumulative[-1]).astype(weights.dtype)
        no_padding = [(0, 0)] * (passed.ndim - 1)
        at_least = jnp.pad(passed, [(1, 0), *no_padding], constant_values=1)
        one_hot: Array = at_least - jnp.pad(passed, [(0, 1), *no_padding])
        return Choice(weights, one_hot, cumulative[-1])

    @staticmethod
    def of(weights: Array, one_hot: Array) -> "Choice":
        """The choice that a one-hot vector gives."""
        return Choice(weights, one_hot, sum_features(weights))


def log_prob_of_choices(choices: Sequence[Choice]) -> Float[Array, "*rows"]:
    """The sum of the log probabilities of the chosen states."""
    # Multiplying by the one-hot vector keeps small weights exact; differences of cumulative sums
    # would lose them. One matrix product serves all choices.
    chosen = jnp.concatenate([choice.weights * choice.one_hot for choice in choices])
    owners = np.repeat(np.arange(len(choices)), [len(choice.weights) for choice in choices])
    sums = np.equal.outer(np.arange(len(choices)), owners).astype(chosen.dtype)
    weights = jnp.tensordot(sums, chosen, 1)
    parts = [jnp.log(w / choice.normaliser) for w, choice in zip(weights, choices, strict=True)]
    return sum(parts, jnp.zeros(()))
