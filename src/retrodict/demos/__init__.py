"""The name of an experiment of the paper in; it is run, drawn and compared with the exact answer.

`retrodict demo pumps`, `retrodict demo regression` and `retrodict demo fhmm` run the experiments of
Paige & Wood (2016), sec. 5.2, 5.1 and 5.3, through the public interface.
"""

from importlib import import_module
from pathlib import Path

NAMES = ("pumps", "regression", "fhmm")


def run(name: str, folder: Path, *, minutes: float | None = None, progress_bar: bool = True) -> str:
    """Compile the model, infer on the paper's data, write figures; gives what there is to say.

    Args:
        name: one of `NAMES`.
        folder: for figures and the compiled model.
        minutes: a limit for training other than the demonstration's own.
        progress_bar: whether to show one.
    """
    if name not in NAMES:
        raise ValueError(f"there is no demonstration {name!r}; there are {', '.join(NAMES)}")
    folder.mkdir(parents=True, exist_ok=True)
    text: str = import_module(f"retrodict.demos.{name}").run(folder, minutes, progress_bar)
    return text
