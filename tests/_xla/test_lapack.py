"""LAPACK calls in small batches: right values, no divided call, no hang."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from retrodict._xla import lapack
from retrodict._xla.jit import CompiledFunction
from retrodict._xla.lapack import in_small_batches

MATRICES = np.random.default_rng(0).normal(size=(3, 500, 11, 11)).astype(np.float32)
POSITIVE = MATRICES @ np.swapaxes(MATRICES, -1, -2) + 11 * np.eye(11, dtype=np.float32)


def equations(program):
    """The LAPACK calls of a program and of all programs in it."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in lapack._LAPACK:
            yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def in_a_loop(matrices):
    def step(total, matrix):
        return total + jnp.linalg.cholesky(matrix), jnp.linalg.slogdet(matrix)[1]

    return jax.lax.scan(step, jnp.zeros(matrices.shape[1:]), matrices)


def in_a_branch(matrices):
    return jax.lax.cond(matrices.sum() > 0, jnp.linalg.cholesky, lambda m: m, matrices)


def gradient(matrices):
    return jax.grad(lambda m: jnp.linalg.slogdet(jnp.linalg.cholesky(m))[1].sum())(matrices)


PROGRAMS = {
    "cholesky": (jnp.linalg.cholesky, np.linalg.cholesky),
    "solve": (
        lambda m: jnp.linalg.solve(m, m[..., :2]),
        lambda m: np.linalg.solve(m, m[..., :2]),
    ),
    "triangular": (
        lambda m: jax.scipy.linalg.solve_triangular(m, m[..., :2], lower=True),
        lambda m: np.linalg.solve(np.tril(m), m[..., :2]),
    ),
    "eigenvalues": (jnp.linalg.eigvalsh, np.linalg.eigvalsh),
    "singular values": (
        lambda m: jnp.linalg.svd(m, compute_uv=False),
        lambda m: np.linalg.svd(m, compute_uv=False),
    ),
    "vectorised": (jax.vmap(jax.vmap(jnp.linalg.cholesky)), np.linalg.cholesky),
    "loop": (lambda m: in_a_loop(m)[0], lambda m: np.linalg.cholesky(m).sum(0)),
    "branch": (in_a_branch, np.linalg.cholesky),
    "gradient": (gradient, lambda m: np.linalg.inv(m) / 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_numpy(name):
    function, reference = PROGRAMS[name]
    np.testing.assert_allclose(
        CompiledFunction(function, {})(POSITIVE),
        reference(POSITIVE.astype(np.float64)),
        rtol=2e-4,
        atol=2e-5,
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_call_is_large_enough_to_be_divided(name):
    function, _ = PROGRAMS[name]
    program = jax.make_jaxpr(lambda m: in_small_batches(jax.jit(function), m))(POSITIVE)
    calls = list(equations(program))
    assert calls
    for eqn in calls:
        batch = math.prod(max((atom.aval.shape for atom in eqn.invars), key=len)[:-2])
        sizes = (sorted(atom.aval.shape[-2:]) for atom in eqn.invars)
        assert batch == 1 or batch * max(a * b**2 for a, b in sizes) < 200_000


def test_a_program_without_lapack_is_not_changed():
    function = jax.jit(lambda x: {"sum": x.sum()})
    assert CompiledFunction(function, {})(np.ones(3))["sum"] == 3
    assert lapack._rewrite(program := function.trace(np.ones(3)).jaxpr) is program


# Eight independent calls keep all threads busy: with `jax.jit` this hangs within a second or two.
INDEPENDENT_CALLS = """
import jax, jax.numpy as jnp
from retrodict._xla.jit import CompiledFunction

def factors(x):
    shifted = [jnp.sin(x * i) for i in range(8)]
    return [jnp.linalg.cholesky(m @ m.mT + jnp.eye(11)) for m in shifted]

function = CompiledFunction(factors, {})
for number in range(60):
    jax.block_until_ready(function(jnp.full((2000, 11, 11), number)))
"""


def test_independent_calls_on_two_threads_do_not_hang(two_threads):
    two_threads(INDEPENDENT_CALLS)
