"""A NumPyro model in; joint draws, log densities and deterministic values out, as pure functions.

A model is a program that passes messages to handlers. `Program` runs it under one handler of its
own, `_Run`, that gives every sample site its value (a given one, or a fresh draw), scores it, and
executes `scan` itself, so that the sites of a step are inputs and outputs of one `lax.scan`.
NumPyro's message dictionaries do not leave this file.

The factors f_i and g_j of the joint density, eq. (1) of Paige & Wood (2016), sec. 2, are
`Evaluation.log_density`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from jaxtyping import Array, PRNGKeyArray
from numpyro import handlers
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.distributions.distribution import validation_enabled
from numpyro.ops.pytree import PytreeTrace
from numpyro.primitives import _PYRO_STACK, Messenger

from retrodict.errors import UnsupportedModel
from retrodict.graph.moments import Moments, moments
from retrodict.graph.stable_log_prob import log_prob
from retrodict.graph.stacked_distribution import Stacked

Result = TypeVar("Result")
Values: TypeAlias = Mapping[str, Array]
Message: TypeAlias = dict[str, Any]
Expect: TypeAlias = Mapping[str, Callable[[Moments], Array]]
NO_KEYS: Mapping[str, PRNGKeyArray] = MappingProxyType({})
NO_VALUES: Values = MappingProxyType({})


class CarryKey(NamedTuple):
    """Names a leaf of a scan's carry, by the numbers of both."""

    scan: int
    leaf: int


class Axis(NamedTuple):
    """An index axis of a site: a plate, with its place in the site's value (without time)."""

    plate: str
    position: int
    size: int


@dataclass(frozen=True)
class Seen:
    """What one run of the model saw of a sample site, before any graph is made of it.

    Attributes:
        name: of the site.
        distribution: the name of its distribution's class, without what is wrapped around it.
        fn: its distribution, whose parameters may be tracers.
        support: a constraint, whose bounds may be tracers.
        sample_shape: as it was passed to `numpyro.sample`.
        frames: NumPyro's records of the plates around the site.
        axes: the plates, with their places in the value.
        scan: the number of the scan it lies in.
    """

    name: str
    distribution: str
    fn: dist.Distribution
    support: Any
    sample_shape: tuple[int, ...]
    frames: tuple[Any, ...]
    axes: tuple[Axis, ...]
    scan: int | None


class Evaluation(NamedTuple):
    """The outcome of one run of a model.

    Attributes:
        values: every sample site, observed or not; a scan's sites have a leading axis of time.
        log_density: for each site log f_i or log g_j, one number a random variable: the axes are
            time, if any, then the site's plates in the order of its array axes.
        deterministic: the values of `numpyro.deterministic` sites.
        support_bounds: the parameters of each site's support, which may depend on other sites.
        parameters: the parameters of each site's distribution, each with its batch axes first.
        carries: for each scan, the leaves of the carry that every step starts from, stacked.
        moments: mean and variance of each site's distribution, if asked for; see `moments`.
    """

    values: dict[str, Array]
    log_density: dict[str, Array]
    deterministic: dict[str, Array]
    support_bounds: dict[str, list[Array]]
    parameters: dict[str, list[Array]]
    carries: dict[CarryKey, Array]
    moments: dict[str, Moments]

    @staticmethod
    def empty() -> "Evaluation":
        """An evaluation to which nothing has been added yet."""
        return Evaluation({}, {}, {}, {}, {}, {}, {})


