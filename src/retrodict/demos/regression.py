"""A curve through ten points (Paige & Wood 2016, sec. 5.1), and fig. 5 drawn anew.

One set of weights answers every data set. Shown for several of them: curves from MCMC, from the raw
network, and from the network with its draws weighted.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC, NUTS

import retrodict as rd
from retrodict.demos.answers import reference, table
from retrodict.demos.models import regression

NAMES = ("w0", "w1", "w2")
CURVES = 40


def run(folder: Path, minutes: float | None, progress_bar: bool) -> str:
    """Compile, infer, draw, compare."""
    known = reference("regression")
    compiled = rd.compile(
        jax.random.key(0),
        regression,
        ("z", "t"),
        training=rd.Training(
            max_steps=1_000_000, max_seconds=60 * (4.0 if minutes is None else minutes)
        ),
        progress_bar=progress_bar,
    )
    compiled.save(folder / "regression.rd")
    sets = [{"z": np.array(s["z"]), "t": np.array(s["t"])} for s in known["sets"]]
    posteriors = [
        compiled.infer(jax.random.key(n), data, 1000, rescue=False) for n, data in enumerate(sets)
    ]
    rows: list[tuple[str, ...]] = []
    for number, (found, exact) in enumerate(zip(posteriors, known["sets"], strict=True)):
        off = max(
            abs(float(found.mean(name)) - mean) / sd
            for name, mean, sd in zip(NAMES, exact["mean"], exact["sd"], strict=True)
        )
        # The evidence of t given z: that of both, less the density of z.
        log_evidence = found.log_evidence + len(exact["z"]) * np.log(20)
        rows.append(
            (
                f"data set {number + 1}",
                f"{found.ess / 10:.0f} %",
                f"{log_evidence:.3f}",
                f"{exact['log_evidence']:.3f}",
                f"{off:.3f}",
                str(found.trust),
            )
        )
    curves_figure(compiled, sets, posteriors).savefig(folder / "regression.png", dpi=120)
    header = ("", "effective", "log evidence", "exact", "worst mean, in sd", "trust")
    spread = _spread(compiled)
    return "\n".join(
        [
            "Regression, 1 000 particles; the authors' code shows 10 to 33 % effective",
            "",
            table(header, rows),
            "",
            f"Over 200 synthetic data sets: median {spread[1]:.0%}, tenth percentile "
            f"{spread[0]:.0%} effective.",
            f"Figures and the compiled model are in {folder}.",
        ]
    )


def _spread(compiled: Any, number: int = 200) -> np.ndarray:
    """Tenth percentile and median of the effective share over synthetic data sets."""
    draws = jax.vmap(compiled.graph.program.simulate)(jax.random.split(jax.random.key(200), number))
    data = {name: draws[name] for name in compiled.graph.observed}
    found = compiled.infer_many(jax.random.key(201), data, 1000, rescue=False)
    return np.percentile(np.asarray(found.ess) / 1000, [10, 50])


def curves_figure(compiled: Any, sets: list[Any], posteriors: list[Any]) -> Any:
    """The paper's fig. 5: a row of panels for each data set."""
    figure, axes = plt.subplots(
        len(sets), 3, figsize=(9, 2.4 * len(sets)), layout="constrained", sharex=True, squeeze=False
    )
    line = np.linspace(-10, 10, 200)
    for number, (row, data, posterior) in enumerate(zip(axes, sets, posteriors, strict=True)):
        key = jax.random.key(100 + number)
        raw, _ = compiled.propose(key, data, CURVES)
        draws = (_by_mcmc(key, data), raw, posterior.resample(key, CURVES))
        for panel, title, drawn in zip(row, ("MCMC", "network", "weighted"), draws, strict=True):
            w = [np.asarray(drawn[name])[:CURVES, None] for name in NAMES]
            panel.plot(line, (w[0] + w[1] * line + w[2] * line**2).T, color="C0", alpha=0.15)
            panel.plot(data["z"], data["t"], "k.")
            panel.margins(x=0)
            middle = np.median(data["t"])
            reach = 1.5 * np.max(np.abs(data["t"] - middle)) + 1
            panel.set_ylim(middle - reach, middle + reach)
            if number == 0:
                panel.set_title(title)
    return figure


def _by_mcmc(key: Any, data: Any) -> dict[str, Any]:
    sampler: Any = MCMC(  # type: ignore[no-untyped-call]
        NUTS(regression),  # type: ignore[no-untyped-call]
        num_warmup=500,
        num_samples=500,
        progress_bar=False,
    )
    sampler.run(key, **{name: jnp.asarray(value) for name, value in data.items()})
    samples: dict[str, Any] = sampler.get_samples()
    return {name: value[:: 500 // CURVES] for name, value in samples.items()}
