"""Weighted particles in; the answer with its moments, tables, verdict and reasons out.

A `Posterior` holds one data set's particles, or those of many data sets with a leading axis.
Weights are normalised; the verdict `trust` is read from them alone, against the limits in `LIMITS`
(the paper, sec. 2.1 and 2.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from retrodict.resampling import systematic
from retrodict.trust import GRADES, Assessment, Diagnostics, assess, reasons
from retrodict.weights import (
    LogEvidence,
    drop_nonfinite,
    normalise,
    trace_eves,
    weighted_hdi,
    weighted_mcse,
    weighted_mean,
    weighted_sd,
)

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped, unused-ignore]
    from matplotlib.figure import Figure

    from retrodict.plots import Kind


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
            reasons=(*self.extra.get("reasons", ()), *reasons(self.measures, self.num_particles)),
            num_particles=self.num_particles,
            num_nonfinite=int(self.num_nonfinite),
            num_stages=_stages(self.ess_by_stage),
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
        """Standard error of `mean(site)`: see `weights.weighted_mcse`."""
        eves = self.eves
        if eves is None:
            eves = jnp.broadcast_to(jnp.arange(self.num_particles), self.log_weights.shape)
        error: Array = _each(self.batched, weighted_mcse)(self.log_weights, self._site(site), eves)
        return error

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

    def summary(self, *, round_to: int | Literal["auto"] | None = "auto") -> pd.DataFrame:
        """One row a scalar: mean, sd, 94 % highest-density interval, Monte Carlo error and ESS.

        ArviZ's columns, computed with the weights; `ess` is that of the row's own mean,
        (sd / mcse_mean)². `round_to` is a number of decimals; `"auto"` keeps two digits of each
        row's Monte Carlo error, None all.
        """
        import pandas as pd

        self._one("summary()")
        rows: dict[str, list[float]] = {}
        for name, value in self.samples.items():
            flat = np.asarray(value).reshape(self.num_particles, -1)
            moments = [np.ravel(f(name)) for f in (self.mean, self.sd, self.mcse)]
            for number, index in enumerate(np.ndindex(value.shape[1:])):
                label = f"{name}[{', '.join(map(str, index))}]" if index else name
                mean, sd, mcse = (float(m[number]) for m in moments)
                low, high = weighted_hdi(flat[:, number], np.asarray(self.log_weights), 0.94)
                # a site that never varies is known exactly by as many draws as there are
                effective = (sd / mcse) ** 2 if mcse > 0.0 else float(self.ess)
                rows[label] = [mean, sd, low, high, mcse, effective]
        columns = ["mean", "sd", "hdi_3%", "hdi_97%", "mcse_mean", "ess"]
        table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
        if "note" in self.extra:
            table = table.rename_axis(columns=self.extra["note"])
        return _rounded(table, round_to)

    def to_arviz(self) -> Any:
        """ArviZ's own object: InferenceData before ArviZ 1.0, an xarray DataTree from then on.

        - `posterior`: one chain of as many equally weighted draws as there are particles;
        - `sample_stats`: `log_weight` of every particle, `particle`, of which particle each draw is
          a copy, and as scalars `ess`, `pareto_k`, `log_evidence`, `log_evidence_se`;
        - `observed_data`.
        """
        self._one("to_arviz()")
        try:
            import arviz
        except ImportError as error:
            raise ImportError(
                "to_arviz() needs ArviZ, which is not installed: pip install arviz"
            ) from error
        # a key of its own, the same every time: the same posterior gives the same draws
        particle = systematic(jax.random.key(0), self.log_weights, self.num_particles)
        draws = {name: np.asarray(value[particle])[None] for name, value in self.samples.items()}
        stats = {
            "log_weight": np.asarray(self.log_weights)[None],
            "particle": np.asarray(particle)[None],
        }
        data = {name: np.asarray(value) for name, value in self.data.items()}
        known = {name: list(names) for name, names in self.dims.items()}

        def dataset(values: Mapping[str, np.ndarray], **options: Any) -> Any:
            dims = {name: known[name] for name in values if name in known}
            # ArviZ leaves this function without types
            return arviz.dict_to_dataset(  # type: ignore[no-untyped-call, unused-ignore]
                values, coords=dict(self.coords), dims=dims, **options
            )

        measures = {
            name: float(getattr(self, name))
            for name in ("ess", "pareto_k", "log_evidence", "log_evidence_se")
        }
        groups = {
            "posterior": dataset(draws),
            "sample_stats": dataset(stats).assign(measures),
        }
        groups["sample_stats"].attrs.update(
            trust=self.trust, method=self.method, reasons=" ".join(self.diagnostics.reasons)
        )
        old = int(arviz.__version__.split(".")[0]) < 1
        if data:
            # data have no chain and no draw; ArviZ 1.0 renamed the option that says so
            groups["observed_data"] = dataset(
                data, **{"default_dims" if old else "sample_dims": []}
            )
        if old:
            return arviz.InferenceData(**groups)
        import xarray

        return xarray.DataTree.from_dict(groups)

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
        from retrodict.plots import plot_posterior

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
            f"trust {self.trust}>"
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


def make_posterior(
    samples: Mapping[str, Array],
    log_weights: Float[Array, "*datasets particles"],
    *,
    log_evidence: Float[Array, "*datasets"] | LogEvidence | None = None,
    log_evidence_se: Float[Array, "*datasets"] | None = None,
    num_nonfinite: Int[Array, "*datasets"] | None = None,
    num_resamplings: Int[Array, "*datasets"] | None = None,
    ancestors: Int[Array, "*datasets stages particles"] | None = None,
    eves: Int[Array, "*datasets particles"] | None = None,
    **fields: Any,
) -> Posterior:
    """A `Posterior` from particles and their unnormalised log weights.

    Args:
        samples: site → `(particles, *shape)`, with a leading axis if there are many data sets.
        log_weights: unnormalised, those of the last stage.
        log_evidence: from all stages; without it, the log mean of `log_weights`.
        log_evidence_se: its standard error; without it, estimated from weights and ancestry.
        num_nonfinite: weights found non-finite at earlier stages and set to zero since.
        num_resamplings: how often the population was resampled.
        ancestors: index of each particle's parent, at every stage.
        eves: index of each particle's ancestor in the first population, if `ancestors` is not kept.
        fields: the other fields of `Posterior`.
    """
    shape = log_weights.shape[:-1]
    if eves is None and ancestors is not None and ancestors.shape[-2]:
        eves = _each(bool(shape), trace_eves)(ancestors)
    earlier = jnp.zeros(shape, jnp.int32) if num_nonfinite is None else jnp.asarray(num_nonfinite)
    times = jnp.zeros(shape, jnp.int32) if num_resamplings is None else jnp.asarray(num_resamplings)
    stages = _stages(fields.get("ess_by_stage"))
    log_normalised, log_mean, found, broken = _each(bool(shape), _weigh)(
        jnp.asarray(log_weights), log_evidence_se, earlier, eves, times, np.full(shape, stages)
    )
    if isinstance(log_evidence, LogEvidence):
        evidence = log_evidence.value()
    else:
        evidence = np.asarray(log_mean if log_evidence is None else log_evidence, np.float64)
    # [()] makes a number of an array without axes, and leaves others as they are
    return Posterior(
        samples=dict(samples),
        log_weights=log_normalised,
        log_evidence=evidence[()],
        log_evidence_se=np.asarray(found.log_evidence_se)[()],
        ess=np.asarray(found.ess)[()],
        pareto_k=np.asarray(found.pareto_k)[()],
        grade=np.asarray(found.grade)[()],
        measures=np.asarray(found.measures),
        num_nonfinite=np.asarray(earlier + broken)[()],
        num_resamplings=np.asarray(times)[()],
        ancestors=ancestors,
        eves=eves,
        **fields,
    )


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


def _stages(ess_by_stage: Array | None) -> int:
    return 1 if ess_by_stage is None else max(int(ess_by_stage.shape[-1]), 1)


def _weigh(
    log_weights: Array,
    log_evidence_se: Array | None,
    earlier: Array,
    eves: Array | None,
    resamplings: Array,
    stages: Array,
) -> tuple[Array, Array, Assessment, Array]:
    _, broken = drop_nonfinite(log_weights)
    found = assess(
        log_weights,
        log_evidence_se,
        num_nonfinite=earlier,
        eves=eves,
        resamplings=resamplings,
        stages=stages,
    )
    return *normalise(log_weights), found, broken


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


def _rounded(table: pd.DataFrame, round_to: int | Literal["auto"] | None) -> pd.DataFrame:
    if round_to is None:
        return table
    table["ess"] = table["ess"].round(0)
    numbers = ["mean", "sd", "hdi_3%", "hdi_97%", "mcse_mean"]
    if round_to != "auto":
        table[numbers] = table[numbers].round(round_to)
        return table
    for label, error in table["mcse_mean"].items():
        decimals = 1 - math.floor(math.log10(error)) if error > 0.0 and np.isfinite(error) else 3
        table.loc[label, numbers] = table.loc[label, numbers].round(decimals)
    return table
