"""A model in; rows of synthetic data for one network out, with bad draws dropped and counted.

Draws (x, y) ~ p(x, y) cost nothing but time, and no real data are needed: Paige & Wood (2016),
sec. 3.4. Priors with heavy tails break naive simulation in float32, see `retrodict.draws`; a draw
is dropped whole when anything is wrong with it.

So what networks learn is p(x | y) conditioned on R, that every value and density of the draw is
representable, and not p(x | y) itself. The two differ only where x given y may lie outside R: where
counts have a rate with a heavy tail, R cuts off rates that make counts pass 2³¹, which no data that
can be typed in come from. Inference does not condition on R: its weights are the model's density
over q, and q has mass on the whole support.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from threading import Event
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from retrodict._xla.jit import QUICKLY, Compiled, shaped
from retrodict.errors import UnsupportedModel
from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import CHUNK, REASONS, Draws, at_once, fresh_keys, generator
from retrodict.proposal.contexts import Assembly

# Of this many draws, the share that is lost is known well enough to give up.
ENOUGH = 1000

Rows: TypeAlias = Any  # (x, context), a leading axis of rows on every array


@dataclass
class Rejected:
    """How many draws were made, and how many dropped, by site and reason."""

    simulated: int = 0
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """How many draws were dropped."""
        return sum(self.dropped.values())

    @property
    def fraction(self) -> float:
        """The share of draws that were dropped."""
        return self.total / max(self.simulated, 1)

    def __add__(self, other: "Rejected") -> "Rejected":
        return Rejected(self.simulated + other.simulated, self.dropped + other.dropped)

    def describe(self) -> str:
        """The sites at fault, the worst first."""
        worst = self.dropped.most_common(3)
        return "; ".join(f"'{s}': {r} ({n} of {self.simulated})" for (s, r), n in worst)


class _Choice(NamedTuple):
    """What is used of draws.

    Attributes:
        copies: by assembly, which of its copies.
        kept: which of the rows that these make, if not all.
    """

    copies: tuple[Int[np.ndarray, "draws count"], ...]
    kept: Int[np.ndarray, "draws rows"] | None


@dataclass(frozen=True)
class Simulator:
    """Makes rows for the network that some factors share.

    Attributes:
        graph: the model's.
        assemblies: of the factors that share the network.
        designs: constants that tell elements apart, among the values.
        copies: how many copies of a factor are used of each draw.
        draws: joint draws of the model, see `joint_draws`.
    """

    graph: Graph
    assemblies: tuple[Assembly, ...]
    designs: dict[str, Array]
    copies: int
    draws: Draws

    @property
    def rows_per_draw(self) -> int:
        """How many rows one good draw gives."""
        return min(self.copies, sum(self._totals))

    @property
    def row_bytes(self) -> int:
        """Memory of one row."""
        return _bytes(self._shapes[1]) // self.rows_per_draw

    @property
    def row(self) -> Rows:
        """Shapes and types of one row."""
        return jax.tree.map(lambda leaf: shaped(leaf.shape[2:], leaf.dtype), self._shapes[1])

    @property
    def chunk(self) -> int:
        """How many draws are made at a time."""
        each = _bytes(self._shapes[0]) + _bytes(self._shapes[1])
        each += sum(a.guide.working_bytes for a in self.assemblies if a.guide is not None)
        return at_once(each)

    @cached_property
    def _shapes(self) -> tuple[Any, Any]:
        """Shapes of the values and of the rows of one draw."""
        # of as many as are mostly made at a time, so that what is traced for it is used again
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), CHUNK))
        values, _ = jax.eval_shape(self.draws, keys)
        choice = self._choose(np.random.default_rng(0), CHUNK)
        return values, jax.eval_shape(self._gather, choice, values)

    @property
    def _totals(self) -> list[int]:
        return [int(np.prod(assembly.copies)) for assembly in self.assemblies]

    @cached_property
    def _gather(self) -> Callable[["_Choice", dict[str, Array]], Rows]:
        return Compiled(jax.vmap(self._rows_of_draw), QUICKLY)

    def _choose(self, rng: np.random.Generator, draws: int) -> "_Choice":
        """A few copies for every draw, with each assembly's share what it has of all copies."""
        wanted, totals = self.rows_per_draw, self._totals
        copies = []
        for total in totals:
            # One copy from each of equal parts, so that no copy comes twice.
            count = -(-wanted * total // sum(totals))
            edges = np.linspace(0, total, count + 1).astype(int)
            copies.append(rng.integers(edges[:-1], edges[1:], (draws, count), np.int32))
        number = sum(part.shape[1] for part in copies)
        if number == wanted:
            return _Choice(tuple(copies), None)
        orders = np.tile(np.arange(number, dtype=np.int32), (draws, 1))
        return _Choice(tuple(copies), rng.permuted(orders, axis=1)[:, :wanted])

    def _rows_of_draw(self, choice: "_Choice", values: dict[str, Array]) -> Rows:
        known = {**values, **self.designs}
        made = [
            self._copies(assembly, known, flat)
            for assembly, flat in zip(self.assemblies, choice.copies, strict=True)
        ]
        rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), *made)
        if choice.kept is None:
            return rows
        return jax.tree.map(lambda leaf: leaf[choice.kept], rows)

    def _copies(self, assembly: Assembly, values: dict[str, Array], flat: Any) -> Rows:
        def row(*place: Array) -> Rows:
            return assembly.x(values, place), assembly.context(values, place)

        if not assembly.copies:
            return jax.tree.map(lambda leaf: leaf[None], row())
        if flat.size == np.prod(assembly.copies):
            flat = jnp.arange(flat.size)  # all, and always the same
        return jax.vmap(row)(*jnp.unravel_index(flat, assembly.copies))

    def rows(
        self, rng_key: PRNGKeyArray, size: int, stop: Callable[[], bool]
    ) -> tuple[Rows, Rejected]:
        """`size` good rows and what was dropped; what there is, if told to stop before."""
        rejected, rng = Rejected(), generator(rng_key)
        filled = 0
        rows: Rows = None
        while filled < size and not (filled and stop()):
            values, codes = self.draws(fresh_keys(rng, self.chunk, rng_key))
            made = self._gather(self._choose(rng, self.chunk), values)
            good = self._count(np.asarray(codes), rejected)
            if rows is None:
                rows = jax.tree.map(lambda a: np.empty((size, *a.shape[2:]), a.dtype), made)
            found = int(good.sum()) * self.rows_per_draw
            number = min(found, size - filled)
            for into, leaf in zip(jax.tree.leaves(rows), jax.tree.leaves(made), strict=True):
                flat = np.asarray(leaf)[good].reshape(found, *leaf.shape[2:])
                into[filled : filled + number] = flat[:number]
            filled += number
        return jax.tree.map(lambda leaf: leaf[:filled], rows), rejected

    def _count(self, codes: Int[np.ndarray, " draws"], rejected: Rejected) -> np.ndarray:
        """Which draws are good; the others are counted."""
        names = list(self.graph.surface.sites)
        good: np.ndarray = codes == 0
        rejected.simulated += codes.size
        for code, times in zip(*np.unique(codes[~good], return_counts=True), strict=True):
            site, reason = divmod(int(code) - 1, len(REASONS))
            rejected.dropped[names[site], REASONS[reason]] += int(times)
        if rejected.fraction > 0.95 and rejected.simulated >= ENOUGH:
            raise UnsupportedModel(
                f"{rejected.fraction:.0%} of the draws from the prior cannot be used, "
                f"{rejected.describe()}. Give these sites priors under which simulated data "
                "are representable in float32"
            )
        return good


