"""Gradient steps over one synthetic set, and the held-out loss.

The objective is E_p(x,y)[-log q(x | PaH(x))], the part of the objective of Paige & Wood (2016),
sec. 3.2, that depends on one network.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from retrodict._xla.jit import run_once, supported_options
from retrodict._xla.tuning import FAST_COMPILE, NO_YNNPACK
from retrodict.estimators.estimator import Estimator
from retrodict.proposal.factor_proposals import FactorRow
from retrodict.training.schedule import StepSettings
from retrodict.training.simulate import Examples


class TrainingState(NamedTuple):
    """Weights, their exponential moving average, and the state of the optimiser.

    The average is what is evaluated and kept. It behaves like the result of a smaller learning
    rate, with less noise, so that progress shows early (Izmailov et al. 2018, "Averaging weights
    leads to wider optima and better generalization").
    """

    weights: PyTree
    average: PyTree
    optimiser: optax.OptState

    @staticmethod
    def initial(weights: PyTree, clip: float) -> "TrainingState":
        """State in which training starts from these weights."""
        return TrainingState(weights, weights, run_once(optimiser(clip).init, weights))


def optimiser(clip: float) -> optax.GradientTransformation:
    """Adam with gradient clipping, without a learning rate."""
    return optax.chain(optax.clip_by_global_norm(clip), optax.scale_by_adam())


def _loss(network: Estimator, examples: Examples) -> Float[Array, ""]:
    def log_q(example: FactorRow) -> Array:
        return network.log_prob(network.encode(example.conditions), example.latents)

    return -jnp.mean(jax.vmap(log_q)(examples))


def _heldout_loss(
    weights: PyTree, fixed: PyTree, examples: Examples, batch: int
) -> Float[Array, ""]:
    """Mean of -log q over held-out examples, computed in batches."""
    network = eqx.combine(weights, fixed)

    def split(leaf: Array) -> Array:
        return leaf.reshape(leaf.shape[0] // batch, batch, *leaf.shape[1:])

    batches = jax.tree.map(split, examples)
    return jnp.mean(jax.lax.map(partial(_loss, network), batches))


heldout_loss = jax.jit(_heldout_loss, static_argnames="batch")


# Compiler options can be checked only once JAX has started, so jitted functions that have some are
# created when they are first needed.
@cache
def heldout_loss_once() -> Any:
    """`heldout_loss` for a single evaluation: it compiles faster and runs slower."""
    return jax.jit(
        _heldout_loss, static_argnames="batch", compiler_options=supported_options(FAST_COMPILE)
    )


@cache
def jitted_pass() -> Any:
    """The compiled form of `one_pass`."""
    return jax.jit(_one_pass, compiler_options=supported_options(NO_YNNPACK))


def one_pass(
    rng_key: PRNGKeyArray,
    state: TrainingState,
    examples: Examples,
    fixed: PyTree,
    settings: StepSettings,
    clip: float,
) -> TrainingState:
    """One gradient step for each minibatch of the examples, in random order.

    Args:
        rng_key: determines the order.
        state: weights and optimiser state to start from.
        examples: the training set.
        fixed: the part of the network that is not trained.
        settings: of each step; their number is the number of minibatches.
        clip: largest norm of a gradient.
    """
    new: TrainingState = jitted_pass()(rng_key, state, examples, fixed, settings, clip)
    return new


def _one_pass(
    rng_key: PRNGKeyArray,
    state: TrainingState,
    examples: Examples,
    fixed: PyTree,
    settings: StepSettings,
    clip: float,
) -> TrainingState:
    adam = optimiser(clip)
    number = jax.tree.leaves(examples)[0].shape[0]
    order = jax.random.permutation(rng_key, number).reshape(len(settings.learning_rate), -1)

    def step(
        state: TrainingState, inputs: tuple[Array, StepSettings]
    ) -> tuple[TrainingState, None]:
        indices, (rate, decay) = inputs
        batch = jax.tree.map(lambda leaf: leaf[indices], examples)
        loss, gradient = eqx.filter_value_and_grad(
            lambda weights: _loss(eqx.combine(weights, fixed), batch)
        )(state.weights)
        update, optimiser_state = adam.update(gradient, state.optimiser)
        weights = optax.apply_updates(state.weights, jax.tree.map(lambda u: -rate * u, update))
        average = jax.tree.map(lambda a, w: decay * a + (1 - decay) * w, state.average, weights)
        new = TrainingState(weights, average, optimiser_state)
        # A batch with a non-finite loss or gradient is skipped.
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(gradient))
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state), None

    state, _ = jax.lax.scan(step, state, (order, settings))
    return state
