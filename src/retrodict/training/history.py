"""Record of the training of one network, as kept in `Compiled.history` and in the artefact."""

from dataclasses import dataclass, field, replace

from retrodict.training.rejections import RejectionCounts


@dataclass
class NetworkHistory:
    """Course of the training of one network.

    Attributes:
        steps: number of gradient steps at each evaluation.
        loss: held-out loss in nats at each evaluation.
        refreshes: steps at which new training and held-out sets were simulated.
        best_loss: held-out loss of the returned weights, on the last held-out set.
        seconds: wall-clock time spent on this network.
        stopped: why training ended.
        rejected: counts of the draws simulated for this network and of those dropped.
    """

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    refreshes: list[int] = field(default_factory=list)
    best_loss: float = float("inf")
    seconds: float = 0.0
    stopped: str = ""
    rejected: RejectionCounts = field(default_factory=RejectionCounts)

    def copy(self) -> "NetworkHistory":
        """Independent copy with which training can continue."""
        return replace(
            self,
            steps=list(self.steps),
            loss=list(self.loss),
            refreshes=list(self.refreshes),
            stopped="",
        )
