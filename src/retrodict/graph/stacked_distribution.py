"""A distribution of independent copies of one family with different parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array


class Stacked(dist.Distribution):
    """Independent distributions of one form, as one with a leading batch axis.

    NumPyro's distributions broadcast their parameters from the right, by rules that differ between
    distributions, so stacked parameters do not in general give copies: every method is vectorised.

    Args:
        leaves: the parameters as leaves of a pytree.
        stacked: which of them have a leading axis of copies; the others are the same for all.
        tree: the structure of the pytree.
        number: the number of copies.
    """

    pytree_data_fields = ("leaves",)
    pytree_aux_fields = ("stacked", "tree", "number")

    def __init__(
        self, leaves: tuple[Any, ...], stacked: tuple[bool, ...], tree: Any, number: int
    ) -> None:
        self.leaves, self.stacked, self.tree, self.number = leaves, stacked, tree, number
        one = jax.tree.unflatten(tree, leaves)  # shapes are not derived from parameters
        super().__init__((number, *one.batch_shape), one.event_shape, validate_args=False)

    @property
    def base_dist(self) -> dist.Distribution:
        """The distribution of the first copy."""
        return self._copy([leaf[0] for leaf in self._parameters])

    @property
    def _parameters(self) -> list[Any]:
        return [leaf for leaf, stacked in zip(self.leaves, self.stacked, strict=True) if stacked]

    def _copy(self, parameters: Iterable[Any]) -> dist.Distribution:
        """One copy, from its entries of the stacked parameters."""
        entries = iter(parameters)
        pairs = zip(self.leaves, self.stacked, strict=True)
        leaves = [next(entries) if stacked else leaf for leaf, stacked in pairs]
        copy: dist.Distribution = jax.tree.unflatten(self.tree, leaves)
        return copy

    def each(self, fn: Callable[..., Any], *arguments: Array) -> Any:
        """Apply a function of a distribution, and of entries of the arguments, to every copy."""

        def one(parameters: list[Array], _: Array, *rest: Array) -> Any:
            return fn(self._copy(parameters), *rest)

        return jax.vmap(one)(self._parameters, jnp.arange(self.number), *arguments)

    @property
    def support(self) -> Any:
        """The support of all copies; bounds that differ are aligned with the copies."""
        support = self.base_dist.support
        bounds, form = jax.tree.flatten(self.each(lambda fn: fn.support))
        axes = len(self.batch_shape) + len(self.event_shape)
        aligned = [
            jnp.reshape(b, (self.number, *(1 for _ in range(axes - b.ndim)), *b.shape[1:]))
            for b in bounds
        ]
        return jax.tree.unflatten(form, aligned) if bounds else support

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw every copy."""
        keys = jax.random.split(key, self.number)
        draws: Array = self.each(lambda fn, key: fn.sample(key, sample_shape), keys)
        return jnp.moveaxis(draws, 0, len(sample_shape))

    def log_prob(self, value: Any, intermediates: Any = None) -> Array:
        """The log density of every copy."""
        density: Array = self.each(lambda fn, value: fn.log_prob(value), value)
        return density

    @property
    def mean(self) -> Array:
        """The mean of every copy."""
        mean: Array = self.each(lambda fn: fn.mean)
        return mean

    @property
    def variance(self) -> Array:
        """The variance of every copy."""
        variance: Array = self.each(lambda fn: fn.variance)
        return variance
