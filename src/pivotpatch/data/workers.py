"""Worker processes end when the main process does, and leave it to it what happens when the whole group is to stop."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

# Whether SIGTERM comes from the main process, which sends it when it ends, can only be told where this is there.
_SENDER_IS_KNOWN = hasattr(signal, "sigwaitinfo")
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM) if _SENDER_IS_KNOWN else (signal.SIGINT,)
"""What workers can refuse: Ctrl-C, and where possible what service managers and `timeout` send."""


@contextmanager
def hold_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Signals wait until the end; processes started meanwhile, which cannot refuse them yet, never get any."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def refuse_group_signals() -> None:
    """In a worker process: ignore `GROUP_SIGNALS` of everybody but the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _SENDER_IS_KNOWN:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_obey_parent, daemon=True).start()


def end_with_parent() -> None:
    """In a worker process: end when the main process is gone, even killed; its own parent may be a fork server."""
    Thread(target=_outlive_nobody, daemon=True).start()


def _outlive_nobody() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker process"
    parent.join()
    os._exit(1)


def _obey_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker process"
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)
