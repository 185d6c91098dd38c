"""Ctrl-C and SIGTERM ask a run to stop after its step; a second one ends it at once, as does one before any step."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        self._handling = _handle_by(self._note)

    def __enter__(self) -> "StopSignals":
        self._handling.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = signal.Signals(number), now
        elif now - self._since > _TOGETHER:
            raise KeyboardInterrupt


class StoppedEarly(KeyboardInterrupt):
    """A signal came when there was nothing yet to finish or to save.

    Attributes:
        asked: the signal.
    """

    def __init__(self, asked: signal.Signals) -> None:
        super().__init__(asked.name)
        self.asked = asked


@contextmanager
def raise_signals() -> Iterator[None]:
    """While it is entered, signals raise `StoppedEarly`, but for where `StopSignals` notes them."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise StoppedEarly(signal.Signals(number))

    with _handle_by(stop):
        yield


@contextmanager
def _handle_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # Python lets only the main thread set handlers; elsewhere the caller decides when to stop.
    main = threading.current_thread() is threading.main_thread()
    old = {number: signal.signal(number, handler) for number in _ASKING} if main else {}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)
