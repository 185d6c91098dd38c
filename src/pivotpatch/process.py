"""This process among others: signals that ask it to stop, its share of the cores, its memory, who hears of its work."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it is done, and of how much; None where that is not known."""

_ASKING = (signal.SIGINT, signal.SIGTERM)
# Seconds in which signals are one request: Ctrl-C reaches a process from the terminal and again from its launcher.
_TOGETHER = 1.0
# Of mallopt(3): how much may be free at the end of the heap before it goes back to the system; from which size on a
# block is asked of the system alone; how many heaps threads may have: all but the first are too small for it.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def ignore(*_: object) -> None:
    """Hear nothing: what is told where nobody listens."""


class Share(NamedTuple):
    """The part of all images that one of several processes takes, in one stretch."""

    rank: int = 0  # the number of the process
    world: int = 1  # how many there are

    def stretch(self, count: int) -> range:
        """The images that are this process's.

        >>> [Share(rank, 3).stretch(10) for rank in range(3)]
        [range(0, 3), range(3, 6), range(6, 10)]
        """
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)


class StopSignals:
    """While it is entered, Ctrl-C and SIGTERM are noted instead of obeyed; a second one ends the process at once.

    Attributes:
        received: the signal that asked, None as long as none has.
        patient: whether the first one is only noted; False where nothing would be lost.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.patient = True
        self._since = 0.0

    def __enter__(self) -> "StopSignals":
        # Python lets only the main thread set handlers; elsewhere the caller decides when to stop.
        main = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._note) for number in _ASKING} if main else {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
            wait = self.patient
        else:
            wait = time.monotonic() - self._since <= _TOGETHER
        if not wait:
            raise KeyboardInterrupt


def count_local_processes() -> int:
    """Processes that a launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_threads() -> int:
    """Threads that OMP_NUM_THREADS, which may be a list, gives to a process; 0 where it says nothing."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(said) if said.isdecimal() else 0


def count_workers() -> int:
    """This process's share of the cores that it may use."""
    return max(min(count_cores() // count_local_processes(), 12), 1)


def wait_asleep() -> None:
    """Let threads of torch sleep while they wait, unless the user says otherwise; to be called before it is imported.

    Else each keeps a core busy that another program could use: two commands at once took twice as long. A command alone
    is hardly slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for the next block of its kind; False where that cannot be told.

    The GNU C library gives blocks of some megabytes back at once, and the system then hands out each page anew. A
    model on the CPU does so layer by layer and spends half its time on it. The process stays as large as it once was.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    wanted = ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_THRESHOLD, 2**30), (_ARENA_MAX, 1))
    return sum(int(mallopt(name, value)) for name, value in wanted) == len(wanted)
