"""What a model expects of a factor's latents in; inputs and anchors for its network out.

`Expected` is a linear-Gaussian picture of the latents given what is known: good enough to say where
to look, and no more. The network sees it coordinate by coordinate, each given those drawn before:
the mean and scale that are left, and how far the observations still are from what is expected of
them, the innovation of a filter. Half of a mixture's components are placed relative to it. What the
picture misses, the network learns; what the network misses, the weights correct.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._xla.batch_last import concatenate_features
from retrodict.estimators.analytic import bit_sums
from retrodict.estimators.analytic.bit_sums import Waves
from retrodict.estimators.heads import along_first, compress, patterns
from retrodict.estimators.scalar_bijections import Coordinate, match_gaussian

Place = Int[Array, ""] | int  # of a coordinate, in the order drawn

# Wavelengths, in standard deviations of an observation's noise, at which innovations are shown:
# which of many discrete causes explain one is a question of its fine structure.
LONGEST, WAVES = 64.0, 5  # each is half of the one before
# Innovations are shown one by one where there are no more than this many.
MOST_CHANNELS = 4
# Where there are channels, so many bits are drawn at once.
BITS = 4
LEAST_LOGIT = -15.0


class Expected(NamedTuple):
    """Latents x ~ N(centre, root rootᵀ) given all that is known, coordinates in the order drawn.

    All arrays may have a last axis of rows, see `rows`.

    Where there are channels, the picture is that of independent latents and of these channels, and
    is worked out as coordinates are drawn: `root` and `white` are empty.

    Attributes:
        centre, root: `root` is lower triangular, so its rows condition on the coordinates before.
        white: the inverse of `root`.
        prior, variance: of the coordinates before observations are taken in.
        residual: observations minus their means, where the latents are at `prior`.
        slope: how these means move with the coordinates.
        noise: the observations' own variance.
        effects: where bits add up in one observation, its slope, if that is known beforehand.
    """

    centre: Float[Array, "coordinates *rows"]
    root: Float[Array, "coordinates coordinates *rows"]
    white: Float[Array, "coordinates coordinates *rows"]
    prior: Float[Array, "coordinates *rows"]
    variance: Float[Array, "coordinates *rows"]
    residual: Float[Array, "channels *rows"]
    slope: Float[Array, "channels coordinates *rows"]
    noise: Float[Array, "channels *rows"]
    effects: bit_sums.Effects | None = None

    @property
    def tails(self) -> Float[Array, "coordinates channels *rows"]:
        """Variance of the observations given the coordinates before each."""
        moved = jnp.swapaxes(self.slope**2 * self.variance, 0, 1)
        # few numbers are added up quicker by a product than by a scan
        later = np.triu(np.ones((moved.shape[0],) * 2, moved.dtype))
        return self.noise + jnp.tensordot(later, moved, 1)


def known_effects(expected: Expected) -> bit_sums.Effects:
    """Of bits that add up in one observation."""
    assert expected.effects is not None
    return expected.effects


class Left(NamedTuple):
    """What is left to expect once some coordinates are known.

    Attributes:
        noise: root⁻¹ (x − centre), zero where x is not known yet, or where there are channels.
        residual: observations minus their means.
        sum: where bits add up in one observation, what of it is left to explain.
    """

    noise: Float[Array, "coordinates *rows"]
    residual: Float[Array, "channels *rows"]
    sum: Float[Array, "*rows"] | None = None


class View(NamedTuple):
    """What is seen of a coordinate given those before it."""

    mean: Float[Array, "*rows"]
    scale: Float[Array, "*rows"]
    prior: Float[Array, "*rows"]
    variance: Float[Array, "*rows"]
    residual: Float[Array, "channels *rows"]
    tail: Float[Array, "channels *rows"]
    noise: Float[Array, "channels *rows"]


def start(expected: Expected, waves: Waves | None = None) -> Left:
    """Nothing is known yet."""
    left = Left(jnp.zeros_like(expected.centre), expected.residual)
    if waves is None:
        return left
    (residual,) = expected.residual
    effects = known_effects(expected)
    return left._replace(sum=bit_sums.start(effects, residual, expected.prior))


def look(expected: Expected, tails: Array, left: Left, place: Place) -> View:
    """One coordinate, given those before it."""
    prior, variance = expected.prior[place], expected.variance[place]
    if expected.residual.shape[0]:
        slope = expected.slope[:, place]
        mean, scale = _from_channels(prior, variance, left.residual, slope, tails[place])
    else:
        row = expected.root[place]
        mean, scale = expected.centre[place] + jnp.sum(row * left.noise, 0), row[place]
    return View(mean, scale, prior, variance, left.residual, tails[place], expected.noise)


def learn(expected: Expected, left: Left, view: View, place: Place, value: Array) -> Left:
    """What is left once a coordinate's value is known."""
    if expected.residual.shape[0]:
        moved = expected.slope[:, place] * (value - expected.prior[place])
        return left._replace(residual=left.residual - moved)
    return left._replace(noise=left.noise.at[place].set((value - view.mean) / view.scale))


