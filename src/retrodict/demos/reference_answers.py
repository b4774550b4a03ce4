"""Data and exact answers of the demonstrations, stored in `reference.json`.

`python -m benchmarks.paper.reference` writes the file; a test compares it with the exact solvers.
"""

import json
from importlib.resources import files
from typing import Any


def load_reference(name: str) -> dict[str, Any]:
    """Return the data and exact answers of one demonstration."""
    text = files("retrodict.demos").joinpath("reference.json").read_text(encoding="utf-8")
    reference: dict[str, Any] = json.loads(text)[name]
    return reference
