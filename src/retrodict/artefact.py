r"""Read and write a file that holds a JSON header and named arrays, protected by checksums.

The file consists of a preamble of 208 bytes, the header and the weights, without gaps::

    offset  bytes
         0      8  magic: 0x89 "rd" CR LF 0x1A LF NUL (a transfer in text mode changes it)
         8      4  format version
        12     52  version of retrodict that wrote the file: ASCII, padded with NUL
        64     32  SHA-256 of bytes 0 to 63                               (the label ends at 96)
        96      8  H, the length of the header
       104      8  W, the length of the weights
       112     32  SHA-256 of the header
       144     32  SHA-256 of the weights
       176     32  SHA-256 of bytes 0 to 175
       208      H  header: one JSON object, in UTF-8
     208+H      W  weights: one safetensors blob

Integers are unsigned and little-endian. Checksums cover every byte and the length of the file is
exactly 208 + H + W, so a file that was truncated, extended or altered is refused before any of it
is interpreted. Nothing in a file is executed.

The label (bytes 0 to 95) has the same layout in all future formats. It has a checksum of its own
because it is the only part of a newer file that an older reader can check, and the reader has to
distinguish a newer file from a file whose version bytes are damaged.

The header is strict JSON. Values that JSON cannot represent are objects with one key:
{"float": "inf"}, {"float": "-inf"}, {"float": "nan"}, {"int": "0x…"} for integers beyond 64 bits,
and {"dict": {…}} for a dictionary that has the form of one of these. Keys keep their order.
"""

import errno
import json
import math
import os
import secrets
import stat
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

FORMAT = 1

JSON: TypeAlias = (
    "bool | int | float | str | np.generic | Sequence[JSON] | Mapping[str, JSON] | None"
)

_MAGIC = b"\x89rd\r\n\x1a\n\0"
_LABEL = struct.Struct("<8sI52s")
_CONTENTS = struct.Struct("<QQ32s32s")
_DIGEST = 32
_LABEL_END = _LABEL.size + _DIGEST
_PREAMBLE_END = _LABEL_END + _CONTENTS.size + _DIGEST

_VERSIONS = {package: version(package) for package in ("retrodict", "jax", "numpy")}
_RESERVED = ("format", "versions")
_TAGS = ("float", "int", "dict")
# Far below Python's recursion limit, so that `read` works at any depth of the call stack.
_MAX_DEPTH = 64

_DTYPES: dict[str, np.dtype[Any]] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(bool),
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_DTYPE_NAMES = sorted(dtype.name for dtype in _DTYPES.values())


class DamagedFile(ValueError):  # noqa: N818 (public name)
    """The file is not a retrodict file or is damaged; the message says what to do."""


class NewerFormat(ValueError):  # noqa: N818 (public name)
    """The file was written by a newer version of retrodict; the message says which one."""


