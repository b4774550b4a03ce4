"""Simulation-based calibration of a compiled model on synthetic data.

Draw x* and y from the model, infer x from y, and compute the rank of x* among the draws. Over many
data sets the rank is uniform if the draws are from the posterior (Talts et al. 2018, "Validating
Bayesian inference algorithms with simulation-based calibration", arXiv:1804.06788). Draws of the
model that float32 cannot represent are dropped, as they are in training: the posterior under test
is that of the remaining data sets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from retrodict._xla.jit import CompiledFunction
from retrodict.compiled import Compiled
from retrodict.evaluation.rank_uniformity import (
    CoordinateRanks,
    analyse_coordinates,
    coverage,
    describe_deviation,
    significance_level,
)
from retrodict.graph.loop_surface import split_steps, stack_steps
from retrodict.inference.samplers import Settings
from retrodict.training.prior_datasets import simulate_datasets

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# A larger share of posteriors with trust "poor" fails the calibration, whatever their ranks.
MAX_POOR_SHARE = 0.2
# Memory in bytes for the draws of the data sets that are processed together.
MEMORY = 256 * 2**20
# Levels of the central intervals in the summary.
LEVELS = (0.5, 0.8, 0.95)


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate`.

    Attributes:
        compiled: the model under test.
        ranks: site → normalised rank, from 0 to 1, of the true value among the draws,
            (datasets, *site shape).
        ess: effective sample size, (datasets,).
        pareto_k: Pareto k̂ of the weights, (datasets,).
        trust: "good", "fair" or "poor", (datasets,); "none" for unweighted proposals.
        num_particles: K.
        weighted: whether weighted posteriors were tested, or the unweighted proposals.
    """

    compiled: Compiled
    ranks: Mapping[str, np.ndarray]
    ess: np.ndarray
    pareto_k: np.ndarray
    trust: np.ndarray
    num_particles: int
    weighted: bool = True

    @property
    def num_datasets(self) -> int:
        """Number of synthetic data sets."""
        return len(self.ess)

    @cached_property
    def coordinates(self) -> tuple[CoordinateRanks, ...]:
        """The coordinates tested for uniformity, with their p-values."""
        return analyse_coordinates(self.ranks)

    @property
    def significance_level(self) -> float:
        """The p-value below which a coordinate fails."""
        return significance_level(len(self.coordinates))

    @property
    def nonuniform(self) -> tuple[CoordinateRanks, ...]:
        """For each site whose ranks are not uniform, the coordinate with the smallest p-value."""
        return tuple(
            coordinate
            for coordinate in map(self._worst_coordinate, self.ranks)
            if coordinate.p_value < self.significance_level
        )

    def _worst_coordinate(self, site: str) -> CoordinateRanks:
        coordinates = [c for c in self.coordinates if c.site == site]
        return min(coordinates, key=lambda coordinate: coordinate.p_value)

    @property
    def failures(self) -> tuple[str, ...]:
        """A sentence for each test that failed."""
        failures = [
            f"Ranks of {coordinate.name} are not uniform: p = {coordinate.p_value:.2g}, below "
            f"{self.significance_level:.2g}. {describe_deviation(coordinate.ranks)}"
            for coordinate in self.nonuniform
        ]
        poor_share = float(np.mean(self.trust == "poor")) if self.weighted else 0.0
        if poor_share > MAX_POOR_SHARE:
            failures.append(
                f"{poor_share:.0%} of the posteriors have trust 'poor', more than "
                f"{MAX_POOR_SHARE:.0%}: the proposal is far from the posterior. Train longer"
            )
        return tuple(failures)

    @property
    def passed(self) -> bool:
        """Whether no test failed; a calibrated model fails with probability 0.01."""
        return not self.failures

    def coverage(self, name: str, level: float) -> float:
        """Share of true values inside the central interval of a level.

        Args:
            name: of a latent site; for a vector site, the mean over its elements.
            level: probability of the interval, between 0 and 1.
        """
        return coverage(self.ranks[name], level)

    def summary(self) -> "pd.DataFrame":
        """Tabulate for each site the smallest p-value, whether it passes, and coverages."""
        import pandas as pd

        rows = {}
        for site in self.ranks:
            p_value = self._worst_coordinate(site).p_value
            coverages = {f"coverage {level:.0%}": self.coverage(site, level) for level in LEVELS}
            rows[site] = {"p": p_value, "uniform": p_value >= self.significance_level, **coverages}
        return pd.DataFrame.from_dict(rows, orient="index")

    def __str__(self) -> str:
        low, median = np.percentile(self.ess / self.num_particles, [10, 50])
        lines = [
            f"{'Passed' if self.passed else 'NOT PASSED'} on {self.num_datasets} data sets, "
            f"{self.num_particles} particles",
            *(f"- {failure}" for failure in self.failures),
            f"- Effective sample size: median {median:.0%}, tenth percentile {low:.0%} of the "
            "particles",
        ]
        return "\n".join(lines)

    def plot(self) -> "Figure":
        """Draw ranks against a uniform distribution, coverage, and effective sample sizes."""
        from retrodict.evaluation.calibration_plot import calibration_plot

        return calibration_plot(self)

    def save_html(self, path: str | Path) -> Path:
        """Write a report with graphs, networks, learning curves and this calibration."""
        from retrodict.evaluation.report import write_report

        return Path(write_report(Path(path), self.compiled, self))


