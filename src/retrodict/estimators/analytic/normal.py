"""Multivariate normal conditionals."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._xla.batch_last import sum_features
from retrodict._xla.linalg import cholesky, invert_lower_triangular
from retrodict.estimators.analytic.family import ConditionalTarget, Randomness
from retrodict.estimators.scalar_bijections import Coordinate


class NormalParameters(NamedTuple):
    """x = mean + root n with n standard normal; `whitening` is the inverse of `root`."""

    mean: Float[Array, "coordinates *rows"]
    root: Float[Array, "coordinates coordinates *rows"]
    whitening: Float[Array, "coordinates coordinates *rows"]


@dataclass(frozen=True)
class Normal:
    """N(x | m, Λ⁻¹): gradient and curvature of a quadratic function at any point determine it."""

    name: str = "normal"
    evaluations: int = 8
    defensive: bool = True

    def num_uniforms(self, coordinates: int) -> int:  # noqa: D102
        return coordinates

    def parameters(self, target: ConditionalTarget, start: Array) -> NormalParameters:
        """One Newton step from `start`, and a second one against rounding error in a long first."""
        score, number = target.score, start.shape[-1]
        precision = _precision(score, start)
        # In units in which the diagonal is one. Invalid matrices are replaced beforehand, so that
        # they leave no NaN in derivatives.
        diagonal = jnp.diagonal(precision, axis1=-2, axis2=-1)
        valid = jnp.all(diagonal > 0, -1) & jnp.all(jnp.isfinite(precision), (-1, -2))
        identity = jnp.eye(number, dtype=start.dtype)
        precision = jnp.where(valid[..., None, None], precision, identity)
        scale = 1 / jnp.sqrt(jnp.where(valid[..., None], diagonal, 1.0))
        lower = cholesky(precision * scale[..., :, None] * scale[..., None, :])
        root = jnp.swapaxes(invert_lower_triangular(lower), -1, -2) * scale[..., :, None]
        whitening = jnp.swapaxes(lower, -1, -2) / scale[..., None, :]
        mean = start
        for _ in range(2):
            mean = mean + jnp.einsum("...ij,...kj,...k->...i", root, root, score(mean))
        valid &= jnp.all(jnp.isfinite(root), (-1, -2)) & jnp.all(jnp.isfinite(mean), -1)
        return NormalParameters(
            jnp.where(valid[..., None], mean, start),
            jnp.where(valid[..., None, None], root, identity),
            jnp.where(valid[..., None, None], whitening, identity),
        )

    def sample(  # noqa: D102
        self, parameters: NormalParameters, randomness: Randomness, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        row = parameters.mean + _matvec(parameters.root, randomness.normal)
        return row, self.log_prob(parameters, row, c)

    def log_prob(self, parameters: NormalParameters, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        standard = _matvec(parameters.whitening, row - parameters.mean)
        standard = jnp.clip(standard, -1e9, 1e9)  # squares stay finite
        number = row.shape[0]
        density: Array = -0.5 * sum_features(standard**2) - number * 0.5 * np.log(2 * np.pi)
        for d in range(number):
            density = density + jnp.log(jnp.abs(parameters.whitening[d, d]))
        return density


def _precision(score: Callable[[Array], Array], start: Array) -> Array:
    """Minus the Hessian of every copy's target, symmetrised."""
    columns = []
    for direction in np.eye(start.shape[-1]):
        tangent = jnp.broadcast_to(jnp.asarray(direction, start.dtype), start.shape)
        columns.append(jax.jvp(score, (start,), (tangent,))[1])
    precision = -jnp.stack(columns, -1)
    return (precision + jnp.swapaxes(precision, -1, -2)) / 2


def _matvec(matrix: Float[Array, "n n rows"], vector: Float[Array, "n rows"]) -> Array:
    """A small matrix times a vector in every row, written out."""
    result = matrix[:, 0] * vector[0]
    for d in range(1, vector.shape[0]):
        result = result + matrix[:, d] * vector[d]
    return result
