"""What a person at the terminal sees of training, and how they stop it."""

import signal
from threading import current_thread, main_thread
from types import FrameType

from tqdm.auto import tqdm

from retrodict.training.history import NetworkHistory


class Interruption:
    """A first Ctrl-C is taken note of, and work stops where its results are whole.

    A second one gets through as `KeyboardInterrupt`. To be used in a `with` statement; outside of
    the main thread, or where the program has a handler of its own, that handler stays.
    """

    def __init__(self) -> None:
        self.asked = False
        self._installed = False

    def __enter__(self) -> "Interruption":
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if usual and current_thread() is main_thread():
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def note(self) -> None:
        """Take note of one; raises `KeyboardInterrupt` if it is the second."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.note()


class Progress:
    """A bar for one network: its loss, how often data were drawn anew, what was dropped."""

    def __init__(self, title: str, show: bool) -> None:
        self._bar = tqdm(
            total=1.0,
            desc=title,
            disable=not show,
            # Time left by the average over the whole training, most of which is alike.
            smoothing=0,
            bar_format="{desc}: {percentage:3.0f}%|{bar:20}| {elapsed}<{remaining}{postfix}",
            postfix="simulating",
        )

    def __call__(self, history: NetworkHistory, used: float) -> None:
        """Show where training stands; `used` is the share of the steps or the time allowed."""
        self._bar.n = min(used, 1.0)
        notes = [f"step {history.steps[-1]}", f"held-out loss {history.loss[-1]:.3f} nats"]
        if history.refreshes:
            notes.append(f"{len(history.refreshes)} refreshes")
        if history.rejected.total:
            notes.append(f"{history.rejected.fraction:.1%} of draws dropped")
        if history.stopped:
            notes.append(history.stopped)
        self._bar.set_postfix_str(", ".join(notes))

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
