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
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from retrodict import artefact
from retrodict.artefact import DamagedFile, NewerFormat, OlderFormat, read, write

LABEL = 96
CONTENTS = 128

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
    header: bytes, weights: bytes, format_version: int = 2, writer: bytes = b"9.8.7"
) -> bytes:
    """Build a file by the layout in the module's docstring, without using the module."""
    label = b"\x89rd\r\n\x1a\n\0" + struct.pack("<I52s", format_version, writer)
    contents = struct.pack("<Q", len(header)) + header + weights
    return label + sha256(label).digest() + sha256(contents).digest() + contents


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.rd", HEADER, ARRAYS)


# Round trips


def test_round_trip_adds_format_and_versions(small: Path) -> None:
    header, arrays = read(small)
    assert identical(user_keys(header), HEADER)
    assert header["format"] == artefact.FORMAT == 2
    assert header["versions"] == {name: version(name) for name in ("retrodict", "jax", "numpy")}
    assert same_arrays(arrays, ARRAYS)
    assert list(arrays) == sorted(ARRAYS)


def test_file_has_the_documented_layout(small: Path) -> None:
    data = small.read_bytes()
    start = CONTENTS + 8
    end = start + struct.unpack_from("<Q", data, CONTENTS)[0]
    header, weights = data[start:end], data[end:]
    assert data == raw_file(header, weights, writer=version("retrodict").encode())
    parsed = json.loads(header)
    assert parsed["history"]["loss"] == [1.5, -0.0, math.inf]
    assert parsed["format"] == 2
    assert same_arrays(safetensors.numpy.load(weights), ARRAYS)


def test_accepts_str_and_path_and_returns_the_path(tmp_path: Path) -> None:
    assert write(str(tmp_path / "x.rd"), {}, {}) == tmp_path / "x.rd"
    header, arrays = read(str(tmp_path / "x.rd"))
    assert user_keys(header) == {}
    assert arrays == {}


SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, database=None)

text = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=3),
    max_leaves=12,
)


