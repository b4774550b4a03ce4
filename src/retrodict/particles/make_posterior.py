"""Construction of a `Posterior` from particles and their weights."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict.particles.diagnostics import ANY_LATENT, WeightAnalysis, analyse_weights
from retrodict.particles.posterior import Posterior, over_datasets
from retrodict.particles.weights import LogEvidence


def make_posterior(
    samples: Mapping[str, Array],
    log_weights: Float[Array, "*datasets particles"],
    *,
    log_evidence_se: Float[Array, "*datasets"] | None = None,
    num_nonfinite: Int[Array, "*datasets"] | None = None,
    ess_by_stage: Float[Array, "*datasets stages"] | None = None,
    ancestors: Int[Array, "*datasets stages particles"] | None = None,
    eves: Int[Array, "*datasets particles"] | None = None,
    survivors: Mapping[str, Float[Array, "*rest"]] | None = None,
    **fields: Any,
) -> Posterior:
    """Analyse unnormalised log weights and build a `Posterior`.

    Args:
        samples: site → `(particles, *shape)`, with a leading axis if there are many data sets.
        log_weights: unnormalised, those of the last stage.
        log_evidence_se: standard error; estimated from weights and genealogy if None.
        num_nonfinite: weights set to zero at earlier stages because they were NaN or +inf.
        ess_by_stage: effective sample size before each resampling decision and at the end.
        ancestors: index of each particle's parent, at every stage.
        eves: index of each particle's ancestor in an early generation; that in the first
            generation, traced through `ancestors`, if None.
        survivors: latent → effective number of its surviving draws, by step for a series; that of
            the worst stage if None.
        fields: passed to `posterior_from_analysis`.

    Returns:
        The posterior, with normalised weights and a grade.
    """
    shape = log_weights.shape[:-1]
    analysis = over_datasets(
        bool(shape),
        analyse_weights,
        jnp.asarray(log_weights),
        log_evidence_se=log_evidence_se,
        num_nonfinite=jnp.zeros(shape, jnp.int32) if num_nonfinite is None else num_nonfinite,
        ess_by_stage=ess_by_stage,
        ancestors=ancestors if ancestors is not None and ancestors.shape[-2] else None,
        eves=eves,
        survivors=None if survivors is None else dict(survivors),
    )
    if ANY_LATENT in analysis.survivors:
        by_site = dict.fromkeys(samples, analysis.survivors[ANY_LATENT])
        analysis = analysis._replace(survivors=by_site)
    return posterior_from_analysis(
        samples, analysis, ess_by_stage=ess_by_stage, ancestors=ancestors, **fields
    )


def posterior_from_analysis(
    samples: Mapping[str, Array],
    analysis: WeightAnalysis,
    *,
    log_evidence: Float[Array, "*datasets"] | LogEvidence | None = None,
    num_resamplings: Int[Array, "*datasets"] | None = None,
    **fields: Any,
) -> Posterior:
    """Build a `Posterior` from particles whose weights have been analysed.

    Args:
        samples: site → `(particles, *shape)`, with a leading axis if there are many data sets.
        analysis: of the weights, by `analyse_weights`.
        log_evidence: from all stages; the log mean of the weights if None.
        num_resamplings: how often the particles were resampled; 0 if None.
        fields: the other fields of `Posterior`.
    """
    assessment = analysis.assessment
    if isinstance(log_evidence, LogEvidence):
        evidence = log_evidence.value()
    else:
        evidence = np.asarray(
            analysis.log_mean if log_evidence is None else log_evidence, np.float64
        )
    resamplings = np.zeros(evidence.shape, np.int32) if num_resamplings is None else num_resamplings
    # [()] turns an array without axes into a number, and leaves other arrays as they are.
    return Posterior(
        samples=dict(samples),
        log_weights=analysis.log_weights,
        log_evidence=evidence[()],
        log_evidence_se=np.asarray(assessment.log_evidence_se)[()],
        ess=np.asarray(assessment.ess)[()],
        pareto_k=np.asarray(assessment.pareto_k)[()],
        grade=np.asarray(assessment.grade)[()],
        measures=np.asarray(assessment.measures),
        num_nonfinite=np.asarray(analysis.num_nonfinite)[()],
        num_resamplings=np.asarray(resamplings)[()],
        eves=analysis.eves,
        survivors=analysis.survivors,
        **fields,
    )


def stack_posteriors(posteriors: Sequence[Posterior]) -> Posterior:
    """Stack posteriors of single data sets along a new leading axis.

    Where the numbers of stages differ, `ess_by_stage` is padded with NaN.
    """
    parts: dict[str, Any] = {}
    for one in dataclasses.fields(Posterior):
        values = [getattr(posterior, one.name) for posterior in posteriors]
        if one.name == "ess_by_stage" and values[0] is not None:
            longest = max(len(value) for value in values)
            values = [np.pad(v, (0, longest - len(v)), constant_values=np.nan) for v in values]
        if one.name in ("samples", "data"):
            parts[one.name] = {name: jnp.stack([v[name] for v in values]) for name in values[0]}
        elif isinstance(values[0], np.ndarray | np.generic | jax.Array):
            stack = np.stack([np.asarray(value) for value in values])
            parts[one.name] = jnp.asarray(stack) if isinstance(values[0], jax.Array) else stack
    return dataclasses.replace(
        posteriors[0],
        **parts,
        remarks=(),
        tempering=None,
        individual=dict(enumerate(posteriors)),
    )
