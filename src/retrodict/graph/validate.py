"""Validation of a user's data against the model."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from numpyro.distributions import constraints

from retrodict.errors import DataError
from retrodict.graph.graph import Graph, Site
from retrodict.graph.loop_surface import stack_steps


def check_data(graph: Graph, data: Mapping[str, Any], *, many: bool = False) -> dict[str, Array]:
    """`validate_data`, as JAX arrays, with the sites of Python loops stacked."""
    valid = validate_data(graph.surface, data, many=many)
    arrays: dict[str, Array] = jax.device_put(stack_steps(graph, valid, axis=int(many)))
    return arrays


def validate_data(
    graph: Graph, data: Mapping[str, Any], *, many: bool = False
) -> dict[str, np.ndarray[Any, Any]]:
    """Copy observed values into NumPy arrays of the sites' shapes and types.

    NumPy arrays: passing them to a compiled program is faster than `jax.device_put`.

    Args:
        graph: the model's.
        data: site → NumPy or JAX array, number, or nested list.
        many: whether every array has a leading axis of data sets, of equal length.

    Raises:
        DataError: an unknown or missing site, a wrong shape, or a value that is not a number, not
            finite, or outside of the support.
    """
    if not isinstance(data, Mapping):
        raise DataError(
            f"data must be a dict of site → values, with the sites {_names(graph)}; found "
            f"{type(data).__name__}"
        )
    for name in data:
        if name not in graph.observed:
            finding = "it is a latent site" if name in graph.sites else "the model has no such site"
            raise DataError(
                f"data has '{name}', which is not an observed site: {finding}. Observed are "
                f"{_names(graph)}"
            )
    missing = [name for name in graph.named_observed if name not in data]
    if missing:
        raise DataError(
            f"data lacks site '{missing[0]}': expected {_names(graph)}, found "
            f"{', '.join(map(repr, data)) or 'nothing'}. Give values for every observed site"
        )
    arrays = {
        name: _validate_site(graph.sites[name], data[name], many)
        for name in graph.observed
        if name in data
    }
    numbers = {name: array.shape[0] for name, array in arrays.items()} if many else {}
    if len(set(numbers.values())) > 1:
        raise DataError(f"sites have different numbers of data sets: {numbers}")
    _check_shared_arguments(graph, arrays)
    for name in graph.constant_data.keys() - data.keys():
        value = _validate_site(graph.sites[name], graph.constant_data[name], False)
        leading = (next(iter(numbers.values()), 1),) if many else ()
        arrays[name] = np.broadcast_to(value, (*leading, *value.shape))
    return {name: arrays[name] for name in graph.observed}


def _check_shared_arguments(graph: Graph, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    for argument, site, dependents, value in graph.shared_arguments:
        if not np.array_equal(np.broadcast_to(value, arrays[site].shape), arrays[site]):
            also = ", ".join(f"'{name}'" for name in dependents)
            raise DataError(
                f"site '{site}': the data differ from what the model passes to it as obs, which is "
                f"computed from its argument '{argument}'; this argument also enters the density "
                f"of {also}. Pass the argument of this data set in model_args or model_kwargs of "
                f"infer, with one data set at a time; or, in the model, use the value that "
                f"numpyro.sample returns for '{site}' in place of the argument (for a series, in a "
                "scan that carries it), and call it without data"
            )


def _names(graph: Graph) -> str:
    return ", ".join(f"'{n}' {graph.sites[n].shape}" for n in graph.observed)


def _validate_site(site: Site, values: Any, many: bool) -> np.ndarray[Any, Any]:
    if isinstance(values, jax.Array):
        values = jax.device_get(values)
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(
            f"site '{site.name}': expected numbers of shape {_shape(site, many)}, found lists of "
            "unequal lengths"
        ) from error
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"site '{site.name}': expected numbers, found values of type {array.dtype} such as "
            f"{array.flat[0] if array.size else values!r}"
        )
    shape = array.shape[1:] if many else array.shape
    if shape != site.shape or (many and array.ndim == 0):
        more_axes = len(shape) > len(site.shape) and not site.time
        raise DataError(
            f"site '{site.name}': expected shape {_shape(site, many)}, found {array.shape}. If the "
            "model takes its sizes as arguments, pass them as model_args or model_kwargs"
            + (_MORE_AXES.format(name=site.name, shape=shape) if more_axes else "")
        )
    if site.mask is not None:
        array = np.where(site.mask, array, site.support.feasible_like(np.zeros(site.shape)))
    wrong = ~np.isfinite(array)
    if wrong.any():
        raise DataError(
            f"site '{site.name}': {_where(wrong)} is {array[wrong].flat[0]}. Data must be finite; "
            "mask missing values in the model"
        )
    discrete = np.issubdtype(np.dtype(site.dtype), np.integer)
    if discrete:
        wrong = array != np.round(array)
        if wrong.any():
            raise DataError(
                f"site '{site.name}': {_where(wrong)} is {array[wrong].flat[0]}, expected integers"
            )
        limit = np.iinfo(np.dtype(site.dtype)).max
        if array.size and np.abs(array).max() > limit:
            raise DataError(f"site '{site.name}': a value is beyond the largest integer, {limit}")
    array = array.astype(site.dtype)
    _check_support(site, array)
    return array


_MORE_AXES = (
    ". The data have more axes than the site has when the model is called without data: if each of "
    "their entries is an observation of the site, compile with observed={{'{name}': {shape}}}"
)


def _shape(site: Site, many: bool) -> str:
    return f"(data sets, {', '.join(map(str, site.shape))})" if many else str(site.shape)


def _check_support(site: Site, array: np.ndarray[Any, Any]) -> None:
    support = site.support
    if isinstance(support, constraints.dependent.__class__):
        return  # The support depends on other sites; the density decides.
    if isinstance(support, constraints.independent):
        support = support.base_constraint
    inside = np.asarray(support(array))  # Most constraints evaluate NumPy arrays with NumPy.
    if not inside.all():
        value = array[~inside].flat[0] if inside.shape == array.shape else "a value"
        raise DataError(
            f"site '{site.name}': {_where(~inside)} is {value}, outside the support {support} of "
            f"{site.distribution}"
        )


def _where(wrong: np.ndarray[Any, Any]) -> str:
    if wrong.ndim == 0:
        return "the value"
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"the value at {list(place)}"
