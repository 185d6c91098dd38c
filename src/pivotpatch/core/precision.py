"""How many digits a device computes with."""

import torch


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device is a GPU that computes in bfloat16 itself; older ones do so slowly, or not at all.

    >>> has_bfloat16(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
