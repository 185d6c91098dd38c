"""Cut patches out of images of bytes, on a GPU in one pass."""

import torch
from torch import Tensor

from pivotpatch.accel.device import can_run
from pivotpatch.core.patches import cut_patches, patch_boxes


def cut_byte_patches(source: Tensor, *, grid: int, overlap: float, size: tuple[int, int]) -> Tensor:
    """What `cut_patches` makes of images (B,C,H,W) uint8: (B,P,C,*size), a grey level apart at most.

    Args:
        source: the images, in any memory order.
        grid: patches per side.
        overlap: share of a patch's side that it has in common with its neighbour.
        size: rows and columns of a patch.

    >>> cut_byte_patches(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), grid=2, overlap=0.0, size=(8, 8)).shape
    torch.Size([1, 4, 3, 8, 8])
    """
    boxes = patch_boxes(*source.shape[2:], grid=grid, overlap=overlap)
    span = (boxes[0].bottom, boxes[0].right)
    grows = span[0] <= size[0] and span[1] <= size[1]  # else pixels must be averaged
    if not (grows and can_run(_try_kernel, source.device)):
        return cut_patches(source, grid=grid, overlap=overlap, size=size)
    from pivotpatch.accel.cut_kernel import cut_bytes

    return cut_bytes(source, starts=[(box.top, box.left) for box in boxes], span=span, size=size)


def _try_kernel(device: torch.device) -> None:
    from pivotpatch.accel.cut_kernel import cut_bytes

    cut_bytes(torch.zeros(1, 3, 4, 4, dtype=torch.uint8, device=device), starts=[(0, 0)], span=(2, 2), size=(4, 4))
