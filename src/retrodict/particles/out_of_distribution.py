"""Prior predictive check: where a data set lies among data sets simulated from the model.

Networks are trained on synthetic data and applied to real data. Two tail probabilities tell how
typical a real data set is (Box 1980, J. R. Statist. Soc. A 143:383). The first refers to what the
networks see: mean, spread, minimum and maximum of each observed site on the scale of the networks'
inputs (logarithms of positive numbers and counts, logits of proportions). It is the share of
synthetic data sets whose most extreme statistic is at least as extreme. The second is the share of
synthetic data sets with at most the evidence of this one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from numpyro.distributions import constraints

from retrodict.estimators.vector_bijections import base_support
from retrodict.graph.graph import Graph, Site

# Tail probability below which a data set is reported as atypical.
SIGNIFICANCE = 0.01
# Number of synthetic data sets in a reference.
NUM_DATASETS = 500


@dataclass(frozen=True)
class PriorPredictiveCheck:
    """Tail probabilities of one data set under the prior predictive distribution.

    Attributes:
        data: share of synthetic data sets whose most extreme statistic is at least as extreme.
        evidence: share of synthetic data sets with at most this evidence; None if not known.
        most_extreme: name of the statistic that is most extreme.
    """

    data: float
    evidence: float | None
    most_extreme: str

    def reasons(self) -> tuple[str, ...]:
        """One sentence for each tail probability below `SIGNIFICANCE`."""
        reasons = []
        if self.data < SIGNIFICANCE:
            reasons.append(
                f"These data are unlike synthetic data: the {self.most_extreme} is more extreme "
                f"than in {1 - self.data:.1%} of synthetic data sets. The networks were not "
                "trained on such data."
            )
        if self.evidence is not None and self.evidence < SIGNIFICANCE:
            reasons.append(
                f"These data are less probable under the model than {1 - self.evidence:.1%} of "
                "synthetic data sets: the model may not describe them."
            )
        return tuple(reasons)


@dataclass(frozen=True)
class PriorPredictiveReference:
    """Statistics of synthetic data sets with which other data sets are compared.

    Attributes:
        names: of the statistics.
        centre: median of each statistic.
        below: distance of each statistic from its median to its 0.5 % quantile.
        above: distance of each statistic from its median to its 99.5 % quantile.
        scores: of each data set, the distance of its most extreme statistic from the median, in
            units of `below` or `above`; ascending.
        log_evidence: of some of the data sets; ascending.
    """

    names: tuple[str, ...]
    centre: tuple[float, ...]
    below: tuple[float, ...]
    above: tuple[float, ...]
    scores: tuple[float, ...]
    log_evidence: tuple[float, ...] = ()

    @staticmethod
    def from_datasets(
        graph: Graph,
        data: Mapping[str, NDArray[Any]],
        log_evidence: Sequence[float] | NDArray[Any] = (),
    ) -> "PriorPredictiveReference":
        """Summarise synthetic data sets.

        Args:
            graph: of the model.
            data: observed site → `(datasets, *shape)`.
            log_evidence: of some of the data sets.
        """
        names, values = statistics(graph, data)
        centre = np.median(values, 0)
        low, high = np.quantile(values, [0.005, 0.995], axis=0)
        smallest = 1e-6 * (1.0 + np.abs(centre))
        below, above = np.maximum(centre - low, smallest), np.maximum(high - centre, smallest)
        scores = np.sort(np.max(_distances(values, centre, below, above), 1))
        evidence = np.sort(np.asarray(log_evidence, float))
        evidence = evidence[np.isfinite(evidence)]
        return PriorPredictiveReference(
            names, *map(_floats, (centre, below, above, scores, evidence))
        )

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "PriorPredictiveReference":
        """Restore a reference from its fields as parsed JSON."""
        return PriorPredictiveReference(**{name: tuple(value) for name, value in fields.items()})

    def check(
        self, graph: Graph, data: Mapping[str, NDArray[Any]], log_evidence: NDArray[Any]
    ) -> tuple[PriorPredictiveCheck, ...]:
        """Check data sets.

        Args:
            graph: of the model.
            data: observed site → `(datasets, *shape)`.
            log_evidence: `(datasets,)`.

        Returns:
            One check for each data set.
        """
        _, values = statistics(graph, data)
        distances = _distances(values, *map(np.array, (self.centre, self.below, self.above)))
        num_more_extreme = len(self.scores) - np.searchsorted(self.scores, np.max(distances, 1))
        data_shares = (num_more_extreme + 1) / (len(self.scores) + 1)
        num_less_probable = np.searchsorted(self.log_evidence, log_evidence, side="right")
        evidence_shares = (num_less_probable + 1) / (len(self.log_evidence) + 1)
        return tuple(
            PriorPredictiveCheck(
                float(data_share),
                float(evidence_share) if self.log_evidence else None,
                self.names[most_extreme],
            )
            for data_share, evidence_share, most_extreme in zip(
                data_shares, evidence_shares, np.argmax(distances, 1), strict=True
            )
        )


def _distances(
    values: NDArray[Any], centre: NDArray[Any], below: NDArray[Any], above: NDArray[Any]
) -> NDArray[Any]:
    """Distances of statistics from their medians, in units of their spread on that side."""
    deviation = values - centre
    return np.asarray(np.abs(deviation) / np.where(deviation < 0, below, above))


def statistics(
    graph: Graph, data: Mapping[str, NDArray[Any]]
) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Names of the statistics, and their values, `(datasets, statistics)`."""
    names, columns = [], []
    for site in (graph.sites[name] for name in graph.observed):
        value = np.asarray(data[site.name], np.float64)
        elements = _to_real_line(site, value).reshape(len(value), -1)
        if elements.shape[1] == 0:
            continue
        functions: dict[str, Any] = {
            "mean": np.mean,
            "spread": np.std,
            "minimum": np.min,
            "maximum": np.max,
        }
        if elements.shape[1] == 1:
            functions = {"value": np.mean}
        for kind, function in functions.items():
            names.append(f"{kind} of '{site.name}'")
            columns.append(function(elements, 1))
    num_datasets = len(next(iter(data.values())))
    return tuple(names), np.stack(columns, 1) if columns else np.zeros((num_datasets, 0))


def _to_real_line(site: Site, value: NDArray[Any]) -> NDArray[Any]:
    """Transform values from the site's support to the scale of the networks' inputs."""
    support = base_support(site.support)
    tiny = float(np.finfo(np.float32).tiny)

    def log(x: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(np.log(np.maximum(x, tiny)))

    if isinstance(support, constraints.integer_greater_than):
        return np.asarray(np.log1p(np.maximum(value - np.asarray(support.lower_bound), 0)))
    if isinstance(support, constraints.greater_than):
        return log(value - np.asarray(support.lower_bound))
    if isinstance(support, constraints.less_than):
        return -log(np.asarray(support.upper_bound) - value)
    if isinstance(support, constraints.interval):
        lower, upper = np.asarray(support.lower_bound), np.asarray(support.upper_bound)
        return np.asarray(log(value - lower) - log(upper - value))
    return value


def _floats(values: NDArray[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
