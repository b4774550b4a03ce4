"""Log weights in; normalised weights, effective sample size, log evidence, k̂ and moments out.

Functions of one population's weights, for `jax.vmap` to carry over many (the paper, sec. 2.1).
A weight that is NaN or +inf tells of arithmetic that failed and counts as zero: `drop_nonfinite`
says how many there were. A population whose weights are all zero keeps log weights of -inf and a
log mean of -inf: that -inf is the flag, and no function here turns it into NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

# A generalised Pareto fit needs five points at least; 20 % of 20 particles are four.
FEWEST_IN_TAIL = 5


def drop_nonfinite(
    log_weights: Float[Array, " particles"],
) -> tuple[Float[Array, " particles"], Int[Array, ""]]:
    """Set weights that are NaN or +inf to zero; also how many of them there were."""
    broken = jnp.isnan(log_weights) | jnp.isposinf(log_weights)
    return jnp.where(broken, -jnp.inf, log_weights), jnp.sum(broken)


def _shift(log_weights: Array) -> Array:
    """The largest log weight, or 0 where every weight is zero."""
    largest = jnp.max(log_weights)
    return jnp.where(jnp.isfinite(largest), largest, 0.0)


def log_mean_exp(log_weights: Float[Array, " particles"]) -> Float[Array, ""]:
    """log (1/K) Σ_k w_k; -inf where every weight is zero."""
    log_weights, _ = drop_nonfinite(log_weights)
    shift = _shift(log_weights)
    return shift + jnp.log(jnp.mean(jnp.exp(log_weights - shift)))


def normalise(
    log_weights: Float[Array, " particles"],
) -> tuple[Float[Array, " particles"], Float[Array, ""]]:
    """log W_k = log w_k - log Σ_j w_j, and log (1/K) Σ_k w_k, the evidence's next factor."""
    log_weights, _ = drop_nonfinite(log_weights)
    shift = _shift(log_weights)
    shifted = log_weights - shift
    total = jnp.sum(jnp.exp(shifted))
    log_total = jnp.where(total > 0.0, jnp.log(total), 0.0)
    log_mean = jnp.log(total) + shift - np.log(log_weights.shape[0])
    return shifted - log_total, log_mean


def ess(log_weights: Float[Array, " particles"]) -> Float[Array, ""]:
    """(Σ_k w_k)² / Σ_k w_k², between 1 and K; 0 where every weight is zero."""
    log_weights, _ = drop_nonfinite(log_weights)
    w = jnp.exp(log_weights - _shift(log_weights))
    squares = jnp.sum(w**2)
    return jnp.where(squares > 0.0, jnp.sum(w) ** 2 / jnp.where(squares > 0.0, squares, 1.0), 0.0)


class LogEvidence(NamedTuple):
    """A running sum kept as two floats, `high + low`, with |low| below half an ulp of `high`.

    After a million steps a log evidence near -3·10⁶ has steps of 0.25 in single precision; the
    pair has those of 48 bits. Only `value`, on the host and in double precision, shows them.
    """

    high: Float[Array, "*batch"]
    low: Float[Array, "*batch"]

    @classmethod
    def zero(cls) -> "LogEvidence":
        """Before any step: log 1."""
        return cls(jnp.zeros(()), jnp.zeros(()))

    def add(self, increment: Float[Array, "*batch"]) -> "LogEvidence":
        """Count one step (Knuth's two-sum, then renormalised as in Dekker 1971)."""
        high = self.high + increment
        part = high - self.high
        lost = (self.high - (high - part)) + (increment - part)
        # -inf - -inf is NaN, and an evidence of zero has nothing to compensate
        low = jnp.where(jnp.isfinite(high), lost + self.low, 0.0)
        total = high + low
        return LogEvidence(total, jnp.where(jnp.isfinite(high), low - (total - high), 0.0))

    def value(self) -> np.ndarray:
        """The sum in double precision."""
        return np.asarray(self.high, np.float64) + np.asarray(self.low, np.float64)


def log_evidence_se(log_weights: Float[Array, " particles"]) -> Float[Array, ""]:
    """Standard error of log Ẑ under importance sampling, by the delta method.

        se² = Var(w) / (K w̄²) = K / (K - 1) · (Σ_k W_k² - 1 / K) = K / (K - 1) · (1 / ESS - 1 / K)

    with the sample variance of the weights. It is inf for a single particle, which tells nothing
    of its own error, and where every weight is zero.
    """
    return genealogical_se(log_weights, jnp.arange(log_weights.shape[0]))


