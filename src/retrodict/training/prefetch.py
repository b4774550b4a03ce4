"""Synthetic training sets, simulated in a background thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import NamedTuple

import jax
from jaxtyping import PRNGKeyArray

from retrodict.training.rejections import RejectionCounts
from retrodict.training.simulate import Examples, Simulator


class SyntheticSet(NamedTuple):
    """Training examples, held-out examples, and counts of the draws dropped for them."""

    training: Examples
    heldout: Examples
    rejected: RejectionCounts


class Prefetcher:
    """Context manager that simulates each synthetic set while the previous one is in use.

    Args:
        simulator: simulates the examples.
        rng_key: determines all sets.
        training_size: number of training examples in a set.
        heldout_size: number of held-out examples in a set.
        stop: polled during simulation; once true, a set is cut short.
        prefetch: whether to simulate sets ahead; false if only one is needed.
    """

    def __init__(
        self,
        simulator: Simulator,
        rng_key: PRNGKeyArray,
        training_size: int,
        heldout_size: int,
        stop: Callable[[], bool],
        prefetch: bool = True,
    ) -> None:
        self._simulator, self._key = simulator, rng_key
        self._training_size, self._heldout_size = training_size, heldout_size
        self._stop, self._closed = stop, Event()
        self._prefetch = prefetch
        self._worker = ThreadPoolExecutor(1)
        self._num_sets = 0
        self._upcoming: Future[SyntheticSet] | None = None

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def next(self) -> SyntheticSet:
        """The next set; an error in its simulation is raised here."""
        result = self._simulate() if self._upcoming is None else self._upcoming.result()
        self._upcoming = self._worker.submit(self._simulate) if self._prefetch else None
        return result

    def _simulate(self) -> SyntheticSet:
        key = jax.random.fold_in(self._key, self._num_sets)
        self._num_sets += 1
        examples, rejected = self._simulator.examples(
            key,
            self._training_size + self._heldout_size,
            lambda: self._stop() or self._closed.is_set(),
        )
        # The first examples are held out, so that a set that is cut short has some.
        heldout, training = (
            jax.tree.map(lambda leaf, part=part: jax.device_put(leaf[part]), examples)
            for part in (slice(self._heldout_size), slice(self._heldout_size, None))
        )
        return SyntheticSet(training, heldout, rejected)
