"""Values that a model itself passes to its sites by `obs=`, and the arguments they come from.

Data of a compiled model are given by site, not through `obs=`. A site that is not named as observed
but has a constant `obs=` is always observed at that value. A model with an `obs=` that depends on a
latent site cannot be simulated. Data that also enter other densities through an argument must agree
with that argument.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from retrodict.errors import UnsupportedModel
from retrodict.graph.dependence import Abstract
from retrodict.graph.evaluation import Evaluation, ModelStructure
from retrodict.graph.jaxpr_dependence import dependence_of
from retrodict.graph.program import Program


class ModelInput(NamedTuple):
    """An input of a model: the value of a site, or an argument."""

    kind: Literal["site", "argument"]
    name: str


class SharedArgument(NamedTuple):
    """An argument of the model that is data of a site and enters densities besides.

    Attributes:
        argument: its name.
        site: the observed site whose `obs=` depends on it.
        dependents: the sites whose densities depend on it.
        value: of the site, as the model computes it from the argument.
    """

    argument: str
    site: str
    dependents: tuple[str, ...]
    value: NDArray[Any]


def constant_data(program: Program, structure: ModelStructure) -> dict[str, NDArray[Any]]:
    """Values of the sites that are not named as observed and have a constant `obs=`.

    Raises:
        UnsupportedModel: a site's `obs=` depends on a latent site, or on an observed one while the
            site itself is not named as observed.
    """
    names = [name for name, site in structure.sites.items() if site.has_obs]
    if not names:
        return {}
    obs_values = _dependence(program, structure, {}, lambda run: run.obs_values)
    constant: list[str] = []
    for name in names:
        parents = [source.name for source in _inputs([obs_values[name]])]
        latents = [p for p in parents if p not in program.observed and p not in constant]
        if latents:
            raise UnsupportedModel(
                f"site '{name}' is observed at a value that depends on the latent site "
                f"'{latents[0]}' (obs=…), so the model is no joint distribution that can be "
                f"simulated. Pass data as obs, or write the relation in the distribution of "
                f"'{latents[0]}' or '{name}'; to record a value use numpyro.deterministic"
            )
        if name in program.observed:
            continue
        if parents:
            raise UnsupportedModel(
                f"site '{name}' is observed at a value that depends on the site '{parents[0]}' "
                f"(obs=…), but is not among the observed sites. Name '{name}' in `observed`"
            )
        constant.append(name)
    return _values(program, structure, constant)


def shared_arguments(program: Program, structure: ModelStructure) -> tuple[SharedArgument, ...]:
    """The arguments that the model was called with that are data and enter densities besides.

    Raises:
        UnsupportedModel: an argument that the model was called without would be one of these.
    """
    _check_absent_arguments(program, structure)
    if not any(site.has_obs for site in structure.sites.values()):
        return ()
    leaves = {key: leaf for key, leaf in _arguments(program).items() if _is_numeric(leaf)}
    shared = []
    for argument, site, dependents in _shared(program, structure, leaves):
        value = _values(program, structure, [site])[site]
        shared.append(SharedArgument(argument, site, dependents, value))
    return tuple(shared)


def _check_absent_arguments(program: Program, structure: ModelStructure) -> None:
    """Refuse a model that, called with data, would use them in densities too."""
    absent = [name for name, value in _parameters(program).items() if value is None]
    observed = [name for name in structure.sites if name in program.observed]
    for parameter in absent:
        same_name = [parameter] if parameter in observed else observed
        shapes = Counter(structure.shapes[name] for name in same_name)
        stacked = [  # the data of a Python loop over numbered sites
            shape.update(shape=(number, *shape.shape))
            for shape, number in shapes.items()
            if number > 1
        ]
        for shape in [*shapes, *stacked]:
            for argument, site, dependents in _shared(program, structure, {parameter: shape}):
                raise UnsupportedModel(
                    f"the argument '{argument}' of the model is the data of site '{site}' (obs=…) "
                    f"and also enters the density of {_sites(dependents)}. Data that are simulated "
                    f"for site '{site}' would not enter there. Use the value that numpyro.sample "
                    f"returns for site '{site}' in place of the argument; a series that depends on "
                    "its own past is a scan that carries this value"
                )


def _sites(names: Iterable[str]) -> str:
    return ", ".join(f"site '{name}'" for name in names)


def _shared(
    program: Program, structure: ModelStructure, arguments: Mapping[str, Any]
) -> list[tuple[str, str, tuple[str, ...]]]:
    """Argument, observed site and dependent sites, for the arguments that enter both."""
    if not arguments:
        return []
    try:
        obs_values = _dependence(program, structure, arguments, lambda run: run.obs_values, ())
        if not any(i.kind == "argument" for i in _inputs(obs_values.values())):
            return []
        densities = _dependence(program, structure, arguments, lambda run: run.log_density)
    except UnsupportedModel:
        raise
    except Exception:
        # Python control flow or NumPy may need the value of an argument: try the others alone.
        alone = [{name: leaf} for name, leaf in arguments.items()] if len(arguments) > 1 else []
        return [entry for each in alone for entry in _shared(program, structure, each)]
    shared = []
    for site, abstract in obs_values.items():
        for source in _inputs([abstract]):
            dependents = [name for name, d in densities.items() if source in _inputs([d])]
            if source.kind == "argument" and site in program.observed and dependents:
                shared.append((source.name, site, tuple(dependents)))
    return shared


def _dependence(
    program: Program,
    structure: ModelStructure,
    arguments: Mapping[str, Any],
    result: Callable[[Evaluation], Mapping[str, Any]],
    only: tuple[str, ...] | None = None,
) -> Mapping[str, Abstract]:
    """The dependence of a run's results on the values of sites and on arguments."""
    inputs = {ModelInput("site", name): shape for name, shape in structure.shapes.items()}
    inputs |= {ModelInput("argument", name): leaf for name, leaf in arguments.items()}

    def evaluate(values: Mapping[ModelInput, Any]) -> Mapping[str, Any]:
        sites = {key.name: value for key, value in values.items() if key.kind == "site"}
        called = {key.name: value for key, value in values.items() if key.kind == "argument"}
        return result(_with_arguments(program, called).run(None, sites, only=only))

    dependence: Mapping[str, Abstract] = dependence_of(evaluate, inputs)
    return dependence


