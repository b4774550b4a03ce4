"""Log densities without catastrophic cancellation in float32.

Poisson's k log λ − λ − log k! is a small difference of large terms: at a count of a million, its
rounding error in float32 is half a nat, different for every particle, and ruins importance weights.
Loader (2000, "Fast and accurate computation of binomial probabilities") writes it, and the
binomial, in terms of deviances from the mode, which are small where the density is high; the
negative binomial, the gamma and the beta follow from these two. All other distributions, and
subclasses that override `log_prob`, use their own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import gammaln
from jaxtyping import Array
from numpyro.distributions.util import clamp_probs

from retrodict.graph.stacked_distribution import Stacked

# From here on Stirling's series is exact in float64, and shapes count as large.
LARGE = 16.0
_HALF_LOG_2PI = 0.5 * np.log(2 * np.pi)


def log_prob(fn: dist.Distribution, value: Array) -> Array:
    """`fn.log_prob(value)`, up to rounding."""
    rule = _RULES.get(type(fn).log_prob)
    return jnp.asarray(fn.log_prob(value)) if rule is None else rule(fn, value)


def _stirling(x: Array) -> Array:
    """log Γ(x+1) minus Stirling's ½ log 2πx + x log x − x, for x > 0."""
    large, small = jnp.maximum(x, LARGE), jnp.minimum(x, LARGE)
    r = 1 / large**2
    series = (1 / 12 - r * (1 / 360 - r * (1 / 1260 - r / 1680))) / large
    exact = gammaln(small + 1) - (small + 0.5) * jnp.log(small) + small - _HALF_LOG_2PI
    return jnp.where(x < LARGE, exact, series)


def _deviance(x: Array, mean: Array, log_mean: Array, gap: Array) -> Array:
    """x log(x / mean) + gap, of x > 0 and gap = mean − x: zero if they are equal, else positive."""
    near = jnp.abs(gap) < 0.1 * x
    u = jnp.where(near, gap, 0.0) / x
    s = u / (2 + u)
    r = s**2
    # u − log(1 + u), with log(1 + u) = 2 artanh s.
    tail = 1 / 3 + r * (1 / 5 + r * (1 / 7 + r * (1 / 9 + r * (1 / 11 + r / 13))))
    close = x * s * (u - 2 * r * tail)
    # The logarithm of the ratio is more accurate unless the mean has underflowed.
    usable = mean > 0
    ratio = jnp.where(usable, jnp.log(x / jnp.where(usable, mean, 1.0)), jnp.log(x) - log_mean)
    return jnp.where(near, close, x * ratio + gap)


# Traced once for all sites of one shape: models are traced many times.
@jax.jit
def _poisson_raw(k: Array, rate: Array) -> Array:
    """log of rateᵏ e^−rate / Γ(k+1), for real k ≥ 0."""
    some, usable = jnp.where(k > 0, k, 1.0), (rate > 0) & (rate < jnp.inf)
    mean = jnp.where(usable, rate, some)
    density = -_stirling(some) - _deviance(some, mean, jnp.log(mean), mean - some) - _half_log(some)
    density = jnp.where(k > 0, jnp.where(usable, density, -jnp.inf), -rate)
    return jnp.where(jnp.isnan(rate), rate, density)


Share = tuple[Array, Array]
"""A probability and its logarithm, each to full accuracy."""


@jax.jit
def _binomial_raw(k: Array, n: Array, p: Share, q: Share) -> Array:
    """log of Γ(n+1) / (Γ(k+1) Γ(n−k+1)) pᵏ qⁿ⁻ᵏ, for real k from 0 to n."""
    inner = (k > 0) & (k < n)
    whole = jnp.where(inner, n, 2.0)
    hits = jnp.where(inner, k, 1.0)
    misses = whole - hits
    density = _stirling(whole) - _stirling(hits) - _stirling(misses)
    density += _half_log(whole) - _half_log(hits) - _half_log(misses)
    # The deviations of hits and misses from their means are opposite.
    gap = jnp.where(p[0] < q[0], whole * p[0] - hits, misses - whole * q[0])
    for part, (share, log_share), own in ((hits, p, gap), (misses, q, -gap)):
        density -= _deviance(part, whole * share, jnp.log(whole) + log_share, own)
    edge = jnp.where(k > 0, _times(n, p[1]), _times(n, q[1]))
    return jnp.where(inner, density, edge)


