"""Peer packages in processes that answer requests, and interleaved measurements.

Each peer has its own virtual environment, created in the user's cache folder when it is first
needed, so that the peers' requirements cannot conflict.
"""

import hashlib
import os
import subprocess
import time
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from benchmarks.report import log_progress

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "retrodict-benchmarks"
Name = TypeVar("Name")


def environment(*requirements: str) -> Path:
    """Create the virtual environment with these pip requirements if missing; return its Python."""
    digest = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:8]
    name = requirements[0].replace("==", "-")
    home = CACHE / f"{name}-{digest}"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        log_progress(f"creating an environment for {', '.join(requirements)} in {home}")
        venv.create(home, clear=True, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, *requirements], check=True)
        (home / "ready").touch()
    return python


class Peer:
    """A process that answers each line on standard input with a line on standard output.

    Args:
        python: the interpreter.
        script: the script to run.
        arguments: of the script.
        settings: environment variables, in addition to those of this process.
    """

    def __init__(self, python: Path, script: Path, *arguments: str, **settings: str) -> None:
        self.process = subprocess.Popen(
            [python, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
        )

    def read(self) -> list[str]:
        """Read the next line, split into words."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} exited without an answer")
        return line.split()

    def ask(self, *words: object) -> list[str]:
        """Send a line and read the answer, split into words."""
        print(*words, file=self.process.stdin, flush=True)
        return self.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run_interleaved(
    calls: Mapping[Name, Callable[[int], Any]], repeats: int, pause: float = 0.2
) -> dict[Name, list[Any]]:
    """Call each function in turn, `repeats` times, with the number of the round.

    Interleaving spreads the load of other processes equally. The pause is needed because idle
    threads spin for a while after a call, which would slow down the next one.

    Returns:
        Name → results of all rounds.
    """
    results: dict[Name, list[Any]] = {name: [] for name in calls}
    for number in range(repeats):
        for name, call in calls.items():
            results[name].append(call(number))
            time.sleep(pause)
    return results
