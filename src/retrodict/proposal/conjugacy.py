"""A factor in; the family that its conditional belongs to, if the model's densities show one, out.

A conditional is closed if every density that the latents have a part in can be worked out when they
are drawn: their own, and those of all that depends on them. Then their product is the target up to
a constant, and a family that it belongs to gives draws without a network (see `families`). That it
does is not read from the names of distributions but seen from densities at draws from the prior:
draws from the family must be weighted alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int

from retrodict._xla.jit import run_once
from retrodict.estimators.analytic.families import Family, Finite, Normal, Target
from retrodict.estimators.analytic.gamma_beta import Beta, Gamma
from retrodict.estimators.analytic.proposal import Exact
from retrodict.estimators.coordinates import Latent, blocks, table
from retrodict.estimators.scalar_bijections import ABOVE, BETWEEN, IDENTITY
from retrodict.graph.prior_draws import Draws
from retrodict.proposal.guide_search import children_of, given, happens_now, reference_draws
from retrodict.proposal.linear_guide import Child, Evaluate, Facts, Guide
from retrodict.types import Values

# More states than this are not looked at one by one, for once or for every particle; and a
# covariance has no more rows than this.
MOST_STATES, MOST_STATES_EACH, MOST_NORMAL = 1024, 64, 8
# Densities that are worked out for one copy and particle; a network costs about as much.
MOST_WORK = 1024
# Draws that are weighed for each of the draws from the prior, and what part of them is to be
# effective for all but a few of those.
WEIGHED, EFFECTIVE, EXCEPTIONS = 32, 0.97, 0.02
# Densities worked out at a time.
AT_ONCE = 2**24


@dataclass(frozen=True)
class Conditional:
    """Works out the parameters of a factor's conditional.

    Attributes:
        guide: evaluates the model for the factor; of its facts, the family and where to look count.
        family: what the conditional belongs to.
    """

    guide: Guide
    family: Family

    @property
    def facts(self) -> Facts:
        """What is kept with the artefact."""
        return self.guide.facts

    @property
    def working_bytes(self) -> int:
        """Memory to work out all copies of one draw."""
        each = self.family.evaluations * (self.guide.observations + len(self.facts.order))
        return 2 * 4 * int(np.prod(self.guide.copies)) * each

    def at(self, values: Values, index: Sequence[Int[Array, ""]]) -> Any:
        """Parameters of one copy, where arrays of time hold all steps."""
        _, evaluate, place = self.guide.placed(values, index)
        found = self._parameters(evaluate)
        return jax.tree.map(lambda leaf: leaf[tuple(place)], found)

    def everywhere(self, values: Values) -> Any:
        """Parameters of all copies, outside of time."""
        return self._parameters(self.guide.placed(values, ())[1])

    def step(self, outer: Values, given: Values, time: Array, carry: Any) -> Any:
        """Parameters of all copies in one step of a scan."""
        return self._parameters(self.guide.in_step(outer, given, time, carry))

    def _parameters(self, evaluate: Evaluate) -> Any:
        start = jnp.asarray(np.array(self.facts.centre), float)
        whole = jnp.broadcast_to(start, (*self.guide.copies, start.size))
        return self.family.parameters(self.target(evaluate), whole)

    def target(self, evaluate: Evaluate, *, precise: bool = False) -> Target:
        """log of all densities that a copy's latents have a part in, by copy.

        Derivatives need not be of the `precise` form, which is longer.
        """
        guide, lower = self.guide, table(self.guide.latents).lower

        def log_target(x: Float[Array, "*copies coordinates"]) -> Float[Array, "*copies"]:
            density = evaluate(guide.values_of(x + lower), None if precise else {}).log_density
            parts = [guide.by_copy(site, density[site.name]) for site in self._sites]
            return sum((jnp.sum(part, -1) for part in parts), jnp.zeros(guide.copies))

        return log_target

    @property
    def _sites(self) -> list[Child]:
        """The latents and their children, with the axes of their densities."""
        guide, found = self.guide, []
        own = map(partial(Child, scalar=True), guide.factor.latents, guide.own_axes)
        for site in (*guide.children, *own):
            axes = guide.graph.sites[site.name].axes
            # densities have axes of plates and time alone, and a step's have none of time
            if guide.scan is not None:
                axes = tuple(axis - 1 for axis in axes[1:])
            found.append(site._replace(axes=tuple(map(axes.index, site.axes))))
        return found


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


def find_conditional(blank: Guide, draws: Draws, *, known: bool = False) -> Conditional | None:
    """The conditional of a factor, if it is closed and of a family; called as `find_guide` is."""
    children = children_of(blank.graph, blank.factor, blank.scan)
    if not _is_closed(blank, {child.name for child in children}):
        return None
    guide = replace(blank, children=children)
    if known:
        family = by_name(blank.facts.family[0], blank.latents)
        return None if family is None else Conditional(guide, family)
    possible = [family for family in candidates(blank.latents) if _is_worthwhile(guide, family)]
    if not possible:
        return None
    seen = reference_draws(guide, draws)
    names, start = tuple(child.name for child in children), _places(guide, seen)
    for family in possible:
        facts = Facts(blank.facts.order, names, start, start, family=(family.name,))
        found = Conditional(replace(guide, facts=facts), family)
        if not family.wide or _is_exact(found, seen):
            return found
    return None


def _is_closed(guide: Guide, known: set[str]) -> bool:
    """Whether every density that the latents have a part in can be worked out."""
    graph, factor, scan = guide.graph, guide.factor, guide.scan
    for name, site in graph.sites.items():
        parents = graph.parents(name).values()
        if name in factor.latents:
            rest = [edge for edge in parents if edge.parent not in factor.latents]
            if not all(given(graph, factor, edge, scan) for edge in rest):
                return False
            continue
        mine = [edge for edge in parents if edge.parent in factor.latents]
        # what a filter draws is given the past; steps to come are no concern of its target
        later = scan is not None and site.scan == scan and not any(map(happens_now, mine))
        if mine and name not in known and not later:
            return False
    return True


def _is_worthwhile(guide: Guide, family: Family) -> bool:
    """Whether a family's parameters are not too dear for every particle; else, for once."""
    entries = guide.observations + len(guide.facts.order)
    latent = [name for name in guide.factor.context if not guide.graph.sites[name].observed]
    if not latent and guide.scan is None:
        return family.evaluations * entries <= 64 * MOST_WORK
    return family.evaluations <= MOST_STATES_EACH and family.evaluations * entries <= MOST_WORK


