"""The compilation cache of the command line: its folder, when it stays off, and its size."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from retrodict._xla import cache
from retrodict._xla.cache import enable_compilation_cache

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def unconfigured_cache(monkeypatch, tmp_path):
    """A process in which nobody has configured a cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_each_processor_has_its_folder(tmp_path, monkeypatch):
    folder = enable_compilation_cache()
    assert folder.parent == tmp_path / "retrodict" and folder.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    jax.config.update("jax_compilation_cache_dir", None)
    assert enable_compilation_cache() == folder
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(cache, "_instruction_sets", lambda: "another processor's")
    assert enable_compilation_cache() != folder


def test_a_configured_cache_is_left_alone(tmp_path):
    jax.config.update("jax_compilation_cache_dir", "theirs")
    assert enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir == "theirs"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable_compilation_cache() is None
    assert not list(tmp_path.iterdir())


def test_without_a_writable_folder_there_is_no_cache_and_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_the_oldest_programs_are_deleted(monkeypatch):
    folder = enable_compilation_cache()
    for age, name in enumerate(("new", "old", "oldest")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(cache, "MAX_CACHE_BYTES", 250)
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compilation_cache()
    assert {path.name for path in folder.iterdir()} == {"new", "old"}


SLOW_TO_COMPILE = """
import jax, jax.numpy as jnp
from retrodict._xla import cache
cache.MIN_CACHED_SECONDS = 0.0
cache.enable_compilation_cache()
print(jax.jit(lambda x: jnp.sort(jnp.sin(x)) @ x)(jnp.arange(4.0)))
"""


@pytest.mark.slow
def test_a_second_process_reuses_the_programs_of_the_first(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}

    def run():
        command = [sys.executable, "-c", SLOW_TO_COMPILE]
        process = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        assert process.stderr == ""  # no warnings that a user would wonder about
        return process.stdout

    def cached_programs():
        return {path.name for path in Path(tmp_path).rglob("*-cache")}

    first = run()
    programs = cached_programs()
    assert programs
    assert run() == first
    assert cached_programs() == programs
