"""The values that a factor's proposal may depend on."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from retrodict.graph.element_covariates import CovariateKey
from retrodict.graph.evaluation import CarryKey, Evaluation
from retrodict.graph.graph import Graph
from retrodict.graph.model_handler import carry_leaves
from retrodict.types import Values

NOTHING: Mapping[Any, Array] = {}
# A site by its name, a leaf of a scan's carry, or a covariate.
Source: TypeAlias = str | CarryKey | CovariateKey


class Scope(NamedTuple):
    """Values that a factor's proposal may depend on.

    Arrays of a scan's sites and carries have a leading axis of steps: of the whole series, or of
    the current step alone. Outside of time, `position` and `time` are None.

    Attributes:
        values: sites, observed or drawn before.
        covariates: constants that distinguish elements of a plate or series, see
            `retrodict.graph.element_covariates`.
        carries: what each step of a scan takes over from the one before, by leaf.
        position: of the current step along the axis of steps.
        time: its number in the series.
        carry: the scan's carry at this step as the model has it, if it exists.
    """

    values: Values
    covariates: Mapping[CovariateKey, Array] = NOTHING
    carries: Mapping[CarryKey, Array] = NOTHING
    position: Int[Array, ""] | None = None
    time: Int[Array, ""] | None = None
    carry: Any = None

    def at_step(self, step: Int[Array, ""]) -> "Scope":
        """The scope of one step, where arrays hold the whole series."""
        return self._replace(position=step, time=step)

    def array(self, source: Source) -> Array:
        """The array of a source."""
        if isinstance(source, str):
            return jnp.asarray(self.values[source])
        return self.carries[source] if isinstance(source, CarryKey) else self.covariates[source]

    def step_values(self, names: tuple[str, ...]) -> dict[str, Array]:
        """Values of some sites of the scan at the current step."""
        return {name: self.values[name][self.position] for name in names if name in self.values}

    @staticmethod
    def of_step(
        outer: Values,
        here: Values,
        covariates: Mapping[CovariateKey, Array],
        scan: int,
        time: Int[Array, ""],
        carry: Any,
    ) -> "Scope":
        """The scope of one step, where arrays hold only that step.

        Args:
            outer: values of sites outside of the scan.
            here: values of the scan's sites in this step, as far as they exist.
            covariates: those of sites in time already reduced to this step.
            scan: which scan.
            time: which step.
            carry: from the step before.
        """
        values = {**outer, **{name: value[None] for name, value in here.items()}}
        carries = {key: leaf[None] for key, leaf in carry_leaves(scan, carry).items()}
        return Scope(values, covariates, carries, jnp.array(0), time, carry)

    def with_values(self, values: Values) -> "Scope":
        """With further values, of the current step if there is one."""
        if self.position is not None:
            values = {name: jnp.asarray(value)[None] for name, value in values.items()}
        return self._replace(values={**self.values, **values})


def model_at(
    graph: Graph, latents: tuple[str, ...], scan: int | None, scope: Scope
) -> Callable[..., Evaluation]:
    """A function of the latents that runs the model, or its current step, given all other values.

    Sites without values are drawn with a fixed key; nothing that is used may depend on them.
    """
    program, key = graph.program, jax.random.key(0)
    inside = () if scan is None else program.scan_sites[scan]
    outer = {n: v for n, v in scope.values.items() if n in graph.sites and n not in inside}
    if scan is None:
        others = {name: value for name, value in outer.items() if name not in latents}

        def run(values: Values, **options: Any) -> Evaluation:
            return program.run(key, {**others, **values}, **options)

        return run
    here = {n: v for n, v in scope.step_values(inside).items() if n not in latents}
    carry, time = scope.carry, scope.time
    assert time is not None
    if carry is None:
        leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: program.initial_carry(scan, outer)))
        steps = [scope.carries[CarryKey(scan, n)][scope.position] for n in range(len(leaves))]
        carry = jax.tree.unflatten(tree, steps)

    def run_step(values: Values, *, only: Any = None, **options: Any) -> Evaluation:
        return program.step(key, scan, outer, time, carry, {**here, **values}, **options)[1]

    return run_step
