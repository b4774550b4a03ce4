"""Inference that falls back to tempering where the planned method gives a poor posterior.

The planned method runs first. If its posterior is graded poor, tempering starts from fresh draws:
with the draws that failed, the evidence would depend on the reason of the failure. Every posterior
reports where its data lie among synthetic data sets, if there is a reference of these.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from retrodict.errors import DataError
from retrodict.graph.loop_surface import stack_steps
from retrodict.inference.impossible_data import ImpossibleData
from retrodict.inference.methods import Inference
from retrodict.inference.samplers import Settings
from retrodict.particles.diagnostics import Rescue
from retrodict.particles.out_of_distribution import PriorPredictiveReference
from retrodict.particles.posterior import Posterior
from retrodict.proposal.factor_proposals import Networks

# With fewer particles any posterior is poor, and moves cannot be adapted to the particles.
FEWEST_PARTICLES_TO_RESCUE = 100
POOR = 2


@dataclass(frozen=True)
class FallbackInference:
    """Inference by the planned method, and by tempering where its posterior is poor.

    Attributes:
        inference: runs the methods.
        networks: by name.
        reference: statistics of synthetic data sets for these arguments of the model, if there
            are any.
    """

    inference: Inference
    networks: Networks
    reference: PriorPredictiveReference | None = None

    def one(
        self, rng_key: PRNGKeyArray, data: Mapping[str, Any], settings: Settings, rescue: bool
    ) -> Posterior:
        """The posterior of one data set.

        Args:
            rng_key: random key.
            data: observed site → values.
            settings: of the planned method.
            rescue: whether to fall back to tempering.
        """
        try:
            posterior = self.inference.one(self.networks, rng_key, data, settings)
        except ImpossibleData as error:
            if not rescue or settings.num_particles < FEWEST_PARTICLES_TO_RESCUE:
                raise
            posterior = self._temper(_rescue_key(rng_key), data, settings, str(error))
        else:
            if int(posterior.grade) == POOR and rescue:
                posterior = self._rescue(_rescue_key(rng_key), data, settings, posterior)
        return self._check_against_reference(posterior)

    def many(
        self,
        rng_key: PRNGKeyArray,
        data: Mapping[str, Any],
        settings: Settings,
        rescue: bool,
        memory: int,
        max_rescues: int,
    ) -> Posterior:
        """The posteriors of many data sets; poor ones are rescued one after the other.

        Args:
            rng_key: random key.
            data: observed site → values with the data sets on the first axis.
            settings: of the planned method.
            rescue: whether to fall back to tempering.
            memory: bytes that the planned method may use.
            max_rescues: the largest number of rescues.
        """
        batch = self.inference.many(self.networks, rng_key, data, settings, memory)
        poor = np.flatnonzero(np.asarray(batch.grade) == POOR) if rescue else np.zeros(0, int)
        if len(poor) > max_rescues:
            warnings.warn(
                f"{len(poor)} of {len(batch)} posteriors are poor, and only the first "
                f"{max_rescues} are rescued, because each rescue takes seconds. Give max_rescues "
                "to rescue more of them, or rescue=False to rescue none",
                stacklevel=3,
            )
        rescued: dict[int, Posterior] = {}
        for row in map(int, poor[:max_rescues]):
            row_data = {name: value[row] for name, value in batch.data.items()}
            row_key = jax.random.fold_in(_rescue_key(rng_key), row)
            try:
                rescued[row] = self._rescue(row_key, row_data, settings, batch[row])
            except DataError as error:
                rescued[row] = _add_remark(batch[row], str(error))
        return self._check_against_reference(_replace_rows(batch, rescued) if rescued else batch)

    def _rescue(
        self,
        rng_key: PRNGKeyArray,
        data: Mapping[str, Any],
        settings: Settings,
        planned: Posterior,
    ) -> Posterior:
        """Tempering after a poor posterior, which is kept if there are too few particles."""
        if settings.num_particles < FEWEST_PARTICLES_TO_RESCUE:
            return _add_remark(
                planned,
                f"Not rescued by tempering, which needs at least {FEWEST_PARTICLES_TO_RESCUE} "
                "particles.",
            )
        return self._temper(rng_key, data, settings, " ".join(planned.diagnostics.reasons))

    def _temper(
        self, rng_key: PRNGKeyArray, data: Mapping[str, Any], settings: Settings, reasons: str
    ) -> Posterior:
        """The posterior by tempering; `reasons` say why the planned method failed."""
        tempering = replace(settings, method="temper")
        posterior = self.inference.one(self.networks, rng_key, data, tempering)
        assert posterior.tempering is not None
        return replace(
            posterior,
            rescue=Rescue(settings.method, reasons),
            remarks=(
                f"Rescued: the planned method '{settings.method}' gave a poor posterior.",
                *posterior.remarks,
                f"Tempering took {posterior.tempering.seconds:.2g} s.",
            ),
        )

    def _check_against_reference(self, posterior: Posterior) -> Posterior:
        """The posterior with a report of where its data lie among synthetic data sets."""
        if self.reference is None:
            return posterior
        data = {name: np.asarray(value) for name, value in posterior.data.items()}
        log_evidence = np.asarray(posterior.log_evidence)
        if not posterior.batched:
            data = {name: value[None] for name, value in data.items()}
            log_evidence = log_evidence[None]
        graph = self.inference.graph
        checks = self.reference.check(graph, stack_steps(graph, data, axis=1), log_evidence)
        individual = {
            row: replace(rescued, predictive_checks=(checks[row],))
            for row, rescued in posterior.individual.items()
        }
        return replace(posterior, predictive_checks=checks, individual=individual)


def _rescue_key(rng_key: PRNGKeyArray) -> PRNGKeyArray:
    """A key that the planned method does not use."""
    return jax.random.fold_in(rng_key, 0x7E)


def _add_remark(posterior: Posterior, remark: str) -> Posterior:
    return replace(posterior, remarks=(*posterior.remarks, remark))


# Fields that tempering does not have; their rows are void for rescued data sets.
_FIELDS_OF_PLANNED_METHOD = (
    "ess_by_stage",
    "ancestors",
    "survivors",
    "filtered",
    "filtered_log_weights",
)


def _replace_rows(batch: Posterior, rescued: Mapping[int, Posterior]) -> Posterior:
    """The batch with the posteriors of some data sets replaced."""
    rows, posteriors = np.array(list(rescued)), list(rescued.values())
    replaced: dict[str, Any] = {"individual": dict(rescued)}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if field.name in _FIELDS_OF_PLANNED_METHOD:
            replaced[field.name] = jax.tree.map(lambda leaf: _void_rows(leaf, rows), value)
        elif field.name == "samples":
            replaced[field.name] = {
                site: _set_rows(leaf, rows, [p.samples[site] for p in posteriors])
                for site, leaf in value.items()
            }
        elif field.name == "eves":
            replaced[field.name] = _set_eves(batch, rescued)
        elif isinstance(value, np.ndarray | jax.Array):
            replaced[field.name] = _set_rows(
                value, rows, [getattr(p, field.name) for p in posteriors]
            )
    return replace(batch, **replaced)


def _set_rows(batch: Any, rows: np.ndarray[Any, Any], new: Sequence[Any]) -> Any:
    array = np.array(batch)
    array[rows] = np.stack([np.asarray(value) for value in new])
    return jnp.asarray(array) if isinstance(batch, jax.Array) else array


def _void_rows(leaf: Any, rows: np.ndarray[Any, Any]) -> Any:
    array = np.array(leaf)
    array[rows] = np.nan if np.issubdtype(array.dtype, np.floating) else -1
    return jnp.asarray(array)


def _set_eves(batch: Posterior, rescued: Mapping[int, Posterior]) -> jax.Array | None:
    """Indices of the first ancestors, which are the particles themselves without resampling."""
    if batch.eves is None and all(posterior.eves is None for posterior in rescued.values()):
        return None
    identity = np.arange(batch.num_particles)
    eves = np.tile(identity, (len(batch), 1)) if batch.eves is None else np.array(batch.eves)
    for row, posterior in rescued.items():
        eves[row] = identity if posterior.eves is None else np.asarray(posterior.eves)
    return jnp.asarray(eves)