def look_at_all(expected: Expected, row: Float[Array, " coordinates"]) -> View:
    """All coordinates, each given those before it: they are the rows of the view."""
    prior, variance = expected.prior, expected.variance
    channels, number = expected.slope.shape
    residual, tails = jnp.zeros((0, number)), jnp.zeros((0, number))
    if channels:
        moved = expected.slope * (row - prior)
        before = np.triu(np.ones((number, number), moved.dtype), 1)
        residual, tails = expected.residual[:, None] - moved @ before, expected.tails.T
        mean, scale = _from_channels(prior, variance, residual, expected.slope, tails)
    else:
        noise = expected.white @ (row - expected.centre)
        scale = jnp.diagonal(expected.root)
        mean = expected.centre + expected.root @ noise - scale * noise
    return View(mean, scale, prior, variance, residual, tails, expected.noise[:, None])


def _from_channels(
    prior: Array, variance: Array, residual: Array, slope: Array, tail: Array
) -> tuple[Array, Array]:
    """Mean and scale of a coordinate given each channel by itself; exact where there is one."""
    rest = jnp.maximum(tail - slope**2 * variance, 1e-6 * tail)
    precision = 1 / jnp.maximum(variance, 1e-12) + jnp.sum(slope**2 / rest, 0)
    return prior + jnp.sum(slope * residual / rest, 0) / precision, 1 / jnp.sqrt(precision)


def anchor(view: View, c: Coordinate[Array]) -> Coordinate[Array]:
    """The constants of the coordinates in view, with the place and scale expected of them."""
    mean, scale = match_gaussian(view.mean, view.scale, c)
    shift = jnp.clip((mean - c.centre) / c.scale, -1e6, 1e6)
    return c._replace(shift=shift, stretch=jnp.clip(scale / c.scale, 1e-5, 10.0))


def size(channels: int) -> int:
    """How many inputs a coordinate has, or a few bits."""
    return _own(channels) + channels * (2 + 2 * WAVES)


def _own(channels: int) -> int:
    """Inputs beside innovations: of a coordinate there are four, of bits one each."""
    return max(4, BITS) if channels else 4


def inputs(view: View, c: Coordinate[Array]) -> Float[Array, "inputs *rows"]:
    """What the network sees of a coordinate, whose constants hold its anchor."""
    ratio, prior = _log_odds(view)
    own = [compress(c.shift), 0.3 * jnp.log(c.stretch), jnp.tanh(ratio / 8) * 2, prior / 4]
    own += [jnp.zeros_like(ratio)] * (_own(view.residual.shape[0]) - len(own))
    return _stacked([*own, *_innovations(view.residual, view.tail, view.noise)])


def _innovations(residual: Array, tail: Array, noise: Array) -> list[Float[Array, "*rows"]]:
    """How far observations are from what is expected, on several scales."""
    sd = jnp.sqrt(noise)
    shown = [compress(residual / jnp.sqrt(tail)), jnp.arcsinh(residual / sd) / 2]
    shown += [wave for waves in _waves(residual / sd) for wave in waves]
    return [channel for by_channel in shown for channel in by_channel]


def _stacked(parts: list[Array]) -> Array:
    return concatenate_features([part[None] for part in parts])


def _waves(x: Array) -> tuple[list[Array], list[Array]]:
    """Sines and cosines, shortest first; those of twice an angle follow from the angle's."""
    angle = 2 * np.pi / LONGEST * x
    sines, cosines = [jnp.sin(angle)], [jnp.cos(angle)]
    for _ in range(WAVES - 1):
        sine, cosine = sines[0], cosines[0]
        sines.insert(0, 2 * sine * cosine)
        cosines.insert(0, 1 - 2 * sine**2)
    return sines, cosines


class BitsView(NamedTuple):
    """What is seen of a few bits given the coordinates before them.

    Attributes:
        logits: of all patterns of the bits, as the picture has it.
        inputs: what the network sees.
    """

    logits: Float[Array, "patterns *rows"]
    inputs: Float[Array, "inputs *rows"]


def sums(waves: Waves, spans: Sequence[int], expected: Expected) -> tuple[bit_sums.Block, ...]:
    """The bits of each step, where they add up in one observation."""
    (noise,) = expected.noise
    return bit_sums.blocks_of(waves, known_effects(expected), spans, expected.prior, noise)


def look_at_sum(
    waves: Waves, expected: Expected, left: Left, block: bit_sums.Block
) -> Float[Array, "patterns *rows"]:
    """Logits of all patterns of a step's bits, where they add up in one observation."""
    assert left.sum is not None
    return _held_up(jnp.log(bit_sums.chances_of(waves, block, left.sum, expected.noise[0])))


