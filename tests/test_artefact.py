"""The artefact file: exact round trips, detection of every kind of damage, atomic writes."""

import errno
import json
import math
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from enum import IntEnum
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from retrodict import artefact
from retrodict.artefact import DamagedFile, NewerFormat, read, write

PREAMBLE = 208
LABEL = 96

HEADER = {
    "graph": {"sites": ["alpha", "theta"], "γ": None},
    "history": {"loss": [1.5, -0.0, math.inf], "stopped": True},
}
ARRAYS = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([-0.0, np.nan]),
    "n": np.array(7, np.int16),
}


def user_keys(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header without the keys that `write` adds."""
    return {key: value for key, value in header.items() if key not in ("format", "versions")}


def identical(a: Any, b: Any) -> bool:
    """Compare strictly: 1, 1.0 and True differ, -0.0 and 0.0 differ, and NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b if isinstance(a, int) else repr(a) == repr(b)


def same_arrays(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return set(a) == set(b) and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes()
        for k in a
    )


def raw_file(
    header: bytes, weights: bytes, format_version: int = 1, writer: bytes = b"9.8.7"
) -> bytes:
    """Build a file by the layout in the module's docstring, without using the module."""
    label = b"\x89rd\r\n\x1a\n\0" + struct.pack("<I52s", format_version, writer)
    label += sha256(label).digest()
    label += struct.pack("<QQ", len(header), len(weights))
    label += sha256(header).digest() + sha256(weights).digest()
    return label + sha256(label).digest() + header + weights


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.rd", HEADER, ARRAYS)


# Round trips


def test_round_trip_adds_format_and_versions(small: Path) -> None:
    header, arrays = read(small)
    assert identical(user_keys(header), HEADER)
    assert header["format"] == artefact.FORMAT == 1
    assert header["versions"] == {name: version(name) for name in ("retrodict", "jax", "numpy")}
    assert same_arrays(arrays, ARRAYS)
    assert list(arrays) == sorted(ARRAYS)


def test_file_has_the_documented_layout(small: Path) -> None:
    data = small.read_bytes()
    length = struct.unpack_from("<Q", data, LABEL)[0]
    header, weights = data[PREAMBLE : PREAMBLE + length], data[PREAMBLE + length :]
    assert data == raw_file(header, weights, writer=version("retrodict").encode())

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} in the file")

    parsed = json.loads(header.decode("utf-8"), parse_constant=refuse)
    assert parsed["history"]["loss"] == [1.5, -0.0, {"float": "inf"}]
    assert parsed["format"] == 1
    assert same_arrays(safetensors.numpy.load(weights), ARRAYS)


def test_accepts_str_and_path_and_returns_the_path(tmp_path: Path) -> None:
    assert write(str(tmp_path / "x.rd"), {}, {}) == tmp_path / "x.rd"
    header, arrays = read(str(tmp_path / "x.rd"))
    assert user_keys(header) == {}
    assert arrays == {}


SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, database=None)

text = st.text(max_size=8)
keys = text | st.sampled_from(["float", "int", "dict"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["float", "int", "dict"]), inner, min_size=1, max_size=1)
    ),
    max_leaves=12,
)


@SETTINGS
@given(header=st.dictionaries(keys, json_values, max_size=4).map(user_keys))
def test_header_round_trip(tmp_path_factory: pytest.TempPathFactory, header: dict) -> None:
    path = write(tmp_path_factory.getbasetemp() / "header.rd", header, {})
    assert identical(user_keys(read(path)[0]), header)


@pytest.mark.parametrize(
    "value",
    [
        {"float": "inf"},
        {"dict": {"float": "nan"}},
        {"int": "0x10"},
        {"dict": {"dict": {}}},
        {"float": 1.0, "int": 2},
        2**64,
        -(2**63) - 1,
        1 << 40_000,  # more decimal digits than Python parses
        -(1 << 40_000),
        5e-324,
        1.7976931348623157e308,
        -math.inf,
        math.nan,
        "\0\u2028é𝔘",
    ],
    ids=lambda value: repr(value)[:30] if not isinstance(value, int) else f"{value:#x}"[:12],
)
def test_header_values_that_json_cannot_represent(tmp_path: Path, value: object) -> None:
    header = {"top": value, "list": [value]}
    assert identical(user_keys(read(write(tmp_path / "x.rd", header, {}))[0]), header)