def calibrate(
    rng_key: PRNGKeyArray,
    compiled: Compiled,
    num_datasets: int = 200,
    num_particles: int = 1000,
    *,
    weighted: bool = True,
) -> Calibration:
    """Test a compiled model on synthetic data by simulation-based calibration.

    Args:
        rng_key: determines data sets and draws.
        compiled: the model to test.
        num_datasets: number of synthetic data sets; more detect smaller errors.
        num_particles: K, for each data set.
        weighted: whether to test posteriors, by the planned method without rescue; otherwise the
            unweighted draws of the networks.

    Returns:
        Ranks of the true values, effective sample sizes and verdicts.

    Raises:
        ValueError: fewer than two data sets or two particles.

    Reference:
        Talts et al. 2018, "Validating Bayesian inference algorithms with simulation-based
        calibration", arXiv:1804.06788.

    Example:
        >>> calibration = rd.calibrate(rng_key, compiled, num_datasets=50)  # doctest: +SKIP
        >>> print(calibration.summary())  # doctest: +SKIP
    """
    if num_datasets < 2 or num_particles < 2:
        raise ValueError(
            f"calibrate needs at least two data sets and two particles; got num_datasets="
            f"{num_datasets}, num_particles={num_particles}"
        )
    data_key, infer_key, tie_key = jax.random.split(rng_key, 3)
    proposal = compiled.proposal
    draws, _ = simulate_datasets(proposal.graph, proposal.sample_prior, data_key, num_datasets)
    truth = split_steps(proposal.graph, draws, axis=1)
    chunk_size = _datasets_at_once(compiled, num_datasets, num_particles)
    chunks = []
    for start in range(0, num_datasets, chunk_size):
        # The last chunk is filled up from the first data sets, so that it needs no compilation.
        indices = np.arange(start, start + chunk_size) % num_datasets
        chunk = {name: value[indices] for name, value in truth.items()}
        results = _calibrate_chunk(
            jax.random.fold_in(infer_key, start),
            jax.random.fold_in(tie_key, start),
            compiled,
            chunk,
            num_particles,
            weighted,
        )
        size = min(chunk_size, num_datasets - start)
        chunks.append(jax.tree.map(lambda leaf, size=size: np.asarray(leaf)[:size], results))
    results = jax.tree.map(lambda *leaves: np.concatenate(leaves), *chunks)
    return Calibration(compiled, num_particles=num_particles, weighted=weighted, **results)