def look_at_all_sums(
    waves: Waves, spans: Sequence[int], expected: Expected, row: Float[Array, " coordinates"]
) -> list[Float[Array, " patterns"]]:
    """The same for every step, given all coordinates before."""
    left, found = start(expected, waves), []
    blocks = sums(waves, spans, expected)
    for step, end in enumerate(np.cumsum(spans)):
        found.append(look_at_sum(waves, expected, left, blocks[step]))
        left = learn_sum(left, blocks[step], row[end - spans[step] : end])
    return found


def learn_sum(left: Left, block: bit_sums.Block, values: Array) -> Left:
    """What is left once a step's bits are known."""
    assert left.sum is not None
    _, rest = bit_sums.learn(block, left.sum, bit_sums.chosen_by(values))
    return left._replace(sum=rest)


def _held_up(logits: Float[Array, "patterns *rows"]) -> Float[Array, "patterns *rows"]:
    """The picture may rule out what is so; the network must be able to put it right."""
    return jnp.maximum(logits - jnp.max(logits, 0), LEAST_LOGIT)


def look_at_bits(expected: Expected, tails: Array, left: Left, place: Place, span: int) -> BitsView:
    """A few bits at once from some place on, where there are channels."""
    slope = jax.lax.dynamic_slice_in_dim(expected.slope, place, span, 1)
    prior, variance = _few(expected.prior, place, span), _few(expected.variance, place, span)
    return _look_at_bits(left.residual, slope, prior, variance, tails[place], expected.noise)


def learn_bits(expected: Expected, left: Left, place: Place, values: Array) -> Left:
    """What is left once a few bits from some place on are known."""
    slope = jax.lax.dynamic_slice_in_dim(expected.slope, place, values.shape[0], 1)
    moved = slope * (values - _few(expected.prior, place, values.shape[0]))
    return left._replace(residual=left.residual - jnp.sum(moved, 1))


def _few(values: Array, place: Place, span: int) -> Array:
    found: Array = jax.lax.dynamic_slice_in_dim(values, place, span)
    return found


def look_at_all_bits(
    expected: Expected, row: Float[Array, " coordinates"], at: slice, span: int
) -> BitsView:
    """Bits, `span` at a time, each time given all coordinates before: times are the rows."""
    view = look_at_all(expected, row)

    def by_span(leaf: Array) -> Array:
        cut = leaf[..., at]
        return jnp.moveaxis(cut.reshape(*cut.shape[:-1], -1, span), -1, -2)

    residual, tail = (by_span(leaf)[:, 0] for leaf in (view.residual, view.tail))
    slope, prior, variance = map(by_span, (expected.slope, expected.prior, expected.variance))
    return _look_at_bits(residual, slope, prior, variance, tail, view.noise)


def _look_at_bits(
    residual: Array, slope: Array, prior: Array, variance: Array, tail: Array, noise: Array
) -> BitsView:
    span, channels = prior.shape[0], residual.shape[0]
    shown = jnp.clip(prior, 1e-4, 1 - 1e-4)
    log_odds = jnp.log(shown) - jnp.log1p(-shown)
    rest = jnp.maximum(tail - jnp.sum(slope**2 * variance, 1), 1e-6 * tail)
    unset = residual + jnp.sum(slope * prior, 1)  # what is left if no bit is set
    on = [along_first(column, unset) for column in patterns(span).T]

    def of_patterns(each: Array) -> Array:
        """The sum over those bits that are set."""
        terms = [each[i] * bit for i, bit in enumerate(on)]
        return sum(terms[1:], terms[0])

    logits = of_patterns(log_odds)
    for channel in range(channels):
        gap = (unset[channel] - of_patterns(slope[channel])) / jnp.sqrt(rest[channel])
        # Student's t with four degrees of freedom: what the others may still do is no normal, and
        # a proposal with light tails has weights with heavy ones
        logits = logits - 2.5 * jnp.log1p(jnp.clip(gap / 2, -1e9, 1e9) ** 2)
    own = [jnp.clip(odds, -8, 8) / 4 for odds in log_odds]
    own += [jnp.zeros_like(own[0])] * (_own(channels) - span)
    return BitsView(_held_up(logits), _stacked([*own, *_innovations(residual, tail, noise)]))


def overview(expected: Expected, c: Coordinate[Array]) -> Float[Array, " features"]:
    """What the network sees of all coordinates before any is drawn, where there are no channels."""
    view = look_at_all(expected, expected.centre)
    marginal = jnp.sqrt(jnp.sum(expected.root**2, 1))
    c = anchor(view._replace(mean=expected.centre, scale=marginal), c)
    return jnp.concatenate([compress(c.shift), 0.3 * jnp.log(c.stretch)])


def overview_size(coordinates: int) -> int:
    """How many features an overview has."""
    return 2 * coordinates


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
