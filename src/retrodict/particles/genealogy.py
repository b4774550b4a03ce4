"""Chosen ancestors and weights in; what resampling has left of earlier draws out.

Resampling copies, and copies tell nothing new: what is known of a variable drawn at some stage
rests on the draws of that stage that have descendants. In a long series all lines soon lead back to
one first ancestor. That is in the nature of a particle filter, and no fault of its filtered
marginals or its evidence, but it is one of its trajectories.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from retrodict.particles.weights import families

# How much of all pairs of particles, by weight, may share an ancestor at the older mark.
SHARED = 0.1


class Lineage(NamedTuple):
    """Whom each particle descends from at two marks in the past, and the error made before them.

    The variance of log Ẑ shows in the weights F of families: grouped by their ancestors at some
    stage s, Σ F² - 1/K is due to what was drawn at s and since (Chan & Lai 2013, Ann. Statist.
    41:2877). Seen from too far, everybody is one family. So there are two marks. When the older one
    is about to fade, what was drawn between the two is settled, as the difference of their sums of
    squares, and the marks move on: a fixed-lag estimator (Olsson & Douc 2019, Bernoulli 25:1504)
    whose lag is as long as the ancestry can bear. A filter forgets, so that little is cut off.

    To sum over families at every stage is dear, so when to move is told from the weights: to choose
    ancestors by them makes about 1 / ESS - 1 / K of all pairs siblings.

    Attributes:
        old, new: index of each particle's ancestor at the older and the newer mark.
        old_age, new_age: how much of all pairs is thought to have come together since.
        marked: whether the newer mark has been set.
        settled: the variance of log Ẑ due to what was drawn before the older mark.
    """

    old: Int[Array, " particles"]
    new: Int[Array, " particles"]
    old_age: Float[Array, ""]
    new_age: Float[Array, ""]
    marked: Bool[Array, ""]
    settled: Float[Array, ""]

    @classmethod
    def start(cls, num: int) -> "Lineage":
        """Everyone is their own ancestor."""
        everyone, zero = jnp.arange(num, dtype=jnp.int32), jnp.zeros(())
        return cls(everyone, everyone, zero, zero, jnp.zeros((), bool), zero)

    def resampled(
        self,
        log_weights: Float[Array, " particles"],
        size: Float[Array, ""],
        parents: Int[Array, " particles"],
    ) -> "Lineage":
        """After `parents` were chosen by these normalised weights of that effective size."""
        siblings = 1.0 / jnp.maximum(size, 1e-30) - 1.0 / log_weights.shape[0]
        age = self.old_age + siblings
        close = self.marked & (age > SHARED)
        mark = close | (~self.marked & (age > SHARED / 2))

        def between() -> Array:
            old, new = (families(log_weights, line) for line in (self.old, self.new))
            # one family: an error that cannot be seen from here
            lost = jnp.max(old) > 1.0 - 1e-6
            return jnp.where(lost, jnp.inf, jnp.sum(old**2) - jnp.sum(new**2))

        return Lineage(
            jnp.where(close, self.new, self.old)[parents],
            jnp.where(mark, parents, self.new[parents]),
            jnp.where(close, self.new_age + siblings, age),
            jnp.where(mark, siblings, self.new_age + siblings),
            self.marked | mark,
            self.settled + jax.lax.cond(close, between, lambda: jnp.zeros(())),
        )


def survivors(
    ancestors: Int[Array, "stages particles"], log_weights: Float[Array, " particles"]
) -> Float[Array, " generations"]:
    """Effective number of draws of each generation that are left in the last: 1 / Σ F².

    One entry more than there are rows of `ancestors`: the last is the effective sample size.
    """

    def effective(line: Array) -> Array:
        squares = jnp.sum(families(log_weights, line) ** 2)
        return jnp.where(squares > 0.0, 1.0 / jnp.where(squares > 0.0, squares, 1.0), 0.0)

    def back(line: Array, parents: Array) -> tuple[Array, Array]:
        line = parents[line]
        return line, effective(line)

    everyone = jnp.arange(log_weights.shape[0], dtype=ancestors.dtype)
    _, earlier = jax.lax.scan(back, everyone, ancestors, reverse=True)
    return jnp.append(earlier, effective(everyone))


def paths(
    drawn: dict[str, Array], parents: Int[Array, "time particles"], backward: bool
) -> dict[str, Array]:
    """Follow every last particle back through its ancestors: values of all steps, particles first.

    `parents[s]` are the ancestors chosen before step s was drawn, in the order of drawing.
    """
    if backward:
        drawn = {name: value[::-1] for name, value in drawn.items()}
    everyone = jnp.arange(parents.shape[1], dtype=parents.dtype)

    def back(line: Array, chosen: Array) -> tuple[Array, Array]:
        return chosen[line], line

    _, lines = jax.lax.scan(back, everyone, parents, reverse=True)
    followed = jax.vmap(lambda values, line: jax.tree.map(lambda v: v[line], values))(drawn, lines)
    if backward:
        followed = {name: path[::-1] for name, path in followed.items()}
    return {name: jnp.moveaxis(path, 0, 1) for name, path in followed.items()}
