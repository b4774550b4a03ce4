"""Tell whether two equations of a traced function compute the same, whatever their operands are."""

from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

# Rules for derivatives and for vectorising are made anew with every call of their function.
_RULES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "rule"})
_PLAIN = (bool, int, str, type(None))


class EquationKinds:
    """Numbers the kinds of equations: primitive, parameters, and types of operands and results.

    Where a slice starts is left out, so that `x[3]` and `x[4]` are of one kind.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._functions: dict[int, int] = {}
        # Functions and parameters are known by identity, so they must stay alive.
        self._alive: list[Any] = []

    def kind(self, eqn: JaxprEqn) -> int:
        """The number of an equation's kind."""
        return self._number((self._parameters(eqn), *_types(eqn)))

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _parameters(self, eqn: JaxprEqn, *, starts: bool = False) -> Any:
        if eqn.effects:
            return self._identity(eqn)
        if eqn.primitive.name == "slice" and is_dense(eqn):
            return (
                eqn.primitive,
                eqn.params["strides"],
                eqn.params["start_indices"] if starts else (),
            )
        return eqn.primitive, *(
            (name, self._value(value)) for name, value in eqn.params.items() if name not in _RULES
        )

    def _value(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
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
        is_array = isinstance(value, np.ndarray | jax.Array)
        if not is_array or isinstance(value, jax.core.Tracer):
            return self._identity(value)
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return self._identity(value)
        array = np.asarray(value)
        return str(array.dtype), array.shape, array.tobytes()

    def _function(self, function: ClosedJaxpr | Jaxpr) -> int:
        """The number of a function within an equation: equal only if it computes the same."""
        number = self._functions.get(id(function))
        if number is not None:
            return number
        jaxpr = function.jaxpr if isinstance(function, ClosedJaxpr) else function
        constants = function.consts if isinstance(function, ClosedJaxpr) else []
        places: dict[Any, int] = {}
        for var in (*jaxpr.constvars, *jaxpr.invars):
            places[var] = len(places)
        lines = []

        def reference(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return str(atom.val), type_of(atom)
            return places[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(map(reference, eqn.invars))
            for var in eqn.outvars:
                places[var] = len(places)
            lines.append((self._parameters(eqn, starts=True), operands, _types(eqn)))
        number = self._number(
            (
                tuple(map(type_of, (*jaxpr.constvars, *jaxpr.invars))),
                tuple(lines),
                tuple(map(reference, jaxpr.outvars)),
                tuple(map(self._array, constants)),
            )
        )
        self._alive.append(function)
        self._functions[id(function)] = number
        return number


def _types(eqn: JaxprEqn) -> tuple[Any, ...]:
    return tuple(map(type_of, eqn.invars)), tuple(map(type_of, eqn.outvars))


def is_dense(eqn: JaxprEqn) -> bool:
    """Whether a slice takes neighbouring elements."""
    strides = eqn.params["strides"]
    return strides is None or all(stride == 1 for stride in strides)


def type_of(atom: Any) -> Any:
    """Shape and type of an atom of a jaxpr."""
    return getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", atom.aval)
