"""A JSON, CSV, NPZ or NetCDF file in; data by site out, of one data set or of many.

Only what a file can say is settled here: which values belong to which site, and whether there is a
leading axis of data sets. Shapes, names and supports are `retrodict.data.check_data`'s to judge.

- JSON: an object of site → number or nested lists; or a list of such objects, one a data set.
- CSV: see `retrodict.csvfiles`.
- NPZ: one array a site.
- NetCDF: the group `observed_data`, where ArviZ keeps data, else the variables of the file itself.

In JSON, NPZ and NetCDF every site may have one axis more than in the model, in front: then it
counts data sets.
"""

import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from retrodict.cli.csvfiles import read_csv
from retrodict.errors import DataError
from retrodict.graph.graph import Graph

SUFFIXES = (".json", ".csv", ".npz", ".nc")


class Data(NamedTuple):
    """Values by site; with a leading axis of data sets, if there are many."""

    values: dict[str, Any]
    many: bool


def read_data(path: str, graph: Graph) -> Data:
    """The data in a file, for the observed sites of a model; `-` reads JSON from standard input.

    Raises:
        DataError: the file is not of the kind that its name says, or cannot be made sense of.
        OSError: it cannot be read.
    """
    if path == "-":
        return _read_json(sys.stdin.read(), "standard input", graph)
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"cannot tell what kind of data {path} holds: expected a name ending in "
            f"{', '.join(SUFFIXES)}, found {suffix or 'no ending'!r}"
        )
    if suffix in (".json", ".csv"):
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not text in UTF-8: {error}") from error
        if suffix == ".csv":
            return Data(*read_csv(text, path, graph))
        return _read_json(text, path, graph)
    with file.open("rb") as opened:
        start = opened.read(8)
    values = _read_npz(file, start) if suffix == ".npz" else _read_netcdf(file, start)
    return Data(values, _leads(values, graph))


def _leads(values: Mapping[str, Any], graph: Graph) -> bool:
    """Whether every site has one axis more than in the model."""
    shared = [name for name in values if name in graph.observed]
    try:
        extra = [np.ndim(values[name]) - len(graph.sites[name].shape) for name in shared]
    except ValueError:  # lists of unequal lengths: for `check_data` to explain
        return False
    return bool(extra) and all(number == 1 for number in extra)


def _read_json(text: str, path: str, graph: Graph) -> Data:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    expected = "expected an object of site → values, such as " + _example(graph)
    if isinstance(found, dict):
        _check_no_null(found, path)
        return Data(found, _leads(found, graph))
    if not isinstance(found, list):
        raise DataError(f"{path}: {expected}; found {_kind(found)}")
    for number, one in enumerate(found):
        where = f"{path}, data set {number}"
        if not isinstance(one, dict):
            raise DataError(f"{where}: {expected}, or a list of those; found {_kind(one)}")
        _check_no_null(one, where)
        if set(one) != set(found[0]):
            raise DataError(
                f"{where}: every data set must give the same sites; the first has "
                f"{', '.join(found[0])}, this one {', '.join(one) or 'none'}"
            )
    if not found:
        raise DataError(f"{path}: the list of data sets is empty")
    return Data({name: [one[name] for one in found] for name in found[0]}, many=True)


def _example(graph: Graph) -> str:
    def zeros(shape: Sequence[int]) -> str:
        if not shape:
            return "0"
        inner = zeros(shape[1:])
        return f"[{inner}{f', {inner}, …' if shape[0] > 1 else ''}]"

    return "{" + ", ".join(f'"{n}": {zeros(graph.sites[n].shape)}' for n in graph.observed) + "}"


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number")


def _check_no_null(values: Mapping[str, Any], where: str) -> None:
    def place(value: Any) -> list[int] | None:
        if value is None:
            return []
        if isinstance(value, list):
            for number, item in enumerate(value):
                if (inner := place(item)) is not None:
                    return [number, *inner]
        return None

    for site, value in values.items():
        if (found := place(value)) is not None:
            raise DataError(
                f"{where}: site '{site}': the value{f' at {found}' if found else ''} is null. Data "
                "must be numbers; leave out what is missing with a mask in the model"
            )


def _read_npz(file: Path, start: bytes) -> dict[str, Any]:
    if not start.startswith(b"PK"):
        raise DataError(f"{file} is not an NPZ file: write it with numpy.savez")
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {name: _loaded(archive, name, file) for name in archive.files}
    except (zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{file} is damaged: {error}. Write it again with numpy.savez") from error


def _loaded(archive: Any, name: str, file: Path) -> Any:
    try:
        return archive[name]
    except ValueError as error:
        raise DataError(
            f"{file}: site '{name}': expected an array of numbers, found one of Python objects, "
            "which is not read"
        ) from error


def _read_netcdf(file: Path, start: bytes) -> dict[str, Any]:
    import xarray

    hierarchical = start.startswith(b"\x89HDF")
    if not hierarchical and not start.startswith(b"CDF"):
        raise DataError(f"{file} is not a NetCDF file")
    # Files of version 3 have no groups; those of version 4 are HDF5.
    engine: Any = "h5netcdf" if hierarchical else "scipy"
    group = None
    try:
        if hierarchical:
            group = _group(file)
        # Times stay numbers, as the model has them.
        with xarray.open_dataset(file, engine=engine, group=group, decode_times=False) as found:
            return {str(name): found[name].values for name in found.data_vars}
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} cannot be read as NetCDF: {error}") from error


def _group(file: Path) -> str | None:
    """Where the data are in a file with groups; None if outside of them."""
    import h5py

    with h5py.File(file, "r") as opened:
        groups = [name for name, item in opened.items() if isinstance(item, h5py.Group)]
        if "observed_data" in groups:
            return "observed_data"
        if groups and len(groups) == len(opened):
            raise DataError(
                f"{file} has the groups {', '.join(groups)}; expected observed_data, or variables "
                "outside of groups"
            )
    return None
