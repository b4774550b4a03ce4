"""A data set, or many, in; answers that were rescued where they were poor, and say so, out.

The planned method goes first. If its answer calls itself poor, tempering (`retrodict.rescue`)
starts over from fresh draws: going on with those that failed would make the evidence depend on why
they failed. Every answer is told where its data lie among synthetic ones (`retrodict.reference`).
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

# With fewer particles any answer is poor, and moves have too little to learn from.
FEWEST_TO_RESCUE = 100
POOR = 2
_RESCUE = 0x7E  # sets the keys of a rescue apart from those of the planned method


@dataclass(frozen=True)
class Answers:
    """How a compiled model answers.

    Attributes:
        inference: the methods.
        networks: by name.
        reference: synthetic data sets to compare with, if there are any for these arguments.
    """

    inference: Inference
    networks: Networks
    reference: PriorPredictiveReference | None = None

    def one(
        self, rng_key: PRNGKeyArray, data: Mapping[str, Any], settings: Settings, rescue: bool
    ) -> Posterior:
        """The answer for one data set."""
        try:
            posterior = self.inference.one(self.networks, rng_key, data, settings)
        except ImpossibleData as error:
            if not rescue or settings.num_particles < FEWEST_TO_RESCUE:
                raise
            rescue_key = jax.random.fold_in(rng_key, _RESCUE)
            posterior = self._tempered(rescue_key, data, settings, str(error))
        else:
            if int(posterior.grade) == POOR and rescue:
                rescue_key = jax.random.fold_in(rng_key, _RESCUE)
                posterior = self._rescued(rescue_key, data, settings, posterior)
        return self._compared(posterior)

    def many(
        self,
        rng_key: PRNGKeyArray,
        data: Mapping[str, Any],
        settings: Settings,
        rescue: bool,
        memory: int,
        max_rescues: int,
    ) -> Posterior:
        """The answers for many data sets; those to be rescued one after the other."""
        batch = self.inference.many(self.networks, rng_key, data, settings, memory)
        found: dict[int, Posterior] = {}
        poor = np.flatnonzero(np.asarray(batch.grade) == POOR) if rescue else np.zeros(0, int)
        if len(poor) > max_rescues:
            warnings.warn(
                f"{len(poor)} of {len(batch)} answers are poor, and only the first {max_rescues} "
                "are rescued, for each takes its time. Give max_rescues to have more of them, or "
                "rescue=False to have none",
                stacklevel=3,
            )
        for row in poor[:max_rescues]:
            key = jax.random.fold_in(jax.random.fold_in(rng_key, _RESCUE), int(row))
            rows = {name: value[row] for name, value in batch.data.items()}
            try:
                found[int(row)] = self._rescued(key, rows, settings, batch[int(row)])
            except DataError as error:
                found[int(row)] = _told(batch[int(row)], str(error))
        return self._compared(_with_rows(batch, found) if found else batch)

    def _rescued(
        self,
        rng_key: PRNGKeyArray,
        data: Mapping[str, Any],
        settings: Settings,
        planned: Posterior,
    ) -> Posterior:
        """Tempering after a poor answer; what there was, where that cannot help."""
        if settings.num_particles < FEWEST_TO_RESCUE:
            return _told(
                planned,
                f"Not rescued by tempering, which needs {FEWEST_TO_RESCUE} particles at least.",
            )
        why = " ".join(planned.diagnostics.reasons)
        return self._tempered(rng_key, data, settings, why)

    def _tempered(
        self, rng_key: PRNGKeyArray, data: Mapping[str, Any], settings: Settings, why: str
    ) -> Posterior:
        tempered = self.inference.one(
            self.networks, rng_key, data, replace(settings, method="temper")
        )
        assert tempered.tempering is not None
        return replace(
            tempered,
            rescue=Rescue(settings.method, why),
            remarks=(
                f"Rescued: '{settings.method}', as planned, ended poor.",
                *tempered.remarks,
                f"It took {tempered.tempering.seconds:.2g} s.",
            ),
        )

    def _compared(self, posterior: Posterior) -> Posterior:
        """Say where the data lie among synthetic ones."""
        if self.reference is None:
            return posterior
        data = {name: np.asarray(value) for name, value in posterior.data.items()}
        evidence = np.asarray(posterior.log_evidence)
        if not posterior.batched:
            data = {name: value[None] for name, value in data.items()}
            evidence = evidence[None]
        graph = self.inference.graph
        checks = self.reference.check(graph, stack_steps(graph, data, axis=1), evidence)
        individual = {
            row: replace(one, predictive_checks=(checks[row],))
            for row, one in posterior.individual.items()
        }
        return replace(posterior, predictive_checks=checks, individual=individual)


def _told(posterior: Posterior, reason: str) -> Posterior:
    return replace(posterior, remarks=(*posterior.remarks, reason))


# What only the planned method has; the rows of data sets that were rescued are void in these.
_OWN = ("ess_by_stage", "ancestors", "survivors", "filtered", "filtered_log_weights")


def _with_rows(batch: Posterior, found: Mapping[int, Posterior]) -> Posterior:
    """The batch with the answers of some data sets replaced."""
    rows = np.array(list(found))
    parts: dict[str, Any] = {"individual": dict(found)}
    for one in fields(batch):
        value = getattr(batch, one.name)
        if one.name in _OWN:
            parts[one.name] = jax.tree.map(lambda leaf: _void(leaf, rows), value)
        elif one.name == "samples":
            parts[one.name] = {
                name: _put(leaf, rows, [posterior.samples[name] for posterior in found.values()])
                for name, leaf in value.items()
            }
        elif one.name == "eves":
            parts[one.name] = _eves(batch, found, rows)
        elif isinstance(value, np.ndarray | jax.Array):
            parts[one.name] = _put(value, rows, [getattr(p, one.name) for p in found.values()])
    return replace(batch, **parts)


def _put(batch: Any, rows: np.ndarray[Any, Any], new: Sequence[Any]) -> Any:
    changed = np.array(batch)
    changed[rows] = np.stack([np.asarray(value) for value in new])
    return jnp.asarray(changed) if isinstance(batch, jax.Array) else changed


def _void(leaf: Any, rows: np.ndarray[Any, Any]) -> Any:
    changed = np.array(leaf)
    changed[rows] = np.nan if np.issubdtype(changed.dtype, np.floating) else -1
    return jnp.asarray(changed)


def _eves(
    batch: Posterior, found: Mapping[int, Posterior], rows: np.ndarray[Any, Any]
) -> jax.Array | None:
    everyone = np.arange(batch.num_particles)
    if batch.eves is None and all(one.eves is None for one in found.values()):
        return None
    eves = np.tile(everyone, (len(batch), 1)) if batch.eves is None else np.array(batch.eves)
    for row, one in zip(rows, found.values(), strict=True):
        eves[row] = everyone if one.eves is None else np.asarray(one.eves)
    return jnp.asarray(eves)
