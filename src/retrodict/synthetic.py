"""A model in; rows of synthetic data for one network out, with bad draws dropped and counted.

Draws (x, y) ~ p(x, y) cost nothing but time, and no real data are needed: Paige & Wood (2016),
sec. 3.4. Priors with heavy tails break naive simulation in float32: gammas of small shape underflow
to zero, Poisson rates pass the largest integer. Such draws are dropped, so that what networks learn
is conditioned on every value and density of a draw being representable; the weights of inference
know nothing of this.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from retrodict.contexts import Assembly
from retrodict.errors import UnsupportedModel
from retrodict.graph import Graph

REASONS = ("not finite", "integer overflow", "zero density")


@dataclass
class Rejected:
    """How many draws were made, and how many dropped, by site and reason."""

    simulated: int = 0
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """How many draws were dropped."""
        return sum(self.dropped.values())

    @property
    def fraction(self) -> float:
        """The share of draws that were dropped."""
        return self.total / max(self.simulated, 1)

    def describe(self) -> str:
        """The sites at fault, the worst first."""
        worst = self.dropped.most_common(3)
        return "; ".join(f"'{s}': {r} ({n} of {self.simulated})" for (s, r), n in worst)


def faults(graph: Graph, values: dict[str, Array], density: dict[str, Array]) -> Int[Array, ""]:
    """What is wrong with a draw: 0 for nothing, else 1 + site · reasons + reason, of the first."""
    code = jnp.zeros((), jnp.int32)
    for number, name in reversed(list(enumerate(graph.sites))):
        value = values[name]
        if jnp.issubdtype(value.dtype, jnp.floating):
            bad = ~jnp.all(jnp.isfinite(value))
            overflow: Bool[Array, ""] = jnp.zeros((), bool)
        else:
            bad = jnp.zeros((), bool)
            info = np.iinfo(value.dtype) if value.dtype != bool else None
            extreme = (value >= info.max) | (value <= info.min + 1) if info else value & False
            overflow = jnp.any(extreme | (value < 0) & _counts(graph, name))
        impossible = ~jnp.all(jnp.isfinite(density[name]))
        for reason, wrong in reversed(list(enumerate((bad, overflow, impossible)))):
            code = jnp.where(wrong, 1 + number * len(REASONS) + reason, code)
    return code


def _counts(graph: Graph, name: str) -> bool:
    """Whether a negative value can only be an integer that has wrapped round."""
    base = graph.sites[name].support
    base = getattr(base, "base_constraint", base)
    lower = getattr(base, "lower_bound", None)
    return lower is not None and bool(np.all(np.asarray(lower) >= 0))


@dataclass(frozen=True)
class Simulator:
    """Makes rows for the network that some factors share.

    Attributes:
        graph: the model's.
        assemblies: of the factors that share the network.
        designs: constants that tell elements apart, among the values.
        copies: how many copies of a factor are used of each draw.
        chunk: how many draws are made at a time.
    """

    graph: Graph
    assemblies: tuple[Assembly, ...]
    designs: dict[str, Array]
    copies: int = 4
    chunk: int = 2048

    @property
    def rows_per_draw(self) -> int:
        """How many rows one good draw gives."""
        number = sum(int(np.prod(a.copies)) for a in self.assemblies)
        return min(self.copies, number)

    def draw(self, rng_key: PRNGKeyArray) -> tuple[Any, Int[Array, ""]]:
        """The rows of one joint draw, and what is wrong with it."""
        draw_key, pick_key = jax.random.split(rng_key)
        found = self.graph.program.run(draw_key, {})
        values = {**found.values, **found.carries, **self.designs}
        code = faults(self.graph, found.values, found.log_density)
        return self._rows(pick_key, values), code

    def _rows(self, rng_key: PRNGKeyArray, values: dict[str, Array]) -> Any:
        choice_key, copy_key = jax.random.split(rng_key)
        each = -(-self.rows_per_draw // len(self.assemblies))
        keys = jax.random.split(copy_key, len(self.assemblies))
        made = [
            self._copies(k, a, values, each) for k, a in zip(keys, self.assemblies, strict=True)
        ]
        rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), *made)
        number = jax.tree.leaves(rows)[0].shape[0]
        if number == self.rows_per_draw:
            return rows
        chosen = jax.random.permutation(choice_key, number)[: self.rows_per_draw]
        return jax.tree.map(lambda leaf: leaf[chosen], rows)

    def _copies(
        self, rng_key: PRNGKeyArray, assembly: Assembly, values: dict[str, Array], count: int
    ) -> Any:
        total = int(np.prod(assembly.copies))
        count = min(count, total)
        if count == total:
            flat = jnp.arange(total)
        else:
            # One copy from each of equal parts, so that no copy comes twice.
            edges = np.linspace(0, total, count + 1).astype(int)
            flat = jax.random.randint(rng_key, (count,), edges[:-1], edges[1:])
        index = jnp.unravel_index(flat, assembly.copies) if assembly.copies else ()

        def row(*place: Array) -> Any:
            return assembly.x(values, place), assembly.context(values, place)

        if not assembly.copies:
            return jax.tree.map(lambda leaf: leaf[None], row())
        return jax.vmap(row)(*index)

    def rows(self, draw_chunk: Any, rng_key: PRNGKeyArray, size: int, rejected: Rejected) -> Any:
        """At least `size` good rows, cut to `size`.

        Args:
            draw_chunk: `jit(vmap(self.draw))`, which the caller keeps.
            rng_key: the key.
            size: how many rows.
            rejected: counts, which are added to.
        """
        parts: list[Any] = []
        have = 0
        names = list(self.graph.sites)
        before = (rejected.simulated, rejected.total)
        while have < size:
            rng_key, chunk_key = jax.random.split(rng_key)
            rows, codes = jax.device_get(draw_chunk(jax.random.split(chunk_key, self.chunk)))
            good = codes == 0
            rejected.simulated += self.chunk
            for code, times in zip(*np.unique(codes[~good], return_counts=True), strict=True):
                site, reason = divmod(int(code) - 1, len(REASONS))
                rejected.dropped[names[site], REASONS[reason]] += int(times)
            simulated = rejected.simulated - before[0]
            lost = (rejected.total - before[1]) / simulated
            if lost > 0.95 and simulated >= 2 * self.chunk:
                raise UnsupportedModel(
                    f"{lost:.0%} of the draws from the prior cannot be used, "
                    f"{rejected.describe()}. Give these sites priors under which simulated data "
                    "are representable in float32"
                )
            parts.append(jax.tree.map(lambda leaf, good=good: _flat(leaf[good]), rows))
            have += int(good.sum()) * self.rows_per_draw
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:size], *parts)


def _flat(leaf: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Draws and copies as one axis of rows."""
    return leaf.reshape(-1, *leaf.shape[2:])


def row_bytes(rows: Any) -> int:
    """Memory of one row."""
    return sum(int(np.prod(leaf.shape[1:])) * leaf.dtype.itemsize for leaf in jax.tree.leaves(rows))


def names_of(assemblies: Sequence[Assembly]) -> str:
    """What the network of some factors draws, for people to read."""
    return ", ".join(assemblies[0].factor.latents)
