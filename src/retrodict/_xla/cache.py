"""Keep compiled programs on disk, so that a later process need not compile them again.

This is for the command line, where most of each short process would go into compilation. Programs
contain instructions that another processor may lack, so there is one folder for each kind of
processor. A cache that the user has configured by `JAX_COMPILATION_CACHE_DIR`, or disabled by
`JAX_ENABLE_COMPILATION_CACHE=false`, is left as it is.
"""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax

from retrodict._xla.tuning import MAX_CACHE_BYTES, MIN_CACHED_SECONDS

config: Any = jax.config  # untyped in JAX


def enable_compilation_cache() -> Path | None:
    """Turn on JAX's compilation cache.

    Returns:
        The cache folder, or None if the user has configured the cache or no folder is writable.
    """
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return None
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        _delete_oldest(folder.parent, MAX_CACHE_BYTES)
    except (OSError, RuntimeError):  # no home folder, or not writable
        return None
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", MIN_CACHED_SECONDS)
    return folder


def _folder() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME")
    parent = Path(cache_home) if cache_home else Path.home() / ".cache"
    platform_id = f"{jax.__version__} {platform.machine()} {_instruction_sets()}"
    return parent / "retrodict" / hashlib.sha256(platform_id.encode()).hexdigest()[:16]


def _instruction_sets() -> str:
    """The processor's instruction sets, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _delete_oldest(folder: Path, max_bytes: int) -> None:
    """Delete the oldest files below a folder until all together fit into `max_bytes`."""
    files = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    size = sum(stat.st_size for _, stat in files)
    for path, stat in sorted(files, key=lambda file: file[1].st_mtime):
        if size <= max_bytes:
            return
        path.unlink(missing_ok=True)
        size -= stat.st_size
