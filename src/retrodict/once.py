"""Programs that run once, or nearly: better compiled in half the time than run in half of it.

XLA's first level of optimisation takes half the time of its usual one, and what it makes is mostly
as fast; without any, compiling is no quicker still, and what comes out is several times slower.
"""

from collections.abc import Callable
from typing import Any

import jax

QUICKLY: dict[str, str | bool] = {"xla_backend_optimization_level": "1"}


def run_once(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Compile a function with little optimisation, and call it."""
    return jax.jit(fn, compiler_options=QUICKLY)(*arguments)