def write(
    path: str | os.PathLike[str], header: Mapping[str, JSON], arrays: Mapping[str, NDArray[Any]]
) -> Path:
    """Write a header and arrays to one file atomically. Equal contents give equal bytes.

    `read` returns the header unchanged, except that tuples become lists, NumPy scalars become
    Python scalars, NaNs lose their payload, and the keys `"format"` and `"versions"` (of retrodict,
    jax and numpy) are added. It returns the arrays bit for bit, in native byte order, sorted by
    name.

    An existing file is replaced only when the new one is complete; the new file has the same
    permissions. Symbolic links are followed.

    Raises:
        TypeError, ValueError: a part of the header or an array cannot be stored; the message names
            it.
        OSError: the path cannot be written.
    """
    path = Path(path)
    parts = _pack(header, arrays)
    # Follow a symbolic link, as `open` does: replacing the link would leave its target unchanged.
    target = Path(os.path.realpath(path))
    remedies = {
        errno.ENOENT: f"the folder {target.parent} does not exist; create it first",
        errno.ENOTDIR: f"{target.parent} is not a folder; give another path",
        errno.EISDIR: f"it is a folder; give a file in it, such as {path / 'model.rd'}",
        errno.EACCES: "permission is denied; give another path, or make file and folder writable",
        errno.ENOSPC: f"the disk is full; free {sum(map(len, parts))} bytes or use another disk",
    }
    try:
        _replace(target, parts)
    except OSError as error:
        raise _explain_os_error(error, path, "not saved, nothing was changed", remedies) from error
    try:
        _sync_folder(target.parent)
    except OSError as error:
        outcome = "saved, but the disk did not confirm it, so that a power failure may undo it"
        raise _explain_os_error(error, path, outcome, {}) from error
    return path


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read the header and the arrays of a file that `write` wrote.

    Raises:
        DamagedFile: the file is not a retrodict file, or a byte of it has changed.
        NewerFormat: the file has a later format.
        OSError: the path cannot be read.
    """
    path = Path(path)
    remedies = {
        errno.ENOENT: "there is no such file; check the path",
        errno.EISDIR: "it is a folder; give the path of a file in it",
        errno.EACCES: "permission is denied; make the file and its folder readable",
    }
    try:
        # Read everything through one descriptor, so that replacing the file does no harm.
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            sizes, digests = _check_preamble(path, file.read(_PREAMBLE_END), size)
            header, weights = (file.read(length) for length in sizes)
    except OSError as error:
        raise _explain_os_error(error, path, "not loaded", remedies) from error
    if sha256(header).digest() != digests[0]:
        raise _damaged(path, "the checksum of its header does not match")
    if sha256(weights).digest() != digests[1]:
        raise _damaged(path, "the checksum of its weights does not match")
    decoding_errors = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
    try:
        return _unpack_header(header), _unpack_arrays(weights)
    except (*decoding_errors, safetensors.SafetensorError) as error:
        finding = f"its checksums match, but its contents cannot be decoded ({error!r})"
        raise _damaged(path, finding) from error


def _explain_os_error(
    error: OSError, path: Path, outcome: str, remedies: Mapping[int, str]
) -> OSError:
    """Return an error of the same class whose message states the outcome and a remedy."""
    code = error.errno or errno.EIO
    default = f"{error.strerror or error}; correct this, or use another folder or disk"
    return OSError(code, f"{outcome}: {remedies.get(code, default)}", str(path))


def _damaged(path: Path, finding: str) -> DamagedFile:
    return DamagedFile(
        f"{path} is damaged: {finding}. Copy it again from where it was made, or compile and save "
        "the model again."
    )


def _check_label(path: Path, preamble: bytes, size: int) -> None:
    """Check that the file is a retrodict file of this format."""
    if not preamble.startswith(_MAGIC):
        finding = "its first bytes are not those of one" if preamble else "it is empty"
        raise DamagedFile(
            f"{path} is not a retrodict file: {finding}. Give a file that retrodict saved; if it "
            "saved this one, the first bytes are damaged: copy it again from where it was made."
        )
    if len(preamble) < _LABEL_END:
        raise _damaged(path, f"it is truncated after {size} bytes")
    # Check this before the version: a flipped bit in the version is damage, not a newer format. The
    # layout of the other bytes of a newer file is unknown.
    label = preamble[: _LABEL.size]
    if sha256(label).digest() != preamble[_LABEL.size : _LABEL_END]:
        raise _damaged(path, "the checksum of its label does not match")
    _, format_version, writer_version = _LABEL.unpack(label)
    if format_version > FORMAT:
        writer = writer_version.rstrip(b"\0").decode("ascii", "backslashreplace")
        raise NewerFormat(
            f"{path} was written by retrodict {writer} in format {format_version}. This is "
            f"retrodict {_VERSIONS['retrodict']}, which reads format {FORMAT}. Install retrodict "
            f"{writer} or newer, or save the model again with this version."
        )
    if format_version != FORMAT:
        raise _damaged(path, f"its label gives format {format_version}, which does not exist")


def _check_preamble(
    path: Path, preamble: bytes, size: int
) -> tuple[tuple[int, int], tuple[bytes, bytes]]:
    """Return the lengths and digests of header and weights after checking them."""
    _check_label(path, preamble, size)
    if len(preamble) < _PREAMBLE_END:
        raise _damaged(path, f"it is truncated after {size} bytes")
    if sha256(preamble[:-_DIGEST]).digest() != preamble[-_DIGEST:]:
        raise _damaged(path, "the checksum of its preamble does not match")
    header_size, weights_size, *digests = _CONTENTS.unpack(preamble[_LABEL_END:-_DIGEST])
    # Check the lengths before reading, so that a wrong one cannot exhaust the memory.
    expected = _PREAMBLE_END + header_size + weights_size
    if size < expected:
        raise _damaged(path, f"it is truncated after {size} of {expected} bytes")
    if size > expected:
        raise _damaged(path, f"{size - expected} bytes follow its end")
    return (header_size, weights_size), (digests[0], digests[1])


def _pack(header: Mapping[str, JSON], arrays: Mapping[str, NDArray[Any]]) -> tuple[bytes, ...]:
    for key in _RESERVED:
        if key in header:
            raise ValueError(f"the header's key {key!r} is reserved; rename it")
    encoded = _encode({"format": FORMAT, "versions": _VERSIONS, **header}, "", 0)
    text = json.dumps(encoded, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    weights = safetensors.numpy.save(
        {name: _storable_array(name, arrays[name]) for name in sorted(arrays, key=_check_name)}
    )
    writer_version = _VERSIONS["retrodict"].encode("ascii", "replace")
    preamble = _LABEL.pack(_MAGIC, FORMAT, writer_version)
    preamble += sha256(preamble).digest()
    digests = (sha256(text).digest(), sha256(weights).digest())
    preamble += _CONTENTS.pack(len(text), len(weights), *digests)
    preamble += sha256(preamble).digest()
    return preamble, text, weights


def _check_name(name: str) -> str:
    if type(name) is not str or not _is_text(name):
        raise TypeError(f"an array's name must be a string of Unicode text, found {name!r}")
    if name == "__metadata__":
        raise ValueError("the array name '__metadata__' is reserved by safetensors; rename it")
    return name


def _storable_array(name: str, array: NDArray[Any]) -> NDArray[Any]:
    dtype = getattr(array, "dtype", None)
    if getattr(dtype, "name", None) not in _DTYPE_NAMES:
        finding = f"of type {type(array).__name__}" if dtype is None else f"of dtype {dtype}"
        raise TypeError(
            f"array {name!r} cannot be stored: it is {finding}; convert it to one of "
            f"{', '.join(_DTYPE_NAMES)}"
        )
    # `ascontiguousarray` would turn a 0-d array into a 1-d one.
    return np.asarray(array, order="C")


def _unpack_arrays(blob: bytes) -> dict[str, NDArray[Any]]:
    # `safetensors.numpy.load` does not support bfloat16.
    views = sorted(safetensors.deserialize(blob))  # type: ignore[no-untyped-call]
    return {
        name: np.frombuffer(view["data"], _DTYPES[view["dtype"]]).reshape(view["shape"])
        for name, view in views
    }


def _is_text(string: str) -> bool:
    """Return whether UTF-8 can encode the string, that is, it has no lone surrogates."""
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode(value: object, where: str, depth: int) -> Any:
    """Encode a value as strict JSON; `where` is the path of keys to it, for error messages."""
    # Select by kind: timedelta64 is a subclass of NumPy's integers and would lose its unit.
    if isinstance(value, np.generic) and value.dtype.kind in "biufU":
        value = value.item()
    # Require exact types: an enum or another subclass would be read as its base type.
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if -(2**63) <= value < 2**64 else {"int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is str and _is_text(value):
        return value
    if depth > _MAX_DEPTH:
        raise TypeError(f"the header is nested more than {_MAX_DEPTH} deep at {where}; flatten it")
    if isinstance(value, list | tuple):
        return [_encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        encoded = {}
        for key, item in value.items():
            if type(key) is not str or not _is_text(key):
                parent = where or "the header"
                raise TypeError(f"a key of {parent} is {key!r}; keys must be Unicode strings")
            encoded[key] = _encode(item, f"{where}.{key}" if where else key, depth + 1)
        return {"dict": encoded} if len(encoded) == 1 and key in _TAGS else encoded
    finding = f"the string {value!r}" if type(value) is str else f"of type {type(value).__name__}"
    raise TypeError(
        f"{where} cannot be stored in the header: it is {finding}; convert it to numbers, Unicode "
        "strings, booleans, None, lists or dictionaries, or store it among the arrays"
    )


def _unpack_header(text: bytes) -> dict[str, Any]:
    # Decode explicitly: given bytes, `json.loads` would also accept UTF-16 and UTF-32.
    header = _decode(json.loads(text.decode("utf-8")))
    if not isinstance(header, dict):
        raise TypeError("the header is not an object")
    return header


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else None
    if tag == "float":
        return float(value[tag])
    if tag == "int":
        return int(value[tag], 16)
    items = value[tag] if tag == "dict" else value
    return {key: _decode(item) for key, item in items.items()}


def _replace(target: Path, parts: Sequence[bytes]) -> None:
    """Replace the target atomically: readers see either the old file or the new one."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None:
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
        # Renaming would succeed even if the owner has made the file read-only.
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "is read-only")
    temporary = target.parent / f".retrodict-{secrets.token_hex(8)}.tmp"
    try:
        # Files created by `tempfile` would be readable by their owner only.
        with temporary.open("xb") as file:
            # Set the mode before writing, so that a private file's content is never readable.
            if mode is not None:
                temporary.chmod(stat.S_IMODE(mode))
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:  # includes KeyboardInterrupt
        with suppress(OSError):
            temporary.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    """Flush the folder to disk; otherwise a power failure may restore the old file."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # on Windows, or if the folder may be written to but not listed
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support this.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
