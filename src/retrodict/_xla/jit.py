"""Compile functions with the XLA options that suit how often they run.

Outside of a compiled function, every operation is a program of its own for each shape and takes
about 25 ms to compile, so functions are compiled whole. `retrodict._xla.tuning` has the options.
"""

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.lapack import in_small_batches
from retrodict._xla.tuning import FAST_COMPILE, LOW_LATENCY, OPTION_EFFECTS, CompilerOptions

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def supported_options(options: CompilerOptions) -> CompilerOptions:
    """Drop the options that this version of XLA does not support, with a warning for each.

    The test compiles a trivial program, which starts JAX's backend.
    """
    if _compiles_with(tuple(options.items())):
        return dict(options)
    return {name: value for name, value in options.items() if _is_supported(name, value)}


@cache
def _is_supported(name: str, value: str | bool) -> bool:
    if _compiles_with(((name, value),)):
        return True
    warnings.warn(
        f"this version of XLA does not support the compiler option {name}={value!r}, which "
        f"{OPTION_EFFECTS.get(name, 'only affects speed')}. It is left out. Results stay "
        "the same, and nothing needs to be done",
        stacklevel=4,
    )
    return False


@cache
def _compiles_with(options: tuple[tuple[str, str | bool], ...]) -> bool:
    try:
        jax.jit(lambda: 0.0, compiler_options=dict(options)).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class CompiledFunction(Generic[Arguments, Result]):
    """A function that is compiled at its first call.

    Args:
        fn: A function of pytrees of arrays, without keyword arguments.
        options: XLA's compiler options; unsupported ones are left out.
    """

    def __init__(self, fn: Callable[Arguments, Result], options: CompilerOptions) -> None:
        # Within another compiled function, that function's options apply.
        self._inner: Any = jax.jit(fn)

        @wraps(fn)  # profiles show the name
        def in_batches(*args: Any, **kwargs: Any) -> Any:
            return in_small_batches(self._inner, *args, **kwargs)

        self._outer: Any = jax.jit(in_batches, compiler_options=supported_options(options))

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
        result: Result = (self._inner if traced else self._outer)(*args, **kwargs)
        return result

    def lower(self, *args: Any) -> Callable[[], Any]:
        """Trace and lower for arguments like these, of which only shapes and types matter.

        Returns:
            A function that compiles the program, which later calls then use. It does not need
            Python's interpreter lock.
        """
        compile_program: Callable[[], Any] = self._outer.lower(*args).compile
        return compile_program


def run_once(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Compile a function with few optimisations and call it."""
    return CompiledFunction(fn, FAST_COMPILE)(*arguments)


def low_latency_jit(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile a function, at its first call, for many fast calls."""
    return CompiledFunction(fn, LOW_LATENCY)


def floats(values: np.ndarray) -> Float[Array, "..."]:
    """Convert to JAX's default float type; `jnp.asarray` would compile a program for each shape."""
    array: Array = jax.device_put(np.asarray(values, jnp.result_type(float)))
    return array


def shape_dtype(shape: tuple[int, ...], dtype: Any) -> Any:
    """Describe an array to compile a function for it in advance."""
    struct: Any = jax.ShapeDtypeStruct  # untyped in JAX
    return struct(shape, dtype)
