"""Ctrl-C and SIGTERM ask a run to stop after its step; a second one ends it at once, as does one before any step."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], None]
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
        self._old = _set_handlers(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        _restore_handlers(self._old)

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

    old = _set_handlers(stop)
    try:
        yield
    finally:
        _restore_handlers(old)


def _set_handlers(handler: _Handler) -> dict[signal.Signals, Any]:
    """Give signals to a handler; return those that had them before."""
    # Python lets only the main thread set handlers; elsewhere the caller decides when to stop.
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in _ASKING}


def _restore_handlers(old: dict[signal.Signals, Any]) -> None:
    for number, handler in old.items():
        signal.signal(number, handler)
