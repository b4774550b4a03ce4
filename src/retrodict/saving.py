"""Write the parts of a compiled model to one file, and read them again.

The file (`retrodict.artefact` defines its layout) holds a description of the dependency graph, the
model's arguments, the options of the estimator, the training history, and the weights with their
input scalings. It does not hold the model's code: reading traces the model that the caller passes,
compares its graph with the description, builds networks of the same shapes and fills in the
weights. Nothing in the file is executed.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from retrodict import artefact
from retrodict.estimators.conditional import MADE
from retrodict.estimators.encoders import Embedding
from retrodict.estimators.estimator import Estimator
from retrodict.graph.graph import Graph
from retrodict.graph.program import Program
from retrodict.graph.trace import trace
from retrodict.inference.planning import Plan
from retrodict.inverse.inverse import invert
from retrodict.proposal.model_knowledge import FamilyFacts, GuideFacts
from retrodict.proposal.proposal import Proposal
from retrodict.training.history import NetworkHistory
from retrodict.training.rejections import RejectionCounts

_HEADER_KEYS = {
    *("model", "model_args", "model_kwargs", "graph", "data_shapes", "method"),
    *("estimator", "networks", "facts", "plan", "history"),
}


class WrongModel(ValueError):  # noqa: N818 (public name, in line with DamagedFile)
    """The model is not the one that was compiled. The message names the first difference."""


class CompiledParts(NamedTuple):
    """The parts of a compiled model that its file holds.

    Attributes:
        proposal: the model's graph, its inverse and the factors' proposals.
        networks: the trained networks, by name.
        estimator: the size of the networks.
        histories: the training history of each network, by name.
        plan: the method that `auto` uses.
    """

    proposal: Proposal
    networks: Mapping[str, Estimator]
    estimator: MADE
    histories: Mapping[str, NetworkHistory]
    plan: Plan


def write_model(
    path: str | Path, parts: CompiledParts, origin: Mapping[str, str | None] | None = None
) -> Path:
    """Write the parts of a compiled model to a file.

    `origin` gives the module, name and file of the model. By default they are taken from the
    model's function.
    """
    program = parts.proposal.graph.surface.program
    arrays: dict[str, NDArray[Any]] = {}
    header = {
        "model": dict(origin or _origin(program.model)),
        "model_args": _encode_argument(list(program.args), "model_args", arrays),
        "model_kwargs": _encode_argument(dict(program.kwargs), "model_kwargs", arrays),
        "graph": _describe(parts.proposal.graph.surface),
        "data_shapes": dict(program.data_shapes),
        "method": parts.proposal.inverse.method,
        "estimator": dataclasses.asdict(parts.estimator),
        "networks": list(parts.networks),
        "facts": {name: facts._asdict() for name, facts in parts.proposal.facts.items()},
        "plan": dataclasses.asdict(parts.plan),
        "history": {name: _encode_history(h) for name, h in parts.histories.items()},
    }
    for number, network in enumerate(parts.networks.values()):
        weights = _named_weights(network)
        arrays |= {f"network {number}:{name}": weight for name, weight in weights.items()}
    return artefact.write(path, header, arrays)


def read_model(path: str | Path, model: Callable[..., Any]) -> CompiledParts:
    """Read the parts of a compiled model from a file that `write_model` wrote.

    `retrodict.load` documents the errors.
    """
    header, arrays = artefact.read(path)
    if missing := _HEADER_KEYS - set(header):
        raise artefact.DamagedFile(
            f"{path} does not hold a compiled model: its header lacks "
            f"{', '.join(sorted(missing))}. Load a file that Compiled.save wrote"
        )
    facts = {
        name: (GuideFacts if "order" in fields else FamilyFacts)(**_with_tuples(fields))
        for name, fields in header["facts"].items()
    }
    proposal = Proposal.of(invert(_trace(header, arrays, model, path), header["method"]), facts)
    estimator = _decode_estimator(header["estimator"])
    structures_by_network = proposal.networks()
    if list(structures_by_network) != header["networks"]:
        raise WrongModel(
            f"{path} holds the networks {header['networks']}, but this version of retrodict "
            f"inverts the model into the networks {list(structures_by_network)}. Compile the model "
            "again"
        )
    networks = {}
    for number, (name, structures) in enumerate(structures_by_network.items()):
        untrained = proposal.build(estimator, jax.random.key(0), structures)
        prefix = f"network {number}:"
        weights = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        networks[name] = _set_weights(untrained, weights, path)
    histories = {name: _decode_history(fields) for name, fields in header["history"].items()}
    return CompiledParts(proposal, networks, estimator, histories, Plan.read(header["plan"]))


def _trace(
    header: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    model: Callable[..., Any],
    path: str | Path,
) -> Graph:
    """Trace the model with the arguments in the file and check that its graph is the same."""
    args = tuple(_decode_argument(header["model_args"], arrays))
    kwargs = _decode_argument(header["model_kwargs"], arrays)
    sites = header["graph"]["sites"]
    # Before tracing, which would refuse an observed site that the model lacks as a user's mistake.
    shapes = _with_tuples(header["data_shapes"])
    _check_sites(Program(model, args, kwargs, frozenset(sites), shapes), sites, path)
    observed = {
        name: shapes.get(name)
        for name, site in sites.items()
        if site["observed"] and not site["constant"]
    }
    graph = trace(model, observed, model_args=args, model_kwargs=kwargs)
    _check_graph(_describe(graph), header["graph"], path)
    return graph


def _check_sites(program: Program, expected: Mapping[str, Any], path: str | Path) -> None:
    try:
        sites = program.inspect()[1].sites
    except Exception as error:
        # The model is the caller's code and may not be the expected one: it may raise anything.
        raise WrongModel(
            f"{path} was made from another model: this one cannot be called with the arguments in "
            f"the file, {error}. Load it with the model it was compiled from"
        ) from error
    if set(sites) != set(expected):
        raise WrongModel(
            f"{path} was made from another model, with the sites {', '.join(expected)}; this model "
            f"has {', '.join(sites)}. Load it with the model it was compiled from"
        )


def _describe(graph: Graph) -> dict[str, Any]:
    """Describe what two graphs must have in common for their networks to be exchangeable."""
    return {
        "sites": {
            name: {
                "distribution": site.distribution,
                "shape": list(site.shape),
                "plates": list(site.plates),
                "support": _describe_support(site.support),
                "observed": site.observed,
                "constant": name in graph.constant_data,
                "time": site.time,
                "unlike": list(site.heterogeneous_axes),
            }
            for name, site in graph.sites.items()
        },
        "edges": [
            {
                "parent": edge.parent,
                "child": edge.child,
                "kinds": sorted(edge.kinds()),
                "relations": sorted(repr(t) for t in edge.relation.terms if len(repr(t)) < 2000),
            }
            for edge in graph.edges
        ],
        "carries": [[*c.key, list(c.shape), list(c.plates)] for c in graph.carries],
    }


def _describe_support(support: Any) -> str:
    bounds = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(support)]
    return f"{type(support).__name__} {jax.tree.structure(support)} {bounds}"[:2000]


def _check_graph(actual: Mapping[str, Any], expected: Mapping[str, Any], path: str | Path) -> None:
    remedy = "Load it with the model it was compiled from, called with the same arguments"
    for name, site in expected["sites"].items():
        for attribute, value in site.items():
            if actual["sites"][name][attribute] != value:
                raise WrongModel(
                    f"{path} was made from another model: the {attribute} of site '{name}' was "
                    f"{value}, in this model it is {actual['sites'][name][attribute]}. {remedy}"
                )
    expected_edges = {(edge["parent"], edge["child"]): edge for edge in expected["edges"]}
    actual_edges = {(edge["parent"], edge["child"]): edge for edge in actual["edges"]}
    for parent, child in {**expected_edges, **actual_edges}:
        if expected_edges.get((parent, child)) != actual_edges.get((parent, child)):
            raise WrongModel(
                f"{path} was made from another model: the dependence of '{child}' on '{parent}' "
                f"differs. {remedy}"
            )
    if expected["carries"] != actual["carries"]:
        raise WrongModel(f"{path} was made from another model: a scan's carry differs. {remedy}")


def _origin(model: Callable[..., Any]) -> dict[str, str | None]:
    code = getattr(model, "__code__", None)
    return {
        "module": getattr(model, "__module__", None),
        "name": getattr(model, "__qualname__", type(model).__name__),
        "file": None if code is None else Path(code.co_filename).name,
    }


def _encode_argument(value: Any, where: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """Encode an argument of the model as JSON; its arrays are added to `arrays`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"cannot save {where}: it is a random key. Pass jax.random.key_data of it instead"
        )
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        arrays[where] = np.asarray(value)
        # A model may use methods that only one of the two array types has.
        return {"jax array" if isinstance(value, jax.Array) else "array": where}
    if isinstance(value, list | tuple):
        items = [_encode_argument(v, f"{where}[{i}]", arrays) for i, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {k: _encode_argument(v, f"{where}.{k}", arrays) for k, v in value.items()}}
    raise TypeError(
        f"cannot save {where}: expected numbers, strings, arrays, lists, tuples or dicts of these, "
        f"found {type(value).__name__}. Bind it to the model with functools.partial instead"
    )


