"""Train a model of the paper by a recipe; print each network's held-out loss over time as JSON.

`python -m benchmarks.compiling_worker RECIPE MODEL SECONDS`, for `benchmarks.compiling`. The recipe
`ours` is `rd.compile` with default options. `raw` is the paper's recipe (sec. 3.4 and 5) built from
retrodict's parts: the paper's inverse and sizes, rectified linear units, concatenated and unscaled
inputs instead of pooled and scaled ones, latents neither standardised nor reordered, no guides,
Adam with the constant rate 1e-3 without clipping or averaging, and new data for every pass.
`scaled` is the same with retrodict's scaling of inputs and latents. All recipes transform bounded
latents to the real line: Gaussians on the latents themselves would have mass outside the bounds.
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
from retrodict.estimators.encoders import Context, Elements, Encoder, Set
from retrodict.estimators.features import BatchMask, Scaling, Value, ValueEncoder
from retrodict.proposal.proposal import Proposal
from retrodict.training import train
from retrodict.training.schedule import LearningRateSchedule, StepSettings
from retrodict.training.simulate import Simulator


class Setup(NamedTuple):
    """A model of the paper, and the paper's inverse and network sizes for it."""

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
    """Pass values through without scaling."""

    def __call__(self, x: Array) -> Array:
        """Flatten the value."""
        return jnp.ravel(jnp.asarray(x)).astype(float)

    def fit(self, x: Array, exists: BatchMask) -> "UnscaledEncoder":
        """Return the encoder: there is nothing to fit."""
        return self


class ConcatenationEncoder(eqx.Module):
    """Concatenate the features of all elements of a plate of fixed size."""

    spec: Set = eqx.field(static=True)
    number: int = eqx.field(static=True)
    elements: tuple[Encoder, ...]

    @property
    def size(self) -> int:
        """Number of features."""
        return self.number * sum(element.size for element in self.elements)

    def __call__(self, context: Context | Elements) -> Array:
        """Features of all elements."""
        features, _ = encoders._encode_elements(self, context)
        return jnp.ravel(features)

    def fit(self, context: Context | Elements, exists: BatchMask) -> "ConcatenationEncoder":
        """Fit the scalings of the elements."""
        values, _ = encoders.as_elements(self.spec, context)
        parts = encoders.element_values(self.spec, values)
        fitted = [
            encoders.fit_encoder(e, part, exists)
            for e, part in zip(self.elements, parts, strict=True)
        ]
        return ConcatenationEncoder(self.spec, self.number, tuple(fitted))


def patch_to_paper_recipe(setup: Setup, scaled: bool) -> None:
    """Replace, in this process, what differs from the paper's recipe."""
    build_default = encoders.build_encoder

    def build(rng: np.random.Generator, spec: Any, sizes: Any) -> Any:
        if isinstance(spec, Set):
            parts = tuple(build(rng, element, sizes) for element in spec.elements)
            return ConcatenationEncoder(spec, setup.elements, parts)
        if isinstance(spec, Value) and not scaled:
            return UnscaledEncoder(spec, Scaling.unit(int(np.prod(spec.shape, dtype=int))))
        return build_default(rng, spec, sizes)

    def unit(rows: Array, exists: BatchMask = None) -> Scaling:
        return Scaling.unit(rows.shape[1])

    def constant(self: Any, step: int, seconds: float, num_batches: int) -> StepSettings:
        return StepSettings(jnp.full(num_batches, 1e-3), jnp.zeros(num_batches))

    conditional.build_encoder = build
    if not scaled:
        Scaling.fit = staticmethod(unit)
    LearningRateSchedule.next_pass = constant
    made.AutoregressiveNetwork.is_residual = lambda self, layer: False
    jax.nn.silu = jax.nn.relu


class LossRecorder:
    """Record the time and the held-out loss after every pass."""

    def __init__(self) -> None:
        self.start_time = time.perf_counter()
        self.curve: list[tuple[float, float]] = []

    def __call__(self, history: Any, _: float) -> None:
        """Record the last loss."""
        self.curve.append((time.perf_counter() - self.start_time, history.loss[-1]))


def train_recipe(recipe: str, name: str, seconds: float) -> Mapping[str, Any]:
    """Train all networks of the proposal; return their loss curves and the time for setup."""
    setup, start_time = SETUPS[name], time.perf_counter()
    graph = rd.trace(setup.model, setup.observed)
    training = rd.Training(max_steps=10_000_000)
    if recipe == "ours":
        proposal, estimator = Proposal.of(rd.invert(graph)), MADE()
    else:
        patch_to_paper_recipe(setup, recipe == "scaled")
        proposal = Proposal.of(rd.invert(graph, setup.inverse), facts={})
        estimator = MADE(hidden=setup.hidden, components=setup.components, context=())
        training = rd.Training(max_steps=10_000_000, passes=1, clip=1e9, halvings=0)
    density_networks = {s.network for s in proposal.estimated.values()}
    shared = {n: a for n, a in proposal.networks().items() if n in density_networks}
    draws, results = proposal.sample_prior, []
    setup_seconds = time.perf_counter() - start_time
    for number, (network_name, structures) in enumerate(shared.items()):
        key = jax.random.fold_in(jax.random.key(0), number)
        recorder = LossRecorder()
        network = proposal.build(estimator, key, structures)
        train.train_network(
            key,
            network,
            Simulator(graph, tuple(structures), proposal.covariates, training.copies, draws),
            training,
            max_seconds=(seconds - setup_seconds) / len(shared),
            report=recorder,
        )
        # The factorial HMM's loss is that of one step.
        copies = sum(structure.copies.number for structure in structures)
        results.append(
            {
                "network": network_name,
                "copies": 1 if name == "fhmm" else copies,
                "learns": conditional.has_weights(network),
                "curve": recorder.curve,
            }
        )
    return {"setup": setup_seconds, "networks": results}


def main() -> None:
    """Train and print the curves."""
    recipe, name, seconds = sys.argv[1:]
    print(json.dumps(train_recipe(recipe, name, float(seconds))))


if __name__ == "__main__":
    main()
