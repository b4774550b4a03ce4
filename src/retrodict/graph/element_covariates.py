"""A program in; for sites whose elements differ by constants, a vector that tells them apart, out.

Elements of a plate, or steps of a scan, need not be alike: a standard error may be a plain argument
with one value a group, a covariate a fixed design. A network shared between elements must know
which one it sees. Whatever the constants are, they enter the element's own distribution, so the
parameters of that distribution, at a few reference draws in which all elements have the same
parents, encode them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from retrodict._xla.jit import run_once
from retrodict.graph.graph import Graph, Site
from retrodict.graph.index_atoms import Table

REFERENCES = 3


def designs(graph: Graph) -> dict[str, Array]:
    """What tells elements apart, by name among values: index axes first, then features.

    `y design` is of the constants in a site's own distribution. `y place` is of which elements of
    other sites it depends on, where a constant index or a shift decides that.
    """
    unlike = [site for site in graph.sites.values() if site.unlike]
    placed = [site for site in graph.sites.values() if _has_place(graph, site)]
    if not unlike and not placed:
        return {}

    def reference(rng_key: Array) -> dict[str, Array]:
        values = graph.program.simulate(rng_key)
        level = {name: _level(values[name], graph.sites[name]) for name in values}
        alike = graph.program.run(None, level).parameters
        mixed = graph.program.run(None, values).parameters
        return {f"{site.name} design": _features(alike[site.name], site) for site in unlike} | {
            f"{site.name} place": _features(mixed[site.name], site) for site in placed
        }

    # The key is fixed: the same model must give the same design wherever it is compiled or loaded.
    keys = jax.random.split(jax.random.key(0), 16 * REFERENCES)
    drawn = run_once(jax.vmap(reference), keys)
    found = {}
    for name, features in drawn.items():
        site = graph.sites[name.rpartition(" ")[0]]
        usable = jnp.all(jnp.isfinite(features), axis=tuple(range(1, features.ndim)))
        chosen = features[jnp.argsort(~usable, stable=True)[:REFERENCES]]
        flat = jnp.moveaxis(chosen, 0, -2).reshape(*site.index_shape, -1)
        found[name] = _varying(flat)
    return found


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


def _level(value: Array, site: Site) -> Array:
    """The same value for all elements: that of the first."""
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


_MOST_FEATURES = 32


def _varying(features: Array) -> Array:
    """Only the features that differ between elements, and not too many of them."""
    rows = features.reshape(-1, features.shape[-1])
    spread = jnp.max(rows, 0) - jnp.min(rows, 0)
    varies = spread > 1e-6 * jnp.max(jnp.abs(rows), 0)
    kept = jnp.flatnonzero(varies)[:_MOST_FEATURES]
    return features[..., kept] if kept.size else features[..., :1]
