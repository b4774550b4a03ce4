"""Constant covariates that distinguish elements of a plate or steps of a scan.

Elements need not be exchangeable: a standard error may be a plain argument with one value per
group, a covariate a fixed design. A network shared between elements must know which element it
sees. Whatever the constants are, they enter the element's own distribution, so the parameters of
that distribution, at a few reference draws in which all elements have equal parents, encode them.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from retrodict._xla.jit import run_once
from retrodict.graph.graph import Graph, Site
from retrodict.graph.index_atoms import Table

REFERENCES = 3
MAX_FEATURES = 32


class CovariateKey(NamedTuple):
    """Names the covariates of a site.

    Attributes:
        site: the site's name.
        kind: "constants" of its own distribution, or "parents", where a constant index or a shift
            decides on which elements of other sites each element depends.
    """

    site: str
    kind: Literal["constants", "parents"]


def element_covariates(graph: Graph) -> dict[CovariateKey, Array]:
    """Covariates of all sites that have any: index axes first, then features."""
    by_constants = [site for site in graph.sites.values() if site.heterogeneous_axes]
    by_parents = [site for site in graph.sites.values() if _has_place(graph, site)]
    if not by_constants and not by_parents:
        return {}

    def reference(rng_key: Array) -> dict[CovariateKey, Array]:
        values = graph.program.simulate(rng_key)
        equal = {name: _first_everywhere(values[name], graph.sites[name]) for name in values}
        at_equal = graph.program.run(None, equal).parameters
        at_draw = graph.program.run(None, values).parameters
        features = {
            CovariateKey(site.name, "constants"): _features(at_equal[site.name], site)
            for site in by_constants
        }
        return features | {
            CovariateKey(site.name, "parents"): _features(at_draw[site.name], site)
            for site in by_parents
        }

    # The key is fixed: the same model must have the same covariates wherever it is compiled.
    keys = jax.random.split(jax.random.key(0), 16 * REFERENCES)
    covariates = {}
    for key, features in run_once(jax.vmap(reference), keys).items():
        usable = jnp.all(jnp.isfinite(features), axis=tuple(range(1, features.ndim)))
        chosen = features[jnp.argsort(~usable, stable=True)[:REFERENCES]]
        shape = graph.sites[key.site].index_shape
        covariates[key] = _varying(jnp.moveaxis(chosen, 0, -2).reshape(*shape, -1))
    return covariates


def _has_place(graph: Graph, site: Site) -> bool:
    """Whether a plate of the site is tied to another's by position: by a map or a shift."""
    first = int(site.time)
    return any(
        isinstance(atom, Table) or (atom.left >= first and atom.bounds != (0, 0))
        for edge in graph.parents(site.name).values()
        for term in edge.relation.terms
        for atom in term
        if atom.left is not None and atom.right is not None
    )


def _first_everywhere(value: Array, site: Site) -> Array:
    """Every element takes the value of the first."""
    for axis in site.axes:
        value = jnp.broadcast_to(jnp.take(value, jnp.array([0]), axis), value.shape)
    return value


def _features(parameters: list[Array], site: Site) -> Array:
    """Parameters with the site's index axes first, all else flattened."""
    moved = [
        jnp.moveaxis(p, site.axes, range(len(site.axes))).reshape(*site.index_shape, -1)
        for p in parameters
    ]
    return jnp.concatenate(moved, -1)


def _varying(features: Array) -> Array:
    """Only the features that differ between elements, and not too many of them."""
    rows = features.reshape(-1, features.shape[-1])
    spread = jnp.max(rows, 0) - jnp.min(rows, 0)
    varies = spread > 1e-6 * jnp.max(jnp.abs(rows), 0)
    kept = jnp.flatnonzero(varies)[:MAX_FEATURES]
    return features[..., kept] if kept.size else features[..., :1]
