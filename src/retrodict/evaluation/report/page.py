"""The whole page of the report, as one self-contained HTML document.

It has no scripts, no web fonts and no network requests. The verdict is written for readers who do
not know the method.
"""

from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from retrodict.compiled import Compiled, parameter_count
from retrodict.evaluation.report import sections
from retrodict.evaluation.report.calibration_section import calibration_section
from retrodict.evaluation.report.markup import bullets, cards, escape
from retrodict.evaluation.report.verdict import Verdict, headline_numbers, judge

if TYPE_CHECKING:
    from retrodict.evaluation.calibrate import Calibration


def page(compiled: Compiled, calibration: "Calibration | None", title: str) -> str:
    """Return the HTML document."""
    folder = files("retrodict.evaluation.report")
    return Template(folder.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        style=folder.joinpath("style.css").read_text(encoding="utf-8"),
        verdict=_verdict(judge(calibration)),
        numbers=cards(_numbers(compiled, calibration)),
        calibration=calibration_section(calibration),
        structure=sections.structure(compiled),
        factors=sections.factors(compiled),
        training=sections.training(compiled),
        plan=sections.plan(compiled),
        version=escape(version("retrodict")),
    )


def _verdict(verdict: Verdict) -> str:
    advice = f"<p>{escape(verdict.advice)}</p>" if verdict.advice else ""
    return (
        f"<section class='verdict {verdict.tone}'><h2>{escape(verdict.headline)}</h2>"
        f"<p>{escape(verdict.meaning)}</p>{bullets(verdict.reasons)}{advice}</section>"
    )


def _numbers(compiled: Compiled, calibration: "Calibration | None") -> dict[str, str]:
    history = compiled.history
    seconds = sum(h.seconds for h in history.networks.values())
    rejected_share = sum(history.rejected.values()) / max(history.simulated, 1)
    num_networks = len(compiled.networks)
    return {
        **({} if calibration is None else headline_numbers(calibration)),
        f"network{'s' if num_networks > 1 else ''} trained": str(num_networks),
        "network weights": f"{parameter_count(compiled.networks):,}",
        "training time": f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min",
        "of simulated draws rejected": f"{rejected_share:.1%}" if rejected_share else "none",
    }
