"""Rows of synthetic data in; trained networks out, each by itself, each stopping by itself.

Minimises E_p(x,y)[−log q(x | PaH(x))], the part of the objective of Paige & Wood (2016), sec. 3.2,
that belongs to one network, by the schedule of their sec. 3.4: minibatches over a synthetic set;
when the loss on held-out draws rises, or after a number of passes, both sets are drawn anew.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from tqdm.auto import tqdm

from retrodict.networks import ConditionalMADE, trainable
from retrodict.synthetic import Rejected, Simulator, row_bytes


@dataclass(frozen=True)
class Training:
    """The schedule. Training stops when held-out loss no longer falls, or at a limit.

    Attributes:
        max_steps: gradient steps, for each network.
        max_seconds: time for all networks together; None for no limit.
        batch_size: rows in a gradient step.
        dataset_size: rows in a synthetic training set.
        heldout_size: rows in a held-out set.
        passes: over a training set, before both sets are drawn anew.
        learning_rate: at the start; it is halved when held-out loss stops falling, and falls to
            zero towards a limit.
        patience: passes without a better held-out loss before the rate is halved.
        halvings: of the rate, after which training stops.
        clip: largest norm of a gradient.
        copies: copies of a repeated factor that one draw is used for.
        memory: bytes that a training set may take; larger rows make smaller sets.
    """

    max_steps: int = 20_000
    max_seconds: float | None = None
    batch_size: int = 512
    dataset_size: int = 32_768
    heldout_size: int = 8_192
    passes: int = 4
    learning_rate: float = 2e-3
    patience: int = 6
    halvings: int = 5
    clip: float = 5.0
    copies: int = 4
    memory: int = 512 * 2**20

    def __post_init__(self) -> None:
        for name in ("batch_size", "dataset_size", "heldout_size", "passes", "patience", "copies"):
            if getattr(self, name) < 1:
                raise ValueError(f"Training({name}={getattr(self, name)}): must be at least 1")
        if self.max_steps < 0 or self.learning_rate <= 0:
            raise ValueError(f"{self!r}: max_steps and learning_rate must not be negative")


@dataclass
class NetworkHistory:
    """What became of one network.

    Attributes:
        steps, loss: gradient steps made and held-out loss, in nats, at each evaluation.
        refreshes: the steps at which both sets were drawn anew.
        best_loss: of the weights kept.
        seconds: spent on this network.
        stopped: why training ended.
        rejected: draws made for it, and draws dropped.
    """

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    refreshes: list[int] = field(default_factory=list)
    best_loss: float = float("inf")
    seconds: float = 0.0
    stopped: str = ""
    rejected: Rejected = field(default_factory=Rejected)


class State(NamedTuple):
    """What the next pass needs."""

    weights: PyTree
    optimiser: optax.OptState


def _optimiser(clip: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(clip), optax.scale_by_adam())


def _loss(network: ConditionalMADE, rows: Any) -> Float[Array, ""]:
    x, context = rows
    return -jnp.mean(jax.vmap(network.log_prob)(context, x))


@eqx.filter_jit
def heldout_loss(weights: PyTree, fixed: PyTree, rows: Any) -> Float[Array, ""]:
    """−log q averaged over held-out rows, in parts that fit the caches."""
    network = eqx.combine(weights, fixed)
    number = jax.tree.leaves(rows)[0].shape[0]
    part = max(d for d in range(1, 1025) if number % d == 0)
    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, part, *leaf.shape[1:]), rows)
    return jnp.mean(jax.lax.map(partial(_loss, network), parts))


@eqx.filter_jit
def _one_pass(
    rows: Any,
    state: State,
    fixed: PyTree,
    rng_key: PRNGKeyArray,
    rates: Float[Array, " batches"],
    batch_size: int,
    clip: float,
) -> tuple[State, Float[Array, ""]]:
    """A gradient step for each minibatch of the rows in random order."""
    optimiser = _optimiser(clip)
    number = jax.tree.leaves(rows)[0].shape[0]
    order = jax.random.permutation(rng_key, number)[: len(rates) * batch_size]

    def step(state: State, inputs: Any) -> tuple[State, Array]:
        places, rate = inputs
        batch = jax.tree.map(lambda leaf: leaf[places], rows)
        loss, gradient = eqx.filter_value_and_grad(
            lambda weights: _loss(eqx.combine(weights, fixed), batch)
        )(state.weights)
        update, optimiser_state = optimiser.update(gradient, state.optimiser)
        weights = optax.apply_updates(state.weights, jax.tree.map(lambda u: -rate * u, update))
        # A batch whose gradient overflows is passed over, not learned from.
        sound = jnp.isfinite(loss) & jnp.isfinite(optax.global_norm(gradient))
        new = State(weights, optimiser_state)
        return jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, state), loss

    state, losses = jax.lax.scan(step, state, (order.reshape(len(rates), batch_size), rates))
    return state, jnp.mean(losses)


@dataclass
class _Schedule:
    """The learning rate: halved on plateaus, and falling to zero towards a limit."""

    training: Training
    limit_seconds: float | None
    factor: float = 1.0
    waited: int = 0
    halved: int = 0

    def progress(self, step: int, seconds: float) -> float:
        """How much of the steps or the time allowed is used up."""
        by_steps = step / max(self.training.max_steps, 1)
        by_time = 0.0 if self.limit_seconds is None else seconds / max(self.limit_seconds, 1e-9)
        return max(by_steps, by_time)

    def rates(self, step: int, seconds: float, batches: int) -> np.ndarray[Any, Any]:
        steps = step + np.arange(batches)
        # A pass is always whole, so that it is compiled once; what is beyond the limit has no rate.
        warm = np.minimum((steps + 1) / 100, 1.0) * (steps < self.training.max_steps)
        left = max(1.0 - self.progress(step, seconds), 0.0)
        rates: np.ndarray[Any, Any] = self.training.learning_rate * self.factor * warm * left**0.5
        return rates

    def saw(self, better: bool) -> bool:
        """Take note of an evaluation; true when there is no more to be had."""
        self.waited = 0 if better else self.waited + 1
        if self.waited >= self.training.patience:
            self.waited, self.factor, self.halved = 0, self.factor / 2, self.halved + 1
        return self.halved > self.training.halvings


def train_network(
    rng_key: PRNGKeyArray,
    network: ConditionalMADE,
    simulator: Simulator,
    training: Training,
    *,
    history: NetworkHistory | None = None,
    max_seconds: float | None = None,
    report: Callable[[NetworkHistory], None] | None = None,
) -> tuple[ConditionalMADE, NetworkHistory]:
    """Train one network until its held-out loss no longer falls, or a limit is reached.

    Args:
        rng_key: decides everything: same key, same machine, same weights, unless time is the limit.
        network: fresh, or one to go on with; `history` says which.
        simulator: makes its rows.
        training: the schedule.
        history: of the training so far, if any.
        max_seconds: this network's share of the time.
        report: called after every pass.

    A keyboard interrupt ends training and keeps the best weights so far: `stopped` says so.
    """
    fresh = history is None
    history = history or NetworkHistory()
    begun, step = time.perf_counter(), 0
    offset = history.steps[-1] if history.steps else 0
    pass_key, *data_keys = jax.random.split(rng_key, 2)
    draw_chunk = eqx.filter_jit(jax.vmap(simulator.draw))

    def make(number: int) -> tuple[Any, Any]:
        key = jax.random.fold_in(data_keys[0], number)
        size, held = training.dataset_size, training.heldout_size
        rows = simulator.rows(draw_chunk, key, size + held, history.rejected)
        return _cut(rows, training)

    best = network
    with ThreadPoolExecutor(1) as worker:
        try:
            rows, heldout = make(0)
            if fresh:
                network = best = network.fit_scalings(rows[1], rows[0])
            weights, fixed = eqx.partition(network, trainable(network))
            state = State(weights, _optimiser(training.clip).init(weights))
            best_loss = float(heldout_loss(weights, fixed, heldout))
            history.steps.append(offset)
            history.loss.append(best_loss)
            schedule = _Schedule(training, max_seconds)
            upcoming: Future[tuple[Any, Any]] = worker.submit(make, 1)
            passes, drawn, before = 0, 1, best_loss
            while True:
                seconds = time.perf_counter() - begun
                if schedule.progress(step, seconds) >= 1:
                    history.stopped = "limit reached"
                    break
                number = jax.tree.leaves(rows)[0].shape[0]
                batch = min(training.batch_size, number)
                batches = number // batch
                rates = jnp.asarray(schedule.rates(step, seconds, batches), jnp.float32)
                pass_key, use_key = jax.random.split(pass_key)
                state, _ = _one_pass(rows, state, fixed, use_key, rates, batch, training.clip)
                step, passes = min(step + batches, training.max_steps), passes + 1
                loss = float(heldout_loss(state.weights, fixed, heldout))
                better = np.isfinite(loss) and loss < best_loss
                if better:
                    best_loss = loss
                    best = eqx.combine(jax.tree.map(jnp.array, state.weights), fixed)
                history.steps.append(offset + step)
                history.loss.append(loss)
                history.best_loss = best_loss
                history.seconds += time.perf_counter() - begun - seconds
                if report is not None:
                    report(history)
                if schedule.saw(better):
                    history.stopped = "held-out loss no longer falls"
                    break
                if not np.isfinite(loss):
                    state = _restart(best, training)
                if loss > before or passes >= training.passes:
                    rows, heldout = upcoming.result()
                    drawn += 1
                    upcoming = worker.submit(make, drawn)
                    history.refreshes.append(offset + step)
                    passes = 0
                    # Another held-out set: what was best is measured again, on the new one.
                    kept, _ = eqx.partition(best, trainable(best))
                    best_loss = float(heldout_loss(kept, fixed, heldout))
                    loss = float(heldout_loss(state.weights, fixed, heldout))
                before = loss
        except KeyboardInterrupt:
            history.stopped = "interrupted"
        finally:
            worker.shutdown(wait=False, cancel_futures=True)
    return best, history


def _restart(best: ConditionalMADE, training: Training) -> State:
    weights, _ = eqx.partition(best, trainable(best))
    weights = jax.tree.map(jnp.array, weights)
    return State(weights, _optimiser(training.clip).init(weights))


def _cut(rows: Any, training: Training) -> tuple[Any, Any]:
    """Training and held-out rows, no more than fit into memory."""
    number = jax.tree.leaves(rows)[0].shape[0]
    most = max(training.memory // max(row_bytes(rows), 1), 2 * training.batch_size)
    held = min(training.heldout_size, max(most // 4, 1))
    used = min(number - held, most)
    train_rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[:used]), rows)
    heldout = jax.tree.map(lambda leaf: jnp.asarray(leaf[number - held :]), rows)
    return train_rows, heldout


class Progress:
    """A bar a network: its loss, how often data were drawn anew, what was dropped."""

    def __init__(self, title: str, training: Training, seconds: float | None, show: bool) -> None:
        self._by_time = seconds is not None
        total = seconds if seconds is not None else training.max_steps
        self._bar = tqdm(total=total, desc=title, disable=not show, leave=True, unit="s" if self._by_time else "step")  # fmt: skip  # noqa: E501

    def __call__(self, history: NetworkHistory) -> None:
        """Show where training stands."""
        self._bar.n = round(history.seconds, 1) if self._by_time else history.steps[-1]
        notes = {"loss": f"{history.best_loss:.3f}", "refreshes": len(history.refreshes)}
        if history.rejected.total:
            notes["dropped"] = f"{history.rejected.fraction:.1%}"
        self._bar.set_postfix(notes)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
