"""What a model expects of a factor's latents in; inputs and anchors for its network out.

`Expected` is a linear-Gaussian picture of the latents given what is known: good enough to say where
to look, and no more. The network sees it coordinate by coordinate, each given those drawn before:
the mean and scale that are left, and how far the observations still are from what is expected of
them, the innovation of a filter. Half of a mixture's components are placed relative to it. What the
picture misses, the network learns; what the network misses, the weights correct.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict.curves import Coordinate, match_gaussian
from retrodict.heads import compress

# Wavelengths, in standard deviations of an observation's noise, at which innovations are shown:
# which of many discrete causes explain one is a question of its fine structure.
LONGEST, WAVES = 64.0, 5  # each is half of the one before
# Innovations are shown one by one where there are no more than this many.
MOST_CHANNELS = 4


class Expected(NamedTuple):
    """Latents x ~ N(centre, root rootᵀ) given all that is known, coordinates in the order drawn.

    Where there are channels, the picture is that of independent latents and of these channels, and
    is worked out as coordinates are drawn: `root` and `white` are empty.

    Attributes:
        centre, root: `root` is lower triangular, so its rows condition on the coordinates before.
        white: the inverse of `root`.
        prior, variance: of the coordinates before observations are taken in.
        residual: observations minus their means, where the latents are at `prior`.
        slope: how these means move with the coordinates.
        noise: the observations' own variance.
    """

    centre: Float[Array, " coordinates"]
    root: Float[Array, "coordinates coordinates"]
    white: Float[Array, "coordinates coordinates"]
    prior: Float[Array, " coordinates"]
    variance: Float[Array, " coordinates"]
    residual: Float[Array, " channels"]
    slope: Float[Array, "channels coordinates"]
    noise: Float[Array, " channels"]

    @property
    def tails(self) -> Float[Array, "coordinates channels"]:
        """Variance of the observations given the coordinates before each."""
        moved = self.slope**2 * self.variance
        # few numbers are added up quicker by a product than by a scan
        later = np.tril(np.ones((moved.shape[1],) * 2, moved.dtype))
        return (self.noise[:, None] + moved @ later).T


class Left(NamedTuple):
    """What is left to expect once some coordinates are known.

    Attributes:
        noise: root⁻¹ (x − centre), zero where x is not known yet, or where there are channels.
        residual: observations minus their means.
    """

    noise: Float[Array, " coordinates"]
    residual: Float[Array, " channels"]


class View(NamedTuple):
    """What is seen of one coordinate, or of all along a leading axis, given those before it."""

    mean: Float[Array, "*coordinates"]
    scale: Float[Array, "*coordinates"]
    prior: Float[Array, "*coordinates"]
    variance: Float[Array, "*coordinates"]
    residual: Float[Array, "*coordinates channels"]
    tail: Float[Array, "*coordinates channels"]
    noise: Float[Array, " channels"]


def start(expected: Expected) -> Left:
    """Nothing is known yet."""
    return Left(jnp.zeros_like(expected.centre), expected.residual)


def look(expected: Expected, tails: Array, left: Left, place: Array) -> View:
    """One coordinate, given those before it."""
    prior, variance = expected.prior[place], expected.variance[place]
    if expected.residual.size:
        slope = expected.slope[:, place]
        mean, scale = _from_channels(prior, variance, left.residual, slope, tails[place])
    else:
        row = expected.root[place]
        mean, scale = expected.centre[place] + row @ left.noise, row[place]
    return View(mean, scale, prior, variance, left.residual, tails[place], expected.noise)


def learn(expected: Expected, left: Left, view: View, place: Array, value: Array) -> Left:
    """What is left once a coordinate's value is known."""
    if expected.residual.size:
        moved = expected.slope[:, place] * (value - expected.prior[place])
        return left._replace(residual=left.residual - moved)
    return left._replace(noise=left.noise.at[place].set((value - view.mean) / view.scale))


def look_at_all(expected: Expected, row: Float[Array, " coordinates"]) -> View:
    """All coordinates, each given those before it."""
    prior, variance, tails = expected.prior, expected.variance, expected.tails
    moved = expected.slope * (row - prior)
    residual = (expected.residual[:, None] - jnp.cumsum(moved, 1) + moved).T
    if expected.residual.size:
        mean, scale = jax.vmap(_from_channels)(prior, variance, residual, expected.slope.T, tails)
    else:
        noise = expected.white @ (row - expected.centre)
        scale = jnp.diagonal(expected.root)
        mean = expected.centre + expected.root @ noise - scale * noise
    return View(mean, scale, prior, variance, residual, tails, expected.noise)


