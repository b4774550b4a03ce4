"""Compiled programs kept from process to process: where, when not, and how many."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from retrodict._xla.cache import keep_programs

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def unset(monkeypatch, tmp_path):
    """A process for which nothing has been set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = {name: getattr(jax.config, name) for name in OPTIONS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in kept.items():
        jax.config.update(name, value)


def test_a_folder_for_this_processor(tmp_path, monkeypatch):
    folder = keep_programs()
    assert folder.parent == tmp_path / "retrodict" and folder.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    jax.config.update("jax_compilation_cache_dir", None)
    assert keep_programs() == folder
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(programs, "_instructions", lambda: "another one's")
    assert keep_programs() != folder


def test_what_users_have_set_stays(tmp_path):
    jax.config.update("jax_compilation_cache_dir", "theirs")
    assert keep_programs() is None
    assert jax.config.jax_compilation_cache_dir == "theirs"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    assert keep_programs() is None
    assert not list(tmp_path.iterdir())


def test_no_place_to_keep_them_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert keep_programs() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_the_oldest_are_forgotten(monkeypatch):
    folder = keep_programs()
    for age, name in enumerate(("new", "old", "oldest")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(programs, "MOST_BYTES", 250)
    jax.config.update("jax_compilation_cache_dir", None)
    keep_programs()
    assert {path.name for path in folder.iterdir()} == {"new", "old"}


SLOW_TO_COMPILE = """
import jax, jax.numpy as jnp
from retrodict._xla import cache
cache.LEAST_SECONDS = 0.0
cache.keep_programs()
print(jax.jit(lambda x: jnp.sort(jnp.sin(x)) @ x)(jnp.arange(4.0)))
"""


@pytest.mark.slow
def test_another_process_finds_them(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}

    def answer():
        command = [sys.executable, "-c", SLOW_TO_COMPILE]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        assert done.stderr == ""  # nothing that a user would wonder about
        return done.stdout

    def kept():
        return {path.name for path in Path(tmp_path).rglob("*-cache")}

    first = answer()
    programs_of_first = kept()
    assert programs_of_first
    assert answer() == first
    assert kept() == programs_of_first
