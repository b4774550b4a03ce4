"""Choice of the inference method that `auto` uses, by trying the candidates on synthetic data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from retrodict._xla.jit import CompiledFunction
from retrodict._xla.tuning import FAST_COMPILE, PLAN_BATCH_BYTES, PLAN_WORK_BYTES
from retrodict.inference.dataset_batches import batch_size, map_datasets, working_bytes
from retrodict.inference.samplers import Settings, candidate_methods, first_choice, make_sampler
from retrodict.inference.vmap_batches import batched_vmap
from retrodict.particles.out_of_distribution import NUM_DATASETS, PriorPredictiveReference
from retrodict.particles.weights import LogEvidence
from retrodict.proposal.factor_proposals import Networks
from retrodict.proposal.proposal import Proposal
from retrodict.training.prior_datasets import simulate_datasets
from retrodict.types import Values

PLAN_DATASETS, PLAN_REPEATS = 16, 8
PLAN_RUNS = PLAN_DATASETS * PLAN_REPEATS
FEWEST_PARTICLES, PLAN_PARTICLES = 50, 200


@dataclass(frozen=True)
class Plan:
    """Which method `auto` uses, and why.

    Attributes:
        method: the best on held-out synthetic data.
        ess: for each candidate, the median over data sets of 1 / (Var[log Ẑ] + 1/K): how many
            independent draws from the posterior would give an evidence as precise. For importance
            sampling it is the usual effective sample size; for SMC, whose effective sample size is
            large right after resampling, it includes the loss of all stages.
        num_particles: K in these runs.
        num_datasets: the number of data sets.
        reference: statistics of synthetic data sets, with which other data sets are compared.
    """

    method: str
    ess: Mapping[str, float] = field(default_factory=dict)
    num_particles: int = 0
    num_datasets: int = 0
    reference: PriorPredictiveReference | None = None

    @staticmethod
    def read(plain: Mapping[str, Any]) -> "Plan":
        """The plan that was written into a file."""
        reference = plain.get("reference")
        if reference is not None:
            reference = PriorPredictiveReference.from_json(reference)
        return Plan(**{**plain, "reference": reference})


@dataclass(frozen=True)
class Planner:
    """Compares the candidate methods of a model on synthetic data sets.

    Attributes:
        proposal: samples the latents.
        networks: by name; they may be untrained, for only their sizes matter.
    """

    proposal: Proposal
    networks: Networks

    def lower(self) -> list[Callable[[], Any]]:
        """Trace the programs that `plan` runs.

        Returns:
            Functions that compile them, which may happen while networks are trained.
        """
        graph = self.proposal.graph
        size = self._batch_size
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
        draws = jax.eval_shape(self.proposal.sample_prior, keys).values
        data = {name: draws[name] for name in graph.observed}
        threshold = jnp.asarray(0.0)
        return [
            self._programs[program].lower(self.networks, threshold, keys, data)
            for program in sorted({_program_name(method) for method in self._candidates})
        ]

    def plan(self, networks: Networks, rng_key: PRNGKeyArray) -> Plan:
        """Choose the method whose evidence is most precise.

        The data sets are kept as a reference, with the evidence that this method finds for them.
        """
        data_key, run_key = jax.random.split(rng_key)
        graph = self.proposal.graph
        draws, _ = simulate_datasets(graph, self.proposal.sample_prior, data_key, NUM_DATASETS)
        data = {name: draws[name] for name in graph.observed}
        keys = jax.random.split(run_key, PLAN_RUNS)
        methods, effective = self._candidates, {}
        if len(methods) > 1:
            effective = self._effective_sizes(networks, keys, data)
            methods = sorted(effective, key=effective.__getitem__, reverse=True)
        method = methods[0]
        # As many rows as in the comparison, so that no other program is compiled.
        rows = _rows(data, np.arange(PLAN_RUNS))
        log_evidence = self._log_evidence(networks, method, keys, rows)
        reference = PriorPredictiveReference.from_datasets(graph, data, log_evidence)
        if not effective:
            return Plan(method, reference=reference)
        return Plan(method, effective, self.num_particles, PLAN_DATASETS, reference)

    @property
    def _candidates(self) -> list[str]:
        """With one stage there is nothing to resample, and so nothing to choose."""
        method = first_choice(self.proposal)
        if len(self.proposal.stages) > 1 or method != "importance":
            return list(candidate_methods(self.proposal))
        return [method]

    def _effective_sizes(
        self, networks: Networks, keys: PRNGKeyArray, data: Mapping[str, np.ndarray[Any, Any]]
    ) -> dict[str, float]:
        """For each candidate, the median of 1 / (Var[log Ẑ] + 1/K) over data sets."""
        repeated = _rows(data, np.repeat(np.arange(PLAN_DATASETS), PLAN_REPEATS))
        effective = {}
        for method in self._candidates:
            runs = self._log_evidence(networks, method, keys, repeated)
            runs = runs.reshape(PLAN_DATASETS, PLAN_REPEATS)
            with np.errstate(invalid="ignore"):
                variance = np.nan_to_num(np.var(runs, axis=1, ddof=1), nan=np.inf)
            effective[method] = float(np.median(1 / (variance + 1 / self.num_particles)))
        return effective

    def _log_evidence(
        self,
        networks: Networks,
        method: str,
        keys: PRNGKeyArray,
        data: Mapping[str, np.ndarray[Any, Any]],
    ) -> np.ndarray[Any, Any]:
        """The log evidence of every data set."""
        threshold = jnp.asarray(0.0 if method == "importance" else 0.5)
        run = partial(self._programs[_program_name(method)], networks, threshold)
        log_evidence: LogEvidence = map_datasets(run, keys, data, self._batch_size)
        return log_evidence.value()

    @property
    def _batch_size(self) -> int:
        return batch_size(self.proposal.graph, self.num_particles, PLAN_RUNS, PLAN_BATCH_BYTES)

    @cached_property
    def _programs(self) -> dict[str, CompiledFunction[..., LogEvidence]]:
        methods = ("smc", "divide")
        return {m: evidence_program(self.proposal, m, self.num_particles) for m in methods}

    @cached_property
    def num_particles(self) -> int:
        """Particles of every run: fewer where they are expensive, as in a long series."""
        lengths = self.proposal.graph.scan_lengths
        bytes_each = sum(
            self.proposal.working_bytes(self.networks, stage)
            * (1 if stage.scan is None else lengths[stage.scan])
            for stage in self.proposal.stages
        )
        affordable = PLAN_WORK_BYTES // (PLAN_RUNS * max(bytes_each, 1))
        return int(np.clip(affordable, FEWEST_PARTICLES, PLAN_PARTICLES))


def evidence_program(
    proposal: Proposal, method: str, num_particles: int
) -> CompiledFunction[..., LogEvidence]:
    """The log evidence of many data sets by SMC or divide and conquer, compiled.

    The threshold of SMC is an argument of the program. With a threshold of zero it is importance
    sampling, so that it needs no further program.
    """

    def log_evidence(
        networks: Networks, threshold: Array, rng_key: PRNGKeyArray, data: Values
    ) -> LogEvidence:
        sampler = make_sampler(proposal, Settings(num_particles, method), threshold)
        population, _ = sampler.run(networks, rng_key, data)
        return population.log_evidence

    def log_evidences(
        networks: Networks, threshold: Array, keys: PRNGKeyArray, data: Values
    ) -> Any:
        bytes_each = working_bytes(proposal, networks, num_particles)
        return batched_vmap(partial(log_evidence, networks, threshold), bytes_each, keys, data)

    return CompiledFunction(log_evidences, FAST_COMPILE)


def _program_name(method: str) -> str:
    """The program of a method: importance sampling is SMC that never resamples."""
    return "divide" if method == "divide" else "smc"


def _rows(
    data: Mapping[str, np.ndarray[Any, Any]], rows: np.ndarray[Any, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value[rows] for name, value in data.items()}
