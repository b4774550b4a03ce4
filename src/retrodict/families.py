"""Log densities known up to a constant in; parameters of the family they belong to, and draws, out.

Where all that some latents depend on, and all that depends on them, is known when they are drawn,
the product of the model's densities is their conditional but for a constant. In many models it is
of a family that can be drawn from, and then its parameters can be read from its derivatives:
nothing is left for a network to learn. Gelfand & Smith (1990) draw from such conditionals in turn;
here each is drawn from once, in the order of the inverse.

Arrays have rows last, see `rows`; targets are functions of all copies, coordinates last.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from retrodict.coordinates import Latent, blocks, table
from retrodict.curves import ABOVE, BETWEEN, IDENTITY, Coordinate, constrain, unconstrain
from retrodict.expectations import cholesky, inverse_of_lower
from retrodict.guides import Expected
from retrodict.heads import along_first
from retrodict.rows import total
from retrodict.spectra import Waves, blocks_of, chances_of, learn, passed_by, spans, start

# log γ(x) of every copy, up to a constant; coordinates count from the lower end of their support
Target: TypeAlias = Callable[[Float[Array, "*copies coordinates"]], Float[Array, "*copies"]]

# More states than this are not looked at one by one.
MOST_STATES = 64
# A covariance has so many rows at the most.
MOST_NORMAL = 8


class Family(Protocol):
    """Densities that one can draw from, with parameters that a target's derivatives tell."""

    @property
    def name(self) -> str:
        """By which artefacts know it."""

    @property
    def evaluations(self) -> int:
        """How many times as much as the density itself the parameters take, roughly."""

    @property
    def wide(self) -> bool:
        """Whether draws should now and then be from elsewhere, as the family may be a likeness."""

    def uniforms(self, coordinates: int) -> int:
        """How many uniform numbers a draw of so many coordinates needs; as many if `wide`."""

    def parameters(self, target: Target, start: Float[Array, "*copies coordinates"]) -> PyTree:
        """Of every copy, if the target belongs to the family; `start` is a place to look at."""

    def draw(
        self, parameters: PyTree, chance: "Chance", c: Coordinate[Array]
    ) -> tuple[Float[Array, "coordinates rows"], Float[Array, " rows"]]:
        """The values that some chance leads to, and log q of them."""

    def log_prob(
        self, parameters: PyTree, row: Float[Array, "coordinates rows"], c: Coordinate[Array]
    ) -> Float[Array, " rows"]:
        """log q of values."""


class Chance(NamedTuple):
    """What draws are made from: uniform numbers, and for `wide` families normal ones as well."""

    uniform: Float[Array, "numbers rows"]
    normal: Float[Array, "numbers rows"]


def candidates(latents: tuple[Latent, ...]) -> tuple[Family, ...]:
    """Families whose support is that of the latents."""
    kinds = {block.family for block in blocks(latents)}
    c = table(latents)
    if kinds <= {"bernoulli", "categorical"}:
        sizes = tuple(int(upper) + 1 for upper in c.upper)
        return (Finite(sizes),) if np.prod(sizes, dtype=float) <= MOST_STATES else ()
    if kinds != {"mixture"} or not all(block.elementwise for block in blocks(latents)):
        return ()
    if np.all(c.curve == IDENTITY) and c.curve.size <= MOST_NORMAL:
        return (Normal(),)
    if c.curve.size == 1 and c.curve[0] == ABOVE:
        return (Gamma(), Gamma(inverse=True))
    if c.curve.size == 1 and c.curve[0] == BETWEEN and (c.lower[0], c.upper[0]) == (0, 1):
        return (Beta(),)
    return ()


def by_name(name: str, latents: tuple[Latent, ...]) -> Family | None:
    """The family of a name that `candidates` gave, if it still suits the latents."""
    return next((family for family in candidates(latents) if family.name == name), None)


def _scores(target: Target) -> Callable[[Array], Array]:
    """Slopes of every copy's target in its own coordinates."""
    slope: Callable[[Array], Array] = jax.grad(lambda x: jnp.sum(target(x)))
    return slope


class NormalParameters(NamedTuple):
    """x = centre + root n, with n standard normal; white is the inverse of root."""

    centre: Float[Array, "coordinates *rows"]
    root: Float[Array, "coordinates coordinates *rows"]
    white: Float[Array, "coordinates coordinates *rows"]


