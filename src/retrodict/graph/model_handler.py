"""The NumPyro handler that runs a model: it sets the value of every site and evaluates its density.

NumPyro's message dictionaries do not leave this file and `site_checks`.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from jaxtyping import Array, PRNGKeyArray
from numpyro import handlers
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.ops.pytree import PytreeTrace
from numpyro.primitives import _PYRO_STACK, Messenger

from retrodict.errors import UnsupportedModel
from retrodict.graph.distribution_parameters import innermost, parameters, unmasked, value_mask
from retrodict.graph.evaluation import (
    Axis,
    CarryKey,
    Evaluation,
    Expect,
    ModelStructure,
    SiteRecord,
)
from retrodict.graph.moments import moments
from retrodict.graph.site_checks import check_plate, check_site
from retrodict.graph.stable_log_prob import log_prob

if TYPE_CHECKING:
    from retrodict.graph.program import Program
from retrodict.types import Values

Message: TypeAlias = dict[str, Any]
NO_KEYS: Mapping[str, PRNGKeyArray] = MappingProxyType({})
NO_VALUES: Values = MappingProxyType({})


class ScanEntry(NamedTuple):
    """A scan at the point where the model starts it: step, first carry, inputs."""

    body: Callable[..., tuple[Any, Any]]
    init: Any
    xs: Any


class StopModel(Exception):  # noqa: N818 (it is no error)
    """Ends a run of the model early, with a result."""

    def __init__(self, result: Any) -> None:
        self.result = result
        super().__init__()


class ModelHandler(Messenger):
    """Sets the value of every site, evaluates its density, and runs scans.

    It is the outermost handler: the model's own plates, masks, scopes and reparameterisations
    process each message before it. For the options see `Program.run`.

    Args:
        program: the model.
        rng_key: for sites without a value; None to refuse them.
        values: of sites.
        structure: is filled in during the run.
        scan: the number of the scan whose step is run.
        stop_at: the number of a scan, and what to call when the model reaches it.
    """

    def __init__(
        self,
        program: "Program",
        rng_key: PRNGKeyArray | None,
        values: Values,
        structure: ModelStructure,
        scan: int | None,
        stop_at: "tuple[int, Callable[[ScanEntry], None]] | None" = None,
        keys: Mapping[str, PRNGKeyArray] = NO_KEYS,
        expect: Expect | None = None,
        only: frozenset[str] | None = None,
        scored_at: Values = NO_VALUES,
    ) -> None:
        self.program = program
        self.rng_key = rng_key
        self.values = values
        self.structure = structure
        self.scan = scan
        self.stop_at = stop_at
        self.expect = expect
        self.keys = keys
        self.only = only
        self.scored_at = scored_at
        self.result = Evaluation.empty()
        super().__init__()

    def process_message(self, msg: Message) -> None:
        """Process a site, a plate or a scan."""
        match msg["type"]:
            case "sample":
                self._sample(msg)
            case "deterministic":
                self._deterministic(msg["name"], msg["value"])
            case "plate":
                check_plate(msg)
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
        check_site(msg)
        if isinstance(innermost(fn), dist.Delta):
            msg["value"] = fn(rng_key=None, sample_shape=())
            self._deterministic(name, msg["value"])
            return
        self._check_new(name)
        if msg["is_observed"]:
            self.result.obs_values[name] = jnp.asarray(msg["value"])
        sample_shape = msg["kwargs"].get("sample_shape", ())
        if not sample_shape:
            msg["fn"] = fn = self._broadcast(msg)
        mask = value_mask(fn, fn.shape(sample_shape))
        if mask is not None:
            self.result.masks[name] = mask
            observed = msg["is_observed"] or name in self.program.observed
            if not observed and not self.program.mask_latents:
                msg["fn"] = fn = unmasked(fn)
        if self.expect is not None:
            self.result.moments[name] = moments(fn, sample_shape)
        if name in self.values:
            value = jnp.asarray(self.values[name])
        elif self.expect is not None and name in self.expect:
            value = self.expect[name](self.result.moments[name])
        else:
            value = fn(rng_key=self._key(name), sample_shape=sample_shape)
            if mask is not None and name in self.program.filled:
                constant = self.program.filled[name].feasible_like(value)
                value = jnp.where(mask, value, constant.astype(value.dtype))
        msg["value"] = value
        self._record(msg, value, masked=mask is not None)
        self.result.values[name] = value
        if self.only is None or name in self.only:
            self._score(msg, jnp.asarray(self.scored_at.get(name, value)))
            self._end_if_done()

    def _key(self, name: str) -> PRNGKeyArray:
        """The key that a site is drawn with."""
        if name in self.keys:
            return self.keys[name]
        if self.rng_key is None:
            raise KeyError(f"no value for site '{name}', and no key to draw one with")
        draw_key: PRNGKeyArray
        self.rng_key, draw_key = jax.random.split(self.rng_key)
        return draw_key

    def _broadcast(self, msg: Message) -> dist.Distribution:
        """The distribution broadcast to the shape of the site's data, where that is known."""
        fn: dist.Distribution = msg["fn"]
        if msg["name"] in self.program.data_shapes:
            shape = self.program.data_shapes[msg["name"]][0 if self.scan is None else 1 :]
        elif msg["is_observed"]:
            shape = jnp.shape(msg["value"])
        else:
            return fn
        batch_ndim = max(len(shape) - fn.event_dim, 0)
        try:
            batch_shape = jnp.broadcast_shapes(shape[:batch_ndim], fn.batch_shape)
            jnp.broadcast_shapes(shape[batch_ndim:], fn.event_shape)
        except ValueError as error:
            raise UnsupportedModel(
                f"site '{msg['name']}': its data have shape {tuple(shape)}, which does not fit its "
                f"distribution, of shape {fn.shape()}. State the shape of the data in `observed`"
            ) from error
        return fn if batch_shape == fn.batch_shape else fn.expand(batch_shape)

    def _end_if_done(self) -> None:
        """Stop when all sites in `only` have their densities; not from inside of a scan."""
        if not self.only or self.scan is not None:
            return
        if self.only <= set(self.result.log_density):
            raise StopModel(None)

    def _score(self, msg: Message, value: Array) -> None:
        name, fn = msg["name"], msg["fn"]
        batch_shape = value.shape[: value.ndim - fn.event_dim]
        # Moments serve guides only, for which NumPyro's density is accurate enough.
        density = log_prob(fn, value) if self.expect is None else fn.log_prob(value)
        if name in self.program.guarded:
            density = jnp.where(fn.support(value), density, -jnp.inf)
        density = jnp.broadcast_to(density, batch_shape)
        index_positions = {axis.position for axis in self.structure.sites[name].axes}
        coordinates = tuple(i for i in range(len(batch_shape)) if i not in index_positions)
        self.result.log_density[name] = density.sum(coordinates)
        self.result.support_bounds[name] = [jnp.asarray(b) for b in jax.tree.leaves(fn.support)]
        self.result.parameters[name] = parameters(fn, batch_shape)

    def _record(self, msg: Message, value: Array, *, masked: bool) -> None:
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
        self.structure.sites[name] = SiteRecord(
            name=name,
            distribution=type(innermost(fn)).__name__,
            fn=fn,
            support=fn.support,
            sample_shape=tuple(msg["kwargs"].get("sample_shape", ())),
            frames=tuple(msg["cond_indep_stack"]),
            axes=axes,
            scan=self.scan,
            has_obs=msg["is_observed"],
            masked=masked,
        )
        self.structure.order.append(name)

    def _deterministic(self, name: str, value: Any) -> None:
        self._check_new(name)
        self.structure.order.append(name)
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
        number = len(self.structure.scan_lengths)
        if length is None:
            length = jax.tree.leaves(xs)[0].shape[0]
        self.structure.scan_lengths.append(length)
        self.structure.reversed_scans.append(reverse)

        names = self.program.scan_sites[number] if number < len(self.program.scan_sites) else ()
        values, scored_at = (
            {name: jnp.asarray(arrays[name]) for name in names if name in arrays}
            for arrays in (self.values, self.scored_at)
        )
        step_keys = None
        if self.rng_key is not None:
            self.rng_key, scan_key = jax.random.split(self.rng_key)
            step_keys = jax.random.split(scan_key, length)
        step = _masked(step, _stack_above(self))
        for kind, values_of_sites in msg["kwargs"].get("substitute_stack", ()):
            step, xs = _conditioned(step, xs, length, kind, values_of_sites)

        body = self._scan_body(number, step)
        if self.stop_at is not None and self.stop_at[0] == number:
            self.stop_at[1](ScanEntry(body, init, xs))
        carry, (result, carries, ys) = lax.scan(
            body, init, (step_keys, xs, values, scored_at), length=length, reverse=reverse
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
            handler = ModelHandler(
                self.program,
                step_key,
                step_values,
                self.structure,
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


def _no_trace() -> Any:
    """An empty trace: NumPyro's scan has no messages left to process."""
    make: Callable[..., Any] = PytreeTrace
    return make({})


def _stack_above(handler: Messenger) -> list[Messenger]:
    """The model's handlers that are active where a message was sent."""
    return list(_PYRO_STACK[_PYRO_STACK.index(handler) + 1 :])


def _masked(
    step: Callable[[Any, Any], Any], handlers_around: list[Messenger]
) -> Callable[[Any, Any], Any]:
    """Apply the masks and scales around a scan inside each step."""
    for handler in handlers_around:
        if isinstance(handler, handlers.mask):
            step = handlers.mask(step, mask=handler.mask)
        elif isinstance(handler, handlers.scale):
            step = handlers.scale(step, scale=handler.scale)
    return step


def _conditioned(
    step: Callable[[Any, Any], Any], xs: Any, length: int, kind: str, values: Any
) -> tuple[Callable[[Any, Any], Any], Any]:
    """Apply `handlers.condition` or `substitute` around a scan inside each step.

    Values of single steps become further inputs of the scan.
    """
    if callable(values) or kind not in ("condition", "substitute"):
        raise UnsupportedModel(
            f"the model applies handlers.{kind} to a scan by a function or a trace. Pass the data "
            "of the scan's sites as `data=`, or as obs inside the step"
        )
    series = {name: v for name, v in values.items() if jnp.shape(v)[:1] == (length,)}

    def new_step(carry: Any, inputs: Any) -> Any:
        x, at_step = inputs

        def value(msg: Message) -> Any:
            name = msg.get("name")
            if msg["type"] != "sample" or name not in values:
                return None
            shape = msg["fn"].shape(msg["kwargs"]["sample_shape"])
            return values[name] if jnp.ndim(values[name]) <= len(shape) else at_step[name]

        if kind == "condition":
            return handlers.condition(step, condition_fn=value)(carry, x)
        return handlers.substitute(step, substitute_fn=value)(carry, x)

    return new_step, (xs, series)
