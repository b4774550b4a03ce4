"""Compile a NumPyro model into amortized inference.

`compile` runs every stage: trace, invert, simulate, train, plan. The result is a `Compiled`: the
model with its inverse and trained networks, which infers, continues training and can be saved.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from retrodict._xla import jit
from retrodict.estimators.conditional import MADE, has_weights
from retrodict.estimators.estimator import Estimator
from retrodict.graph.graph import Graph
from retrodict.graph.loop_surface import on_device, split_steps, stack_steps
from retrodict.graph.trace import Observed, trace
from retrodict.graph.validate import check_data
from retrodict.inference.fallback import FallbackInference
from retrodict.inference.filtering import FilterInfo, FilterState, StreamingFilter
from retrodict.inference.methods import Inference
from retrodict.inference.planning import Plan, Planner
from retrodict.inference.samplers import InferMethod, Settings, first_choice
from retrodict.inverse.inverse import Inverse, Method, invert
from retrodict.particles.posterior import Posterior
from retrodict.particles.resampling import Resampler
from retrodict.proposal.proposal import Proposal
from retrodict.saving import CompiledParts, read_model, write_model
from retrodict.training.history import NetworkHistory
from retrodict.training.progress import Interruption, Progress, status
from retrodict.training.schedule import Training
from retrodict.training.simulate import Simulator, latent_names
from retrodict.training.train import train_network


@dataclass(frozen=True)
class History:
    """The training history of a compiled model.

    Attributes:
        networks: for each network, its held-out loss over steps and why training stopped.
    """

    networks: Mapping[str, NetworkHistory] = field(default_factory=dict)

    @property
    def simulated(self) -> int:
        """Number of joint draws simulated."""
        return sum(h.rejected.simulated for h in self.networks.values())

    @property
    def rejected(self) -> dict[tuple[str, str], int]:
        """Number of draws dropped, by site and reason."""
        counts = (history.rejected.dropped for history in self.networks.values())
        return dict(sum(counts, Counter()))


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled model: amortized inference for any data set.

    Attributes:
        graph: the model's dependency graph.
        inverse: the inverse of the graph.
        networks: the trained estimators, by name; factors of equal structure share one.
        estimator: the size of the networks.
        history: the training history.
        plan: the method that `method="auto"` uses, and the precision of each candidate.
    """

    proposal: Proposal
    networks: dict[str, Estimator]
    estimator: MADE
    history: History
    plan: Plan

    @property
    def graph(self) -> Graph:
        """The model's dependency graph."""
        return self.proposal.graph.surface

    @property
    def inverse(self) -> Inverse:
        """The inverse of the dependency graph."""
        return self.proposal.inverse.surface

    def train(
        self, rng_key: PRNGKeyArray, training: Training, *, progress_bar: bool = True
    ) -> "Compiled":
        """Continue training.

        Args:
            rng_key: determines the synthetic data.
            training: the schedule; `max_steps` and `max_seconds` count from now.
            progress_bar: whether to show one.

        Returns:
            A new `Compiled`; this one is not changed.
        """
        return _train(rng_key, self, training, progress_bar)

    def save(self, path: str | Path, *, origin: Mapping[str, str | None] | None = None) -> Path:
        """Write the compiled model to one file, which `retrodict.load` reads.

        The file holds no code: loading needs the model again. An existing file is replaced only
        when the new one is complete.

        Args:
            path: path of the file; by convention it ends in `.rd`.
            origin: where the command line finds the model again: `module`, `name` and `file`. By
                default they are taken from the model's function.

        Returns:
            The path.

        Raises:
            TypeError: an argument of the model cannot be saved; the message says which.
            OSError: the path cannot be written.
        """
        parts = CompiledParts(
            self.proposal, self.networks, self.estimator, self.history.networks, self.plan
        )
        return write_model(path, parts, origin)

    def propose(
        self, rng_key: PRNGKeyArray, data: Mapping[str, Any], num_samples: int
    ) -> tuple[dict[str, Array], Float[Array, " samples"]]:
        """Sample the proposal q(x | y), without weights.

        Args:
            rng_key: determines the draws.
            data: site → values, for every observed site.
            num_samples: number of draws.

        Returns:
            Latent site → `(num_samples, *shape)`, and log q of each draw, `(num_samples,)`.

        Raises:
            DataError: the data do not fit the model.
        """
        checked = check_data(self.proposal.graph, data)
        keys = jax.random.split(rng_key, num_samples)
        samples, log_q = self._propose(self.networks, keys, checked)
        return on_device(split_steps(self.proposal.graph, samples, axis=1)), log_q

    @cached_property
    def _propose(self) -> Callable[..., Any]:
        return jit.CompiledFunction(jax.vmap(self.proposal.draw, in_axes=(None, 0, None)), {})

    def log_prob(
        self, samples: Mapping[str, Any], data: Mapping[str, Any]
    ) -> Float[Array, " samples"]:
        """Evaluate log q(x | y) of the proposal.

        Args:
            samples: latent site → `(num_samples, *shape)`, for every latent site.
            data: site → values, for every observed site.

        Returns:
            log q of each draw, `(num_samples,)`.

        Raises:
            DataError: the data do not fit the model.
        """
        checked = check_data(self.proposal.graph, data)
        by_site = {name: samples[name] for name in self.graph.latent}
        latents = jax.tree.map(jnp.asarray, stack_steps(self.proposal.graph, by_site, axis=1))
        log_q: Array = self._log_prob(self.networks, latents, checked)
        return log_q

    @cached_property
    def _log_prob(self) -> Callable[..., Any]:
        def one(networks: Any, latents: Any, data: Any) -> Array:
            return self.proposal.log_prob(networks, {**data, **latents})

        return jit.CompiledFunction(jax.vmap(one, in_axes=(None, 0, None)), {})

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
        """Infer the weighted posterior of one data set, its evidence and a verdict on both.

        Args:
            rng_key: equal keys give equal results.
            data: site → values, for every observed site.
            num_particles: number of particles K.
            method: "importance", "smc", "divide" (divide and conquer), "temper", or "auto": the
                method that `plan` found most precise.
            resampling: "systematic", "stratified", "multinomial", "residual", or a callable.
            ess_threshold: resample when the effective sample size falls below this share of K; for
                tempering, the share that stays effective from one temperature to the next.
            rescue: whether "auto" falls back to tempering if its result is poor. That takes seconds
                instead of milliseconds, and the diagnostics say so.
            model_args, model_kwargs: arguments of the model if they differ from those that it was
                compiled with: another number of plate elements, other fixed covariates.

        Returns:
            A `Posterior` with `num_particles` weighted particles.

        Raises:
            DataError: the data do not fit the model.

        References:
            Paige & Wood (2016), sec. 2 and 3.
        """
        settings = self._settings(num_particles, method, resampling, ess_threshold)
        inference = self._with_fallback(model_args, model_kwargs)
        return inference.one(rng_key, data, settings, rescue and method == "auto")

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
        max_rescue_seconds: float = 600.0,
        progress_bar: bool = True,
    ) -> Posterior:
        """Infer the posteriors of many data sets; see `infer`.

        Data sets are processed in batches of as many as `memory` bytes allow. Poor results fall
        back to tempering, several at a time. Those that are not done within `max_rescue_seconds`
        stay poor; a warning gives their number, and their diagnostics the reason.

        Args:
            rng_key, num_particles, method, resampling, ess_threshold, rescue, model_args,
                model_kwargs: see `infer`.
            data: site → `(datasets, *shape)`, for every observed site.
            memory: bytes that one batch may take.
            max_rescue_seconds: time for the fallback to tempering, of all data sets together.
            progress_bar: whether to show how many data sets have fallen back to tempering.

        Returns:
            A `Posterior` with a leading axis of data sets.

        Raises:
            DataError: the data do not fit the model.
        """
        settings = self._settings(num_particles, method, resampling, ess_threshold)
        inference = self._with_fallback(model_args, model_kwargs)
        return inference.many(
            rng_key,
            data,
            settings,
            rescue=rescue and method == "auto",
            memory=memory,
            max_rescue_seconds=max_rescue_seconds,
            progress_bar=progress_bar,
        )

    def _with_fallback(
        self, model_args: tuple[Any, ...] | None, model_kwargs: Mapping[str, Any] | None
    ) -> FallbackInference:
        inference = self._inference.called_with(model_args, model_kwargs)
        # Data sets of other sizes have other statistics.
        reference = self.plan.reference if inference is self._inference else None
        return FallbackInference(inference, self.networks, reference)

    def _settings(
        self, num_particles: int, method: str, resampling: str | Resampler, ess_threshold: float
    ) -> Settings:
        chosen = self.plan.method if method == "auto" else method
        return Settings(num_particles, chosen, resampling, ess_threshold)

    @cached_property
    def _inference(self) -> Inference:
        return Inference(self.proposal)

    def filter_init(self, rng_key: PRNGKeyArray, num_particles: int) -> FilterState:
        """Start a particle filter, before the first observation.

        Latents outside of time are drawn from their prior.

        Args:
            rng_key: determines these draws.
            num_particles: number of particles.

        Raises:
            ValueError: the model has no single scan that alternates latents and observations.
        """
        return self._filter.init(rng_key, num_particles)

    def filter_step(
        self, rng_key: PRNGKeyArray, state: FilterState, data: Mapping[str, Any]
    ) -> tuple[FilterState, FilterInfo]:
        """Advance the filter by one step, at constant cost and memory.

        Args:
            rng_key: determines this step's draws.
            state: from `filter_init` or the step before.
            data: site → this step's values, without the axis of time.

        Returns:
            The next state, and the effective sample size before the resampling decision with
            whether it led to resampling.

        Raises:
            DataError: the data do not fit the model.
        """
        return self._filter.step(self.networks, rng_key, state, data)

    @cached_property
    def _filter(self) -> StreamingFilter:
        return StreamingFilter(self.proposal)


