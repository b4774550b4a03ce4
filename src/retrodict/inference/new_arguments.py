"""A trained proposal for the same model called with other arguments, which may change its sizes."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from retrodict.errors import UnsupportedModel
from retrodict.graph.trace import trace
from retrodict.inverse.inverse import invert
from retrodict.proposal.proposal import Proposal


def with_arguments(
    proposal: Proposal, model_args: tuple[Any, ...], model_kwargs: Mapping[str, Any]
) -> Proposal:
    """The proposal for the model called with other arguments, with the same networks.

    Raises:
        UnsupportedModel: the arguments change more than the sizes of plates and series.
    """
    surface = proposal.graph.surface
    graph = trace(
        surface.program.model,
        surface.named_observed,
        model_args=model_args,
        model_kwargs=model_kwargs,
    )
    facts = {name: facts.with_other_arguments() for name, facts in proposal.facts.items()}
    resized = Proposal.of(invert(graph, proposal.inverse.method), facts)
    _check_same_networks(proposal, resized)
    return resized


def _check_same_networks(trained: Proposal, resized: Proposal) -> None:
    before, after = trained.networks(), resized.networks()
    for name in {**before, **after}:
        if name not in before or name not in after:
            raise UnsupportedModel(
                "called with these arguments the model has another structure: the network "
                f"'{name}' is needed in only one of the two. Compile the model again"
            )
        if before[name][0].requirements != after[name][0].requirements:
            raise UnsupportedModel(
                f"called with these arguments the model needs the network '{name}' with other "
                "shapes than it was trained for: only plates that are read as sets or repeated "
                "over, and series, can change their size. Compile the model again"
            )


def fingerprint(arguments: Any) -> str:
    """A hash of a tree of arguments, equal for equal values."""
    digest = hashlib.sha256(str(jax.tree.structure(arguments)).encode())
    for leaf in jax.tree.leaves(arguments):
        array = np.asarray(leaf)
        content = repr(leaf).encode() if array.dtype == object else array.tobytes()
        digest.update(f"{array.dtype}{array.shape}".encode() + content)
    return digest.hexdigest()
