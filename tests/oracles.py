"""Models with exact answers, compiled with small networks, once in each process."""

from functools import cache
from unittest import mock

import jax
import numpy as np
import pytest

import retrodict as rd
from exact import ORACLES, PUMPS
from retrodict.graph.prior_draws import prior_sampler
from retrodict.inference.planning import Plan, Planner
from retrodict.inference.samplers import first_choice
from retrodict.training.prior_datasets import simulate_datasets
from zoo import key

SMALL = rd.MADE(hidden=(24,), components=3, context=(16,))
QUICK = rd.Training(max_steps=250, batch_size=256, dataset_size=8192, heldout_size=2048)
UNTRAINED = rd.Training(max_steps=0, batch_size=256, dataset_size=2048, heldout_size=512)
RUNS, PARTICLES = 200, 400


# `pumps` spans many orders of magnitude, and its exact answer is slow; `rates` is a small version.
# `look-ahead` conditions every step on the rest of the series, and compiles slowly.
SLOW_MODELS = ("pumps", "look-ahead")
# The fast tests run other methods on these models, and these methods on other models.
SLOW_CASES = (
    ("hierarchy", "smc"),
    ("hierarchy", "divide"),
    ("rates", "importance"),
    ("coin", "importance"),
)


def group(name):
    """A mark that sends the tests of one model to one worker, which compiles it once."""
    return pytest.mark.xdist_group(f"oracle {name}")


def slow_if(condition):
    """The marks of a case that only `make slow` runs if the condition holds."""
    return [pytest.mark.slow] if condition else []


def method_cases():
    """Every model with every method that is tested on it."""
    return [
        pytest.param(
            name,
            method,
            marks=[group(name), *slow_if(name in SLOW_MODELS or (name, method) in SLOW_CASES)],
            id=f"{name}-{method}",
        )
        for name, oracle in ORACLES.items()
        for method in oracle.methods
    ]


def without_planning(plan=None):
    """A context in which compiled models get this plan, or the first choice without runs."""
    return mock.patch.multiple(
        Planner,
        lower=lambda self: [],
        plan=lambda self, *_: plan or Plan(first_choice(self.proposal)),
    )


@cache
def compiled(name, training=QUICK):
    model, observed, inverse, *_ = ORACLES[name]
    with without_planning():
        return rd.compile(
            key(), model, observed, inverse=inverse, estimator=SMALL, training=training,
            progress_bar=False,
        )  # fmt: skip


@cache
def example_data(name, training=QUICK):
    """One data set: simulated, except where a typical one says little about the latents."""
    if name == "pumps":
        return PUMPS
    if name == "network":
        return {"xray": np.array(1), "dyspnoea": np.array(1)}
    graph = compiled(name, training).graph
    values = jax.jit(graph.program.simulate)(key(11))
    return {site: np.asarray(values[site]) for site in graph.observed}


@cache
def example_datasets(name):
    """Simulated data sets, and their exact answers."""
    graph = compiled(name).graph
    values, _ = simulate_datasets(graph, prior_sampler(graph), key(13), RUNS)
    data = {site: np.asarray(values[site]) for site in graph.observed}
    solve = cache(
        lambda *row: ORACLES[name].exact(dict(zip(data, map(np.array, row), strict=True)))
    )
    rows = zip(*(value.tolist() for value in data.values()), strict=True)
    return data, [solve(*map(_hashable, row)) for row in rows]


def _hashable(value):
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def repeat_data(data, times):
    """The same data set along a leading axis."""
    return {site: np.repeat(np.asarray(value)[None], times, 0) for site, value in data.items()}