def compile(
    rng_key: PRNGKeyArray,
    model: Callable[..., Any],
    observed: Observed,
    *,
    model_args: tuple[Any, ...] = (),
    model_kwargs: Mapping[str, Any] | None = None,
    inverse: Method = "auto",
    estimator: MADE = MADE(),  # noqa: B008 (frozen)
    training: Training = Training(),  # noqa: B008 (frozen)
    progress_bar: bool = True,
) -> Compiled:
    """Compile a NumPyro model into fast inference; it takes minutes, once, and needs no data.

    Args:
        rng_key: equal keys give equal networks on one machine, unless `max_seconds` ends training.
        model: an ordinary NumPyro model.
        observed: names of the sites that will be data, or a dict from names to the shape of the
            data or an example, see `trace`.
        model_args, model_kwargs: what to call the model with: sizes and fixed covariates.
        inverse: how to invert the dependency graph, see `invert`.
        estimator: size of the networks.
        training: the schedule.
        progress_bar: whether to show one.
    """
    with status("tracing and inverting the model", progress_bar):
        graph = trace(model, observed, model_args=model_args, model_kwargs=model_kwargs)
        inverted = invert(graph, inverse)
    _warn_of_shared_arguments(graph)
    with status("recognising conditionals", progress_bar):
        proposal = Proposal.of(inverted, analytic=estimator.hidden is None)
    build_key, train_key = jax.random.split(rng_key)
    networks = {}
    for number, (name, structures) in enumerate(proposal.networks().items()):
        key = jax.random.fold_in(build_key, number)
        networks[name] = proposal.build(estimator, key, structures)
    untrained = Compiled(proposal, networks, estimator, History(), Plan(first_choice(proposal)))
    return _train(train_key, untrained, training, progress_bar)


