"""Plot of the particles' genealogy and of its path degeneracy."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from retrodict.plotting.panels import POSTERIOR_COLOUR, Array

# More lineages than this would not be distinguishable on a screen.
MAX_LINEAGES = 300
# Width of a bundle of lineages through one ancestor, relative to its share of the final particles.
BUNDLE_WIDTH = 0.5


def plot_ancestry(ancestors: Array, ess_by_stage: Array | None) -> Figure:
    """Plot the lineages of the final particles, and how many ancestors each stage has.

    Args:
        ancestors: Index of each particle's parent: `(stages, particles)`.
        ess_by_stage: Effective sample size before each resampling, and at the end.
    """
    num_particles = ancestors.shape[1]
    lineages = ancestral_lineages(ancestors)
    # Sorted by the earliest ancestor first, branches do not cross.
    order = np.lexsort(lineages[::-1])
    thinning = max(1, -(-num_particles // MAX_LINEAGES))
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    tree, counts = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    _draw_tree(tree, lineages[:, order[::thinning]])
    _draw_counts(counts, lineages, ess_by_stage)
    return figure


def ancestral_lineages(ancestors: Array) -> Array:
    """Return the ancestor at each stage of every final particle: `(stages + 1, particles)`."""
    lineages = [np.arange(ancestors.shape[1])]
    for parents in ancestors[::-1]:
        lineages.append(parents[lineages[-1]])
    return np.stack(lineages[::-1])


def _draw_tree(axes: Axes, lineages: Array) -> None:
    """Draw each lineage as a line; lineages through one ancestor form a bundle."""
    num_stages = len(lineages) - 1
    final_heights = np.linspace(0, 1, lineages.shape[1])
    heights = np.empty(lineages.shape)
    for stage, stage_ancestors in enumerate(lineages):
        _, index = np.unique(stage_ancestors, return_inverse=True)
        centre = (np.bincount(index, final_heights) / np.bincount(index))[index]
        heights[stage] = centre + BUNDLE_WIDTH * (final_heights - centre)
    stages = np.arange(num_stages + 1)
    paths = [np.column_stack([stages, lineage]) for lineage in heights.T]
    axes.add_collection(LineCollection(paths, colors=POSTERIOR_COLOUR, linewidths=0.6, alpha=0.8))
    axes.set(xlim=(-0.02 * num_stages, 1.02 * num_stages), ylim=(-0.02, 1.02), yticks=[])
    axes.set_title("genealogy of the final particles", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_counts(axes: Axes, lineages: Array, ess_by_stage: Array | None) -> None:
    """Draw the number of particles with descendants, and the effective sample size."""
    num_particles = lineages.shape[1]
    distinct = np.array([len(np.unique(stage_ancestors)) for stage_ancestors in lineages])
    stages = np.arange(len(lineages))
    axes.step(stages, distinct, where="mid", color="black", lw=1, label="with descendants")
    if ess_by_stage is not None:
        stages, label = np.arange(len(ess_by_stage)), "effective sample size"
        axes.plot(stages, ess_by_stage, color=POSTERIOR_COLOUR, lw=1, label=label)
    axes.set_yscale("log")
    axes.set_ylim(min(10.0, 0.7 * distinct.min()), 1.4 * num_particles)
    axes.set_xlabel("stage", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"of {num_particles} particles", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
