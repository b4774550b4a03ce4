"""A posterior in; a file, a record for machines, or a screen for people out.

`.nc` is what `Posterior.to_arviz` gives, as NetCDF: equally weighted draws, weights, verdict and
data. `.json` and `.csv` hold the summary. Of many data sets, all have an axis, a list or a column
`dataset` more.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from retrodict.errors import InputError
from retrodict.particles.diagnostics import GRADES
from retrodict.particles.posterior import Posterior

SUFFIXES = (".nc", ".json", ".csv")
FIGURES = (".png", ".svg", ".pdf")
# The table, the verdict and the prompt fit on a screen of 24 lines.
MOST_ROWS = 14


def write_posterior(path: Path, posterior: Posterior) -> None:
    """Write a posterior in the format that the suffix names, whole or not at all."""
    writers: Mapping[str, Callable[[Path, Posterior], None]] = {
        ".nc": _write_netcdf,
        ".json": _write_json,
        ".csv": _write_csv,
    }
    # In the same folder, for a file cannot be moved whole from one disk to another.
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        writers[path.suffix.lower()](part, posterior)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def record(posterior: Posterior) -> dict[str, Any]:
    """All that the printed summary says, as plain data; what is not finite becomes None."""
    if posterior.batched:
        return {"datasets": [record(one) for one in posterior]}
    found = {
        "trust": posterior.trust,
        "reasons": list(posterior.diagnostics.reasons),
        "method": posterior.method,
        "num_particles": posterior.num_particles,
        "ess": float(posterior.ess),
        "pareto_k": float(posterior.pareto_k),
        "log_evidence": float(posterior.log_evidence),
        "log_evidence_se": float(posterior.log_evidence_se),
        "summary": posterior.summary(round_to=None).to_dict(orient="index"),
    }
    plain: dict[str, Any] = finite(found)
    return plain


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def screen(posterior: Posterior, rows: int = MOST_ROWS) -> str:
    """The summary, the evidence and the verdict with its reasons, on one screen."""
    if posterior.batched:
        return _screen_of_many(posterior, rows)
    table = posterior.summary()
    lines = [table.head(rows).to_string()]
    if len(table) > rows:
        lines.append(f"… and {len(table) - rows} rows more: -o summary.csv has all of them")
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


def _screen_of_many(posterior: Posterior, rows: int) -> str:
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
    # The worst are what a person has to look at.
    worst = table.assign(grade=posterior.grade).sort_values(
        ["grade", "ess"], ascending=[False, True]
    )
    shown = table if len(table) <= rows else worst.head(rows).drop(columns="grade").sort_index()
    lines = [shown.to_string()]
    if len(table) > rows:
        lines.append(f"… the {rows} least to be trusted, of {len(table)} data sets")
    counts = {grade: int(np.sum(posterior.trust == grade)) for grade in GRADES}
    said = ", ".join(f"{number} {grade}" for grade, number in counts.items() if number)
    return "\n".join([*lines, "", f"trust  {said} ({posterior.method})"])


def _write_json(path: Path, posterior: Posterior) -> None:
    text = json.dumps(record(posterior), ensure_ascii=False, allow_nan=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def _write_csv(path: Path, posterior: Posterior) -> None:
    import pandas as pd

    if posterior.batched:
        tables = [one.summary(round_to=None) for one in posterior]
        table = pd.concat(tables, keys=range(len(tables)), names=["dataset", "parameter"])
    else:
        table = posterior.summary(round_to=None).rename_axis("parameter")
    table.to_csv(path)


def _write_netcdf(path: Path, posterior: Posterior) -> None:
    import xarray

    if posterior.batched:
        each = [_groups(one.to_arviz()) for one in posterior]
        for groups, one in zip(each, posterior, strict=True):
            groups["sample_stats"] = groups["sample_stats"].assign(trust=one.trust)
        whole = {
            name: xarray.concat(
                [groups[name] for groups in each], dim="dataset", combine_attrs="drop_conflicts"
            )
            for name in each[0]
        }
    else:
        whole = _groups(posterior.to_arviz())
    for number, (name, group) in enumerate(whole.items()):
        # ArviZ 0 and 1 both read groups that were written one after the other.
        group.to_netcdf(path, mode="a" if number else "w", group=name, engine="h5netcdf")


def _groups(found: Any) -> dict[str, Any]:
    """The datasets of ArviZ's InferenceData or of xarray's DataTree."""
    if hasattr(found, "children"):
        return {name: node.to_dataset() for name, node in found.children.items()}
    return {name: found[name] for name in found.groups()}


def check_writable(path: Path, suffixes: tuple[str, ...]) -> None:
    """Refuse a path that cannot be written to, before anything is computed for it."""
    if path.suffix.lower() not in suffixes:
        raise InputError(
            f"cannot write {path}: its name must end in {', '.join(suffixes)}, found "
            f"{path.suffix or 'no ending'!r}"
        )
    check_place(path)


def check_place(path: Path) -> None:
    """Refuse a folder that is not there or cannot be written to."""
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"cannot write {path}: permission is denied")
