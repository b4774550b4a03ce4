"""Synthetic data sets from the prior, with the latents that generated them.

Draws that float32 cannot represent are dropped, as in training: see `graph.prior_draws`.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from retrodict.errors import UnsupportedModel
from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import PriorSampler, usual_number
from retrodict.training.rejections import RejectionCounts

MAX_CHUNKS = 100


def simulate_datasets(
    graph: Graph, sample_prior: PriorSampler, rng_key: PRNGKeyArray, number: int
) -> tuple[dict[str, np.ndarray[Any, Any]], RejectionCounts]:
    """Simulate joint draws of all sites.

    Args:
        graph: of the model.
        sample_prior: compiled joint draws of the model, see `prior_draws.prior_sampler`.
        rng_key: determines the draws.
        number: of data sets.

    Returns:
        Site → `(number, *shape)`, and counts of the draws that were dropped.

    Raises:
        UnsupportedModel: nearly all draws had to be dropped.
    """
    sites, user_sites, rejected = list(graph.sites), list(graph.surface.sites), RejectionCounts()
    # The size used in training, for which `sample_prior` may have been compiled already.
    size = usual_number(graph)
    parts: list[dict[str, np.ndarray[Any, Any]]] = []
    num_valid = 0
    for chunk in range(MAX_CHUNKS):
        keys = jax.random.split(jax.random.fold_in(rng_key, chunk), size)
        draws = jax.device_get(sample_prior(keys))
        valid = rejected.record(draws.faults, user_sites)
        parts.append({name: draws.values[name][valid] for name in sites})
        num_valid += int(valid.sum())
        if num_valid >= number:
            return {n: np.concatenate([p[n] for p in parts])[:number] for n in sites}, rejected
    raise UnsupportedModel(
        f"of {rejected.simulated} draws from the prior only {num_valid} can be used, "
        f"{rejected.describe()}. Give these sites priors under which simulated data are "
        "representable in float32"
    )
