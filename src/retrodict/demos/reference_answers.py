"""Data and exact answers of the demonstrations, stored in `reference.json`.

`python -m benchmarks.paper.reference` writes the file; a test compares it with the exact solvers.
"""

import json
from importlib.resources import files
from typing import Any

import pandas as pd


def load_reference(name: str) -> dict[str, Any]:
    """Return the data and exact answers of one demonstration."""
    text = files("retrodict.demos").joinpath("reference.json").read_text(encoding="utf-8")
    reference: dict[str, Any] = json.loads(text)[name]
    return reference


def format_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Align the first column to the left and the others to the right."""
    table = pd.DataFrame([row[1:] for row in rows], [row[0] for row in rows], header[1:])
    text: str = table.rename_axis(header[0] or None, axis="columns").to_string()
    return text