class Pair(NamedTuple):
    a: int
    b: tuple[int, ...]


def test_tuples_become_lists_and_numpy_scalars_python_scalars(tmp_path: Path) -> None:
    header = {
        "pair": Pair(1, (2, 3)),
        "f32": np.float32(0.1),
        "f64": np.float64(0.1),
        "f16": np.float16(np.inf),
        "u64": np.uint64(2**64 - 1),
        "bool": np.bool_(True),
        "str": np.str_("é"),
        "proxy": MappingProxyType({"a": ()}),
    }
    expected = {
        "pair": [1, [2, 3]],
        "f32": 0.10000000149011612,
        "f64": 0.1,
        "f16": math.inf,
        "u64": 2**64 - 1,
        "bool": True,
        "str": "é",
        "proxy": {"a": []},
    }
    assert identical(user_keys(read(write(tmp_path / "x.rd", header, {}))[0]), expected)


DTYPES = [
    *("float16", "float32", "float64", "complex64", "bool"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
]


@SETTINGS
@given(
    arrays=st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
        ),
        max_size=4,
    )
)
def test_arrays_round_trip(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, np.ndarray]
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "arrays.rd", {}, arrays)
    assert same_arrays(read(path)[1], arrays)


def every_bit_pattern(dtype: np.dtype) -> np.ndarray:
    """Return all NaN payloads, infinities, subnormals and zeros of a 16-bit type."""
    return np.arange(2**16, dtype=np.uint16).view(dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_bit_pattern_of_16_bits_round_trips(tmp_path: Path, dtype: type) -> None:
    arrays = {"x": every_bit_pattern(np.dtype(dtype))}
    assert same_arrays(read(write(tmp_path / "x.rd", {}, arrays))[1], arrays)


def test_nan_payloads_and_signed_zeros_round_trip(tmp_path: Path) -> None:
    bits32 = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 1], np.uint32)
    bits64 = np.array([0x7FF8000000000001, 0x7FF0000000000001, 1 << 63, 1], np.uint64)
    arrays = {"f32": bits32.view(np.float32), "f64": bits64.view(np.float64)}
    loaded = read(write(tmp_path / "x.rd", {}, arrays))[1]
    assert np.array_equal(loaded["f32"].view(np.uint32), bits32)
    assert np.array_equal(loaded["f64"].view(np.uint64), bits64)


