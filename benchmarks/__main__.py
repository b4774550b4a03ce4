"""Run benchmarks and write what they found: `python -m benchmarks [--full] [name …]`.

Each runs in a process of its own, so that none inherits another's compilations, and prints
Markdown. What it printed is kept in `results/`, and `README.md` is put together from all that is
there, so that a run of one replaces its section and leaves the others.
"""

import argparse
import datetime
import importlib.util
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.report import note

FOLDER = Path(__file__).parent
TITLES = {
    "newdata": "Inference on a new data set",
    "compiling": "Training",
    "filtering": "Filtering",
    "drawing": "Sampling",
    "growth": "Scaling",
    "rescue": "Fallback by tempering",
    "training": "Gradient steps",
    "resampling": "Resampling",
    "tracing": "Tracing",
}
INTRODUCTION = """\
# Benchmarks

Comparison of retrodict with alternative methods. Both terms of a ratio are measured in one run on
one machine, with the runs of all methods interleaved. Each peer has its own virtual environment,
which the benchmark creates in the user's cache folder. A figure is the median over repetitions,
with the quartiles in brackets. Whether a target is reached is computed from the measurements.

```sh
make bench                                # all, quick settings
python -m benchmarks --full               # all, full settings
python -m benchmarks newdata filtering    # selected ones; other sections are kept
```

`python -m benchmarks` writes this page from the sections in `results/`. The paper's experiments are
in [paper](paper/README.md).
"""


def section(name: str, full: bool) -> str:
    """What a benchmark prints, under its title, with the command and the machine."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *(["--full"] if full else [])]
    begun = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    minutes = (time.perf_counter() - begun) / 60
    about = [
        f"{datetime.date.today()}",
        f"{os.cpu_count()} cores",
        f"Python {platform.python_version()}",
        f"JAX {version('jax')}",
        f"{minutes:.1f} min",
    ]
    shown = f"python -m benchmarks {'--full ' if full else ''}{name}"
    return (
        f"## {TITLES.get(name, name)}\n\n`{shown}` · {' · '.join(about)}\n\n{done.stdout.strip()}\n"
    )


def readme() -> str:
    """The page: all sections there are, the known ones first."""
    kept = {
        path.stem: path.read_text(encoding="utf-8") for path in (FOLDER / "results").glob("*.md")
    }
    order = [*(name for name in TITLES if name in kept), *sorted(set(kept) - set(TITLES))]
    return "\n".join([INTRODUCTION, *(kept[name] for name in order)])


def main() -> None:
    """Run those named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(TITLES), metavar="name")
    parser.add_argument("--full", action="store_true", help="the long settings")
    options = parser.parse_args()
    for name in options.names:
        if importlib.util.find_spec(f"benchmarks.{name}") is None:
            parser.error(f"there is no benchmark '{name}'; there are {', '.join(TITLES)}")
    (FOLDER / "results").mkdir(exist_ok=True)
    failed = []
    for name in options.names:
        note(f"\n== {name}")
        try:
            found = section(name, options.full)
        except subprocess.CalledProcessError:
            failed.append(name)
            continue
        print(found, flush=True)
        (FOLDER / "results" / f"{name}.md").write_text(found, encoding="utf-8")
        (FOLDER / "README.md").write_text(readme(), encoding="utf-8")
    if failed:
        sys.exit(
            f"these ended with an error, and their sections are as before: {', '.join(failed)}"
        )


if __name__ == "__main__":
    main()
