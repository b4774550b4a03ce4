"""Record a model as equations: every site's distribution as a function of the sites before it.

JAX traces one run of the model with the values of all sample sites as inputs. The recording has the
parameters of each site's distribution, which are the leaves of a pytree, and the equations that
compute them. An equation belongs to the first site that needs its result.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import JaxprEqn, Literal, Var
from jaxtyping import Array
from numpyro.distributions.util import lazy_property

from retrodict.graph.evaluation import ModelStructure
from retrodict.graph.program import Program


@dataclass(frozen=True, eq=False)
class ConcreteLeaf:
    """A parameter that is a plain number or array of the model's."""

    value: Any


Atom: TypeAlias = Var | Literal | ConcreteLeaf


@dataclass(frozen=True)
class Statement:
    """A sample or deterministic site of a recorded model.

    Attributes:
        name: of the site.
        leaves: the parameters of the distribution, or the value of a deterministic site.
        tree: the structure that the parameters are the leaves of; None of a deterministic site.
        sample_shape: as it was passed to `numpyro.sample`.
        frames: NumPyro's records of the plates around the site.
        value: the variable that stands for the value of a sample site in the equations.
        observed: whether the site will be data.
    """

    name: str
    leaves: tuple[Atom, ...]
    tree: Any = None
    sample_shape: tuple[int, ...] = ()
    frames: tuple[Any, ...] = ()
    value: Var | None = None
    observed: bool = False


@dataclass(frozen=True)
class Recording:
    """A model as statements in program order, and the equations between them.

    Attributes:
        statements: the sites.
        eqns: all equations, in order.
        constants: arrays that the model closes over.
        origin: the number of the equation that a variable is a result of.
        owner: for each equation, the first statement that needs it; −1 if none does.
    """

    statements: tuple[Statement, ...]
    eqns: tuple[JaxprEqn, ...]
    constants: Mapping[Var, Array]
    origin: Mapping[Var, int]
    owner: Sequence[int]


def record(program: Program, shapes: Mapping[str, Any]) -> Recording | None:
    """Record a model without scans; None if a distribution is more than a pytree of arrays.

    Args:
        program: the model with its arguments.
        shapes: shape and type of every sample site's value.
    """
    structure = ModelStructure()
    atoms: list[Any] = []

    def run(values: dict[str, Array]) -> list[Array]:
        deterministic = program.run(None, values, structure, only=()).deterministic
        for name in structure.order:
            site = structure.sites.get(name)
            atoms.extend([deterministic[name]] if site is None else jax.tree.leaves(site.fn))
        return [leaf for leaf in atoms if isinstance(leaf, jax.core.Tracer)]

    closed = jax.make_jaxpr(run)(dict(shapes))
    jaxpr, results = closed.jaxpr, iter(closed.jaxpr.outvars)
    for place, leaf in enumerate(atoms):
        is_traced = isinstance(leaf, jax.core.Tracer)
        if not is_traced and np.asarray(leaf).dtype == object:
            return None
        atoms[place] = next(results) if is_traced else ConcreteLeaf(leaf)
    if not all(_is_rebuilt(site.fn) for site in structure.sites.values()):
        return None
    values = dict(zip(sorted(shapes), jaxpr.invars, strict=True))  # as JAX flattens a dict
    statements, leaves = [], iter(atoms)
    for name in structure.order:
        site = structure.sites.get(name)
        if site is None:
            statements.append(Statement(name, (next(leaves),)))
            continue
        tree: Any = jax.tree.structure(site.fn)
        parameters = tuple(itertools.islice(leaves, tree.num_leaves))
        plates, observed = (site.sample_shape, site.frames), name in program.observed
        statements.append(Statement(name, parameters, tree, *plates, values[name], observed))
    origin = {var: number for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    return Recording(
        tuple(statements),
        tuple(jaxpr.eqns),
        dict(zip(jaxpr.constvars, closed.consts, strict=True)),
        origin,
        _owners(jaxpr.eqns, origin, statements),
    )


def _is_rebuilt(fn: dist.Distribution) -> bool:
    """Whether a distribution rebuilt from its leaves has all attributes; a user's may not."""
    leaves, tree = jax.tree.flatten(fn)
    rebuilt = vars(jax.tree.unflatten(tree, leaves))
    for name, value in vars(fn).items():
        lazy = isinstance(getattr(type(fn), name, None), lazy_property)
        # `reparametrized_params` is not needed again.
        if name not in rebuilt and not lazy and name != "reparametrized_params":
            return False
        if isinstance(value, dist.Distribution) and not _is_rebuilt(value):
            return False
    return True


def _owners(
    eqns: Sequence[JaxprEqn], origin: Mapping[Var, int], statements: Sequence[Statement]
) -> list[int]:
    owner = [-1] * len(eqns)
    for number, statement in enumerate(statements):
        pending = list(variables(statement.leaves))
        while pending:
            place = origin.get(pending.pop())
            if place is not None and owner[place] < 0:
                owner[place] = number
                pending += variables(eqns[place].invars)
    return owner


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of an operand."""
    aval: Any = atom.value if isinstance(atom, ConcreteLeaf) else atom.aval
    return np.shape(aval)


def variables(atoms: Iterable[Any]) -> Iterable[Var]:
    """The variables among operands."""
    return (atom for atom in atoms if isinstance(atom, Var))


def apply(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Array]:
    """The results of an equation; rules for its derivatives stay in force."""
    primitive: Any = eqn.primitive
    parameters, functions = primitive.get_bind_params(eqn.params), ()
    if isinstance(parameters, tuple):  # before JAX 0.10
        functions, parameters = parameters
    results = primitive.bind(*functions, *operands, **parameters)
    return results if primitive.multiple_results else [results]
