"""Move tensors between devices without making one wait for the other."""

import torch
from torch import Tensor


def send_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a small tensor from the CPU to the device without waiting for what the device is doing.

    >>> send_tensor(torch.arange(3), torch.device("cpu"))
    tensor([0, 1, 2])
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
