r"""One file that can be trusted: a JSON header and named arrays, in and out.

The file is a preamble of 208 bytes, the header and the weights, with nothing between or after::

    offset  bytes
         0      8  magic: 0x89 "rd" CR LF 0x1A LF NUL, which a transfer in text mode would change
         8      4  format version
        12     52  version of retrodict that made the file: ASCII, padded with NUL
        64     32  SHA-256 of bytes 0 to 63                               (the label ends at 96)
        96      8  H, the length of the header
       104      8  W, the length of the weights
       112     32  SHA-256 of the header
       144     32  SHA-256 of the weights
       176     32  SHA-256 of bytes 0 to 175
       208      H  header: one JSON object, in UTF-8
     208+H      W  weights: one safetensors blob

Integers are unsigned and little-endian. Every byte is under a checksum and the length of the file
is exactly 208 + H + W, so a file that was cut, lengthened or altered is refused before any of it
is interpreted. Nothing in a file is executed.

The label (bytes 0 to 95) is the same in every format to come. It has a checksum of its own because
a reader of an older format can check nothing else in a newer file, yet has to tell a newer file,
whose label is whole, from one whose version bytes were damaged.

The header is strict JSON. What JSON cannot say is an object with one key: {"float": "inf"},
{"float": "-inf"}, {"float": "nan"}, {"int": "0x…"} for integers beyond 64 bits, and {"dict": {…}}
for a dictionary that would itself read as one of these four. Keys keep their order.
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
# Far below Python's recursion limit, so that what was written can be read from any depth of call.
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


class DamagedFile(ValueError):  # noqa: N818 (the name is the public interface's)
    """The file is not retrodict's, or not as it was saved; the message says what to do."""


class NewerFormat(ValueError):  # noqa: N818 (named beside DamagedFile)
    """The file was made by a newer retrodict; the message says by which, and what is needed."""