@dataclass(frozen=True)
class Normal:
    """N(x | m, Λ⁻¹): of a quadratic function, the slope and curvature at any place tell all."""

    name: str = "normal"
    evaluations: int = 8
    wide: bool = True

    def uniforms(self, coordinates: int) -> int:  # noqa: D102
        return coordinates

    def parameters(self, target: Target, start: Array) -> NormalParameters:
        """A step of Newton's method, and one more against rounding: the first may be a long one."""
        score, number = _scores(target), start.shape[-1]

        def curved(direction: np.ndarray) -> Array:
            along = jnp.broadcast_to(jnp.asarray(direction, start.dtype), start.shape)
            found: Array = jax.jvp(score, (start,), (along,))[1]
            return found

        columns = [curved(direction) for direction in np.eye(number)]
        precision = -jnp.stack(columns, -1)
        precision = (precision + jnp.swapaxes(precision, -1, -2)) / 2
        # in units in which its diagonal is one; what is no precision leaves no trace in derivatives
        diagonal = jnp.diagonal(precision, axis1=-2, axis2=-1)
        sound = jnp.all(diagonal > 0, -1) & jnp.all(jnp.isfinite(precision), (-1, -2))
        unknown = jnp.eye(number, dtype=start.dtype)
        precision = jnp.where(sound[..., None, None], precision, unknown)
        scale = 1 / jnp.sqrt(jnp.where(sound[..., None], diagonal, 1.0))
        unit = precision * scale[..., :, None] * scale[..., None, :]
        lower = cholesky(unit)
        left = inverse_of_lower(lower)
        root = jnp.swapaxes(left, -1, -2) * scale[..., :, None]
        white = jnp.swapaxes(lower, -1, -2) / scale[..., None, :]
        centre = start
        for _ in range(2):
            step = jnp.einsum("...ij,...kj,...k->...i", root, root, score(centre))
            centre = centre + step
        sound &= jnp.all(jnp.isfinite(root), (-1, -2)) & jnp.all(jnp.isfinite(centre), -1)
        return NormalParameters(
            jnp.where(sound[..., None], centre, start),
            jnp.where(sound[..., None, None], root, unknown),
            jnp.where(sound[..., None, None], white, unknown),
        )

    def draw(  # noqa: D102
        self, parameters: NormalParameters, chance: Chance, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        row = parameters.centre + _times(parameters.root, chance.normal)
        return row, self.log_prob(parameters, row, c)

    def log_prob(self, parameters: NormalParameters, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        noise = _times(parameters.white, row - parameters.centre)
        noise = jnp.clip(noise, -1e9, 1e9)  # squares stay finite
        number = row.shape[0]
        density: Array = -0.5 * total(noise**2) - number * 0.5 * np.log(2 * np.pi)
        for d in range(number):
            density = density + jnp.log(jnp.abs(parameters.white[d, d]))
        return density


def _times(matrix: Float[Array, "n n rows"], vector: Float[Array, "n rows"]) -> Array:
    """A small matrix of each row by its vector, written out."""
    found = matrix[:, 0] * vector[0]
    for d in range(1, vector.shape[0]):
        found = found + matrix[:, d] * vector[d]
    return found


class GammaParameters(NamedTuple):
    """Shape, and the logarithm of the rate."""

    shape: Float[Array, "*rows"]
    log_rate: Float[Array, "*rows"]


# Below this shape one likeness is nearer, above it the other: both are within 0.4 % there, in the
# share of draws that are effective.
LIKE_NORMAL = 2.0
# How far from a place to look the two are at which slopes are taken.
APART = 1e4


@dataclass(frozen=True)
class Gamma:
    """Gamma(x | a, b), or with `inverse` that of 1/x: x · slope is a line in x, or in 1/x.

    To draw from a gamma takes a while, as it needs tries without number. So draws are from
    likenesses of it that take one go, have densities in closed form, and tails as heavy: for
    a < 2, x = -log(1 - U^{1/a}) / λ, whose density is a λ (1 - e^{-λx})^{a-1} e^{-λx} (Kundu &
    Gupta 2007); from there on the cube of a normal number, from which Marsaglia & Tsang (2000)
    keep nearly all. The weights correct what is left between the two.
    """

    inverse: bool = False
    evaluations: int = 4
    wide: bool = True

    @property
    def name(self) -> str:  # noqa: D102
        return "inverse gamma" if self.inverse else "gamma"

    def uniforms(self, coordinates: int) -> int:  # noqa: D102
        return coordinates

    def parameters(self, target: Target, start: Array) -> GammaParameters:
        """From the slopes at two places: of w = ±log x, that of the log density is a - b e^w."""
        score, sign = _scores(target), -1.0 if self.inverse else 1.0
        places = (start / APART, start * APART)
        few, many = places if sign > 0 else places[::-1]  # of e^w
        low, high = (sign * (x * score(x) + 1)[..., 0] for x in (few, many))
        near, far = (x[..., 0] ** sign for x in (few, many))
        rate = (low - high) / (far - near)
        shape = low + rate * near
        sound = (shape > 0) & (rate > 0) & jnp.isfinite(shape) & jnp.isfinite(rate)
        rate = jnp.where(sound, rate, start[..., 0] ** -sign)
        return GammaParameters(jnp.where(sound, shape, 1.0), jnp.log(rate))

    def draw(  # noqa: D102
        self, parameters: GammaParameters, chance: Chance, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        w = _like_gamma(parameters.shape, chance) - parameters.log_rate
        row = constrain(-w if self.inverse else w, _first(c), (ABOVE,))[None]
        return row, self.log_prob(parameters, row, c)

    def log_prob(self, parameters: GammaParameters, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        z, log_slope = unconstrain(row[0], _first(c), (ABOVE,))
        w = -z if self.inverse else z
        return _log_like_gamma(parameters.shape, w + parameters.log_rate) - log_slope


def _like_gamma(a: Array, chance: Chance) -> Array:
    """The logarithm of about a gamma number of shape a and rate one."""
    small = jnp.minimum(a, LIKE_NORMAL)
    power = jnp.log(chance.uniform[0]) / small
    one_tail = jnp.log(-jnp.log1p(-jnp.exp(power)))
    one_tail = jnp.where(power < -10, power, one_tail) + jnp.log(_tail(small))
    d = _cubed(a)
    cube = jnp.log(d) + 3 * jnp.log(jnp.abs(1 + chance.normal[0] / (3 * jnp.sqrt(d))))
    return jnp.where(a < LIKE_NORMAL, one_tail, cube)


def _log_like_gamma(a: Array, w: Array) -> Array:
    """Log density of that logarithm."""
    return jnp.where(a < LIKE_NORMAL, _log_one_tail(a, w), _log_cube(a, w))


def _tail(a: Array) -> Array:
    """1 / λ, for about the least variance of the weights (found by quadrature)."""
    return 0.69 + 0.31 * a


def _cubed(a: Array) -> Array:
    """d, with d (1 + n / 3√d)³ about a gamma number of shape a if n is a normal one."""
    return jnp.maximum(a, LIKE_NORMAL) - 1 / 3


def _log_one_tail(a: Array, log_x: Array) -> Array:
    small = jnp.minimum(a, LIKE_NORMAL)
    tail = _tail(small)
    log_y = log_x - jnp.log(tail)
    y = jnp.exp(jnp.minimum(log_y, 80.0))
    # log (1 - exp(-y)), of which nothing is left by rounding where y is small
    rest = jnp.where(y < 0.01, log_y - y / 2, jnp.log(1 - jnp.exp(-jnp.maximum(y, 0.01))))
    return jnp.log(small) + (small - 1) * rest - y + log_y


def _log_cube(a: Array, log_x: Array) -> Array:
    d = _cubed(a)
    log_d = jnp.log(d)
    log_root = (jnp.minimum(log_x, 80.0) - log_d) / 3
    root = jnp.exp(log_root)
    n = jnp.clip(3 * jnp.sqrt(d) * (root - 1), -1e9, 1e9)
    # a number and its mirror image lead to the same cube
    mirrored = jnp.log(1 + jnp.exp(-18 * d * root))
    density: Array = mirrored - 0.5 * n**2 + log_root + 0.5 * log_d - 0.5 * np.log(2 * np.pi)
    return density


class BetaParameters(NamedTuple):
    """The two shapes."""

    a: Float[Array, "*rows"]
    b: Float[Array, "*rows"]


# Shapes that are at least so large, and differ by less than such a factor, make the logit about
# normal; elsewhere the likeness of a gamma is nearer.
LOGIT_NORMAL, LOGIT_RATIO = 3.0, 3.0
# How far from the ends the two places are at which slopes are taken.
FROM_ENDS = 1e-3


@dataclass(frozen=True)
class Beta:
    """Beta(x | a, b), 0 < x < 1: x (1 - x) · slope is the line a - 1 - (a + b - 2) x.

    Where a ≤ b, -log(1 - x) is about a gamma number of shape a and rate b + (a - 1) / 2, exactly so
    for a = 1; where b < a, -log x is. The weights correct what is left.
    """

    name: str = "beta"
    evaluations: int = 4
    wide: bool = True

    def uniforms(self, coordinates: int) -> int:  # noqa: D102
        return coordinates

    def parameters(self, target: Target, start: Array) -> BetaParameters:
        """From the slopes near both ends."""
        score = _scores(target)
        near, far = jnp.full_like(start, FROM_ENDS), jnp.full_like(start, 1 - FROM_ENDS)
        low, high = ((x * (1 - x) * score(x))[..., 0] for x in (near, far))
        slope = (high - low) / (1 - 2 * FROM_ENDS)
        a, b = low - slope * FROM_ENDS + 1, -(high + slope * FROM_ENDS) + 1
        sound = (a > 0) & (b > 0) & jnp.isfinite(a) & jnp.isfinite(b)
        return BetaParameters(jnp.where(sound, a, 1.0), jnp.where(sound, b, 1.0))

    def draw(  # noqa: D102
        self, parameters: BetaParameters, chance: Chance, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        small, rate = _smaller(parameters)
        w = _like_gamma(small, chance) - jnp.log(rate)
        y = jnp.exp(jnp.minimum(w, 80.0))
        # log(e^y - 1), of which nothing is left by rounding where y is small
        z = jnp.where(y < 0.01, w + y / 2, y + jnp.log(1 - jnp.exp(-jnp.maximum(y, 0.01))))
        z = jnp.where(parameters.a <= parameters.b, z, -z)
        centre, scale = _logit(parameters)
        z = jnp.where(_is_balanced(parameters), centre + scale * chance.normal[0], z)
        row = constrain(z, _first(c), (BETWEEN,))[None]
        return row, self.log_prob(parameters, row, c)

    def log_prob(self, parameters: BetaParameters, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        z, log_slope = unconstrain(row[0], _first(c), (BETWEEN,))
        small, rate = _smaller(parameters)
        turned = jnp.where(parameters.a <= parameters.b, z, -z)
        y = jnp.maximum(turned, 0) + jnp.log1p(jnp.exp(-jnp.abs(turned)))
        w = jnp.where(turned < -10, turned, jnp.log(y))
        skewed = _log_like_gamma(small, w + jnp.log(rate)) + turned - y - w
        centre, scale = _logit(parameters)
        gap = jnp.clip((z - centre) / scale, -1e9, 1e9)
        normal = -0.5 * gap**2 - jnp.log(scale) - 0.5 * np.log(2 * np.pi)
        return jnp.where(_is_balanced(parameters), normal, skewed) - log_slope


def _smaller(parameters: BetaParameters) -> tuple[Array, Array]:
    """The smaller shape, and the rate of the gamma that goes with it."""
    small, large = jnp.minimum(*parameters), jnp.maximum(*parameters)
    # where both are small, the tail is the larger's own
    return small, jnp.maximum(large + (small - 1) / 2, large * _tail(jnp.minimum(small, 1.0)))


def _logit(parameters: BetaParameters) -> tuple[Array, Array]:
    """Mean and standard deviation of the logit, of shapes that are not small."""
    a, b = (jnp.maximum(shape, 1.0) - 0.5 for shape in parameters)
    return jnp.log(a / b), jnp.sqrt(1 / a + 1 / b)


def _is_balanced(parameters: BetaParameters) -> Array:
    small, large = jnp.minimum(*parameters), jnp.maximum(*parameters)
    return (small > LOGIT_NORMAL) & (large < LOGIT_RATIO * small)


def _first(c: Coordinate[Array]) -> Coordinate[Array]:
    return Coordinate(*(column[0] for column in c))


@dataclass(frozen=True)
class Finite:
    """Any density on finitely many states: all of them are looked at.

    Attributes:
        sizes: how many values each coordinate has.
    """

    sizes: tuple[int, ...]
    name: str = "finite"
    wide: bool = False

    @property
    def evaluations(self) -> int:  # noqa: D102
        return len(self.states)

    @cached_property
    def states(self) -> Float[np.ndarray, "states coordinates"]:
        """All of them, the last coordinate changing first."""
        found: np.ndarray = np.array(list(product(*map(range, self.sizes))), float)
        return found

    def uniforms(self, coordinates: int) -> int:  # noqa: D102
        return 1

    def parameters(self, target: Target, start: Array) -> Float[Array, "*copies states"]:
        """Log densities of all states."""

        def at(state: Array) -> Array:
            return target(jnp.broadcast_to(state, start.shape))

        logits = jnp.moveaxis(jax.vmap(at)(jnp.asarray(self.states, start.dtype)), 0, -1)
        logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
        possible = jnp.any(logits > -jnp.inf, -1, keepdims=True)
        return jnp.where(possible, logits, 0.0)

    def draw(  # noqa: D102
        self, parameters: Array, chance: Chance, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        weights = jnp.exp(parameters - jnp.max(parameters, 0))
        ends = _ends(weights)
        passed = _passed(ends, chance.uniform[0])
        # from each state to the next, as far as they are passed
        onward = np.diff(self.states, axis=0).T.astype(weights.dtype)
        return jnp.tensordot(onward, passed, 1), _log_share(weights, passed, ends)

    def log_prob(self, parameters: Array, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        radix = np.append(np.cumprod(self.sizes[:0:-1])[::-1], 1).astype(float)
        place = jnp.tensordot(radix, row, 1)
        places = along_first(np.arange(len(self.states)), parameters)
        chosen = jnp.max(jnp.where(places == place, parameters, -jnp.inf), 0)
        most = jnp.max(parameters, 0)
        return chosen - most - jnp.log(total(jnp.exp(parameters - most)))


def _ends(weights: Array) -> Array:
    """Where the share of each ends."""
    # few weights are added up quicker by a product than by a scan
    return jnp.tensordot(np.tril(np.ones((len(weights),) * 2, weights.dtype)), weights, 1)


def _passed(ends: Array, uniform: Array) -> Array:
    """For each state but the last, whether the one that is chosen comes after it."""
    return (ends[:-1] <= uniform * ends[-1]).astype(ends.dtype)


def _log_share(weights: Array, passed: Array, ends: Array) -> Array:
    """Of the state that comes after those passed, of the whole."""
    # every weight but one is multiplied by zero: of differences, small ones would be lost
    inner = weights[1:-1] * (passed[:-1] - passed[1:])
    chosen = weights[0] * (1 - passed[0]) + weights[-1] * passed[-1]
    if len(inner):
        chosen = chosen + total(inner)
    return jnp.log(chosen / ends[-1])


@dataclass(frozen=True)
class BitSums:
    """Bits that add up in one observation with normal noise: a few at a time, see `spectra`.

    Attributes:
        order: the bits as drawn, by their place in the order of the latents.
        waves: at which their sum is looked at.
        most: how many bits are drawn at a time, at the most.
    """

    order: tuple[int, ...]
    waves: Waves
    most: int
    name: str = "sum of bits"
    wide: bool = False
    evaluations: int = 2

    def uniforms(self, coordinates: int) -> int:  # noqa: D102
        return len(self._spans)

    def parameters(self, target: Target, start: Array) -> Expected:
        """They are a guide's, not a target's."""
        raise TypeError("what is expected of bits that add up comes from their guide")

    def draw(  # noqa: D102
        self, parameters: Expected, chance: Chance, c: Coordinate[Array]
    ) -> tuple[Array, Array]:
        bits, log_q = self._through(
            parameters, lambda step, ends: _passed(ends, chance.uniform[step])
        )
        return bits[np.argsort(self.order)], log_q

    def log_prob(self, parameters: Expected, row: Array, c: Coordinate[Array]) -> Array:  # noqa: D102
        ends = np.cumsum(self._spans)
        own = np.split(np.array(self.order), ends[:-1])
        _, log_q = self._through(parameters, lambda step, _: passed_by(row[own[step]]))
        return log_q

    @property
    def _spans(self) -> tuple[int, ...]:
        return spans(len(self.order), self.most)

    def _through(
        self, expected: Expected, choose: Callable[[int, Array], Array]
    ) -> tuple[Array, Array]:
        """Block after block: the bits in the order drawn, and log q of them."""
        (residual,), (effects,), (noise,) = expected.residual, expected.slope, expected.noise
        blocks = blocks_of(self.waves, self._spans, effects, expected.prior, noise)
        left = start(self.waves, residual, effects, expected.prior)
        found, log_q = [], jnp.zeros(())
        for step, block in enumerate(blocks):
            weights = chances_of(block, left, noise)
            ends = _ends(weights)
            passed = choose(step, ends)
            after = blocks[step + 1] if step + 1 < len(blocks) else None
            log_q = log_q + _log_share(weights, passed, ends)
            bits, left = learn(block, left, passed, after)
            found.append(bits)
        return jnp.concatenate(found), log_q
