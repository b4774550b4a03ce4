"""Training schedule: its options, the sizes of synthetic sets, and the learning rate."""

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.jit import floats

# Memory of the activations of a batch, as a multiple of the memory of its examples.
ACTIVATIONS = 128
# Steps over which the learning rate rises, and over which weights are averaged.
WARM_UP = AVERAGED = 100


@dataclass(frozen=True)
class Training:
    """Training schedule, after Paige & Wood (2016), sec. 3.4.

    Each network is trained with Adam on minibatches of a synthetic training set. When the loss on
    held-out draws rises, or after `passes` passes, new training and held-out sets are simulated, so
    that the network cannot overfit. Training stops when the held-out loss no longer falls or at a
    limit; the weights with the lowest held-out loss are kept.

    Args:
        max_steps: largest number of gradient steps, for each network.
        max_seconds: time limit for all networks together; None for no limit.
        batch_size: examples in a gradient step.
        dataset_size: examples in a synthetic training set.
        heldout_size: examples in a held-out set.
        passes: passes over a training set before new sets are simulated.
        learning_rate: initial learning rate; it is halved when the held-out loss stops falling, and
            decreases to zero towards a limit.
        patience: passes without a lower held-out loss before the learning rate is halved.
        halvings: number of halvings of the learning rate after which training stops.
        clip: largest norm of a gradient; longer gradients are scaled down to it.
        copies: for a factor that is repeated over a plate or in time, the number of its copies that
            are used of one draw.
        memory: bytes that a synthetic set may take; two sets are held at a time. Where examples are
            too large for it, sets and batches are made smaller.

    Raises:
        ValueError: an option is out of range.
        TypeError: an option that counts is not a whole number.

    Example:
        >>> training = Training(max_seconds=60)
        >>> training.batch_size
        256
        >>> Training(batch_size=0)
        Traceback (most recent call last):
            ...
        ValueError: Training(batch_size=0): must be at least 1
    """

    max_steps: int = 20_000
    max_seconds: float | None = None
    batch_size: int = 256
    dataset_size: int = 32_768
    heldout_size: int = 4_096
    passes: int = 4
    learning_rate: float = 3e-3
    patience: int = 25
    halvings: int = 2
    clip: float = 5.0
    copies: int = 4
    memory: int = 512 * 2**20

    def __post_init__(self) -> None:
        minimum = {"max_steps": 0, "halvings": 0}
        for name, value in vars(self).items():
            if name in ("max_seconds", "learning_rate", "clip"):
                if not (value is None and name == "max_seconds") and not value > 0:
                    raise ValueError(f"Training({name}={value!r}): must be greater than 0")
            elif not isinstance(value, Integral):
                raise TypeError(f"Training({name}={value!r}): must be a whole number")
            elif value < minimum.get(name, 1):
                raise ValueError(
                    f"Training({name}={value}): must be at least {minimum.get(name, 1)}"
                )


class SetSizes(NamedTuple):
    """Sizes of a synthetic set.

    Attributes:
        batch: examples in a minibatch.
        num_batches: minibatches in the training set.
        heldout: examples held out, a multiple of `batch` or less than one batch.
    """

    batch: int
    num_batches: int
    heldout: int

    @property
    def training(self) -> int:
        """Examples in the training set."""
        return self.batch * self.num_batches

    @staticmethod
    def of(training: Training, example_bytes: int) -> "SetSizes":
        """The sizes of the schedule, or smaller ones that fit into memory."""
        available = max(training.memory // max(example_bytes, 1), 2)
        heldout = min(training.heldout_size, max(available // 5, 1))
        size = min(training.dataset_size, available - heldout)
        largest_batch = max(available // ACTIVATIONS, 8)
        batch = min(training.batch_size, size, largest_batch)
        num_batches = min(size // batch, max(training.max_steps, 1))
        return SetSizes(batch, num_batches, heldout // batch * batch or heldout)


class StepSettings(NamedTuple):
    """Learning rate of each step, and decay of the exponential moving average of the weights."""

    learning_rate: Float[Array, " batches"]
    decay: Float[Array, " batches"]


@dataclass
class LearningRateSchedule:
    """Learning rate that is halved on plateaus and decreases to zero towards a limit.

    Attributes:
        training: the options.
        max_seconds: this network's share of the time limit.
        passes_without_progress: since the held-out loss last fell or the rate was last halved.
        num_halvings: of the learning rate so far.
    """

    training: Training
    max_seconds: float | None
    passes_without_progress: int = 0
    num_halvings: int = 0

    def budget_share(self, step: int, seconds: float) -> float:
        """Share of the allowed steps or time, whichever is larger, that is in use."""
        by_steps = step / max(self.training.max_steps, 1)
        by_time = 0.0 if self.max_seconds is None else seconds / max(self.max_seconds, 1e-9)
        return max(by_steps, by_time) if self.training.max_steps else 1.0

    def next_pass(self, step: int, seconds: float, num_batches: int) -> StepSettings:
        """Settings of the next `num_batches` steps.

        Every pass has the same number of steps, so that it is compiled once; steps beyond the limit
        have learning rate zero.
        """
        steps = step + np.arange(num_batches)
        warm_up = np.minimum((steps + 1) / WARM_UP, 1.0)
        time_remaining = 1.0 - self.budget_share(step, seconds)
        remaining = np.minimum(1.0 - steps / self.training.max_steps, time_remaining)
        rate = self.training.learning_rate * 0.5**self.num_halvings
        decay = np.minimum((1 + steps) / (10 + steps), 1 - 1 / AVERAGED)
        return StepSettings(floats(rate * warm_up * np.clip(remaining, 0.0, None)), floats(decay))

    def record(self, improved: bool) -> bool:
        """Record an evaluation; true when the learning rate has been halved often enough."""
        self.passes_without_progress = 0 if improved else self.passes_without_progress + 1
        if self.passes_without_progress >= self.training.patience:
            self.passes_without_progress = 0
            self.num_halvings += 1
        return self.num_halvings > self.training.halvings
