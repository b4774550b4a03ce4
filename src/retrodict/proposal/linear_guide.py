"""A model and what is known in; a linear-Gaussian picture of a factor's latents out.

The model's own distributions have means and variances, and the means of what depends on a factor's
latents move with them. Taken as linear, that gives the latents' best linear estimate (Hartigan
1969, "Linear Bayesian methods"): the Kalman filter's for a linear state space, the exact posterior
mean for conjugate families. Where latents are continuous it is refined at the estimate, with
observations weighted by their own densities, which is Gauss and Newton's method with the weights of
robust regression. Networks get it as an input (see `guides`); nothing depends on it being right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._xla.linalg import cholesky, invert_lower_triangular
from retrodict.estimators.analytic.bit_sums import Effects, Waves
from retrodict.estimators.coordinates import Latent, blocks, table
from retrodict.estimators.guide_inputs import MOST_CHANNELS, Expected
from retrodict.graph.graph import Graph
from retrodict.graph.moments import NO_INFORMATION, Moments
from retrodict.graph.program import Evaluation, Expect, carry_name
from retrodict.inverse.factors import Factor
from retrodict.proposal.context_views import Members
from retrodict.types import Values


class Facts(NamedTuple):
    """What simulation tells of a factor's expectations; kept with the artefact.

    Attributes:
        order: the coordinates by how much they move the observations, those of one kind together.
        children: the sites that say something of them.
        centre, variance: of the coordinates whose distribution has none, from simulation; NaN else.
        slope: how the children's means move with bits, observation by observation, if that is the
            same whatever the values; empty else.
        waves: of `Waves`, where the coordinates are bits that add up in one observation.
        family: the name of the family that the conditional belongs to, if it is known of one;
            `centre` then is a place to look at.
    """

    order: tuple[int, ...]
    children: tuple[str, ...]
    centre: tuple[float, ...]
    variance: tuple[float, ...]
    slope: tuple[float, ...] = ()
    waves: tuple[float, ...] = ()
    family: tuple[str, ...] = ()


class Child(NamedTuple):
    """A site that depends on the latents, and whose other parents are known.

    Attributes:
        name: of the site.
        axes: of its array, those that the factor's plates run along.
        scalar: whether it has one density an entry.
        members: where a constant index says which copy an element belongs to, the elements of each.
    """

    name: str
    axes: tuple[int, ...]
    scalar: bool
    members: Members | None = None


Found = TypeVar("Found")
Evaluate: TypeAlias = Callable[[Values, Expect | None], Evaluation]


class Pieces(NamedTuple):
    """Moments by copy: the latents' own, and the children's with their log densities."""

    own: Moments
    of_children: Moments
    log_density: Float[Array, "*copies observations"]


@dataclass(frozen=True)
class Guide:
    """Computes what a model expects of a factor's latents.

    Attributes:
        graph: the model's.
        factor: which factor.
        latents: what its network draws.
        own_axes: for each latent, the axes of its array that the factor's plates run along, without
            time.
        copies: sizes of these plates.
        scan: the scan along which the factor is drawn, if any.
        children: see `Child`.
        facts: see `Facts`.
    """

    graph: Graph
    factor: Factor
    latents: tuple[Latent, ...]
    own_axes: tuple[tuple[int, ...], ...]
    copies: tuple[int, ...]
    scan: int | None
    children: tuple[Child, ...]
    facts: Facts

    @property
    def binary(self) -> np.ndarray:
        """Which coordinates are zero or one."""
        found: np.ndarray = np.concatenate(
            [np.full(b.size, b.family == "bernoulli") for b in blocks(self.latents)]
        )
        return found

    @property
    def observations(self) -> int:
        """How many entries of the children belong to one copy."""
        return sum(self._sizes)

    @property
    def looked_at(self) -> tuple[str, ...]:
        """The sites whose distributions say something: a run of the model ends with the last."""
        return (*self.factor.latents, *(child.name for child in self.children))

    @property
    def working_bytes(self) -> int:
        """Memory to work out all copies of one draw: slopes, and a few arrays as large."""
        number = len(self.facts.order)
        return 4 * 4 * int(np.prod(self.copies)) * number * (self.observations + number)

    @property
    def waves(self) -> Waves | None:
        """Where the coordinates are bits that add up in one observation, how it is looked at."""
        if not self.facts.waves:
            return None
        spacing, blur, exact, *numbers = self.facts.waves
        return Waves(spacing, tuple(map(int, numbers)), blur, bool(exact))

    @property
    def effects(self) -> Effects | None:
        """Where there are waves, by how much each bit moves the observation."""
        if not self.facts.waves or not self.facts.slope:
            return None
        return Effects(tuple(self.facts.slope[place] for place in self.facts.order))

    @property
    def channels(self) -> int:
        """How many innovations are shown: of discrete latents, where there are not too many."""
        few = self.observations <= MOST_CHANNELS
        return self.observations if few and self.binary.any() else 0

    def at(self, values: Values, index: Sequence[Int[Array, ""]]) -> Expected:
        """What is expected of one copy, where arrays of time hold all steps."""
        _, evaluate, place = self.placed(values, index)
        return self._expected(evaluate, place)

    def everywhere(self, values: Values) -> Expected:
        """What is expected of all copies, outside of time."""
        return self._expected(self.placed(values, ())[1], None)

    def truth(
        self, values: Values, index: Sequence[Int[Array, ""]]
    ) -> tuple[Float[Array, " coordinates"], Float[Array, " observations"], Pieces]:
        """One copy's coordinates, its observations, and what is expected given the former."""
        given, evaluate, place = self.placed(values, index)
        latents = {n: given[n] for n in self.factor.latents}
        found = self._pieces(evaluate(latents, {}))
        seen = self._observed({child.name: given[child.name] for child in self.children})
        whole = (self.rows_of(latents), seen, found)
        one: tuple[Array, Array, Pieces] = jax.tree.map(lambda leaf: leaf[tuple(place)], whole)
        return one

    def placed(
        self, values: Values, index: Sequence[Int[Array, ""]]
    ) -> tuple[Values, Evaluate, Sequence[Int[Array, ""]]]:
        """Values at a copy's time, how to evaluate the model there, and its index among plates."""
        if self.scan is None:
            known = {n: values[n] for n in self.graph.sites if n in values}
            return known, self._whole(known), index
        time, *place = index
        inside = set(self.graph.program.scan_sites[self.scan])
        outer = {n: values[n] for n in self.graph.sites if n in values and n not in inside}
        given = {n: values[n][time] for n in inside if n in values}
        blank = jax.eval_shape(lambda: self.graph.program.initial_carry(self.scan or 0, outer))
        leaves, tree = jax.tree.flatten(blank)
        carried = [values[carry_name(self.scan, n)][time] for n in range(len(leaves))]
        carry = jax.tree.unflatten(tree, carried)
        return given, self.in_step(outer, given, time, carry), place

    def step(
        self,
        outer: Values,
        given: Values,
        time: Array,
        carry: Any,
    ) -> Expected:
        """What is expected of all copies in one step of a scan."""
        return self._expected(self.in_step(outer, given, time, carry), None)

    def _whole(self, values: Values) -> Evaluate:
        known = self._without_latents(values)

        def evaluate(latents: Values, expect: Expect | None) -> Evaluation:
            # What is not known is drawn; nothing that is used depends on it.
            return self.graph.program.run(
                jax.random.key(0), {**known, **latents}, expect=expect, only=self.looked_at
            )

        return evaluate

    def in_step(self, outer: Values, given: Values, time: Array, carry: Any) -> Evaluate:
        """How to evaluate the model in one step of a scan."""
        known = self._without_latents(given)

        def evaluate(latents: Values, expect: Expect | None) -> Evaluation:
            key, scan = jax.random.key(0), self.scan or 0
            _, found = self.graph.program.step(
                key, scan, outer, time, carry, {**known, **latents}, expect=expect
            )
            return found

        return evaluate

    def _without_latents(self, values: Values) -> dict[str, Array]:
        return {n: v for n, v in values.items() if n not in self.factor.latents}

    def _expected(self, evaluate: Evaluate, index: Sequence[Int[Array, ""]] | None) -> Expected:
        """Linearise at the latents' means, and again at the estimate; of one copy, or of all."""
        begin = evaluate({}, self._reference())
        x = self.rows_of({n: begin.values[n] for n in self.factor.latents})
        y = self._observed({n: begin.values[n] for n in (c.name for c in self.children)})

        def pieces(x: Array) -> Pieces:
            return self._pieces(evaluate(self.values_of(x), {}))

        slopes, first = self._derivatives(pieces, x)
        spread = jnp.sqrt(jnp.clip(first.own.variance, 1e-12, 1e12))
        centre = jnp.where(self.binary, first.own.mean, x)
        line = self._linear(slopes, first, x, y, centre)
        if self.channels:
            return of_copies(self._by_channel, (line, spread), self.copies, index)

        def refined(_: Any, found: _Solved) -> _Solved:
            inside = self._inside(found.centre, x)
            slopes, at = self._derivatives(pieces, inside)
            line = self._linear(slopes, at, inside, y, inside, first)
            return _solved(line, spread, np.array(self.facts.order))

        found = _solved(line, spread, np.array(self.facts.order))
        # a loop of the compiler's, for the model is long to trace
        found = jax.lax.fori_loop(0, self._refinements, refined, found)
        return of_copies(self._taken, (found, first.own.mean, spread), self.copies, index)

    @property
    def _refinements(self) -> int:
        if self.binary.any():
            return 0
        return 2 if self.scan is None else 1

    def _linear(
        self,
        slopes: "_Slopes",
        at: Pieces,
        x: Array,
        y: Array,
        centre: Array,
        first: Pieces | None = None,
    ) -> "_Line":
        """How means move with the coordinates around x; residuals are those at `centre`.

        Noise is what is expected before anything is known, which makes the estimate exact for
        conjugate families. Away from there, where `first` is what was found at the latents' means,
        only how much each observation pulls is looked at anew.
        """
        moved = jnp.einsum("...cn,...n->...c", slopes.of_children, centre - x)
        residual = y - (at.of_children.mean + moved)
        weight = _precision((first or at).of_children.variance)
        if first is not None:
            scalar = np.repeat([child.scalar for child in self.children], self._sizes)
            pull = _pull(at, slopes.of_children, slopes.log_density, residual)
            weight *= jnp.where(scalar, pull, 1.0)
        prior = centre - (centre if first is None else at.own.mean)
        return _Line(centre, prior, slopes.own, residual, slopes.of_children, weight)

    def _derivatives(self, pieces: Callable[[Array], Pieces], x: Array) -> tuple["_Slopes", Pieces]:
        """Of means and log densities, and their values."""
        if self.channels and self.facts.slope:
            number, at = x.shape[-1], pieces(x)
            known = jnp.asarray(self.facts.slope).reshape(self.observations, number)
            blank = jnp.zeros((*self.copies, 1, number))
            return _Slopes(blank, jnp.broadcast_to(known, (*self.copies, *known.shape)), blank), at

        def outputs(x: Array) -> tuple[_Slopes, Pieces]:
            found = pieces(x)
            return _Slopes(found.own.mean, found.of_children.mean, found.log_density), found

        here, along, at = jax.linearize(outputs, x, has_aux=True)

        def flipped(chosen: Array) -> Any:
            other = jnp.where(chosen, 1 - x, x)
            length = jnp.sum(jnp.where(chosen, other - x, 0.0), -1)[..., None]
            return jax.tree.map(lambda a, b: (a - b) / length, outputs(other)[0], here)

        rows, found = np.eye(x.shape[-1]), []
        if not self.binary.all():
            directions = jnp.asarray(rows[~self.binary])
            found.append(jax.vmap(lambda row: along(jnp.broadcast_to(row, x.shape)))(directions))
        if self.binary.any():
            found.append(jax.vmap(flipped)(jnp.asarray(rows[self.binary] > 0)))
        # reals come first here; the last axis is to be that of the coordinates, in their own order
        places = np.argsort(np.argsort(self.binary, kind="stable"))
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)
        slopes = jax.tree.map(
            lambda leaf: jnp.nan_to_num(jnp.moveaxis(leaf[places], 0, -1)), joined
        )
        return slopes, at

    def _by_channel(self, line: "_Line", spread: Array) -> Expected:
        """One copy, its coordinates in the order drawn, to be worked out as they are."""
        order = np.array(self.facts.order)
        centre = line.centre[order]
        return Expected(
            centre,
            jnp.zeros((0, 0)),
            jnp.zeros((0, 0)),
            centre,
            spread[order] ** 2,
            _held(line.residual),
            _held(line.slope[:, order]),
            jnp.clip(1 / jnp.maximum(line.weight, 1e-30), 1e-12, NO_INFORMATION),
            self.effects,
        )

    def _taken(self, found: "_Solved", mean: Array, spread: Array) -> Expected:
        """One copy, its coordinates in the order drawn; without information where all failed."""
        order = np.array(self.facts.order)
        mean, scale = mean[order], spread[order]
        centre, root, white = found.centre[order], found.root, found.white
        sound = jnp.all(jnp.isfinite(root)) & jnp.all(jnp.isfinite(centre))
        return Expected(
            jnp.where(sound, centre, mean),
            jnp.where(sound, root, jnp.diag(scale)),
            jnp.where(sound, white, jnp.diag(1 / scale)),
            mean,
            scale**2,
            jnp.zeros(0),
            jnp.zeros((0, len(order))),
            jnp.zeros(0),
        )

    def _reference(self) -> dict[str, Callable[[Moments], Array]]:
        """How to put each latent at its mean, or at the nearer of zero and one."""
        found = {}
        start = 0
        for latent, name, axes in zip(
            self.latents, self.factor.latents, self.own_axes, strict=True
        ):
            stop = start + int(np.prod(latent.shape))
            site = self.graph.sites[name]
            fallback = self._spread_out(
                jnp.asarray(self.facts.centre[start:stop]), latent.shape, axes
            )
            binary = bool(self.binary[start])
            found[name] = _putter(fallback, binary, site.dtype)
            start = stop
        return found

    def _spread_out(self, row: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
        """A row of one copy's entries, the same for all copies, with axes as the site has them."""
        whole = jnp.broadcast_to(row.reshape(shape), (*self.copies, *shape))
        return jnp.moveaxis(whole, range(len(axes)), axes)

    def rows_of(self, values: Values) -> Float[Array, "*copies coordinates"]:
        """The latents' values by copy."""
        parts = []
        for name, axes in zip(self.factor.latents, self.own_axes, strict=True):
            moved = jnp.moveaxis(jnp.asarray(values[name], float), axes, range(len(axes)))
            parts.append(moved.reshape(*self.copies, -1))
        return jnp.concatenate(parts, -1)

    def values_of(self, x: Float[Array, "*copies coordinates"]) -> dict[str, Array]:
        """The latents' values from those by copy."""
        found = {}
        start = 0
        for latent, name, axes in zip(
            self.latents, self.factor.latents, self.own_axes, strict=True
        ):
            stop = start + int(np.prod(latent.shape))
            part = x[..., start:stop].reshape(*self.copies, *latent.shape)
            found[name] = jnp.moveaxis(part, range(len(axes)), axes).astype(
                self.graph.sites[name].dtype
            )
            start = stop
        return found

    def _observed(self, values: Values, blank: float = 0.0) -> Float[Array, "*copies observations"]:
        """Entries of the children by copy; `blank` where a copy has fewer than others."""
        parts = [self.by_copy(child, values[child.name], blank) for child in self.children]
        return jnp.concatenate(parts, -1)

    def by_copy(self, child: Child, value: Array, blank: float = 0.0) -> Array:
        """Entries of one child by copy; `blank` where a copy has fewer than others."""
        moved = jnp.moveaxis(jnp.asarray(value, float), child.axes, range(len(child.axes)))
        if child.members is not None:
            table, there = child.members.table, child.members.mask
            moved = moved[table]
            there = there.reshape(*there.shape, *(1 for _ in moved.shape[2:]))
            moved = jnp.where(there, moved, blank)
        return moved.reshape(*self.copies, -1)

    @property
    def _sizes(self) -> list[int]:
        """How many entries of each child belong to one copy."""
        found = []
        for child in self.children:
            site = self.graph.sites[child.name]
            shape = site.shape[1:] if self.scan is not None else site.shape
            rest = int(np.prod([n for a, n in enumerate(shape) if a not in child.axes]))
            found.append(rest * (1 if child.members is None else child.members.table.shape[1]))
        return found

    def _pieces(self, found: Evaluation) -> Pieces:
        own = [
            self.rows_of({n: found.moments[n][part] for n in self.factor.latents})
            for part in range(2)
        ]
        known = np.isnan(self.facts.centre)
        own = [
            jnp.where(known, mine, jnp.asarray(np.nan_to_num(other)))
            for mine, other in zip(own, (self.facts.centre, self.facts.variance), strict=True)
        ]
        of_children = [
            self._observed({c.name: found.moments[c.name][part] for c in self.children}, blank)
            for part, blank in enumerate((0.0, NO_INFORMATION))
        ]
        densities = [
            self.by_copy(child, found.log_density[child.name])
            if child.scalar
            else jnp.zeros((*self.copies, size))
            for child, size in zip(self.children, self._sizes, strict=True)
        ]
        return Pieces(Moments(*own), Moments(*of_children), jnp.concatenate(densities, -1))

    def _inside(self, mean: Array, x: Array) -> Array:
        """The estimate, kept inside the support: at least a fiftieth of the way from its bound."""
        c = table(self.latents)
        lower = jnp.where(np.isfinite(c.least) & (c.least > -1e38), c.least, -jnp.inf)
        upper = jnp.where(np.isfinite(c.most) & (c.most < 1e38), c.most, jnp.inf)
        low = jnp.where(jnp.isfinite(lower), lower + 0.02 * (x - lower), -jnp.inf)
        high = jnp.where(jnp.isfinite(upper), upper - 0.02 * (upper - x), jnp.inf)
        return jnp.clip(jnp.where(jnp.isfinite(mean), mean, x), low, high)


def of_copies(
    fn: Callable[..., Found],
    leaves: tuple[Any, ...],
    copies: tuple[int, ...],
    index: Sequence[Int[Array, ""]] | None,
) -> Found:
    """A function of one copy's leaves: of the copy at an index, or of all, their axes first."""
    if index is not None:
        return fn(*jax.tree.map(lambda leaf: leaf[tuple(index)], leaves))
    for _ in copies:
        fn = jax.vmap(fn)
    return fn(*leaves)


class _Slopes(NamedTuple):
    """How the latents' own means, the observations' means and log densities move."""

    own: Float[Array, "*copies coordinates coordinates"]
    of_children: Float[Array, "*copies observations coordinates"]
    log_density: Float[Array, "*copies observations coordinates"]


class _Line(NamedTuple):
    """A linear model around a centre, in terms of the distance Δ from it.

    The latents lie prior + (1 − own) Δ from their own means, the observations residual − slope Δ.
    """

    centre: Float[Array, "*copies coordinates"]
    prior: Float[Array, "*copies coordinates"]
    own: Float[Array, "*copies coordinates coordinates"]
    residual: Float[Array, "*copies observations"]
    slope: Float[Array, "*copies observations coordinates"]
    weight: Float[Array, "*copies observations"]


def _held(values: Array) -> Array:
    """Finite, and so that squares are."""
    return jnp.clip(jnp.nan_to_num(values), -1e15, 1e15)


def _precision(variance: Array) -> Array:
    kept = jnp.clip(variance, 1e-12, NO_INFORMATION)
    return jnp.where(jnp.isfinite(kept), 1 / kept, 0.0)


def _pull(at: Pieces, slope: Array, score: Array, residual: Array) -> Array:
    """How hard each observation pulls at its mean, relative to a normal of the same variance.

    An outlier of a heavy-tailed distribution pulls less than its distance says.
    """
    noise = jnp.clip(at.of_children.variance, 1e-12, NO_INFORMATION)
    force = jnp.sum(score * slope, -1) / jnp.maximum(jnp.sum(slope**2, -1), 1e-30)
    far = jnp.abs(residual) > 0.1 * jnp.sqrt(noise)
    ratio = force * noise / jnp.where(far, residual, 1.0)
    return jnp.where(far & jnp.isfinite(ratio), jnp.clip(ratio, 0.01, 10.0), 1.0)


class _Solved(NamedTuple):
    """The least squares of a line: centre in the latents' order, the rest in the order drawn."""

    centre: Float[Array, "*copies coordinates"]
    root: Float[Array, "*copies coordinates coordinates"]
    white: Float[Array, "*copies coordinates coordinates"]


def _solved(line: _Line, spread: Float[Array, "*copies coordinates"], order: np.ndarray) -> _Solved:
    """The least squares that a linear model's prior and observations ask for."""
    number = spread.shape[-1]
    own = jnp.eye(number) - line.own * spread[..., None, :] / spread[..., :, None]
    slope = line.slope * spread[..., None, :]
    weighted = slope * line.weight[..., None]
    precision = jnp.einsum("...ij,...ik->...jk", own, own) + jnp.einsum(
        "...ci,...cj->...ij", slope, weighted
    )
    precision += 1e-6 * jnp.eye(number)
    gradient = jnp.einsum("...ci,...c->...i", weighted, line.residual) - jnp.einsum(
        "...ji,...j->...i", own, line.prior / spread
    )
    # Λ = U Uᵀ with U upper triangular, so that U⁻ᵀ is the lower factor of Λ⁻¹.
    reverse = order[::-1]
    lower = cholesky(precision[..., reverse, :][..., reverse])
    white = jnp.swapaxes(lower[..., ::-1, ::-1], -1, -2)
    root = invert_lower_triangular(white)
    step = jnp.einsum("...ij,...kj,...k->...i", root, root, gradient[..., order])
    centre = line.centre + spread * step[..., np.argsort(order)]
    scale = spread[..., order]
    return _Solved(centre, root * scale[..., :, None], white / scale[..., None, :])


# XLA hands these to LAPACK one matrix at a time, which is slow for many small ones, and on few
# cores can wait for a thread forever.
def _putter(fallback: Array, binary: bool, dtype: Any) -> Callable[[Moments], Array]:
    def put(moments: Moments) -> Array:
        mean = jnp.where(jnp.isnan(fallback), moments.mean, fallback)
        return (jnp.round(mean) if binary else mean).astype(dtype)

    return put
