"""Settings for all tests, made before JAX starts."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Tests compile many small programs and run each for a moment: what counts is the compiler's time.
FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
)


def known_flags():
    """The flags, if this XLA knows them all: it ends the process over one that it does not."""
    flags = " ".join(FLAGS)
    start = [sys.executable, "-c", "import jax; jax.devices()"]
    done = subprocess.run(start, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True)
    return flags if done.returncode == 0 else ""


if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = known_flags()
# What one process has compiled, others need not; they inherit the folder.
CACHE = "JAX_COMPILATION_CACHE_DIR"
OWN = CACHE not in os.environ
if OWN:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="retrodict-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Programs that ask for quick compilation have it already, and quicker than they ask for.
if os.environ["XLA_FLAGS"]:
    from retrodict._xla.tuning import FAST_COMPILE

    FAST_COMPILE.clear()

# A shell's background job, which a run may be, starts deaf to the interruptions that some test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Linux gives a process 65 530 mappings; every compiled program takes some, and XLA ends the
# process, without a word, when it is refused one.
MAPPINGS = Path("/proc/self/maps")
MANY = 25_000


def pytest_unconfigure():
    if OWN:
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Forget compiled programs between files when they have become many."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MANY:
        import jax

        jax.clear_caches()
        gc.collect()
