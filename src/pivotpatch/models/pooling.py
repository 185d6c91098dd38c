"""The largest of 3 x 3 pixels with stride 2, in training: the compiler's way back is far from what memory allows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@torch.library.custom_op("pivotpatch::pool", mutates_args=())
def pool(images: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each window (B,C,h,w), and its place in it as int8; needs Triton."""
    from pivotpatch.models.kernels import take_largest_into

    images = images.contiguous(memory_format=torch.channels_last)
    largest, places = _make_results(images)
    take_largest_into(images, largest, places)
    return largest, places


@torch.library.custom_op("pivotpatch::pool_back", mutates_args=())
def pool_back(gradient: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    """What the gradient (B,C,h,w) of the largest is to the pixels (B,C,height,width)."""
    from pivotpatch.models.kernels import send_back_into

    gradient = gradient.contiguous(memory_format=torch.channels_last)
    result: Tensor = _make_pixels(gradient, places, height, width)
    send_back_into(gradient, places, result)
    return result


@pool.register_fake
def _make_results(images: Tensor) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = images.shape
    shape = (batch, channels, (height + 1) // 2, (width + 1) // 2)
    largest, places = (_make_empty(shape, dtype, images.device) for dtype in (images.dtype, torch.int8))
    return largest, places


@pool_back.register_fake
def _make_pixels(gradient: Tensor, places: Tensor, height: int, width: int) -> Tensor:  # noqa: ARG001
    batch, channels = gradient.shape[:2]
    return _make_empty((batch, channels, height, width), gradient.dtype, gradient.device)


def _make_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)


def _remember(ctx: Any, inputs: Sequence[Tensor], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.size = inputs[0].shape[2:]


def _go_back(ctx: Any, gradient: Tensor, _places: Tensor) -> Tensor:
    back: Tensor = pool_back(gradient, *ctx.saved_tensors, *ctx.size)
    return back


pool.register_autograd(_go_back, setup_context=_remember)


class QuickMaximum(nn.Module):
    """The largest of 3 x 3 pixels with stride 2, the image bordered by nothing."""

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W); anything but single or half precision on a GPU is left to torch."""
        if not images.is_cuda or images.dtype == torch.float64:
            return functional.max_pool2d(images, 3, 2, 1)
        largest: Tensor = pool(images)[0]
        return largest


def try_pool(device: torch.device) -> None:
    """Fail where the kernels do not run."""
    pool(torch.zeros(1, 8, 4, 4, device=device))
