"""Whether a device runs kernels of our own, which are written for Triton."""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def can_run_kernels(device: torch.device) -> bool:
    """Whether Triton works there: it may be missing, have no C compiler, or not know the GPU; torch does the same then.

    >>> can_run_kernels(torch.device("cpu"))
    False
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    from pivotpatch.core.cut_kernel import cut_bytes

    try:
        cut_bytes(torch.zeros(1, 3, 4, 4, dtype=torch.uint8, device=device), starts=[(0, 0)], span=(2, 2), size=(4, 4))
    except Exception:
        return False
    return True
