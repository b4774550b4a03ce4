"""Write a posterior to a file, and format it as text and as plain data.

`.nc` files hold the result of `Posterior.to_arviz` as NetCDF: equally weighted draws, weights,
diagnostics and data. `.json` and `.csv` files hold the summary. For several data sets, they have an
additional axis, list or column `dataset`.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from retrodict.errors import InputError
from retrodict.particles.diagnostics import GRADES
from retrodict.particles.posterior import Posterior

POSTERIOR_SUFFIXES = (".nc", ".json", ".csv")
FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
# The table, the diagnostics and the prompt then fit into a terminal of 24 lines.
MAX_ROWS = 14


def write_posterior(path: Path, posterior: Posterior) -> None:
    """Write a posterior atomically, in the format of the suffix."""
    writers: Mapping[str, Callable[[Path, Posterior], None]] = {
        ".nc": _write_netcdf,
        ".json": _write_json,
        ".csv": _write_csv,
    }
    # In the same folder, because a file cannot be moved atomically between disks.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        writers[path.suffix.lower()](temporary, posterior)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def posterior_record(posterior: Posterior) -> dict[str, Any]:
    """Return summary, evidence and diagnostics as plain data."""
    if posterior.batched:
        return {"datasets": [posterior_record(single) for single in posterior]}
    return {
        "trust": posterior.trust,
        "reasons": posterior.diagnostics.reasons,
        "method": posterior.method,
        "num_particles": posterior.num_particles,
        "ess": float(posterior.ess),
        "pareto_k": float(posterior.pareto_k),
        "log_evidence": float(posterior.log_evidence),
        "log_evidence_se": float(posterior.log_evidence_se),
        "summary": posterior.summary(round_to=None).to_dict(orient="index"),
    }


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Write plain data as JSON; numbers that are not finite become null."""
    finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
    return json.dumps(finite, ensure_ascii=False, indent=indent)


def format_posterior(posterior: Posterior) -> str:
    """Format the summary, the evidence and the diagnostics as text for one screen."""
    if posterior.batched:
        return _format_batch(posterior)
    table = posterior.summary()
    lines = [table.head(MAX_ROWS).to_string()]
    if len(table) > MAX_ROWS:
        lines.append(f"… and {len(table) - MAX_ROWS} more rows: -o summary.csv writes all of them")
    lines += [
        "",
        f"log evidence  {float(posterior.log_evidence):.3f} ± "
        f"{float(posterior.log_evidence_se):.2g}",
        f"ess           {float(posterior.ess):.0f} of {posterior.num_particles} particles "
        f"({posterior.method})",
        f"trust         {posterior.trust}",
        *(f"  - {reason}" for reason in posterior.diagnostics.reasons),
    ]
    return "\n".join(lines)


def _format_batch(posterior: Posterior) -> str:
    """List the results of all data sets or, if they are too many, the least reliable ones."""
    import pandas as pd

    table = pd.DataFrame(
        {
            "log_evidence": np.round(np.asarray(posterior.log_evidence, float), 3),
            "se": np.round(np.asarray(posterior.log_evidence_se, float), 3),
            "ess": np.round(np.asarray(posterior.ess, float)),
            "pareto_k": np.round(np.asarray(posterior.pareto_k, float), 2),
            "trust": posterior.trust,
        }
    )
    table.index.name = "data set"
    lines = [table.to_string()]
    if len(table) > MAX_ROWS:
        ranking = table.assign(grade=posterior.grade).sort_values(
            ["grade", "ess"], ascending=[False, True]
        )
        lines = [
            ranking.head(MAX_ROWS).drop(columns="grade").sort_index().to_string(),
            f"… the {MAX_ROWS} least trustworthy of {len(table)} data sets",
        ]
    counts = {grade: int(np.sum(posterior.trust == grade)) for grade in GRADES}
    grades = ", ".join(f"{count} {grade}" for grade, count in counts.items() if count)
    return "\n".join([*lines, "", f"trust  {grades} ({posterior.method})"])


def _write_json(path: Path, posterior: Posterior) -> None:
    path.write_text(to_json(posterior_record(posterior), indent=2) + "\n", encoding="utf-8")


def _write_csv(path: Path, posterior: Posterior) -> None:
    import pandas as pd

    if posterior.batched:
        tables = [single.summary(round_to=None) for single in posterior]
        table = pd.concat(tables, keys=range(len(tables)), names=["dataset", "parameter"])
    else:
        table = posterior.summary(round_to=None).rename_axis("parameter")
    table.to_csv(path)


def _write_netcdf(path: Path, posterior: Posterior) -> None:
    import xarray

    if posterior.batched:
        batch = [_arviz_groups(single.to_arviz()) for single in posterior]
        for groups, single in zip(batch, posterior, strict=True):
            groups["sample_stats"] = groups["sample_stats"].assign(trust=single.trust)
        groups = {
            name: xarray.concat(
                [dataset[name] for dataset in batch], dim="dataset", combine_attrs="drop_conflicts"
            )
            for name in batch[0]
        }
    else:
        groups = _arviz_groups(posterior.to_arviz())
    for number, (name, group) in enumerate(groups.items()):
        # Both ArviZ 0 and ArviZ 1 can read groups that were written one after the other.
        group.to_netcdf(path, mode="a" if number else "w", group=name, engine="h5netcdf")


def _arviz_groups(data: Any) -> dict[str, Any]:
    """Return the datasets of an InferenceData (ArviZ 0) or an xarray DataTree (ArviZ 1)."""
    if hasattr(data, "children"):
        return {name: node.to_dataset() for name, node in data.children.items()}
    return {name: data[name] for name in data.groups()}


def check_writable(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise `InputError` if a file of one of these suffixes cannot be written to the path."""
    if path.suffix.lower() not in suffixes:
        raise InputError(
            f"cannot write {path}: its name must end in {', '.join(suffixes)}, found "
            f"{path.suffix or 'no ending'!r}"
        )
    check_folder(path)


def check_folder(path: Path) -> None:
    """Raise `InputError` if the folder of the path does not exist or is not writable."""
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {folder}; create it first")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"cannot write {path}: permission is denied")
