"""Values of latents that no later stage of SMC reads.

Such values need not be gathered at every resampling. They are kept as they were before it, together
with the ancestors that it chose, and are looked up at the end by following the ancestors back.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class _Generation(NamedTuple):
    """Latents whose values were last needed before a resampling, and its ancestors."""

    latents: dict[str, Array]
    ancestors: Int[Array, " particles"]


@dataclass(frozen=True)
class LatentArchive:
    """The archived latents of all generations so far, the oldest generation first."""

    generations: tuple[_Generation, ...] = ()

    def add(
        self, latents: dict[str, Array], ancestors: Int[Array, " particles"]
    ) -> "LatentArchive":
        """Record a resampling, and latents as they were before it."""
        if not latents and not self.generations:
            return self
        return LatentArchive((*self.generations, _Generation(latents, ancestors)))

    def values(self) -> dict[str, Array]:
        """The value of every archived latent for each particle of the last generation."""
        values: dict[str, Array] = {}
        lineage: Array | None = None
        for generation in reversed(self.generations):
            if lineage is None:
                lineage = generation.ancestors
            else:
                lineage = jnp.take(generation.ancestors, lineage, mode="clip")
            for name, value in generation.latents.items():
                values[name] = jnp.take(value, lineage, 0, mode="clip")
        return values
