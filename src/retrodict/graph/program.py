"""A NumPyro model as pure functions: joint draws, log densities, deterministic values.

The factors f_i and g_j of the joint density, eq. (1) of Paige & Wood (2016), sec. 2, are
`Evaluation.log_density`.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray
from numpyro.distributions.distribution import validation_enabled

from retrodict._xla.jit import run_once
from retrodict.errors import UnsupportedModel
from retrodict.graph.evaluation import Evaluation, Expect, ModelStructure
from retrodict.graph.model_handler import NO_KEYS, NO_VALUES, ModelHandler, ScanEntry, StopModel
from retrodict.types import Values

Result = TypeVar("Result")
# NumPyro's stack of handlers is shared by all threads, and programs are traced in several.
_MODEL_LOCK = RLock()


@dataclass(frozen=True)
class Program:
    """A model with its arguments, as functions of site values.

    Attributes:
        model: the NumPyro model.
        args, kwargs: what it is called with: sizes and fixed covariates, no data.
        observed: the names of the sites that will be data.
        data_shapes: the shapes of data that the user states; a site's distribution is broadcast.
        scan_sites: for each scan, in program order, the sites inside it.
        guarded: sites whose support depends on other sites, so that a value can lie outside it.
        filled: the supports of the observed sites whose masked entries are replaced by a constant.
        mask_latents: whether masks apply to latent sites, see `masks`.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    observed: frozenset[str] = frozenset()
    data_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    scan_sites: tuple[tuple[str, ...], ...] = ()
    guarded: frozenset[str] = frozenset()
    filled: Mapping[str, Any] = field(default_factory=dict)
    mask_latents: bool = False

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
        values: Values,
        structure: ModelStructure | None = None,
        *,
        keys: Mapping[str, PRNGKeyArray] = NO_KEYS,
        expect: Expect | None = None,
        only: Collection[str] | None = None,
        scored_at: Values = NO_VALUES,
    ) -> Evaluation:
        """Run the model once.

        Args:
            rng_key: for the sites without a value; None if there are none.
            values: of sites; the others are drawn.
            structure: is filled in, if given.
            keys: keys of sites that are drawn with a key of their own, so that a population can
                split all keys of one site at once.
            expect: functions from the moments of a site's distribution to its value.
            only: evaluate the densities of these sites only, and stop after the last of them. XLA
                removes unused results, but tracing them takes time.
            scored_at: values at which densities are evaluated, while children depend on `values`:
                shows how a density depends on the site's own values at earlier steps.
        """
        handler = ModelHandler(
            self,
            rng_key,
            values,
            structure or ModelStructure(),
            None,
            keys=keys,
            expect=expect,
            only=None if only is None else frozenset(only),
            scored_at=scored_at,
        )
        # NumPyro's checks of values have tolerances that a float32 simplex can miss, and depend on
        # how Python was started; supports are checked where that is needed, see `guarded`.
        checks = nullcontext() if structure is not None else validation_enabled(False)
        with _MODEL_LOCK, suppress(StopModel), checks, handler:
            self.model(*self.args, **self.kwargs)
        return handler.result

    def initial_carry(self, scan: int, outer: Values) -> Any:
        """The carry that the first step of a scan starts from, given the sites before it."""
        return self._enter(scan, outer, lambda entry: entry.init)

    def step(
        self,
        rng_key: PRNGKeyArray | None,
        scan: int,
        outer: Values,
        time: Array,
        carry: Any,
        values: Values,
        *,
        keys: Mapping[str, PRNGKeyArray] = NO_KEYS,
        expect: Expect | None = None,
    ) -> tuple[Any, Evaluation]:
        """One step of a scan: the carry after it, and the values and densities of its sites.

        Its cost does not depend on the length of the scan.

        Args:
            rng_key: for the step's sites without a value.
            scan: which scan.
            outer: values of the sites before it.
            time: the number of the step, for the inputs of the scan.
            carry: after the step before.
            values: of the step's sites.
            keys, expect: see `run`.
        """

        def visit(entry: ScanEntry) -> tuple[Any, Evaluation]:
            x = jax.tree.map(lambda leaf: jnp.asarray(leaf)[time], entry.xs)
            carry_after, (result, _, _) = entry.body(carry, (rng_key, x, values, {}), keys)
            return carry_after, result

        return self._enter(scan, outer, visit, expect)

    def _enter(
        self,
        scan: int,
        outer: Values,
        visit: "Callable[[ScanEntry], Result]",
        expect: Expect | None = None,
    ) -> "Result":
        """Run the model up to a scan, and return the result of `visit` there."""

        def stop(entry: ScanEntry) -> None:
            raise StopModel(visit(entry))

        handler = ModelHandler(
            self, None, outer, ModelStructure(), scan=None, expect=expect, stop_at=(scan, stop)
        )
        try:
            with _MODEL_LOCK, validation_enabled(False), handler:
                self.model(*self.args, **self.kwargs)
        except StopModel as stopped:
            result: Result = stopped.result
            return result
        raise ValueError(f"the model has no scan number {scan}")

    def inspect(self) -> tuple["Program", ModelStructure]:
        """Read the model's structure without computing any value.

        Returns:
            The program with the sites of each scan filled in, and the structure.

        Raises:
            UnsupportedModel: the model cannot be compiled.
        """
        structure = self._inspect_once()
        names, second = list(structure.sites), list(self._inspect_once(only=()).sites)
        if names != second:
            changed = sorted(set(names) ^ set(second)) or names
            raise UnsupportedModel(
                f"the model's structure changes from draw to draw: two runs differ in the sites "
                f"{', '.join(changed)}. Every run must visit the same sites in the same order; "
                "write random branches with jnp.where or a mixture distribution"
            )
        scan_sites = tuple(
            tuple(name for name, site in structure.sites.items() if site.scan == number)
            for number in range(len(structure.scan_lengths))
        )
        return replace(self, scan_sites=scan_sites), structure

    def constant_results(
        self, structure: ModelStructure, result: Callable[[Evaluation], Result]
    ) -> Result:
        """A part of the result of a run, other than densities, that depends on no value."""

        def evaluate(values: Values) -> Result:
            return result(self.run(None, values, only=()))

        shapes = structure.shapes.items()
        zeros = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes}
        constants: Result = run_once(evaluate, zeros)
        return constants

    def _inspect_once(self, only: Collection[str] | None = None) -> ModelStructure:
        structure = ModelStructure()

        def draw(rng_key: PRNGKeyArray) -> dict[str, Array]:
            return self.run(rng_key, {}, structure, only=only).values

        try:
            structure.shapes.update(jax.eval_shape(draw, jax.random.key(0)))
        except UnsupportedModel:
            raise
        except (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
            jax.errors.TracerIntegerConversionError,
        ) as error:
            raise UnsupportedModel(
                "the model's structure changes from draw to draw: Python control flow (if, for, "
                f"int(), numpy) looks at a random value{_after(structure)}. Write the branch with "
                "jnp.where, and use jax.numpy in place of numpy on random values"
            ) from error
        except Exception as error:
            raise UnsupportedModel(
                f"the model raised {type(error).__name__} when it was run without data"
                f"{_after(structure)}: {error}. It was called with model_args={self.args!r} and "
                f"model_kwargs={dict(self.kwargs)!r}; arguments that carry data should default to "
                "None and sizes should be arguments of their own"
            ) from error
        if not structure.sites:
            raise UnsupportedModel("the model has no sample sites")
        return structure


def _after(structure: ModelStructure) -> str:
    return f" (after site '{list(structure.sites)[-1]}')" if structure.sites else ""
