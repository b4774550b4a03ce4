"""Importance weights: normalisation, effective sample size, evidence, PSIS k̂ and moments.

All functions take the weights of one population; `jax.vmap` extends them to many (Paige & Wood
2016, sec. 2.1). A weight that is NaN or +inf results from failed arithmetic and counts as zero;
`drop_nonfinite` counts them. A population whose weights are all zero keeps log weights of -inf and
a log mean of -inf; no function here turns these into NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

# Fewest points to which a generalised Pareto distribution is fitted.
MIN_TAIL = 5


def drop_nonfinite(
    log_weights: Float[Array, " particles"],
) -> tuple[Float[Array, " particles"], Int[Array, ""]]:
    """Set weights that are NaN or +inf to zero, and count them."""
    nonfinite = jnp.isnan(log_weights) | jnp.isposinf(log_weights)
    return jnp.where(nonfinite, -jnp.inf, log_weights), jnp.sum(nonfinite)


def _shift(log_weights: Array) -> Array:
    """The largest log weight, or 0 if every weight is zero."""
    largest = jnp.max(log_weights)
    return jnp.where(jnp.isfinite(largest), largest, 0.0)


def normalise(
    log_weights: Float[Array, " particles"],
) -> tuple[Float[Array, " particles"], Float[Array, ""]]:
    """Normalised log weights, log w_k - log Σ_j w_j, and the log mean weight, log (1/K) Σ_k w_k."""
    log_weights, _ = drop_nonfinite(log_weights)
    shift = _shift(log_weights)
    shifted = log_weights - shift
    total = jnp.sum(jnp.exp(shifted))
    log_total = jnp.where(total > 0.0, jnp.log(total), 0.0)
    log_mean = jnp.log(total) + shift - np.log(log_weights.shape[0])
    return shifted - log_total, log_mean


def ess(log_weights: Float[Array, " particles"]) -> Float[Array, ""]:
    """Effective sample size, (Σ_k w_k)² / Σ_k w_k², from 1 to K; 0 if every weight is zero."""
    log_weights, _ = drop_nonfinite(log_weights)
    w = jnp.exp(log_weights - _shift(log_weights))
    squares = jnp.sum(w**2)
    return jnp.where(squares > 0.0, jnp.sum(w) ** 2 / jnp.where(squares > 0.0, squares, 1.0), 0.0)


class LogEvidence(NamedTuple):
    """Log evidence as an unevaluated sum of two floats, with |low| below half an ulp of `high`.

    After a million steps the log evidence is near -3·10⁶, where adjacent single-precision numbers
    differ by 0.25; the pair has a precision of 48 bits. `value` returns the sum in double precision
    on the host.
    """

    high: Float[Array, "*batch"]
    low: Float[Array, "*batch"]

    @classmethod
    def zero(cls) -> "LogEvidence":
        """The log evidence before any step, log 1."""
        return cls(jnp.zeros(()), jnp.zeros(()))

    def add(self, increment: Float[Array, "*batch"]) -> "LogEvidence":
        """Add one step's log increment (Knuth's two-sum, renormalised as in Dekker 1971)."""
        high = self.high + increment
        part = high - self.high
        error = (self.high - (high - part)) + (increment - part)
        # An evidence of zero needs no compensation, and -inf - (-inf) would be NaN.
        low = jnp.where(jnp.isfinite(high), error + self.low, 0.0)
        total = high + low
        return LogEvidence(total, jnp.where(jnp.isfinite(high), low - (total - high), 0.0))

    def value(self) -> np.ndarray:
        """The sum in double precision."""
        return np.asarray(self.high, np.float64) + np.asarray(self.low, np.float64)


def log_evidence_se(log_weights: Float[Array, " particles"]) -> Float[Array, ""]:
    """Standard error of log Ẑ under importance sampling, by the delta method.

        se² = Var(w) / (K w̄²) = K / (K - 1) · (Σ_k W_k² - 1 / K) = K / (K - 1) · (1 / ESS - 1 / K)

    with the sample variance of the weights. It is inf for a single particle, from which no error
    can be estimated, and if every weight is zero.
    """
    return genealogical_se(log_weights, jnp.arange(log_weights.shape[0]))


def descendant_weights(
    log_weights: Float[Array, " particles"], eves: Int[Array, " particles"]
) -> Float[Array, " particles"]:
    """Total normalised weight of the descendants of each ancestor."""
    return jnp.zeros_like(log_weights).at[eves].add(jnp.exp(log_weights))


def genealogical_se(
    log_weights: Float[Array, " particles"],
    eves: Int[Array, " particles"],
    past_variance: float | Float[Array, ""] = 0.0,
) -> Float[Array, ""]:
    """Standard error of log Ẑ under SMC, from the last weights and each particle's ancestor.

        se² = K / (K - 1) · (past_variance + Σ_e F_e² - 1 / K),  F_e = Σ_{k descends from e} W_k

    after Chan & Lai (2013, Ann. Statist. 41:2877). `past_variance` is the variance due to draws
    older than the ancestors `eves`, see `genealogy.Lineage`. In bootstrap and nearly optimal
    filters with systematic resampling, the estimate is within a tenth of the spread over runs. With
    multinomial resampling over R generations it is too large, by about R / K inside the brackets.
    (Lee & Whiteley 2018 subtract this term; with any other resampling scheme their estimate is far
    too small, or zero.) Without resampling it equals `log_evidence_se`. It is inf if a single
    ancestor is left, from which no error can be estimated, and if every weight is zero.
    """
    num = log_weights.shape[0]
    if num == 1:
        return jnp.asarray(jnp.inf, log_weights.dtype)
    log_normalised, log_mean = normalise(log_weights)
    by_ancestor = descendant_weights(log_normalised, eves)
    # Σ_e F_e² - 1/K as a sum of squares, without cancellation where weights are nearly equal.
    spread = jnp.sum((by_ancestor - 1.0 / num) ** 2)
    degenerate = jnp.isneginf(log_mean) | (jnp.max(by_ancestor) > 1.0 - 1e-6)
    return jnp.where(degenerate, jnp.inf, jnp.sqrt(num / (num - 1.0) * (past_variance + spread)))


def eve_indices(ancestors: Int[Array, "stages particles"]) -> Int[Array, " particles"]:
    """Index in the first generation of each last particle's ancestor (its Eve)."""
    first = jnp.arange(ancestors.shape[1], dtype=ancestors.dtype)
    return jax.lax.scan(lambda eves, row: (eves[row], None), first, ancestors)[0]


