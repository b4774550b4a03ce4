"""A compiled model in; how its answers do on fresh synthetic data, where the truth is known, out.

Simulation-based calibration (Talts et al. 2018, "Validating Bayesian inference algorithms with
simulation-based calibration"): draw x* and y from the model, infer from y, and see where x* lies
among the draws. Over many data sets its rank must be uniform, or the draws are not from the
posterior. Draws of the model that a float cannot hold are dropped, as they are in training: what is
checked is the posterior of the data sets that are left, which is what anyone can have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from retrodict.compiled import Compiled
from retrodict.evaluation.ranks import Rank, limit, looked_at, meaning
from retrodict.graph.loop_surface import split_steps, stack_steps
from retrodict.inference.methods import Settings
from retrodict.training.prior_datasets import fresh_datasets

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# More answers than this that call themselves poor are a fault too, whatever their ranks.
MOST_POOR = 0.2
# Memory for the draws of the data sets that are worked on together.
MEMORY = 256 * 2**20


@dataclass(frozen=True)
class Calibration:
    """What became of the check.

    Attributes:
        compiled: what was checked.
        ranks: site → where the truth lies among the draws, from 0 to 1: (datasets, *shape).
        ess, pareto_k: of each answer.
        trust: each answer's verdict on itself; of raw proposals, none.
        num_particles: K.
        weighted: whether answers were checked, or the raw networks.
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
        """How many data sets were tried."""
        return len(self.ess)

    @cached_property
    def coordinates(self) -> tuple[Rank, ...]:
        """The ranks that are tested, with their p-values."""
        return looked_at(self.ranks)

    @property
    def limit(self) -> float:
        """The p-value below which a coordinate is at fault."""
        return limit(len(self.coordinates))

    @property
    def uneven(self) -> tuple[Rank, ...]:
        """Of every site whose ranks are not uniform, the coordinate where it is plainest."""
        worst = {site: _least(self.coordinates, site) for site in self.ranks}
        return tuple(rank for rank in worst.values() if rank.p < self.limit)

    @property
    def faults(self) -> tuple[str, ...]:
        """What did not pass, in words."""
        found = [
            f"Ranks of {rank.name} are not uniform: p = {rank.p:.2g}, below {self.limit:.2g}. "
            f"{meaning(rank.column)}"
            for rank in self.uneven
        ]
        poor = float(np.mean(self.trust == "poor")) if self.weighted else 0.0
        if poor > MOST_POOR:
            found.append(
                f"{poor:.0%} of the answers call themselves poor, more than {MOST_POOR:.0%}: the "
                "networks propose badly. Train longer"
            )
        return tuple(found)

    @property
    def passed(self) -> bool:
        """Whether nothing is at fault; a model without fault fails once in a hundred times."""
        return not self.faults

    def coverage(self, name: str, level: float) -> float:
        """The share of truths inside the central interval of a level; over elements, the mean."""
        return float(np.mean(np.abs(self.ranks[name] - 0.5) <= level / 2))

    def summary(self) -> "pd.DataFrame":
        """A row for each site: least p-value, coverage of three intervals, and the verdict."""
        import pandas as pd

        least = {site: _least(self.coordinates, site).p for site in self.ranks}
        rows = {
            site: {
                "p": p,
                "uniform": p >= self.limit,
                **{f"coverage {level:.0%}": self.coverage(site, level) for level in LEVELS},
            }
            for site, p in least.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index")

    def __str__(self) -> str:
        size = np.percentile(self.ess / self.num_particles, [10, 50])
        lines = [
            f"{'Passed' if self.passed else 'NOT PASSED'} on {self.num_datasets} data sets, "
            f"{self.num_particles} particles",
            *(f"- {fault}" for fault in self.faults),
            f"- Effective particles: median {size[1]:.0%}, tenth percentile {size[0]:.0%}",
        ]
        return "\n".join(lines)

    def plot(self) -> "Figure":
        """Ranks against a uniform distribution, coverage, and effective sample sizes."""
        from retrodict.evaluation.calibration_plot import calibration_plot

        return calibration_plot(self)

    def save_html(self, path: str | Path) -> Path:
        """One page with graphs, networks, learning curves and this check."""
        from retrodict.evaluation.report import write_report

        return Path(write_report(Path(path), self.compiled, self))


LEVELS = (0.5, 0.8, 0.95)


def _least(coordinates: Sequence[Rank], site: str) -> Rank:
    return min((rank for rank in coordinates if rank.site == site), key=lambda rank: rank.p)


def calibrate(
    rng_key: PRNGKeyArray,
    compiled: Compiled,
    num_datasets: int = 200,
    num_particles: int = 1000,
    *,
    weighted: bool = True,
) -> Calibration:
    """Check a compiled model on synthetic data.

    Args:
        rng_key: same key, same check.
        compiled: what to check.
        num_datasets: the more, the smaller the faults that show.
        num_particles: K, for each.
        weighted: whether to check answers, by the planned method without rescue; or the networks by
            themselves, whose draws are not corrected by weights.
    """
    if num_datasets < 2 or num_particles < 2:
        raise ValueError(
            f"calibrate needs two data sets and two particles at least; found num_datasets="
            f"{num_datasets}, num_particles={num_particles}"
        )
    data_key, infer_key, tie_key = jax.random.split(rng_key, 3)
    graph, proposal = compiled.graph, compiled.proposal
    drawn, _ = fresh_datasets(proposal.graph, proposal.draws, data_key, num_datasets)
    truth = split_steps(proposal.graph, drawn, axis=1)
    names = graph.latent
    size = sum(int(np.prod(graph.sites[name].shape)) for name in names)
    together = int(np.clip(MEMORY // (4 * num_particles * max(size, 1)), 1, num_datasets))
    parts = []
    for start in range(0, num_datasets, together):
        # The last part is filled up by wrapping round, so that it needs no compilation.
        places = np.arange(start, start + together) % num_datasets
        key = jax.random.fold_in(infer_key, start)
        chosen = {name: value[places] for name, value in truth.items()}
        answers = _answers(key, compiled, chosen, num_particles, weighted)
        ties = jax.random.fold_in(tie_key, start)
        ranks = _ranks(ties, {n: chosen[n] for n in names}, answers["samples"], answers["weights"])
        kept = min(together, num_datasets - start)
        found = {"ranks": ranks, **{k: answers[k] for k in ("ess", "pareto_k", "trust")}}
        parts.append(jax.tree.map(lambda leaf, kept=kept: np.asarray(leaf)[:kept], found))
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    return Calibration(compiled, num_particles=num_particles, weighted=weighted, **joined)


def _answers(
    rng_key: PRNGKeyArray,
    compiled: Compiled,
    truth: Mapping[str, np.ndarray],
    num_particles: int,
    weighted: bool,
) -> dict[str, Any]:
    data = {name: truth[name] for name in compiled.graph.observed}
    if weighted:
        settings = Settings(num_particles, compiled.plan.method)
        found = compiled._inference.many(compiled.networks, rng_key, data, settings, MEMORY)
        return {
            "samples": found.samples,
            "weights": jnp.exp(jnp.asarray(found.log_weights)),
            "ess": found.ess,
            "pareto_k": found.pareto_k,
            "trust": np.asarray(found.trust),
        }
    number = len(next(iter(truth.values())))
    keys = jax.random.split(rng_key, (number, num_particles))
    draw = jax.vmap(jax.vmap(compiled.proposal.draw, (None, 0, None)), (None, 0, 0))
    graph = compiled.proposal.graph
    samples, _ = jax.jit(draw)(compiled.networks, keys, stack_steps(graph, data, axis=1))
    return {
        "samples": split_steps(graph, samples, axis=2),
        "weights": jnp.full((number, num_particles), 1 / num_particles),
        "ess": np.full(number, float(num_particles)),
        "pareto_k": np.zeros(number),
        "trust": np.full(number, "none"),
    }


def _ranks(
    rng_key: PRNGKeyArray,
    truth: Mapping[str, np.ndarray],
    samples: Mapping[str, Any],
    weights: Float[Array, "datasets particles"],
) -> dict[str, np.ndarray]:
    """Where each truth lies among weighted draws, ties broken at random."""

    @jax.jit
    def rank(key: Array, value: Array, drawn: Array) -> Array:
        number = drawn.shape[1]
        shaped = weights.reshape(*weights.shape, *(1 for _ in value.shape[1:]))
        below = jnp.sum(shaped * (drawn < value[:, None]), 1)
        tied = jnp.sum(shaped * (drawn == value[:, None]), 1)
        # The truth is one more draw, tied with itself: so ranks of a few draws are uniform as well.
        uniform = jax.random.uniform(key, value.shape)
        return (number * below + uniform * (1 + number * tied)) / (number + 1)

    return {
        name: np.asarray(
            rank(jax.random.fold_in(rng_key, n), jnp.asarray(value), jnp.asarray(samples[name]))
        )
        for n, (name, value) in enumerate(truth.items())
    }
