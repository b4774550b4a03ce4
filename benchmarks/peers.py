"""Names of packages in; processes with them that answer requests, and calls timed in turn, out.

Every peer has a virtual environment of its own, made in the user's cache folder when it is first
needed, so that none has a say in which versions another gets.
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

from benchmarks.report import note

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "retrodict-benchmarks"
Name = TypeVar("Name")


def environment(*requirements: str) -> Path:
    """The interpreter of an environment with these packages, as pip is to be asked for them."""
    digest = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:8]
    name = requirements[0].replace("==", "-")
    home = CACHE / f"{name}-{digest}"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        note(f"making an environment for {', '.join(requirements)} in {home}")
        venv.create(home, clear=True, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, *requirements], check=True)
        (home / "ready").touch()
    return python


class Peer:
    """A script that answers a line with a line, in a process that stays alive.

    Args:
        python: the interpreter.
        script: what it is to run, with the arguments that follow.
        settings: variables of its environment, beside those of this process.
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
        """The words of the next line it writes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended without an answer")
        return line.split()

    def ask(self, *words: object) -> list[str]:
        """The words of its answer."""
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


def in_turn(
    calls: Mapping[Name, Callable[[int], Any]], repeats: int, pause: float = 0.2
) -> dict[Name, list[Any]]:
    """Call each with the number of the round, round after round; what they gave, by name.

    They take turns so that a busy machine weighs on all alike, with a pause between, for the idle
    threads of one spin for a while at the cost of the next.
    """
    found: dict[Name, list[Any]] = {name: [] for name in calls}
    for number in range(repeats):
        for name, call in calls.items():
            found[name].append(call(number))
            time.sleep(pause)
    return found