def _datasets_at_once(compiled: Compiled, num_datasets: int, num_particles: int) -> int:
    """Number of data sets whose draws fit into `MEMORY`."""
    sites = [compiled.graph.sites[name] for name in compiled.graph.latent]
    size = sum(int(np.prod(site.shape)) for site in sites)
    return int(np.clip(MEMORY // (4 * num_particles * max(size, 1)), 1, num_datasets))


def _calibrate_chunk(
    infer_key: PRNGKeyArray,
    tie_key: PRNGKeyArray,
    compiled: Compiled,
    truth: Mapping[str, np.ndarray],
    num_particles: int,
    weighted: bool,
) -> dict[str, Any]:
    """Infer from the data sets and rank the latents that generated them."""
    data = {name: truth[name] for name in compiled.graph.observed}
    latents = {name: truth[name] for name in compiled.graph.latent}
    infer = _infer if weighted else _propose
    samples, weights, diagnostics = infer(infer_key, compiled, data, num_particles)
    return {"ranks": _ranks(tie_key, latents, samples, weights), **diagnostics}


def _infer(
    rng_key: PRNGKeyArray, compiled: Compiled, data: Mapping[str, np.ndarray], num_particles: int
) -> tuple[Mapping[str, Any], Array, dict[str, Any]]:
    """Draws, weights and diagnostics of the planned method."""
    settings = Settings(num_particles, compiled.plan.method)
    posteriors = compiled._inference.many(compiled.networks, rng_key, data, settings, MEMORY)
    diagnostics = {
        "ess": posteriors.ess,
        "pareto_k": posteriors.pareto_k,
        "trust": np.asarray(posteriors.trust),
    }
    return posteriors.samples, jnp.exp(jnp.asarray(posteriors.log_weights)), diagnostics


def _propose(
    rng_key: PRNGKeyArray, compiled: Compiled, data: Mapping[str, np.ndarray], num_particles: int
) -> tuple[Mapping[str, Any], Array, dict[str, Any]]:
    """Draws of the networks with equal weights."""
    number = len(next(iter(data.values())))
    keys = jax.random.split(rng_key, (number, num_particles))
    draw = jax.vmap(jax.vmap(compiled.proposal.draw, (None, 0, None)), (None, 0, 0))
    graph = compiled.proposal.graph
    draws, _ = CompiledFunction(draw, {})(compiled.networks, keys, stack_steps(graph, data, axis=1))
    samples = split_steps(graph, draws, axis=2)
    diagnostics = {
        "ess": np.full(number, float(num_particles)),
        "pareto_k": np.zeros(number),
        "trust": np.full(number, "none"),
    }
    return samples, jnp.full((number, num_particles), 1 / num_particles), diagnostics


def _ranks(
    rng_key: PRNGKeyArray,
    truth: Mapping[str, np.ndarray],
    samples: Mapping[str, Any],
    weights: Float[Array, "datasets particles"],
) -> dict[str, np.ndarray]:
    """Normalised ranks of true values among weighted draws, ties broken at random."""

    @jax.jit
    def rank(key: Array, value: Array, draws: Array) -> Array:
        number = draws.shape[1]
        aligned_weights = weights.reshape(*weights.shape, *(1 for _ in value.shape[1:]))
        below = jnp.sum(aligned_weights * (draws < value[:, None]), 1)
        tied = jnp.sum(aligned_weights * (draws == value[:, None]), 1)
        # The true value counts as one more draw, tied with itself: then the ranks are uniform for
        # few draws too.
        uniform = jax.random.uniform(key, value.shape)
        return (number * below + uniform * (1 + number * tied)) / (number + 1)

    return {
        name: np.asarray(
            rank(jax.random.fold_in(rng_key, n), jnp.asarray(value), jnp.asarray(samples[name]))
        )
        for n, (name, value) in enumerate(truth.items())
    }
