"""LAPACK calls that do not wait for another thread.

jaxlib divides a large batch of matrices among XLA's threads and blocks until all parts are done.
XLA may run the call itself on one of these threads: as soon as each of them runs such a call, every
one waits for a thread that never becomes free, and the process hangs. A small batch is not divided.
So the batches of a program are processed in small parts, one after the other.
"""

import math
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array

from retrodict._xla.tuning import MAX_UNDIVIDED_WORK

Equation: TypeAlias = Any  # incompletely typed in JAX

# Names of operations that, by jaxlib's estimate, cost for one matrix at most the product of its two
# sizes and the larger of them, and three times as much for complex numbers.
_CUBIC = frozenset({"cholesky", "lu", "triangular_solve"})
# Names of costlier ones, which are rare: one matrix at a time.
_COSTLIER = frozenset(
    {
        *("eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "ormqr", "qr"),
        *("schur", "svd", "tridiagonal", "tridiagonal_solve"),
    }
)
_LAPACK = _CUBIC | _COSTLIER


def in_small_batches(fn: Any, *arguments: Any) -> Any:
    """Call a jitted function in which no LAPACK call is divided among threads.

    Args:
        fn: a function wrapped by `jax.jit`, called while another one is traced.
        arguments: its arguments.
    """
    traced = fn.trace(*arguments)
    program: ClosedJaxpr = _rewrite(traced.jaxpr)
    if program is traced.jaxpr:
        return fn(*arguments)
    outputs = jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), outputs)


def _rewrite(value: Any) -> Any:
    """A program without divided calls; the same object if there is nothing to change in it."""
    if isinstance(value, ClosedJaxpr):
        jaxpr = _rewrite(value.jaxpr)
        return value if jaxpr is value.jaxpr else ClosedJaxpr(jaxpr, value.consts)
    if not isinstance(value, Jaxpr):
        return value
    program: Any = value
    eqns = [_rewrite_equation(eqn) for eqn in program.eqns]
    changed = any(new is not old for new, old in zip(eqns, program.eqns, strict=True))
    return program.replace(eqns=eqns) if changed else program


def _rewrite_equation(eqn: Equation) -> Equation:
    if eqn.primitive.name in _LAPACK:
        return _divide_batch(eqn)
    programs, treedef = jax.tree.flatten(eqn.params, is_leaf=_is_program)
    rewritten = [_rewrite(leaf) for leaf in programs]
    if all(new is old for new, old in zip(rewritten, programs, strict=True)):
        return eqn
    return eqn.replace(params=jax.tree.unflatten(treedef, rewritten))


def _is_program(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def _divide_batch(eqn: Equation) -> Equation:
    """An operation on a batch of matrices, in parts that jaxlib does not divide."""
    # Every operation has a matrix among its operands; the others have the same batch axes.
    batch_shape = max((atom.aval.shape for atom in eqn.invars), key=len)[:-2]
    batch, size = math.prod(batch_shape), _part_size(eqn)
    if batch <= size:
        return eqn

    @jax.jit
    def call_in_parts(*operands: Array) -> Any:
        flat = [x.reshape(batch, *x.shape[len(batch_shape) :]) for x in operands]
        outputs = jax.lax.map(
            lambda one: eqn.primitive.bind(*one, **eqn.params), flat, batch_size=size
        )
        return jax.tree.map(lambda x: x.reshape(*batch_shape, *x.shape[1:]), outputs)

    (call,) = jax.make_jaxpr(call_in_parts)(*(atom.aval for atom in eqn.invars)).jaxpr.eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars)


def _part_size(eqn: Equation) -> int:
    """How many matrices jaxlib does not divide."""
    if eqn.primitive.name not in _CUBIC:
        return 1
    sizes = (sorted(atom.aval.shape[-2:]) for atom in eqn.invars)
    cost: int = 3 * max(small * large**2 for small, large in sizes)
    return max(MAX_UNDIVIDED_WORK // cost, 1)
