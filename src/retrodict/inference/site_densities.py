"""Log densities of a model's sites, at one particle or at every particle of a population."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict.graph.graph import Graph
from retrodict.types import Values

Result = TypeVar("Result")


@dataclass(frozen=True)
class SiteDensities:
    """Evaluates the log densities of a few sites at a time.

    The sites' own values and those of their parents must be known. Sites that have no value are
    sampled with a fixed key while the model runs, and do not enter the densities.

    Attributes:
        graph: the model's graph.
    """

    graph: Graph

    def by_element(self, names: Sequence[str], values: Values) -> dict[str, Float[Array, "*index"]]:
        """Log densities of sites at one particle; axes are time, if any, then the site's plates."""
        evaluation = self.graph.program.run(jax.random.key(0), values, only=names)
        return {name: evaluation.log_density[name] for name in names}

    def totals(self, names: Sequence[str], values: Values) -> dict[str, Float[Array, ""]]:
        """Log densities of sites at one particle, summed over time and plates."""
        return {name: density.sum() for name, density in self.by_element(names, values).items()}

    def population_by_element(
        self, names: Sequence[str], data: Values, latents: Values, num_particles: int
    ) -> dict[str, Float[Array, "particles *index"]]:
        """Log densities of sites at every particle; particles are the first axis."""
        return map_particles(
            lambda latents: self.by_element(names, {**data, **latents}), latents, num_particles
        )

    def population_totals(
        self, names: Sequence[str], data: Values, latents: Values, num_particles: int
    ) -> dict[str, Float[Array, " particles"]]:
        """Log densities of sites at every particle, summed over time and plates."""
        if not names:
            return {}
        return map_particles(
            lambda latents: self.totals(names, {**data, **latents}), latents, num_particles
        )


def map_particles(fn: Callable[[Values], Result], latents: Values, num_particles: int) -> Result:
    """The function of every particle's latents; evaluated once if there are no latents.

    Args:
        fn: function of one particle's latents.
        latents: site → values with the particles on the first axis; may be empty.
        num_particles: K.
    """
    if latents:
        return jax.vmap(fn)(latents)
    result: Result = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (num_particles, *jnp.shape(leaf))), fn(latents)
    )
    return result


def any_possible(
    densities: dict[str, Float[Array, "particles *index"]],
) -> dict[str, Bool[Array, ""]]:
    """For each site, whether every element has a particle that gives it a positive density."""
    return {name: jnp.all(jnp.any(density > -jnp.inf, 0)) for name, density in densities.items()}
