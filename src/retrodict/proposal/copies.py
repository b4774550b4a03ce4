"""The copies of a factor along plates and time, and how sites' arrays are made of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict.estimators.coordinates import Latent
from retrodict.graph.graph import Graph, Site
from retrodict.inverse.factors import Factor
from retrodict.types import Values


@dataclass(frozen=True)
class Copies:
    """Where the copies of a factor lie in the arrays of its latents.

    Attributes:
        factor: which factor.
        sizes: of the axes of copies: time, if any, then plates.
        latents: what one copy draws.
        sites: the latents' sites.
        axes: for each latent, the axis of its array that each axis of copies runs along.
    """

    factor: Factor
    sizes: tuple[int, ...]
    latents: tuple[Latent, ...]
    sites: tuple[Site, ...]
    axes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(graph: Graph, factor: Factor) -> "Copies":
        """The copies of a factor of the graph's inverse."""
        sites = tuple(graph.sites[name] for name in factor.latents)
        axes = tuple(copy_axes(site, factor) for site in sites)
        latents = []
        for site, along in zip(sites, axes, strict=True):
            shape = tuple(n for axis, n in enumerate(site.shape) if axis not in along)
            latents.append(Latent(site.name, site.support, shape))
        sizes = tuple(sites[0].shape[axis] for axis in axes[0])
        return Copies(factor, sizes, tuple(latents), sites, axes)

    @property
    def number(self) -> int:
        """How many copies there are, in time as well."""
        return int(np.prod(self.sizes, dtype=int))

    @property
    def plate_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes along plates."""
        return self.sizes[int(self.factor.time) :]

    @property
    def plate_axes(self) -> tuple[tuple[int, ...], ...]:
        """The axes along plates, in the arrays of one step if the factor lies in time."""
        if not self.factor.time:
            return self.axes
        return tuple(tuple(axis - 1 for axis in along[1:]) for along in self.axes)

    def one(self, values: Values, index: Sequence[Int[Array, ""]]) -> dict[str, Array]:
        """The latents of one copy; `index` is along time, if any, and plates."""
        return self._take(values, self.axes, index)

    def one_of_step(self, values: Values, index: Sequence[Int[Array, ""]]) -> dict[str, Array]:
        """The latents of one copy, from the arrays of its step."""
        return self._take(values, self.plate_axes, index)

    def _take(
        self, values: Values, axes: Sequence[tuple[int, ...]], index: Sequence[Int[Array, ""]]
    ) -> dict[str, Array]:
        latents = {}
        for latent, site, along in zip(self.latents, self.sites, axes, strict=True):
            array = jnp.asarray(values[site.name])
            for copy_axis, axis in sorted(enumerate(along), key=lambda pair: -pair[1]):
                array = jnp.take(array, index[copy_axis], axis)
            latents[latent.name] = array
        return latents

    def to_step(self, x: Mapping[str, Array], *, cast: bool = True) -> dict[str, Array]:
        """Arrays of the sites, of one step if the factor lies in time, from those of all copies."""
        arrays = {}
        for latent, site, along in zip(self.latents, self.sites, self.plate_axes, strict=True):
            array = jnp.moveaxis(x[latent.name], range(len(along)), along)
            shape = site.shape[1:] if self.factor.time else site.shape
            arrays[site.name] = array.reshape(shape).astype(site.dtype if cast else array.dtype)
        return arrays

    def select(
        self, chosen: Bool[Array, "*copies"], first: Values, second: Values
    ) -> dict[str, Array]:
        """Arrays of the sites, from the first values where a copy is chosen, else the second."""
        arrays = {}
        for site, along in zip(self.sites, self.axes, strict=True):
            missing = [axis for axis in range(len(site.shape)) if axis not in along]
            ordered = jnp.transpose(chosen, list(map(int, np.argsort(along)))) if along else chosen
            mask = jnp.expand_dims(ordered, missing)
            arrays[site.name] = jnp.where(mask, first[site.name], second[site.name])
        return arrays

    def rows(self, values: Values) -> Float[Array, "*plates coordinates"]:
        """Entries of the latents by copy, from the arrays of one step."""
        parts = []
        for site, along in zip(self.sites, self.plate_axes, strict=True):
            moved = jnp.moveaxis(jnp.asarray(values[site.name], float), along, range(len(along)))
            parts.append(moved.reshape(*self.plate_sizes, -1))
        return jnp.concatenate(parts, -1)

    def from_rows(
        self, rows: Float[Array, "*plates coordinates"], *, cast: bool = True
    ) -> dict[str, Array]:
        """The inverse of `rows`; without `cast`, of the type of the rows."""
        x, start = {}, 0
        for latent in self.latents:
            stop = start + int(np.prod(latent.shape))
            x[latent.name] = rows[..., start:stop].reshape(*self.plate_sizes, *latent.shape)
            start = stop
        return self.to_step(x, cast=cast)


def copy_axes(site: Site, factor: Factor) -> tuple[int, ...]:
    """The axes of a site's array along which a factor has copies: time, if any, then plates."""
    plate_axes = site.axes[1:] if site.time else site.axes
    by_plate = dict(zip(site.plates, plate_axes, strict=True))
    return ((0,) if factor.time else ()) + tuple(by_plate[plate] for plate in factor.plates)


def over_copies(fn: Callable[..., Any], sizes: tuple[int, ...], *arrays: PyTree) -> Any:
    """A function of one copy, applied to all; axes of copies first.

    Args:
        fn: of an index, one number per axis, and the entries of `arrays`.
        sizes: of the axes of copies.
        arrays: trees of arrays with these axes first.
    """
    if not sizes:
        return fn((), *arrays)
    number = int(np.prod(sizes))
    index = jnp.unravel_index(jnp.arange(number), sizes)
    flat = jax.tree.map(lambda a: a.reshape(number, *a.shape[len(sizes) :]), arrays)
    result = jax.vmap(fn)(index, *flat)
    return jax.tree.map(lambda a: a.reshape(*sizes, *a.shape[1:]), result)