def pareto_k(log_weights: Float[Array, " particles"]) -> Float[Array, ""]:
    """PSIS k̂: shape of the generalised Pareto distribution fitted to the largest weights.

    Vehtari et al. (2024, JMLR 25:72), with the fit of Zhang & Stephens (2009) to the
    M = ⌈min(K / 5, 3 √K)⌉ largest weights and a prior worth ten observations of 1/2. The mean of
    the weights has finite variance for k < 1/2, and converges too slowly to be useful above 0.7.
    The value equals that of ArviZ 0.23 if the M + 1 largest weights are distinct. Otherwise:

    - K ≤ 20, or fewer than five positive weights: too few for a fit, k̂ = inf;
    - fewer than five weights above the (M + 1)-st because of ties (a discrete posterior, or a
      proposal that is exact up to rounding): the prior's 1/2. A few weights that exceed the ties by
      far show in the ESS.
    """
    size = _tail_size(log_weights.shape[0])
    if size < MIN_TAIL:
        return jnp.asarray(jnp.inf, log_weights.dtype)
    log_weights, _ = drop_nonfinite(log_weights)
    top = jax.lax.top_k(log_weights - _shift(log_weights), size + 1)[0]
    below_floor = top[-1] < np.log(np.finfo(np.float64).tiny)
    cutoff = jnp.where(below_floor, np.log(np.finfo(np.float64).tiny), top[-1])
    inside = top[:-1] > cutoff
    count = jnp.sum(inside)
    # exp(a) - exp(c) without cancellation. The floor keeps 1 / x finite in single precision, and is
    # reached only where k̂ is far above any threshold.
    x = jnp.maximum(-jnp.expm1(cutoff - top[:-1]) * jnp.exp(top[:-1]), jnp.exp(-80.0))
    k = _gpd_shape(jnp.where(inside, x / x[0], 0.0), inside, count)
    too_few = count < MIN_TAIL
    return jnp.where(too_few, jnp.where(below_floor, jnp.inf, 0.5), k)


def tail_share(log_weights: Float[Array, " particles"]) -> Float[Array, ""]:
    """Share of the total weight in the tail to which k̂ is fitted.

    That is the excess of the M largest weights over the (M + 1)-st.
    """
    size = min(_tail_size(log_weights.shape[0]), log_weights.shape[0] - 1)
    log_weights, _ = drop_nonfinite(log_weights)
    top = jax.lax.top_k(log_weights - _shift(log_weights), size + 1)[0]
    excess = jnp.sum(jnp.exp(top) - jnp.exp(top[-1]))
    total = jnp.sum(jnp.exp(log_weights - _shift(log_weights)))
    return jnp.where(total > 0.0, excess / jnp.where(total > 0.0, total, 1.0), 1.0)


def _tail_size(num: int) -> int:
    """M, the number of weights in the tail."""
    return int(np.ceil(min(num / 5, 3 * np.sqrt(num))))


def _gpd_shape(x: Array, inside: Array, count: Array) -> Array:
    """Posterior mean shape of a generalised Pareto distribution, given descending excesses.

    Zhang & Stephens (2009): average b = k / σ over a grid of quantiles of its prior, weighted by
    the profile likelihood; then shrink k towards 1/2, as ten more observations of it would.
    """
    n = jnp.maximum(count, 1)
    size = x.shape[0]
    grid = 30 + jnp.floor(jnp.sqrt(n)).astype(jnp.int32)
    j = jnp.arange(1, 31 + int(np.sqrt(size)))
    quartile = x[n - jnp.maximum(jnp.floor(n / 4 + 0.5).astype(jnp.int32), 1)]
    b = 1.0 / x[0] + (1.0 - jnp.sqrt(grid / (j - 0.5))) / (3.0 * quartile)

    def shape(b: Array) -> Array:
        return jnp.sum(jnp.where(inside, jnp.log1p(-b * x), 0.0)) / n

    k = jax.vmap(shape)(b)
    profile = n * (jnp.log(-b / k) - k - 1.0)
    profile = jnp.where((j <= grid) & jnp.isfinite(profile), profile, -jnp.inf)
    b_mean = jnp.sum(jax.nn.softmax(profile) * b)
    return (n * shape(b_mean) + 5.0) / (n + 10.0)