def load(path: str | Path, model: Callable[..., Any]) -> Compiled:
    """Load a compiled model from a file that `Compiled.save` wrote.

    Args:
        path: path of the file.
        model: the model that was compiled. The file holds its arguments, but not its code.

    Returns:
        The compiled model, which gives the same results as the one that was saved.

    Raises:
        DamagedFile: the file is not a retrodict file, is damaged, or was saved with another
            floating-point precision of JAX.
        NewerFormat, OlderFormat: the file was written by another version of retrodict.
        WrongModel: the model has another graph than the one that was compiled.
        OSError: the file cannot be read.
    """
    parts = read_model(path, model)
    history = History(parts.histories)
    return Compiled(parts.proposal, dict(parts.networks), parts.estimator, history, parts.plan)


class TrainingOptions(NamedTuple):
    """How networks are trained.

    Attributes:
        training: the schedule.
        progress_bar: whether to show one.
        interruption: a request to stop.
        report: called with the progress bar, the history and the share of the budget in use.
    """

    training: Training
    progress_bar: bool
    interruption: Interruption
    report: Callable[[Progress, NetworkHistory, float], None]


def _train(
    rng_key: PRNGKeyArray, compiled: Compiled, training: Training, progress_bar: bool
) -> Compiled:
    """Train every network, and choose the inference method."""
    rng_key, plan_key = jax.random.split(rng_key)
    planner = Planner(compiled.proposal, compiled.networks)
    with Interruption() as interruption, ThreadPoolExecutor(1) as compiler:

        @cache
        def compile_planner() -> None:
            # An error occurs again where the program is called, and is raised there.
            for compile_program in planner.lower():
                compiler.submit(compile_program)

        def report(progress: Progress, history: NetworkHistory, budget_share: float) -> None:
            progress(history, budget_share)
            compile_planner()  # once, while the first network's programs are compiled

        options = TrainingOptions(training, progress_bar, interruption, report)
        networks, histories = _train_networks(rng_key, compiled, options)
    if interruption.requested:
        warnings.warn(
            "training was interrupted: the networks are the best so far. Results are still "
            "consistent, but may need more particles; compiled.train continues training",
            stacklevel=3,
        )
    _warn_of_dropped(histories)
    plan = compiled.plan
    if not interruption.requested:
        with status("comparing inference methods", progress_bar):
            plan = planner.plan(networks, plan_key)
    return replace(compiled, networks=networks, history=History(histories), plan=plan)


