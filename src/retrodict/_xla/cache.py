"""Nothing in; a folder in which JAX keeps compiled programs from one process to the next.

For the command line, where every answer is a process's first and most of its time would go into
compiling what the last one had compiled. Programs hold instructions that another processor need not
have, so every kind has a folder of its own. Who has set `JAX_COMPILATION_CACHE_DIR`, or has turned
the cache off by `JAX_ENABLE_COMPILATION_CACHE=false`, is not interfered with.
"""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax

config: Any = jax.config  # JAX does not say the types of its options
MOST_BYTES = 2**30
LEAST_SECONDS = 0.2  # a program that took less is no slower to compile than to find


def keep_programs() -> Path | None:
    """Have JAX keep programs; where, or None where it is not to be or cannot be."""
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return None
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        _make_room(folder)
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return None
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    return folder


def _folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    home = Path(given) if given else Path.home() / ".cache"
    kind = f"{jax.__version__} {platform.machine()} {_instructions()}"
    return home / "retrodict" / hashlib.sha256(kind.encode()).hexdigest()[:16]


def _instructions() -> str:
    """What the processor can do, as far as this system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _make_room(folder: Path) -> None:
    """Forget the oldest programs, in all folders, until there are few enough."""
    files = [(path, path.stat()) for path in folder.parent.rglob("*") if path.is_file()]
    size = sum(stat.st_size for _, stat in files)
    for path, stat in sorted(files, key=lambda file: file[1].st_mtime):
        if size <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        size -= stat.st_size