def descendant_weights(
    log_weights: Float[Array, " particles"], eves: Int[Array, " particles"]
) -> Float[Array, " particles"]:
    """Total weight of the descendants of each ancestor, for normalised weights."""
    return jnp.zeros_like(log_weights).at[eves].add(jnp.exp(log_weights))


def genealogical_se(
    log_weights: Float[Array, " particles"],
    eves: Int[Array, " particles"],
    past_variance: float | Float[Array, ""] = 0.0,
) -> Float[Array, ""]:
    """Standard error of log Ẑ under SMC, from the last weights and each particle's ancestor.

        se² = K / (K - 1) · (past_variance + Σ_e F_e² - 1 / K),  F_e = Σ_{k descends from e} W_k

    after Chan & Lai (2013, Ann. Statist. 41:2877), with what was settled for draws older than the
    ancestors. In bootstrap and nearly optimal filters under systematic resampling it is within
    a tenth of the spread over runs. Multinomial resampling of R generations adds about R / K to the
    families' squares but not to the error: there it is too large. (Lee & Whiteley 2018 subtract
    that, which with any other rule gives far too little, down to nothing.) Without resampling it
    is `log_evidence_se`. It is inf where one ancestor is left, which tells nothing of its own
    error, and where every weight is zero.
    """
    num = log_weights.shape[0]
    if num == 1:
        return jnp.asarray(jnp.inf, log_weights.dtype)
    log_normalised, log_mean = normalise(log_weights)
    family = descendant_weights(log_normalised, eves)
    # Σ_e F_e² - 1/K as a sum of squares, which does not cancel where weights are nearly equal
    spread = jnp.sum((family - 1.0 / num) ** 2)
    blind = jnp.isneginf(log_mean) | (jnp.max(family) > 1.0 - 1e-6)
    return jnp.where(blind, jnp.inf, jnp.sqrt(num / (num - 1.0) * (past_variance + spread)))


def eve_indices(ancestors: Int[Array, "stages particles"]) -> Int[Array, " particles"]:
    """Each last particle's index in the first population, from ancestor indices at every stage."""
    first = jnp.arange(ancestors.shape[1], dtype=ancestors.dtype)
    return jax.lax.scan(lambda eves, row: (eves[row], None), first, ancestors)[0]


def num_families(eves: Int[Array, " particles"]) -> Int[Array, ""]:
    """How many members of the first population still have descendants."""
    return jnp.sum(jnp.zeros(eves.shape[0], bool).at[eves].set(True))


def pareto_k(log_weights: Float[Array, " particles"]) -> Float[Array, ""]:
    """k̂, the shape of the generalised Pareto distribution fitted to the largest weights.

    Vehtari et al. (2024, JMLR 25:72), with the fit of Zhang & Stephens (2009) to the
    M = ⌈min(K / 5, 3 √K)⌉ largest weights and the prior that counts as ten points at 1/2. The
    mean of the weights has finite variance for k < 1/2, and converges too slowly to be of use
    above 0.7. Equal to ArviZ 0.23's where the M + 1 largest weights differ. Elsewhere:

    - K ≤ 20, or fewer than five weights above zero: too few to fit, k̂ = inf;
    - fewer than five above the M + 1st because of ties (a discrete posterior, a proposal that is
      exact but for rounding): the prior's 1/2. A few that tower over ties show in the ESS.
    """
    size = _tail_size(log_weights.shape[0])
    if size < FEWEST_IN_TAIL:
        return jnp.asarray(jnp.inf, log_weights.dtype)
    log_weights, _ = drop_nonfinite(log_weights)
    top = jax.lax.top_k(log_weights - _shift(log_weights), size + 1)[0]
    below_floor = top[-1] < np.log(np.finfo(np.float64).tiny)
    cutoff = jnp.where(below_floor, np.log(np.finfo(np.float64).tiny), top[-1])
    inside = top[:-1] > cutoff
    count = jnp.sum(inside)
    # exp(a) - exp(c) without cancellation; the floor keeps 1 / x finite in single precision, and
    # is met only where k̂ is far beyond any threshold.
    x = jnp.maximum(-jnp.expm1(cutoff - top[:-1]) * jnp.exp(top[:-1]), jnp.exp(-80.0))
    k = _gpd_shape(jnp.where(inside, x / x[0], 0.0), inside, count)
    few = count < FEWEST_IN_TAIL
    return jnp.where(few, jnp.where(below_floor, jnp.inf, 0.5), k)


