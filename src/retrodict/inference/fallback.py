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
from retrodict.inference.methods import ImpossibleData, Inference, Settings
from retrodict.particles.out_of_distribution import Likeness, Reference
from retrodict.particles.posterior import Posterior
from retrodict.proposal.proposal import Networks

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
    reference: Reference | None = None

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
        extra = dict(tempered.extra)
        extra |= {
            "rescued": True,
            "planned": settings.method,
            "planned_reasons": why,
            "note": f"rescued by tempering: {extra['note'].partition(': ')[2]}",
            "reasons": (
                f"Rescued: '{settings.method}', as planned, ended poor.",
                *extra["reasons"],
                f"It took {extra['seconds']:.2g} s.",
            ),
        }
        return replace(tempered, extra=extra)

    def _compared(self, posterior: Posterior) -> Posterior:
        """Say where the data lie among synthetic ones."""
        if self.reference is None:
            return posterior
        graph = self.inference.graph
        if not posterior.batched:
            one = {name: np.asarray(value)[None] for name, value in posterior.data.items()}
            data = stack_steps(graph, one, axis=1)
            evidence = np.asarray(posterior.log_evidence)[None]
            (found,) = self.reference.likeness(graph, data, evidence)
            return replace(posterior, extra=_with_likeness(posterior.extra, found))
        rows = {name: np.asarray(value) for name, value in posterior.data.items()}
        data = stack_steps(graph, rows, axis=1)
        likeness = self.reference.likeness(graph, data, np.asarray(posterior.log_evidence))
        rescued = {
            row: replace(one, extra=_with_likeness(one.extra, likeness[row]))
            for row, one in posterior.extra.get("rescued", {}).items()
        }
        each = [_with_likeness({}, found) for found in likeness]
        return replace(posterior, extra={**posterior.extra, "rescued": rescued, "each": each})


def _with_likeness(extra: Mapping[str, Any], likeness: Likeness) -> dict[str, Any]:
    reasons = (*extra.get("reasons", ()), *likeness.reasons())
    return {**extra, "ood": likeness, "reasons": reasons}


def _told(posterior: Posterior, reason: str) -> Posterior:
    reasons = (*posterior.extra.get("reasons", ()), reason)
    return replace(posterior, extra={**posterior.extra, "rescued": False, "reasons": reasons})


# What only the planned method has; the rows of data sets that were rescued are void in these.
_OWN = ("ess_by_stage", "ancestors", "survivors", "filtered", "filtered_log_weights")


def _with_rows(batch: Posterior, found: Mapping[int, Posterior]) -> Posterior:
    """The batch with the answers of some data sets replaced."""
    rows = np.array(list(found))
    parts: dict[str, Any] = {"extra": {**batch.extra, "rescued": dict(found)}}
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
