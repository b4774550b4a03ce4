r"""Read and write a file that holds a JSON header and named arrays, protected by checksums.

The file consists of a label, a checksum, the header and the weights, without gaps::

    offset  bytes
         0      8  magic: 0x89 "rd" CR LF 0x1A LF NUL (a transfer in text mode changes it)
         8      4  format version
        12     52  version of retrodict that wrote the file: ASCII, padded with NUL
        64     32  SHA-256 of bytes 0 to 63                               (the label ends at 96)
        96     32  SHA-256 of all bytes from 128 on
       128      8  H, the length of the header
       136      H  header: one JSON object, in UTF-8
     136+H         weights: one safetensors blob

Integers are unsigned and little-endian. The checksums cover every byte, so a file that was
truncated, extended or altered is refused before any of it is interpreted. Nothing in a file is
executed.

The label (bytes 0 to 95) has the same layout in all formats. It has a checksum of its own because
it is the only part of a file of another format that can be checked: a file of another format must
be distinguished from a file whose version bytes are damaged.

The header is what Python's `json` writes: floats may be NaN, Infinity and -Infinity.
"""

import errno
import json
import os
import secrets
import stat
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

FORMAT = 2

_MAGIC = b"\x89rd\r\n\x1a\n\0"
_LABEL = struct.Struct("<8sI52s")
_LENGTH = struct.Struct("<Q")
_DIGEST = 32
_LABEL_END = _LABEL.size + _DIGEST

_VERSIONS = {package: version(package) for package in ("retrodict", "jax", "numpy")}
_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_DECODING_ERRORS = (ValueError, TypeError, KeyError, RecursionError, struct.error)
_DTYPES = ["bool", "complex64", "float16", "float32", "float64", *_INTEGERS]


class DamagedFile(ValueError):  # noqa: N818 (public name)
    """The file is not a retrodict file or is damaged; the message says what to do."""


class NewerFormat(ValueError):  # noqa: N818 (public name)
    """The file was written by a newer version of retrodict; the message says which one."""


class OlderFormat(ValueError):  # noqa: N818 (public name)
    """The file was written by an older version of retrodict; the message says which one."""


def write(
    path: str | os.PathLike[str], header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> Path:
    """Write a header and arrays to one file atomically. Equal contents give equal bytes.

    `read` returns the header unchanged, except that tuples become lists, NumPy scalars become
    Python scalars, and the keys `"format"` and `"versions"` (of retrodict, jax and numpy) are set.
    It returns the arrays bit for bit, in native byte order, sorted by name.

    An existing file is replaced only when the new one is complete; the new file has the same
    permissions. Symbolic links are followed.

    Raises:
        TypeError, ValueError: a part of the header or an array cannot be stored.
        OSError: the path cannot be written.
    """
    path = Path(path)
    parts = _pack(header, arrays)
    try:
        # Follow a symbolic link, as `open` does: replacing the link would not change its target.
        _replace(Path(os.path.realpath(path)), parts)
    except OSError as error:
        raise _explain_os_error(error, path, "not saved, nothing was changed") from error
    return path


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read the header and the arrays of a file that `write` wrote.

    Raises:
        DamagedFile: the file is not a retrodict file, or a byte of it has changed.
        NewerFormat, OlderFormat: the file has another format.
        OSError: the path cannot be read.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _explain_os_error(error, path, "not loaded") from error
    _check_label(path, data)
    start = _LABEL_END + _DIGEST
    if sha256(data[start:]).digest() != data[_LABEL_END:start]:
        raise _damaged(path, "its checksum does not match, so it was truncated or altered")
    try:
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        header = json.loads(data[start : start + length].decode())
        arrays = safetensors.numpy.load(data[start + length :])
        return {**header}, dict(sorted(arrays.items()))
    except (*_DECODING_ERRORS, safetensors.SafetensorError) as error:
        finding = f"its checksums match, but its contents cannot be decoded ({error!r})"
        raise _damaged(path, finding) from error


def _explain_os_error(error: OSError, path: Path, outcome: str) -> OSError:
    """Return an error of the same class whose message states the outcome."""
    code = error.errno or errno.EIO
    return OSError(code, f"{outcome}: {error.strerror or error}", str(path))


def _damaged(path: Path, finding: str) -> DamagedFile:
    return DamagedFile(
        f"{path} is damaged: {finding}. Copy it again from its source, or compile and save the "
        "model again."
    )


def _check_label(path: Path, data: bytes) -> None:
    """Check that the file is a retrodict file of this format."""
    if not data.startswith(_MAGIC):
        finding = "its first bytes are not those of one" if data else "it is empty"
        raise DamagedFile(
            f"{path} is not a retrodict file: {finding}. Give a file that retrodict saved; if it "
            "saved this one, the first bytes are damaged: copy it again from its source."
        )
    # Check this before the version: a flipped bit in the version is damage, not another format.
    label = data[: _LABEL.size]
    if sha256(label).digest() != data[_LABEL.size : _LABEL_END]:
        raise _damaged(path, "the checksum of its label does not match")
    _, format_version, writer_version = _LABEL.unpack(label)
    writer = writer_version.rstrip(b"\0").decode("ascii", "backslashreplace")
    finding = (
        f"{path} was written by retrodict {writer} in format {format_version}. This is retrodict "
        f"{_VERSIONS['retrodict']}, which reads format {FORMAT}."
    )
    if format_version > FORMAT:
        raise NewerFormat(
            f"{finding} The file has a newer format: install retrodict {writer} or newer, or "
            "compile and save the model again with this version."
        )
    if format_version < FORMAT:
        raise OlderFormat(
            f"{finding} The file has an older format: compile and save the model again with this "
            "version."
        )


def _pack(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> tuple[bytes, ...]:
    contents = {**header, "format": FORMAT, "versions": _VERSIONS}
    text = json.dumps(contents, separators=(",", ":"), default=np.generic.item).encode()
    weights = safetensors.numpy.save(
        {name: _storable_array(name, arrays[name]) for name in sorted(arrays)}
    )
    label = _LABEL.pack(_MAGIC, FORMAT, _VERSIONS["retrodict"].encode("ascii", "replace"))
    length = _LENGTH.pack(len(text))
    contents_digest = sha256(length + text + weights).digest()
    return label + sha256(label).digest() + contents_digest, length + text, weights


def _storable_array(name: str, array: NDArray[Any]) -> NDArray[Any]:
    # `ascontiguousarray` would turn a 0-d array into a 1-d one.
    array = np.asarray(array, order="C")
    if array.dtype.name not in _DTYPES:
        raise TypeError(
            f"array '{name}' cannot be stored: it is of dtype {array.dtype}; convert it to one of "
            f"{', '.join(_DTYPES)}"
        )
    return array


def _replace(target: Path, parts: Sequence[bytes]) -> None:
    """Replace the target atomically: readers see either the old file or the new one."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None:
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
        # Renaming would succeed even if the owner has made the file read-only.
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
    temporary = target.parent / f".retrodict-{secrets.token_hex(8)}.tmp"
    try:
        # Files created by `tempfile` would be readable by their owner only.
        with temporary.open("xb") as file:
            # Set the mode before writing, so that a private file's content is never readable.
            if mode is not None:
                temporary.chmod(stat.S_IMODE(mode))
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:  # includes KeyboardInterrupt
        with suppress(OSError):
            temporary.unlink()
        raise