def tail_share(log_weights: Float[Array, " particles"]) -> Float[Array, ""]:
    """The share of all weight by which the M largest exceed the next: what k̂ is the shape of."""
    size = min(_tail_size(log_weights.shape[0]), log_weights.shape[0] - 1)
    log_weights, _ = drop_nonfinite(log_weights)
    top = jax.lax.top_k(log_weights - _shift(log_weights), size + 1)[0]
    excess = jnp.sum(jnp.exp(top) - jnp.exp(top[-1]))
    total = jnp.sum(jnp.exp(log_weights - _shift(log_weights)))
    return jnp.where(total > 0.0, excess / jnp.where(total > 0.0, total, 1.0), 1.0)


def _tail_size(num: int) -> int:
    """M, how many of the largest weights are the tail."""
    return int(np.ceil(min(num / 5, 3 * np.sqrt(num))))


def _gpd_shape(x: Array, inside: Array, count: Array) -> Array:
    """Posterior mean shape of a generalised Pareto distribution, given descending excesses.

    Zhang & Stephens (2009): average b = k / σ over a grid of quantiles of its prior, weighted by
    the profile likelihood; then shrink k towards 1/2 as ten more points would.
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
    """Σ_k W_k x_k for normalised weights; NaN where every weight is zero."""
    weights = jnp.exp(log_weights)
    dead = (weights == 0.0).reshape(-1, *(1,) * (values.ndim - 1))
    # a particle of zero weight may be NaN or infinite: that is often why it has none
    kept = jnp.where(dead, 0, values).astype(weights.dtype)
    mean = jnp.tensordot(weights, kept, axes=1)
    return jnp.where(jnp.all(dead), jnp.nan, mean)


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
    """Standard error of the weighted mean m, for each element of a site.

        se² = Σ_g (Σ_{k in g} W_k (x_k - m))²

    with particles grouped by what makes them dependent. Of two groupings the larger error counts:
    by ancestor (Chan & Lai 2013), and for numbers that are not integers by value, as equal ones
    are copies from one draw. Without resampling every particle is a group, and this is the delta
    method for self-normalised importance sampling.

    Of E `survivors`, the effective number of draws that the site rests on (by step, if the site's
    first axis is time), the error is at least sd / √(E - 1); of one, nothing is known. NaN is
    where E was not measured.
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
            new = jnp.concatenate([jnp.zeros(1, bool), jnp.diff(value[order]) != 0.0])
            return grouped(jnp.cumsum(new), terms[order])

        variance = jnp.maximum(variance, jax.vmap(by_value, in_axes=1)(flat, terms))
    variance = variance.reshape(values.shape[1:])
    if survivors is not None:
        known = jnp.nan_to_num(survivors, nan=jnp.inf)
        others = (known - 1.0).reshape(survivors.shape + (1,) * (values.ndim - 1 - survivors.ndim))
        least = weighted_sd(log_weights, values) ** 2 / jnp.maximum(others, 1e-3)
        variance = jnp.where(others < 1e-3, jnp.inf, jnp.maximum(variance, least))
    return jnp.sqrt(variance)


def weighted_hdi(
    values: np.ndarray, log_weights: np.ndarray, probability: float
) -> tuple[float, float]:
    """The narrowest interval between two of the values that holds at least that much weight."""
    weights = np.exp(np.asarray(log_weights, np.float64))
    alive = weights > 0.0
    if not alive.any():
        return np.nan, np.nan
    points, group = np.unique(values[alive], return_inverse=True)
    cumulative = np.cumsum(np.bincount(group, weights[alive]))
    cumulative = cumulative / cumulative[-1]
    start = np.append(0.0, cumulative[:-1])
    # rounding may leave the sum from the first value on just short of what it must hold
    last = np.searchsorted(cumulative, start + probability * (1.0 - 1e-9))
    first = np.flatnonzero(last < len(points))
    widths = points[last[first]].astype(float) - points[first]
    best = first[int(np.argmin(widths))]
    return float(points[best]), float(points[last[best]])
