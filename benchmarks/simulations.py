"""A model in; simulations of it as real numbers in files, for peers that take nothing else, out.

Numbers are on scales that suit a network: positive latents and times by their logarithm, counts by
log(1 + y), the schools' effects relative to mean and scale, their scores by arcsinh(y / 10). A
density q of the logarithm u of x is the density q / x of x itself, so a loss in u plus the mean of
the sum of u over positive latents is the loss in x: `log_slope`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from retrodict.graph.graph import Graph
from retrodict.graph.prior_draws import joint_draws
from retrodict.training.prior_datasets import simulate_datasets

Values = Mapping[str, np.ndarray]
Columns = Callable[[Values], list[np.ndarray]]


def _relative(v: Values) -> list[np.ndarray]:
    mu, tau = v["mu"][:, None], v["tau"][:, None]
    return [mu, np.log(tau), (v["theta"] - mu) / tau]


# For each model, its latents and its data as real numbers.
LATENTS: dict[str, Columns] = {
    "pumps": lambda v: [np.log(v[name]) for name in ("alpha", "beta", "theta")],
    "schools": _relative,
    "regression": lambda v: [v[name] for name in ("w0", "w1", "w2")],
}
DATA: dict[str, Columns] = {
    "pumps": lambda v: [np.log(v["t"]), np.log1p(v["y"])],
    "schools": lambda v: [np.arcsinh(v["y"] / 10)],
    "regression": lambda v: [v["z"], v["t"]],
}


def _columns(values: Mapping[str, Any], how: Columns) -> np.ndarray:
    parts = how({name: np.asarray(value, np.float64) for name, value in values.items()})
    return np.concatenate([part.reshape(len(part), -1) for part in parts], 1)


def simulated(graph: Graph, number: int, seed: int = 11) -> dict[str, np.ndarray]:
    """So many joint draws of all sites."""
    draws, parts, found = joint_draws(graph), [], 0
    while found < number:
        size = min(number - found, 20_000)
        key = jax.random.fold_in(jax.random.key(seed), len(parts))
        made, _ = simulate_datasets(graph, draws, key, size)
        parts.append(made)
        found += size
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def log_slope(name: str, values: Values) -> float:
    """What to add to a mean loss in real coordinates, for one in the model's own."""
    if name == "regression":
        return 0.0
    assert name == "pumps", "the other models' losses are not compared"
    return float(_columns(values, LATENTS[name]).sum(1).mean())


def write(
    path: Path, name: str, values: Mapping[str, np.ndarray], observed: Mapping[str, Any] | None
) -> None:
    """Simulations, and a data set to be answered, as an .npz file."""
    kept = {"u": _columns(values, LATENTS[name]), "x": _columns(values, DATA[name])}
    if observed is not None:
        one = {site: np.asarray(value)[None] for site, value in observed.items()}
        kept["observed"] = _columns(one, DATA[name])[0]
    np.savez(path, **kept)
