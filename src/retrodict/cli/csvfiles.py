"""The text of a CSV file in; data by site out: one row an element, or one row a data set.

- A column `y` is a site with one axis, one row an element. Sites may be of different lengths: cells
  at the end of a column may be empty.
- Columns `y[0]`, `y[1]`, … or `y.0`, `y.1`, … (two numbers for two axes) are the last axes of a
  site; rows are its first.
- A site without axes, beside such columns, has its value in the first row; in the others it is
  empty or the same.
- If no site has rows for an axis, every site is whole in a row, and each row is a data set.
"""

import csv
import re
from collections.abc import Mapping
from io import StringIO
from typing import Any, NamedTuple

import numpy as np

from retrodict.errors import DataError
from retrodict.graph.graph import Graph

_WIDE = re.compile(r"(?P<site>.+?)(?:\[(?P<inside>[0-9, ]+)\]|(?P<dots>(?:\.[0-9]+)+))")
_WORDS = {"true": 1, "false": 0}

Array = np.ndarray[Any, Any]


class Column(NamedTuple):
    """Cells of one site: `(rows, *index)`; those that are empty are not `given`."""

    cells: Array
    given: Array


def read_csv(text: str, path: str, graph: Graph) -> tuple[dict[str, Array], bool]:
    """Values by site, and whether they have a leading axis of data sets."""
    names, rows, lines = _table(text, path)
    columns = _columns(names, rows, lines, path, graph)
    missing = {
        name: len(graph.sites[name].shape) - (column.cells.ndim - 1)
        for name, column in columns.items()
        if name in graph.observed
    }
    if missing and all(number == 0 for number in missing.values()):
        for name, column in columns.items():
            _check_given(name, column.given, lines, path)
        many = len(lines) > 1
        return {name: c.cells if many else c.cells[0] for name, c in columns.items()}, many
    values = {}
    for name, column in columns.items():
        take = _first if missing.get(name) == 0 else _all
        values[name] = take(name, column, lines, path)
    return values, False


def _table(text: str, path: str) -> tuple[list[str], list[list[str]], list[int]]:
    """Names of the columns, cells of the rows, and on which line each row stands."""
    reader = csv.reader(StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        found = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    found = [(line, row) for line, row in found if any(row)]
    if not found:
        raise DataError(f"{path} is empty; expected a first row of site names")
    (_, names), *rest = found
    if not rest:
        raise DataError(f"{path} has a row of names, {', '.join(names)}, and no row of values")
    if all(_number(name) is not None for name in names):
        raise DataError(f"{path}: the first row must name the sites, found {', '.join(names)}")
    torn = [name for name in names if name.count("[") != name.count("]")]
    if torn:
        raise DataError(
            f"{path}: the column name {torn[0]!r} was cut at a comma: put names such as "
            'y[0,1] in quotes, "y[0,1]", or write y.0.1'
        )
    for line, row in rest:
        if len(row) > len(names):
            raise DataError(
                f"{path}, line {line}: expected {len(names)} values, for {', '.join(names)}; found "
                f"{len(row)}"
            )
        row += [""] * (len(names) - len(row))
    if names[0] == "":
        # Row labels, as pandas writes them.
        names, rest = names[1:], [(line, row[1:]) for line, row in rest]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"{path}: the column {twice[0]!r} occurs {names.count(twice[0])} times")
    return names, [row for _, row in rest], [line for line, _ in rest]


def _columns(
    names: list[str], rows: list[list[str]], lines: list[int], path: str, graph: Graph
) -> dict[str, Column]:
    """The columns of each site, put together."""
    places: dict[str, dict[tuple[int, ...], int]] = {}
    for number, name in enumerate(names):
        site, index = _split(name, graph)
        places.setdefault(site, {})[index] = number
    return {
        site: _joined(site, indices, rows, lines, path, graph) for site, indices in places.items()
    }


def _split(name: str, graph: Graph) -> tuple[str, tuple[int, ...]]:
    """A column's site and index; a site may have numbers in its name, and goes first."""
    match = _WIDE.fullmatch(name)
    if name in graph.sites or match is None:
        return name, ()
    digits = re.findall(r"[0-9]+", match["inside"] or match["dots"])
    return match["site"], tuple(map(int, digits))


def _joined(
    site: str,
    indices: Mapping[tuple[int, ...], int],
    rows: list[list[str]],
    lines: list[int],
    path: str,
    graph: Graph,
) -> Column:
    depths = {len(index) for index in indices}
    if len(depths) > 1:
        raise DataError(f"{path}: site '{site}': its columns have indices of different lengths")
    shape = tuple(max(axis) + 1 for axis in zip(*indices, strict=True))
    for index in np.ndindex(*shape):
        if index not in indices:
            missing = f"{site}[{','.join(map(str, index))}]"
            raise DataError(
                f"{path}: site '{site}': there are {len(indices)} columns up to index "
                f"{[size - 1 for size in shape]}, but no column {missing}"
            )
    cells = np.empty((len(rows), *shape))
    given = np.ones((len(rows), *shape), bool)
    for index, column in indices.items():
        for number, row in enumerate(rows):
            value = _number(row[column])
            if value is None and row[column]:
                raise DataError(
                    f"{path}, line {lines[number]}: site '{site}': expected a number, found "
                    f"{row[column]!r}"
                )
            cells[(number, *index)] = np.nan if value is None else value
            given[(number, *index)] = value is not None
    return Column(cells, given)


def _number(cell: str) -> float | None:
    try:
        return float(_WORDS.get(cell.lower(), cell))
    except ValueError:
        return None


def _check_given(site: str, given: Array, lines: list[int], path: str) -> None:
    if not given.all():
        row = int(np.argwhere(~given)[0][0])
        raise DataError(
            f"{path}, line {lines[row]}: site '{site}' has an empty cell. Data must be numbers; "
            "leave out what is missing with a mask in the model"
        )


def _all(site: str, column: Column, lines: list[int], path: str) -> Array:
    """Every row down to the last that is not empty."""
    filled = column.given.reshape(len(lines), -1).any(axis=1)
    length = int(np.flatnonzero(filled)[-1]) + 1 if filled.any() else 0
    _check_given(site, column.given[:length], lines, path)
    return column.cells[:length]


def _first(site: str, column: Column, lines: list[int], path: str) -> Array:
    """The first row, which the others must repeat or leave empty."""
    _check_given(site, column.given[:1], lines, path)
    other = column.given & (column.cells != column.cells[:1])
    if other.any():
        row = int(np.argwhere(other)[0][0])
        raise DataError(
            f"{path}, line {lines[row]}: site '{site}' has one value for the whole data set, in "
            f"the first row; found {column.cells[other].flat[0]:g} after "
            f"{column.cells[0].flat[0]:g}"
        )
    first: Array = column.cells[0]
    return first
