"""Read data from CSV, with one row per element or one row per data set.

- A column `y` is a site with one axis and one row per element. Sites may have different lengths:
  cells at the end of a column may be empty.
- Columns `y[0]`, `y[1]`, … or `y.0`, `y.1`, … (two numbers for two axes) index the last axes of a
  site; the rows index its first axis.
- A site without axes has its value in the first row; its other cells are empty or repeat the value.
- If the columns index all axes of every site, each row is a data set.
"""

import csv
import re
from io import StringIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrodict.errors import DataError
from retrodict.graph.graph import Graph

_INDEXED_NAME = re.compile(r"(?P<site>.+?)(?:\[(?P<brackets>[0-9, ]+)\]|(?P<dots>(?:\.[0-9]+)+))")
_BOOLEANS = {"true": 1, "false": 0}


class _Table(NamedTuple):
    """The cells of a CSV file as text.

    Attributes:
        path: of the file, for error messages.
        names: of the columns.
        cells: (rows, columns); the empty text where there is no value.
        lines: the line number of each row in the file.
    """

    path: str
    names: list[str]
    cells: NDArray[np.str_]
    lines: list[int]


def read_csv(text: str, path: str, graph: Graph) -> tuple[dict[str, NDArray[Any]], bool]:
    """Return the values of each site, and whether they have a leading axis of data sets."""
    table = _parse_table(text, path)
    cells = _cells_by_site(table, graph)
    row_axes = {
        site: len(graph.sites[site].shape) - (cells[site].ndim - 1)
        for site in cells
        if site in graph.observed
    }
    if row_axes and not any(row_axes.values()):
        values = {site: _numbers(site, columns, table) for site, columns in cells.items()}
        batched = len(table.lines) > 1
        return values if batched else {site: v[0] for site, v in values.items()}, batched
    return {
        site: (_first_row if row_axes.get(site) == 0 else _nonempty_rows)(site, columns, table)
        for site, columns in cells.items()
    }, False


def _parse_table(text: str, path: str) -> _Table:
    reader = csv.reader(StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    rows = [(line, row) for line, row in rows if any(row)]
    if not rows:
        raise DataError(f"{path} is empty; expected a first row of site names")
    (_, names), *rows = rows
    if not rows:
        raise DataError(f"{path} has a row of names, {', '.join(names)}, and no row of values")
    _check_names(names, path)
    for line, row in rows:
        if len(row) > len(names):
            raise DataError(
                f"{path}, line {line}: expected {len(names)} values, for {', '.join(names)}; found "
                f"{len(row)}"
            )
        row += [""] * (len(names) - len(row))
    cells = np.array([row for _, row in rows])
    # pandas writes row labels into a first column without a name.
    first = 1 if names[0] == "" else 0
    return _Table(path, names[first:], cells[:, first:], [line for line, _ in rows])


def _check_names(names: list[str], path: str) -> None:
    if all(_number(name) is not None for name in names):
        raise DataError(f"{path}: the first row must name the sites, found {', '.join(names)}")
    for name in names:
        if name.count("[") != name.count("]"):
            raise DataError(
                f"{path}: the column name {name!r} was split at a comma: put names such as "
                'y[0,1] in quotes, "y[0,1]", or write y.0.1'
            )
        if names.count(name) > 1:
            raise DataError(f"{path}: the column {name!r} occurs {names.count(name)} times")


def _cells_by_site(table: _Table, graph: Graph) -> dict[str, NDArray[np.str_]]:
    """Return the cells of each site: (rows, *shape indexed by the columns)."""
    columns: dict[str, dict[tuple[int, ...], int]] = {}
    for column, name in enumerate(table.names):
        site, index = _split_name(name, graph)
        columns.setdefault(site, {})[index] = column
    cells = {}
    for site, column_by_index in columns.items():
        if len({len(index) for index in column_by_index}) > 1:
            raise DataError(
                f"{table.path}: site '{site}': its columns have indices of different lengths"
            )
        shape = tuple(max(axis) + 1 for axis in zip(*column_by_index, strict=True))
        for index in np.ndindex(*shape):
            if index not in column_by_index:
                raise DataError(
                    f"{table.path}: site '{site}': there are {len(column_by_index)} columns up to "
                    f"index {[size - 1 for size in shape]}, but no column "
                    f"{site}[{','.join(map(str, index))}]"
                )
        order = [column_by_index[index] for index in np.ndindex(*shape)]
        cells[site] = table.cells[:, order].reshape(-1, *shape)
    return cells


def _split_name(name: str, graph: Graph) -> tuple[str, tuple[int, ...]]:
    """Split a column's name into site and index, unless the whole name is that of a site."""
    match = _INDEXED_NAME.fullmatch(name)
    if name in graph.sites or match is None:
        return name, ()
    digits = re.findall(r"[0-9]+", match["brackets"] or match["dots"])
    return match["site"], tuple(map(int, digits))


def _numbers(site: str, cells: NDArray[np.str_], table: _Table) -> NDArray[Any]:
    """Convert the first rows of a site to numbers; no cell may be empty."""
    values = np.empty(cells.shape)
    for index, cell in np.ndenumerate(cells):
        where = f"{table.path}, line {table.lines[index[0]]}: site '{site}'"
        number = _number(cell)
        if not cell:
            raise DataError(
                f"{where} has an empty cell. Data must be numbers; exclude missing values with a "
                "mask in the model"
            )
        if number is None:
            raise DataError(f"{where}: expected a number, found {str(cell)!r}")
        values[index] = number
    return values


def _number(cell: str) -> float | None:
    try:
        return float(_BOOLEANS.get(cell.lower(), cell))
    except ValueError:
        return None


def _nonempty_rows(site: str, cells: NDArray[np.str_], table: _Table) -> NDArray[Any]:
    """Return all rows up to the last that is not empty."""
    nonempty = np.flatnonzero((cells != "").reshape(len(cells), -1).any(axis=1))
    return _numbers(site, cells[: nonempty[-1] + 1 if len(nonempty) else 0], table)


def _first_row(site: str, cells: NDArray[np.str_], table: _Table) -> NDArray[Any]:
    """Return the first row, which the other rows must repeat or leave empty."""
    values = _numbers(site, np.where(cells == "", cells[:1], cells), table)
    first: NDArray[Any] = values[0]
    if (different := np.argwhere(values != first)).size:
        index = tuple(different[0])
        raise DataError(
            f"{table.path}, line {table.lines[index[0]]}: site '{site}' has one value per data "
            f"set, in the first row; found {values[index]:g} after {first.flat[0]:g}"
        )
    return first
