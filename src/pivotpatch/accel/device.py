"""What a device can do, and how memory and tensors get there."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# Of mallopt(3): how much may be free at the end of the heap before it goes back to the system; from which size on a
# block is asked of the system alone; how many heaps threads may have: all but the first are too small for it.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for the next block of its kind; False where that cannot be told.

    The GNU C library gives blocks of some megabytes back at once, and the system then hands out each page anew. A
    network on the CPU does so layer by layer and spends half its time on it. The process stays as large as it once was.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    wanted = ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_THRESHOLD, 2**30), (_ARENA_MAX, 1))
    return sum(int(mallopt(name, value)) for name, value in wanted) == len(wanted)


@cache
def can_run(kernel: Callable[[torch.device], object], device: torch.device) -> bool:
    """Whether Triton works: it may be missing, have no C compiler, or not know the GPU. torch can do the same then.

    Args:
        kernel: imports one and runs it on a device, as a trial.
        device: a GPU; all others are known to run none.

    >>> can_run(print, torch.device("cpu"))
    False
    """
    if device.type != "cuda":
        return False
    try:
        kernel(device)
    except Exception:
        return False
    return True


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device is a GPU that computes in bfloat16 itself; older ones do so slowly, or not at all.

    >>> has_bfloat16(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def send_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a small tensor from the CPU to the device without waiting for what the device is doing.

    >>> send_tensor(torch.arange(3), torch.device("cpu"))
    tensor([0, 1, 2])
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
