"""Polynomial regression on ten points (Paige & Wood 2016, sec. 5.1), with the paper's figure 5.

One compiled model is applied to several data sets. The figure shows posterior curves for each of
them: from MCMC, from the network's unweighted draws, and from the weighted draws.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC, NUTS

import retrodict as rd
from retrodict.demos.models import regression
from retrodict.demos.reference_answers import format_table, load_reference

SITES = ("w0", "w1", "w2")
PARTICLES = 1000
CURVES = 40


def run(folder: Path, minutes: float | None, progress_bar: bool) -> str:
    """Compile the model, infer from each data set, draw figure 5 and report the results."""
    references = load_reference("regression")["sets"]
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
    datasets = [{site: np.array(one[site]) for site in ("z", "t")} for one in references]
    posteriors = [
        compiled.infer(jax.random.key(number), data, PARTICLES, rescue=False)
        for number, data in enumerate(datasets)
    ]
    curves_figure(compiled, datasets, posteriors).savefig(folder / "regression.png", dpi=120)
    rows = [
        (f"data set {number + 1}", *_cells(posterior, reference))
        for number, (posterior, reference) in enumerate(zip(posteriors, references, strict=True))
    ]
    header = ("", "effective", "log evidence", "exact", "largest error of a mean, in sd", "trust")
    low, median = _effective_fractions(compiled)
    return "\n".join(
        [
            f"Regression, {PARTICLES} particles; the authors' code has 10 to 33 % effective",
            "",
            format_table(header, rows),
            "",
            f"Effective fraction over 200 synthetic data sets: median {median:.0%}, tenth "
            f"percentile {low:.0%}.",
            f"Figures and the compiled model are in {folder}.",
        ]
    )


def _cells(posterior: Any, reference: Any) -> tuple[str, ...]:
    """Compare a posterior with the exact answer."""
    error = max(
        abs(float(posterior.mean(site)) - mean) / sd
        for site, mean, sd in zip(SITES, reference["mean"], reference["sd"], strict=True)
    )
    # The reference gives the evidence of t given z; in the model, z is uniform on (−10, 10).
    log_evidence = posterior.log_evidence + len(reference["z"]) * np.log(20)
    return (
        f"{posterior.ess / PARTICLES:.0%}",
        f"{log_evidence:.3f}",
        f"{reference['log_evidence']:.3f}",
        f"{error:.3f}",
        str(posterior.trust),
    )


def _effective_fractions(compiled: Any, num_datasets: int = 200) -> np.ndarray:
    """Tenth percentile and median of ESS / K over synthetic data sets."""
    keys = jax.random.split(jax.random.key(200), num_datasets)
    draws = jax.vmap(compiled.graph.program.simulate)(keys)
    data = {site: draws[site] for site in compiled.graph.observed}
    posteriors = compiled.infer_many(jax.random.key(201), data, PARTICLES, rescue=False)
    return np.percentile(np.asarray(posteriors.ess) / PARTICLES, [10, 50])


def curves_figure(compiled: Any, datasets: list[Any], posteriors: list[Any]) -> Any:
    """Draw the paper's figure 5: a row of panels for each data set."""
    number = len(datasets)
    figure, axes = plt.subplots(
        number, 3, figsize=(9, 2.4 * number), layout="constrained", sharex=True, squeeze=False
    )
    for row, (data, posterior) in enumerate(zip(datasets, posteriors, strict=True)):
        key = jax.random.key(100 + row)
        proposed, _ = compiled.propose(key, data, CURVES)
        draws_by_title = {
            "MCMC": _mcmc_draws(key, data),
            "network": proposed,
            "weighted": posterior.resample(key, CURVES),
        }
        for panel, (title, draws) in zip(axes[row], draws_by_title.items(), strict=True):
            _draw_curves(panel, data, draws)
            if row == 0:
                panel.set_title(title)
    return figure


def _draw_curves(panel: Any, data: Any, draws: Any) -> None:
    z = np.linspace(-10, 10, 200)
    w0, w1, w2 = (np.asarray(draws[site])[:CURVES, None] for site in SITES)
    panel.plot(z, (w0 + w1 * z + w2 * z**2).T, color="C0", alpha=0.15)
    panel.plot(data["z"], data["t"], "k.")
    panel.margins(x=0)
    centre = np.median(data["t"])
    height = 1.5 * np.max(np.abs(data["t"] - centre)) + 1
    panel.set_ylim(centre - height, centre + height)


def _mcmc_draws(key: Any, data: Any) -> dict[str, Any]:
    sampler: Any = MCMC(  # type: ignore[no-untyped-call]
        NUTS(regression),  # type: ignore[no-untyped-call]
        num_warmup=500,
        num_samples=500,
        progress_bar=False,
    )
    sampler.run(key, **{name: jnp.asarray(value) for name, value in data.items()})
    samples: dict[str, Any] = sampler.get_samples()
    return {name: value[:: 500 // CURVES] for name, value in samples.items()}
