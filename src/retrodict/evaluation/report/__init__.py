"""HTML report on a compiled model: verdict, calibration, structure and training."""

from pathlib import Path
from typing import TYPE_CHECKING

from retrodict.compiled import Compiled
from retrodict.evaluation.report.verdict import Verdict, judge

if TYPE_CHECKING:
    from retrodict.evaluation.calibrate import Calibration

__all__ = ["Verdict", "judge", "write_report"]


def write_report(
    path: str | Path, compiled: Compiled, calibration: "Calibration | None" = None
) -> Path:
    """Write the report as one self-contained HTML file.

    Args:
        path: of the file.
        compiled: the model to report on.
        calibration: result of `retrodict.calibrate`; without it the report shows structure and
            training only, and says so.

    Returns:
        The path.
    """
    from retrodict.evaluation.report.page import page

    path = Path(path)
    model = compiled.graph.program.model
    title = getattr(model, "__name__", type(model).__name__)
    path.write_text(page(compiled, calibration, title), encoding="utf-8")
    return path
