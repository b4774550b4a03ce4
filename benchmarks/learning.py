"""A model of the paper and a recipe in; held-out loss over time out, as JSON, network by network.

`python -m benchmarks.learning RECIPE MODEL SECONDS`, for `benchmarks.compiling`. `ours` is what
`rd.compile` does with default options. `raw` is the paper's recipe (sec. 3.4 and 5) with our parts:
its inverse and its sizes, rectified units, plain inputs side by side in place of pooled and scaled
ones, latents neither standardised nor reordered, no guides, Adam at a constant 1e-3 without
clipping or averaging, and every pass over new data. `scaled` is the same with our scaling of inputs
and latents. Latents with bounds are on the real line in all of them: Gaussians on a rate itself
would have mass where it cannot be.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import retrodict as rd
from retrodict.demos import models
from retrodict.estimators import conditional, encoders, made
from retrodict.estimators.conditional import MADE
from retrodict.estimators.encoders import Context, Encoder, Set
from retrodict.estimators.features import Scaling, Value, ValueEncoder
from retrodict.proposal.proposal import Proposal
from retrodict.training import train
from retrodict.training.schedule import LearningRateSchedule, StepSettings
from retrodict.training.simulate import Simulator


class Setup(NamedTuple):
    """A model of the paper, and how the paper compiles it."""

    model: Any
    observed: tuple[str, ...]
    inverse: str
    hidden: tuple[int, ...]
    components: int
    elements: int = 1  # in a plate


SETUPS = {
    "regression": Setup(models.regression, ("z", "t"), "blanket", (300, 300), 3, 10),
    "pumps": Setup(models.pumps, ("t", "y"), "blanket", (500, 500), 10, 10),
    "fhmm": Setup(models.fhmm, ("y",), "filter", (300,) * 4, 1),
}


class Plain(ValueEncoder):
    """A value as it is."""

    def __call__(self, x: Array) -> Array:
        """The value's numbers."""
        return jnp.ravel(jnp.asarray(x)).astype(float)

    def fit(self, x: Array, there: Array | None) -> "Plain":
        """Nothing to learn."""
        return self


class SideBySide(eqx.Module):
    """All elements of a plate of known size, one after the other."""

    spec: Set = eqx.field(static=True)
    number: int = eqx.field(static=True)
    elements: tuple[Encoder, ...]

    @property
    def size(self) -> int:
        """How many features."""
        return self.number * sum(element.size for element in self.elements)

    def __call__(self, context: Context) -> Array:
        """Features of all elements."""
        features, _ = encoders._encode_elements(self, context)
        return jnp.ravel(features)

    def fit(self, context: Context, there: Array | None) -> "SideBySide":
        """Learn the scalings of the elements."""
        parts = encoders.parts_of(self.spec, context)
        fitted = [
            encoders.fit_encoder(e, part, there)
            for e, part in zip(self.elements, parts, strict=True)
        ]
        return SideBySide(self.spec, self.number, tuple(fitted))


def follow_the_paper(setup: Setup, scaled: bool) -> None:
    """Take out of this process what the paper does not have."""
    built = encoders.build_encoder

    def build(rng: np.random.Generator, spec: Any, sizes: Any) -> Any:
        if isinstance(spec, Set):
            parts = tuple(build(rng, element, sizes) for element in spec.elements)
            return SideBySide(spec, setup.elements, parts)
        if isinstance(spec, Value) and not scaled:
            return Plain(spec, Scaling.unit(int(np.prod(spec.shape, dtype=int))))
        return built(rng, spec, sizes)

    def unit(rows: Array, there: Array | None = None) -> Scaling:
        return Scaling.unit(rows.shape[1])

    def constant(self: Any, step: int, seconds: float, batches: int) -> StepSettings:
        return StepSettings(jnp.full(batches, 1e-3), jnp.zeros(batches))

    conditional.build_encoder = build
    if not scaled:
        Scaling.fit = staticmethod(unit)
    LearningRateSchedule.next_pass = constant
    made.Autoregressive._residual = lambda self, layer: False
    jax.nn.silu = jax.nn.relu


def learned(recipe: str, name: str, seconds: float) -> Mapping[str, Any]:
    """Curves of all networks that the density of the latents is made of, and the time before."""
    setup, begun = SETUPS[name], time.perf_counter()
    graph = rd.trace(setup.model, setup.observed)
    training = rd.Training(max_steps=10_000_000)
    if recipe == "ours":
        proposal, estimator = Proposal.of(rd.invert(graph)), MADE()
    else:
        follow_the_paper(setup, recipe == "scaled")
        proposal = Proposal.of(rd.invert(graph, setup.inverse), facts={})
        estimator = MADE(hidden=setup.hidden, components=setup.components, context=())
        training = rd.Training(max_steps=10_000_000, passes=1, clip=1e9, halvings=0)
    used = {str(assembly.factor.network) for assembly in proposal.assemblies.values()}
    shared = {n: a for n, a in proposal.networks().items() if n in used}
    draws, found = proposal.draws, []
    setup_seconds = time.perf_counter() - begun
    for number, (network, assemblies) in enumerate(shared.items()):
        started, curve = time.perf_counter(), []

        def note(history: Any, _: float, started: float = started, curve: Any = curve) -> None:
            curve.append((time.perf_counter() - started, history.loss[-1]))

        key = jax.random.fold_in(jax.random.key(0), number)
        made = proposal.build(estimator, key, assemblies)
        train.train_network(
            key,
            made,
            Simulator(graph, tuple(assemblies), proposal.designs, training.copies, draws),
            training,
            max_seconds=(seconds - setup_seconds) / len(shared),
            report=note,
        )
        copies = sum(int(np.prod(a.copies, dtype=int)) for a in assemblies)
        if name == "fhmm":
            copies = 1  # of one step, for all are alike
        about = {"network": network, "copies": copies, "learns": conditional.learns(made)}
        found.append(about | {"curve": curve})
    return {"setup": setup_seconds, "networks": found}


def main() -> None:
    """Train, and write the curves."""
    recipe, name, seconds = sys.argv[1:]
    print(json.dumps(learned(recipe, name, float(seconds))))


if __name__ == "__main__":
    main()
