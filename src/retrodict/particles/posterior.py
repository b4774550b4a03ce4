"""The posterior as weighted particles: moments, draws, tables, grade and reasons.

A `Posterior` holds the particles of one data set, or those of many data sets with a leading axis.
Its grade, `trust`, follows from the weights and the genealogy of the particles alone, by the limits
in `diagnostics.LIMITS` (Paige & Wood 2016, sec. 2.1 and 2.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from retrodict.particles.diagnostics import (
    GRADES,
    Diagnostics,
    Rescue,
    TemperingReport,
    grade_reasons,
)
from retrodict.particles.out_of_distribution import PriorPredictiveCheck
from retrodict.particles.resampling import systematic
from retrodict.particles.weights import weighted_mcse, weighted_mean, weighted_sd

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped, unused-ignore]
    from matplotlib.figure import Figure

    from retrodict.particles.summary import Rounding
    from retrodict.plotting.posterior import Kind


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """Weighted particles of a posterior distribution, with its evidence and diagnostics.

    `Compiled.infer` returns the posterior of one data set; `Compiled.infer_many` returns that of
    many data sets, in which every array has a leading axis of data sets. Then `posterior[i]` is the
    posterior of data set i and `len(posterior)` the number of data sets; `mean`, `sd`, `mcse`,
    `expectation` and `resample` work on all data sets at once; `diagnostics`, `summary`, `to_arviz`
    and `plot` require one.

    The log evidence is a NumPy number in double precision: a series of 10 000 steps has a log
    evidence whose third decimal is lost in single precision.

    Attributes:
        samples: latent or deterministic site → `(*datasets, num_particles, *site shape)`.
        log_weights: normalised, `logsumexp(log_weights) == 0`: `(*datasets, num_particles)`.
        log_evidence: estimate of log p(y), `(*datasets,)`; the estimate of p(y) is unbiased.
        log_evidence_se: standard error of `log_evidence`.
        ess: effective sample size of the weights.
        pareto_k: PSIS k̂ (Vehtari et al. 2024, JMLR 25:72).
        grade: 0 good, 1 fair, 2 poor; `trust` gives it as a word.
        measures: value of each of `diagnostics.LIMITS`, `(*datasets, limits)`.
        num_nonfinite: weights that were NaN or +inf and were set to zero, over all stages.
        num_resamplings: how often the particles were resampled.
        method: "importance", "smc", "divide" or "temper".
        ess_by_stage: effective sample size before each resampling decision and at the end.
        ancestors: index of each particle's parent at every stage.
        eves: index of each particle's ancestor in the generation from which errors are estimated;
            None if every particle is independent of the others.
        survivors: latent → effective number of its distinct draws left after resampling,
            `(*datasets,)`, or `(*datasets, time)` for a series.
        filtered: site in time → `(*datasets, time, num_particles, *shape of one step)`.
        filtered_log_weights: `(*datasets, time, num_particles)`.
        data: observed site → values; masked elements hold a constant.
        dims: site → names of its axes, for labels.
        coords: axis → labels of its elements.
        remarks: reasons that the method itself gives; `diagnostics` adds those of the grade.
        tempering: report of tempered SMC; None for other methods.
        rescue: the method that tempering replaced; None if the planned method was kept.
        predictive_checks: where the data lie among prior predictive data sets, one for each data
            set; empty if the compiled model has no reference for its arguments.
        individual: index of a data set → its posterior, where it was not computed with the batch,
            as after a rescue by tempering.

    Example:
        >>> import jax.numpy as jnp
        >>> from retrodict.particles.make_posterior import make_posterior
        >>> x, log_weights = jnp.array([0.0, 2.0]), jnp.log(jnp.array([1.0, 3.0]))
        >>> posterior = make_posterior({"x": x}, log_weights)
        >>> round(float(posterior.mean("x")), 3), round(float(posterior.ess), 3)
        (1.5, 1.6)
        >>> posterior.trust
        'poor'
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
    remarks: tuple[str, ...] = ()
    tempering: TemperingReport | None = None
    rescue: Rescue | None = None
    predictive_checks: tuple[PriorPredictiveCheck, ...] = ()
    individual: Mapping[int, Posterior] = field(default_factory=dict)

    @property
    def num_particles(self) -> int:
        """Number of particles, K."""
        return int(self.log_weights.shape[-1])

    @property
    def batched(self) -> bool:
        """Whether there is a leading axis of data sets."""
        return self.log_weights.ndim == 2

    @property
    def trust(self) -> str | np.ndarray:
        """`"good"`, `"fair"` or `"poor"`; an array of these words for many data sets."""
        words = np.array(GRADES)[self.grade]
        return words if self.batched else str(words)

    @property
    def note(self) -> str:
        """How tempering was used, in a few words; empty if it was not."""
        if self.tempering is None:
            return ""
        label = "tempered" if self.rescue is None else "rescued by tempering"
        return f"{label}: {len(self.tempering.temperatures)} temperatures"

    @property
    def diagnostics(self) -> Diagnostics:
        """How the posterior was computed, and the reasons for its `trust`.

        Raises:
            ValueError: there are many data sets.
        """
        self._require_one("diagnostics")
        survivors = {name: np.asarray(number) for name, number in self.survivors.items()}
        return Diagnostics(
            method=self.method,
            trust=GRADES[int(self.grade)],
            reasons=(
                *self.remarks,
                *(reason for check in self.predictive_checks for reason in check.reasons()),
                *grade_reasons(self.measures, self.num_particles, survivors),
            ),
            num_particles=self.num_particles,
            num_nonfinite=int(self.num_nonfinite),
            num_stages=1 if self.ess_by_stage is None else max(self.ess_by_stage.shape[-1], 1),
            num_resamplings=int(self.num_resamplings),
            tempering=self.tempering,
            rescue=self.rescue,
            predictive_check=self.predictive_checks[0] if self.predictive_checks else None,
        )

    def mean(self, site: str) -> Float[Array, "*datasets *shape"]:
        """Posterior mean, Σ_k W_k x_k.

        Args:
            site: name of a latent or deterministic site.

        Returns:
            One value for each element of the site, with a leading axis if there are many data sets;
            NaN where every weight is zero.

        Raises:
            KeyError: `samples` has no such site.

        Example:
            >>> import jax.numpy as jnp
            >>> from retrodict.particles.make_posterior import make_posterior
            >>> x = jnp.array([[0.0, 4.0], [2.0, 8.0]])
            >>> posterior = make_posterior({"x": x}, jnp.zeros(2))
            >>> posterior.mean("x").tolist()
            [1.0, 6.0]
        """
        mean: Array = over_datasets(
            self.batched, weighted_mean, self.log_weights, self._values(site)
        )
        return mean

    def sd(self, site: str) -> Float[Array, "*datasets *shape"]:
        """Posterior standard deviation, the square root of Σ_k W_k (x_k - mean)².

        Args:
            site: name of a latent or deterministic site.

        Returns:
            An array of the shape of `mean(site)`.

        Raises:
            KeyError: `samples` has no such site.
        """
        sd: Array = over_datasets(self.batched, weighted_sd, self.log_weights, self._values(site))
        return sd

    def mcse(self, site: str) -> Float[Array, "*datasets *shape"]:
        """Monte Carlo standard error of `mean(site)`.

        It accounts for the genealogy of the particles (Chan & Lai 2013, Ann. Statist. 41:2877) and
        for copies of one draw: see `weights.weighted_mcse`.

        Args:
            site: name of a latent or deterministic site.

        Returns:
            An array of the shape of `mean(site)`; inf where resampling left a single draw.

        Raises:
            KeyError: `samples` has no such site.
        """
        eves = self.eves
        if eves is None:
            eves = jnp.broadcast_to(jnp.arange(self.num_particles), self.log_weights.shape)
        mcse: Array = over_datasets(
            self.batched,
            weighted_mcse,
            self.log_weights,
            self._values(site),
            eves,
            self._survivors_of(site),
        )
        return mcse

    def expectation(self, fn: Callable[[dict[str, Array]], PyTree]) -> PyTree:
        """Posterior mean of a function of the latents.

        Args:
            fn: takes one draw, a dict of site → value without the axis of particles, and returns a
                number, an array or a pytree of them.

        Returns:
            The weighted mean of each leaf, with a leading axis if there are many data sets.

        Example:
            >>> import jax.numpy as jnp
            >>> from retrodict.particles.make_posterior import make_posterior
            >>> posterior = make_posterior({"x": jnp.array([0.0, 2.0])}, jnp.zeros(2))
            >>> float(posterior.expectation(lambda draw: draw["x"] ** 2))
            2.0
        """

        def weighted(log_weights: Array, samples: dict[str, Array]) -> PyTree:
            return jax.tree.map(partial(weighted_mean, log_weights), jax.vmap(fn)(samples))

        # Not compiled: a lambda is a new function, and so a new compilation, at every call.
        run = jax.vmap(weighted) if self.batched else weighted
        return run(self.log_weights, dict(self.samples))

    def resample(self, rng_key: PRNGKeyArray, n: int) -> dict[str, Array]:
        """Equally weighted draws from the posterior, by systematic resampling.

        Copies of one particle are adjacent, so that a tool which takes the draws for a Markov chain
        sees their autocorrelation and reports the right effective sample size.

        Args:
            rng_key: a typed key, as from `jax.random.key(0)`.
            n: number of draws.

        Returns:
            Site → `(*datasets, n, *site shape)`.

        Raises:
            ValueError: `n` is below 1 or above 2²².

        Example:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> from retrodict.particles.make_posterior import make_posterior
            >>> x = jnp.array([0.0, 2.0])
            >>> posterior = make_posterior({"x": x}, jnp.log(jnp.array([1.0, 3.0])))
            >>> posterior.resample(jax.random.key(0), 4)["x"].tolist()
            [0.0, 2.0, 2.0, 2.0]
        """

        def draw(key: PRNGKeyArray, log_weights: Array, samples: Mapping[str, Array]) -> Any:
            ancestors = systematic(key, log_weights, n)
            return {name: value[ancestors] for name, value in samples.items()}

        samples = dict(self.samples)
        if not self.batched:
            draws: dict[str, Array] = draw(rng_key, self.log_weights, samples)
        else:
            keys = jax.random.split(rng_key, len(self))
            draws = jax.vmap(draw)(keys, self.log_weights, samples)
        # Transformations of JAX sort dicts by key; the sites keep their order.
        return {name: draws[name] for name in samples}

    def summary(self, *, round_to: Rounding = "auto") -> pd.DataFrame:
        """Table of the posterior, one row for each scalar.

        The columns are those of ArviZ, computed with the weights: `mean`, `sd`, the 94 %
        highest-density interval `hdi_3%` and `hdi_97%`, `mcse_mean`, and `ess`, the effective
        sample size of the mean, (sd / mcse_mean)².

        Args:
            round_to: number of decimals; `"auto"` keeps two digits of each row's Monte Carlo error,
                None keeps all.

        Raises:
            ValueError: there are many data sets.

        Example:
            >>> import jax.numpy as jnp
            >>> from retrodict.particles.make_posterior import make_posterior
            >>> posterior = make_posterior({"x": jnp.array([[0.0], [2.0]])}, jnp.zeros(2))
            >>> posterior.summary()["mean"].to_dict()
            {'x[0]': 1.0}
        """
        from retrodict.particles.summary import summary

        self._require_one("summary()")
        return summary(self, round_to)

    def to_arviz(self) -> Any:
        """ArviZ's data structure: InferenceData before ArviZ 1.0, an xarray DataTree since.

        - `posterior`: one chain of `num_particles` equally weighted draws;
        - `sample_stats`: `log_weight` of every particle; `particle`, the index of the particle that
          each draw copies; and as scalars `ess`, `pareto_k`, `log_evidence`, `log_evidence_se`;
        - `observed_data`.

        Raises:
            ValueError: there are many data sets.
            ImportError: ArviZ is not installed.
        """
        from retrodict.particles.summary import to_arviz

        self._require_one("to_arviz()")
        return to_arviz(self)

    def plot(
        self,
        sites: tuple[str, ...] | None = None,
        *,
        kind: Kind = "marginals",
        prior: Mapping[str, Any] | None = None,
    ) -> Figure:
        """Figure of the posterior.

        Args:
            sites: names of the sites to show; all if None.
            kind: "marginals" shows weighted marginals, and bands over time for a filtered series;
                "pairs", "filtered" and "ancestry" are described in `plotting.posterior`.
            prior: site → draws from the prior, shown beside the marginals.

        Raises:
            ValueError: there are many data sets, or `kind` is none of the above.
            KeyError: `samples` has no such site.
        """
        from retrodict.plotting.posterior import plot_posterior

        self._require_one("plot()")
        return plot_posterior(self, sites, kind, prior)

    def __len__(self) -> int:
        if not self.batched:
            raise TypeError("this Posterior holds one data set and has no length")
        return int(self.log_weights.shape[0])

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: int) -> Posterior:
        row = range(len(self))[index]
        if row in self.individual:
            return self.individual[row]

        def select(value: Any) -> Any:
            # Not jax.tree.map, which would sort the sites by name.
            if isinstance(value, Mapping):
                return {name: item[row] for name, item in value.items()}
            return None if value is None else value[row]

        parts = {name: select(getattr(self, name)) for name in _PER_DATASET}
        checks = self.predictive_checks[row : row + 1]
        return dataclasses.replace(self, **parts, predictive_checks=checks, individual={})

    def __iter__(self) -> Iterator[Posterior]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        sites = ", ".join(self.samples)
        if self.batched:
            counts = {grade: int(np.sum(self.trust == grade)) for grade in GRADES}
            grades = ", ".join(f"{count} {grade}" for grade, count in counts.items() if count)
            return f"<Posterior of {sites}: {len(self)} data sets × {self.num_particles}, {grades}>"
        note = f", {self.note}" if self.note else ""
        return (
            f"<Posterior of {sites}: {self.num_particles} particles, ess {float(self.ess):.0f}, "
            f"log evidence {float(self.log_evidence):.3f} ± {float(self.log_evidence_se):.2g}, "
            f"trust {self.trust}{note}>"
        )

    def _values(self, site: str) -> Array:
        if site not in self.samples:
            raise KeyError(
                f"{site!r} is not a site of this posterior; its sites are {', '.join(self.samples)}"
            )
        return self.samples[site]

    def _survivors_of(self, site: str) -> Array | None:
        """Effective number of draws behind a site; the smallest of all for a deterministic site."""
        if site in self.survivors or not self.survivors:
            return self.survivors.get(site)
        axes = self.log_weights.ndim - 1
        smallest = [n.min(axis=tuple(range(axes, n.ndim))) for n in self.survivors.values()]
        return jnp.min(jnp.stack(smallest), 0)

    def _require_one(self, member: str) -> None:
        if self.batched:
            raise ValueError(
                f"{member} needs the posterior of one data set, and this one holds {len(self)}: "
                f"select one, as in posterior[0].{member}"
            )


# Fields with a leading axis of data sets where there are many.
_PER_DATASET = (
    *("samples", "log_weights", "log_evidence", "log_evidence_se", "ess", "pareto_k", "grade"),
    *("measures", "num_nonfinite", "num_resamplings", "ess_by_stage", "ancestors", "eves"),
    *("survivors", "filtered", "filtered_log_weights", "data"),
)


def over_datasets(batched: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compile and call a function of one data set, vectorised over a leading axis if batched."""
    return (_vmapped if batched else _jitted)(function, *args, **kwargs)


@eqx.filter_jit
def _vmapped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return jax.vmap(function)(*args, **kwargs)


@eqx.filter_jit
def _jitted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