def _decode_argument(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return [_decode_argument(item, arrays) for item in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "array":
            return arrays[content][()]  # turns an array without axes into a NumPy scalar
        if kind == "jax array":
            return jnp.asarray(arrays[content])
        if kind == "tuple":
            return tuple(_decode_argument(item, arrays) for item in content)
        return {k: _decode_argument(v, arrays) for k, v in content.items()}
    return value


def _named_weights(network: Estimator) -> dict[str, NDArray[Any]]:
    """Return the network's arrays, named by their paths in its pytree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(eqx.filter(network, eqx.is_array))
    return {jax.tree_util.keystr(key_path): np.asarray(leaf) for key_path, leaf in leaves}


def _set_weights(
    network: Estimator, weights: Mapping[str, NDArray[Any]], path: str | Path
) -> Estimator:
    """Return the network with its arrays replaced by those of the file."""
    untrained, static = eqx.partition(network, eqx.is_array)
    leaves, tree = jax.tree_util.tree_flatten_with_path(untrained)
    values = []
    for key_path, leaf in leaves:
        name = jax.tree_util.keystr(key_path)
        value = weights.get(name)
        if value is None or value.shape != leaf.shape:
            finding = "nothing" if value is None else f"shape {value.shape}"
            raise artefact.DamagedFile(
                f"{path}: expected weights {name} of shape {leaf.shape}, found {finding}. The file "
                "was made by a version of retrodict with other networks: compile again"
            )
        if value.dtype != leaf.dtype:
            raise artefact.DamagedFile(
                f"{path}: the weights {name} are {value.dtype}, but JAX is set to {leaf.dtype}. "
                "Set jax_enable_x64 as it was when the file was saved"
            )
        values.append(jnp.asarray(value))
    trained: Estimator = eqx.combine(jax.tree.unflatten(tree, values), static)
    return trained


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where the library has tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def _decode_estimator(fields: dict[str, Any]) -> MADE:
    embedding = Embedding(**_with_tuples(fields["embedding"]))
    return MADE(**_with_tuples(fields) | {"embedding": embedding})


def _encode_history(history: NetworkHistory) -> dict[str, Any]:
    fields = dataclasses.asdict(history)
    fields["rejected"] = {
        "simulated": history.rejected.simulated,
        "dropped": [[site, why, n] for (site, why), n in history.rejected.dropped.items()],
    }
    return fields


def _decode_history(fields: dict[str, Any]) -> NetworkHistory:
    dropped = Counter({(site, why): n for site, why, n in fields["rejected"]["dropped"]})
    rejected = RejectionCounts(fields["rejected"]["simulated"], dropped)
    return NetworkHistory(**fields | {"rejected": rejected})
