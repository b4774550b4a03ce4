"""Rows of synthetic data in; trained networks out, each by itself, each stopping by itself.

Minimises E_p(x,y)[−log q(x | PaH(x))], the part of the objective of Paige & Wood (2016), sec. 3.2,
that belongs to one network, by the schedule of their sec. 3.4: minibatches over a synthetic set;
when the loss on held-out draws rises, or after a number of passes, both sets are drawn anew.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from retrodict._xla.jit import QUICKLY, UNASSISTED, floats, known, run_once, shaped
from retrodict.estimators.conditional import Network, learns, trainable
from retrodict.training.history import NetworkHistory
from retrodict.training.progress import Interruption
from retrodict.training.simulate import Rows, Sets, Simulator, Split

Report: TypeAlias = Callable[[NetworkHistory, float], None]

# Working a batch through a network takes some hundred times the memory of its rows.
ACTIVATIONS = 128
# Steps over which the rate rises, and over which weights are averaged.
WARM_UP = AVERAGED = 100


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
        memory: bytes that a synthetic set may take, of which two are held at a time; if rows are
            so large that it does not suffice, sets and batches are made smaller.
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
        least = {"max_steps": 0, "halvings": 0}
        for name, value in vars(self).items():
            if name in ("max_seconds", "learning_rate", "clip"):
                if not (value is None and name == "max_seconds") and not value > 0:
                    raise ValueError(f"Training({name}={value!r}): must be greater than 0")
            elif not isinstance(value, Integral):
                raise TypeError(f"Training({name}={value!r}): must be a whole number")
            elif value < least.get(name, 1):
                raise ValueError(f"Training({name}={value}): must be at least {least.get(name, 1)}")


class Sizes(NamedTuple):
    """What a training set is made of: batches of rows, and rows held out in parts as large."""

    batch: int
    batches: int
    held: int

    @staticmethod
    def of(training: Training, row_bytes: int) -> "Sizes":
        """The sizes asked for, or smaller ones that fit into memory."""
        most = max(training.memory // max(row_bytes, 1), 2)
        held = min(training.heldout_size, max(most // 5, 1))
        size = min(training.dataset_size, most - held)
        workable = max(most // ACTIVATIONS, 8)
        batch = min(training.batch_size, size, workable)
        batches = min(size // batch, max(training.max_steps, 1))
        return Sizes(batch, batches, held // batch * batch or held)


class State(NamedTuple):
    """What the next pass needs; the average of the weights over recent steps is what is kept.

    An average is better than what it is of, as if the rate were smaller, and has less noise:
    whether there is progress shows at once (Izmailov et al. 2018, "Averaging weights leads to
    wider optima and better generalization").
    """

    weights: PyTree
    average: PyTree
    optimiser: optax.OptState

    @staticmethod
    def start(weights: PyTree, clip: float) -> "State":
        """Set out from some weights."""
        return State(weights, weights, run_once(optimiser(clip).init, weights))


class Pace(NamedTuple):
    """For every step, the rate, and how much of the average of weights is kept."""

    rate: Float[Array, " batches"]
    keep: Float[Array, " batches"]


def optimiser(clip: float) -> optax.GradientTransformation:
    """Adam with clipping; the rate is applied apart."""
    return optax.chain(optax.clip_by_global_norm(clip), optax.scale_by_adam())


def _loss(network: Network, rows: Rows) -> Float[Array, ""]:
    x, context = rows
    return -jnp.mean(jax.vmap(network.log_prob)(context, x))


def _heldout_loss(weights: PyTree, fixed: PyTree, rows: Rows, part: int) -> Float[Array, ""]:
    """−log q averaged over held-out rows, worked through in parts."""
    network = eqx.combine(weights, fixed)

    def cut(leaf: Array) -> Array:
        return leaf.reshape(leaf.shape[0] // part, part, *leaf.shape[1:])

    parts = jax.tree.map(cut, rows)
    return jnp.mean(jax.lax.map(partial(_loss, network), parts))


heldout_loss = jax.jit(_heldout_loss, static_argnames="part")


@cache
def _loss_once() -> Any:
    """The same, to be worked out but once; made when it is first needed: see `known`."""
    return jax.jit(_heldout_loss, static_argnames="part", compiler_options=known(QUICKLY))


def one_pass(
    rng_key: PRNGKeyArray,
    state: State,
    rows: Rows,
    fixed: PyTree,
    pace: Pace,
    clip: float,
) -> State:
    """A gradient step for each minibatch of the rows in random order."""
    new: State = _jitted_pass()(rng_key, state, rows, fixed, pace, clip)
    return new


@cache
def _jitted_pass() -> Any:
    """Made when it is first needed: see `known`."""
    return jax.jit(_one_pass, compiler_options=known(UNASSISTED))


def _one_pass(
    rng_key: PRNGKeyArray, state: State, rows: Rows, fixed: PyTree, pace: Pace, clip: float
) -> State:
    adam = optimiser(clip)
    number = jax.tree.leaves(rows)[0].shape[0]
    order = jax.random.permutation(rng_key, number).reshape(len(pace.rate), -1)

    def step(state: State, inputs: tuple[Array, Pace]) -> tuple[State, None]:
        places, (rate, keep) = inputs
        batch = jax.tree.map(lambda leaf: leaf[places], rows)
        loss, gradient = eqx.filter_value_and_grad(
            lambda weights: _loss(eqx.combine(weights, fixed), batch)
        )(state.weights)
        update, optimiser_state = adam.update(gradient, state.optimiser)
        weights = optax.apply_updates(state.weights, jax.tree.map(lambda u: -rate * u, update))
        # A batch whose gradient overflows is passed over, not learned from.
        sound = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(gradient))
        average = jax.tree.map(lambda a, w: keep * a + (1 - keep) * w, state.average, weights)
        new = State(weights, average, optimiser_state)
        return jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, state), None

    state, _ = jax.lax.scan(step, state, (order, pace))
    return state


@dataclass
class _Schedule:
    """The learning rate: halved on plateaus, and falling to zero towards a limit."""

    training: Training
    limit_seconds: float | None
    waited: int = 0
    halved: int = 0

    def used(self, step: int, seconds: float) -> float:
        """How much of the steps or the time allowed is used up."""
        by_steps = step / max(self.training.max_steps, 1)
        by_time = 0.0 if self.limit_seconds is None else seconds / max(self.limit_seconds, 1e-9)
        return max(by_steps, by_time) if self.training.max_steps else 1.0

    def pace(self, step: int, seconds: float, batches: int) -> Pace:
        """For the next steps.

        A pass is always whole, so that it is compiled once; steps beyond the limit have rate zero.
        """
        steps = step + np.arange(batches)
        warm = np.minimum((steps + 1) / WARM_UP, 1.0)
        by_time = 1.0 - self.used(step, seconds)
        left = np.clip(np.minimum(1.0 - steps / self.training.max_steps, by_time), 0.0, None)
        rate = self.training.learning_rate * 0.5**self.halved
        keep = np.minimum((1 + steps) / (10 + steps), 1 - 1 / AVERAGED)
        return Pace(floats(rate * warm * left), floats(keep))

    def saw(self, better: bool) -> bool:
        """Take note of an evaluation; true when there is no more to be had."""
        self.waited = 0 if better else self.waited + 1
        if self.waited >= self.training.patience:
            self.waited, self.halved = 0, self.halved + 1
        return self.halved > self.training.halvings


def train_network(
    rng_key: PRNGKeyArray,
    network: Network,
    simulator: Simulator,
    training: Training,
    *,
    history: NetworkHistory | None = None,
    max_seconds: float | None = None,
    report: Report | None = None,
    interruption: Interruption | None = None,
) -> tuple[Network, NetworkHistory]:
    """Train one network until its held-out loss no longer falls, or a limit is reached.

    Args:
        rng_key: decides everything: same key, same machine, same weights, unless time is the limit.
        network: fresh, or one to go on with; `history` says which.
        simulator: makes its rows.
        training: the schedule.
        history: of the training so far, if any; it is left as it is.
        max_seconds: this network's share of the time.
        report: called before training and after every pass, with the share of steps or time that
            is used up.
        interruption: one that was taken note of, or a `KeyboardInterrupt`, ends training and keeps
            the best weights so far; `stopped` says so.
    """
    data_key, pass_key = jax.random.split(rng_key)
    interruption = interruption or Interruption()
    run = _Run(network, training, simulator, history, max_seconds)
    # What comes next is compiled while rows are made or measured. What goes wrong there goes wrong
    # once more where it is used, and is raised.
    with ThreadPoolExecutor(1) as beside, run.sets(data_key, interruption) as sets:
        ready = beside.submit(run.compile_loss)
        try:
            run.begin(_first(sets, interruption))
            wait([ready])
            if not interruption.asked:
                if not run.finished(interruption):
                    ready = beside.submit(run.compile_pass)
                run.measure_first()
                if report is not None:
                    report(run.history, run.used)
            while not run.finished(interruption):
                pass_key, use_key = jax.random.split(pass_key)
                wait([ready])
                run.one_pass(use_key)
                if report is not None:
                    report(run.history, run.used)
                if run.needs_refresh and not run.finished(interruption):
                    upcoming = sets.next()
                    # Once asked to stop, sets are cut short.
                    if not interruption.asked:
                        run.refresh(upcoming)
        except KeyboardInterrupt:
            interruption.note()
            run.finished(interruption)
    if report is not None and run.history.steps:
        report(run.history, run.used)
    return run.best, run.history


def _first(sets: Sets, interruption: Interruption) -> Split:
    """The first set, cut short if interrupted: a usable network needs scalings at least."""
    try:
        return sets.next()
    except KeyboardInterrupt:
        interruption.note()
        return sets.next()


class _Run:
    """The training of one network: where it stands, and the best so far."""

    rows: Rows
    heldout: Rows
    state: State
    fixed: PyTree

    def __init__(
        self,
        network: Network,
        training: Training,
        simulator: Simulator,
        history: NetworkHistory | None,
        max_seconds: float | None,
    ) -> None:
        self.best, self.simulator = network, simulator
        self.nothing = not learns(network)
        if self.nothing:  # a few rows show where the prior lies
            few = min(training.dataset_size, training.heldout_size)
            training = replace(training, dataset_size=few)
        self.training = training
        self.fresh = history is None
        self.history = NetworkHistory() if history is None else history.copy()
        self.schedule = _Schedule(training, max_seconds)
        self.sizes = Sizes.of(training, simulator.row_bytes)
        self.offset = self.history.steps[-1] if self.history.steps else 0
        self.begun, self.earlier = time.perf_counter(), self.history.seconds
        self.step = self.passes = 0
        self.best_loss = self.last_loss = float("inf")
        self.needs_refresh = self.no_more = False

    def sets(self, rng_key: PRNGKeyArray, interruption: Interruption) -> Sets:
        size = self.sizes.batch * self.sizes.batches
        return Sets(
            self.simulator,
            rng_key,
            size,
            self.sizes.held,
            lambda: interruption.asked,
            ahead=not self.nothing,
        )

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    @property
    def used(self) -> float:
        return self.schedule.used(self.step, self.seconds)

    def compile_loss(self) -> None:
        """Compile what measures the loss, before there is anything to measure."""
        weights, fixed = eqx.partition(self.best, trainable(self.best))
        rows = self._shapes(self.sizes.held)
        self._measure.lower(weights, fixed, rows, self._part).compile()

    def compile_pass(self) -> None:
        """Compile what learns."""
        size, clip = self.sizes.batch * self.sizes.batches, self.training.clip
        pace = self.schedule.pace(0, 0.0, self.sizes.batches)
        key, rows = jax.random.key(0), self._shapes(size)
        _jitted_pass().lower(key, self.state, rows, self.fixed, pace, clip).compile()

    def _shapes(self, number: int) -> Rows:
        return jax.tree.map(
            lambda leaf: shaped((number, *leaf.shape), leaf.dtype),
            self.simulator.row,
        )

    def begin(self, first: Split) -> None:
        """Take the first set; fit the scalings of a fresh network to it."""
        self._take(first)
        if self.fresh:
            x, context = self.rows if _number(self.rows) else self.heldout
            self.best = self.best.fit_scalings(context, x)
        self._restart()

    def measure_first(self) -> None:
        self.best_loss = self.last_loss = self._heldout_loss(self.state.average)
        self._note(self.best_loss)

    def one_pass(self, rng_key: PRNGKeyArray) -> None:
        """Learn from the set once, and see what it brought."""
        batches = self.sizes.batches
        pace = self.schedule.pace(self.step, self.seconds, batches)
        state = one_pass(rng_key, self.state, self.rows, self.fixed, pace, self.training.clip)
        loss = self._heldout_loss(state.average)
        self.state = state
        self.step, self.passes = min(self.step + batches, self.training.max_steps), self.passes + 1
        better = loss < self.best_loss
        if better:
            self.best, self.best_loss = eqx.combine(state.average, self.fixed), loss
        self._note(loss)
        self.no_more = self.schedule.saw(better)
        if not np.isfinite(loss):
            self._restart()
        self.needs_refresh = not loss <= self.last_loss or self.passes >= self.training.passes
        self.last_loss = loss

    def refresh(self, upcoming: Split) -> None:
        """Go on with another set, on whose held-out rows what was best is measured again."""
        self._take(upcoming)
        self.history.refreshes.append(self.offset + self.step)
        self.passes, self.needs_refresh = 0, False
        kept, _ = eqx.partition(self.best, trainable(self.best))
        self.history.best_loss = self.best_loss = self._heldout_loss(kept)
        self.last_loss = self._heldout_loss(self.state.average)

    def finished(self, interruption: Interruption) -> bool:
        """Whether to stop; the history says why."""
        if interruption.asked:
            self.history.stopped = "interrupted"
        elif self.nothing:
            self.history.stopped = "nothing is left to be learned"
        elif self.no_more:
            self.history.stopped = "held-out loss no longer falls"
        elif self.used >= 1:
            self.history.stopped = "limit reached"
        self.history.seconds = self.earlier + self.seconds
        return bool(self.history.stopped)

    def _take(self, new: Split) -> None:
        self.rows, self.heldout = new.rows, new.heldout
        self.history.rejected += new.rejected

    def _restart(self) -> None:
        """Set out from the best weights."""
        weights, self.fixed = eqx.partition(self.best, trainable(self.best))
        if self.nothing:
            self.state = State(weights, weights, ())
        else:
            self.state = State.start(weights, self.training.clip)

    def _heldout_loss(self, weights: PyTree) -> float:
        return float(self._measure(weights, self.fixed, self.heldout, self._part))

    @property
    def _measure(self) -> Any:
        """What works out the loss: but once, where nothing is learned."""
        return _loss_once() if self.nothing else heldout_loss

    @property
    def _part(self) -> int:
        return min(self.sizes.batch, self.sizes.held)

    def _note(self, loss: float) -> None:
        self.history.steps.append(self.offset + self.step)
        self.history.loss.append(loss)
        self.history.best_loss = self.best_loss
        self.history.seconds = self.earlier + self.seconds


def _number(rows: Rows) -> int:
    number: int = jax.tree.leaves(rows)[0].shape[0]
    return number