def _inputs(results: Iterable[Abstract]) -> list[ModelInput]:
    sources: Iterable[Hashable] = (s for each in results for s in each.dependence.sources)
    return [source for source in sources if isinstance(source, ModelInput)]


def _values(
    program: Program, structure: ModelStructure, names: Iterable[str]
) -> dict[str, NDArray[Any]]:
    """The `obs=` of sites where it depends on no other site, with the sites' shapes and types."""

    chosen = list(names)
    values = program.constant_results(structure, lambda run: run.obs_values) if chosen else {}
    shapes = {name: structure.shapes[name] for name in chosen}
    return {
        name: np.broadcast_to(values[name], shape.shape).astype(shape.dtype)
        for name, shape in shapes.items()
    }


def _parameters(program: Program) -> dict[str, Any]:
    """The model's arguments by the names of its parameters; empty if it has no signature."""
    try:
        bound = inspect.signature(program.model).bind(*program.args, **program.kwargs)
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    return dict(bound.arguments)


def _arguments(program: Program) -> dict[str, Any]:
    """The leaves of the model's arguments, by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(_parameters(program))
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: Any) -> str:
    return f"{path[0].key}{jax.tree_util.keystr(path[1:])}"


def _is_numeric(leaf: Any) -> bool:
    """Whether an argument may be data: an array or a real number, not a size or an option."""
    return isinstance(leaf, np.ndarray | np.generic | jax.Array | float) and (
        np.asarray(leaf).dtype.kind in "biuf"
    )


def _with_arguments(program: Program, values: Mapping[str, Any]) -> Program:
    """The program with some leaves of its arguments replaced."""
    if not values:
        return program
    parameters = jax.tree_util.tree_map_with_path(
        lambda path, leaf: values.get(_name(path), leaf), _parameters(program)
    )
    parameters |= {name: value for name, value in values.items() if name in parameters}
    bound = inspect.signature(program.model).bind_partial()
    bound.arguments.update(parameters)
    return replace(program, args=bound.args, kwargs=bound.kwargs)
