"""Run benchmarks and write their results: `python -m benchmarks [--full] [name …]`.

Each benchmark runs in its own process, so that none reuses programs compiled by another, and prints
Markdown. The output is stored in `results/`, and `README.md` is assembled from all stored sections:
running one benchmark replaces its section only.
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

from benchmarks.report import log_progress

FOLDER = Path(__file__).parent
TITLES = {
    "firstanswer": "Time to the first answer",
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


def run_section(name: str, full: bool) -> str:
    """Run a benchmark; return its output with a title, the command and the machine."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *(["--full"] if full else [])]
    start_time = time.perf_counter()
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    minutes = (time.perf_counter() - start_time) / 60
    details = [
        f"{datetime.date.today()}",
        f"{os.cpu_count()} cores",
        f"Python {platform.python_version()}",
        f"JAX {version('jax')}",
        f"{minutes:.1f} min",
    ]
    command_text = f"python -m benchmarks {'--full ' if full else ''}{name}"
    header = f"## {TITLES.get(name, name)}\n\n`{command_text}` · {' · '.join(details)}"
    return f"{header}\n\n{process.stdout.strip()}\n"


def readme() -> str:
    """Assemble the page from all stored sections, in the order of `TITLES`."""
    sections = {
        path.stem: path.read_text(encoding="utf-8") for path in (FOLDER / "results").glob("*.md")
    }
    order = [*(name for name in TITLES if name in sections), *sorted(set(sections) - set(TITLES))]
    return "\n".join([INTRODUCTION, *(sections[name] for name in order)])


def main() -> None:
    """Run the benchmarks named on the command line, or all."""
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
        log_progress(f"\n== {name}")
        try:
            text = run_section(name, options.full)
        except subprocess.CalledProcessError:
            failed.append(name)
            continue
        print(text, flush=True)
        (FOLDER / "results" / f"{name}.md").write_text(text, encoding="utf-8")
        (FOLDER / "README.md").write_text(readme(), encoding="utf-8")
    if failed:
        sys.exit(f"failed, with their sections unchanged: {', '.join(failed)}")


if __name__ == "__main__":
    main()