def test_memory_layout_does_not_matter(tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    layouts = {
        "transposed": (x.T, x.T.copy()),
        "strided": (x[::2, ::-3], x[::2, ::-3].copy()),
        "broadcast": (np.broadcast_to(x[0], (3, 6)), np.tile(x[0], (3, 1))),
        "fortran": (np.asfortranarray(x), x),
        "big-endian": (x.astype(">f4"), x),
        "jax": (jnp.asarray(x), x),
        "scalar": (np.float32(2.5), np.array(2.5, np.float32)),
    }
    arrays = {name: array for name, (array, _) in layouts.items()}
    expected = {name: contiguous for name, (_, contiguous) in layouts.items()}
    loaded = read(write(tmp_path / "x.rd", {}, arrays))[1]
    assert same_arrays(loaded, expected)
    assert all(array.flags.writeable for array in loaded.values())


def test_equal_contents_give_equal_bytes(tmp_path: Path) -> None:
    one = write(tmp_path / "one.rd", HEADER, ARRAYS).read_bytes()
    shuffled = dict(reversed(ARRAYS.items()))
    strided = {name: np.stack([array, array], -1)[..., 0] for name, array in shuffled.items()}
    assert write(tmp_path / "two.rd", HEADER, shuffled).read_bytes() == one
    assert write(tmp_path / "three.rd", HEADER, strided).read_bytes() == one
    assert write(tmp_path / "four.rd", {**HEADER, "seed": 1}, ARRAYS).read_bytes() != one


# Headers and arrays that cannot be stored


class Colour(IntEnum):
    RED = 1


nested: list[Any] = []
nested.append(nested)


@pytest.mark.parametrize(
    ("header", "where"),
    [
        ({"history": {"loss": [1.0, 2.0, 3.0, 1j]}}, r"^history\.loss\[3\] .* complex"),
        ({"a": [{"b": {1, 2}}]}, r"^a\[0\]\.b .* set"),
        ({"a": b"bytes"}, "^a .* bytes"),
        ({"a": np.zeros(3)}, "^a .* ndarray.*among the arrays"),
        ({"a": np.longdouble(1)}, "^a .* longdouble"),
        ({"a": np.timedelta64(1, "ns")}, "^a .* timedelta64"),
        ({"a": np.datetime64(1, "ns")}, "^a .* datetime64"),
        ({"a": np.complex64(1)}, "^a .* complex64"),
        ({"a": Colour.RED}, "^a .* Colour"),
        ({"a": "\ud800"}, r"^a .* '\\ud800'"),
        ({"a": {"b": {"\udc00": 1}}}, r"^a key of a\.b is '\\udc00'"),
        ({"a": {3: 1}}, "^a key of a is 3; keys must be"),
        ({None: 1}, "^a key of the header is None"),
        ({"a": nested}, r"nested more than 64 deep at a\[0\]\[0\]"),
        ({"a": object}, "^a .* type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unstorable_header_value_is_named(tmp_path: Path, header: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        write(tmp_path / "x.rd", header, {})
    assert list(tmp_path.iterdir()) == []


def test_deepest_header_is_read_deep_in_the_call_stack(tmp_path: Path) -> None:
    value: Any = 1
    for _ in range(artefact._MAX_DEPTH):
        value = [value]
    path = write(tmp_path / "x.rd", {"a": value}, {})

    def descend(levels: int) -> Any:
        return descend(levels - 1) if levels else read(path)

    assert user_keys(descend(sys.getrecursionlimit() // 2)[0]) == {"a": value}


@pytest.mark.parametrize("key", ["format", "versions"])
def test_reserved_keys_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match=f"key '{key}' is reserved; rename it"):
        write(tmp_path / "x.rd", {key: 1}, {})


@pytest.mark.parametrize(
    ("array", "finding"),
    [
        (np.array([object()]), "of dtype object"),
        (np.array(["a"]), "of dtype <U1"),
        (np.zeros(2, np.complex128), "of dtype complex128"),
        (np.zeros(2, np.longdouble), "of dtype float128"),
        (np.zeros(2, "M8[s]"), r"of dtype datetime64\[s\]"),
        (np.zeros(2, [("a", "f4")]), r"of dtype \[\('a', '<f4'\)\]"),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), "of dtype float8_e4m3fn"),
        (jax.random.key(0), "of dtype key<fry>"),
        ([1.0, 2.0], "of type list"),
        (None, "of type NoneType"),
    ],
)
def test_unstorable_array_is_named(tmp_path: Path, array: Any, finding: str) -> None:
    message = f"^array 'net/w' cannot be stored: it is {finding}; convert"
    with pytest.raises(TypeError, match=message):
        write(tmp_path / "x.rd", {}, {"a": np.zeros(1), "net/w": array})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("__metadata__", ValueError, "'__metadata__' is reserved by safetensors; rename"),
        ("a\ud800", TypeError, r"name must be a string of Unicode text, found 'a\\ud800'"),
        (3, TypeError, "name must be a string of Unicode text, found 3"),
    ],
)
def test_invalid_array_names_are_refused(
    tmp_path: Path, name: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        write(tmp_path / "x.rd", {}, {name: np.zeros(1), "ok": np.zeros(1)})


# Damage


def damage_message(path: Path, data: bytes) -> str:
    """Return the message of the error that reading these bytes raises."""
    path.write_bytes(data)
    with pytest.raises(DamagedFile) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is ")
    assert "opy it again from where it was made" in message
    return message


def flip_messages(path: Path, data: bytes, bits: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Flip each bit on its own and yield it with the message of the error."""
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for bit in bits:
            byte = data[bit // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
            with pytest.raises(DamagedFile) as caught:
                read(path)
            os.pwrite(file.fileno(), bytes([byte]), bit // 8)
            yield bit, str(caught.value)
    assert path.read_bytes() == data


def test_truncation_at_every_byte_is_detected(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    bad = tmp_path / "bad.rd"
    for length in range(len(data)):
        message = damage_message(bad, data[:length])
        if length < 8:
            assert "is not a retrodict file" in message
        elif length < PREAMBLE:
            assert f"is damaged: it is truncated after {length} bytes" in message
        else:
            assert f"it is truncated after {length} of {len(data)} bytes" in message
    bad.write_bytes(data)
    read(bad)


def test_every_bit_flip_of_a_small_file_is_detected(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    header_end = PREAMBLE + struct.unpack_from("<Q", data, LABEL)[0]
    regions = {
        8: "is not a retrodict file: its first bytes are not those of one",
        LABEL: "the checksum of its label does not match",
        PREAMBLE: "the checksum of its preamble does not match",
        header_end: "the checksum of its header does not match",
        len(data): "the checksum of its weights does not match",
    }
    for bit, message in flip_messages(tmp_path / "bad.rd", data, range(8 * len(data))):
        expected = next(message for end, message in regions.items() if bit // 8 < end)
        assert expected in message, bit


def test_truncation_and_random_flips_of_a_large_file_are_detected(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.normal(size=(300, 41)).astype(np.float32) for i in range(4)}
    header = {"loss": rng.normal(size=2000).tolist()}
    data = write(tmp_path / "large.rd", header, arrays).read_bytes()
    bad = tmp_path / "bad.rd"
    for length in range(0, len(data), 1000):
        damage_message(bad, data[:length])
    bits = [int(bit) for bit in rng.integers(64, 8 * len(data), size=200)]
    for bit, message in flip_messages(bad, data, bits):
        assert "checksum" in message, bit


def test_other_kinds_of_damage_are_detected(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    bad = tmp_path / "bad.rd"
    assert "1 bytes follow its end" in damage_message(bad, data + b"\0")
    assert f"{len(data)} bytes follow its end" in damage_message(bad, data + data)
    assert "checksum" in damage_message(bad, data[:PREAMBLE] + data[PREAMBLE:][::-1])
    assert "checksum" in damage_message(bad, data[:300] + bytes(len(data) - 300))
    assert "its first bytes are not those of one" in damage_message(
        bad, data.replace(b"\r\n", b"\n")
    )
    assert "its first bytes are not those of one" in damage_message(bad, b"\n" + data)
    # Parts of two files: each has a valid checksum, but in the other file.
    other = write(tmp_path / "other.rd", {**HEADER, "seed": 1}, ARRAYS).read_bytes()
    assert "truncated" in damage_message(bad, other[:PREAMBLE] + data[PREAMBLE:])
    assert "checksum of its preamble" in damage_message(
        bad, data[:LABEL] + bytes(112) + data[PREAMBLE:]
    )


def test_files_of_other_programs_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.rd"
    assert f"{bad} is not a retrodict file: it is empty. Give a file" in damage_message(bad, b"")
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as handle:
        handle.writestr("a.txt", "text" * 100)
    contents = [
        b"x",
        b"def pumps(t=None):\n    pass\n" * 50,
        archive.read_bytes(),
        safetensors.numpy.save(ARRAYS),
        bytes(1000),
        b"{}",
    ]
    for content in contents:
        assert "is not a retrodict file: its first bytes are not those of one" in damage_message(
            bad, content
        )


@pytest.mark.parametrize("sizes", [(2**63, 0), (0, 2**63), (2**64 - 1, 2**64 - 1), (2**40, 5)])
def test_lengths_beyond_the_file_allocate_nothing(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Wrong lengths with valid checksums are refused without allocating memory for them."""
    data = raw_file(b"{}", safetensors.numpy.save({}))
    preamble = data[:LABEL] + struct.pack("<QQ", *sizes) + data[LABEL + 16 : PREAMBLE - 32]
    data = preamble + sha256(preamble).digest() + data[PREAMBLE:]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, hard))
    try:
        message = damage_message(tmp_path / "bad.rd", data)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert f"it is truncated after {len(data)} of {PREAMBLE + sum(sizes)} bytes" in message


EMPTY = safetensors.numpy.save({})


@pytest.mark.parametrize(
    ("header", "weights"),
    [
        (b"", EMPTY),
        (b"[]", EMPTY),
        (b"3", EMPTY),
        (b'{"a": }', EMPTY),
        (b"\xff\xfe{}", EMPTY),
        ('{"a": 1}'.encode("utf-16"), EMPTY),
        (b'{"a": {"float": "x"}}', EMPTY),
        (b'{"a": {"float": []}}', EMPTY),
        (b'{"a": {"int": 3}}', EMPTY),
        (b'{"a": {"dict": 3}}', EMPTY),
        (b'{"float": "inf"}', EMPTY),
        (b'{"a": ' + b"1" * 10_000 + b"}", EMPTY),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", EMPTY),
        (b"{}", b""),
        (b"{}", b"not safetensors"),
        (b"{}", b"\xff" * 64),
        (b"{}", safetensors.numpy.save({"a": np.zeros(2)})[:-1]),
        (b"{}", safetensors.numpy.save({"a": np.zeros(2, ml_dtypes.float8_e4m3fn)})),
    ],
)
def test_undecodable_contents_with_valid_checksums_are_refused(
    tmp_path: Path, header: bytes, weights: bytes
) -> None:
    message = damage_message(tmp_path / "bad.rd", raw_file(header, weights))
    assert "its checksums match, but its contents cannot be decoded" in message


def test_file_built_without_the_module_is_read(tmp_path: Path) -> None:
    """Counterpart of the test above: `raw_file` itself builds valid files."""
    path = tmp_path / "x.rd"
    path.write_bytes(raw_file(b' {"a": {"float": "-inf"}} ', safetensors.numpy.save(ARRAYS)))
    header, arrays = read(path)
    assert header == {"a": -math.inf}
    assert same_arrays(arrays, ARRAYS)


# Newer formats


@pytest.mark.parametrize("rest", [b"", b"another layout", bytes(1000)])
@pytest.mark.parametrize("number", [2, 3, 2**32 - 1])
def test_newer_format_is_refused(tmp_path: Path, number: int, rest: bytes) -> None:
    path = tmp_path / "x.rd"
    path.write_bytes(raw_file(b"", b"", number)[:LABEL] + rest)
    with pytest.raises(NewerFormat) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path} was written by retrodict 9.8.7 in format {number}. This is retrodict "
        f"{version('retrodict')}, which reads format 1. Install retrodict 9.8.7 or newer, or save "
        "the model again with this version."
    )
    assert not isinstance(caught.value, DamagedFile)


