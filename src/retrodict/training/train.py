"""Training of one network on synthetic data, until its held-out loss no longer falls.

The schedule is that of Paige & Wood (2016), sec. 3.4: minibatches over a synthetic training set;
when the loss on held-out draws rises, or after a number of passes, both sets are simulated anew.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeAlias

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from retrodict._xla.jit import shape_dtype
from retrodict.estimators.conditional import has_weights, trainable
from retrodict.estimators.estimator import Estimator
from retrodict.training.gradient_steps import (
    TrainingState,
    heldout_loss,
    heldout_loss_once,
    jitted_pass,
    one_pass,
)
from retrodict.training.history import NetworkHistory
from retrodict.training.prefetch import Prefetcher, SyntheticSet
from retrodict.training.progress import Interruption
from retrodict.training.schedule import LearningRateSchedule, SetSizes, Training
from retrodict.training.simulate import Examples, Simulator

ProgressCallback: TypeAlias = Callable[[NetworkHistory, float], None]


def train_network(
    rng_key: PRNGKeyArray,
    network: Estimator,
    simulator: Simulator,
    training: Training,
    *,
    history: NetworkHistory | None = None,
    max_seconds: float | None = None,
    report: ProgressCallback | None = None,
    interruption: Interruption | None = None,
) -> tuple[Estimator, NetworkHistory]:
    """Train one network until its held-out loss no longer falls, or a limit is reached.

    Args:
        rng_key: determines the result on a given machine, unless the time limit is reached.
        network: new, or trained before; `history` tells which.
        simulator: simulates the training examples.
        training: the schedule.
        history: of the training before, if any; it is not modified.
        max_seconds: time limit of this network.
        report: called before training and after every pass with the history and the share of the
            allowed steps or time that is in use.
        interruption: a request to stop, or a `KeyboardInterrupt`, ends training and keeps the best
            weights so far; `history.stopped` records it.

    Returns:
        The network with the lowest held-out loss, and the extended history.
    """
    data_key, pass_key = jax.random.split(rng_key)
    interruption = interruption or Interruption()
    run = _TrainingRun(network, training, simulator, history, max_seconds, report)
    # The next program is compiled while data are simulated or evaluated. An error in the background
    # compilation occurs again where the program is called, and is raised there.
    with ThreadPoolExecutor(1) as compiler, run.prefetcher(data_key, interruption) as sets:
        compilation = compiler.submit(run.compile_loss)
        try:
            run.begin(_first_set(sets, interruption))
            wait([compilation])
            if not interruption.requested:
                if not run.finished(interruption):
                    compilation = compiler.submit(run.compile_pass)
                run.evaluate_initial()
            wait([compilation])
            run.train(pass_key, sets, interruption)
        except KeyboardInterrupt:
            interruption.request()
            run.finished(interruption)
    if run.history.steps:
        run.report()
    return run.best, run.history


def _first_set(sets: Prefetcher, interruption: Interruption) -> SyntheticSet:
    """The first set, cut short if interrupted: even an untrained network needs its scalings."""
    try:
        return sets.next()
    except KeyboardInterrupt:
        interruption.request()
        return sets.next()


class _TrainingRun:
    """State of the training of one network, with the best weights so far."""

    training_set: Examples
    heldout_set: Examples
    state: TrainingState
    fixed: PyTree

    def __init__(
        self,
        network: Estimator,
        training: Training,
        simulator: Simulator,
        history: NetworkHistory | None,
        max_seconds: float | None,
        callback: ProgressCallback | None = None,
    ) -> None:
        self.best, self.simulator, self.callback = network, simulator, callback
        self.has_weights = has_weights(network)
        if not self.has_weights:
            # Only scalings are fitted, which needs few examples.
            smaller = min(training.dataset_size, training.heldout_size)
            training = replace(training, dataset_size=smaller)
        self.training = training
        self.is_new = history is None
        self.history = NetworkHistory() if history is None else history.copy()
        self.schedule = LearningRateSchedule(training, max_seconds)
        self.sizes = SetSizes.of(training, simulator.example_bytes)
        self.previous_steps = self.history.steps[-1] if self.history.steps else 0
        self.previous_seconds = self.history.seconds
        self.start_time = time.perf_counter()
        self.step = self.passes = 0
        self.best_loss = self.last_loss = float("inf")
        self.needs_refresh = self.converged = False

    def prefetcher(self, rng_key: PRNGKeyArray, interruption: Interruption) -> Prefetcher:
        """Source of synthetic sets, which an interruption cuts short."""
        return Prefetcher(
            self.simulator,
            rng_key,
            self.sizes.training,
            self.sizes.heldout,
            lambda: interruption.requested,
            prefetch=self.has_weights,
        )

    @property
    def seconds(self) -> float:
        """Time since this run started."""
        return time.perf_counter() - self.start_time

    @property
    def budget_share(self) -> float:
        """Share of the allowed steps or time that is in use."""
        return self.schedule.budget_share(self.step, self.seconds)

    def compile_loss(self) -> None:
        """Compile the held-out loss ahead of its first evaluation."""
        weights, fixed = eqx.partition(self.best, trainable(self.best))
        examples = self._set_shapes(self.sizes.heldout)
        self._loss_function.lower(weights, fixed, examples, self._loss_batch).compile()

    def compile_pass(self) -> None:
        """Compile a pass over the training set ahead of the first one."""
        settings = self.schedule.next_pass(0, 0.0, self.sizes.num_batches)
        key, examples = jax.random.key(0), self._set_shapes(self.sizes.training)
        clip = self.training.clip
        jitted_pass().lower(key, self.state, examples, self.fixed, settings, clip).compile()

    def _set_shapes(self, number: int) -> Examples:
        return jax.tree.map(
            lambda leaf: shape_dtype((number, *leaf.shape), leaf.dtype),
            self.simulator.example_shapes,
        )

    def begin(self, first: SyntheticSet) -> None:
        """Use the first set; fit the scalings of a new network to it."""
        self._use(first)
        if self.is_new:
            empty = not jax.tree.leaves(self.training_set)[0].shape[0]
            examples = self.heldout_set if empty else self.training_set
            self.best = self.best.fit_scalings(examples.conditions, examples.latents)
        self._restart()

    def evaluate_initial(self) -> None:
        """Evaluate the network before training."""
        self.best_loss = self.last_loss = self._evaluate(self.state.average)
        self._record(self.best_loss)
        self.report()

    def train(self, rng_key: PRNGKeyArray, sets: Prefetcher, interruption: Interruption) -> None:
        """Make passes, over new sets when needed, until training is finished."""
        while not self.finished(interruption):
            rng_key, pass_key = jax.random.split(rng_key)
            self.one_pass(pass_key)
            self.report()
            if self.needs_refresh and not self.finished(interruption):
                upcoming = sets.next()
                # After a request to stop, the set may have been cut short.
                if not interruption.requested:
                    self.refresh(upcoming)

    def one_pass(self, rng_key: PRNGKeyArray) -> None:
        """Make one pass over the training set, and evaluate the result."""
        num_batches, clip = self.sizes.num_batches, self.training.clip
        settings = self.schedule.next_pass(self.step, self.seconds, num_batches)
        state = one_pass(rng_key, self.state, self.training_set, self.fixed, settings, clip)
        loss = self._evaluate(state.average)
        self.state = state
        self.step = min(self.step + num_batches, self.training.max_steps)
        self.passes += 1
        improved = loss < self.best_loss
        if improved:
            self.best, self.best_loss = eqx.combine(state.average, self.fixed), loss
        self._record(loss)
        self.converged = self.schedule.record(improved)
        if not np.isfinite(loss):
            self._restart()
        self.needs_refresh = not loss <= self.last_loss or self.passes >= self.training.passes
        self.last_loss = loss

    def refresh(self, new: SyntheticSet) -> None:
        """Continue with a new set; evaluate the best and the current weights on it."""
        self._use(new)
        self.history.refreshes.append(self.previous_steps + self.step)
        self.passes, self.needs_refresh = 0, False
        best_weights, _ = eqx.partition(self.best, trainable(self.best))
        self.history.best_loss = self.best_loss = self._evaluate(best_weights)
        self.last_loss = self._evaluate(self.state.average)

    def finished(self, interruption: Interruption) -> bool:
        """Whether to stop; the history records why."""
        if interruption.requested:
            self.history.stopped = "interrupted"
        elif not self.has_weights:
            self.history.stopped = "no weights to train"
        elif self.converged:
            self.history.stopped = "held-out loss no longer falls"
        elif self.budget_share >= 1:
            self.history.stopped = "limit reached"
        self.history.seconds = self.previous_seconds + self.seconds
        return bool(self.history.stopped)

    def report(self) -> None:
        """Pass the history to the caller's callback."""
        if self.callback is not None:
            self.callback(self.history, self.budget_share)

    def _use(self, new: SyntheticSet) -> None:
        self.training_set, self.heldout_set = new.training, new.heldout
        self.history.rejected += new.rejected

    def _restart(self) -> None:
        """Continue from the best weights, with a new optimiser state."""
        weights, self.fixed = eqx.partition(self.best, trainable(self.best))
        if self.has_weights:
            self.state = TrainingState.initial(weights, self.training.clip)
        else:
            self.state = TrainingState(weights, weights, ())

    def _evaluate(self, weights: PyTree) -> float:
        return float(self._loss_function(weights, self.fixed, self.heldout_set, self._loss_batch))

    @property
    def _loss_function(self) -> Any:
        """The held-out loss; without weights to train, it is evaluated only once."""
        return heldout_loss if self.has_weights else heldout_loss_once()

    @property
    def _loss_batch(self) -> int:
        return min(self.sizes.batch, self.sizes.heldout)

    def _record(self, loss: float) -> None:
        self.history.steps.append(self.previous_steps + self.step)
        self.history.loss.append(loss)
        self.history.best_loss = self.best_loss
        self.history.seconds = self.previous_seconds + self.seconds