def _train_networks(
    rng_key: PRNGKeyArray, compiled: Compiled, options: TrainingOptions
) -> tuple[dict[str, Estimator], dict[str, NetworkHistory]]:
    """Train every network in turn; each that learns has an equal share of the remaining time."""
    start = time.perf_counter()
    networks, proposal = dict(compiled.networks), compiled.proposal
    histories = dict(compiled.history.networks)
    training = options.training
    num_untrained = sum(map(has_weights, networks.values()))
    for number, (name, structures) in enumerate(proposal.networks().items()):
        share = None
        if training.max_seconds is not None:
            remaining = training.max_seconds - (time.perf_counter() - start)
            share = max(remaining, 0.0) / max(num_untrained, 1)
        num_untrained -= has_weights(networks[name])
        title = f"{latent_names(structures)} ({number + 1}/{len(networks)})"
        simulator = Simulator(
            proposal.graph,
            tuple(structures),
            proposal.covariates,
            training.copies,
            proposal.sample_prior,
        )
        with closing(Progress(title, options.progress_bar)) as progress:
            networks[name], histories[name] = train_network(
                jax.random.fold_in(rng_key, number),
                networks[name],
                simulator,
                training,
                history=histories.get(name),
                max_seconds=share,
                report=partial(options.report, progress),
                interruption=options.interruption,
            )
    return networks, histories


def _warn_of_shared_arguments(graph: Graph) -> None:
    for argument, site, dependents, _ in graph.shared_arguments:
        warnings.warn(
            f"the argument '{argument}' holds the data of site '{site}' and enters the density of "
            f"{', '.join(dependents)} too. Training simulates the site, but not the argument, and "
            "infer needs the argument of every data set. Use the value that numpyro.sample returns "
            f"for '{site}' in place of the argument, for a series in a scan that carries it",
            stacklevel=3,
        )


def _warn_of_dropped(histories: Mapping[str, NetworkHistory]) -> None:
    for history in histories.values():
        if history.rejected.fraction > 0.05:
            warnings.warn(
                f"{history.rejected.fraction:.0%} of the draws from the prior were dropped, "
                f"because float32 cannot represent them: {history.rejected.describe()}. The "
                "networks were trained on the others; importance weights are not affected",
                stacklevel=4,
            )
            return


def parameter_count(networks: Mapping[str, Estimator]) -> int:
    """The number of weights of all networks."""
    leaves = jax.tree.leaves(dict(networks))
    return sum(int(np.size(leaf)) for leaf in leaves if isinstance(leaf, jax.Array))
