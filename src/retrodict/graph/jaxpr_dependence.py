"""Find which elements of which inputs each output of a JAX function depends on.

An abstract interpreter runs the function's jaxpr over `Dependence` in place of numbers: a rule for
each primitive relates the axes of a result to those of its operands. No array is computed, except
for constant indices of a gather or a slice. A result that no rule covers is taken to depend on all
operands, so that the dependence is always a superset of the true one: alignment along a plate is
proved from the equations, whatever the model declares.

Constants that vary along an axis are sources, too (`Constant`): they make elements of a plate
heterogeneous.
"""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from retrodict.graph.dependence import Abstract, Dependence, Lazy, together
from retrodict.graph.index_atoms import INF, Window, left_range, right_range
from retrodict.graph.index_relations import Relation
from retrodict.graph.primitive_rules import (
    CALLS,
    ELEMENTWISE,
    RULES,
    anything,
    elementwise,
    shape_of,
)


class Constant(NamedTuple):
    """A source other than an input: an array the function closes over, or a counter."""

    number: int


def dependence_of(fn: Callable[[Any], Any], inputs: Mapping[Any, Any]) -> Any:
    """The dependence of the outputs of `fn(inputs)` on the elements of the inputs.

    Args:
        fn: a function of a dict of arrays, whose keys are the sources.
        inputs: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        A pytree like the function's output with an `Abstract` in place of each array.
    """
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(dict(inputs))
    arguments = [
        Abstract(Dependence({name: Relation.identity(shape_of(var))}), shape_of(var))
        for name, var in zip(sorted(inputs), closed.jaxpr.invars, strict=True)  # as JAX sorts keys
    ]
    return jax.tree.unflatten(jax.tree.structure(out_shape), _Reader().read(closed, arguments))


