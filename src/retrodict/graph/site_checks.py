"""Refuse sites and plates that cannot be compiled."""

from collections.abc import Mapping
from typing import Any

import numpyro.distributions as dist

from retrodict.errors import UnsupportedModel
from retrodict.graph.distribution_parameters import innermost


def check_plate(message: Mapping[str, Any]) -> None:
    """Refuse a plate that subsamples."""
    size, subsample_size = message["args"]
    if subsample_size is not None and subsample_size != size:
        raise UnsupportedModel(
            f"plate '{message['name']}' takes a subsample of {subsample_size} of its {size} "
            "elements. A compiled posterior is of all data: remove subsample_size"
        )


def check_site(message: Mapping[str, Any], observed: frozenset[str]) -> None:
    """Refuse a sample site that cannot be simulated or whose value is fixed."""
    name, base = message["name"], innermost(message["fn"])
    if isinstance(base, dist.Unit):
        raise UnsupportedModel(
            f"site '{name}' is a numpyro.factor: it has no distribution to simulate data from. "
            "Write the term as the log density of an observed sample site"
        )
    if isinstance(base, dist.ImproperUniform):
        raise UnsupportedModel(
            f"site '{name}' has an improper prior (ImproperUniform), which cannot be simulated. "
            "Give it a proper distribution, however wide"
        )
    if message.get("scale") is not None:
        raise UnsupportedModel(
            f"the log density of site '{name}' is rescaled (handlers.scale), so that the model is "
            "no longer a joint distribution that can be simulated. Remove the scale"
        )
    if message["is_observed"] and name not in observed:
        raise UnsupportedModel(
            f"site '{name}' is given a value inside the model (obs=…) but is not among the "
            f"observed sites ({', '.join(sorted(observed)) or 'none'}). Name it in `observed`, and "
            "call the model without data"
        )