@dataclass
class Notes:
    """Python-side findings of a run: what does not depend on values.

    Attributes:
        seen: the sample sites.
        order: names of sample and deterministic sites in program order.
        shapes: of all values, with their types.
        scan_lengths, reversed_scans: of the scans in the order met.
    """

    seen: dict[str, Seen] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    shapes: dict[str, Any] = field(default_factory=dict)
    scan_lengths: list[int] = field(default_factory=list)
    reversed_scans: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Program:
    """A model with its arguments, as functions of site values.

    Attributes:
        model: the NumPyro model.
        args, kwargs: what it is called with: sizes and fixed covariates, no data.
        observed: the names of the sites that will be data.
        scan_sites: for each scan, in the order met, the sites inside it.
        guarded: sites whose support depends on other sites, so that a value can lie outside it.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    observed: frozenset[str] = frozenset()
    scan_sites: tuple[tuple[str, ...], ...] = ()
    guarded: frozenset[str] = frozenset()

    def simulate(self, rng_key: PRNGKeyArray) -> dict[str, Array]:
        """One joint draw (x, y) ~ p(x, y) of all sites; `vmap` for more."""
        return self.run(rng_key, {}).values

    def log_density(self, values: Values) -> dict[str, Array]:
        """Log density of every random variable at `values`, which must hold every site.

        A site's array has its index axes only: time, if any, then its plates.
        """
        return self.run(None, values).log_density

    def deterministic(self, values: Values) -> dict[str, Array]:
        """The model's deterministic sites at `values`, which must hold every sample site."""
        return self.run(None, values).deterministic

    def run(
        self,
        rng_key: PRNGKeyArray | None,
        given: Values,
        notes: Notes | None = None,
        *,
        keys: Mapping[str, PRNGKeyArray] = NO_KEYS,
        expect: Expect | None = None,
        only: Collection[str] | None = None,
        scored_at: Values = NO_VALUES,
    ) -> Evaluation:
        """Run the model once; sites in `given` take that value, the others are drawn.

        A site in `keys` is drawn with that key. So a population that draws one site anew can make
        its keys in one go, and the other sites' draws, which are not wanted, cost it nothing.
        With `only`, no other site is scored, and the run ends with the last of them: XLA leaves out
        what is not used, but to trace a long program once for each of its sites takes a while.
        A site in `scored_at` is scored at that value, while its children see the given one: this
        shows how its density depends on its own values at earlier steps.
        """
        wanted = None if only is None else frozenset(only)
        handler = _Run(
            self,
            rng_key,
            given,
            notes or Notes(),
            None,
            keys=keys,
            expect=expect,
            only=wanted,
            scored_at=scored_at,
        )
        # NumPyro's checks of values have tolerances that a float32 simplex can miss, and depend on
        # how Python was started; supports are checked where that is needed, see `guarded`.
        checks = nullcontext() if notes is not None else validation_enabled(False)
        with suppress(_Reached), checks, handler:
            self.model(*self.args, **self.kwargs)
        return handler.result

    def initial_carry(self, scan: int, outer: Values) -> Any:
        """The carry that the first step of a scan starts from, given the sites before it."""
        return self._enter(scan, outer, lambda opened: opened.init)

    def step(
        self,
        rng_key: PRNGKeyArray | None,
        scan: int,
        outer: Values,
        time: Array,
        carry: Any,
        given: Values,
        *,
        keys: Mapping[str, PRNGKeyArray] = NO_KEYS,
        expect: Expect | None = None,
    ) -> tuple[Any, Evaluation]:
        """One step of a scan: the carry after it, and the values and densities of its sites.

        Its cost does not depend on the length of the scan.

        Args:
            rng_key: for the step's sites that are not given.
            scan: which scan.
            outer: values of the sites before it.
            time: which step, for the inputs of the scan.
            carry: what the step before left.
            given: values of the step's own sites.
            keys: for the step's sites that have one of their own, see `run`.
        """

        def visit(opened: _Opened) -> tuple[Any, Evaluation]:
            x = jax.tree.map(lambda leaf: jnp.asarray(leaf)[time], opened.xs)
            carry_after, (result, _, _) = opened.body(carry, (rng_key, x, given, {}), keys)
            return carry_after, result

        return self._enter(scan, outer, visit, expect)

    def _enter(
        self,
        scan: int,
        outer: Values,
        visit: "Callable[[_Opened], Result]",
        expect: Expect | None = None,
    ) -> "Result":
        """Run the model up to a scan, and there do something else."""

        def reached(opened: _Opened) -> None:
            raise _Reached(visit(opened))

        handler = _Run(
            self, None, outer, Notes(), scan=None, expect=expect, stop_at=(scan, reached)
        )
        try:
            with validation_enabled(False), handler:
                self.model(*self.args, **self.kwargs)
        except _Reached as found:
            result: Result = found.result
            return result
        raise ValueError(f"the model has no scan number {scan}")

    def inspect(self) -> tuple["Program", dict[str, Seen], Notes]:
        """Read the sites without computing any value, and refuse what cannot be compiled.

        Returns:
            the program that knows which sites lie in which scan, and the sites in program order.
        """
        notes = self._inspect_once()
        again = self._inspect_once(only=())
        if list(notes.seen) != list(again.seen):
            changed = sorted(set(notes.seen) ^ set(again.seen)) or list(notes.seen)
            raise UnsupportedModel(
                f"the model's structure changes from draw to draw: two runs differ in the sites "
                f"{', '.join(changed)}. Every run must visit the same sites in the same order; "
                "write random branches with jnp.where or a mixture distribution"
            )
        scan_sites = tuple(
            tuple(name for name, site in notes.seen.items() if site.scan == number)
            for number in range(len(notes.scan_lengths))
        )
        return replace(self, scan_sites=scan_sites), notes.seen, notes

    def _inspect_once(self, only: Collection[str] | None = None) -> Notes:
        notes = Notes()

        def draw(rng_key: PRNGKeyArray) -> dict[str, Array]:
            return self.run(rng_key, {}, notes, only=only).values

        try:
            notes.shapes.update(jax.eval_shape(draw, jax.random.key(0)))
        except UnsupportedModel:
            raise
        except (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
            jax.errors.TracerIntegerConversionError,
        ) as error:
            raise UnsupportedModel(
                "the model's structure changes from draw to draw: Python control flow (if, for, "
                f"int(), numpy) looks at a random value{_after(notes)}. Write the branch with "
                "jnp.where, and use jax.numpy in place of numpy on random values"
            ) from error
        except Exception as error:
            raise UnsupportedModel(
                f"the model raised {type(error).__name__} when it was run without data"
                f"{_after(notes)}: {error}. It was called with model_args={self.args!r} and "
                f"model_kwargs={dict(self.kwargs)!r}; arguments that carry data should default to "
                "None and sizes should be arguments of their own"
            ) from error
        if not notes.seen:
            raise UnsupportedModel("the model has no sample sites")
        return notes


