"""The report's sections on a compiled model: structure, networks, training and method."""

import re
from collections.abc import Sequence

from retrodict.compiled import Compiled, parameter_count
from retrodict.evaluation.report.charts import bars, learning_curve
from retrodict.evaluation.report.markup import Cell, code, escape, figure, figures, number, table
from retrodict.graph.graph import Graph
from retrodict.inverse.factors import Factor
from retrodict.plotting.picture import Picture

# Colours of the pictures, and the CSS variables that replace them.
_COLOURS = {
    "#000000": "var(--ink)",
    "#555555": "var(--rule)",
    "#ffffff": "var(--paper)",
    "#d4d4d4": "var(--observed)",
}
# Wider pictures keep their size and scroll: scaled down to a phone, they would be illegible.
_MAX_SCALED_WIDTH = 640.0
MAX_CURVES = 12


def structure(compiled: Compiled) -> str:
    """Show the model and its inverse as pictures, and list the sites."""
    graph, inverse = compiled.graph, compiled.inverse
    pictures = figures(
        [
            figure(
                picture(graph.render()),
                "<b>The model.</b> An arrow points from a variable to those that depend on it. "
                "Empty circles are unknown, filled ones are data; the content of a box is repeated "
                "as often as its label says.",
                "graph",
            ),
            figure(
                picture(inverse.render()),
                "<b>The inverse.</b> From data to unknowns: each square is a network; arrows lead "
                f"from its inputs and to what it proposes. Method: {escape(inverse.method)}.",
                "graph",
            ),
        ]
    )
    rows: list[Sequence[str | Cell]] = [
        [
            code(name),
            "data" if site.observed else "unknown",
            site.distribution,
            " × ".join(map(str, site.shape)) or "scalar",
            ", ".join([*(["time"] if site.time else []), *site.plates]) or "–",
        ]
        for name, site in graph.sites.items()
    ]
    return pictures + table(["site", "role", "distribution", "shape", "repeated over"], rows)


def picture(source: Picture) -> str:
    """Convert a picture to SVG in the page's colours."""
    svg = source.to_svg()
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, variable)
    width = re.search(r'width="([0-9.]+)"', svg)
    is_wide = width is not None and float(width[1]) > _MAX_SCALED_WIDTH
    return svg.replace("<svg ", "<svg class='wide' " if is_wide else "<svg ", 1)


def factors(compiled: Compiled) -> str:
    """List the factors: what each proposes, its inputs, how often it is used, and its size."""
    symbols = network_symbols(compiled.inverse.factors)
    rows: list[Sequence[str | Cell]] = []
    for factor in compiled.inverse.factors:
        network = compiled.networks.get(str(factor.network))
        weights = (
            Cell("none: prior", "number")
            if network is None
            else number(parameter_count({"": network}))
        )
        rows.append(
            [
                Cell(escape("p" if factor.from_prior else symbols[str(factor.network)])),
                Cell(", ".join(code(name).html for name in factor.latents)),
                Cell(", ".join(code(name).html for name in sorted(factor.context)) or "–"),
                repetitions(compiled.graph, factor),
                weights,
            ]
        )
    return table(["network", "proposes", "given", "used", "weights"], rows)


def network_symbols(factors: Sequence[Factor]) -> dict[str, str]:
    """Symbols of the networks, as in the picture of the inverse."""
    order = dict.fromkeys(str(factor.network) for factor in factors)
    digits = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
    return {name: "φ" + str(n + 1).translate(digits) for n, name in enumerate(order)}


def repetitions(graph: Graph, factor: Factor) -> str:
    """Describe how often a factor is sampled."""
    parts = [f"each of {graph.plates[plate]} {plate}" for plate in factor.plates]
    scan = graph.sites[factor.latents[0]].scan
    if factor.time and scan is not None:
        direction = "backwards, " if factor.backward else ""
        parts.append(f"{direction}each of {graph.scan_lengths[scan]} steps")
    return ", ".join(parts) or "once"


def training(compiled: Compiled) -> str:
    """Show learning curves, how training ended, and the rejected draws."""
    symbols = network_symbols(compiled.inverse.factors)
    histories = compiled.history.networks
    if not histories:
        return "<p>The networks have not been trained.</p>"
    curves = [
        figure(
            learning_curve(h.steps, h.loss, h.refreshes),
            f"<b>{escape(symbols.get(name, ''))}</b> <code>{escape(name)}</code>",
        )
        for name, h in list(histories.items())[:MAX_CURVES]
        if h.steps
    ]
    rows: list[Sequence[str | Cell]] = [
        [
            Cell(escape(symbols.get(name, name))),
            number(h.steps[-1] if h.steps else 0),
            number(h.seconds),
            number(h.best_loss, 4),
            h.stopped or "–",
        ]
        for name, h in histories.items()
    ]
    return (
        "<p>The loss is the mean of −log q on synthetic data that the network was not trained on; "
        "lower is better. A curve that is flat at its end has converged; one that still falls "
        "would gain from more training. Ticks at the bottom mark where new synthetic data were "
        "simulated.</p>"
        + figures(curves)
        + table(["network", "steps", "seconds", "held-out loss, nats", "ended"], rows)
        + _rejected(compiled)
    )


def _rejected(compiled: Compiled) -> str:
    simulated, dropped = compiled.history.simulated, compiled.history.rejected
    title = "<h3>Rejected draws</h3>"
    if not dropped:
        return f"{title}<p>None: all {simulated:,} simulated draws could be used.</p>"
    total = sum(dropped.values())
    rows: list[Sequence[str | Cell]] = [
        [code(site), reason, number(count), Cell(f"{count / max(simulated, 1):.2%}", "number")]
        for (site, reason), count in sorted(dropped.items(), key=lambda item: -item[1])
    ]
    return (
        f"{title}<p>{total:,} of {simulated:,} simulated draws ({total / max(simulated, 1):.1%}) "
        "were left out of training because 32-bit floating point cannot represent them. The "
        "proposals are worse for such data; the weights remain correct.</p>"
        + table(["site", "reason", "draws", "share"], rows)
    )


def plan(compiled: Compiled) -> str:
    """Show the default inference method and the effective sample sizes of the candidates."""
    chosen = compiled.plan
    if not chosen.ess:
        return (
            f"<p>The default method is <b>{escape(chosen.method)}</b>, the only one that fits this "
            "model.</p>"
        )
    chart = bars(
        chosen.ess,
        1.15 * max([*chosen.ess.values(), 1.0]),
        f"effective sample size of {chosen.num_particles}",
        chosen.method,
    )
    return (
        f"<p>The default method is <b>{escape(chosen.method)}</b>. Of the methods that fit this "
        "model it has the largest median effective sample size over "
        f"{chosen.num_datasets} synthetic data sets.</p>"
        + figures([figure(chart, "Effective sample size of each method; longer is better.")])
    )
