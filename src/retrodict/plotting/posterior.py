"""Figures of a posterior: marginals, pairs, filtered series or the particles' ancestry.

Figures are created without pyplot, which would keep them in global state and may display them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from matplotlib.figure import Figure

from retrodict._xla.jit import run_once
from retrodict.graph.graph import Graph
from retrodict.plotting.ancestry import plot_ancestry
from retrodict.plotting.pairs import plot_pairs
from retrodict.plotting.panels import Array, Panel, filtered_panels, marginal_panels

if TYPE_CHECKING:
    from retrodict.particles.posterior import Posterior

__all__ = ["Kind", "draw_prior", "plot_posterior"]

Kind = Literal["marginals", "pairs", "filtered", "ancestry"]
MAX_COLUMNS = 3


def plot_posterior(
    posterior: "Posterior",
    sites: Sequence[str] | None = None,
    kind: Kind = "marginals",
    prior: Mapping[str, Any] | None = None,
) -> Figure:
    """Plot the posterior of one data set.

    Args:
        posterior: The posterior.
        sites: Names of the sites to plot; all by default.
        kind: One of

            - "marginals": a panel for every scalar, every long site and every filtered series.
              Real scalars get a weighted density with the mean and the 94 % highest-density
              interval, and integers get bars. Sites of more than six elements get 50 and 94 %
              highest-density intervals of all elements. Filtered sites get the median over time
              with central bands of 50 and 94 %.
            - "pairs": every two scalars against each other, with regions of 50 and 94 %.
            - "filtered": the filtered series only, one below the other.
            - "ancestry": the genealogy of the final particles.
        prior: Prior draws of sites, as from `draw_prior`, to show along with the marginals.

    Returns:
        The figure.

    Raises:
        ValueError: If the kind is unknown, or does not apply to this posterior.
        KeyError: If a site is unknown.
    """
    if kind not in get_args(Kind):
        kinds = ", ".join(map(repr, get_args(Kind)))
        raise ValueError(f"kind must be one of {kinds}, got {kind!r}")
    names = list(posterior.samples) if sites is None else list(sites)
    unknown = [name for name in names if name not in posterior.samples]
    if unknown:
        raise KeyError(
            f"no latent site {unknown[0]!r} in this posterior; "
            f"its latent sites are: {', '.join(posterior.samples)}"
        )
    figure = _plot_kind(posterior, names, kind, prior or {})
    figure.suptitle(
        f"{posterior.trust}: effective sample size {float(posterior.ess):.0f} of "
        f"{posterior.num_particles}, Pareto k {float(posterior.pareto_k):.2f}",
        fontsize=10,
    )
    return figure


def _plot_kind(
    posterior: "Posterior", names: list[str], kind: Kind, prior: Mapping[str, Any]
) -> Figure:
    weights = np.exp(np.asarray(posterior.log_weights, np.float64))
    if kind == "marginals":
        return _plot_marginals(posterior, names, prior, weights)
    if kind == "pairs":
        return plot_pairs({name: np.asarray(posterior.samples[name]) for name in names}, weights)
    if kind == "filtered":
        return _plot_filtered(posterior, names)
    if posterior.ancestors is None or not posterior.ancestors.shape[0]:
        raise ValueError(
            "this posterior has no ancestry: use a method that resamples, such as method='smc'"
        )
    ess = posterior.ess_by_stage
    return plot_ancestry(
        np.asarray(posterior.ancestors), None if ess is None else np.asarray(ess, float)
    )


def draw_prior(rng_key: PRNGKeyArray, graph: Graph, num_draws: int = 2000) -> dict[str, Array]:
    """Draw the latent and deterministic sites from the prior.

    Args:
        rng_key: A random key.
        graph: The model's graph.
        num_draws: The number of draws.

    Returns:
        The draws of each site: `(num_draws, *shape)`.
    """

    def draw(key: PRNGKeyArray) -> dict[str, Any]:
        trace = graph.program.run(key, {})
        return {**{name: trace.values[name] for name in graph.latent}, **trace.deterministic}

    draws = run_once(jax.vmap(draw), jax.random.split(rng_key, num_draws))
    return {name: np.asarray(values) for name, values in draws.items()}


def _plot_marginals(
    posterior: "Posterior", names: list[str], prior: Mapping[str, Any], weights: Array
) -> Figure:
    panels: list[Panel] = []
    for name in names:
        if posterior.filtered is not None and name in posterior.filtered:
            panels.extend(filtered_panels(posterior, name))
        else:
            prior_draws = np.asarray(prior[name]) if name in prior else None
            values = np.asarray(posterior.samples[name])
            panels.extend(marginal_panels(name, values, weights, prior_draws))
    columns = min(MAX_COLUMNS, len(panels)) or 1
    # A single panel must be as wide as the figure's title.
    figure = _plot_grid(panels, columns, (3.6 if columns > 1 else 5.6, 2.5))
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if len(handles) > 1:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower right",
            ncols=2,
            fontsize=8,
            frameon=False,
        )
    return figure


def _plot_filtered(posterior: "Posterior", names: list[str]) -> Figure:
    filtered_names = [name for name in names if name in (posterior.filtered or {})]
    if not filtered_names:
        raise ValueError(
            f"no filtered series for the sites {', '.join(names)}: filtering requires a model with "
            "time steps and method='smc'"
        )
    panels = [panel for name in filtered_names for panel in filtered_panels(posterior, name)]
    return _plot_grid(panels, 1, (8.0, 2.2))


def _plot_grid(panels: Sequence[Panel], columns: int, panel_size: tuple[float, float]) -> Figure:
    width, height = panel_size
    rows = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(width * columns, height * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        panel.draw(axes)
        axes.set_title(panel.title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    return figure