class _Opened(NamedTuple):
    """A scan, not yet run."""

    body: Callable[..., tuple[Any, Any]]
    init: Any
    xs: Any


class _Reached(Exception):  # noqa: N818 (it is no error)
    """Leaves the model when there is nothing more to do in it."""

    def __init__(self, result: Any) -> None:
        self.result = result
        super().__init__()


def _after(notes: Notes) -> str:
    return f" (after site '{list(notes.seen)[-1]}')" if notes.seen else ""


class _Run(Messenger):
    """Gives every site its value, scores it, and runs scans.

    It is the outermost handler, so it sees each message last, after the model's own plates, masks,
    scopes and reparameterisations have had their say.
    """

    def __init__(
        self,
        program: Program,
        rng_key: PRNGKeyArray | None,
        given: Values,
        notes: Notes,
        scan: int | None,
        stop_at: "tuple[int, Callable[[_Opened], None]] | None" = None,
        keys: Mapping[str, PRNGKeyArray] = NO_KEYS,
        expect: Expect | None = None,
        only: frozenset[str] | None = None,
        scored_at: Values = NO_VALUES,
    ) -> None:
        self.program = program
        self.rng_key = rng_key
        self.given = given
        self.notes = notes
        self.scan = scan
        self.stop_at = stop_at
        self.expect = expect
        self.keys = keys
        self.only = only
        self.scored_at = scored_at
        self.result = Evaluation.empty()
        super().__init__()

    def process_message(self, msg: Message) -> None:
        match msg["type"]:
            case "sample":
                self._sample(msg)
            case "deterministic":
                self._deterministic(msg["name"], msg["value"])
            case "plate":
                _check_plate(msg)
            case "control_flow":
                self._control_flow(msg)
            case "param" | "mutable":
                raise UnsupportedModel(
                    f"site '{msg['name']}' is a numpyro.{msg['type']}, which has no prior. Give it "
                    "a prior with numpyro.sample, or pass its value as an argument of the model"
                )
            case "prng_key":
                raise UnsupportedModel(
                    "the model draws its own random numbers through numpyro.prng_key(). Every "
                    "random quantity must be a numpyro.sample site"
                )

    def _sample(self, msg: Message) -> None:
        name, fn = msg["name"], msg["fn"]
        if isinstance(innermost(fn), dist.Delta) and msg["value"] is None:
            msg["value"] = fn(rng_key=None, sample_shape=())
            self._deterministic(name, msg["value"])
            return
        _check_site(msg, self.program.observed)
        self._check_new(name)
        sample_shape = msg["kwargs"].get("sample_shape", ())
        if self.expect is not None:
            self.result.moments[name] = moments(fn, sample_shape)
        if name in self.given:
            value = jnp.asarray(self.given[name])
        elif self.expect is not None and name in self.expect:
            value = self.expect[name](self.result.moments[name])
        elif name in self.keys:
            value = fn(rng_key=self.keys[name], sample_shape=sample_shape)
        elif self.rng_key is not None:
            self.rng_key, draw_key = jax.random.split(self.rng_key)
            value = fn(rng_key=draw_key, sample_shape=sample_shape)
        else:
            raise KeyError(f"no value for site '{name}', and no key to draw one with")
        msg["value"] = value
        self._note(msg, value)
        self.result.values[name] = value
        if self.only is None or name in self.only:
            self._score(msg, jnp.asarray(self.scored_at.get(name, value)))
            self._end_if_done()

    def _end_if_done(self) -> None:
        """Leave the model when all that is wanted has been scored; not from inside of a scan."""
        if not self.only or self.scan is not None:
            return
        if self.only <= set(self.result.log_density):
            raise _Reached(None)

    def _score(self, msg: Message, value: Array) -> None:
        name, fn = msg["name"], msg["fn"]
        batch_shape = value.shape[: value.ndim - fn.event_dim]
        # what is expected only guides the networks: there the shorter density will do
        density = log_prob(fn, value) if self.expect is None else fn.log_prob(value)
        if name in self.program.guarded:
            density = jnp.where(fn.support(value), density, -jnp.inf)
        density = jnp.broadcast_to(density, batch_shape)
        index_positions = {axis.position for axis in self.notes.seen[name].axes}
        coordinates = tuple(i for i in range(len(batch_shape)) if i not in index_positions)
        self.result.log_density[name] = density.sum(coordinates)
        self.result.support_bounds[name] = [jnp.asarray(b) for b in jax.tree.leaves(fn.support)]
        self.result.parameters[name] = _parameters(fn, batch_shape)

    def _note(self, msg: Message, value: Array) -> None:
        name, fn = msg["name"], msg["fn"]
        batch_ndim = value.ndim - fn.event_dim
        axes = tuple(
            sorted(
                (
                    Axis(frame.name, batch_ndim + frame.dim, frame.size)
                    for frame in msg["cond_indep_stack"]
                ),
                key=lambda axis: axis.position,
            )
        )
        self.notes.seen[name] = Seen(
            name=name,
            distribution=type(innermost(fn)).__name__,
            fn=fn,
            support=fn.support,
            sample_shape=tuple(msg["kwargs"].get("sample_shape", ())),
            frames=tuple(msg["cond_indep_stack"]),
            axes=axes,
            scan=self.scan,
        )
        self.notes.order.append(name)

    def _deterministic(self, name: str, value: Any) -> None:
        self._check_new(name)
        self.notes.order.append(name)
        self.result.deterministic[name] = jnp.asarray(value)

    def _check_new(self, name: str) -> None:
        if name in self.result.values or name in self.result.deterministic:
            raise UnsupportedModel(
                f"two sites are called '{name}'. Site names must be unique; in a loop number them, "
                f"as in f'{name}_{{i}}'"
            )

    def _control_flow(self, msg: Message) -> None:
        if msg["fn"] is not scan_wrapper:
            raise UnsupportedModel(
                "the model uses numpyro's cond, whose branches may hold different sites. Sample "
                "both branches and choose with jnp.where"
            )
        if self.scan is not None:
            raise UnsupportedModel(
                "the model has a scan inside a scan. Only one level of time is supported; write "
                "the inner one as a plate or as a vector event"
            )
        self._scan(msg)

    def _scan(self, msg: Message) -> None:
        """Run a scan, with the values of its sites as inputs and outputs of each step."""
        step, init, xs, length, reverse = msg["args"]
        number = len(self.notes.scan_lengths)
        if length is None:
            length = jax.tree.leaves(xs)[0].shape[0]
        self.notes.scan_lengths.append(length)
        self.notes.reversed_scans.append(reverse)

        names = self.program.scan_sites[number] if number < len(self.program.scan_sites) else ()
        given, scored_at = (
            {name: jnp.asarray(values[name]) for name in names if name in values}
            for values in (self.given, self.scored_at)
        )
        step_keys = None
        if self.rng_key is not None:
            self.rng_key, scan_key = jax.random.split(self.rng_key)
            step_keys = jax.random.split(scan_key, length)
        step = _masked(step, _stack_above(self))

        body = self._scan_body(number, step)
        if self.stop_at is not None and self.stop_at[0] == number:
            self.stop_at[1](_Opened(body, init, xs))
        carry, (result, carries, ys) = lax.scan(
            body, init, (step_keys, xs, given, scored_at), length=length, reverse=reverse
        )
        for name in (*result.values, *result.deterministic):
            self._check_new(name)
        result.carries.update(carries)
        fields: Iterable[tuple[Any, Any]] = zip(self.result, result, strict=True)
        for entries, new in fields:
            entries.update(new)
        self._end_if_done()
        msg["value"] = (length, None, carry), (_no_trace(), ys)

    def _scan_body(
        self, number: int, step: Callable[[Any, Any], tuple[Any, Any]]
    ) -> Callable[..., tuple[Any, Any]]:
        """One step of a scan as a function of its carry and inputs."""

        def body(
            carry: Any, inputs: Any, keys: Mapping[str, PRNGKeyArray] = NO_KEYS
        ) -> tuple[Any, Any]:
            step_key, x, step_values, step_scored_at = inputs
            handler = _Run(
                self.program,
                step_key,
                step_values,
                self.notes,
                scan=number,
                keys=keys,
                expect=self.expect,
                only=self.only,
                scored_at=step_scored_at,
            )
            # The handlers around the scan must not see a single step's messages.
            with handlers.block(), handler:
                new_carry, y = step(carry, x)
            return new_carry, (handler.result, carry_leaves(number, carry), y)

        return body