class _Reader:
    """Interprets jaxprs over `Abstract` values."""

    def __init__(self) -> None:
        # By identity, with the object kept so that no other can take its place.
        self._constants: dict[int, tuple[Constant, object]] = {}
        self.step_axes = itertools.count(-1, -1)

    def constant_source(self, origin: object) -> Constant:
        """The source that stands for a constant that varies: the same for the same origin."""
        name = Constant(len(self._constants))
        return self._constants.setdefault(id(origin), (name, origin))[0]

    def constant(self, value: Any) -> Abstract:
        """A constant of a jaxpr."""
        sources: dict[Hashable, Relation] = {}
        if np.size(value) > 1 and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            array = np.asarray(value)
            if np.any(array != array.flat[0]):
                sources[self.constant_source(value)] = Relation.identity(array.shape)
        return Abstract(Dependence(sources), np.shape(value), Lazy(lambda: value))

    def read(self, closed: ClosedJaxpr, arguments: Sequence[Abstract]) -> list[Abstract]:
        """The abstract outputs of a closed jaxpr."""
        jaxpr, constants = closed.jaxpr, map(self.constant, closed.consts)
        inputs = zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True)
        values: dict[Var, Abstract] = dict(inputs)

        def look_up(atom: Any) -> Abstract:
            if isinstance(atom, Literal):
                return Abstract(Dependence.nothing(), np.shape(atom.val), Lazy(lambda: atom.val))
            return values[atom]

        for eqn in jaxpr.eqns:
            operands = [look_up(atom) for atom in eqn.invars]
            results = self._apply(eqn, operands)
            values.update(zip(eqn.outvars, results, strict=True))
        return [look_up(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: JaxprEqn, operands: Sequence[Abstract]) -> list[Abstract]:
        name = eqn.primitive.name
        shapes = [shape_of(var) for var in eqn.outvars]
        inner = _called(eqn)
        if inner is not None and len(inner.jaxpr.invars) == len(operands):
            return self.read(inner, operands)
        if name == "scan":
            return _scan(eqn, operands, self)
        if name == "cond":
            results = _branch(eqn, operands, self)
        elif name == "iota":
            results = _iota(eqn, self)
        elif name in RULES:
            results = RULES[name](eqn, operands)
        elif name in ELEMENTWISE and all(len(o.shape) in (0, len(shapes[0])) for o in operands):
            results = [elementwise(operands, shapes[0])] * len(shapes)
        else:
            results = [anything(operands)] * len(shapes)
        constant = all(operand.constant is not None for operand in operands)
        by_step = _evaluated_by_step(eqn, operands)
        return [
            Abstract(dep, shape, _evaluated(eqn, operands, number) if constant else None, by_step)
            for number, (dep, shape) in enumerate(zip(results, shapes, strict=True))
        ]


def _called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation merely calls: jit, custom derivatives, checkpoints."""
    if eqn.primitive.name not in CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if isinstance(inner, ClosedJaxpr):
            return inner
        if isinstance(inner, Jaxpr) and not inner.constvars:
            return ClosedJaxpr(inner, ())
    return None


def _evaluated(eqn: JaxprEqn, operands: Sequence[Abstract], number: int) -> Lazy:
    def compute() -> Any:
        bind: Callable[..., Any] = eqn.primitive.bind
        result = bind(*(operand.value for operand in operands), **eqn.params)
        return result[number] if eqn.primitive.multiple_results else result

    return Lazy(compute)


def _evaluated_by_step(eqn: JaxprEqn, operands: Sequence[Abstract]) -> tuple[int, Lazy] | None:
    """The values of a scalar at all steps of a scan, if it is computed from constants alone."""
    steps = {operand.by_step[0] for operand in operands if operand.by_step is not None}
    if len(steps) != 1 or any(operand.shape for operand in operands):
        return None
    if eqn.primitive.name not in ELEMENTWISE or any(
        operand.constant is None and operand.by_step is None for operand in operands
    ):
        return None

    def compute() -> Any:
        values = [o.value if o.by_step is None else o.by_step[1].value for o in operands]
        bind: Callable[..., Any] = eqn.primitive.bind
        return bind(*np.broadcast_arrays(*values), **eqn.params)  # type: ignore[arg-type]

    return steps.pop(), Lazy(compute)


def _iota(eqn: JaxprEqn, reader: _Reader) -> list[Dependence]:
    axis, shape = eqn.params["dimension"], eqn.params["shape"]
    if shape[axis] < 2:
        return [Dependence.nothing()]
    counter = Relation.of([Window(axis, 0)], shape, (shape[axis],))
    return [Dependence({reader.constant_source(eqn): counter})]


def _branch(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Dependence]:
    choice, *arguments = operands
    branches = []
    for number, branch in enumerate(eqn.params["branches"]):
        results = [result.dependence for result in reader.read(branch, arguments)]
        branches.append([_where_chosen(result, choice, number) for result in results])
    return [together([anything([choice]), *results]) for results in zip(*branches, strict=True)]


def _where_chosen(result: Dependence, choice: Abstract, branch: int) -> Dependence:
    """Limit a result of a branch to the steps of a scan that take it, if these are constant."""
    if choice.by_step is None:
        return result
    step, values = choice.by_step
    hits = np.flatnonzero(values.value == branch)
    if not hits.size:
        return Dependence.nothing()
    start, stop = int(hits[0]), int(hits[-1]) + 1

    sizes = {step: values.value.size}
    limits = Relation.of([left_range(step, start, stop), Window(step, step)], sizes, sizes)
    return result.through(limits)


_EXACT_STEPS = 64


def _scan(eqn: JaxprEqn, operands: Sequence[Abstract], reader: _Reader) -> list[Abstract]:
    """Follow the carry from step to step up to a fixed point, with widening (Cousot & Cousot 1977).

    At step t the carry is that of step t − 1, or the initial carry at the first step. Lags longer
    than `_EXACT_STEPS`, as of a running sum, become "all of the past".
    """
    num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    length, backward, body = eqn.params["length"], eqn.params["reverse"], eqn.params["jaxpr"]
    step = next(reader.step_axes)
    steps = {step: length}
    first, last = (length - 1, 0) if backward else (0, length - 1)
    constants, init, xs = (
        operands[:num_consts],
        operands[num_consts : num_consts + num_carry],
        operands[num_consts + num_carry :],
    )
    slices = [_step_of(x, step) for x in xs]
    at_first = Relation.of([left_range(step, first, first + 1)], steps, {})
    at_last = Relation.of([right_range(step, last, last + 1)], {}, steps)
    lag = 1 if backward else -1
    one_later = Relation.of([Window(step, step, lag, lag)], steps, steps)
    bounds = (0.0, INF) if backward else (-INF, 0.0)
    ever_since = Relation.of([Window(step, step, *bounds)], steps, steps)

    starts = [value.dependence.through(at_first) for value in init]
    carry = [Abstract(s, v.shape) for s, v in zip(starts, init, strict=True)]
    for iteration in range(_EXACT_STEPS + 8):
        outputs = reader.read(body, [*constants, *carry, *slices])
        following = [
            s | o.dependence.through(one_later)
            for s, o in zip(starts, outputs[:num_carry], strict=True)
        ]
        if iteration >= _EXACT_STEPS:
            following = [dependence.through(ever_since) for dependence in following]
        if all(c.dependence == f for c, f in zip(carry, following, strict=True)):
            break
        carry = [Abstract(f, c.shape) for f, c in zip(following, carry, strict=True)]
    else:
        worst = anything(operands)
        return [Abstract(worst, shape_of(var)) for var in eqn.outvars]
    final = [Abstract(o.dependence.through(at_last), o.shape) for o in outputs[:num_carry]]
    return final + [_stacked(o, step, length) for o in outputs[num_carry:]]


def _step_of(array: Abstract, step: int) -> Abstract:
    """The entry of an array that is the input of one step of a scan."""
    shape = array.shape[1:]
    sizes = {step: array.shape[0], **dict(enumerate(shape))}
    atoms = [Window(step, 0), *(Window(axis, axis + 1) for axis in range(len(shape)))]
    relation = Relation.of(atoms, sizes, array.shape)
    by_step = None if array.constant is None else (step, array.constant)
    return Abstract(array.dependence.through(relation), shape, by_step=by_step)


def _stacked(output: Abstract, step: int, length: int) -> Abstract:
    """The outputs of all steps of a scan as one array."""
    shape = (length, *output.shape)
    constant = None
    if output.constant is not None:
        constant = Lazy(lambda: np.broadcast_to(np.asarray(output.value), shape))
    sizes = {step: length, **dict(enumerate(output.shape))}
    atoms = [Window(0, step), *(Window(axis + 1, axis) for axis in range(len(output.shape)))]
    relation = Relation.of(atoms, shape, sizes)
    return Abstract(output.dependence.through(relation), shape, constant)
