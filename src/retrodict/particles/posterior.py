"""Weighted particles in; the answer with its moments, tables, verdict and reasons out.

A `Posterior` holds one data set's particles, or those of many data sets with a leading axis.
Weights are normalised; the verdict `trust` is read from them alone, against the limits in `LIMITS`
(the paper, sec. 2.1 and 2.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from retrodict.particles.diagnostics import GRADES, Diagnostics, Judged, judge, reasons
from retrodict.particles.resampling import systematic
from retrodict.particles.weights import (
    LogEvidence,
    weighted_mcse,
    weighted_mean,
    weighted_sd,
)

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped, unused-ignore]
    from matplotlib.figure import Figure

    from retrodict.particles.summary import Rounding
    from retrodict.plotting.posterior import Kind


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """Weighted particles of a posterior distribution, and what they tell of themselves.

    Of many data sets every array has a leading axis: `posterior[i]` is one data set's answer,
    `len(posterior)` their number; `mean`, `sd`, `mcse`, `expectation` and `resample` work on all at
    once; `summary`, `to_arviz` and `plot` take one.

    The log evidence is a NumPy number in double precision: a series of 10 000 steps has a log
    evidence whose third decimal a single-precision number cannot hold.
    """

    samples: Mapping[str, Array]
    log_weights: Float[Array, "*datasets particles"]
    log_evidence: np.ndarray
    log_evidence_se: np.ndarray
    ess: np.ndarray
    pareto_k: np.ndarray
    grade: np.ndarray
    measures: np.ndarray
    num_nonfinite: np.ndarray
    num_resamplings: np.ndarray
    method: str = "importance"
    ess_by_stage: Float[Array, "*datasets stages"] | None = None
    ancestors: Int[Array, "*datasets stages particles"] | None = None
    eves: Int[Array, "*datasets particles"] | None = None
    survivors: Mapping[str, Float[Array, "*rest"]] = field(default_factory=dict)
    filtered: Mapping[str, Array] | None = None
    filtered_log_weights: Float[Array, "*datasets time particles"] | None = None
    data: Mapping[str, Array] = field(default_factory=dict)
    dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    coords: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_particles(self) -> int:
        """K."""
        return int(self.log_weights.shape[-1])

    @property
    def batched(self) -> bool:
        """Whether there is a leading axis of data sets."""
        return self.log_weights.ndim == 2

    @property
    def trust(self) -> str | np.ndarray:
        """`"good"`, `"fair"` or `"poor"`; an array of them for many data sets."""
        words = np.array(GRADES)[self.grade]
        return words if self.batched else str(words)

    @property
    def diagnostics(self) -> Diagnostics:
        """How this answer was found, and the reasons for its `trust`."""
        self._one("diagnostics")
        return Diagnostics(
            method=self.method,
            trust=GRADES[int(self.grade)],
            reasons=(
                *self.extra.get("reasons", ()),
                *reasons(
                    self.measures,
                    self.num_particles,
                    {name: np.asarray(left) for name, left in self.survivors.items()},
                ),
            ),
            num_particles=self.num_particles,
            num_nonfinite=int(self.num_nonfinite),
            num_stages=1 if self.ess_by_stage is None else max(self.ess_by_stage.shape[-1], 1),
            num_resamplings=int(self.num_resamplings),
            extra=self.extra,
        )

    def mean(self, site: str) -> Array:
        """Σ_k W_k x_k."""
        mean: Array = _each(self.batched, weighted_mean)(self.log_weights, self._site(site))
        return mean

    def sd(self, site: str) -> Array:
        """Square root of Σ_k W_k (x_k - mean)²."""
        sd: Array = _each(self.batched, weighted_sd)(self.log_weights, self._site(site))
        return sd

    def mcse(self, site: str) -> Array:
        """Standard error of `mean(site)`: see `weights.weighted_mcse`.

        It is inf where all particles have the one value that resampling left.
        """
        eves, survivors = self.eves, self._behind(site)
        if eves is None:
            eves = jnp.broadcast_to(jnp.arange(self.num_particles), self.log_weights.shape)
        error: Array = _each(self.batched, weighted_mcse)(
            self.log_weights, self._site(site), eves, survivors
        )
        return error

    def _behind(self, site: str) -> Array | None:
        """Effective number of draws a site rests on; if computed from others, the least of all."""
        if site in self.survivors or not self.survivors:
            return self.survivors.get(site)
        axes = self.log_weights.ndim - 1
        least = [left.min(axis=tuple(range(axes, left.ndim))) for left in self.survivors.values()]
        return jnp.min(jnp.stack(least), 0)

    def expectation(self, fn: Callable[[dict[str, Array]], PyTree]) -> PyTree:
        """Weighted mean of fn over draws; fn takes one draw, a dict of site → value."""

        def one(log_weights: Array, samples: dict[str, Array]) -> PyTree:
            return jax.tree.map(partial(weighted_mean, log_weights), jax.vmap(fn)(samples))

        # not compiled: a lambda is a new function each time it is written down
        run = jax.vmap(one) if self.batched else one
        return run(self.log_weights, dict(self.samples))

    def resample(self, rng_key: PRNGKeyArray, n: int) -> dict[str, Array]:
        """`n` equally weighted draws of each site, by systematic resampling.

        Copies of one particle stand side by side, as a chain that stays where it is would leave
        them: who takes the draws for a chain is told the truth about how many differ.
        """

        if not self.batched:
            ancestors = systematic(rng_key, self.log_weights, n)
            return {name: value[ancestors] for name, value in self.samples.items()}
        keys = jax.random.split(rng_key, len(self))
        chosen = jax.vmap(systematic, in_axes=(0, 0, None))(keys, self.log_weights, n)
        return {
            name: jax.vmap(lambda value, index: value[index])(value, chosen)
            for name, value in self.samples.items()
        }

    def summary(self, *, round_to: Rounding = "auto") -> pd.DataFrame:
        """One row a scalar: mean, sd, 94 % highest-density interval, Monte Carlo error and ESS.

        ArviZ's columns, computed with the weights; `ess` is that of the row's own mean,
        (sd / mcse_mean)². `round_to` is a number of decimals; `"auto"` keeps two digits of each
        row's Monte Carlo error, None all.
        """
        from retrodict.particles.summary import summary

        self._one("summary()")
        return summary(self, round_to)

    def to_arviz(self) -> Any:
        """ArviZ's own object: InferenceData before ArviZ 1.0, an xarray DataTree from then on.

        - `posterior`: one chain of as many equally weighted draws as there are particles;
        - `sample_stats`: `log_weight` of every particle, `particle`, of which particle each draw is
          a copy, and as scalars `ess`, `pareto_k`, `log_evidence`, `log_evidence_se`;
        - `observed_data`.
        """
        from retrodict.particles.summary import to_arviz

        self._one("to_arviz()")
        return to_arviz(self)

    def plot(
        self,
        sites: tuple[str, ...] | None = None,
        *,
        kind: Kind = "marginals",
        prior: Mapping[str, Any] | None = None,
    ) -> Figure:
        """A figure: weighted marginals by default, and for a filtered series bands over time.

        `kind` may be "pairs", "filtered" or "ancestry" too; `prior` are draws to be shown along
        with the marginals: see `plots.plot_posterior` and `plots.draw_prior`.
        """
        from retrodict.plotting.posterior import plot_posterior

        self._one("plot()")
        return plot_posterior(self, sites, kind, prior)

    def __len__(self) -> int:
        if not self.batched:
            raise TypeError("this Posterior is of one data set and has no length")
        return int(self.log_weights.shape[0])

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: int) -> Posterior:
        number = range(len(self))[index]
        if number in self.extra.get("rescued", {}):
            rescued: Posterior = self.extra["rescued"][number]
            return rescued

        def pick(value: Any) -> Any:
            # not jax.tree.map, which would sort the sites by name
            if isinstance(value, Mapping):
                return {name: item[number] for name, item in value.items()}
            return None if value is None else value[number]

        shared = {"method", "dims", "coords", "extra"}
        parts = {
            f.name: pick(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name not in shared
        }
        each = self.extra.get("each")
        return dataclasses.replace(self, **parts, extra=each[number] if each else self.extra)

    def __iter__(self) -> Iterator[Posterior]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        sites = ", ".join(self.samples)
        if self.batched:
            counts = {grade: int(np.sum(self.trust == grade)) for grade in GRADES}
            said = ", ".join(f"{count} {grade}" for grade, count in counts.items() if count)
            return f"<Posterior of {sites}: {len(self)} data sets × {self.num_particles}, {said}>"
        return (
            f"<Posterior of {sites}: {self.num_particles} particles, ess {float(self.ess):.0f}, "
            f"log evidence {float(self.log_evidence):.3f} ± {float(self.log_evidence_se):.2g}, "
            f"trust {self.trust}{_noted(self.extra)}>"
        )

    def _site(self, name: str) -> Array:
        if name not in self.samples:
            raise KeyError(f"no latent site {name!r} here; there are: {', '.join(self.samples)}")
        return self.samples[name]

    def _one(self, what: str) -> None:
        if self.batched:
            raise ValueError(
                f"{what} is of one data set, and this Posterior holds {len(self)}: "
                f"pick one, as in posterior[0].{what}"
            )


def _noted(extra: Mapping[str, Any]) -> str:
    return f", {extra['note']}" if "note" in extra else ""


def make_posterior(
    samples: Mapping[str, Array],
    log_weights: Float[Array, "*datasets particles"],
    *,
    log_evidence: Float[Array, "*datasets"] | LogEvidence | None = None,
    num_resamplings: Int[Array, "*datasets"] | None = None,
    judged: Judged | None = None,
    log_evidence_se: Float[Array, "*datasets"] | None = None,
    num_nonfinite: Int[Array, "*datasets"] | None = None,
    ess_by_stage: Float[Array, "*datasets stages"] | None = None,
    ancestors: Int[Array, "*datasets stages particles"] | None = None,
    eves: Int[Array, "*datasets particles"] | None = None,
    survivors: Mapping[str, Float[Array, "*rest"]] | None = None,
    **fields: Any,
) -> Posterior:
    """A `Posterior` from particles and their unnormalised log weights.

    Args:
        samples: site → `(particles, *shape)`, with a leading axis if there are many data sets.
        log_weights: unnormalised, those of the last stage.
        log_evidence: from all stages; without it, the log mean of `log_weights`.
        num_resamplings: how often the population was resampled.
        judged: by `judge`, if that has been done.
        log_evidence_se: standard error; without it, estimated from weights and ancestry.
        num_nonfinite: weights found non-finite at earlier stages and set to zero since.
        ess_by_stage: effective sample sizes before each choice of ancestors, and in the end.
        ancestors: index of each particle's parent, at every stage.
        eves: index of each particle's ancestor far back, by which errors are told; without it, in
            the first population.
        survivors: by latent, the effective number of its draws that are left; of a series, by
            step. Without it, of the worst stage.
        fields: the other fields of `Posterior`.
    """
    shape = log_weights.shape[:-1]
    zeros = np.zeros(shape, np.int32)
    if judged is None:
        given = {
            "log_evidence_se": log_evidence_se,
            "num_nonfinite": jnp.asarray(zeros if num_nonfinite is None else num_nonfinite),
            "ess_by_stage": ess_by_stage,
            "ancestors": ancestors if ancestors is not None and ancestors.shape[-2] else None,
            "eves": eves,
            "survivors": None if survivors is None else dict(survivors),
        }
        judged = _each(bool(shape), _judge)(jnp.asarray(log_weights), given)
        if "" in judged.survivors:  # of the worst stage, which may be any latent's
            judged = judged._replace(survivors=dict.fromkeys(samples, judged.survivors[""]))
    found = judged.assessment
    if isinstance(log_evidence, LogEvidence):
        evidence = log_evidence.value()
    else:
        evidence = np.asarray(judged.log_mean if log_evidence is None else log_evidence, np.float64)
    # [()] makes a number of an array without axes, and leaves others as they are
    return Posterior(
        samples=dict(samples),
        log_weights=judged.log_weights,
        log_evidence=evidence[()],
        log_evidence_se=np.asarray(found.log_evidence_se)[()],
        ess=np.asarray(found.ess)[()],
        pareto_k=np.asarray(found.pareto_k)[()],
        grade=np.asarray(found.grade)[()],
        measures=np.asarray(found.measures),
        num_nonfinite=np.asarray(judged.num_nonfinite)[()],
        num_resamplings=np.asarray(zeros if num_resamplings is None else num_resamplings)[()],
        ess_by_stage=ess_by_stage,
        ancestors=ancestors,
        eves=judged.eves,
        survivors=judged.survivors,
        **fields,
    )


def _judge(log_weights: Array, given: dict[str, Any]) -> Judged:
    return judge(log_weights, **given)


def stacked(posteriors: Sequence[Posterior]) -> Posterior:
    """Answers for several data sets as one, with a leading axis.

    Where they went through different numbers of stages, the shorter ones are filled up with NaN.
    """
    parts: dict[str, Any] = {}
    for one in dataclasses.fields(Posterior):
        values = [getattr(posterior, one.name) for posterior in posteriors]
        if one.name == "ess_by_stage" and values[0] is not None:
            most = max(len(value) for value in values)
            values = [np.pad(v, (0, most - len(v)), constant_values=np.nan) for v in values]
        if one.name in ("samples", "data"):
            parts[one.name] = {name: jnp.stack([v[name] for v in values]) for name in values[0]}
        elif isinstance(values[0], np.ndarray | np.generic | jax.Array):
            stack = np.stack([np.asarray(value) for value in values])
            parts[one.name] = jnp.asarray(stack) if isinstance(values[0], jax.Array) else stack
    extra = {"rescued": dict(enumerate(posteriors))}
    return dataclasses.replace(posteriors[0], **parts, extra=extra)


@eqx.filter_jit
def _vmapped(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.vmap(function)(*arguments)


@eqx.filter_jit
def _jitted(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _each(batched: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of one data set, compiled, over a leading axis of data sets if there is one."""
    run = _vmapped if batched else _jitted
    return lambda *arguments: run(function, *arguments)