def carry_leaves(scan: int, carry: Any) -> dict[CarryKey, Array]:
    """The numeric leaves of a scan's carry."""
    return {
        CarryKey(scan, number): jnp.asarray(leaf)
        for number, leaf in enumerate(jax.tree.leaves(carry))
        if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    }


def _ordered_leaves(tree: Any) -> list[Any]:
    """The arrays of a distribution, in an order that does not change between processes.

    NumPyro flattens a distribution in the order of a set of names, which depends on Python's hash
    seed.
    """
    if not isinstance(tree, dist.Distribution):
        return [
            leaf
            for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, dist.Distribution))
            for leaf in (_ordered_leaves(part) if isinstance(part, dist.Distribution) else [part])
        ]
    names = sorted(type(tree).gather_pytree_data_fields())
    fields = [vars(tree).get(name) for name in names]
    # A mask that is a plain bool is no array.
    return [leaf for field in fields if field is not True for leaf in _ordered_leaves(field)]


def _parameters(fn: dist.Distribution, batch_shape: tuple[int, ...]) -> list[Array]:
    """The distribution's parameters, each spread over the batch and flattened behind it.

    A parameter with neither the batch's axes nor the value's is left out: it cannot tell elements
    of a plate apart.
    """
    if isinstance(fn, Stacked):
        each: list[Array] = fn.each(lambda one: _parameters(one, batch_shape[1:]))
        return each
    spread = []
    for leaf in map(jnp.asarray, _sorted_leaves(fn)):
        for shape in (
            (*batch_shape, *fn.event_shape),
            (*batch_shape, *leaf.shape[len(batch_shape) :]),
        ):
            try:
                whole = jnp.broadcast_to(leaf, shape)
            except ValueError:
                continue
            spread.append(whole.reshape(*batch_shape, -1).astype(float))
            break
    return spread


