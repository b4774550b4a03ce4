"""Measured numbers in; tables, figures with their spread and verdicts on targets out, in Markdown.

Results go to standard output, which `python -m benchmarks` keeps; what is under way is said on
standard error.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence

import numpy as np


def full(about: str | None) -> bool:
    """Whether the long settings are asked for on the command line."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--full", action="store_true", help="the long settings")
    return bool(parser.parse_args().full)


def note(text: str) -> None:
    """Say what is under way."""
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: the first column to the left, the others to the right."""
    print()
    print(f"| {' | '.join(header)} |")
    print(f"| --- |{' ---: |' * (len(header) - 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    print(flush=True)


def short(value: float) -> str:
    """Three digits, without an exponent where that is readable."""
    if not np.isfinite(value):
        return "—"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        digits = 0 if value == 0 else max(0, 2 - int(np.floor(np.log10(abs(value)))))
        return f"{value:,.{digits}f}".replace(",", " ")
    return f"{value:.2e}"


def spread(values: Iterable[float], factor: float = 1.0) -> str:
    """Median, and the quartiles in brackets."""
    low, middle, high = np.quantile(
        np.array([float(v) for v in values]) * factor, [0.25, 0.5, 0.75]
    )
    return f"{short(middle)} ({short(low)}–{short(high)})"


def target(asked: str, found: str, reached: bool) -> None:
    """Print whether a target was reached, and what was measured."""
    print(f"- **{'reached' if reached else 'missed'}**: {asked}. Measured: {found}.", flush=True)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The b of value ∝ size^b, by least squares of logarithms over the upper half of the sizes."""
    half = len(sizes) // 2
    x, y = np.log(np.asarray(sizes[half:], float)), np.log(np.asarray(values[half:], float))
    return float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else float("nan")