@SETTINGS
@given(header=st.dictionaries(text, json_values, max_size=4).map(user_keys))
def test_header_round_trip(tmp_path_factory: pytest.TempPathFactory, header: dict) -> None:
    path = write(tmp_path_factory.getbasetemp() / "header.rd", header, {})
    assert identical(user_keys(read(path)[0]), header)


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**63) - 1, 5e-324, 1.7976931348623157e308, -math.inf, math.nan, "\0\u2028é𝔘\ud800"],
    ids=ascii,
)
def test_extreme_header_values_round_trip(tmp_path: Path, value: object) -> None:
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
    }
    expected = {
        "pair": [1, [2, 3]],
        "f32": 0.10000000149011612,
        "f64": 0.1,
        "f16": math.inf,
        "u64": 2**64 - 1,
        "bool": True,
        "str": "é",
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


def test_every_bit_pattern_of_16_bits_round_trips(tmp_path: Path) -> None:
    """All NaN payloads, infinities, subnormals and zeros."""
    arrays = {"x": np.arange(2**16, dtype=np.uint16).view(np.float16)}
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


@pytest.mark.parametrize("value", [1j, {1, 2}, b"bytes", np.zeros(3), object])
def test_unstorable_header_value_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        write(tmp_path / "x.rd", {"a": [value]}, {})
    assert list(tmp_path.iterdir()) == []


def test_header_that_was_read_can_be_written_again(small: Path, tmp_path: Path) -> None:
    assert write(tmp_path / "again.rd", *read(small)).read_bytes() == small.read_bytes()


@pytest.mark.parametrize(
    ("array", "finding"),
    [
        (np.array([object()]), "of dtype object"),
        (np.array(["a"]), "of dtype <U1"),
        (np.zeros(2, np.complex128), "of dtype complex128"),
        (np.zeros(2, np.longdouble), "of dtype float128"),
        (np.zeros(2, "M8[s]"), r"of dtype datetime64\[s\]"),
        (np.zeros(2, [("a", "f4")]), r"of dtype \[\('a', '<f4'\)\]"),
        (np.zeros(2, ml_dtypes.bfloat16), "of dtype bfloat16"),
        (None, "of dtype object"),
    ],
)
def test_unstorable_array_is_named(tmp_path: Path, array: Any, finding: str) -> None:
    message = f"^array 'net/w' cannot be stored: it is {finding}; convert"
    with pytest.raises(TypeError, match=message):
        write(tmp_path / "x.rd", {}, {"a": np.zeros(1), "net/w": array})
    assert list(tmp_path.iterdir()) == []


# Damage


def damage_message(path: Path, data: bytes) -> str:
    """Return the message of the error that reading these bytes raises."""
    path.write_bytes(data)
    with pytest.raises(DamagedFile) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is ")
    assert "opy it again from its source" in message
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
        elif length < LABEL:
            assert "the checksum of its label does not match" in message
        else:
            assert "its checksum does not match, so it was truncated or altered" in message
    bad.write_bytes(data)
    read(bad)


def test_every_bit_flip_of_a_small_file_is_detected(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    regions = {
        8: "is not a retrodict file: its first bytes are not those of one",
        LABEL: "the checksum of its label does not match",
        len(data): "its checksum does not match",
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
    assert "checksum" in damage_message(bad, data + b"\0")
    assert "checksum" in damage_message(bad, data + data)
    assert "checksum" in damage_message(bad, data[:CONTENTS] + data[CONTENTS:][::-1])
    assert "checksum" in damage_message(bad, data[:300] + bytes(len(data) - 300))
    assert "its first bytes are not those of one" in damage_message(
        bad, data.replace(b"\r\n", b"\n")
    )
    assert "its first bytes are not those of one" in damage_message(bad, b"\n" + data)
    # Parts of two files: each has a valid checksum, but in the other file.
    other = write(tmp_path / "other.rd", {**HEADER, "seed": 1}, ARRAYS).read_bytes()
    assert "checksum" in damage_message(bad, other[:CONTENTS] + data[CONTENTS:])


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


@pytest.mark.parametrize("length", [3, 2**40, 2**63, 2**64 - 1])
def test_wrong_length_of_the_header_is_refused(tmp_path: Path, length: int) -> None:
    data = raw_file(b"{}", safetensors.numpy.save({}))
    contents = struct.pack("<Q", length) + data[CONTENTS + 8 :]
    for end in (4, None):
        digest = sha256(contents[:end]).digest()
        message = damage_message(tmp_path / "bad.rd", data[:LABEL] + digest + contents[:end])
        assert "cannot be decoded" in message


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
    path.write_bytes(raw_file(b' {"a": -Infinity} ', safetensors.numpy.save(ARRAYS)))
    header, arrays = read(path)
    assert header == {"a": -math.inf}
    assert same_arrays(arrays, ARRAYS)


# Other formats


@pytest.mark.parametrize("rest", [b"", b"another layout", bytes(1000)])
@pytest.mark.parametrize(
    ("number", "error", "remedy"),
    [
        (3, NewerFormat, "has a newer format: install retrodict 9.8.7 or newer, or compile"),
        (
            2**32 - 1,
            NewerFormat,
            "has a newer format: install retrodict 9.8.7 or newer, or compile",
        ),
        (1, OlderFormat, "has an older format: compile"),
        (0, OlderFormat, "has an older format: compile"),
    ],
)
def test_another_format_is_refused(
    tmp_path: Path, number: int, error: type[ValueError], remedy: str, rest: bytes
) -> None:
    path = tmp_path / "x.rd"
    path.write_bytes(raw_file(b"", b"", number)[:LABEL] + rest)
    with pytest.raises(error) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path} was written by retrodict 9.8.7 in format {number}. This is retrodict "
        f"{version('retrodict')}, which reads format 2. The file {remedy} and save the model again "
        "with this version."
    )


def test_file_of_a_later_version_of_the_module_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(artefact, "FORMAT", 3)
        path = write(tmp_path / "x.rd", HEADER, ARRAYS)
        assert read(path)[0]["format"] == 3
    with pytest.raises(NewerFormat, match=rf"retrodict {version('retrodict')} in format 3"):
        read(path)


def test_damaged_file_of_a_newer_format_is_damaged(tmp_path: Path) -> None:
    data = raw_file(b"{}", EMPTY, 3)[:LABEL]
    for bit, message in flip_messages(tmp_path / "bad.rd", data, range(64, 8 * LABEL)):
        assert "the checksum of its label does not match" in message, bit


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
            f"[Errno 5] not saved, nothing was changed: disk on fire: '{old}'"
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


def test_data_are_synced_before_the_rename(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        events.append(f"file of {os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def logged_replace(source: Path, target: Path) -> None:
        assert Path(source).parent == Path(target).parent == old.parent
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    write(old, *content(2, 3))  # smaller than Python's write buffer
    assert events == [f"file of {old.stat().st_size} bytes", "replace"]


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

    message = error_message(FileNotFoundError, tmp_path / "missing" / "x.rd")
    assert "No such file or directory" in message
    assert "it is a folder" in error_message(IsADirectoryError, tmp_path)
    assert "Not a directory" in error_message(NotADirectoryError, old / "x.rd")
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
    with pytest.raises(PermissionError, match="it is read-only") as caught:
        write(old, *content(2))
    assert caught.value.filename == str(old)
    assert check_complete(old, 1)


def test_read_only_folder_leaves_the_old_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", deny_access)
        with pytest.raises(PermissionError, match="Permission denied"):
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

    assert "No such file" in error_message(FileNotFoundError, tmp_path / "none.rd")
    assert "Is a directory" in error_message(IsADirectoryError, tmp_path)
    assert "Not a directory" in error_message(NotADirectoryError, old / "x.rd")
    monkeypatch.setattr(Path, "open", deny_access)
    assert "Permission denied" in error_message(PermissionError, old)
