"""Functions in; programs out, compiled as suits how often they run and what they do.

Nothing is compiled that need not be: every operation outside of a function that is compiled whole
is a program of its own for every shape, a fortieth of a second each.

XLA's first level of optimisation, without the compiler's dearest passes, takes half the time of
what is usual, and what it makes is mostly as fast: better for programs that run once, or nearly,
and for those that draw from a model, which are long and have little to be optimised. Without any
optimisation, what comes out is several times slower. What XLA merges, it takes longer to write down
by way of its newer emitters.

Left to itself, XLA hands products and sums of a few hundred rows to another library, YNNPACK, with
which steps of training take longer; and a sum over a short first axis takes ten times as long. And
it shares out products among threads, down to a few hundred rows of a few units each: in answers,
which are made of hundreds of small products one after the other, a thread is awakened for longer
than a product takes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")
Options = dict[str, str | bool]

QUICKLY: Options = {
    "xla_backend_optimization_level": "1",
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
UNASSISTED: Options = {"xla_cpu_experimental_ynn_fusion_type": ""}
ANSWERING: Options = {**UNASSISTED, "xla_cpu_multi_thread_eigen": False}


def known(options: Options) -> Options:
    """Those of some options that this XLA knows; to ask it starts JAX."""
    wanted = tuple(options.items())
    if _all_known(wanted):
        return dict(wanted)
    return {name: value for name, value in wanted if _all_known(((name, value),))}


@cache
def _all_known(options: tuple[tuple[str, str | bool], ...]) -> bool:
    try:
        jax.jit(lambda: 0.0, compiler_options=dict(options)).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class Compiled(Generic[Arguments, Found]):
    """A function that is compiled when it is first called.

    Args:
        fn: of trees of arrays, without keyword arguments.
        options: XLA's; one that does not know some of them does without.
    """

    def __init__(self, fn: Callable[Arguments, Found], options: Options) -> None:
        self._outside: Any = jax.jit(fn, compiler_options=known(options))
        self._inside: Any = jax.jit(fn)  # within another function, which has options of its own

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Found:
        """The function's outcome."""
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
        found: Found = (self._inside if traced else self._outside)(*args, **kwargs)
        return found


def run_once(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Compile a function with little optimisation, and call it."""
    return Compiled(fn, QUICKLY)(*arguments)


def floats(values: np.ndarray) -> Float[Array, "..."]:
    """NumPy's numbers as JAX's floats; `jnp.asarray` compiles the conversion of every shape."""
    made: Array = jax.device_put(np.asarray(values, jnp.result_type(float)))
    return made


def run_often(fn: Callable[Arguments, Found]) -> Callable[Arguments, Found]:
    """Compile a function whole, when it is first called, to be as fast as may be.

    Inside of another function that is compiled, it is compiled with that one's options.
    """
    return Compiled(fn, ANSWERING)


def shaped(shape: tuple[int, ...], dtype: Any) -> Any:
    """What stands for an array when a function is compiled for it beforehand."""
    stand_in: Any = jax.ShapeDtypeStruct  # JAX does not say its types
    return stand_in(shape, dtype)
