"""Draws from the prior on which guides and closed-form conditionals are examined."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from retrodict._xla.jit import run_once
from retrodict.graph.prior_draws import JointDraws, PriorSampler, fresh_keys, usual_number
from retrodict.proposal.factor_model import FactorModel
from retrodict.proposal.scope import Scope

# Fewer where a model has so many values that fewer are drawn at a time.
NUM_REFERENCES = 128


def reference_draws(model: FactorModel, sample_prior: PriorSampler) -> JointDraws:
    """Draws from the prior, those with representable values and densities first.

    They are always the same: the same model must have the same proposal.
    """
    graph, names = model.graph, model.evaluated
    keys = fresh_keys(np.random.default_rng(0), usual_number(graph), jax.random.key(0))
    if model.scan is None and 2 * max(map(list(graph.sites).index, names)) < len(graph.sites):
        # All draws share one program, which is long to compile where little of it is needed.

        def leading(rng_key: PRNGKeyArray) -> dict[str, Array]:
            return graph.program.run(rng_key, {}, only=names).values

        values = run_once(jax.vmap(leading), keys[:NUM_REFERENCES])
        return JointDraws(values, {}, jnp.zeros(NUM_REFERENCES, int))
    simulated = sample_prior(keys)
    order = np.argsort(np.asarray(simulated.faults) != 0, kind="stable")[:NUM_REFERENCES]
    # One program instead of one per array.
    chosen: JointDraws = run_once(
        lambda draws, order: jax.tree.map(lambda leaf: leaf[order], draws), simulated, order
    )
    return chosen


def at_references(
    model: FactorModel,
    fn: Callable[[Scope, tuple[Array, ...], Array], Any],
    references: JointDraws,
    count: int | None = None,
) -> Any:
    """A function of one copy in every reference draw.

    Args:
        model: whose copies.
        fn: of the scope, the copy's index along plates, and the number of the draw.
        references: from `reference_draws`.
        count: how many of them to use, if not all.
    """
    sizes = model.copies.sizes
    number = int(np.prod(sizes, dtype=int))

    def one(draw: JointDraws, place: Int[Array, ""]) -> Any:
        # A different copy for each draw, the last first: the first step in time may start from a
        # constant.
        index = tuple(jnp.unravel_index(number - 1 - place % number, sizes)) if sizes else ()
        scope = Scope(draw.values, {}, draw.carries)
        if model.scan is not None:
            scope, index = scope.at_step(index[0]), index[1:]
        return fn(scope, index, place)

    used = jax.tree.map(lambda leaf: leaf[:count], references)
    return run_once(jax.vmap(one), used, np.arange(used.faults.shape[0]))


def pick(index: tuple[Array, ...], tree: Any) -> Any:
    """The entry of one copy in arrays with axes of copies first."""
    return jax.tree.map(lambda leaf: leaf[index], tree)
