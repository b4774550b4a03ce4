"""A compiled model and its calibration in; a page that says whether to trust it out."""

from pathlib import Path

from retrodict.compiled import Compiled
from retrodict.evaluation.report.checks import Checked, Verdict, judge

__all__ = ["Checked", "Verdict", "judge", "write_report"]


def write_report(path: str | Path, compiled: Compiled, calibration: Checked | None = None) -> Path:
    """Write the report as one self-contained HTML file; gives the path back.

    Without a calibration it shows the structure and the training, and says that nothing was tried.
    """
    from retrodict.evaluation.report.page import page

    path = Path(path)
    model = compiled.graph.program.model
    title = getattr(model, "__name__", type(model).__name__)
    path.write_text(page(compiled, calibration, title), encoding="utf-8")
    return path