def _bytes(shapes: Any) -> int:
    """Memory of one entry of the leading axis."""
    leaves = jax.tree.leaves(shapes)
    return sum(int(np.prod(leaf.shape[1:])) * leaf.dtype.itemsize for leaf in leaves)


class Split(NamedTuple):
    """A synthetic set: rows to learn from, rows held out, and what was dropped for them."""

    rows: Rows
    heldout: Rows
    rejected: Rejected


class Sets:
    """Synthetic sets, each made while the one before is in use. To be used in a `with` statement.

    Args:
        simulator: makes the rows.
        rng_key: decides all sets.
        size, held: rows to learn from and rows held out.
        stop: asked now and then; once true, a set is cut short.
        ahead: whether there is to be more than one.
    """

    def __init__(
        self,
        simulator: Simulator,
        rng_key: PRNGKeyArray,
        size: int,
        held: int,
        stop: Callable[[], bool],
        ahead: bool = True,
    ) -> None:
        self._ahead = ahead
        self._simulator, self._key, self._size, self._held = simulator, rng_key, size, held
        self._stop, self._left = stop, Event()
        self._worker = ThreadPoolExecutor(1)
        self._made = 0
        self._upcoming: Future[Split] | None = None

    def __enter__(self) -> "Sets":
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def next(self) -> Split:
        """The next set; what went wrong in making it is raised here."""
        made = self._make() if self._upcoming is None else self._upcoming.result()
        self._upcoming = self._worker.submit(self._make) if self._ahead else None
        return made

    def _make(self) -> Split:
        key = jax.random.fold_in(self._key, self._made)
        self._made += 1
        rows, rejected = self._simulator.rows(
            key, self._size + self._held, lambda: self._stop() or self._left.is_set()
        )
        # The first rows are held out, so that there are some of a set that was cut short.
        heldout, rest = (
            jax.tree.map(lambda leaf, part=part: jax.device_put(leaf[part]), rows)
            for part in (slice(self._held), slice(self._held, None))
        )
        return Split(rest, heldout, rejected)


def names_of(assemblies: Sequence[Assembly]) -> str:
    """What the network of some factors draws, for people to read."""
    return ", ".join(assemblies[0].factor.latents)
