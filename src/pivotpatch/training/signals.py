"""Ctrl-C and SIGTERM ask a run to stop after its step; a second one ends it at once."""

import signal
import threading
import time
from types import FrameType

_ASKING = (signal.SIGINT, signal.SIGTERM)
# Seconds in which signals are one request: Ctrl-C reaches a process from the terminal and again from its launcher.
_TOGETHER = 1.0


class StopSignals:
    """While it is entered, signals are noted instead of obeyed; the caller's handlers return afterwards.

    Attributes:
        received: the signal that asked, None as long as none has.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0

    def __enter__(self) -> "StopSignals":
        # Python lets only the main thread set handlers; elsewhere the caller decides when to stop.
        self._old = (
            {number: signal.signal(number, self._note) for number in _ASKING}
            if threading.current_thread() is threading.main_thread()
            else {}
        )
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = signal.Signals(number), now
        elif now - self._since > _TOGETHER:
            raise KeyboardInterrupt