def _sorted_leaves(fn: dist.Distribution) -> list[Any]:
    """The parameters by name: the order in NumPyro's pytrees differs from process to process."""
    values = (vars(fn).get(name) for name in sorted(type(fn).gather_pytree_data_fields()))
    return [
        leaf
        for value in values
        for leaf in (
            _sorted_leaves(value)
            if isinstance(value, dist.Distribution)
            else jax.tree.leaves(value)
        )
    ]


def _no_trace() -> Any:
    """What NumPyro's scan takes as: all messages of the steps have been dealt with."""
    make: Callable[..., Any] = PytreeTrace
    return make({})


def _stack_above(handler: Messenger) -> list[Messenger]:
    """The model's own handlers that are active where a message was sent."""
    return list(_PYRO_STACK[_PYRO_STACK.index(handler) + 1 :])


def _masked(step: Callable[[Any, Any], Any], around: list[Messenger]) -> Callable[[Any, Any], Any]:
    """Repeat inside each step what the handlers around a scan do to its sites."""
    for handler in around:
        if isinstance(handler, handlers.mask):
            step = handlers.mask(step, mask=handler.mask)
        elif isinstance(handler, handlers.scale):
            step = handlers.scale(step, scale=handler.scale)
    return step


def innermost(fn: dist.Distribution) -> dist.Distribution:
    """The distribution without what is wrapped around it."""
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    return fn


