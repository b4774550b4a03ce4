"""A conditional's parameters in; draws and densities out, as from a network that has no weights."""

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
from retrodict.estimators.analytic.families import Chance, Family
from retrodict.estimators.coordinates import Latent, Values, flatten, table, unflatten
from retrodict.estimators.encoders import Context
from retrodict.estimators.features import Scaling
from retrodict.estimators.scalar_bijections import Coordinate, constrain, unconstrain

EXPECTED = "expected"


class Noise(NamedTuple):
    """What draws are made from: a number that chooses, and those of the coordinates.

    Where the choice falls on the wide component, normal numbers are its own instead.
    """

    choice: Float[Array, "*copies"]
    chance: Chance


class Exact(eqx.Module):
    """q(x | context) of a factor whose conditional is known. Methods take one draw.

    Now and then, at a share of draws that nothing takes away, all coordinates are drawn from what
    spans the prior, with tails like Cauchy's: density ½ (1 + |u|)⁻² of a standardised coordinate.
    For what is exact was seen to be so, on draws from the model.
    """

    latents: tuple[Latent, ...] = eqx.field(static=True)
    family: Family = eqx.field(static=True)
    share: float = eqx.field(static=True)
    scaling: Scaling  # of the latents' coordinates

    @staticmethod
    def of(family: Family, latents: tuple[Latent, ...], share: float = 1e-5) -> "Exact":
        """Before it is known where the prior lies."""
        scaling = Scaling.unit(table(latents).lower.size)
        return Exact(latents, family, share if family.wide else 0.0, scaling)

    def encode(self, context: Context, *, to_draw: bool = False) -> PyTree:
        """The parameters."""
        return context[EXPECTED]

    def noise(self, key: Key[Array, ""], copies: tuple[int, ...] = ()) -> "Noise":
        """All the chance that draws need, axes of copies first."""
        number = self.family.uniforms(self.scaling.centre.size)
        uniform = threefry.uniform(key, (number + bool(self.share), *copies))
        uniform = uniform + float(np.finfo(uniform.dtype).eps) / 2
        # copies come first for who vectorises over them, but are kept last: see `rows`
        if not self.share:
            own = jnp.moveaxis(uniform, 0, -1)
            return Noise(jnp.zeros(copies), Chance(own, own[..., :0]))
        choice, own = uniform[0], uniform[1:]
        side = 2 * own - 1
        standard = jnp.where(choice < self.share, side / (1 - jnp.abs(side)), ndtri(own))
        return Noise(choice, Chance(*(jnp.moveaxis(part, 0, -1) for part in (own, standard))))

    def draw(self, encoding: PyTree, noise: "Noise") -> tuple[Values, Float[Array, ""]]:
        """The draw that given noise leads to, and log q of it."""
        row, log_q = batch_last(self._draw)(self.scaling, (encoding, noise))
        return unflatten(self.latents, row), log_q

    def sample_and_log_prob(
        self, key: Key[Array, ""], context: Context
    ) -> tuple[Values, Float[Array, ""]]:
        """A draw x and log q(x | context)."""
        return self.draw(self.encode(context), self.noise(key))

    def log_prob(self, context: Context, x: Mapping[str, Array]) -> Float[Array, ""]:
        """log q(x | context)."""
        log_q: Array = batch_last(self._log_prob)(self.scaling, (self.encode(context), self.row(x)))
        return log_q

    def row(self, x: Mapping[str, Array]) -> Float[Array, " coordinates"]:
        """The coordinates of a draw."""
        return flatten(self.latents, x)[0]

    def fit_scalings(self, contexts: Context, xs: Mapping[str, Array]) -> "Exact":
        """Centres and scales of the latents, from a batch of synthetic draws."""
        if not self.share:
            return self  # nothing is scaled

        def on_the_line(x: Values) -> Float[Array, " coordinates"]:
            return unconstrain(self.row(x), self._constants(), self._curves)[0]

        rows = run_once(jax.vmap(on_the_line), dict(xs))
        fitted: Exact = eqx.tree_at(lambda m: m.scaling, self, Scaling.fit(rows))
        return fitted

    def _constants(self) -> Coordinate[Array]:
        return Coordinate(*(jnp.asarray(column) for column in table(self.latents)))

    @property
    def _curves(self) -> tuple[int, ...]:
        return tuple(sorted(set(map(int, table(self.latents).curve))))

    def _draw(
        self, scaling: Scaling, given: tuple[PyTree, "Noise"]
    ) -> tuple[Float[Array, "coordinates rows"], Float[Array, " rows"]]:
        parameters, (choice, chance) = given
        c = Coordinate(*(column[:, None] for column in self._constants()))
        row, log_q = self.family.draw(parameters, chance, c)
        if self.share:
            z = scaling.centre[:, None] + scaling.scale[:, None] * chance.normal
            elsewhere = constrain(z, c, self._curves)
            row = jnp.where(choice < self.share, elsewhere, row)
            log_q = self._log_prob(scaling, (parameters, row))
        rows = max(leaf.shape[-1] for leaf in jax.tree.leaves(given))
        return jnp.broadcast_to(row, (row.shape[0], rows)), jnp.broadcast_to(log_q, (rows,))

    def _log_prob(
        self, scaling: Scaling, given: tuple[PyTree, Float[Array, "coordinates rows"]]
    ) -> Float[Array, " rows"]:
        parameters, row = given
        c = Coordinate(*(column[:, None] for column in self._constants()))
        log_q = self.family.log_prob(parameters, row, c)
        if not self.share:
            return log_q
        z, log_slope = unconstrain(row, c, self._curves)
        u = jnp.abs(z - scaling.centre[:, None]) / scaling.scale[:, None]
        wide = -2 * jnp.log(1 + u) - jnp.log(2 * scaling.scale[:, None]) - log_slope
        log_q, rest = np.log1p(-self.share) + log_q, np.log(self.share) + sum_features(wide)
        most = jnp.maximum(log_q, rest)
        return most + jnp.log(1 + jnp.exp(jnp.minimum(log_q, rest) - most))
