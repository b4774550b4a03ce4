"""Simulations of a model as real vectors in files, for sbi.

Values are transformed to scales that suit a network: log for positive latents and times, log(1 + y)
for counts, (theta − mu) / tau for the schools' effects, arcsinh(y / 10) for their scores. With
u = log x, q(x) = q(u) / x: a loss in u plus the mean of Σ u over positive latents is the loss in x.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import prior_sampler
from retrodict.training.prior_datasets import simulate_datasets

Values = Mapping[str, np.ndarray]
Columns = Callable[[Values], list[np.ndarray]]


def _noncentred_schools(v: Values) -> list[np.ndarray]:
    mu, tau = v["mu"][:, None], v["tau"][:, None]
    return [mu, np.log(tau), (v["theta"] - mu) / tau]


# Real columns of the latents and of the data, by model.
LATENTS: dict[str, Columns] = {
    "pumps": lambda v: [np.log(v[name]) for name in ("alpha", "beta", "theta")],
    "schools": _noncentred_schools,
    "regression": lambda v: [v[name] for name in ("w0", "w1", "w2")],
}
DATA: dict[str, Columns] = {
    "pumps": lambda v: [np.log(v["t"]), np.log1p(v["y"])],
    "schools": lambda v: [np.arcsinh(v["y"] / 10)],
    "regression": lambda v: [v["z"], v["t"]],
}


def _columns(values: Mapping[str, Any], columns: Columns) -> np.ndarray:
    parts = columns({name: np.asarray(value, np.float64) for name, value in values.items()})
    return np.concatenate([part.reshape(len(part), -1) for part in parts], 1)


def simulate(graph: Graph, number: int, seed: int = 11) -> dict[str, np.ndarray]:
    """Simulate joint draws of all sites."""
    draws, parts = prior_sampler(graph), []
    for start in range(0, number, 20_000):
        key = jax.random.fold_in(jax.random.key(seed), len(parts))
        part, _ = simulate_datasets(graph, draws, key, min(number - start, 20_000))
        parts.append(part)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def mean_log_jacobian(name: str, values: Values) -> float:
    """The term to add to a mean loss in real coordinates to get the loss in the model's own."""
    if name == "regression":
        return 0.0
    assert name == "pumps", "the other models' losses are not compared"
    return float(_columns(values, LATENTS[name]).sum(1).mean())


def write(
    path: Path, name: str, values: Mapping[str, np.ndarray], observed: Mapping[str, Any] | None
) -> None:
    """Write simulations, and the data set to infer from, to an .npz file."""
    arrays = {"u": _columns(values, LATENTS[name]), "x": _columns(values, DATA[name])}
    if observed is not None:
        batch = {site: np.asarray(value)[None] for site, value in observed.items()}
        arrays["observed"] = _columns(batch, DATA[name])[0]
    np.savez(path, **arrays)
