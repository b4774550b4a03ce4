"""Output of the benchmarks in Markdown: tables, medians with quartiles, and targets.

Results go to standard output, which `python -m benchmarks` stores; progress messages go to standard
error.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence

import numpy as np


def parse_full_flag(description: str | None) -> bool:
    """Whether the command line has `--full`, for the long settings."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--full", action="store_true", help="the long settings")
    return bool(parser.parse_args().full)


def log_progress(text: str) -> None:
    """Print a progress message to standard error."""
    print(text, file=sys.stderr, flush=True)


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table with the first column aligned to the left and the others to the right."""
    print()
    print(f"| {' | '.join(header)} |")
    print(f"| --- |{' ---: |' * (len(header) - 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    print(flush=True)


def format_number(value: float) -> str:
    """Format with three significant digits, without an exponent where that is readable."""
    if not np.isfinite(value):
        return "—"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        digits = 0 if value == 0 else max(0, 2 - int(np.floor(np.log10(abs(value)))))
        return f"{value:,.{digits}f}".replace(",", " ")
    return f"{value:.2e}"


def format_quartiles(values: Iterable[float], factor: float = 1.0) -> str:
    """Format the median, with the quartiles in brackets."""
    scaled = np.array([float(value) for value in values]) * factor
    low, median, high = np.quantile(scaled, [0.25, 0.5, 0.75])
    return f"{format_number(median)} ({format_number(low)}–{format_number(high)})"


def print_target(target: str, measurement: str, reached: bool) -> None:
    """Print whether a target is reached, and the measurement."""
    print(
        f"- **{'reached' if reached else 'missed'}**: {target}. Measured: {measurement}.",
        flush=True,
    )


def growth_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Fit b of value ∝ size^b by least squares of logarithms over the upper half of the sizes."""
    half = len(sizes) // 2
    x, y = np.log(np.asarray(sizes[half:], float)), np.log(np.asarray(values[half:], float))
    return float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else float("nan")
