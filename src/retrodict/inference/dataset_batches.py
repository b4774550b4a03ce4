"""Inference for many data sets in batches of bounded memory."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from retrodict.graph.graph import Graph
from retrodict.proposal.factor_proposals import Networks
from retrodict.proposal.proposal import Proposal
from retrodict.types import Values

BYTES_PER_VALUE = 4
# About how many arrays of the size of a site exist at a time: samples, ancestors' values, outputs.
COPIES_PER_VALUE = 10


def posterior_bytes(graph: Graph, num_particles: int) -> int:
    """About how much memory the particles of one data set take."""
    num_values = sum(int(np.prod(site.shape)) for site in graph.sites.values())
    return num_particles * BYTES_PER_VALUE * COPIES_PER_VALUE * max(num_values, 1)


def working_bytes(proposal: Proposal, networks: Networks, num_particles: int) -> int:
    """About how much memory inference for one data set takes at a time."""
    sampling = (proposal.working_bytes(networks, stage) for stage in proposal.stages)
    particles = posterior_bytes(proposal.graph, num_particles)
    return particles + num_particles * max(sampling, default=0)


def batch_size(graph: Graph, num_particles: int, num_datasets: int, memory: int) -> int:
    """How many data sets fit into `memory` bytes."""
    return int(np.clip(memory // posterior_bytes(graph, num_particles), 1, num_datasets))


def map_datasets(
    run: Callable[[PRNGKeyArray, Values], Any],
    keys: PRNGKeyArray,
    data: Mapping[str, Any],
    size: int,
) -> Any:
    """The outputs of `run` for all data sets, `size` of them at a time, as NumPy arrays.

    Args:
        run: function of a batch of keys and a batch of data sets.
        keys: one for each data set.
        data: site → values with the data sets on the first axis.
        size: of a batch.
    """
    num_datasets, parts = keys.shape[0], []
    for start in range(0, num_datasets, size):
        # The last batch is filled up from the first rows, so that it needs no other program.
        rows = np.arange(start, start + size) % num_datasets
        output = jax.device_get(
            run(keys[rows], {name: value[rows] for name, value in data.items()})
        )
        num_new = min(size, num_datasets - start)
        parts.append(jax.tree.map(lambda leaf, num_new=num_new: leaf[:num_new], output))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
