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
TOO_FEW_PARTICLES = f"it needs at least {FEWEST_PARTICLES_TO_RESCUE} particles"
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
        few = settings.num_particles < FEWEST_PARTICLES_TO_RESCUE
        try:
            posterior = self.inference.one(self.networks, rng_key, data, settings)
        except ImpossibleData as error:
            if few or not rescue:
                raise
            reasons = str(error)
        else:
            if int(posterior.grade) != POOR or not rescue:
                return self._check_against_reference(posterior)
            if few:
                return self._check_against_reference(_not_rescued(posterior, TOO_FEW_PARTICLES))
            reasons = " ".join(posterior.diagnostics.reasons)
        tempering = replace(settings, method="temper")
        tempered = self.inference.one(self.networks, _rescue_key(rng_key), data, tempering)
        return self._check_against_reference(_rescued(tempered, settings, reasons))

    def many(
        self,
        rng_key: PRNGKeyArray,
        data: Mapping[str, Any],
        settings: Settings,
        *,
        rescue: bool,
        memory: int,
        max_rescue_seconds: float,
        progress_bar: bool,
    ) -> Posterior:
        """The posteriors of many data sets; poor ones are rescued, several at a time.

        Args:
            rng_key: random key.
            data: observed site → values with the data sets on the first axis.
            settings: of the planned method.
            rescue: whether to fall back to tempering.
            memory: bytes that a batch of data sets may use.
            max_rescue_seconds: rescues end after this time.
            progress_bar: whether to show how many data sets have been rescued.
        """
        batch = self.inference.many(self.networks, rng_key, data, settings, memory)
        poor = [int(row) for row in np.flatnonzero(np.asarray(batch.grade) == POOR)]
        if not rescue or not poor:
            return self._check_against_reference(batch)
        if settings.num_particles < FEWEST_PARTICLES_TO_RESCUE:
            rows = {row: _not_rescued(batch[row], TOO_FEW_PARTICLES) for row in poor}
            return self._check_against_reference(_replace_rows(batch, rows))
        results = self.inference.temper(
            self.networks,
            jax.random.split(_rescue_key(rng_key), len(batch)),
            data,
            settings,
            poor,
            memory,
            max_seconds=max_rescue_seconds,
            progress_bar=progress_bar,
        )
        rows = {}
        for row in poor:
            planned = batch[row]
            result = results.get(
                row, f"the {max_rescue_seconds:g} s of max_rescue_seconds are over"
            )
            if isinstance(result, Posterior):
                rows[row] = _rescued(result, settings, " ".join(planned.diagnostics.reasons))
            else:
                rows[row] = _not_rescued(planned, str(result))
        if len(results) < len(poor):
            warnings.warn(
                f"{len(poor)} of {len(batch)} posteriors are poor, and {len(poor) - len(results)} "
                f"of these were not rescued in the {max_rescue_seconds:g} s that "
                "max_rescue_seconds allows; their diagnostics say so. Give more time, or "
                "rescue=False to rescue none",
                stacklevel=3,
            )
        return self._check_against_reference(_replace_rows(batch, rows))

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


def _not_rescued(posterior: Posterior, reason: str) -> Posterior:
    return replace(posterior, remarks=(*posterior.remarks, f"Not rescued by tempering: {reason}."))


def _rescued(posterior: Posterior, settings: Settings, reasons: str) -> Posterior:
    """A posterior by tempering, with the planned settings and why these gave a poor one."""
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
