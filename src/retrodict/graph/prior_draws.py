"""Joint draws of a model, and which of them float32 cannot represent.

Priors with heavy tails break naive simulation in float32: gammas of small shape underflow to zero,
Poisson rates exceed the largest integer. A draw is faulty if any of its sites is not finite, is an
integer that has saturated or wrapped round, was rounded to a bound of its support, or has no finite
log density.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from retrodict._xla.jit import CompiledFunction
from retrodict._xla.tuning import FAST_COMPILE
from retrodict.graph.evaluation import CarryKey
from retrodict.graph.graph import Graph, Site

REASONS = ("not finite", "integer overflow", "underflow", "zero density")

# Draws simulated at a time, and the memory that their values may take.
CHUNK, CHUNK_BYTES = 2048, 64 * 2**20


class JointDraws(NamedTuple):
    """Joint draws of all sites, with a leading axis of draws.

    Attributes:
        values: of the sites.
        carries: of the scans, by leaf.
        faults: the code of each draw's fault, see `fault_code`.
    """

    values: dict[str, Array]
    carries: dict[CarryKey, Array]
    faults: Int[Array, " draws"]


PriorSampler: TypeAlias = Callable[[PRNGKeyArray], JointDraws]


def fault_code(graph: Graph, values: dict[str, Array], density: dict[str, Array]) -> Int[Array, ""]:
    """The fault of a draw: 0 for none, else 1 + site · len(REASONS) + reason.

    Sites are numbered as in the user's model. Of several faults it is the first in program order,
    which may have caused the others.
    """
    loops = {name: loop for loop in graph.loops for name in loop}
    flags, done = [], set[str]()
    for name in graph.sites:
        if name in done:
            continue
        # The sites of a loop alternate in program order.
        together = [other for other in loops.get(name, (name,)) if other in graph.sites]
        done.update(together)
        by_site = [_flags(graph.sites[n], values[n], density[n]) for n in together]
        flags.append(jnp.stack(by_site, -2).reshape(-1, len(REASONS)))
    wrong = jnp.concatenate(flags).ravel()
    return jnp.where(jnp.any(wrong), 1 + jnp.argmax(wrong), 0).astype(jnp.int32)


def _flags(site: Site, value: Array, density: Array) -> Bool[Array, "*steps reasons"]:
    """Which of the reasons apply to a value, or to each step of a loop's values."""

    def any_of(wrong: Array | None) -> Bool[Array, "*steps"]:
        if wrong is None:
            return jnp.zeros([len(site.steps)] if site.steps else [], bool)
        first = int(bool(site.steps))
        return jnp.any(wrong, axis=tuple(range(first, wrong.ndim)))

    reasons = (*_bad_entries(site.support, value), ~jnp.isfinite(density))
    nonfinite, beyond, rounded, impossible = map(any_of, reasons)
    return jnp.stack([nonfinite, beyond, rounded & ~nonfinite, impossible], -1)


def _bad_entries(support: Any, value: Array) -> tuple[Array | None, Array | None, Array | None]:
    """Which entries are not finite, are integers beyond their type, are rounded to a bound.

    None where that is impossible, which saves XLA the time to find out.
    """
    lower, upper = _bounds(support)
    if jnp.issubdtype(value.dtype, jnp.floating):
        if support.is_discrete:
            return ~jnp.isfinite(value), None, None
        info = np.finfo(value.dtype)
        # NumPyro clips betas and Dirichlets to the least positive number and to 1 - eps.
        rounded = (value == info.tiny) | (value <= lower) | (value >= upper)
        rounded |= (value == 1 - info.eps) & (upper == 1)
        return ~jnp.isfinite(value), None, rounded
    if not jnp.issubdtype(value.dtype, jnp.signedinteger):
        return None, None, None
    limit = np.iinfo(value.dtype)
    # A negative count is one that has wrapped round.
    beyond = (value == limit.max) | (value <= limit.min + 1) | ((value < 0) & (lower >= 0))
    return None, beyond, None


def _bounds(support: Any) -> tuple[Any, Any]:
    """Lower and upper bound of a support, infinite where it has none."""
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    lower, upper = (getattr(support, f"{end}_bound", None) for end in ("lower", "upper"))
    return (
        -np.inf if lower is None else np.asarray(lower),
        np.inf if upper is None else np.asarray(upper),
    )


def prior_sampler(graph: Graph) -> PriorSampler:
    """A function of many keys that gives a joint draw of the model for each.

    Everything that simulates a model shares it, so that it is compiled once.
    """

    def draw(rng_key: PRNGKeyArray) -> JointDraws:
        run = graph.program.run(rng_key, {})
        return JointDraws(run.values, run.carries, fault_code(graph, run.values, run.log_density))

    return CompiledFunction(jax.vmap(draw), FAST_COMPILE)


def generator(rng_key: PRNGKeyArray) -> np.random.Generator:
    """A NumPy generator from a key: splitting in JAX compiles one program per shape."""
    return np.random.default_rng(np.ravel(np.asarray(jax.random.key_data(rng_key))))


def fresh_keys(rng: np.random.Generator, number: int, like: PRNGKeyArray) -> PRNGKeyArray:
    """A number of random keys, with the implementation of `like`."""
    shape = (number, *jax.random.key_data(like).shape)
    words: Any = rng.integers(0, 2**32, shape, np.uint32)
    keys: Array = jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    return keys


def at_once(each: int) -> int:
    """The number of draws per chunk, for draws of `each` bytes."""
    return int(np.clip(CHUNK_BYTES // max(each, 1), 1, CHUNK))


def usual_number(graph: Graph) -> int:
    """The number of draws per chunk by the size of the sites' values."""
    return at_once(sum(4 * int(np.prod(site.shape)) for site in graph.sites.values()))
