"""Counts of prior draws that float32 cannot represent, by site and reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int

from retrodict.graph.prior_draws import REASONS


@dataclass
class RejectionCounts:
    """How many draws from the prior were simulated, and how many were dropped.

    Attributes:
        simulated: number of joint draws.
        dropped: (site, reason) → number of dropped draws; the reasons are `prior_draws.REASONS`.
    """

    simulated: int = 0
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Number of dropped draws."""
        return sum(self.dropped.values())

    @property
    def fraction(self) -> float:
        """Share of draws that were dropped."""
        return self.total / max(self.simulated, 1)

    def __add__(self, other: "RejectionCounts") -> "RejectionCounts":
        return RejectionCounts(self.simulated + other.simulated, self.dropped + other.dropped)

    def record(
        self, codes: Int[np.ndarray, " draws"], sites: Sequence[str]
    ) -> Bool[np.ndarray, " draws"]:
        """Count draws by `prior_draws.fault_code`; returns which are valid."""
        valid: np.ndarray = codes == 0
        self.simulated += codes.size
        for code, count in zip(*np.unique(codes[~valid], return_counts=True), strict=True):
            site, reason = divmod(int(code) - 1, len(REASONS))
            self.dropped[sites[site], REASONS[reason]] += int(count)
        return valid

    def describe(self) -> str:
        """The three most frequent faults, with their sites."""
        worst = self.dropped.most_common(3)
        return "; ".join(f"'{s}': {r} ({n} of {self.simulated})" for (s, r), n in worst)
