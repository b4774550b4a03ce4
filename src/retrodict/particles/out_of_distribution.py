"""Synthetic data sets in; where any other data set lies among them out.

Networks have learned from synthetic data, and are asked about real ones. Two numbers say how like
the two are. On the networks' side, the values of each observed site on the scale that networks see
them on (logarithms of positives and counts, logits of proportions), by mean, spread, least and
largest: how far out is the one that is furthest out, and how many synthetic data sets have one so
far out? On the evidence's side, how many synthetic data sets are as improbable under the model?
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpyro.distributions import constraints

from retrodict.estimators.vector_bijections import base_support
from retrodict.graph.graph import Graph, Site

Table = np.ndarray[Any, Any]

# Below this share of synthetic data sets, a data set is called unlike them.
UNLIKE = 0.01
# Of so many data sets the record keeps all that it compares with.
DATASETS, EVIDENCES = 500, 128


@dataclass(frozen=True)
class Likeness:
    """Where one data set lies among synthetic ones.

    Attributes:
        data: the share of synthetic data sets with a statistic at least as far out.
        evidence: the share of those at least as improbable; None where it is not known.
        furthest: the statistic that is furthest out.
    """

    data: float
    evidence: float | None
    furthest: str

    def reasons(self) -> tuple[str, ...]:
        """In words, if there is anything to say."""
        said = []
        if self.data < UNLIKE:
            said.append(
                f"These data are unlike synthetic ones: the {self.furthest} lies further out than "
                f"in {1 - self.data:.1%} of them. The networks have not learned from the like."
            )
        if self.evidence is not None and self.evidence < UNLIKE:
            said.append(
                f"These data are less probable under the model than {1 - self.evidence:.1%} of "
                "synthetic data sets: the model may not describe them."
            )
        return tuple(said)


@dataclass(frozen=True)
class Reference:
    """What is kept of synthetic data sets, as plain numbers.

    Attributes:
        names: of the statistics.
        centre, below, above: of each its median, and the way from there to its extremes.
        scores: how far out the furthest statistic of each data set is, in ascending order.
        log_evidence: of data sets, in ascending order.
    """

    names: tuple[str, ...]
    centre: tuple[float, ...]
    below: tuple[float, ...]
    above: tuple[float, ...]
    scores: tuple[float, ...]
    log_evidence: tuple[float, ...] = ()

    @staticmethod
    def of(
        graph: Graph, data: Mapping[str, Table], log_evidence: Sequence[float] | Table = ()
    ) -> "Reference":
        """From synthetic data sets, with a leading axis, and the evidence of some of them."""
        names, values = statistics(graph, data)
        centre = np.median(values, 0)
        low, high = np.quantile(values, [0.005, 0.995], axis=0)
        least = 1e-6 * (1.0 + np.abs(centre))
        partial = Reference(
            names,
            _plain(centre),
            _plain(np.maximum(centre - low, least)),
            _plain(np.maximum(high - centre, least)),
            (),
        )
        scores = np.sort(np.max(partial._distances(values), 1))
        known = np.sort(np.asarray(log_evidence, float))
        return Reference(
            *(names, partial.centre, partial.below, partial.above),
            _plain(scores),
            _plain(known[np.isfinite(known)]),
        )

    @staticmethod
    def read(plain: Mapping[str, Any]) -> "Reference":
        """As it was written into a file."""
        return Reference(**{name: tuple(value) for name, value in plain.items()})

    def _distances(self, values: Table) -> Table:
        away = values - np.array(self.centre)
        scale = np.where(away < 0, np.array(self.below), np.array(self.above))
        return np.asarray(np.abs(away) / scale)

    def likeness(
        self, graph: Graph, data: Mapping[str, Table], log_evidence: Table
    ) -> list[Likeness]:
        """Of each of several data sets, with their evidence."""
        _, values = statistics(graph, data)
        distances = self._distances(values)
        furthest = np.argmax(distances, 1)
        further = len(self.scores) - np.searchsorted(self.scores, np.max(distances, 1))
        shares = (further + 1) / (len(self.scores) + 1)
        found = []
        for share, place, evidence in zip(shares, furthest, log_evidence, strict=True):
            lower: float | None = None
            if self.log_evidence:
                below = np.searchsorted(self.log_evidence, evidence, side="right")
                lower = float((below + 1) / (len(self.log_evidence) + 1))
            found.append(Likeness(float(share), lower, self.names[place]))
        return found


def statistics(graph: Graph, data: Mapping[str, Table]) -> tuple[tuple[str, ...], Table]:
    """Names, and one row a data set; steps of a site are taken together."""
    names, columns = [], []
    for site in (graph.sites[name] for name in graph.observed):
        value = np.asarray(data[site.name], np.float64)
        rows = np.asarray(_on_scale(site, value)).reshape(len(value), -1)
        if rows.shape[1] == 0:
            continue
        kinds: dict[str, Any] = {
            "mean": np.mean,
            "spread": np.std,
            "least": np.min,
            "largest": np.max,
        }
        if rows.shape[1] == 1:
            kinds = {"value": np.mean}
        for kind, function in kinds.items():
            names.append(f"{kind} of '{site.name}'")
            columns.append(function(rows, 1))
    number = len(next(iter(data.values())))
    return tuple(names), np.stack(columns, 1) if columns else np.zeros((number, 0))


def _on_scale(site: Site, value: Table) -> Table:
    """Where values of a support are comparable."""
    base = base_support(site.support)
    tiny = float(np.finfo(np.float32).tiny)

    def log(x: Table) -> Table:
        return np.asarray(np.log(np.maximum(x, tiny)))

    if isinstance(base, constraints.integer_greater_than):
        return np.asarray(np.log1p(np.maximum(value - np.asarray(base.lower_bound), 0)))
    if isinstance(base, constraints.greater_than):
        return log(value - np.asarray(base.lower_bound))
    if isinstance(base, constraints.less_than):
        return -log(np.asarray(base.upper_bound) - value)
    if isinstance(base, constraints.interval):
        return log(value - np.asarray(base.lower_bound)) - log(np.asarray(base.upper_bound) - value)
    return value


def _plain(values: Table) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