def test_file_of_a_later_version_of_the_module_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(artefact, "FORMAT", 2)
        path = write(tmp_path / "x.rd", HEADER, ARRAYS)
        assert read(path)[0]["format"] == 2
    with pytest.raises(NewerFormat, match=rf"retrodict {version('retrodict')} in format 2"):
        read(path)


def test_damaged_file_of_a_newer_format_is_damaged(tmp_path: Path) -> None:
    data = raw_file(b"{}", EMPTY, 2)[:LABEL]
    for bit, message in flip_messages(tmp_path / "bad.rd", data, range(64, 8 * LABEL)):
        assert "the checksum of its label does not match" in message, bit


def test_format_zero_does_not_exist(tmp_path: Path) -> None:
    message = damage_message(tmp_path / "bad.rd", raw_file(b"{}", EMPTY, 0))
    assert "its label gives format 0, which does not exist" in message


# Atomic writes


def check_complete(path: Path, *seeds: int) -> int:
    """Check that the file is complete and alone in its folder, and return its seed."""
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    header, arrays = read(path)
    assert header["seed"] in seeds
    assert np.array_equal(arrays["w"], content(header["seed"])[1]["w"])
    return int(header["seed"])


def content(seed: int, size: int = 5000) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return {"seed": seed}, {"w": np.full(size, seed, np.int32)}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write(tmp_path / "x.rd", *content(1))


