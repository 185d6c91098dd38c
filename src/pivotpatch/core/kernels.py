"""Whether a device runs kernels of our own, which are written for Triton."""

from collections.abc import Callable
from functools import cache

import torch


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
