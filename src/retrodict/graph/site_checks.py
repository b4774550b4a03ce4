"""Refuse sites and plates that cannot be compiled."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
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


def check_site(message: Mapping[str, Any]) -> None:
    """Refuse a sample site that cannot be simulated."""
    name, base, value = message["name"], innermost(message["fn"]), message["value"]
    if value is not None and not message["is_observed"]:
        raise UnsupportedModel(
            f"the value of site '{name}' is set inside the model (handlers.substitute or replay). "
            "Use handlers.condition to observe the site, or an argument in its place"
        )
    if isinstance(base, dist.Delta) and value is not None and value is not base.v:
        raise UnsupportedModel(
            f"site '{name}' is a Delta distribution that is observed (obs=…): its density is zero "
            "almost everywhere. Give it a distribution with a width"
        )
    if isinstance(base, dist.Delta) and not _is_constant(base.log_density, 0):
        raise UnsupportedModel(
            f"site '{name}' is a Delta distribution with a log_density, which is a factor: it "
            "cannot be simulated. Write the term as the log density of an observed sample site"
        )
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
    if message.get("scale") is not None and not _is_constant(message["scale"], 1):
        raise UnsupportedModel(
            f"the log density of site '{name}' is rescaled (handlers.scale), so that the model is "
            "no longer a joint distribution that can be simulated. Remove the scale"
        )


def _is_constant(array: Any, number: float) -> bool:
    """Whether all entries of an array are known to be equal to a number."""
    return not isinstance(array, jax.core.Tracer) and bool(np.all(np.asarray(array) == number))
