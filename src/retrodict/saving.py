"""A compiled model in, one file out; and back, with the model's function given again.

The file (see `retrodict.artefact`) holds a description of the graph, the options, the history and
the weights with their input scalings; the model itself stays code. Loading traces the model given
and compares graphs, builds networks of the same shape, and puts the weights in: nothing of the file
is executed.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from retrodict import artefact
from retrodict.compiled import Compiled, History
from retrodict.estimators.conditional import MADE, Network
from retrodict.estimators.encoders import Embedding
from retrodict.graph.graph import Graph
from retrodict.graph.program import Program
from retrodict.graph.trace import trace
from retrodict.inference.methods import Plan
from retrodict.inverse.inverse import invert
from retrodict.proposal.linear_guide import Facts
from retrodict.proposal.proposal import Proposal
from retrodict.training.history import NetworkHistory
from retrodict.training.simulate import Rejected


class WrongModel(ValueError):  # noqa: N818 (named beside DamagedFile)
    """The model given is not the one that was compiled; the message says where they differ."""


_CONTENTS = {
    *("model", "model_args", "model_kwargs", "graph", "method"),
    *("estimator", "networks", "guides", "plan", "history"),
}


def save(
    compiled: Compiled, path: str | Path, origin: Mapping[str, str | None] | None = None
) -> Path:
    """Write a compiled model to one file; see `load`.

    `origin` says where the model can be found again (module, name and file), where that is known
    better than from the function itself.
    """
    program = compiled.graph.program
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    header = {
        "model": dict(origin or _origin(program.model)),
        "model_args": _packed(list(program.args), "model_args", arrays),
        "model_kwargs": _packed(dict(program.kwargs), "model_kwargs", arrays),
        "graph": describe(compiled.graph),
        "method": compiled.inverse.method,
        "estimator": dataclasses.asdict(compiled.estimator),
        "networks": list(compiled.networks),
        "guides": {n: list(map(list, facts)) for n, facts in compiled.proposal.facts.items()},
        "plan": dataclasses.asdict(compiled.plan),
        "history": {name: _written(h) for name, h in compiled.history.networks.items()},
    }
    for number, network in enumerate(compiled.networks.values()):
        arrays |= {f"network {number}:{name}": leaf for name, leaf in _leaves(network).items()}
    return artefact.write(path, header, arrays)


def load(path: str | Path, model: Callable[..., Any]) -> Compiled:
    """Read a compiled model from a file that `Compiled.save` wrote.

    Args:
        path: the file.
        model: the model that was compiled; its arguments are in the file.

    Raises:
        DamagedFile: the file is not whole, not ours, or made with another precision of JAX.
        NewerFormat: a newer version of retrodict made it.
        WrongModel: the model given has another graph.
    """
    header, arrays = artefact.read(path)
    if missing := _CONTENTS - set(header):
        raise artefact.DamagedFile(
            f"{path} holds no compiled model: its header has no {', '.join(sorted(missing))}. Load "
            "a file that Compiled.save wrote"
        )
    args = tuple(_unpacked(header["model_args"], arrays))
    kwargs = _unpacked(header["model_kwargs"], arrays)
    expected = header["graph"]["sites"]
    _check_sites(Program(model, args, kwargs, frozenset(expected)), expected, path)
    observed = [name for name, site in expected.items() if site["observed"]]
    graph = trace(model, observed, model_args=args, model_kwargs=kwargs)
    _compare(describe(graph), header["graph"], path)
    facts = {name: Facts(*map(tuple, found)) for name, found in header["guides"].items()}
    proposal = Proposal.of(invert(graph, header["method"]), facts)
    estimator = _estimator(header["estimator"])
    shared = proposal.networks()
    if list(shared) != header["networks"]:
        raise WrongModel(
            f"{path}: this version of retrodict turns the model round into the networks "
            f"{list(shared)}, the file has {header['networks']}. Compile the model again"
        )
    networks = {}
    for number, (name, assemblies) in enumerate(shared.items()):
        blank = proposal.build(estimator, jax.random.key(0), assemblies)
        prefix = f"network {number}:"
        stored = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        networks[name] = _filled(blank, stored, path)
    history = History({name: _read(h) for name, h in header["history"].items()})
    return Compiled(proposal, networks, estimator, history, Plan.read(header["plan"]))


def _check_sites(program: Program, expected: Mapping[str, Any], path: Any) -> None:
    """Refuse a model without the sites of the file, before any of them is taken for observed."""
    try:
        _, seen, _ = program.inspect()
    except Exception as error:
        # The model is the caller's code, and another than expected: it may raise anything.
        raise WrongModel(
            f"{path} was made from another model: the one given cannot be called with the "
            f"arguments in the file, {error}. Load it with the model it was compiled from"
        ) from error
    if set(seen) != set(expected):
        raise WrongModel(
            f"{path} was made from another model: it has the sites {', '.join(expected)}; the "
            f"model given has {', '.join(seen)}. Load it with the model it was compiled from"
        )


def describe(graph: Graph) -> dict[str, Any]:
    """What two graphs must have in common for their networks to be exchangeable, as plain data."""
    return {
        "sites": {
            name: {
                "distribution": site.distribution,
                "shape": list(site.shape),
                "plates": list(site.plates),
                "support": _support(site.support),
                "observed": site.observed,
                "time": site.time,
                "unlike": list(site.unlike),
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
        "carries": [[c.name, list(c.shape), list(c.plates)] for c in graph.carries],
    }


def _support(support: Any) -> str:
    bounds = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(support)]
    return f"{type(support).__name__} {jax.tree.structure(support)} {bounds}"[:2000]


def _compare(found: Mapping[str, Any], expected: Mapping[str, Any], path: Any) -> None:
    remedy = "Load it with the model it was compiled from, called with the same arguments"
    for name, site in expected["sites"].items():
        for what, value in site.items():
            if found["sites"][name][what] != value:
                raise WrongModel(
                    f"{path} was made from another model: the {what} of site '{name}' was {value}, "
                    f"in the model given it is {found['sites'][name][what]}. {remedy}"
                )
    old = {(e["parent"], e["child"]): e for e in expected["edges"]}
    new = {(e["parent"], e["child"]): e for e in found["edges"]}
    for edge in {**old, **new}:
        if old.get(edge) != new.get(edge):
            raise WrongModel(
                f"{path} was made from another model: how '{edge[1]}' depends on '{edge[0]}' has "
                f"changed. {remedy}"
            )
    if expected["carries"] != found["carries"]:
        raise WrongModel(f"{path} was made from another model: a scan's carry differs. {remedy}")


def _origin(model: Callable[..., Any]) -> dict[str, str | None]:
    code = getattr(model, "__code__", None)
    return {
        "module": getattr(model, "__module__", None),
        "name": getattr(model, "__qualname__", type(model).__name__),
        "file": None if code is None else Path(code.co_filename).name,
    }


def _packed(value: Any, where: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Arguments of the model as JSON, with arrays put aside."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise TypeError(f"cannot save {where}: it is a random key. Give its numbers, from key_data")
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        arrays[where] = np.asarray(value)
        # A model may use methods that only one kind of array has.
        return {"jax array" if isinstance(value, jax.Array) else "array": where}
    if isinstance(value, list | tuple):
        items = [_packed(v, f"{where}[{i}]", arrays) for i, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {k: _packed(v, f"{where}.{k}", arrays) for k, v in value.items()}}
    raise TypeError(
        f"cannot save {where}: expected numbers, strings, arrays, lists, tuples or dicts of these, "
        f"found {type(value).__name__}. Bind it to the model with functools.partial instead"
    )


def _unpacked(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, arrays) for item in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "array":
            return arrays[content][()]  # a scalar, if it has no axes
        if kind == "jax array":
            return jnp.asarray(arrays[content])
        if kind == "tuple":
            return tuple(_unpacked(item, arrays) for item in content)
        return {k: _unpacked(v, arrays) for k, v in content.items()}
    return value


def _leaves(network: Network) -> dict[str, np.ndarray[Any, Any]]:
    found, _ = jax.tree_util.tree_flatten_with_path(eqx.filter(network, eqx.is_array))
    return {jax.tree_util.keystr(place): np.asarray(leaf) for place, leaf in found}


def _filled(network: Network, arrays: Mapping[str, np.ndarray[Any, Any]], path: Any) -> Network:
    """The network with the weights of the file."""
    blank, rest = eqx.partition(network, eqx.is_array)
    places, tree = jax.tree_util.tree_flatten_with_path(blank)
    leaves = []
    for place, leaf in places:
        name = jax.tree_util.keystr(place)
        stored = arrays.get(name)
        if stored is None or stored.shape != leaf.shape:
            found = "nothing" if stored is None else f"shape {stored.shape}"
            raise artefact.DamagedFile(
                f"{path}: the weights {name} should have shape {leaf.shape}, found {found}. The "
                "file was made by a version of retrodict with other networks: compile again"
            )
        if stored.dtype != leaf.dtype:
            raise artefact.DamagedFile(
                f"{path}: the weights {name} are {stored.dtype}, and JAX now makes {leaf.dtype}. "
                "Set jax_enable_x64 as it was when the file was saved"
            )
        leaves.append(jnp.asarray(stored))
    filled: Network = eqx.combine(jax.tree.unflatten(tree, leaves), rest)
    return filled


def _estimator(fields: dict[str, Any]) -> MADE:
    def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

    return MADE(**tuples(fields) | {"embedding": Embedding(**tuples(fields["embedding"]))})


def _written(history: NetworkHistory) -> dict[str, Any]:
    plain = dataclasses.asdict(history)
    plain["rejected"] = {
        "simulated": history.rejected.simulated,
        "dropped": [[site, why, n] for (site, why), n in history.rejected.dropped.items()],
    }
    return plain


def _read(plain: dict[str, Any]) -> NetworkHistory:
    dropped = Counter({(site, why): n for site, why, n in plain["rejected"]["dropped"]})
    rejected = Rejected(plain["rejected"]["simulated"], dropped)
    return NetworkHistory(**plain | {"rejected": rejected})
