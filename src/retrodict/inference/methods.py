"""Networks and a data set in; a `Posterior` out, by the method asked for or planned.

Every setting is compiled by XLA once and kept; only values change from then on. See sec. 2 of
Paige & Wood (2016).
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from retrodict._xla.jit import ANSWERING, QUICKLY, Compiled
from retrodict.errors import DataError, UnsupportedModel
from retrodict.graph.graph import Graph
from retrodict.graph.loop_surface import by_user_site, split_steps
from retrodict.graph.trace import trace
from retrodict.graph.validate import check_data
from retrodict.inference.divide_conquer import Divider
from retrodict.inference.loop_posterior import user_posterior
from retrodict.inference.smc import Engine, Outcome, by_parts
from retrodict.inference.tempering_driver import Rescuer
from retrodict.inverse.inverse import invert
from retrodict.inverse.plate_tree import divisible
from retrodict.particles.diagnostics import Judged, judge
from retrodict.particles.out_of_distribution import DATASETS, Reference
from retrodict.particles.population import blame
from retrodict.particles.posterior import Posterior, make_posterior, stacked
from retrodict.particles.resampling import Resampler, resampler
from retrodict.particles.weights import LogEvidence
from retrodict.proposal.proposal import Networks, Proposal
from retrodict.training.prior_datasets import fresh_datasets
from retrodict.types import Values

FEW_PARTICLES = 100
InferMethod = Literal["auto", "importance", "smc", "divide", "temper"]


class ImpossibleData(DataError):  # noqa: N818 (named beside DataError)
    """No particle of any weight could have made the data."""


@dataclass(frozen=True)
class Settings:
    """How to infer: all that needs another compilation when it changes.

    Attributes:
        num_particles: K.
        method: one of the candidates, or "temper".
        resampling: the scheme.
        ess_threshold: the part of K below which to resample.
    """

    num_particles: int
    method: str
    resampling: str | Resampler = "systematic"
    ess_threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.num_particles < 1:
            raise ValueError(f"num_particles is {self.num_particles}; at least one is needed")
        if not 0 <= self.ess_threshold <= 1:
            raise ValueError(
                f"ess_threshold is {self.ess_threshold}; it is a part of K, from 0 to 1"
            )


@dataclass(frozen=True)
class Plan:
    """Which method `auto` uses, and why.

    Attributes:
        method: the best on held-out synthetic data.
        ess: for each candidate, the median over data sets of 1 / (Var[log Ẑ] + 1/K): how many
            independent draws from the posterior would give an evidence as precise. For importance
            sampling it is the usual effective sample size; for SMC, which resampling makes look
            better than it is, it counts what was lost on the way.
        num_particles: K in these runs.
        num_datasets: on how many data sets.
        reference: where synthetic data sets lie, for others to be compared with.
    """

    method: str
    ess: Mapping[str, float] = field(default_factory=dict)
    num_particles: int = 0
    num_datasets: int = 0
    reference: Reference | None = None

    @staticmethod
    def read(plain: Mapping[str, Any]) -> "Plan":
        """As it was written into a file."""
        kept = plain.get("reference")
        return Plan(**{**plain, "reference": None if kept is None else Reference.read(kept)})


@dataclass(frozen=True, eq=False)
class Inference:
    """A proposal with what has been compiled for it."""

    proposal: Proposal

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.proposal.graph

    @property
    def candidates(self) -> tuple[str, ...]:
        """The methods that this model's inverse allows."""
        return ("importance", "smc", *(["divide"] if divisible(self.proposal.inverse) else []))

    def one(
        self, networks: Networks, rng_key: PRNGKeyArray, data: Mapping[str, Any], settings: Settings
    ) -> Posterior:
        """The posterior of one data set."""
        checked = check_data(self.graph, data)
        if settings.method == "temper":
            tempered = self._rescuer(settings)(
                networks, rng_key, checked, _dims(self.graph.surface)
            )
            return user_posterior(self.graph, tempered)
        outcome, deterministic, judged = self._runner(settings)(networks, rng_key, checked)
        self._check_possible(outcome)
        return self._posterior(outcome, deterministic, judged, checked, settings.method)

    def many(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        data: Mapping[str, Any],
        settings: Settings,
        memory: int,
    ) -> Posterior:
        """Posteriors of many data sets, as many at a time as `memory` bytes allow."""
        checked = check_data(self.graph, data, many=True)
        number = next(iter(checked.values())).shape[0]
        if number == 0:
            raise DataError("there are no data sets: the leading axis of the data is empty")
        if settings.method == "temper":
            rows = split_steps(self.graph, checked, axis=1)
            each = ({name: value[i] for name, value in rows.items()} for i in range(number))
            keys = jax.random.split(rng_key, number)
            return stacked(
                [self.one(networks, k, row, settings) for k, row in zip(keys, each, strict=True)]
            )
        run = partial(self._runner(settings, many=True), networks)
        together = self._together(settings.num_particles, number, memory)
        keys = jax.random.split(rng_key, number)
        outcome, deterministic, judged = _in_parts(run, keys, checked, together)
        return self._posterior(outcome, deterministic, judged, checked, settings.method)

    def _together(self, num_particles: int, number: int, memory: int) -> int:
        """How many data sets fit into memory at once."""
        return int(np.clip(memory // self._held_bytes(num_particles), 1, number))

    def _held_bytes(self, num_particles: int) -> int:
        """About what the answer for a data set takes; every value is held about ten times."""
        values = sum(int(np.prod(site.shape)) for site in self.graph.sites.values())
        return num_particles * 4 * 10 * max(values, 1)

    def _working_bytes(self, networks: Networks, num_particles: int) -> int:
        """About what is worked on at a time for a data set."""
        drawing = (self.proposal.working_bytes(networks, stage) for stage in self.proposal.stages)
        return self._held_bytes(num_particles) + num_particles * max(drawing, default=0)

    def _runner(
        self, settings: Settings, *, many: bool = False
    ) -> Callable[..., tuple[Outcome, dict[str, Array], Judged]]:
        """The compiled function for these settings; made once, then kept."""
        if settings.method not in self.candidates:
            raise ValueError(
                f"method is {settings.method!r}; for this model there are 'auto', "
                f"{', '.join(map(repr, (*self.candidates, 'temper')))}"
            )
        if (settings, many) not in self._runners:
            engine = self._engine(settings)

            def run(networks: Any, rng_key: PRNGKeyArray, data: Any) -> Any:
                outcome = engine.run(networks, rng_key, data)

                def deterministic(latents: Values) -> dict[str, Array]:
                    return self.graph.program.deterministic({**data, **latents})

                values = jax.vmap(deterministic)(outcome.population.values)
                return outcome, values, _judged(outcome, settings.method)

            def run_many(networks: Any, keys: PRNGKeyArray, data: Any) -> Any:
                each = self._working_bytes(networks, settings.num_particles)
                return by_parts(partial(run, networks), each, keys, data)

            # few particles take no time, however slow the program
            few = settings.num_particles <= FEW_PARTICLES and not many
            self._runners[settings, many] = Compiled(
                run_many if many else run, QUICKLY if few else ANSWERING
            )
        return self._runners[settings, many]

    def _engine(self, settings: Settings, threshold: Array | None = None) -> Engine | Divider:
        """What runs a method; the threshold of SMC may be one that is known only when it runs."""
        choose = resampler(settings.resampling)
        if settings.method == "divide":
            return Divider(self.proposal, settings.num_particles, choose)
        known = 0.0 if settings.method == "importance" else settings.ess_threshold
        return Engine(
            self.proposal,
            settings.num_particles,
            choose,
            known if threshold is None else threshold,
        )

    def _rescuer(self, settings: Settings) -> Rescuer:
        """Tempering with these settings; made once, then kept."""
        if settings not in self._rescuers:
            self._rescuers[settings] = Rescuer(
                self.proposal, settings.num_particles, settings.resampling, settings.ess_threshold
            )
        return self._rescuers[settings]

    @cached_property
    def _rescuers(self) -> dict[Settings, Rescuer]:
        return {}

    @cached_property
    def _runners(self) -> dict[tuple[Settings, bool], Callable[..., Any]]:
        return {}

    def called_with(
        self, model_args: tuple[Any, ...] | None, model_kwargs: Mapping[str, Any] | None
    ) -> "Inference":
        """The same for the model called with other arguments, which may change sizes."""
        if model_args is None and model_kwargs is None:
            return self
        shown = self.graph.surface
        program = shown.program
        args = program.args if model_args is None else tuple(model_args)
        kwargs = program.kwargs if model_kwargs is None else dict(model_kwargs)
        key = _fingerprint((args, kwargs))
        if key not in self._elsewhere:
            graph = trace(program.model, shown.observed, model_args=args, model_kwargs=kwargs)
            # what moves with what, and how far, may depend on the arguments
            facts = {n: found._replace(slope=()) for n, found in self.proposal.facts.items()}
            proposal = Proposal.of(invert(graph, self.proposal.inverse.method), facts)
            _check_same_networks(self.proposal, proposal)
            self._elsewhere[key] = replace(self, proposal=proposal)
        return self._elsewhere[key]

    @cached_property
    def _elsewhere(self) -> dict[str, "Inference"]:
        return {}

    def _posterior(
        self,
        outcome: Outcome,
        deterministic: dict[str, Array],
        judged: Judged,
        data: Values,
        method: str,
    ) -> Posterior:
        particles = outcome.population
        posterior = make_posterior(
            {**particles.values, **deterministic},
            particles.log_weights,
            log_evidence=particles.log_evidence,
            num_resamplings=particles.num_resamplings,
            judged=judged,
            ancestors=outcome.ancestors if outcome.ancestors.size else None,
            ess_by_stage=outcome.ess_by_stage if method != "importance" else None,
            filtered=outcome.filtered,
            filtered_log_weights=outcome.filtered_log_weights,
            method=method,
            data=data,
            dims=_dims(self.graph.surface),
        )
        return user_posterior(self.graph, posterior)

    def _check_possible(self, outcome: Outcome) -> None:
        """Say where it happened, if no particle could have made the data."""
        failed = int(outcome.population.failed)
        if failed < 0:
            return
        stages = self.proposal.stages
        names = [name for factor in stages[failed].factors for name in factor.latents]
        raise ImpossibleData(
            f"every particle has weight zero since stage {failed + 1} of {len(stages)}, drawing "
            f"{', '.join(names)}: no particle makes these sites possible: "
            f"{blame(by_user_site(self.graph, outcome.possible))}. Check that their values can "
            "come from the model; if they can, but only barely, use more particles"
        )

    def plan(self, networks: Networks, rng_key: PRNGKeyArray) -> Plan:
        """Try every candidate on synthetic data sets: which gives the most precise evidence?

        The data sets are kept as a reference, with the evidence that the best finds for them.
        """
        data_key, run_key = jax.random.split(rng_key)
        made, _ = fresh_datasets(self.graph, self.proposal.draws, data_key, DATASETS)
        data = {name: made[name] for name in self.graph.observed}
        number, num = PLAN_DATASETS * PLAN_REPEATS, self._plan_particles(networks)
        keys = jax.random.split(run_key, number)
        together = self._together(num, number, memory=256 * 2**20)
        run = {
            divided: self._evidence("divide" if divided else "smc", num)
            for divided in (False, True)
        }

        def evidence(method: str, places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            rows = {name: value[places] for name, value in data.items()}
            threshold = jnp.asarray(0.0 if method == "importance" else 0.5)
            found = partial(run[method == "divide"], networks, threshold)
            total: LogEvidence = _in_parts(found, keys, rows, together)
            return total.value()

        best, measured = first_choice(self.proposal), {}
        # with one stage there is nothing to resample between, and nothing to choose
        if len(self.proposal.stages) > 1 or best != "importance":
            places = np.repeat(np.arange(PLAN_DATASETS), PLAN_REPEATS)
            for method in self.candidates:
                runs = evidence(method, places).reshape(PLAN_DATASETS, PLAN_REPEATS)
                with np.errstate(invalid="ignore"):
                    spread = np.nan_to_num(np.var(runs, axis=1, ddof=1), nan=np.inf)
                measured[method] = float(np.median(1 / (spread + 1 / num)))
            best = max(measured, key=measured.__getitem__)
        # as many rows as before, so that nothing is compiled again
        found = evidence(best, np.arange(number))
        reference = Reference.of(self.graph, data, found)
        if not measured:
            return Plan(best, reference=reference)
        return Plan(best, measured, num, PLAN_DATASETS, reference)

    def _plan_particles(self, networks: Networks) -> int:
        """Fewer where they are dear, as in a long series, but enough to tell methods apart."""
        lengths = self.graph.scan_lengths
        each = sum(
            self.proposal.working_bytes(networks, stage)
            * (1 if stage.scan is None else lengths[stage.scan])
            for stage in self.proposal.stages
        )
        affordable = PLAN_BYTES // (PLAN_DATASETS * PLAN_REPEATS * max(each, 1))
        return int(np.clip(affordable, FEW_PARTICLES // 2, PLAN_PARTICLES))

    def _evidence(self, method: str, num_particles: int) -> Callable[..., LogEvidence]:
        """The log evidence of many data sets; importance sampling is SMC with threshold zero."""

        def one(
            networks: Networks, threshold: Array, rng_key: PRNGKeyArray, data: Values
        ) -> LogEvidence:
            engine = self._engine(Settings(num_particles, method), threshold)
            return engine.run(networks, rng_key, data).population.log_evidence

        def run(networks: Networks, threshold: Array, keys: PRNGKeyArray, data: Values) -> Any:
            each = self._working_bytes(networks, num_particles)
            return by_parts(partial(one, networks, threshold), each, keys, data)

        return Compiled(run, QUICKLY)


PLAN_PARTICLES, PLAN_DATASETS, PLAN_REPEATS = 200, 16, 8
PLAN_BYTES = 2**30  # that networks work on, in all runs of a method


def _in_parts(
    run: Callable[[PRNGKeyArray, Values], Any], keys: PRNGKeyArray, data: Values, together: int
) -> Any:
    """What `run` makes of all data sets, so many at a time."""
    number, parts = keys.shape[0], []
    for start in range(0, number, together):
        # The last part is filled up by wrapping round, so that it needs no compilation.
        places = np.arange(start, start + together) % number
        rows = {name: value[places] for name, value in data.items()}
        done = jax.device_get(run(keys[places], rows))
        kept = min(together, number - start)
        parts.append(jax.tree.map(lambda leaf, kept=kept: leaf[:kept], done))
    return jax.tree.map(lambda *all_: np.concatenate(all_), *parts)


def _judged(outcome: Outcome, method: str) -> Judged:
    particles = outcome.population
    if method == "importance":
        return judge(particles.log_weights, num_nonfinite=particles.num_nonfinite)
    return judge(
        particles.log_weights,
        log_evidence_se=outcome.log_evidence_se,
        num_nonfinite=particles.num_nonfinite,
        ess_by_stage=outcome.ess_by_stage,
        eves=particles.lineage.old,
        survivors=outcome.survivors,
    )


def first_choice(proposal: Proposal) -> str:
    """The method to use before any has been tried."""
    return "smc" if any(map(proposal.runs_forward, proposal.stages)) else "importance"


def _dims(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Names of the axes of every site, for labels."""
    named = {}
    for name, site in graph.sites.items():
        axes = [f"{name}_dim_{axis}" for axis in range(len(site.shape))]
        labels = (("time",) if site.time else ()) + site.plates
        for axis, label in zip(site.axes, labels, strict=True):
            axes[axis] = label
        named[name] = tuple(axes)
    return named


def _fingerprint(arguments: Any) -> str:
    digest = hashlib.sha256(str(jax.tree.structure(arguments)).encode())
    for leaf in jax.tree.leaves(arguments):
        array = np.asarray(leaf)
        content = repr(leaf).encode() if array.dtype == object else array.tobytes()
        digest.update(f"{array.dtype}{array.shape}".encode() + content)
    return digest.hexdigest()


def _check_same_networks(old: Proposal, new: Proposal) -> None:
    """Refuse arguments that change more than sizes of plates and series."""
    before, after = old.networks(), new.networks()
    for name in {**before, **after}:
        if name not in before or name not in after:
            raise UnsupportedModel(
                "called with these arguments the model has another structure: the network "
                f"'{name}' is needed in only one of the two. Compile it anew"
            )
        was, now = before[name][0], after[name][0]
        if (was.latents, was.inputs, was.guided) != (now.latents, now.inputs, now.guided):
            raise UnsupportedModel(
                f"called with these arguments the model asks of the network '{name}' other shapes "
                "than it was trained for: only plates seen as sets, or repeated over, and series "
                "can change their size. Compile it anew"
            )
