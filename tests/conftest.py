"""Settings and fixtures for all tests. The settings must be made before JAX starts."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Tests compile many small programs and run each for a moment, so compilation time dominates.
# `test_shipped_options.py` runs without these flags, as users do.
FAST_COMPILE_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
)


def supported_flags():
    """The flags as one string, or "" if XLA does not know all of them: it would exit."""
    flags = " ".join(FAST_COMPILE_FLAGS)
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    env = os.environ | {"XLA_FLAGS": flags}
    return flags if subprocess.run(command, env=env, capture_output=True).returncode == 0 else ""


if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = supported_flags()

# Test processes share compiled programs through this folder; subprocesses inherit the variable.
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
TEMPORARY_CACHE = CACHE_VARIABLE not in os.environ
if TEMPORARY_CACHE:
    os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="retrodict-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# The flags above compile faster than the options of programs that ask for fast compilation.
if os.environ["XLA_FLAGS"]:
    from retrodict._xla.tuning import FAST_COMPILE

    FAST_COMPILE.clear()

# A background job of a shell ignores interrupts, but some tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Linux allows a process 65 530 memory mappings. Each compiled program takes some, and XLA exits
# without a message if it cannot get one.
MAPPINGS = Path("/proc/self/maps")
MAX_MAPPINGS = 25_000


def pytest_unconfigure():
    if TEMPORARY_CACHE:
        shutil.rmtree(os.environ[CACHE_VARIABLE], ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def limited_mappings():
    """Delete compiled programs between test files when there are many."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MAX_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture
def without_planning():
    """Compile models without `Planner.plan`, for tests of something else.

    Planning compiles every candidate method, which takes as long as training small networks,
    however few particles it uses. It runs for every method in `test_shipped_options.py`.
    """
    from oracles import without_planning

    with without_planning():
        yield


@pytest.fixture
def two_threads():
    """Run a script in a process with two threads of XLA; one that hangs fails the test."""

    def run(script, *arguments):
        command = [sys.executable, "-c", script, *arguments]
        subprocess.run(command, check=True, timeout=600, env=os.environ | {"NPROC": "2"})

    return run
