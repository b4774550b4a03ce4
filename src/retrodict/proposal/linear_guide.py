"""A linear-Gaussian estimate of a factor's latents from the model's own moments.

The model's distributions have means and variances, and the means of the factor's children move with
its latents. Taken as linear, this gives the best linear estimate of the latents (Hartigan 1969,
"Linear Bayesian methods"): the Kalman filter's for a linear state space, the exact posterior mean
for conjugate families. For continuous latents it is refined at the estimate, with observations
weighted by their own densities: Gauss–Newton with the weights of robust regression. Networks get it
as an input (see `retrodict.estimators.guide_inputs`); nothing depends on it being right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.linalg import cholesky, invert_lower_triangular
from retrodict.estimators.analytic.family import ConditionalMoments
from retrodict.estimators.conditional import GuideSpec
from retrodict.estimators.coordinates import blocks, coordinate_table
from retrodict.estimators.guide_inputs import MAX_CHANNELS
from retrodict.estimators.linear_estimate import LinearEstimate
from retrodict.graph.moments import NO_INFORMATION, Moments
from retrodict.proposal.copies import Copies
from retrodict.proposal.factor_model import Evaluate, FactorModel
from retrodict.proposal.model_knowledge import GuideFacts, ModelKnowledge
from retrodict.proposal.scope import Scope


@dataclass(frozen=True)
class LinearGuide(ModelKnowledge):
    """Computes the linear-Gaussian estimate.

    Attributes:
        facts: what simulation showed.
        model: the part of the model that the factor takes part in.
    """

    facts: GuideFacts
    model: FactorModel

    @property
    def copies(self) -> Copies:
        """The copies of the factor."""
        return self.model.copies

    @property
    def binary(self) -> np.ndarray:
        """Which coordinates are zero or one."""
        kinds: np.ndarray = np.concatenate(
            [np.full(b.size, b.kind == "bernoulli") for b in blocks(self.copies.latents)]
        )
        return kinds

    @property
    def channels(self) -> int:
        """How many innovations the network sees: for binary latents, if there are not too many."""
        number = self.model.num_observations
        return number if number <= MAX_CHANNELS and self.binary.any() else 0

    @property
    def parents(self) -> frozenset[str]:  # noqa: D102
        return self.model.parents

    @property
    def working_bytes(self) -> int:
        """Memory for all copies of one draw: slopes, and a few arrays as large."""
        number, copies = len(self.facts.order), int(np.prod(self.copies.plate_sizes))
        return 4 * 4 * copies * number * (self.model.num_observations + number)

    @property
    def guide_spec(self) -> GuideSpec:  # noqa: D102
        return GuideSpec(self.facts.order, self.channels)

    def at(self, scope: Scope) -> LinearEstimate:
        """Linearise at the latents' means, and again at the estimate, for all copies."""
        evaluate = self.model.evaluator(scope)
        start = evaluate({}, self._reference())
        x = self.copies.rows({name: start.values[name] for name in self.model.factor.latents})

        def moments(x: Array) -> ConditionalMoments:
            return self._moments(evaluate, x)

        slopes, first = self._derivatives(moments, x)
        spread = jnp.sqrt(jnp.clip(first.prior_variance, 1e-12, 1e12))
        centre = jnp.where(self.binary, first.prior_mean, x)
        model = self._linear_model(slopes, first, x, centre)
        if self.channels:
            return self._over_copies(self._by_channel, model, spread)

        def refined(_: Any, estimate: _Estimate) -> _Estimate:
            inside = self._inside_support(estimate.centre, x)
            slopes, here = self._derivatives(moments, inside)
            model = self._linear_model(slopes, here, inside, inside, first)
            return _solve(model, spread, np.array(self.facts.order))

        estimate = _solve(model, spread, np.array(self.facts.order))
        # `fori_loop` traces the model once, however many refinements there are.
        estimate = jax.lax.fori_loop(0, self._num_refinements, refined, estimate)
        return self._over_copies(self._in_order, estimate, first.prior_mean, spread)

    def _moments(self, evaluate: Evaluate, x: Array) -> ConditionalMoments:
        """Moments at some value of the latents; from simulation where the latents have none."""
        moments = self.model.moments(evaluate(self.copies.from_rows(x), {}))
        has_moments = np.isnan(self.facts.centre)
        mean, variance = (
            jnp.where(has_moments, moment, np.nan_to_num(fallback))
            for moment, fallback in [
                (moments.prior_mean, self.facts.centre),
                (moments.prior_variance, self.facts.variance),
            ]
        )
        return moments._replace(prior_mean=mean, prior_variance=variance)

    def _reference(self) -> dict[str, Callable[[Moments], Array]]:
        """For each latent its reference value: its mean, or the nearer of zero and one."""
        rows = np.broadcast_to(
            self.facts.centre, (*self.copies.plate_sizes, len(self.facts.centre))
        )
        fallbacks = self.copies.from_rows(jnp.asarray(rows, float), cast=False)
        return {
            site.name: _value_at_mean(
                fallbacks[site.name], blocks((latent,))[0].kind == "bernoulli", site.dtype
            )
            for latent, site in zip(self.copies.latents, self.copies.sites, strict=True)
        }

    @property
    def _num_refinements(self) -> int:
        if self.binary.any():
            return 0
        return 2 if self.model.scan is None else 1

    def _linear_model(
        self,
        slopes: "_Slopes",
        here: ConditionalMoments,
        x: Array,
        centre: Array,
        first: ConditionalMoments | None = None,
    ) -> "_LinearModel":
        """The linear model around x; residuals are those at `centre`.

        The noise is that at the latents' means, which makes the estimate exact for conjugate
        families. Elsewhere `first` holds the moments at the latents' means, and only the influence
        of each observation is evaluated at x.
        """
        shift = jnp.einsum("...cn,...n->...c", slopes.mean, centre - x)
        residual = here.observed - (here.mean + shift)
        precision = _precision((first or here).variance)
        if first is not None:
            scalar = np.repeat([c.scalar for c in self.model.children], self.model.child_sizes)
            influence = _influence(here.variance, slopes.mean, slopes.log_density, residual)
            precision *= jnp.where(scalar, influence, 1.0)
        offset = centre - (centre if first is None else here.prior_mean)
        return _LinearModel(centre, offset, slopes.prior_mean, residual, slopes.mean, precision)

    def _derivatives(
        self, moments: Callable[[Array], ConditionalMoments], x: Array
    ) -> tuple["_Slopes", ConditionalMoments]:
        """Derivatives of means and log densities, by differences for binary coordinates."""
        number, sizes = x.shape[-1], self.copies.plate_sizes
        if self.channels and self.facts.slope:
            constant = jnp.asarray(self.facts.slope).reshape(-1, number)
            unused = jnp.zeros((*sizes, 1, number))
            slope = jnp.broadcast_to(constant, (*sizes, *constant.shape))
            return _Slopes(unused, slope, unused), moments(x)

        def outputs(x: Array) -> tuple[_Slopes, ConditionalMoments]:
            here = moments(x)
            return _Slopes(here.prior_mean, here.mean, here.log_density), here

        value, tangent, here = jax.linearize(outputs, x, has_aux=True)

        def difference(chosen: Array) -> Any:
            flipped = jnp.where(chosen, 1 - x, x)
            length = jnp.sum(jnp.where(chosen, flipped - x, 0.0), -1)[..., None]
            return jax.tree.map(lambda a, b: (a - b) / length, outputs(flipped)[0], value)

        directions, parts = np.eye(number), []
        if not self.binary.all():
            rows = jnp.asarray(directions[~self.binary])
            parts.append(jax.vmap(lambda row: tangent(jnp.broadcast_to(row, x.shape)))(rows))
        if self.binary.any():
            parts.append(jax.vmap(difference)(jnp.asarray(directions[self.binary] > 0)))
        # Real coordinates come first here; the last axis has all in the latents' order.
        places = np.argsort(np.argsort(self.binary, kind="stable"))
        joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        slopes = jax.tree.map(
            lambda leaf: jnp.nan_to_num(jnp.moveaxis(leaf[places], 0, -1)), joined
        )
        return slopes, here

    def _over_copies(self, fn: Callable[..., LinearEstimate], *leaves: Any) -> LinearEstimate:
        for _ in self.copies.plate_sizes:
            fn = jax.vmap(fn)
        return fn(*leaves)

    def _by_channel(self, model: "_LinearModel", spread: Array) -> LinearEstimate:
        """One copy, coordinates in sampling order, to be conditioned on as they are drawn."""
        order = np.array(self.facts.order)
        centre = model.centre[order]
        return LinearEstimate(
            centre,
            jnp.zeros((0, 0)),
            jnp.zeros((0, 0)),
            centre,
            spread[order] ** 2,
            _bounded(model.residual),
            _bounded(model.slope[:, order]),
            jnp.clip(1 / jnp.maximum(model.precision, 1e-30), 1e-12, NO_INFORMATION),
        )

    def _in_order(self, estimate: "_Estimate", mean: Array, spread: Array) -> LinearEstimate:
        """One copy, in sampling order; the prior's moments where the solution is not finite."""
        order = np.array(self.facts.order)
        mean, scale = mean[order], spread[order]
        centre, root, whitening = estimate.centre[order], estimate.root, estimate.whitening
        valid = jnp.all(jnp.isfinite(root)) & jnp.all(jnp.isfinite(centre))
        return LinearEstimate(
            jnp.where(valid, centre, mean),
            jnp.where(valid, root, jnp.diag(scale)),
            jnp.where(valid, whitening, jnp.diag(1 / scale)),
            mean,
            scale**2,
            jnp.zeros(0),
            jnp.zeros((0, len(order))),
            jnp.zeros(0),
        )

    def _inside_support(self, mean: Array, x: Array) -> Array:
        """The estimate, at least a fiftieth of the way from a bound to the reference value."""
        c = coordinate_table(self.copies.latents)
        low, high = (
            jnp.where(np.abs(bound) < 1e38, bound + 0.02 * (x - bound), infinity)
            for bound, infinity in ((c.min_value, -jnp.inf), (c.max_value, jnp.inf))
        )
        return jnp.clip(jnp.where(jnp.isfinite(mean), mean, x), low, high)


