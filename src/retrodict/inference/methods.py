"""Posterior inference by a given method, for one data set or for many.

The program of each setting is compiled once and kept; from then on only values change. See sec. 2
of Paige & Wood (2016).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, PRNGKeyArray

from retrodict._xla.jit import CompiledFunction
from retrodict._xla.tuning import FAST_COMPILE, FEW_PARTICLES, LOW_LATENCY
from retrodict.errors import DataError
from retrodict.graph.graph import Graph
from retrodict.graph.loop_surface import by_user_site
from retrodict.graph.validate import check_data
from retrodict.inference.dataset_batches import batch_size, map_datasets, working_bytes
from retrodict.inference.impossible_data import ImpossibleData
from retrodict.inference.loop_posterior import user_posterior
from retrodict.inference.new_arguments import fingerprint, with_arguments
from retrodict.inference.samplers import Settings, make_sampler
from retrodict.inference.smc import LatentPopulation, SMCInfo
from retrodict.inference.tempering_driver import Tempering
from retrodict.inference.vmap_batches import batched_vmap
from retrodict.particles.diagnostics import WeightAnalysis, analyse_weights
from retrodict.particles.make_posterior import posterior_from_analysis, stack_posteriors
from retrodict.particles.posterior import Posterior
from retrodict.proposal.factor_proposals import Networks
from retrodict.proposal.proposal import Proposal
from retrodict.types import Values


class SamplerOutput(NamedTuple):
    """What the compiled program of a sampler returns.

    Attributes:
        population: the weighted particles.
        info: what the sampler reports.
        deterministic: values of the model's deterministic sites at every particle.
        analysis: diagnostics of the weights.
    """

    population: LatentPopulation
    info: SMCInfo
    deterministic: dict[str, Array]
    analysis: WeightAnalysis


@dataclass(frozen=True, eq=False)
class Inference:
    """Inference with one proposal, and the programs that were compiled for it."""

    proposal: Proposal

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.proposal.graph

    def one(
        self, networks: Networks, rng_key: PRNGKeyArray, data: Mapping[str, Any], settings: Settings
    ) -> Posterior:
        """The posterior of one data set.

        Raises:
            DataError: the data do not fit the model.
            ImpossibleData: no particle gives the data a positive density.
        """
        arrays = check_data(self.graph, data)
        if settings.method == "temper":
            dims = _dims(self.graph.surface)
            tempered = self._tempering(settings).one(networks, rng_key, arrays, dims)
            return user_posterior(self.graph, tempered)
        output = self._program(settings)(networks, rng_key, arrays)
        self._check_possible(output)
        return self._posterior(output, arrays, settings.method)

    def many(
        self,
        networks: Networks,
        rng_key: PRNGKeyArray,
        data: Mapping[str, Any],
        settings: Settings,
        memory: int,
    ) -> Posterior:
        """The posteriors of many data sets, as many at a time as `memory` bytes allow."""
        arrays = check_data(self.graph, data, many=True)
        num_datasets = next(iter(arrays.values())).shape[0]
        if num_datasets == 0:
            raise DataError("there are no data sets: the leading axis of the data is empty")
        keys = jax.random.split(rng_key, num_datasets)
        if settings.method == "temper":
            results = self.temper(networks, keys, data, settings, range(num_datasets), memory)
            posteriors = [_raise_if_error(results[row]) for row in range(num_datasets)]
            return stack_posteriors(posteriors)
        run = partial(self._program(settings, many=True), networks)
        size = batch_size(self.graph, settings.num_particles, num_datasets, memory)
        output = map_datasets(run, keys, arrays, size)
        return self._posterior(output, arrays, settings.method)

    def temper(
        self,
        networks: Networks,
        keys: PRNGKeyArray,
        data: Mapping[str, Any],
        settings: Settings,
        rows: Sequence[int],
        memory: int,
        **options: Any,
    ) -> dict[int, Posterior | ImpossibleData]:
        """The posteriors of some of many data sets, with options of `Tempering.many`."""
        arrays, dims = check_data(self.graph, data, many=True), _dims(self.graph.surface)
        tempering = self._tempering(replace(settings, method="temper"))
        size = tempering.batch_size(memory)
        results = tempering.many(networks, keys, arrays, rows, dims, batch_size=size, **options)
        return {
            row: user_posterior(self.graph, result) if isinstance(result, Posterior) else result
            for row, result in results.items()
        }

    def called_with(
        self, model_args: tuple[Any, ...] | None, model_kwargs: Mapping[str, Any] | None
    ) -> "Inference":
        """Inference for the model called with other arguments, which may change sizes."""
        if model_args is None and model_kwargs is None:
            return self
        program = self.graph.surface.program
        args = program.args if model_args is None else tuple(model_args)
        kwargs = program.kwargs if model_kwargs is None else dict(model_kwargs)
        key = fingerprint((args, kwargs))
        if key not in self._by_arguments:
            self._by_arguments[key] = replace(
                self, proposal=with_arguments(self.proposal, args, kwargs)
            )
        return self._by_arguments[key]

    @cached_property
    def _by_arguments(self) -> dict[str, "Inference"]:
        return {}

    def _program(self, settings: Settings, *, many: bool = False) -> Callable[..., SamplerOutput]:
        """The compiled program for these settings, for one data set or for a batch."""
        if (settings, many) not in self._programs:
            run = self._sampler_program(settings)

            def run_many(networks: Networks, keys: PRNGKeyArray, data: Values) -> SamplerOutput:
                bytes_each = working_bytes(self.proposal, networks, settings.num_particles)
                output: SamplerOutput = batched_vmap(partial(run, networks), bytes_each, keys, data)
                return output

            few = settings.num_particles <= FEW_PARTICLES and not many
            self._programs[settings, many] = CompiledFunction(
                run_many if many else run, FAST_COMPILE if few else LOW_LATENCY
            )
        return self._programs[settings, many]

    @cached_property
    def _programs(self) -> dict[tuple[Settings, bool], Callable[..., SamplerOutput]]:
        return {}

    def _sampler_program(
        self, settings: Settings
    ) -> Callable[[Networks, PRNGKeyArray, Values], SamplerOutput]:
        sampler = make_sampler(self.proposal, settings)

        def run(networks: Networks, rng_key: PRNGKeyArray, data: Values) -> SamplerOutput:
            population, info = sampler.run(networks, rng_key, data)

            def deterministic(latents: Values) -> dict[str, Array]:
                return self.graph.program.deterministic({**data, **latents})

            values = jax.vmap(deterministic)(population.values)
            analysis = _analyse(population, info, settings.method)
            return SamplerOutput(population, info, values, analysis)

        return run

    def _tempering(self, settings: Settings) -> Tempering:
        """Tempering with these settings."""
        if settings not in self._temperings:
            self._temperings[settings] = Tempering(
                self.proposal, settings.num_particles, settings.resampling, settings.ess_threshold
            )
        return self._temperings[settings]

    @cached_property
    def _temperings(self) -> dict[Settings, Tempering]:
        return {}

    def _posterior(self, output: SamplerOutput, data: Values, method: str) -> Posterior:
        population, info = output.population, output.info
        posterior = posterior_from_analysis(
            {**population.values, **output.deterministic},
            output.analysis,
            log_evidence=population.log_evidence,
            num_resamplings=population.num_resamplings,
            ancestors=info.ancestors if info.ancestors.size else None,
            ess_by_stage=info.ess_by_stage if method != "importance" else None,
            filtered=info.filtered,
            filtered_log_weights=info.filtered_log_weights,
            method=method,
            data=data,
            dims=_dims(self.graph.surface),
        )
        return user_posterior(self.graph, posterior)

    def _check_possible(self, output: SamplerOutput) -> None:
        failed = int(output.population.failed_stage)
        if failed < 0:
            return
        stages = self.proposal.stages
        names = [name for factor in stages[failed].factors for name in factor.latents]
        raise ImpossibleData(
            f"every particle has weight zero since stage {failed + 1} of {len(stages)}, which "
            f"samples {', '.join(names)}",
            by_user_site(self.graph, output.info.possible),
        )


def _raise_if_error(result: Posterior | ImpossibleData) -> Posterior:
    if isinstance(result, ImpossibleData):
        raise result
    return result


def _analyse(population: LatentPopulation, info: SMCInfo, method: str) -> WeightAnalysis:
    if method == "importance":
        return analyse_weights(population.log_weights, num_nonfinite=population.num_nonfinite)
    return analyse_weights(
        population.log_weights,
        log_evidence_se=info.log_evidence_se,
        num_nonfinite=population.num_nonfinite,
        ess_by_stage=info.ess_by_stage,
        eves=population.lineage.ancestors,
        survivors=info.survivors,
    )


def _dims(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Names of the axes of every site, for labels."""
    dims = {}
    for name, site in graph.sites.items():
        axes = [f"{name}_dim_{axis}" for axis in range(len(site.shape))]
        labels = (("time",) if site.time else ()) + site.plates
        for axis, label in zip(site.axes, labels, strict=True):
            axes[axis] = label
        dims[name] = tuple(axes)
    return dims
