"""Held-out loss over time of a model of the paper, trained by some recipe, as JSON.

`python -m benchmarks.learning RECIPE MODEL SECONDS`, for `benchmarks.compiling`. `ours` is
`rd.compile` with default options. `raw` is the paper's recipe (sec. 3.4 and 5) with our components:
its inverse and its sizes, rectified units, concatenated inputs in place of pooled and scaled ones,
latents neither standardised nor reordered, no guides, Adam at a constant 1e-3 without clipping or
averaging, and every pass over new data. `scaled` is the same with our scaling of inputs and
latents. Bounded latents are mapped to the real line in all recipes: Gaussians on a rate itself
would have mass outside its support.
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
from retrodict.estimators.conditional import MADE, has_weights
from retrodict.estimators.encoders import Context, Elements, Encoder, Set
from retrodict.estimators.estimator import Estimator
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


class UnscaledEncoder(ValueEncoder):
    """The values themselves."""

    def __call__(self, x: Array) -> Array:
        """The value as a vector."""
        return jnp.ravel(jnp.asarray(x)).astype(float)

    def fit(self, x: Array, exists: Array | None) -> "UnscaledEncoder":
        """There is nothing to fit."""
        return self


class ConcatenatingEncoder(eqx.Module):
    """The features of all elements of a plate of fixed size, concatenated."""

    spec: Set = eqx.field(static=True)
    number: int = eqx.field(static=True)
    elements: tuple[Encoder, ...]

    @property
    def size(self) -> int:
        """The number of features."""
        return self.number * sum(element.size for element in self.elements)

    def __call__(self, context: Context | Elements) -> Array:
        """Features of all elements."""
        features, _ = encoders._encode_elements(self, context)
        return jnp.ravel(features)

    def fit(self, context: Context | Elements, exists: Array | None) -> "ConcatenatingEncoder":
        """Fit the scalings of the elements."""
        values = encoders.as_elements(self.spec, context).values
        parts = encoders.element_values(self.spec, values)
        fitted = [
            encoders.fit_encoder(e, part, exists)
            for e, part in zip(self.elements, parts, strict=True)
        ]
        return ConcatenatingEncoder(self.spec, self.number, tuple(fitted))


def follow_the_paper(setup: Setup, scaled: bool) -> None:
    """Replace in this process what the paper does not have."""
    build_default = encoders.build_encoder

    def build(rng: np.random.Generator, spec: Any, sizes: Any) -> Any:
        if isinstance(spec, Set):
            parts = tuple(build(rng, element, sizes) for element in spec.elements)
            return ConcatenatingEncoder(spec, setup.elements, parts)
        if isinstance(spec, Value) and not scaled:
            return UnscaledEncoder(spec, Scaling.unit(int(np.prod(spec.shape, dtype=int))))
        return build_default(rng, spec, sizes)

    def unit(rows: Array, exists: Array | None = None) -> Scaling:
        return Scaling.unit(rows.shape[1])

    def constant(self: Any, step: int, seconds: float, batches: int) -> StepSettings:
        return StepSettings(jnp.full(batches, 1e-3), jnp.zeros(batches))

    conditional.build_encoder = build
    if not scaled:
        Scaling.fit = staticmethod(unit)
    LearningRateSchedule.next_pass = constant
    made.AutoregressiveNetwork.is_residual = lambda self, layer: False
    jax.nn.silu = jax.nn.relu


def learning_curves(recipe: str, name: str, seconds: float) -> Mapping[str, Any]:
    """Train all networks that the density of the latents consists of; curves and setup time."""
    setup, start = SETUPS[name], time.perf_counter()
    graph = rd.trace(setup.model, setup.observed)
    training = rd.Training(max_steps=10_000_000)
    if recipe == "ours":
        proposal, estimator = Proposal.of(rd.invert(graph)), MADE()
    else:
        follow_the_paper(setup, recipe == "scaled")
        proposal = Proposal.of(rd.invert(graph, setup.inverse), facts={})
        estimator = MADE(hidden=setup.hidden, components=setup.components, context=())
        training = rd.Training(max_steps=10_000_000, passes=1, clip=1e9, halvings=0)
    used = {structure.network for structure in proposal.estimated.values()}
    shared = {name: s for name, s in proposal.networks().items() if name in used}
    setup_seconds, results = time.perf_counter() - start, []
    for number, (network, structures) in enumerate(shared.items()):
        key = jax.random.fold_in(jax.random.key(0), number)
        untrained = proposal.build(estimator, key, structures)
        simulator = Simulator(
            graph, tuple(structures), proposal.covariates, training.copies, proposal.sample_prior
        )
        limit = (seconds - setup_seconds) / len(shared)
        curve = train_with_curve(key, untrained, simulator, training, limit)
        # All steps of the factorial HMM are alike: count one.
        copies = 1 if name == "fhmm" else sum(structure.copies.number for structure in structures)
        about = {"network": network, "copies": copies, "learns": has_weights(untrained)}
        results.append(about | {"curve": curve})
    return {"setup": setup_seconds, "networks": results}


def train_with_curve(
    key: Array, network: Estimator, simulator: Simulator, training: rd.Training, seconds: float
) -> list[tuple[float, float]]:
    """Train a network; seconds and held-out loss after every pass."""
    start, curve = time.perf_counter(), []

    def note(history: Any, _: float) -> None:
        curve.append((time.perf_counter() - start, history.loss[-1]))

    train.train_network(key, network, simulator, training, max_seconds=seconds, report=note)
    return curve


def main() -> None:
    """Train and print the curves."""
    recipe, name, seconds = sys.argv[1:]
    print(json.dumps(learning_curves(recipe, name, float(seconds))))


if __name__ == "__main__":
    main()
