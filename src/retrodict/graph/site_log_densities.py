"""A model's graph in; the log densities of a few of its sites at a time, traced once, out.

To count the densities that a stage closes, a run of the model up to them would do, but in a model
of many stages that is to trace most of it again and again. Here all densities are traced once, and
for a few of them only those equations are taken that they depend on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal, Var
from jaxtyping import Array

from retrodict._xla.jit import shape_dtype
from retrodict._xla.reroll import apply
from retrodict.graph.graph import Graph
from retrodict.types import Values


class Slices:
    """Log densities of a model's sites, each a function of the values that it depends on."""

    def __init__(self, graph: Graph) -> None:
        def evaluate(values: Values) -> dict[str, Array]:
            found = graph.program.log_density(values)
            return {name: density.sum() for name, density in found.items()}

        shapes = {name: shape_dtype(site.shape, site.dtype) for name, site in graph.sites.items()}
        closed, names = jax.make_jaxpr(evaluate, return_shape=True)(shapes)
        jaxpr = closed.jaxpr
        self._eqns = jaxpr.eqns
        self._origin = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self._constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        # trees of dictionaries are flattened in the order of their keys
        self._inputs = dict(zip(jaxpr.invars, sorted(shapes), strict=True))
        self._outputs = dict(zip(sorted(names), jaxpr.outvars, strict=True))

    def of(self, names: Sequence[str]) -> tuple[set[str], Callable[[Values], dict[str, Array]]]:
        """The sites that some log densities depend on, and a function of their values."""
        wanted = [self._outputs[name] for name in names]
        places: set[int] = set()
        inputs: dict[Var, str] = {}
        pending: list[Any] = list(wanted)
        while pending:
            atom = pending.pop()
            if isinstance(atom, Literal) or atom in self._constants:
                continue
            if atom in self._inputs:
                inputs[atom] = self._inputs[atom]
            elif self._origin[atom] not in places:
                places.add(self._origin[atom])
                pending.extend(self._eqns[self._origin[atom]].invars)

        def evaluate(values: Values) -> dict[str, Array]:
            known: dict[Any, Any] = {var: values[name] for var, name in inputs.items()}

            def look_up(atom: Any) -> Any:
                if isinstance(atom, Literal):
                    return atom.val
                return self._constants[atom] if atom in self._constants else known[atom]

            for place in sorted(places):
                eqn = self._eqns[place]
                known.update(
                    zip(eqn.outvars, apply(eqn, list(map(look_up, eqn.invars))), strict=True)
                )
            return dict(zip(names, map(look_up, wanted), strict=True))

        return set(inputs.values()), evaluate
