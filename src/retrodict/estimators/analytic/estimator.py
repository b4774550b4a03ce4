"""The estimator of a factor whose conditional is known in closed form; it has no weights."""

from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array, Float, Key, PyTree

from retrodict._xla import threefry
from retrodict._xla.batch_last import batch_last, sum_features
from retrodict._xla.jit import run_once
from retrodict.estimators.analytic.family import Family, Randomness
from retrodict.estimators.coordinates import Latent, coordinate_table, flatten, unflatten
from retrodict.estimators.encoders import Conditions
from retrodict.estimators.features import Scaling
from retrodict.estimators.scalar_bijections import Coordinate, constrain, unconstrain
from retrodict.types import Values


class AnalyticNoise(NamedTuple):
    """The random numbers of a draw.

    Attributes:
        choice: uniform; below the defensive share, the draw is from the defensive component.
        randomness: of the family; the normal numbers are those of the defensive component if that
            is chosen.
    """

    choice: Float[Array, "*copies"]
    randomness: Randomness


class AnalyticEstimator(eqx.Module):
    """q(x | parameters) of the latents of one factor, see `retrodict.estimators.estimator`.

    A fixed share of the draws comes from a defensive component that spans the prior and has tails
    as heavy as a Cauchy's: density ½ (1 + |u|)⁻² of each standardised coordinate u. It bounds the
    importance weights, because a family that was recognised on draws from the model may not be the
    exact conditional.

    Attributes:
        latents: of the factor.
        family: of the conditional.
        defensive_share: weight of the defensive component.
        scaling: of the latents' coordinates.
    """

    latents: tuple[Latent, ...] = eqx.field(static=True)
    family: Family = eqx.field(static=True)
    defensive_share: float = eqx.field(static=True)
    scaling: Scaling

    @staticmethod
    def of(
        family: Family, latents: tuple[Latent, ...], defensive_share: float = 1e-5
    ) -> "AnalyticEstimator":
        """An estimator whose scaling is not fitted yet."""
        scaling = Scaling.unit(coordinate_table(latents).lower.size)
        share = defensive_share if family.defensive else 0.0
        return AnalyticEstimator(latents, family, share, scaling)

    def encode(self, conditions: Conditions, *, differentiable: bool = True) -> PyTree:
        """The parameters of the conditional."""
        return conditions.from_model

    def noise(self, key: Key[Array, ""], copies: tuple[int, ...] = ()) -> AnalyticNoise:
        """The random numbers of draws, axes of copies first."""
        number = self.family.num_uniforms(self.scaling.centre.size)
        uniform = threefry.uniform(key, (number + bool(self.defensive_share), *copies))
        uniform = uniform + float(np.finfo(uniform.dtype).eps) / 2
        # Callers vectorise over leading axes of copies; in memory they are last, see `batch_last`.
        if not self.defensive_share:
            uniform = jnp.moveaxis(uniform, 0, -1)
            return AnalyticNoise(jnp.zeros(copies), Randomness(uniform, uniform[..., :0]))
        choice, uniform = uniform[0], uniform[1:]
        symmetric = 2 * uniform - 1
        heavy_tailed = symmetric / (1 - jnp.abs(symmetric))
        standard = jnp.where(choice < self.defensive_share, heavy_tailed, ndtri(uniform))
        by_copy = (jnp.moveaxis(part, 0, -1) for part in (uniform, standard))
        return AnalyticNoise(choice, Randomness(*by_copy))

    def sample(self, parameters: PyTree, noise: AnalyticNoise) -> tuple[Values, Float[Array, ""]]:
        """The draw with some noise, and its log q."""
        row, log_q = batch_last(self._sample)(self.scaling, (parameters, noise))
        return unflatten(self.latents, row), log_q

    def log_prob(self, parameters: PyTree, x: Mapping[str, Array]) -> Float[Array, ""]:
        """log q(x)."""
        log_q: Array = batch_last(self._log_prob)(self.scaling, (parameters, self.row(x)))
        return log_q

    def row(self, x: Mapping[str, Array]) -> Float[Array, " coordinates"]:
        """The coordinates of a draw."""
        return flatten(self.latents, x)[0]

    def fit_scalings(self, conditions: Conditions, xs: Mapping[str, Array]) -> "AnalyticEstimator":
        """Fit centre and scale of the latents to a batch of synthetic draws."""
        if not self.defensive_share:
            return self

        def unconstrained(x: Values) -> Float[Array, " coordinates"]:
            return unconstrain(self.row(x), self._constants(), self._bijections)[0]

        rows = run_once(jax.vmap(unconstrained), dict(xs))
        fitted: AnalyticEstimator = eqx.tree_at(lambda m: m.scaling, self, Scaling.fit(rows))
        return fitted

    def _constants(self) -> Coordinate[Array]:
        return Coordinate(*(jnp.asarray(column) for column in coordinate_table(self.latents)))

    @property
    def _bijections(self) -> tuple[int, ...]:
        return tuple(sorted(set(map(int, coordinate_table(self.latents).bijection))))

    def _sample(
        self, scaling: Scaling, inputs: tuple[PyTree, AnalyticNoise]
    ) -> tuple[Float[Array, "coordinates rows"], Float[Array, " rows"]]:
        parameters, (choice, randomness) = inputs
        c = Coordinate(*(column[:, None] for column in self._constants()))
        row, log_q = self.family.sample(parameters, randomness, c)
        if self.defensive_share:
            z = scaling.centre[:, None] + scaling.scale[:, None] * randomness.normal
            defensive = constrain(z, c, self._bijections)
            row = jnp.where(choice < self.defensive_share, defensive, row)
            log_q = self._log_prob(scaling, (parameters, row))
        rows = max(leaf.shape[-1] for leaf in jax.tree.leaves(inputs))
        return jnp.broadcast_to(row, (row.shape[0], rows)), jnp.broadcast_to(log_q, (rows,))

    def _log_prob(
        self, scaling: Scaling, inputs: tuple[PyTree, Float[Array, "coordinates rows"]]
    ) -> Float[Array, " rows"]:
        parameters, row = inputs
        c = Coordinate(*(column[:, None] for column in self._constants()))
        log_q = self.family.log_prob(parameters, row, c)
        share = self.defensive_share
        if not share:
            return log_q
        z, log_slope = unconstrain(row, c, self._bijections)
        u = jnp.abs(z - scaling.centre[:, None]) / scaling.scale[:, None]
        log_density = -2 * jnp.log(1 + u) - jnp.log(2 * scaling.scale[:, None]) - log_slope
        defensive = sum_features(log_density)
        first, second = np.log1p(-share) + log_q, np.log(share) + defensive
        largest = jnp.maximum(first, second)
        return largest + jnp.log(1 + jnp.exp(jnp.minimum(first, second) - largest))