def weighted_mean(
    log_weights: Float[Array, " particles"], values: Shaped[Array, "particles *shape"]
) -> Float[Array, "*shape"]:
    """Σ_k W_k x_k for normalised weights; NaN if every weight is zero."""
    weights = jnp.exp(log_weights)
    is_zero = (weights == 0.0).reshape(-1, *(1,) * (values.ndim - 1))
    # A particle of weight zero may have values that are NaN or infinite.
    values = jnp.where(is_zero, 0, values).astype(weights.dtype)
    # The weights' sum is 1 up to rounding, which must not shift the mean of a narrow posterior.
    heaviest = values[jnp.argmax(weights)]
    origin = jnp.where(jnp.isfinite(heaviest), heaviest, 0.0)
    mean = origin + jnp.tensordot(weights, jnp.where(is_zero, 0.0, values - origin), axes=1)
    return jnp.where(jnp.all(is_zero), jnp.nan, mean)


def weighted_sd(
    log_weights: Float[Array, " particles"], values: Shaped[Array, "particles *shape"]
) -> Float[Array, "*shape"]:
    """Square root of Σ_k W_k (x_k - mean)², for normalised weights."""
    centred = values - weighted_mean(log_weights, values)
    return jnp.sqrt(weighted_mean(log_weights, centred**2))


def weighted_mcse(
    log_weights: Float[Array, " particles"],
    values: Shaped[Array, "particles *shape"],
    eves: Int[Array, " particles"],
    survivors: Float[Array, "*time"] | None = None,
) -> Float[Array, "*shape"]:
    """Monte Carlo standard error of the weighted mean m, for each element of a site.

        se² = Σ_g (Σ_{k in g} W_k (x_k - m))²

    Groups g consist of dependent particles. The larger error of two groupings is used: by ancestor
    (Chan & Lai 2013), and for real-valued sites by value, since equal values are copies of one
    draw. Without resampling every particle is a group of its own, and this is the delta method for
    self-normalised importance sampling.

    `survivors` is the effective number E of draws behind the site (by step, if the first axis of
    the site is time). The error is at least sd / √(E - 1), and inf for E = 1. NaN means that E is
    not known.
    """
    weights = jnp.exp(log_weights)
    num = weights.shape[0]
    flat = values.reshape(num, -1)
    terms = weights[:, None] * (flat - weighted_mean(log_weights, flat))
    terms = jnp.where(weights[:, None] > 0.0, terms, 0.0)

    def grouped(groups: Array, terms: Array) -> Array:
        return jnp.sum(jnp.zeros(num).at[groups].add(terms) ** 2)

    variance = jax.vmap(grouped, in_axes=(None, 1))(eves, terms)
    if jnp.issubdtype(values.dtype, jnp.floating):

        def by_value(value: Array, terms: Array) -> Array:
            order = jnp.argsort(value)
            starts = jnp.concatenate([jnp.zeros(1, bool), jnp.diff(value[order]) != 0.0])
            return grouped(jnp.cumsum(starts), terms[order])

        variance = jnp.maximum(variance, jax.vmap(by_value, in_axes=1)(flat, terms))
    variance = variance.reshape(values.shape[1:])
    if survivors is not None:
        freedom = jnp.nan_to_num(survivors, nan=jnp.inf) - 1.0
        freedom = freedom.reshape(survivors.shape + (1,) * (values.ndim - 1 - survivors.ndim))
        minimum = weighted_sd(log_weights, values) ** 2 / jnp.maximum(freedom, 1e-3)
        variance = jnp.where(freedom < 1e-3, jnp.inf, jnp.maximum(variance, minimum))
    return jnp.sqrt(variance)


def weighted_hdi(
    values: np.ndarray, log_weights: np.ndarray, probability: float
) -> tuple[float, float]:
    """Highest-density interval: the narrowest between two values that holds this probability."""
    weights = np.exp(np.asarray(log_weights, np.float64))
    positive = weights > 0.0
    if not positive.any():
        return np.nan, np.nan
    points, group = np.unique(values[positive], return_inverse=True)
    cumulative = np.cumsum(np.bincount(group, weights[positive]))
    cumulative = cumulative / cumulative[-1]
    start = np.append(0.0, cumulative[:-1])
    # The tolerance allows for rounding of the cumulative sum.
    last = np.searchsorted(cumulative, start + probability * (1.0 - 1e-9))
    first = np.flatnonzero(last < len(points))
    widths = points[last[first]].astype(float) - points[first]
    best = first[int(np.argmin(widths))]
    return float(points[best]), float(points[last[best]])
