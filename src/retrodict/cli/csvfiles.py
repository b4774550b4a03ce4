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
from collections.abc import Mapping
from io import StringIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrodict.errors import DataError
from retrodict.graph.graph import Graph

_INDEXED_NAME = re.compile(r"(?P<site>.+?)(?:\[(?P<brackets>[0-9, ]+)\]|(?P<dots>(?:\.[0-9]+)+))")
_BOOLEANS = {"true": 1, "false": 0}


class _CsvTable(NamedTuple):
    """The cells of a CSV file as text.

    Attributes:
        path: of the file, for error messages.
        names: of the columns.
        rows: the cells of each row.
        lines: the line number of each row in the file.
    """

    path: str
    names: list[str]
    rows: list[list[str]]
    lines: list[int]


class _SiteCells(NamedTuple):
    """The cells of one site.

    Attributes:
        values: numbers, NaN in empty cells; (rows, *shape indexed by columns).
        present: whether each cell holds a number; of the same shape.
    """

    values: NDArray[Any]
    present: NDArray[Any]


def read_csv(text: str, path: str, graph: Graph) -> tuple[dict[str, NDArray[Any]], bool]:
    """Return the values of each site, and whether they have a leading axis of data sets."""
    table = _parse_table(text, path)
    cells_by_site = _read_cells(table, graph)
    row_axes = {
        site: len(graph.sites[site].shape) - (cells.values.ndim - 1)
        for site, cells in cells_by_site.items()
        if site in graph.observed
    }
    if row_axes and all(number == 0 for number in row_axes.values()):
        for site, cells in cells_by_site.items():
            _check_present(site, cells.present, table)
        batched = len(table.rows) > 1
        values = {site: cells.values for site, cells in cells_by_site.items()}
        return values if batched else {site: v[0] for site, v in values.items()}, batched
    values = {}
    for site, cells in cells_by_site.items():
        read_site = _first_row if row_axes.get(site) == 0 else _nonempty_rows
        values[site] = read_site(site, cells, table)
    return values, False


def _parse_table(text: str, path: str) -> _CsvTable:
    reader = csv.reader(StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        lines_and_rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    lines_and_rows = [(line, row) for line, row in lines_and_rows if any(row)]
    if not lines_and_rows:
        raise DataError(f"{path} is empty; expected a first row of site names")
    (_, names), *lines_and_rows = lines_and_rows
    if not lines_and_rows:
        raise DataError(f"{path} has a row of names, {', '.join(names)}, and no row of values")
    _check_names(names, path)
    for line, row in lines_and_rows:
        if len(row) > len(names):
            raise DataError(
                f"{path}, line {line}: expected {len(names)} values, for {', '.join(names)}; found "
                f"{len(row)}"
            )
        row += [""] * (len(names) - len(row))
    rows = [row for _, row in lines_and_rows]
    if names[0] == "":
        # pandas writes row labels into a first column without a name.
        names, rows = names[1:], [row[1:] for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{path}: the column {name!r} occurs {names.count(name)} times")
    return _CsvTable(path, names, rows, [line for line, _ in lines_and_rows])


def _check_names(names: list[str], path: str) -> None:
    if all(_number(name) is not None for name in names):
        raise DataError(f"{path}: the first row must name the sites, found {', '.join(names)}")
    for name in names:
        if name.count("[") != name.count("]"):
            raise DataError(
                f"{path}: the column name {name!r} was split at a comma: put names such as "
                'y[0,1] in quotes, "y[0,1]", or write y.0.1'
            )


def _read_cells(table: _CsvTable, graph: Graph) -> dict[str, _SiteCells]:
    """Collect the columns of each site."""
    columns_by_site: dict[str, dict[tuple[int, ...], int]] = {}
    for column, name in enumerate(table.names):
        site, index = _split_name(name, graph)
        columns_by_site.setdefault(site, {})[index] = column
    return {site: _join(site, columns, table) for site, columns in columns_by_site.items()}


def _split_name(name: str, graph: Graph) -> tuple[str, tuple[int, ...]]:
    """Split a column's name into site and index, unless the whole name is that of a site."""
    match = _INDEXED_NAME.fullmatch(name)
    if name in graph.sites or match is None:
        return name, ()
    digits = re.findall(r"[0-9]+", match["brackets"] or match["dots"])
    return match["site"], tuple(map(int, digits))


def _join(site: str, columns: Mapping[tuple[int, ...], int], table: _CsvTable) -> _SiteCells:
    """Join the columns of a site, by index, into one array."""
    if len({len(index) for index in columns}) > 1:
        raise DataError(
            f"{table.path}: site '{site}': its columns have indices of different lengths"
        )
    shape = tuple(max(axis) + 1 for axis in zip(*columns, strict=True))
    for index in np.ndindex(*shape):
        if index not in columns:
            missing = f"{site}[{','.join(map(str, index))}]"
            raise DataError(
                f"{table.path}: site '{site}': there are {len(columns)} columns up to index "
                f"{[size - 1 for size in shape]}, but no column {missing}"
            )
    values = np.full((len(table.rows), *shape), np.nan)
    present = np.zeros((len(table.rows), *shape), bool)
    for index, column in columns.items():
        for number, row in enumerate(table.rows):
            value = _number(row[column])
            if value is not None:
                values[(number, *index)] = value
                present[(number, *index)] = True
            elif row[column]:
                raise DataError(
                    f"{table.path}, line {table.lines[number]}: site '{site}': expected a number, "
                    f"found {row[column]!r}"
                )
    return _SiteCells(values, present)


def _number(cell: str) -> float | None:
    try:
        return float(_BOOLEANS.get(cell.lower(), cell))
    except ValueError:
        return None


def _check_present(site: str, present: NDArray[Any], table: _CsvTable) -> None:
    if not present.all():
        row = int(np.argwhere(~present)[0][0])
        raise DataError(
            f"{table.path}, line {table.lines[row]}: site '{site}' has an empty cell. Data must be "
            "numbers; exclude missing values with a mask in the model"
        )


def _nonempty_rows(site: str, cells: _SiteCells, table: _CsvTable) -> NDArray[Any]:
    """Return all rows up to the last that is not empty."""
    nonempty = cells.present.reshape(len(table.rows), -1).any(axis=1)
    length = int(np.flatnonzero(nonempty)[-1]) + 1 if nonempty.any() else 0
    _check_present(site, cells.present[:length], table)
    return cells.values[:length]


def _first_row(site: str, cells: _SiteCells, table: _CsvTable) -> NDArray[Any]:
    """Return the first row, which the other rows must repeat or leave empty."""
    _check_present(site, cells.present[:1], table)
    first: NDArray[Any] = cells.values[0]
    different = cells.present & (cells.values != first)
    if different.any():
        row = int(np.argwhere(different)[0][0])
        raise DataError(
            f"{table.path}, line {table.lines[row]}: site '{site}' has one value per data set, in "
            f"the first row; found {cells.values[different].flat[0]:g} after {first.flat[0]:g}"
        )
    return first