def write(
    path: str | os.PathLike[str], header: Mapping[str, JSON], arrays: Mapping[str, NDArray[Any]]
) -> Path:
    """Write header and arrays to one file, whole or not at all; the same content, the same bytes.

    The header comes back from `read` exactly, but that tuples become lists, NumPy scalars Python's
    and NaNs plain, with `"format"` and `"versions"` (of retrodict, jax and numpy) added: these two
    keys are taken. Arrays come back bit for bit, in native byte order, sorted by name.

    Until the last moment the file that was there before stays as it was, and it keeps its mode; a
    link is followed. What cannot be stored raises `TypeError` or `ValueError` naming it, and a
    path that cannot be written an `OSError`.
    """
    path = Path(path)
    parts = _pack(header, arrays)
    # A link is followed, as `open` would: replacing the link would leave its target out of date.
    target = Path(os.path.realpath(path))
    remedies = {
        errno.ENOENT: f"the folder {target.parent} does not exist; make it first",
        errno.ENOTDIR: f"{target.parent} is not a folder; give another path",
        errno.EISDIR: f"it is a folder; give a file in it, such as {path / 'model.rd'}",
        errno.EACCES: "permission is denied; give another path, or make file and folder writable",
        errno.ENOSPC: f"the disk is full; free {sum(map(len, parts))} bytes or use another disk",
    }
    try:
        _replace(target, parts)
    except OSError as error:
        raise _explained(error, path, "not saved, and nothing changed", remedies) from error
    try:
        _sync_folder(target.parent)
    except OSError as error:
        told = "saved, but the disk did not confirm it and a power cut might undo it"
        raise _explained(error, path, told, {}) from error
    return path


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Header and arrays of a file that `write` made.

    Raises `DamagedFile` unless every byte is as it was written, `NewerFormat` for a file of a
    later format, and an `OSError` for a path that cannot be read.
    """
    path = Path(path)
    remedies = {
        errno.ENOENT: "there is no such file; check the path",
        errno.EISDIR: "it is a folder; give the file that was saved in it",
        errno.EACCES: "permission is denied; make the file and its folder readable",
    }
    try:
        # One descriptor for everything: a file replaced meanwhile stays readable to its end.
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            sizes, digests = _check_preamble(path, file.read(_PREAMBLE_END), size)
            header, weights = (file.read(length) for length in sizes)
    except OSError as error:
        raise _explained(error, path, "not loaded", remedies) from error
    if sha256(header).digest() != digests[0]:
        raise _damaged(path, "the checksum of its header does not match")
    if sha256(weights).digest() != digests[1]:
        raise _damaged(path, "the checksum of its weights does not match")
    wrong_content = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
    try:
        return _unpack_header(header), _unpack_arrays(weights)
    except (*wrong_content, safetensors.SafetensorError) as error:
        finding = f"its checksums match, yet its contents make no sense ({error!r})"
        raise _damaged(path, finding) from error


def _explained(error: OSError, path: Path, told: str, remedies: Mapping[int, str]) -> OSError:
    """An error of the same class that tells the user what happened and what to do."""
    code = error.errno or errno.EIO
    reason = f"{error.strerror or error}; mend that, or use another folder or disk"
    return OSError(code, f"{told}: {remedies.get(code, reason)}", str(path))


def _damaged(path: Path, finding: str) -> DamagedFile:
    return DamagedFile(
        f"{path} is damaged: {finding}. Copy it again from where it was made, or compile and save "
        "the model again."
    )


def _check_preamble(
    path: Path, preamble: bytes, size: int
) -> tuple[tuple[int, int], tuple[bytes, bytes]]:
    """Lengths and digests of header and weights, once they are known to fit the file."""
    if not preamble.startswith(_MAGIC):
        finding = "it does not begin as one" if preamble else "it is empty"
        raise DamagedFile(
            f"{path} is not a retrodict file: {finding}. Give a file that was saved by retrodict; "
            "if this one was, its first bytes are damaged: copy it again from where it was made."
        )
    if len(preamble) < _LABEL_END:
        raise _damaged(path, f"it is cut short, after {size} bytes")
    # Before the version is believed: a flipped bit in it is damage, and must not send anyone to
    # install a newer retrodict. No other byte of a newer format's file is at a place known here.
    label = preamble[: _LABEL.size]
    if sha256(label).digest() != preamble[_LABEL.size : _LABEL_END]:
        raise _damaged(path, "the checksum of its label does not match")
    _, format_version, made_by = _LABEL.unpack(label)
    if format_version > FORMAT:
        maker = made_by.rstrip(b"\0").decode("ascii", "backslashreplace")
        raise NewerFormat(
            f"{path} was made by retrodict {maker} in format {format_version}, and this is "
            f"retrodict {_VERSIONS['retrodict']}, which reads format {FORMAT}. Install retrodict "
            f"{maker} or newer, or save the model again with this one."
        )
    if format_version != FORMAT:
        raise _damaged(path, f"it claims format {format_version}, which does not exist")
    if len(preamble) < _PREAMBLE_END:
        raise _damaged(path, f"it is cut short, after {size} bytes")
    if sha256(preamble[:-_DIGEST]).digest() != preamble[-_DIGEST:]:
        raise _damaged(path, "the checksum of its preamble does not match")
    header_size, weights_size, *digests = _CONTENTS.unpack(preamble[_LABEL_END:-_DIGEST])
    # Before anything is read, so that no length, however wrong, asks for more than the file holds.
    expected = _PREAMBLE_END + header_size + weights_size
    if size < expected:
        raise _damaged(path, f"it is cut short, after {size} of {expected} bytes")
    if size > expected:
        raise _damaged(path, f"{size - expected} bytes follow after its end")
    return (header_size, weights_size), (digests[0], digests[1])


def _pack(header: Mapping[str, JSON], arrays: Mapping[str, NDArray[Any]]) -> tuple[bytes, ...]:
    if taken := [key for key in _RESERVED if key in header]:
        raise ValueError(f"the header's key {taken[0]!r} is taken by the file; rename it")
    encoded = _encode({"format": FORMAT, "versions": _VERSIONS, **header}, "", 0)
    text = json.dumps(encoded, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    weights = safetensors.numpy.save(
        {name: _storable(name, arrays[name]) for name in sorted(arrays, key=_checked_name)}
    )
    made_by = _VERSIONS["retrodict"].encode("ascii", "replace")
    preamble = _LABEL.pack(_MAGIC, FORMAT, made_by)
    preamble += sha256(preamble).digest()
    digests = (sha256(text).digest(), sha256(weights).digest())
    preamble += _CONTENTS.pack(len(text), len(weights), *digests)
    preamble += sha256(preamble).digest()
    return preamble, text, weights


def _checked_name(name: str) -> str:
    if type(name) is not str or not _is_text(name):
        raise TypeError(f"an array's name has to be a string of Unicode text, and is {name!r}")
    if name == "__metadata__":
        raise ValueError("the array name '__metadata__' is taken by safetensors; rename the array")
    return name


def _storable(name: str, array: NDArray[Any]) -> NDArray[Any]:
    dtype = getattr(array, "dtype", None)
    if getattr(dtype, "name", None) not in _DTYPE_NAMES:
        found = type(array).__name__ if dtype is None else f"of dtype {dtype}"
        raise TypeError(
            f"array {name!r} cannot be stored: it is {found}; convert it to one of "
            f"{', '.join(_DTYPE_NAMES)}"
        )
    # Not `ascontiguousarray`, which makes a 0-d array 1-d.
    return np.asarray(array, order="C")


def _unpack_arrays(blob: bytes) -> dict[str, NDArray[Any]]:
    # Not `safetensors.numpy.load`, which does not know bfloat16.
    views = sorted(safetensors.deserialize(blob))  # type: ignore[no-untyped-call]
    return {
        name: np.frombuffer(view["data"], _DTYPES[view["dtype"]]).reshape(view["shape"])
        for name, view in views
    }


def _is_text(string: str) -> bool:
    """Whether UTF-8 can hold the string: not if half of a surrogate pair stands alone in it."""
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode(value: object, where: str, depth: int) -> Any:
    """The value as strict JSON has it; `where` is the path of keys to it, for the error."""
    # By kind: NumPy counts timedelta64 among its integers, and the unit would be lost.
    if isinstance(value, np.generic) and value.dtype.kind in "biufU":
        value = value.item()
    # Exact types: an enum or another subclass would come back as something else.
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
                place = where or "the header"
                raise TypeError(f"a key of {place} is {key!r}; keys have to be Unicode strings")
            encoded[key] = _encode(item, f"{where}.{key}" if where else key, depth + 1)
        return {"dict": encoded} if len(encoded) == 1 and key in _TAGS else encoded
    found = f"the string {value!r}" if type(value) is str else f"of type {type(value).__name__}"
    raise TypeError(
        f"{where} cannot be stored in the header: it is {found}; convert it to numbers, Unicode "
        "strings, booleans, None, lists or dictionaries, or store it among the arrays"
    )


def _unpack_header(text: bytes) -> dict[str, Any]:
    # Decoded here, since `json.loads` would also guess at UTF-16 and UTF-32.
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
    """Put the parts in the target's place in one step: readers see the old file or the new."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None:
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
        # Renaming would succeed on a file that its owner has made read-only.
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "is read-only")
    temporary = target.parent / f".retrodict-{secrets.token_hex(8)}.tmp"
    try:
        # Opened rather than made by `tempfile`, whose files only their owner may read.
        with temporary.open("xb") as file:
            # Before the first byte: a private file's content must not be readable meanwhile.
            if mode is not None:
                temporary.chmod(stat.S_IMODE(mode))
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            temporary.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    """Have the disk keep the new name too: without it a power cut may bring the old file back."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # Windows, or a folder that may be written and not listed
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such operation.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
