"""Max pool (ResNet) and blur pool (TResNet) with faster backward passes, for training; they need Triton and a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@torch.library.custom_op("pivotpatch::pool", mutates_args=())
def pool(images: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each window (B,C,h,w), and its place in it as int8."""
    from pivotpatch.accel.kernels import take_largest_into

    images = images.contiguous(memory_format=torch.channels_last)
    largest, places = _make_results(images)
    take_largest_into(images, largest, places)
    return largest, places


@torch.library.custom_op("pivotpatch::pool_back", mutates_args=())
def pool_back(gradient: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    """The gradient of the pixels (B,C,height,width), from that of the largest (B,C,h,w)."""
    from pivotpatch.accel.kernels import send_back_into

    gradient = gradient.contiguous(memory_format=torch.channels_last)
    result: Tensor = _make_pixels(gradient, places, height, width)
    send_back_into(gradient, places, result)
    return result


@torch.library.custom_op("pivotpatch::blur", mutates_args=())
def blur(images: Tensor) -> Tensor:
    """The blur (B,C,h,w) of images of at least two rows and columns."""
    from pivotpatch.accel import kernels

    return kernels.blur(images)


@torch.library.custom_op("pivotpatch::blur_back", mutates_args=())
def blur_back(gradient: Tensor, height: int, width: int) -> Tensor:
    """The gradient of the pixels (B,C,height,width), from that of a blur (B,C,h,w)."""
    from pivotpatch.accel.kernels import send_back_into

    gradient = gradient.contiguous(memory_format=torch.channels_last)
    result: Tensor = _make_unblurred(gradient, height, width)
    send_back_into(gradient, None, result)
    return result


@pool.register_fake
def _make_results(images: Tensor) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = images.shape
    shape = (batch, channels, (height + 1) // 2, (width + 1) // 2)
    largest, places = (_make_empty(shape, dtype, images.device) for dtype in (images.dtype, torch.int8))
    return largest, places


@pool_back.register_fake
def _make_pixels(gradient: Tensor, places: Tensor, height: int, width: int) -> Tensor:  # noqa: ARG001
    return _make_empty((*gradient.shape[:2], height, width), gradient.dtype, gradient.device)


@blur.register_fake
def _make_blurred(images: Tensor) -> Tensor:
    largest: Tensor = _make_results(images)[0]
    return largest


@blur_back.register_fake
def _make_unblurred(gradient: Tensor, height: int, width: int) -> Tensor:
    return _make_empty((*gradient.shape[:2], height, width), gradient.dtype, gradient.device)


def _make_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)


def _remember(ctx: Any, inputs: Sequence[Tensor], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.size = inputs[0].shape[2:]


def _go_back(ctx: Any, gradient: Tensor, _places: Tensor) -> Tensor:
    back: Tensor = pool_back(gradient, *ctx.saved_tensors, *ctx.size)
    return back


def _remember_size(ctx: Any, inputs: Sequence[Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.size = inputs[0].shape[2:]


def _unblur(ctx: Any, gradient: Tensor) -> Tensor:
    back: Tensor = blur_back(gradient, *ctx.size)
    return back


pool.register_autograd(_go_back, setup_context=_remember)
blur.register_autograd(_unblur, setup_context=_remember_size)


class QuickMaximum(nn.Module):
    """The largest of 3 x 3 pixels with stride 2, the image bordered by nothing."""

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W); anything but single or half precision on a GPU is left to torch."""
        if not _is_taken(images):
            return functional.max_pool2d(images, 3, 2, 1)
        largest: Tensor = pool(images)[0]
        return largest


class QuickBlur(nn.Module):
    """The mean of 3 x 3 pixels with stride 2, weighed 1, 2, 1 both ways, the image bordered by its reflection."""

    def __init__(self, held: nn.Module) -> None:
        """Take a layer that does the same, for what the kernels do not take."""
        super().__init__()
        self.held = held

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W)."""
        blurred: Tensor = blur(images) if _is_taken(images) else self.held(images)
        return blurred


def _is_taken(images: Tensor) -> bool:
    return images.is_cuda and images.dtype != torch.float64


def try_pools(device: torch.device) -> None:
    """Fail where the kernels do not run."""
    images = torch.zeros(1, 8, 4, 4, device=device)
    pool(images)
    blur(images)
