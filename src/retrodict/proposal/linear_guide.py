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
from jaxtyping import Array, Float, PRNGKeyArray

from retrodict._xla.linalg import cholesky, invert_lower_triangular
from retrodict.estimators.conditional import MADE, GuideSpec
from retrodict.estimators.coordinates import blocks, coordinate_table
from retrodict.estimators.encoders import Input
from retrodict.estimators.estimator import Estimator
from retrodict.estimators.guide_inputs import MAX_CHANNELS, LinearEstimate
from retrodict.graph.moments import NO_INFORMATION, Moments
from retrodict.proposal.copies import Copies
from retrodict.proposal.factor_model import Evaluate, FactorModel
from retrodict.proposal.facts import FactorFacts, GuideFacts
from retrodict.proposal.scope import Scope


class LocalMoments(NamedTuple):
    """Moments by copy at some value of the latents: their own, and the children's."""

    own: Moments
    children: Moments
    log_density: Float[Array, "*copies observations"]


@dataclass(frozen=True)
class LinearGuide:
    """Computes the linear-Gaussian estimate.

    Attributes:
        model: the part of the model that the factor takes part in.
        facts: from simulation.
    """

    model: FactorModel
    facts: GuideFacts
    sufficient: bool = False

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
    def parents(self) -> frozenset[str]:
        """The sites whose values it depends on."""
        return self.model.parents | frozenset(self.facts.children)

    @property
    def working_bytes(self) -> int:
        """Memory for all copies of one draw: slopes, and a few arrays as large."""
        number, copies = len(self.facts.order), int(np.prod(self.copies.plate_sizes))
        return 4 * 4 * copies * number * (self.model.num_observations + number)

    @property
    def factor_facts(self) -> FactorFacts:
        """What is kept with the artefact."""
        return FactorFacts(guide=self.facts)

    def build(  # noqa: D102
        self,
        estimator: MADE,
        rng_key: PRNGKeyArray,
        copies: Copies,
        inputs: tuple[Input, ...],
        number: int,
    ) -> Estimator:
        return estimator.build(rng_key, copies.latents, inputs, self.requirements, number)

    @property
    def requirements(self) -> GuideSpec:
        """What a network must know of the guide."""
        return GuideSpec(self.facts.order, self.channels)

    def bind(self, estimator: Estimator) -> Estimator:  # noqa: D102
        return estimator

    def at(self, scope: Scope) -> LinearEstimate:
        """Linearise at the latents' means, and again at the estimate, for all copies."""
        evaluate = self.model.evaluator(scope)
        x, y = self._reference_point(evaluate)

        def moments(x: Array) -> LocalMoments:
            return self.local_moments(evaluate, x)

        slopes, first = self._derivatives(moments, x)
        spread = jnp.sqrt(jnp.clip(first.own.variance, 1e-12, 1e12))
        centre = jnp.where(self.binary, first.own.mean, x)
        model = self._linear_model(slopes, first, x, y, centre)
        if self.channels:
            return self._over_copies(self._by_channel, model, spread)

        def refined(_: Any, estimate: _Estimate) -> _Estimate:
            inside = self._inside_support(estimate.centre, x)
            slopes, here = self._derivatives(moments, inside)
            model = self._linear_model(slopes, here, inside, y, inside, first)
            return _solve(model, spread, np.array(self.facts.order))

        estimate = _solve(model, spread, np.array(self.facts.order))
        # A loop of the compiler's: tracing the model takes long.
        estimate = jax.lax.fori_loop(0, self._num_refinements, refined, estimate)
        return self._over_copies(self._in_order, estimate, first.own.mean, spread)

    def local_moments(self, evaluate: Evaluate, x: Array) -> LocalMoments:
        """Moments at some value of the latents; from simulation where the latents have none."""
        mean, variance, children = self.model.moments(evaluate(self.copies.from_rows(x), {}))
        known = np.isnan(self.facts.centre)
        own = [
            jnp.where(known, mine, jnp.asarray(np.nan_to_num(other)))
            for mine, other in zip(
                (mean, variance), (self.facts.centre, self.facts.variance), strict=True
            )
        ]
        observations = Moments(children.mean, children.variance)
        return LocalMoments(Moments(*own), observations, children.log_density)

    def _reference_point(self, evaluate: Evaluate) -> tuple[Array, Array]:
        """The latents at their means, or the nearer of zero and one, and the observations."""
        begin = evaluate({}, self._reference())
        names = self.model.factor.latents
        x = self.copies.rows({name: begin.values[name] for name in names})
        return x, self.model.observed({c.name: begin.values[c.name] for c in self.model.children})

    def _reference(self) -> dict[str, Callable[[Moments], Array]]:
        """For each latent, how its reference value follows from its moments."""
        sizes = self.copies.plate_sizes
        centre = jnp.broadcast_to(jnp.asarray(self.facts.centre), (*sizes, len(self.facts.centre)))
        fallbacks = self._unrounded(centre)
        functions, start = {}, 0
        for latent, site in zip(self.copies.latents, self.copies.sites, strict=True):
            binary = bool(self.binary[start])
            functions[site.name] = _value_at_mean(fallbacks[site.name], binary, site.dtype)
            start += int(np.prod(latent.shape))
        return functions

    def _unrounded(self, rows: Float[Array, "*plates coordinates"]) -> dict[str, Array]:
        """Rows as arrays of the sites, in floating point whatever the sites' types."""
        arrays, start = {}, 0
        for latent, site, along in zip(
            self.copies.latents, self.copies.sites, self.copies.plate_axes, strict=True
        ):
            stop = start + int(np.prod(latent.shape))
            part = rows[..., start:stop].reshape(*self.copies.plate_sizes, *latent.shape)
            arrays[site.name] = jnp.moveaxis(part, range(len(along)), along)
            start = stop
        return arrays

    @property
    def _num_refinements(self) -> int:
        if self.binary.any():
            return 0
        return 2 if self.model.scan is None else 1

    def _linear_model(
        self,
        slopes: "_Slopes",
        here: LocalMoments,
        x: Array,
        y: Array,
        centre: Array,
        first: LocalMoments | None = None,
    ) -> "_LinearModel":
        """The linear model around x; residuals are those at `centre`.

        The noise is that expected before anything is known, which makes the estimate exact for
        conjugate families. Away from there, where `first` holds the moments at the latents' means,
        only the influence of each observation is evaluated anew.
        """
        shift = jnp.einsum("...cn,...n->...c", slopes.children, centre - x)
        residual = y - (here.children.mean + shift)
        precision = _precision((first or here).children.variance)
        if first is not None:
            scalar = np.repeat([c.scalar for c in self.model.children], self.model.child_sizes)
            influence = _influence(here, slopes.children, slopes.log_density, residual)
            precision *= jnp.where(scalar, influence, 1.0)
        offset = centre - (centre if first is None else here.own.mean)
        return _LinearModel(centre, offset, slopes.own, residual, slopes.children, precision)

    def _derivatives(
        self, moments: Callable[[Array], LocalMoments], x: Array
    ) -> tuple["_Slopes", LocalMoments]:
        """Derivatives of means and log densities, by differences for binary coordinates."""
        number, sizes = x.shape[-1], self.copies.plate_sizes
        if self.channels and self.facts.slope:
            constant = jnp.asarray(self.facts.slope).reshape(-1, number)
            unused = jnp.zeros((*sizes, 1, number))
            slope = jnp.broadcast_to(constant, (*sizes, *constant.shape))
            return _Slopes(unused, slope, unused), moments(x)

        def outputs(x: Array) -> tuple[_Slopes, LocalMoments]:
            here = moments(x)
            return _Slopes(here.own.mean, here.children.mean, here.log_density), here

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
        # Real coordinates come first here; the last axis is that of all, in their own order.
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
        """One copy, coordinates in sampling order; the prior's moments where all else failed."""
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
        lower = jnp.where(np.isfinite(c.min_value) & (c.min_value > -1e38), c.min_value, -jnp.inf)
        upper = jnp.where(np.isfinite(c.max_value) & (c.max_value < 1e38), c.max_value, jnp.inf)
        low = jnp.where(jnp.isfinite(lower), lower + 0.02 * (x - lower), -jnp.inf)
        high = jnp.where(jnp.isfinite(upper), upper - 0.02 * (upper - x), jnp.inf)
        return jnp.clip(jnp.where(jnp.isfinite(mean), mean, x), low, high)


