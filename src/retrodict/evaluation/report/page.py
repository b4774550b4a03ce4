"""The whole page of the report, as one self-contained HTML document.

It has no scripts, no web fonts and no network requests. The verdict is written for readers who do
not know the method.
"""

from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING

from retrodict.compiled import Compiled, parameter_count
from retrodict.evaluation.report import sections
from retrodict.evaluation.report.calibration_section import calibration_section
from retrodict.evaluation.report.markup import bullets, cards, escape
from retrodict.evaluation.report.verdict import Verdict, headline_numbers, judge

if TYPE_CHECKING:
    from retrodict.evaluation.calibrate import Calibration

_ABOUT = """
<details><summary>What is this about?</summary>
<p>A statistical model describes how unknown quantities generate data. Inference goes the other way:
from data to the unknowns, as a set of weighted draws called a posterior.</p>
<p>Before any data were available, retrodict simulated data from the model and trained neural
networks to propose the unknowns given the data. Given real data, the networks propose draws at
once; each draw is then weighted by the density of the model itself. If the networks propose badly,
few draws carry weight and the posterior is imprecise, but the weights remain correct. This page
shows how good the proposals are.</p></details>
"""

_GLOSSARY = {
    "Effective sample size": "The number of independent draws from the exact posterior that the "
    "weighted particles are worth. Of 1000 particles, 500 is very good; below 30, means are not "
    "reliable.",
    "Calibration": "Simulate unknowns and data from the model, infer the unknowns from the data, "
    "and compute the rank of the true value among the draws. If the posteriors are correct, the "
    "rank is uniform.",
    "Coverage": "How often an interval that claims to hold the true value with some probability "
    "does.",
    "Pareto k̂": "How heavy the tail of the weights is. Below 0.5 is good; above 0.7 a few draws "
    "carry so much weight that means are not reliable.",
    "Trust": "What each posterior reports about itself, from its weights: good, fair, or poor, "
    "with the reasons.",
    "Held-out loss": "The mean of −log q over synthetic data that the networks were not trained "
    "on, in nats. It can be compared between trainings of one model, not between models.",
}


def page(compiled: Compiled, calibration: "Calibration | None", title: str) -> str:
    """Return the HTML document."""
    style = files("retrodict.evaluation.report").joinpath("style.css").read_text(encoding="utf-8")
    contents = [
        ("Calibration: are the results correct?", calibration_section(calibration)),
        ("The model and its inverse", sections.structure(compiled)),
        ("Networks", sections.factors(compiled)),
        ("Training", sections.training(compiled)),
        ("Inference method", sections.plan(compiled)),
        ("Glossary", _glossary()),
    ]
    body = "\n".join(f"<section><h2>{escape(head)}</h2>{text}</section>" for head, text in contents)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)} · retrodict</title>
<style>
{style}</style>
</head>
<body>
<main>
<header><p>Report on a compiled model</p><h1>{escape(title)}</h1></header>
{_verdict(judge(calibration))}
{cards(_numbers(compiled, calibration))}
{_ABOUT}
{body}
<footer>Written by retrodict {escape(version("retrodict"))}.</footer>
</main>
</body>
</html>
"""


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


def _glossary() -> str:
    items = "".join(f"<dt>{escape(w)}</dt><dd>{escape(m)}</dd>" for w, m in _GLOSSARY.items())
    return f"<dl class='glossary'>{items}</dl>"
