"""Models with exact answers, compiled with small networks, once a process."""

from functools import cache
from unittest import mock

import jax
import numpy as np
import pytest

import retrodict as rd
from exact import ORACLES, PUMPS
from retrodict.graph.prior_draws import joint_draws
from retrodict.inference.methods import Inference
from retrodict.inference.planning import Plan
from retrodict.inference.samplers import first_choice
from retrodict.training.prior_datasets import simulate_datasets
from zoo import key

SMALL = rd.MADE(hidden=(24,), components=3, context=(16,))
QUICK = rd.Training(max_steps=250, batch_size=256, dataset_size=8192, heldout_size=2048)
NOTHING = rd.Training(max_steps=0, batch_size=256, dataset_size=2048, heldout_size=512)
RUNS, PARTICLES = 200, 400


# Many orders of magnitude, and an exact answer that takes long to work out, of which `rates` is a
# tame form; and a series that is read to its end at every step, which takes long to compile.
LONG = ("pumps", "look-ahead")
# Other methods are tried on the same model, or these on others.
LONG_RUNS = (
    ("hierarchy", "smc"),
    ("hierarchy", "divide"),
    ("rates", "importance"),
    ("coin", "importance"),
)


def group(name):
    """Tests of one model go to one worker, so that it is compiled once."""
    return pytest.mark.xdist_group(f"oracle {name}")


def slow_if(long):
    """Marks of a case that is left to `make slow` if it takes long."""
    return [pytest.mark.slow] if long else []


def runs():
    """Every model with every method that is tested on it."""
    return [
        pytest.param(
            name,
            method,
            marks=[group(name), *slow_if(name in LONG or (name, method) in LONG_RUNS)],
            id=f"{name}-{method}",
        )
        for name, oracle in ORACLES.items()
        for method in oracle.methods
    ]


def unplanned():
    """To plan takes as long as all the rest of compiling; most tests say which method they want."""
    return mock.patch.object(Inference, "plan", lambda self, *_: Plan(first_choice(self.proposal)))


@cache
def compiled(name, training=QUICK):
    model, observed, inverse, *_ = ORACLES[name]
    with unplanned():
        return rd.compile(
            key(), model, observed, inverse=inverse, estimator=SMALL, training=training,
            progress_bar=False,
        )  # fmt: skip


@cache
def data_of(name, training=QUICK):
    """One data set: a synthetic one; of the network, one that does not hang on rare events."""
    if name == "pumps":
        return PUMPS
    if name == "network":
        return {"xray": np.array(1), "dyspnoea": np.array(1)}
    graph = compiled(name, training).graph
    values = jax.jit(graph.program.simulate)(key(11))
    return {site: np.asarray(values[site]) for site in graph.observed}


@cache
def many_data_of(name):
    """Synthetic data sets, and their exact answers."""
    graph = compiled(name).graph
    values, _ = simulate_datasets(graph, joint_draws(graph), key(13), RUNS)
    data = {site: np.asarray(values[site]) for site in graph.observed}
    solve = cache(
        lambda *row: ORACLES[name].exact(dict(zip(data, map(np.array, row), strict=True)))
    )
    rows = zip(*(value.tolist() for value in data.values()), strict=True)
    return data, [solve(*map(_hashable, row)) for row in rows]


def _hashable(value):
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def repeated(data, times):
    return {site: np.repeat(np.asarray(value)[None], times, 0) for site, value in data.items()}