class _Slopes(NamedTuple):
    """Derivatives of the latents' prior means, the observations' means and log densities."""

    prior_mean: Float[Array, "*copies coordinates coordinates"]
    mean: Float[Array, "*copies observations coordinates"]
    log_density: Float[Array, "*copies observations coordinates"]


class _LinearModel(NamedTuple):
    """A linear model around a centre, in terms of the distance Δ from it.

    The latents lie offset + (1 − prior_slope) Δ from their prior means, and the observations
    residual − slope Δ from theirs.
    """

    centre: Float[Array, "*copies coordinates"]
    offset: Float[Array, "*copies coordinates"]
    prior_slope: Float[Array, "*copies coordinates coordinates"]
    residual: Float[Array, "*copies observations"]
    slope: Float[Array, "*copies observations coordinates"]
    precision: Float[Array, "*copies observations"]


class _Estimate(NamedTuple):
    """A least-squares solution: centre in the latents' order, the rest in sampling order."""

    centre: Float[Array, "*copies coordinates"]
    root: Float[Array, "*copies coordinates coordinates"]
    whitening: Float[Array, "*copies coordinates coordinates"]


def _solve(
    model: _LinearModel, spread: Float[Array, "*copies coordinates"], order: np.ndarray
) -> _Estimate:
    """The least-squares solution of a linear model's prior and observations."""
    number = spread.shape[-1]
    prior = jnp.eye(number) - model.prior_slope * spread[..., None, :] / spread[..., :, None]
    slope = model.slope * spread[..., None, :]
    weighted = slope * model.precision[..., None]
    precision = jnp.einsum("...ij,...ik->...jk", prior, prior) + jnp.einsum(
        "...ci,...cj->...ij", slope, weighted
    )
    precision += 1e-6 * jnp.eye(number)
    gradient = jnp.einsum("...ci,...c->...i", weighted, model.residual) - jnp.einsum(
        "...ji,...j->...i", prior, model.offset / spread
    )
    # Λ = U Uᵀ with U upper triangular, so that U⁻ᵀ is the lower factor of Λ⁻¹.
    reverse = order[::-1]
    lower = cholesky(precision[..., reverse, :][..., reverse])
    whitening = jnp.swapaxes(lower[..., ::-1, ::-1], -1, -2)
    root = invert_lower_triangular(whitening)
    step = jnp.einsum("...ij,...kj,...k->...i", root, root, gradient[..., order])
    centre = model.centre + spread * step[..., np.argsort(order)]
    scale = spread[..., order]
    return _Estimate(centre, root * scale[..., :, None], whitening / scale[..., None, :])