def _places(guide: Guide, draws: Mapping[str, Array]) -> tuple[float, ...]:
    """Where to look: what is usual of each coordinate, as far as it counts from its lower end."""
    rows = np.asarray(run_once(jax.vmap(guide.rows_of), _own(guide, draws)))
    flat = rows.reshape(-1, rows.shape[-1]) - table(guide.latents).lower
    flat = np.where(np.isfinite(flat), flat, np.nan)
    # zero is no place to look at where it is the end of the support
    middle = np.nan_to_num(np.nanmedian(flat, 0))
    least = np.where(table(guide.latents).least > -1e30, 1e-6, -np.inf)
    return tuple(map(float, np.maximum(middle, least)))


def _own(guide: Guide, draws: Mapping[str, Array]) -> dict[str, Array]:
    """The latents' values, of one step if there are steps."""
    own = {name: draws[name] for name in guide.factor.latents}
    return own if guide.scan is None else {name: array[:, -1] for name, array in own.items()}


def _is_exact(conditional: Conditional, draws: Mapping[str, Array]) -> bool:
    """Whether draws from the family are weighted alike, for data from the model."""
    guide = conditional.guide
    steps = () if guide.scan is None else (guide.graph.scan_lengths[guide.scan],)
    copies = (*steps, *guide.copies)
    size = int(np.prod(copies, dtype=int))
    exact = Exact.of(conditional.family, guide.latents)

    def weighed(values: Any, number: Array) -> Array:
        # another copy for every draw, the last first: in time, the first may start from a constant
        place = jnp.unravel_index(size - 1 - number % size, copies) if copies else ()
        _, evaluate, index = guide.placed(values, place)
        target = conditional.target(evaluate, precise=True)
        parameters = conditional.at(values, place)
        noise = exact.noise(jax.random.fold_in(jax.random.key(0), number), (WEIGHED,))

        def one(noise: Any) -> Array:
            x, log_q = exact.draw(parameters, noise)
            row = exact.row(x)
            whole = jnp.broadcast_to(row, (*guide.copies, row.size))
            return target(whole)[tuple(index)] - log_q

        log_weights = jax.vmap(one)(noise)
        return jnp.exp(2 * logsumexp(log_weights) - logsumexp(2 * log_weights)) / WEIGHED

    # to ask for one copy's density is to work out all; of large plates a few draws will do
    entries = int(np.prod(guide.copies)) * (guide.observations + len(guide.facts.order))
    number = min(jax.tree.leaves(draws)[0].shape[0], max(8, AT_ONCE // (WEIGHED * entries)))
    few = {name: value[:number] for name, value in draws.items()}
    found = np.asarray(run_once(jax.vmap(weighed), few, np.arange(number)))
    return bool(np.quantile(found, EXCEPTIONS) > EFFECTIVE)
