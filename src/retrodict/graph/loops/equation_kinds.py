"""Decide whether two equations of a traced function compute the same function of their operands."""

from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

# JAX makes new objects for derivative and batching rules at every call of a function.
_RULES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "rule"})
_BOUNDS = frozenset({"start_indices", "limit_indices"})


class EquationKinds:
    """Numbers the kinds of equations: primitive, parameters, and types of operands and results.

    The start of a slice is not part of its kind, so that `x[3]` and `x[4]` are of one kind.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._functions: dict[int, int] = {}
        # Objects identified by `id` must stay alive.
        self._alive: list[Any] = []

    def kind(self, eqn: JaxprEqn) -> int:
        """The number of an equation's kind."""
        return self._number(self._form(eqn, ignored=_BOUNDS if is_dense_slice(eqn) else _RULES))

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _form(self, eqn: JaxprEqn, ignored: frozenset[str] = _RULES) -> Any:
        types = tuple(map(type_of, eqn.invars)), tuple(map(type_of, eqn.outvars))
        if eqn.effects:
            return self._identity(eqn), types
        parameters = (
            (name, self._value(value)) for name, value in eqn.params.items() if name not in ignored
        )
        return eqn.primitive, *parameters, types

    def _value(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self._function(value)
        if isinstance(value, tuple | list):
            return tuple(map(self._value, value))
        if isinstance(value, np.ndarray | jax.Array):
            return self._array(value)
        try:
            hash(value)
        except TypeError:
            return self._identity(value)
        return value

    def _identity(self, value: Any) -> Any:
        self._alive.append(value)
        return "identity", id(value)

    def _array(self, value: Any) -> Any:
        dtype = getattr(value, "dtype", jax.dtypes.prng_key)
        is_key = jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
        if is_key or isinstance(value, jax.core.Tracer):
            return self._identity(value)
        return str(value.dtype), value.shape, np.asarray(value).tobytes()

    def _function(self, function: ClosedJaxpr | Jaxpr) -> int:
        """The number of a function within an equation: equal only if it computes the same."""
        if id(function) in self._functions:
            return self._functions[id(function)]
        closed = function if isinstance(function, ClosedJaxpr) else ClosedJaxpr(function, ())
        jaxpr, results = closed.jaxpr, (v for eqn in closed.jaxpr.eqns for v in eqn.outvars)
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        places = {var: number for number, var in enumerate((*inputs, *results))}

        def reference(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return str(atom.val), type_of(atom)
            return places[atom]

        key = (
            tuple(map(type_of, inputs)),
            tuple((self._form(eqn), *map(reference, eqn.invars)) for eqn in jaxpr.eqns),
            tuple(map(reference, jaxpr.outvars)),
            tuple(map(self._array, closed.consts)),
        )
        self._alive.append(function)
        self._functions[id(function)] = self._number(key)
        return self._functions[id(function)]


def is_dense_slice(eqn: JaxprEqn) -> bool:
    """Whether an equation takes a slice of neighbouring elements."""
    return eqn.primitive.name == "slice" and set(eqn.params["strides"] or ()) <= {1}


def type_of(atom: Any) -> Any:
    """Shape and type of an atom of a jaxpr."""
    return getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", atom.aval)