def _bounded(values: Array) -> Array:
    """Finite, and with finite squares."""
    return jnp.clip(jnp.nan_to_num(values), -1e15, 1e15)


def _precision(variance: Array) -> Array:
    clipped = jnp.clip(variance, 1e-12, NO_INFORMATION)
    return jnp.where(jnp.isfinite(clipped), 1 / clipped, 0.0)


def _influence(variance: Array, slope: Array, score: Array, residual: Array) -> Array:
    """The influence of each observation on its mean, relative to a normal of equal variance.

    An outlier of a heavy-tailed distribution has less influence than its distance suggests.
    """
    noise = jnp.clip(variance, 1e-12, NO_INFORMATION)
    force = jnp.sum(score * slope, -1) / jnp.maximum(jnp.sum(slope**2, -1), 1e-30)
    far = jnp.abs(residual) > 0.1 * jnp.sqrt(noise)
    ratio = force * noise / jnp.where(far, residual, 1.0)
    return jnp.where(far & jnp.isfinite(ratio), jnp.clip(ratio, 0.01, 10.0), 1.0)


def _value_at_mean(fallback: Array, binary: bool, dtype: Any) -> Callable[[Moments], Array]:
    def value(moments: Moments) -> Array:
        mean = jnp.where(jnp.isnan(fallback), moments.mean, fallback)
        return (jnp.round(mean) if binary else mean).astype(dtype)

    return value