FAILURES = [OSError(errno.EIO, "disk on fire"), KeyboardInterrupt(), MemoryError(), SystemExit(1)]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("function", ["replace", "fsync", "chmod"])
def test_failed_write_leaves_the_old_file(
    old: Path, monkeypatch: pytest.MonkeyPatch, function: str, failure: BaseException
) -> None:
    calls = []

    def fail(*args: object, **kwargs: object) -> None:
        calls.append(args)
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(type(failure)) as caught:
            write(old, *content(2))
    assert len(calls) == 1
    assert check_complete(old, 1)
    if isinstance(failure, OSError):
        assert str(caught.value) == (
            "[Errno 5] not saved, nothing was changed: disk on fire; correct this, or use another "
            f"folder or disk: '{old}'"
        )


@pytest.mark.parametrize("exists", [True, False])
def test_write_that_stops_halfway_changes_nothing(tmp_path: Path, exists: bool) -> None:
    """The operating system limits the file to 9000 bytes."""
    path = tmp_path / "x.rd"
    if exists:
        write(path, *content(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    try:
        with pytest.raises(
            OSError, match="not saved, nothing was changed: File too large"
        ) as caught:
            write(path, *content(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    if exists:
        assert check_complete(path, 1)
    else:
        assert list(tmp_path.iterdir()) == []


def test_full_disk_error_gives_the_bytes_needed(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    size = old.stat().st_size
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"the disk is full; free {size} bytes or use another disk"):
        write(old, *content(2))
    assert check_complete(old, 1)


@contextmanager
def interrupted_at(event: int) -> Iterator[Callable[[], int]]:
    """Raise KeyboardInterrupt before the module executes its `event`-th line."""
    lines = 0

    def trace(frame: FrameType, kind: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != artefact.__file__:
            return None
        if kind == "line":
            lines += 1
            if lines == event:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: lines
    finally:
        sys.settrace(previous)


def test_interrupt_at_any_line_leaves_a_complete_file(old: Path) -> None:
    outcomes = []
    for event in range(1, 1000):
        interrupted = False
        with interrupted_at(event) as count_lines:
            try:
                write(old, *content(2))
            except KeyboardInterrupt:
                interrupted = True
        if not interrupted:
            break
        outcomes.append(check_complete(old, 1, 2))
        write(old, *content(1))
    # The old file until the replacement, the new file from then on; both occur.
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}
    assert count_lines() == len(outcomes) == event - 1
    assert check_complete(old, 2)


CRASH = """
import os, signal, sys
import numpy as np
from retrodict.artefact import write
write(sys.argv[1], {"seed": 1}, {"w": np.full(5000, 1, np.int32)})
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
write(sys.argv[1], {"seed": 2}, {"w": np.full(5000, 2, np.int32)})
"""


def test_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.rd"
    process = subprocess.run([sys.executable, "-c", CRASH, str(path)], check=False, timeout=60)
    assert process.returncode == -signal.SIGKILL
    # The temporary file remains: it is hidden, and its name says which program made it.
    [temporary] = [entry for entry in tmp_path.iterdir() if entry != path]
    assert temporary.name.startswith(".retrodict-")
    temporary.unlink()
    assert check_complete(path, 1)


def test_data_are_synced_before_the_rename_and_the_folder_after(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        folder = stat.S_ISDIR(status.st_mode)
        events.append("folder" if folder else f"file of {status.st_size} bytes")
        fsync(descriptor)

    def logged_replace(source: Path, target: Path) -> None:
        assert Path(source).parent == Path(target).parent == old.parent
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    write(old, *content(2, 3))  # smaller than Python's write buffer
    assert events == [f"file of {old.stat().st_size} bytes", "replace", "folder"]


@pytest.mark.parametrize(
    ("code", "tolerated"),
    [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)],
)
def test_unsupported_folder_sync_is_tolerated_and_failed_one_reported(
    old: Path, monkeypatch: pytest.MonkeyPatch, code: int, tolerated: bool
) -> None:
    fsync = os.fsync

    def no_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    num_descriptors = len(list(Path("/proc/self/fd").iterdir()))
    if tolerated:
        write(old, *content(2))
    else:
        with pytest.raises(OSError, match="saved, but the disk did not confirm it") as caught:
            write(old, *content(2))
        assert caught.value.errno == code
    assert len(list(Path("/proc/self/fd").iterdir())) == num_descriptors
    assert check_complete(old, 2)


def test_concurrent_readers_only_see_complete_files(old: Path) -> None:
    """Two readers run beside two writers."""
    stop = threading.Event()

    def read_repeatedly() -> set[int]:
        seeds = set()
        while not stop.is_set():
            header, arrays = read(old)
            seed = header["seed"]
            assert np.array_equal(arrays["w"], content(seed, 5000 * seed)[1]["w"])
            seeds.add(seed)
        return seeds

    def write_repeatedly(first: int) -> None:
        for i in range(60):
            seed = 1 + (first + i) % 9
            write(old, *content(seed, 5000 * seed))

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read_repeatedly) for _ in range(2)]
        writers = [pool.submit(write_repeatedly, first) for first in (0, 4)]
        wait(writers)
        stop.set()
    for writer in writers:
        writer.result()
    assert len(set().union(*(reader.result() for reader in readers))) > 3
    assert [entry.name for entry in old.parent.iterdir()] == [old.name]


def test_file_replaced_during_reading_is_read_in_its_old_version(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced between the reading of the preamble and of the rest."""
    check = artefact._check_preamble

    def check_then_replace(*args: Any) -> Any:
        result = check(*args)
        monkeypatch.undo()
        write(old, *content(2))
        return result

    monkeypatch.setattr(artefact, "_check_preamble", check_then_replace)
    assert read(old)[0]["seed"] == 1
    assert read(old)[0]["seed"] == 2


# Permissions, links and paths


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_of_a_new_file_follows_the_umask(tmp_path: Path, umask: int) -> None:
    previous = os.umask(umask)
    try:
        path = write(tmp_path / "x.rd", {}, {})
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o777])
def test_replaced_file_keeps_its_mode(
    old: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    old.chmod(mode)
    modes = []
    fsync = os.fsync

    def logged_fsync(descriptor: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    write(old, *content(2))
    assert check_complete(old, 2)
    assert stat.S_IMODE(old.stat().st_mode) == mode
    assert modes[0] == mode


def test_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    link, target = tmp_path / "a" / "link.rd", tmp_path / "b" / "x.rd"
    link.symlink_to(target)
    for seed in (1, 2):  # at first the target does not exist
        assert write(link, *content(seed)) == link
        assert link.is_symlink()
        assert check_complete(target, seed) == check_complete(link, seed) == seed


def test_paths_that_cannot_be_written_are_explained(tmp_path: Path, old: Path) -> None:
    def error_message(kind: type[OSError], path: Path) -> str:
        with pytest.raises(kind) as caught:
            write(path, *content(2))
        assert caught.value.filename == str(path)
        assert caught.value.errno
        assert str(caught.value).endswith(f": '{path}'")
        assert "not saved, nothing was changed: " in str(caught.value)
        return str(caught.value)

    missing = tmp_path / "missing" / "x.rd"
    message = error_message(FileNotFoundError, missing)
    assert f"the folder {missing.parent} does not exist; create it first" in message
    message = error_message(IsADirectoryError, tmp_path)
    assert f"it is a folder; give a file in it, such as {tmp_path / 'model.rd'}" in message
    message = error_message(NotADirectoryError, old / "x.rd")
    assert f"{old} is not a folder; give another path" in message
    assert check_complete(old, 1)


def test_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="it is a device or a pipe, not a file") as caught:
        write(pipe, *content(2))
    assert caught.value.filename == str(pipe)
    assert pipe.is_fifo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def deny_access(*args: object, **kwargs: object) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_read_only_file_is_not_replaced(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old.chmod(0o444)
    if os.geteuid() == 0:  # root may write every file
        monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK))
    with pytest.raises(PermissionError, match="make file and folder writable") as caught:
        write(old, *content(2))
    assert caught.value.filename == str(old)
    assert check_complete(old, 1)


def test_read_only_folder_leaves_the_old_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", deny_access)
        with pytest.raises(PermissionError, match="permission is denied; give another path"):
            write(old, *content(2))
    assert check_complete(old, 1)


def test_paths_that_cannot_be_read_are_explained(
    tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_message(kind: type[OSError], path: Path) -> str:
        with pytest.raises(kind, match="not loaded: ") as caught:
            read(path)
        assert caught.value.filename == str(path)
        assert str(caught.value).endswith(f": '{path}'")
        return str(caught.value)

    assert "no such file; check the path" in error_message(FileNotFoundError, tmp_path / "none.rd")
    assert "it is a folder; give the path of a file in it" in error_message(
        IsADirectoryError, tmp_path
    )
    assert "Not a directory" in error_message(NotADirectoryError, old / "x.rd")
    monkeypatch.setattr(Path, "open", deny_access)
    assert "make the file and its folder readable" in error_message(PermissionError, old)
