"""A compiled model and its calibration in; one self-contained page of HTML out.

No scripts, no fonts, no network: what is needed to read it is in the file. Someone who has never
heard of the method should understand the verdict.
"""

from importlib.metadata import version
from importlib.resources import files

from retrodict.compiled import Compiled, parameter_count
from retrodict.evaluation.report import sections
from retrodict.evaluation.report.checks import Checked, Verdict, calibration_section, facts, judge
from retrodict.evaluation.report.markup import bullets, cards, escape

_ABOUT = """
<details><summary>What is this about?</summary>
<p>A statistical model says how unknown quantities produce data. Inference goes the other way: from
data back to what is unknown, as a cloud of weighted guesses called a posterior.</p>
<p>Before any data were seen, retrodict simulated data from the model, again and again, and trained
neural networks to guess the unknowns from the data. Given real data, the networks propose guesses
at once; each guess is then weighed by how well it fits the data under the model itself. If the
networks guess badly, few guesses carry weight and the answer is coarse, but the weights remain
right. This page shows how good the guesses are.</p></details>
"""

_WORDS = {
    "Effective sample size": "How many independent draws from the exact posterior the weighted "
    "particles are worth. Of 1000 particles, 500 is very good; below 30, means are guesses.",
    "Calibration": "Simulate unknowns and data from the model, infer the unknowns from the data, "
    "and see where the truth falls among the draws. If the answers are right, it falls anywhere "
    "with the same chance: the rank is uniform.",
    "Coverage": "How often an interval that claims to hold the truth with some probability does.",
    "Pareto k̂": "How heavy the tail of the weights is. Below 0.5 all is well; above 0.7 a few "
    "guesses carry so much that means cannot be relied on.",
    "Trust": "What every answer says of itself, from its weights: good, fair, or poor with the "
    "reasons.",
    "Held-out loss": "The average of −log q over synthetic data that the networks were not trained "
    "on, in nats. It can be compared between trainings of one model, not between models.",
}


def page(compiled: Compiled, calibration: Checked | None, title: str) -> str:
    """The whole document."""
    verdict = judge(calibration)
    style = files("retrodict.evaluation.report").joinpath("style.css").read_text(encoding="utf-8")
    contents = [
        ("Does it give the right answers?", calibration_section(calibration)),
        ("The model, and the model turned round", sections.structure(compiled)),
        ("The networks", sections.factors(compiled)),
        ("Training", sections.training(compiled)),
        ("How it infers", sections.plan(compiled)),
        ("Words", _glossary()),
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
<header><p>Compiled inference, checked</p><h1>{escape(title)}</h1></header>
{_verdict(verdict)}
{cards(_numbers(compiled, calibration))}
{_ABOUT}
{body}
<footer>Made by retrodict {escape(version("retrodict"))}.</footer>
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


def _numbers(compiled: Compiled, calibration: Checked | None) -> dict[str, str]:
    history = compiled.history
    seconds = sum(h.seconds for h in history.networks.values())
    spent = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    dropped = sum(history.rejected.values()) / max(history.simulated, 1)
    found = {} if calibration is None else facts(calibration)
    number = len(compiled.networks)
    return {
        **found,
        f"network{'s' if number > 1 else ''} trained": str(number),
        "weights in them": f"{parameter_count(compiled.networks):,}",
        "spent on training": spent,
        "of simulated draws rejected": f"{dropped:.1%}" if dropped else "none",
    }


def _glossary() -> str:
    inside = "".join(f"<dt>{escape(w)}</dt><dd>{escape(m)}</dd>" for w, m in _WORDS.items())
    return f"<dl class='words'>{inside}</dl>"
