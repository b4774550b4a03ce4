"""A model in; fresh synthetic data sets, with the latents that made them, out.

Draws that floats cannot hold are dropped, as in training: see `retrodict.synthetic`.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from retrodict.errors import UnsupportedModel
from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import REASONS, Draws, usual_number
from retrodict.training.simulate import Rejected

MOST_CHUNKS = 100


def fresh_datasets(
    graph: Graph, draws: Draws, rng_key: PRNGKeyArray, number: int
) -> tuple[dict[str, np.ndarray[Any, Any]], Rejected]:
    """So many joint draws of all sites, and what was dropped on the way."""
    names, rejected = list(graph.sites), Rejected()
    shown = list(graph.surface.sites)
    # As in training, for which `draws` may have been compiled.
    size = usual_number(graph)
    parts: list[dict[str, np.ndarray[Any, Any]]] = []
    found = 0
    for chunk in range(MOST_CHUNKS):
        keys = jax.random.split(jax.random.fold_in(rng_key, chunk), size)
        values, codes = jax.device_get(draws(keys))
        rejected.simulated += size
        for code, times in zip(*np.unique(codes[codes > 0], return_counts=True), strict=True):
            site, reason = divmod(int(code) - 1, len(REASONS))
            rejected.dropped[shown[site], REASONS[reason]] += int(times)
        good = np.flatnonzero(codes == 0)
        parts.append({name: values[name][good] for name in names})
        found += len(good)
        if found >= number:
            return {n: np.concatenate([p[n] for p in parts])[:number] for n in names}, rejected
    raise UnsupportedModel(
        f"of {rejected.simulated} draws from the prior only {found} can be used, "
        f"{rejected.describe()}. Give these sites priors under which simulated data are "
        "representable in float32"
    )