def _half_log(x: Array) -> Array:
    """½ log 2πx."""
    half: Array = 0.5 * jnp.log(x) + _HALF_LOG_2PI
    return half


def _times(n: Array, log: Array) -> Array:
    """n·log, and zero for n = 0 even where the logarithm is −∞."""
    return jnp.where(n > 0, n * log, 0.0)


def _floats(*values: Any) -> tuple[Array, ...]:
    return tuple(jnp.asarray(value, jnp.result_type(float)) for value in values)


def _poisson(fn: Any, value: Array) -> Array:
    density: Array = _poisson_raw(*_floats(value, fn.rate))
    return density


def _binomial_probs(fn: Any, value: Array) -> Array:
    k, n, p = _floats(value, fn.total_count, fn.probs)
    p = clamp_probs(p)
    density: Array = _binomial_raw(k, n, (p, jnp.log(p)), (1 - p, jnp.log1p(-p)))
    return density


def _binomial_logits(fn: Any, value: Array) -> Array:
    k, n, logits = _floats(value, fn.total_count, fn.logits)
    p, q = ((jax.nn.sigmoid(x), jax.nn.log_sigmoid(x)) for x in (logits, -logits))
    density: Array = _binomial_raw(k, n, p, q)
    return density


def _gamma_poisson(fn: Any, value: Array) -> Array:
    k, shape, rate = _floats(value, fn.concentration, fn.rate)
    p, q = (rate / (1 + rate), -jnp.log1p(1 / rate)), (1 / (1 + rate), -jnp.log1p(rate))
    density: Array = _binomial_raw(shape, shape + k, p, q)
    return density + jnp.log(shape / (shape + k))


def _gamma(fn: Any, value: Array) -> Array:
    x, shape, rate = _floats(value, fn.concentration, fn.rate)
    precise = jnp.log(rate) + _poisson_raw(jnp.maximum(shape, LARGE) - 1, rate * x)
    return jnp.where(shape < LARGE, fn.log_prob(value), precise)


def _beta(fn: Any, value: Array) -> Array:
    x, a, b = _floats(value, fn.concentration1, fn.concentration0)
    large = (a >= 2) & (b >= 2) & (a + b >= LARGE)
    a, b = jnp.where(large, a, 2.0), jnp.where(large, b, 2.0)
    p, q = (x, jnp.log(x)), (1 - x, jnp.log1p(-x))
    precise = jnp.log(a + b - 1) + _binomial_raw(a - 1, a + b - 2, p, q)
    return jnp.where(large, precise, fn.log_prob(value))


def _independent(fn: Any, value: Array) -> Array:
    summed = fn.reinterpreted_batch_ndims
    density = log_prob(fn.base_dist, value)
    return density.sum(tuple(range(density.ndim - summed, density.ndim)))


def _expanded(fn: Any, value: Array) -> Array:
    density = log_prob(fn.base_dist, value)
    batch_shape = jnp.shape(value)[: jnp.ndim(value) - fn.event_dim]
    return jnp.broadcast_to(density, jnp.broadcast_shapes(fn.batch_shape, batch_shape))


def _masked(fn: Any, value: Array) -> Array:
    if isinstance(fn._mask, bool):
        return log_prob(fn.base_dist, value) if fn._mask else jnp.asarray(fn.log_prob(value))
    mask = jnp.reshape(fn._mask, jnp.shape(fn._mask) + (1,) * fn.event_dim)
    # Masked values are arbitrary and must not enter derivatives.
    usable = jnp.where(mask, value, fn.base_dist.support.feasible_like(value))
    return jnp.where(fn._mask, log_prob(fn.base_dist, usable), 0.0)


_RULES: dict[Any, Callable[[Any, Array], Array]] = {
    dist.Poisson.log_prob: _poisson,
    dist.BinomialProbs.log_prob: _binomial_probs,
    dist.BinomialLogits.log_prob: _binomial_logits,
    dist.GammaPoisson.log_prob: _gamma_poisson,
    dist.Gamma.log_prob: _gamma,
    dist.Beta.log_prob: _beta,
    dist.Independent.log_prob: _independent,
    dist.ExpandedDistribution.log_prob: _expanded,
    dist.MaskedDistribution.log_prob: _masked,
    Stacked.log_prob: lambda fn, value: fn.each(log_prob, value),
}