class _Slopes(NamedTuple):
    """Derivatives of the latents' own means, the observations' means and log densities."""

    own: Float[Array, "*copies coordinates coordinates"]
    children: Float[Array, "*copies observations coordinates"]
    log_density: Float[Array, "*copies observations coordinates"]


class _LinearModel(NamedTuple):
    """A linear model around a centre, in terms of the distance Δ from it.

    The latents lie offset + (1 − own) Δ from their own means, the observations residual − slope Δ.
    """

    centre: Float[Array, "*copies coordinates"]
    offset: Float[Array, "*copies coordinates"]
    own: Float[Array, "*copies coordinates coordinates"]
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
    own = jnp.eye(number) - model.own * spread[..., None, :] / spread[..., :, None]
    slope = model.slope * spread[..., None, :]
    weighted = slope * model.precision[..., None]
    precision = jnp.einsum("...ij,...ik->...jk", own, own) + jnp.einsum(
        "...ci,...cj->...ij", slope, weighted
    )
    precision += 1e-6 * jnp.eye(number)
    gradient = jnp.einsum("...ci,...c->...i", weighted, model.residual) - jnp.einsum(
        "...ji,...j->...i", own, model.offset / spread
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


def _influence(here: LocalMoments, slope: Array, score: Array, residual: Array) -> Array:
    """The influence of each observation on its mean, relative to a normal of equal variance.

    An outlier of a heavy-tailed distribution has less influence than its distance suggests.
    """
    noise = jnp.clip(here.children.variance, 1e-12, NO_INFORMATION)
    force = jnp.sum(score * slope, -1) / jnp.maximum(jnp.sum(slope**2, -1), 1e-30)
    far = jnp.abs(residual) > 0.1 * jnp.sqrt(noise)
    ratio = force * noise / jnp.where(far, residual, 1.0)
    return jnp.where(far & jnp.isfinite(ratio), jnp.clip(ratio, 0.01, 10.0), 1.0)


def _value_at_mean(fallback: Array, binary: bool, dtype: Any) -> Callable[[Moments], Array]:
    def value(moments: Moments) -> Array:
        mean = jnp.where(jnp.isnan(fallback), moments.mean, fallback)
        return (jnp.round(mean) if binary else mean).astype(dtype)

    return value
