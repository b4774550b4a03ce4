"""Progress lines of compilation and training, and interruption of training from the keyboard."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

from tqdm.auto import tqdm

from retrodict.training.history import NetworkHistory


class Interruption:
    """Context manager that turns the first Ctrl-C into a request to stop.

    Training checks `requested` and stops where its results are consistent. A second Ctrl-C raises
    `KeyboardInterrupt`. The handler is installed only in the main thread, and only if the program
    has no handler of its own.
    """

    def __init__(self) -> None:
        self.requested = False
        self._installed = False

    def __enter__(self) -> "Interruption":
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default and current_thread() is main_thread():
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def request(self) -> None:
        """Request a stop; raises `KeyboardInterrupt` at the second request."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request()


@contextmanager
def status(title: str, show: bool) -> Iterator[None]:
    """Show a line that says what is being done, and afterwards how long it took."""
    with tqdm(desc=title, disable=not show, bar_format="{desc}: {elapsed}"):
        yield


class Progress:
    """Progress bar of one network: loss, number of refreshes, share of dropped draws."""

    def __init__(self, title: str, show: bool) -> None:
        self._bar = tqdm(
            total=1.0,
            desc=title,
            disable=not show,
            # Estimate the remaining time from the average speed over the whole training.
            smoothing=0,
            bar_format="{desc}: {percentage:3.0f}%|{bar:20}| {elapsed}<{remaining}{postfix}",
            postfix="simulating",
        )

    def __call__(self, history: NetworkHistory, budget_share: float) -> None:
        """Update the bar; `budget_share` is the share of the allowed steps or time in use."""
        self._bar.n = min(budget_share, 1.0)
        notes = [f"step {history.steps[-1]}", f"held-out loss {history.loss[-1]:.3f} nats"]
        if history.refreshes:
            notes.append(f"{len(history.refreshes)} refreshes")
        if history.rejected.total:
            notes.append(f"{history.rejected.fraction:.1%} of draws dropped")
        if history.stopped:
            notes.append(history.stopped)
        self._bar.set_postfix_str(", ".join(notes))

    def close(self) -> None:
        """Stop updating the bar."""
        self._bar.close()