_WRAPPERS = (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution, Stacked)


def _check_plate(msg: Message) -> None:
    size, subsample_size = msg["args"]
    if subsample_size is not None and subsample_size != size:
        raise UnsupportedModel(
            f"plate '{msg['name']}' takes a subsample of {subsample_size} of its {size} elements. "
            "A compiled posterior is of all data: remove subsample_size"
        )


def _check_site(msg: Message, observed: frozenset[str]) -> None:
    name, base = msg["name"], innermost(msg["fn"])
    if isinstance(base, dist.Unit):
        raise UnsupportedModel(
            f"site '{name}' is a numpyro.factor: it has no distribution to simulate data from. "
            "Write the term as the log density of an observed sample site"
        )
    if isinstance(base, dist.ImproperUniform):
        raise UnsupportedModel(
            f"site '{name}' has an improper prior (ImproperUniform), which cannot be simulated. "
            "Give it a proper distribution, however wide"
        )
    if msg.get("scale") is not None:
        raise UnsupportedModel(
            f"the log density of site '{name}' is rescaled (handlers.scale), so that the model is "
            "no longer a joint distribution that can be simulated. Remove the scale"
        )
    if msg["is_observed"] and name not in observed:
        raise UnsupportedModel(
            f"site '{name}' is given a value inside the model (obs=…) but is not among the "
            f"observed sites ({', '.join(sorted(observed)) or 'none'}). Name it in `observed`, and "
            "call the model without data"
        )
