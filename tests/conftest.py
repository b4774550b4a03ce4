"""Settings for all tests, made before JAX starts."""

import gc
import os
from pathlib import Path

import pytest

# Tests compile many small programs and run each for a moment: what counts is the compiler's time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Linux gives a process 65 530 mappings; every compiled program takes some, and XLA ends the
# process, without a word, when it is refused one.
MAPPINGS = Path("/proc/self/maps")
MANY = 25_000


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Forget compiled programs between files when they have become many."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MANY:
        import jax

        jax.clear_caches()
        gc.collect()
