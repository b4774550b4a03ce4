"""The experiments of Paige & Wood (2016), run through the public interface.

`retrodict demo pumps`, `retrodict demo regression` and `retrodict demo fhmm` run the experiments of
sec. 5.2, 5.1 and 5.3, draw the paper's figures and compare the results with exact answers.
"""

from importlib import import_module
from pathlib import Path

NAMES = ("pumps", "regression", "fhmm")


def run(name: str, folder: Path, *, minutes: float | None = None, progress_bar: bool = True) -> str:
    """Compile a model, infer on the demonstration's data and write the figures.

    Args:
        name: one of `NAMES`.
        folder: existing folder for figures and compiled models.
        minutes: time limit for training; None for the demonstration's own schedule.
        progress_bar: whether to show progress bars.

    Returns:
        A text that compares the results with the exact answers.
    """
    text: str = import_module(f"retrodict.demos.{name}").run(folder, minutes, progress_bar)
    return text
