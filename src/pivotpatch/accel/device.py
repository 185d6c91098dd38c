"""What a device can do, and how tensors get there."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


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


@cache
def choose_compiled(function: Callable[..., Tensor], *, compiled: bool) -> Callable[..., Tensor]:
    """A function, or what it is compiled to."""
    return torch.compile(function) if compiled else function


def call_compiled(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A function (N,...) of tensors (N,...), compiled once for every N of 1 or more."""
    count = len(tensors[0])
    # Copies: for one row, and for a tensor that begins amid another's memory, torch would compile anew.
    given = [torch.cat([tensor, tensor]) if count == 1 else tensor.clone() for tensor in tensors]
    for tensor in given:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return choose_compiled(function, compiled=True)(*given)[:count]


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
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)  # one value for all rows cannot be pinned
