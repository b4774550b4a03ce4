"""Read one or several data sets from a JSON, CSV, NPZ or NetCDF file.

This module determines which values belong to which site, and whether there is a leading axis of
data sets. `retrodict.graph.validate.check_data` checks names, shapes and supports.

- JSON: an object of site → number or nested lists, or a list of such objects, one per data set.
- CSV: see `retrodict.cli.csvfiles`.
- NPZ: one array per site.
- NetCDF: the group `observed_data`, as ArviZ writes it, or else the variables of the file itself.

In JSON, NPZ and NetCDF every site may have an additional first axis, which counts data sets.
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


class FileData(NamedTuple):
    """The data in a file.

    Attributes:
        values: site → values.
        batched: whether the values have a leading axis of data sets.
    """

    values: dict[str, Any]
    batched: bool


def read_data(path: str, graph: Graph) -> FileData:
    """Read data for the observed sites of a model; the path `-` reads JSON from standard input.

    Raises:
        DataError: the file does not have the format of its suffix, or cannot be interpreted.
        OSError: the file cannot be read.
    """
    if path == "-":
        return _read_json(sys.stdin.read(), "standard input", graph)
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"cannot tell the format of {path}: expected a name ending in "
            f"{', '.join(SUFFIXES)}, found {suffix or 'no ending'!r}"
        )
    if suffix in (".json", ".csv"):
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not text in UTF-8: {error}") from error
        if suffix == ".csv":
            return FileData(*read_csv(text, path, graph))
        return _read_json(text, path, graph)
    with file.open("rb") as stream:
        signature = stream.read(8)
    values = _read_npz(file, signature) if suffix == ".npz" else _read_netcdf(file, signature)
    return FileData(values, _has_batch_axis(values, graph))


def _has_batch_axis(values: Mapping[str, Any], graph: Graph) -> bool:
    """Return whether every site has one axis more than in the model."""
    sites = [name for name in values if name in graph.observed]
    try:
        extra_axes = [np.ndim(values[name]) - len(graph.sites[name].shape) for name in sites]
    except ValueError:  # lists of unequal lengths, which `check_data` explains
        return False
    return bool(extra_axes) and all(number == 1 for number in extra_axes)


def _read_json(text: str, path: str, graph: Graph) -> FileData:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    expected = "expected an object of site → values, such as " + _example(graph)
    if isinstance(content, dict):
        _check_no_null(content, path)
        return FileData(content, _has_batch_axis(content, graph))
    if not isinstance(content, list):
        raise DataError(f"{path}: {expected}; found {_json_type(content)}")
    for number, dataset in enumerate(content):
        where = f"{path}, data set {number}"
        if not isinstance(dataset, dict):
            raise DataError(f"{where}: {expected}, or a list of these; found {_json_type(dataset)}")
        _check_no_null(dataset, where)
        if set(dataset) != set(content[0]):
            raise DataError(
                f"{where}: every data set must have the same sites; the first has "
                f"{', '.join(content[0])}, this one {', '.join(dataset) or 'none'}"
            )
    if not content:
        raise DataError(f"{path}: the list of data sets is empty")
    values = {name: [dataset[name] for dataset in content] for name in content[0]}
    return FileData(values, batched=True)


def _example(graph: Graph) -> str:
    """Return an example of the JSON that the model's data would have."""

    def zeros(shape: Sequence[int]) -> str:
        if not shape:
            return "0"
        inner = zeros(shape[1:])
        return f"[{inner}{f', {inner}, …' if shape[0] > 1 else ''}]"

    return "{" + ", ".join(f'"{n}": {zeros(graph.sites[n].shape)}' for n in graph.observed) + "}"


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a string", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number")


def _check_no_null(values: Mapping[str, Any], where: str) -> None:
    def null_index(value: Any) -> list[int] | None:
        if value is None:
            return []
        if isinstance(value, list):
            for number, item in enumerate(value):
                if (index := null_index(item)) is not None:
                    return [number, *index]
        return None

    for site, value in values.items():
        if (index := null_index(value)) is not None:
            raise DataError(
                f"{where}: site '{site}': the value{f' at {index}' if index else ''} is null. Data "
                "must be numbers; exclude missing values with a mask in the model"
            )


def _read_npz(file: Path, signature: bytes) -> dict[str, Any]:
    if not signature.startswith(b"PK"):
        raise DataError(f"{file} is not an NPZ file: write it with numpy.savez")
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {name: _read_npz_array(archive, name, file) for name in archive.files}
    except (zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{file} is damaged: {error}. Write it again with numpy.savez") from error


def _read_npz_array(archive: Any, name: str, file: Path) -> Any:
    try:
        return archive[name]
    except ValueError as error:
        raise DataError(
            f"{file}: site '{name}': expected an array of numbers, found one of Python objects, "
            "which is not safe to read"
        ) from error


def _read_netcdf(file: Path, signature: bytes) -> dict[str, Any]:
    import xarray

    # Files of version 4 are HDF5; those of version 3 have no groups.
    hdf5 = signature.startswith(b"\x89HDF")
    if not hdf5 and not signature.startswith(b"CDF"):
        raise DataError(f"{file} is not a NetCDF file")
    engine: Any = "h5netcdf" if hdf5 else "scipy"
    try:
        group = _find_group(file) if hdf5 else None
        # Do not convert times: the model's sites hold numbers.
        with xarray.open_dataset(file, engine=engine, group=group, decode_times=False) as dataset:
            return {str(name): dataset[name].values for name in dataset.data_vars}
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} cannot be read as NetCDF: {error}") from error


def _find_group(file: Path) -> str | None:
    """Return the group that holds the data, or None if they are outside of groups."""
    import h5py

    with h5py.File(file, "r") as hdf5:
        groups = [name for name, item in hdf5.items() if isinstance(item, h5py.Group)]
        if "observed_data" in groups:
            return "observed_data"
        if groups and len(groups) == len(hdf5):
            raise DataError(
                f"{file} has the groups {', '.join(groups)}; expected observed_data, or variables "
                "outside of groups"
            )
    return None
