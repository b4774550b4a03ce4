"""Table of moments of a posterior, and its conversion to ArviZ."""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from retrodict.particles.posterior import Posterior
from retrodict.particles.resampling import systematic
from retrodict.particles.weights import weighted_hdi

Rounding: TypeAlias = int | Literal["auto"] | None


def summary(posterior: Posterior, round_to: Rounding) -> pd.DataFrame:
    """See `Posterior.summary`."""
    rows: dict[str, list[float]] = {}
    for name, value in posterior.samples.items():
        flat = np.asarray(value).reshape(posterior.num_particles, -1)
        moments = [np.ravel(f(name)) for f in (posterior.mean, posterior.sd, posterior.mcse)]
        for number, index in enumerate(np.ndindex(value.shape[1:])):
            label = f"{name}[{', '.join(map(str, index))}]" if index else name
            mean, sd, mcse = (float(m[number]) for m in moments)
            low, high = weighted_hdi(flat[:, number], np.asarray(posterior.log_weights), 0.94)
            # The mean of a constant has no error.
            effective = (sd / mcse) ** 2 if mcse > 0.0 else float(posterior.ess)
            rows[label] = [mean, sd, low, high, mcse, effective]
    columns = ["mean", "sd", "hdi_3%", "hdi_97%", "mcse_mean", "ess"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    if posterior.note:
        table = table.rename_axis(columns=posterior.note)
    return _rounded(table, round_to)


def to_arviz(posterior: Posterior) -> Any:
    """See `Posterior.to_arviz`."""
    try:
        import arviz
    except ImportError as error:
        raise ImportError(
            "to_arviz() needs ArviZ, which is not installed: pip install arviz"
        ) from error
    # A fixed key, so that the same posterior always gives the same draws.
    particle = systematic(jax.random.key(0), posterior.log_weights, posterior.num_particles)
    draws = {name: np.asarray(value[particle])[None] for name, value in posterior.samples.items()}
    stats = {
        "log_weight": np.asarray(posterior.log_weights)[None],
        "particle": np.asarray(particle)[None],
    }
    data = {name: np.asarray(value) for name, value in posterior.data.items()}

    def dataset(values: Mapping[str, np.ndarray], **options: Any) -> Any:
        dims = {name: list(posterior.dims[name]) for name in values if name in posterior.dims}
        # ArviZ does not annotate this function.
        return arviz.dict_to_dataset(  # type: ignore[no-untyped-call, unused-ignore]
            values, coords=dict(posterior.coords), dims=dims, **options
        )

    scalars = {
        name: float(getattr(posterior, name))
        for name in ("ess", "pareto_k", "log_evidence", "log_evidence_se")
    }
    groups = {
        "posterior": dataset(draws),
        "sample_stats": dataset(stats).assign(scalars),
    }
    groups["sample_stats"].attrs.update(
        trust=posterior.trust,
        method=posterior.method,
        reasons=" ".join(posterior.diagnostics.reasons),
    )
    before_1 = int(arviz.__version__.split(".")[0]) < 1
    if data:
        # Data have no axes of chains and draws. ArviZ 1.0 renamed the option.
        option = "default_dims" if before_1 else "sample_dims"
        groups["observed_data"] = dataset(data, **{option: []})
    if before_1:
        return arviz.InferenceData(**groups)
    import xarray

    return xarray.DataTree.from_dict(groups)


def _rounded(table: pd.DataFrame, round_to: Rounding) -> pd.DataFrame:
    """Round the table as `Posterior.summary` describes."""
    if round_to is None:
        return table
    table["ess"] = table["ess"].round(0)
    numbers = ["mean", "sd", "hdi_3%", "hdi_97%", "mcse_mean"]
    if round_to != "auto":
        table[numbers] = table[numbers].round(round_to)
        return table
    for label, error in table["mcse_mean"].items():
        decimals = 1 - math.floor(math.log10(error)) if error > 0.0 and np.isfinite(error) else 3
        table.loc[label, numbers] = table.loc[label, numbers].round(decimals)
    return table
