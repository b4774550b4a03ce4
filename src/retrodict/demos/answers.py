"""Data of the demonstrations, and exact answers for them, from a file that comes with the package.

`python -m benchmarks.paper.reference` makes the file; a test compares it with the exact solvers.
"""

import json
from importlib.resources import files
from typing import Any


def reference(name: str) -> dict[str, Any]:
    """Data and exact answers of one demonstration."""
    text = files("retrodict.demos").joinpath("reference.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)[name]
    return found


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Rows of text in columns, the first to the left, the others to the right."""
    whole = [header, *rows]
    widths = [max(len(row[column]) for row in whole) for column in range(len(header))]

    def line(row: tuple[str, ...]) -> str:
        first, *rest = (
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *map(line, rows)])
