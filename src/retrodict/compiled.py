"""A NumPyro model in; trained networks that answer any data set out.

`compile` runs every stage: trace, invert, simulate, train. `Compiled` is what it leaves: the model
with its inverse and networks, ready to infer, to train on, and to keep in a file.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from retrodict._xla import jit
from retrodict.estimators.conditional import MADE, Network, learns
from retrodict.graph.graph import Graph
from retrodict.graph.loop_surface import on_device, split_steps, stack_steps
from retrodict.graph.trace import trace
from retrodict.graph.validate import check_data
from retrodict.inference.fallback import Answers
from retrodict.inference.filtering import FilterInfo, FilterState, StreamingFilter
from retrodict.inference.methods import Inference, InferMethod, Plan, Settings, first_choice
from retrodict.inverse.inverse import Inverse, Method, invert
from retrodict.particles.posterior import Posterior
from retrodict.particles.resampling import Resampler
from retrodict.proposal.contexts import Assembly
from retrodict.proposal.proposal import Proposal
from retrodict.training.history import NetworkHistory
from retrodict.training.progress import Interruption, Progress
from retrodict.training.simulate import Simulator, names_of
from retrodict.training.train import Training, train_network


@dataclass(frozen=True)
class History:
    """What happened in training, by network.

    Attributes:
        networks: held-out loss of every network over steps, and how its training ended.
    """

    networks: Mapping[str, NetworkHistory] = field(default_factory=dict)

    @property
    def simulated(self) -> int:
        """Joint draws made."""
        return sum(h.rejected.simulated for h in self.networks.values())

    @property
    def rejected(self) -> dict[tuple[str, str], int]:
        """Draws dropped, by site and reason."""
        total: dict[tuple[str, str], int] = {}
        for history in self.networks.values():
            for what, number in history.rejected.dropped.items():
                total[what] = total.get(what, 0) + number
        return total


@dataclass(frozen=True, eq=False)
class Compiled:
    """A model, compiled.

    Attributes:
        graph: the model's dependency graph.
        inverse: the graph turned round.
        networks: one a distinct factor, by name.
        estimator: the size of the networks.
        history: of training.
        plan: the method `auto` uses, and the effective sample size of each candidate.
    """

    proposal: Proposal
    networks: dict[str, Network]
    estimator: MADE
    history: History
    plan: Plan

    @property
    def graph(self) -> Graph:
        """The model's dependency graph."""
        return self.proposal.graph.surface

    @property
    def inverse(self) -> Inverse:
        """The graph turned round."""
        return self.proposal.inverse.surface

    def train(
        self, rng_key: PRNGKeyArray, training: Training, *, progress_bar: bool = True
    ) -> "Compiled":
        """Go on training from where it stood; gives a new `Compiled`."""
        return _trained(rng_key, self, training, progress_bar)

    def save(self, path: str | Path) -> Path:
        """Keep it in one file, written whole or not at all; `retrodict.load` reads it."""
        from retrodict.saving import save

        return save(self, path)

    def propose(
        self, rng_key: PRNGKeyArray, data: Mapping[str, Any], num_samples: int
    ) -> tuple[dict[str, Array], Float[Array, " samples"]]:
        """Draws from the raw networks, unweighted, and their log q."""
        checked = check_data(self.proposal.graph, data)
        keys = jax.random.split(rng_key, num_samples)
        samples, log_q = self._propose(self.networks, keys, checked)
        return on_device(split_steps(self.proposal.graph, samples, axis=1)), log_q

    @cached_property
    def _propose(self) -> Callable[..., Any]:
        return jit.Compiled(jax.vmap(self.proposal.draw, in_axes=(None, 0, None)), {})

    def log_prob(
        self, samples: Mapping[str, Any], data: Mapping[str, Any]
    ) -> Float[Array, " samples"]:
        """log q of draws of all latents, with a leading axis."""
        checked = check_data(self.proposal.graph, data)
        own = {name: samples[name] for name in self.graph.latent}
        latents = jax.tree.map(jnp.asarray, stack_steps(self.proposal.graph, own, axis=1))
        log_q: Array = self._log_prob(self.networks, latents, checked)
        return log_q

    @cached_property
    def _log_prob(self) -> Callable[..., Any]:
        def one(networks: Any, latents: Any, data: Any) -> Array:
            return self.proposal.log_prob(networks, {**data, **latents})

        return jit.Compiled(jax.vmap(one, in_axes=(None, 0, None)), {})

    def infer(
        self,
        rng_key: PRNGKeyArray,
        data: Mapping[str, Any],
        num_particles: int = 1000,
        *,
        method: InferMethod = "auto",
        resampling: str | Resampler = "systematic",
        ess_threshold: float = 0.5,
        rescue: bool = True,
        model_args: tuple[Any, ...] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> Posterior:
        """A weighted posterior for one data set, its evidence, and a verdict on both.

        Args:
            rng_key: same key, same answer.
            data: site → values, for every observed site.
            num_particles: K.
            method: "importance", "smc", "divide", "temper", or "auto": what `plan` found best.
            resampling: "systematic", "stratified", "multinomial", "residual", or a callable.
            ess_threshold: resample when the effective sample size falls below this part of K; for
                tempering, the part that stays effective from one temperature to the next.
            rescue: whether "auto" goes on by tempering if its answer is poor: seconds instead of
                milliseconds, and the diagnostics say so.
            model_args, model_kwargs: if the model is to be called otherwise than when it was
                compiled: another number of plate elements, other fixed covariates.

        Raises:
            DataError: the data do not fit the model.
        """
        settings = self._settings(num_particles, method, resampling, ess_threshold)
        answers = self._answers(model_args, model_kwargs)
        return answers.one(rng_key, data, settings, rescue and method == "auto")

    def infer_many(
        self,
        rng_key: PRNGKeyArray,
        data: Mapping[str, Any],
        num_particles: int = 1000,
        *,
        method: InferMethod = "auto",
        resampling: str | Resampler = "systematic",
        ess_threshold: float = 0.5,
        rescue: bool = True,
        model_args: tuple[Any, ...] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        memory: int = 256 * 2**20,
        max_rescues: int = 100,
    ) -> Posterior:
        """Posteriors of many data sets: as `infer`, with a leading axis on everything.

        Data sets are done together, as many at a time as `memory` bytes allow. Those whose answer
        is poor are rescued one after the other, `max_rescues` at most.
        """
        settings = self._settings(num_particles, method, resampling, ess_threshold)
        answers = self._answers(model_args, model_kwargs)
        rescue = rescue and method == "auto"
        return answers.many(rng_key, data, settings, rescue, memory, max_rescues)

    def _answers(
        self, model_args: tuple[Any, ...] | None, model_kwargs: Mapping[str, Any] | None
    ) -> Answers:
        inference = self._inference.called_with(model_args, model_kwargs)
        # data sets of other sizes lie elsewhere
        reference = self.plan.reference if inference is self._inference else None
        return Answers(inference, self.networks, reference)

    def _settings(
        self, num_particles: int, method: str, resampling: str | Resampler, ess_threshold: float
    ) -> Settings:
        chosen = self.plan.method if method == "auto" else method
        return Settings(num_particles, chosen, resampling, ess_threshold)

    @cached_property
    def _inference(self) -> Inference:
        return Inference(self.proposal)

    def filter_init(self, rng_key: PRNGKeyArray, num_particles: int) -> FilterState:
        """Start a filter for a model with time, before its first observation.

        Latents outside of time are drawn from their prior.
        """
        return self._filter.init(rng_key, num_particles)

    def filter_step(
        self, rng_key: PRNGKeyArray, state: FilterState, data: Mapping[str, Any]
    ) -> tuple[FilterState, FilterInfo]:
        """Take in one step's observations: site → values without the axis of time.

        Cost and memory are the same at every step.
        """
        return self._filter.step(self.networks, rng_key, state, data)

    @cached_property
    def _filter(self) -> StreamingFilter:
        return StreamingFilter(self.proposal)


def compile(
    rng_key: PRNGKeyArray,
    model: Callable[..., Any],
    observed: Sequence[str],
    *,
    model_args: tuple[Any, ...] = (),
    model_kwargs: Mapping[str, Any] | None = None,
    inverse: Method = "auto",
    estimator: MADE = MADE(),  # noqa: B008 (frozen)
    training: Training = Training(),  # noqa: B008 (frozen)
    progress_bar: bool = True,
) -> Compiled:
    """Compile a NumPyro model into fast inference: minutes, once, without data.

    Args:
        rng_key: same key, same machine, same networks, unless `max_seconds` ends the training.
        model: an ordinary NumPyro model.
        observed: names of the sites that will be data.
        model_args, model_kwargs: what to call the model with: sizes and fixed covariates.
        inverse: how to turn the graph round, see `invert`.
        estimator: size of the networks.
        training: the schedule.
        progress_bar: whether to show one.
    """
    graph = trace(model, observed, model_args=model_args, model_kwargs=model_kwargs)
    proposal = Proposal.of(invert(graph, inverse), exact=estimator.hidden is None)
    build_key, train_key = jax.random.split(rng_key)
    networks = {}
    for number, (name, assemblies) in enumerate(proposal.networks().items()):
        key = jax.random.fold_in(build_key, number)
        networks[name] = proposal.build(estimator, key, assemblies)
    fresh = Compiled(proposal, networks, estimator, History(), Plan(first_choice(proposal)))
    return _trained(train_key, fresh, training, progress_bar)


def _trained(
    rng_key: PRNGKeyArray, compiled: Compiled, training: Training, progress_bar: bool
) -> Compiled:
    """Train every network in turn; each that learns has an equal share of the time left."""
    begun = time.perf_counter()
    rng_key, plan_key = jax.random.split(rng_key)
    networks = dict(compiled.networks)
    histories = dict(compiled.history.networks)
    shared = compiled.proposal.networks()
    to_learn = sum(map(learns, networks.values()))
    with Interruption() as interruption:
        for number, (name, assemblies) in enumerate(shared.items()):
            share = None
            if training.max_seconds is not None:
                left = training.max_seconds - (time.perf_counter() - begun)
                share = max(left, 0.0) / max(to_learn, 1)
            to_learn -= learns(networks[name])
            title = f"{names_of(assemblies)} ({number + 1}/{len(shared)})"
            progress = Progress(title, progress_bar)
            try:
                networks[name], histories[name] = train_network(
                    jax.random.fold_in(rng_key, number),
                    networks[name],
                    _simulator(compiled, assemblies, training),
                    training,
                    history=histories.get(name),
                    max_seconds=share,
                    report=progress,
                    interruption=interruption,
                )
            finally:
                progress.close()
    if interruption.asked:
        warnings.warn(
            "training was interrupted: the networks are the best so far. Answers are right in the "
            "limit, but may need more particles; compiled.train goes on",
            stacklevel=3,
        )
    _warn_of_dropped(histories)
    plan = compiled.plan
    if not interruption.asked:
        plan = Inference(compiled.proposal).plan(networks, plan_key)
    return replace(compiled, networks=networks, history=History(histories), plan=plan)


def _simulator(compiled: Compiled, assemblies: Sequence[Assembly], training: Training) -> Simulator:
    proposal = compiled.proposal
    return Simulator(
        proposal.graph, tuple(assemblies), proposal.designs, training.copies, proposal.draws
    )


def _warn_of_dropped(histories: Mapping[str, NetworkHistory]) -> None:
    for history in histories.values():
        if history.rejected.fraction > 0.05:
            warnings.warn(
                f"{history.rejected.fraction:.0%} of the draws from the prior were dropped, for "
                f"float32 cannot hold them: {history.rejected.describe()}. The networks have "
                "learned the rest; weights are not affected",
                stacklevel=4,
            )
            return


def parameter_count(networks: Mapping[str, Network]) -> int:
    """How many weights there are in all."""
    leaves = jax.tree.leaves(dict(networks))
    return sum(int(np.size(leaf)) for leaf in leaves if isinstance(leaf, jax.Array))
