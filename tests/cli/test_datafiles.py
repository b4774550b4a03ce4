"""Data files: equal data from every format, and clear messages for invalid files."""

import io
import json
import sys
from functools import cache

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray

import retrodict as rd
from retrodict.cli.datafiles import read_data
from retrodict.graph.validate import check_data

T, Y = [94.3, 15.7, 62.9], [5, 1, 5]
M = [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]]
DATA = {"sigma": 2.0, "t": T, "y": Y, "m": M}


def model(n=3):
    """Observed sites: a scalar, two vectors and a matrix with an event axis."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("sigma", dist.Exponential(rate))
    with numpyro.plate("n", n):
        t = numpyro.sample("t", dist.Exponential(0.02))
        numpyro.sample("y", dist.Poisson(rate * t))
        numpyro.sample("m", dist.Normal(rate, 1.0).expand([2]).to_event(1))


@cache
def graph():
    return rd.trace(model, ["sigma", "t", "y", "m"])


def read(path):
    data = read_data(str(path), graph())
    return check_data(graph(), data.values, many=data.batched), data.batched


def assert_close(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-6)


def write_csv(path, text):
    path.write_text("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")


def write_data(path):
    if path.suffix == ".json":
        path.write_text(json.dumps(DATA))
    elif path.suffix == ".npz":
        np.savez(path, **{name: np.asarray(value) for name, value in DATA.items()})
    elif path.suffix == ".nc":
        dataset().to_netcdf(path, engine="h5netcdf")
    else:
        write_csv(
            path,
            """sigma, t, y, m[0], m[1]
            2, 94.3, 5, 0.5, 1.5
            , 15.7, 1, 2.5, 3.5
            , 62.9, 5, 4.5, 5.5""",
        )
    return path


def dataset(values=DATA, leading=()):
    def dims(name, value):
        return [*leading, *(f"{name}_{i}" for i in range(np.ndim(value) - len(leading)))]

    return xarray.Dataset({name: (dims(name, value), value) for name, value in values.items()})


@pytest.mark.parametrize("suffix", ["json", "csv", "npz", "nc"])
def test_every_format_gives_the_same_data(suffix, tmp_path):
    values, batched = read(write_data(tmp_path / f"data.{suffix}"))
    assert not batched
    assert_close(values, DATA)


def test_netcdf_with_arviz_groups_and_of_version_3(tmp_path):
    posterior = xarray.Dataset({"rate": ("draw", [1.0, 2.0])})
    posterior.to_netcdf(tmp_path / "arviz.nc", group="posterior", engine="h5netcdf")
    dataset().to_netcdf(tmp_path / "arviz.nc", mode="a", group="observed_data", engine="h5netcdf")
    assert_close(read(tmp_path / "arviz.nc")[0], DATA)
    dataset().to_netcdf(tmp_path / "version3.nc", engine="scipy", format="NETCDF3_64BIT")
    assert_close(read(tmp_path / "version3.nc")[0], DATA)
    posterior.to_netcdf(tmp_path / "none.nc", group="posterior", engine="h5netcdf")
    with pytest.raises(rd.DataError, match="has the groups posterior; expected observed_data"):
        read(tmp_path / "none.nc")


def test_json_from_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(DATA)))
    assert_close(read("-")[0], DATA)


def two_datasets():
    return {name: np.stack([value, np.asarray(value) + 1]) for name, value in DATA.items()}


@pytest.mark.parametrize("kind", ["list", "json", "npz", "nc"])
def test_two_data_sets(kind, tmp_path):
    path = tmp_path / f"data.{'json' if kind == 'list' else kind}"
    lists = {name: value.tolist() for name, value in two_datasets().items()}
    if kind == "list":
        objects = [{name: value[i] for name, value in lists.items()} for i in range(2)]
        path.write_text(json.dumps(objects))
    elif kind == "json":
        path.write_text(json.dumps(lists))
    elif kind == "npz":
        np.savez(path, **two_datasets())
    else:
        dataset(two_datasets(), ("set",)).to_netcdf(path, engine="h5netcdf")
    values, batched = read(path)
    assert batched
    assert_close(values, two_datasets())


def test_csv_with_one_row_per_data_set(tmp_path):
    """Indices after dots, columns in any order, row labels as pandas writes them."""
    path = tmp_path / "data.csv"
    names = [f"t.{i}" for i in (2, 0, 1)] + [f"y.{i}" for i in range(3)]
    names += [f"m.{i}.{j}" for i in range(3) for j in range(2)] + ["sigma"]
    row = [T[2], T[0], T[1], *Y, *np.ravel(M).tolist(), 2.0]
    lines = [["", *names], [0, *row], [1, *(value + 1 for value in row)]]
    path.write_text("\n".join(",".join(map(str, line)) for line in lines))
    values, batched = read(path)
    assert batched
    assert_close(values, two_datasets())
    path.write_text("\n".join(",".join(map(str, line)) for line in lines[:2]))
    values, batched = read(path)
    assert not batched
    assert_close(values, DATA)


def test_csv_columns_of_different_lengths_and_booleans(tmp_path):
    def switches():
        p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        numpyro.sample("a", dist.Bernoulli(p).expand([2]).to_event(1))
        numpyro.sample("b.0", dist.Normal(p, 1.0).expand([3]).to_event(1))

    path = tmp_path / "data.csv"
    write_csv(path, "a,b.0\nTRUE,1.5\nfalse,2.5\n,3.5\n\n,\n")
    data = read_data(str(path), rd.trace(switches, ["a", "b.0"]))
    assert_close(data.values, {"a": [1, 0], "b.0": [1.5, 2.5, 3.5]})


INVALID_FILES = {
    "unknown suffix": ("data.txt", "", "name ending in .json, .csv, .npz, .nc, found '.txt'"),
    "no suffix": ("data", "", "found 'no ending'"),
    "broken JSON": ("data.json", '{"t": [1, 2', "is not JSON"),
    "JSON number": ("data.json", "3", r'such as {"sigma": 0, "t": \[0, 0, …\].*found a number'),
    "list of numbers": ("data.json", "[1, 2]", "data set 0: expected an object .* found a number"),
    "no data sets": ("data.json", "[]", "the list of data sets is empty"),
    "other sites": ("data.json", '[{"t": 1}, {"y": 1}]', "data set 1: .* the first has t, this"),
    "null": ("data.json", '{"t": [1, null, 2]}', r"site 't': the value at \[1\] is null"),
    "null scalar": ("data.json", '{"sigma": null}', "site 'sigma': the value is null"),
    "null in a set": ("data.json", '[{"t": [1, null]}]', r"data set 0: site 't': .* \[1\] is null"),
    "NaN": ("data.json", json.dumps(DATA | {"t": [1.0, float("nan"), 2.0]}), r"\[1\] is nan"),
    "words": ("data.json", json.dumps(DATA | {"t": ["a", "b", "c"]}), "site 't': expected num"),
    "ragged": ("data.json", json.dumps(DATA | {"m": [[1], [1, 2]]}), "unequal lengths"),
    "unknown site": ("data.json", json.dumps(DATA | {"q": 1}), "'q', which is not an observed"),
    "missing site": ("data.json", json.dumps({"t": T}), "data lacks site 'sigma'"),
    "wrong shape": ("data.json", json.dumps(DATA | {"y": [1, 2]}), r"expected shape \(3,\)"),
    "not text": ("data.csv", b"\xff\xfe\x00", "is not text in UTF-8"),
    "empty": ("data.csv", "\n", "is empty; expected a first row of site names"),
    "names alone": ("data.csv", "t,y\n", "a row of names, t, y, and no row of values"),
    "no names": ("data.csv", "1,2\n3,4\n", "the first row must name the sites, found 1, 2"),
    "twice": ("data.csv", "t,t\n1,2\n", "the column 't' occurs 2 times"),
    "long line": ("data.csv", "t,y\n1,2\n1,2,3\n", "line 3: expected 2 values, for t, y; found 3"),
    "word": ("data.csv", "t\n1\nNA\n", "line 3: site 't': expected a number, found 'NA'"),
    "empty cell": ("data.csv", "t,y\n1,2\n,2\n3,4\n", "line 3: site 't' has an empty cell"),
    "blank line": ("data.csv", "sigma\n1\n\n2\n", "lacks site 't'"),
    "gap": ("data.csv", "m[0],m[2]\n1,2\n", r"2 columns up to index \[2\], but no column m\[1\]"),
    "mixed": ("data.csv", 'm[0],"m[0,1]"\n1,2\n', "indices of different lengths"),
    "no quotes": ("data.csv", "m[0,0],m[0,1]\n1,2\n", r"'m\[0' was split at a comma: .* m?y.0.1"),
    "two values": ("data.csv", "sigma,t\n1,2\n3,4\n", "line 3: site 'sigma' has one value .* 3"),
    "open quote": ("data.csv", 't\n"1\n', "line 2: unexpected end of data"),
    "not NPZ": ("data.npz", "hello", "is not an NPZ file"),
    "broken NPZ": ("data.npz", b"PK\x03\x04garbage", "is damaged"),
    "not NetCDF": ("data.nc", "hello", "is not a NetCDF file"),
    "broken NetCDF": ("data.nc", b"\x89HDF\r\n\x1a\ngarbage", "cannot be read as NetCDF"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"), INVALID_FILES.values(), ids=INVALID_FILES.keys()
)
def test_invalid_files_are_explained(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(rd.DataError, match=message):
        read(path)


def test_arrays_of_objects_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "data.npz", t=np.array([print, 1], dtype=object))
    with pytest.raises(rd.DataError, match="site 't': expected an array of numbers, found one of"):
        read(tmp_path / "data.npz")
