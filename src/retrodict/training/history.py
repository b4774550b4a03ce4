"""What became of the training of one network, as `Compiled.history` and the file keep it."""

from dataclasses import dataclass, field, replace

from retrodict.training.simulate import Rejected


@dataclass
class NetworkHistory:
    """What became of one network.

    Attributes:
        steps, loss: gradient steps made and held-out loss, in nats, at each evaluation.
        refreshes: the steps at which both sets were drawn anew.
        best_loss: of the weights kept, on the last held-out set.
        seconds: spent on this network.
        stopped: why training ended.
        rejected: draws made for it, and draws dropped.
    """

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    refreshes: list[int] = field(default_factory=list)
    best_loss: float = float("inf")
    seconds: float = 0.0
    stopped: str = ""
    rejected: Rejected = field(default_factory=Rejected)

    def copy(self) -> "NetworkHistory":
        """One to go on with, which leaves this one as it is."""
        return replace(
            self,
            steps=list(self.steps),
            loss=list(self.loss),
            refreshes=list(self.refreshes),
            stopped="",
        )
