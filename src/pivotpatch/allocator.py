"""What the C library does with memory that is freed."""

import ctypes
import sys

# Of mallopt(3): how much may be free at the end of the heap before it goes back to the system; from which size on a
# block is asked of the system alone; how many heaps threads may have: all but the first are too small for it.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


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
