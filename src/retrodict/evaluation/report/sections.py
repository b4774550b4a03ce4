"""A compiled model in; what it is and how its networks were trained, as HTML, out."""

import re
from collections.abc import Sequence

from retrodict.compiled import Compiled, parameter_count
from retrodict.evaluation.report.charts import bars, learning_curve
from retrodict.evaluation.report.markup import Cell, code, escape, figure, figures, number, table
from retrodict.graph.graph import Graph
from retrodict.inverse.factors import Factor
from retrodict.plotting.picture import Picture

# What the pictures are drawn with, and what the page has for it.
_COLOURS = {
    "#000000": "var(--ink)",
    "#555555": "var(--rule)",
    "#ffffff": "var(--paper)",
    "#d4d4d4": "var(--observed)",
}
# Wider pictures keep their size and scroll, for on a phone their letters would vanish.
_WIDE = 640.0
MOST_CURVES = 12


def structure(compiled: Compiled) -> str:
    """The model and its inverse as pictures, and the sites."""
    graph, inverse = compiled.graph, compiled.inverse
    drawn = figures(
        [
            figure(
                picture(graph.render()),
                "<b>The model.</b> An arrow runs from what is drawn first to what depends on it. "
                "Empty circles are unknown, filled ones are data; a box is repeated as often as it "
                "says.",
                "graph",
            ),
            figure(
                picture(inverse.render()),
                "<b>Turned round.</b> From data to unknowns: each square is a network that sees "
                "what points to it and proposes what it points to."
                f" Method: {escape(inverse.method)}.",
                "graph",
            ),
        ]
    )
    rows: list[Sequence[str | Cell]] = [
        [
            code(name),
            "data" if site.observed else "unknown",
            site.distribution,
            " × ".join(map(str, site.shape)) or "one number",
            ", ".join([*(["time"] if site.time else []), *site.plates]) or "–",
        ]
        for name, site in graph.sites.items()
    ]
    return drawn + table(["site", "role", "distribution", "size", "repeated over"], rows)


def picture(drawn: Picture) -> str:
    """A picture in the page's colours."""
    svg = drawn.to_svg()
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, variable)
    found = re.search(r'width="([0-9.]+)"', svg)
    wide = " class='wide'" if found is not None and float(found[1]) > _WIDE else ""
    return svg.replace("<svg ", f"<svg{wide} ", 1)


def factors(compiled: Compiled) -> str:
    """What every network draws, what it sees, how often it is used, and its size."""
    marks = marks_of(compiled.inverse.factors)
    rows: list[Sequence[str | Cell]] = []
    for factor in compiled.inverse.factors:
        network = compiled.networks.get(str(factor.network))
        weights = (
            Cell("the model's own", "number")
            if network is None
            else number(parameter_count({"": network}))
        )
        rows.append(
            [
                Cell(escape(marks[str(factor.network)] if not factor.own else "p")),
                Cell(", ".join(code(name).html for name in factor.latents)),
                Cell(", ".join(code(name).html for name in sorted(factor.context)) or "nothing"),
                repeated(compiled.graph, factor),
                weights,
            ]
        )
    return table(["network", "proposes", "after seeing", "used", "weights"], rows)


def marks_of(found: Sequence[Factor]) -> dict[str, str]:
    """Names of the networks, as in the picture of the inverse."""
    order = dict.fromkeys(str(factor.network) for factor in found)
    digits = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
    return {name: "φ" + str(n + 1).translate(digits) for n, name in enumerate(order)}


def repeated(graph: Graph, factor: Factor) -> str:
    """How often a factor is drawn."""
    parts = [f"each of {graph.plates[plate]} {plate}" for plate in factor.plates]
    scan = graph.sites[factor.latents[0]].scan
    if factor.time and scan is not None:
        way = "backwards, " if factor.backward else ""
        parts.append(f"{way}each of {graph.scan_lengths[scan]} steps")
    return ", ".join(parts) or "once"


def training(compiled: Compiled) -> str:
    """Learning curves, how training ended, and the draws that were rejected."""
    marks = marks_of(compiled.inverse.factors)
    histories = compiled.history.networks
    if not histories:
        return "<p>The networks have not been trained.</p>"
    curves = [
        figure(
            learning_curve(h.steps, h.loss, h.refreshes),
            f"<b>{escape(marks.get(name, ''))}</b> <code>{escape(name)}</code>",
        )
        for name, h in list(histories.items())[:MOST_CURVES]
        if h.steps
    ]
    rows: list[Sequence[str | Cell]] = [
        [
            Cell(escape(marks.get(name, name))),
            number(h.steps[-1] if h.steps else 0),
            number(h.seconds),
            number(h.best_loss, 4),
            h.stopped or "–",
        ]
        for name, h in histories.items()
    ]
    return (
        "<p>Lower is better: the loss is how surprised a network is, on average, by the unknowns "
        "of synthetic data that it was not trained on. A curve that is flat at its end has learned "
        "what it can; one that still falls would gain from a longer training. Ticks below mark "
        "where the synthetic data were drawn anew.</p>"
        + figures(curves)
        + table(["network", "steps", "seconds", "held-out loss, nats", "ended"], rows)
        + _rejected(compiled)
    )


def _rejected(compiled: Compiled) -> str:
    simulated, dropped = compiled.history.simulated, compiled.history.rejected
    title = "<h3>Draws rejected</h3>"
    if not dropped:
        return f"{title}<p>None: all {simulated:,} simulated draws could be used.</p>"
    total = sum(dropped.values())
    rows: list[Sequence[str | Cell]] = [
        [code(site), why, number(count), Cell(f"{count / max(simulated, 1):.2%}", "number")]
        for (site, why), count in sorted(dropped.items(), key=lambda item: -item[1])
    ]
    return (
        f"{title}<p>{total:,} of {simulated:,} simulated draws ({total / max(simulated, 1):.1%}) "
        "were left out of training, for the computer's numbers could not hold them. The networks "
        "know less about such data; the weights, and so the correctness of answers, do not depend "
        "on it.</p>" + table(["site", "why", "draws", "share"], rows)
    )


def plan(compiled: Compiled) -> str:
    """Which method is used by default, and how the candidates did."""
    found = compiled.plan
    if not found.ess:
        return (
            f"<p>Inference uses <b>{escape(found.method)}</b>: there was nothing to choose "
            "between.</p>"
        )
    chart = bars(
        found.ess,
        1.15 * max([*found.ess.values(), 1.0]),
        f"effective sample size of {found.num_particles}",
        found.method,
    )
    return (
        f"<p>Inference uses <b>{escape(found.method)}</b> unless told otherwise: of the methods "
        f"that fit this model it had the largest effective sample size in the middle of "
        f"{found.num_datasets} synthetic data sets.</p>"
        + figures([figure(chart, "Longer is better: how many independent draws the weighted "
                                 "particles are worth.")])
    )  # fmt: skip