def _from_channels(
    prior: Array, variance: Array, residual: Array, slope: Array, tail: Array
) -> tuple[Array, Array]:
    """Mean and scale of a coordinate given each channel by itself; exact where there is one."""
    rest = jnp.maximum(tail - slope**2 * variance, 1e-6 * tail)
    precision = 1 / jnp.maximum(variance, 1e-12) + jnp.sum(slope**2 / rest)
    return prior + jnp.sum(slope * residual / rest) / precision, 1 / jnp.sqrt(precision)


def anchor(view: View, c: Coordinate[Array]) -> Coordinate[Array]:
    """The coordinate's constants, with the place and scale expected of it."""
    mean, scale = match_gaussian(view.mean, view.scale, c)
    shift = jnp.clip((mean - c.centre) / c.scale, -1e6, 1e6)
    return c._replace(shift=shift, stretch=jnp.clip(scale / c.scale, 1e-5, 10.0))


def size(channels: int) -> int:
    """How many inputs a coordinate has."""
    return 4 + channels * (2 + 2 * WAVES)


def inputs(view: View, c: Coordinate[Array]) -> Float[Array, " inputs"]:
    """What the network sees of one coordinate, whose constants hold its anchor."""
    ratio, prior = _log_odds(view)
    own = [compress(c.shift), 0.3 * jnp.log(c.stretch), jnp.tanh(ratio / 8) * 2, prior / 4]
    sd = jnp.sqrt(view.noise)
    sines, cosines = _waves(view.residual / sd)
    shown = [
        compress(view.residual / jnp.sqrt(view.tail)),
        jnp.arcsinh(view.residual / sd) / 2,
        sines.reshape(-1),
        cosines.reshape(-1),
    ]
    return jnp.concatenate([jnp.stack(own), *shown])


def _waves(
    x: Float[Array, " channels"],
) -> tuple[Float[Array, "channels waves"], Float[Array, "channels waves"]]:
    """Sines and cosines, shortest first; those of twice an angle follow from the angle's."""
    angle = 2 * np.pi / LONGEST * x
    sines, cosines = [jnp.sin(angle)], [jnp.cos(angle)]
    for _ in range(WAVES - 1):
        sine, cosine = sines[0], cosines[0]
        sines.insert(0, 2 * sine * cosine)
        cosines.insert(0, 1 - 2 * sine**2)
    return jnp.stack(sines, -1), jnp.stack(cosines, -1)


def overview(expected: Expected, c: Coordinate[Array]) -> Float[Array, " features"]:
    """What the network sees of all coordinates before any is drawn."""
    view = look_at_all(expected, expected.centre)
    if not expected.residual.size:
        marginal = jnp.sqrt(jnp.sum(expected.root**2, 1))
        view = view._replace(mean=expected.centre, scale=marginal)
    c = jax.vmap(anchor)(_per_coordinate(view), c)
    return jnp.concatenate([compress(c.shift), 0.3 * jnp.log(c.stretch)])


def overview_size(coordinates: int) -> int:
    """How many features an overview has."""
    return 2 * coordinates


def inputs_of_all(view: View, c: Coordinate[Array]) -> Float[Array, "coordinates inputs"]:
    """What the network sees of each coordinate."""
    return jax.vmap(inputs)(_per_coordinate(view), c)


def anchors(view: View, c: Coordinate[Array]) -> Coordinate[Array]:
    """All coordinates' constants, with the place and scale expected of each."""
    return jax.vmap(anchor)(_per_coordinate(view), c)


def _per_coordinate(view: View) -> View:
    number = view.mean.shape[0]
    return view._replace(noise=jnp.broadcast_to(view.noise, (number, *view.noise.shape)))


def _log_odds(view: View) -> tuple[Array, Array]:
    """For a coordinate that is 0 or 1: what the observations say for 1, and the prior's log odds.

    The observations' part of the picture is the Gaussian that turns the prior's into the one at
    hand; its log density at 1 less that at 0 is a weight of evidence.
    """
    prior = jnp.clip(view.prior, 1e-4, 1 - 1e-4)
    before = 1 / jnp.maximum(view.variance, 1e-4)
    after = 1 / jnp.maximum(view.scale**2, 1e-8)
    ratio = (view.mean * after - view.prior * before) - 0.5 * (after - before)
    log_odds = jnp.log(prior) - jnp.log1p(-prior)
    return jnp.clip(ratio, -1e3, 1e3), jnp.clip(log_odds, -8, 8)
