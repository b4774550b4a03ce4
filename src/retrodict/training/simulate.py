"""Simulation of training examples for one network.

Draws (x, y) ~ p(x, y) are limited only by time, and no real data are needed (Paige & Wood 2016,
sec. 3.4). Priors with heavy tails break naive simulation in float32, see `graph.prior_draws`; a
draw is dropped as a whole if any of its values or densities is not representable.

Networks therefore learn p(x | y, R), where R is the event that the draw is representable, and not
p(x | y). The two differ only where x given y may lie outside R: for counts whose rate has a heavy
tail, R excludes rates that lead to counts above 2³¹, which do not occur in real data. Inference
does not condition on R: its weights are the model's density over q, and q covers the whole support.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from retrodict._xla.jit import CompiledFunction, shape_dtype
from retrodict._xla.tuning import FAST_COMPILE
from retrodict.errors import UnsupportedModel
from retrodict.graph.element_covariates import CovariateKey
from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import (
    CHUNK,
    JointDraws,
    PriorSampler,
    at_once,
    fresh_keys,
    generator,
)
from retrodict.proposal.factor_proposals import EstimatedStructure
from retrodict.proposal.scope import Scope
from retrodict.training.rejections import RejectionCounts

# After this many draws, the share of dropped draws is known well enough to refuse the model.
MIN_DRAWS_TO_REFUSE = 1000
MAX_DROPPED = 0.95

# `FactorRow`s, with a leading axis of examples on every leaf.
Examples: TypeAlias = Any


class _CopyChoice(NamedTuple):
    """Which copies of the factors become training examples, for each draw.

    Attributes:
        copies: for each factor, flat indices of the chosen copies.
        subset: indices into the concatenation of these copies; None to use all of them.
    """

    copies: tuple[Int[np.ndarray, "draws count"], ...]
    subset: Int[np.ndarray, "draws examples"] | None


@dataclass(frozen=True)
class Simulator:
    """Simulates training examples for the network that some factors share.

    Attributes:
        graph: of the model.
        structures: of the factors that share the network.
        covariates: constants that distinguish the elements of a plate.
        copies: number of copies of a factor that are used of each draw.
        sample_prior: joint draws of the model, see `prior_draws.prior_sampler`.
    """

    graph: Graph
    structures: tuple[EstimatedStructure, ...]
    covariates: Mapping[CovariateKey, Array]
    copies: int
    sample_prior: PriorSampler

    @property
    def examples_per_draw(self) -> int:
        """Number of examples from one valid draw."""
        return min(self.copies, sum(self._num_copies))

    @property
    def example_bytes(self) -> int:
        """Memory of one example."""
        return _bytes(self._shapes[1]) // self.examples_per_draw

    @property
    def example_shapes(self) -> Examples:
        """Shapes and types of one example."""
        return jax.tree.map(lambda leaf: shape_dtype(leaf.shape[2:], leaf.dtype), self._shapes[1])

    @property
    def chunk_size(self) -> int:
        """Number of draws simulated at a time."""
        draw_bytes = _bytes(self._shapes[0]) + _bytes(self._shapes[1])
        draw_bytes += sum(s.knowledge.working_bytes for s in self.structures)
        return at_once(draw_bytes)

    @cached_property
    def _shapes(self) -> tuple[Any, Any]:
        """Shapes of a chunk of draws and of its examples."""
        # Of the usual chunk size, so that the traces made here are used again.
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), CHUNK))
        draws = jax.eval_shape(self.sample_prior, keys)
        choice = self._choose_copies(np.random.default_rng(0), CHUNK)
        return draws, jax.eval_shape(self._gather, choice, draws)

    @property
    def _num_copies(self) -> list[int]:
        return [structure.copies.number for structure in self.structures]

    @cached_property
    def _gather(self) -> Callable[["_CopyChoice", JointDraws], Examples]:
        return CompiledFunction(jax.vmap(self._examples_of_draw), FAST_COMPILE)

    def _choose_copies(self, rng: np.random.Generator, draws: int) -> "_CopyChoice":
        """Choose copies at random, from each factor in proportion to its number of copies."""
        size, totals = self.examples_per_draw, self._num_copies
        copies = []
        for total in totals:
            # Stratified, so that no copy is chosen twice for one draw.
            count = -(-size * total // sum(totals))
            edges = np.linspace(0, total, count + 1).astype(int)
            copies.append(rng.integers(edges[:-1], edges[1:], (draws, count), np.int32))
        number = sum(part.shape[1] for part in copies)
        if number == size:
            return _CopyChoice(tuple(copies), None)
        orders = np.tile(np.arange(number, dtype=np.int32), (draws, 1))
        return _CopyChoice(tuple(copies), rng.permuted(orders, axis=1)[:, :size])

    def _examples_of_draw(self, choice: "_CopyChoice", draw: JointDraws) -> Examples:
        scope = Scope(draw.values, self.covariates, draw.carries)
        parts = [
            self._examples_of_copies(structure, scope, indices)
            for structure, indices in zip(self.structures, choice.copies, strict=True)
        ]
        examples = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        if choice.subset is None:
            return examples
        return jax.tree.map(lambda leaf: leaf[choice.subset], examples)

    def _examples_of_copies(
        self, structure: EstimatedStructure, scope: Scope, flat_indices: Any
    ) -> Examples:
        copies = structure.copies
        if not copies.sizes:
            return jax.tree.map(lambda leaf: leaf[None], structure.row(scope, ()))
        if flat_indices.size == copies.number:
            # All copies are used. Constant indices give a faster program.
            flat_indices = jnp.arange(flat_indices.size)
        index = jnp.unravel_index(flat_indices, copies.sizes)
        return jax.vmap(lambda index: structure.row(scope, index))(index)

    def examples(
        self, rng_key: PRNGKeyArray, size: int, stop: Callable[[], bool]
    ) -> tuple[Examples, RejectionCounts]:
        """Simulate training examples.

        Args:
            rng_key: determines the examples.
            size: number of examples.
            stop: polled after each chunk of draws; once true, the examples so far are returned.

        Returns:
            The examples, and counts of the draws that were dropped.

        Raises:
            UnsupportedModel: nearly all draws have to be dropped.
        """
        rejected, rng = RejectionCounts(), generator(rng_key)
        filled = 0
        examples: Examples = None
        while filled < size and not (filled and stop()):
            draws = self.sample_prior(fresh_keys(rng, self.chunk_size, rng_key))
            chunk = self._gather(self._choose_copies(rng, self.chunk_size), draws)
            valid = self._check_draws(np.asarray(draws.faults), rejected)
            if examples is None:
                examples = jax.tree.map(lambda a: np.empty((size, *a.shape[2:]), a.dtype), chunk)
            available = int(valid.sum()) * self.examples_per_draw
            number = min(available, size - filled)
            for into, leaf in zip(jax.tree.leaves(examples), jax.tree.leaves(chunk), strict=True):
                flat = np.asarray(leaf)[valid].reshape(available, *leaf.shape[2:])
                into[filled : filled + number] = flat[:number]
            filled += number
        return jax.tree.map(lambda leaf: leaf[:filled], examples), rejected

    def _check_draws(
        self, codes: Int[np.ndarray, " draws"], rejected: RejectionCounts
    ) -> Bool[np.ndarray, " draws"]:
        """Count the dropped draws; returns which draws are valid."""
        valid = rejected.record(codes, list(self.graph.surface.sites))
        if rejected.fraction > MAX_DROPPED and rejected.simulated >= MIN_DRAWS_TO_REFUSE:
            raise UnsupportedModel(
                f"{rejected.fraction:.0%} of the draws from the prior cannot be used, "
                f"{rejected.describe()}. Give these sites priors under which simulated data "
                "are representable in float32"
            )
        return valid


def _bytes(shapes: Any) -> int:
    """Memory of one entry of the leading axis."""
    leaves = jax.tree.leaves(shapes)
    return sum(int(np.prod(leaf.shape[1:])) * leaf.dtype.itemsize for leaf in leaves)


def latent_names(structures: Sequence[EstimatedStructure]) -> str:
    """Names of the latents that the network of these factors draws, for display."""
    return ", ".join(structures[0].factor.latents)
