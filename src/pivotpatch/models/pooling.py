"""The largest of 3 x 3 pixels with stride 2, by kernels of our own: the compiler's way back reads all of it four times.

Needs Triton, which comes with torch for CUDA on Linux. Images are (B,C,H,W) in memory order B, H, W, C.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _find_largest(images, largest, places, height, width, rows, columns, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """A program sees part of one row of the result; a place is 0 to 8 within the window, row by row."""
    row = tl.program_id(0)
    image, y = (row // rows).to(tl.int64), row % rows
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x, channel, known = at // CHANNELS, at % CHANNELS, at < columns * CHANNELS
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), -1, tl.int32)
    for step in tl.static_range(9):
        top, left = 2 * y - 1 + step // 3, 2 * x - 1 + step % 3
        held = tl.where((top >= 0) & (top < height), columns * CHANNELS, 0)  # by the row: all, or nothing
        inside = (at < held) & (left >= 0) & (left < width)
        start = images + (image * height + top) * width * CHANNELS
        value = tl.load(start + left * CHANNELS + channel, mask=inside, other=float("-inf")).to(tl.float32)
        better = inside & ((value > best) | (value != value) | (place < 0))  # the first of equals, as torch does
        best, place = tl.where(better, value, best), tl.where(better, step, place)
    start = row.to(tl.int64) * columns * CHANNELS
    tl.store(largest + start + at, best, mask=known)
    tl.store(places + start + at, place.to(tl.int8), mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def _send_back(gradient, places, result, height, width, rows, columns, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """A program sees part of one row of windows and writes two rows of pixels: those that no window above holds."""
    row = tl.program_id(0)
    image, y = (row // rows).to(tl.int64), row % rows
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x, channel, known = at // CHANNELS, at % CHANNELS, at < columns * CHANNELS
    here = row.to(tl.int64) * columns * CHANNELS + at
    right, below = known & (x + 1 < columns), at < tl.where(y + 1 < rows, columns * CHANNELS, 0)
    across, down = here + CHANNELS, here + columns * CHANNELS
    place = tl.load(places + here, mask=known, other=9)
    place_right = tl.load(places + across, mask=right, other=9)
    place_below = tl.load(places + down, mask=below, other=9)
    place_last = tl.load(places + down + CHANNELS, mask=right & below, other=9)
    given = tl.load(gradient + here, mask=known, other=0.0).to(tl.float32)
    given_right = tl.load(gradient + across, mask=right, other=0.0).to(tl.float32)
    given_below = tl.load(gradient + down, mask=below, other=0.0).to(tl.float32)
    given_last = tl.load(gradient + down + CHANNELS, mask=right & below, other=0.0).to(tl.float32)
    one = tl.where(place == 4, given, 0.0)
    two = tl.where(place == 5, given, 0.0) + tl.where(place_right == 3, given_right, 0.0)
    three = tl.where(place == 7, given, 0.0) + tl.where(place_below == 1, given_below, 0.0)
    four = tl.where(place == 8, given, 0.0) + tl.where(place_right == 6, given_right, 0.0)
    four += tl.where(place_below == 2, given_below, 0.0) + tl.where(place_last == 0, given_last, 0.0)
    first = result + (image * height + 2 * y) * width * CHANNELS + 2 * x * CHANNELS + channel
    second = first + width * CHANNELS
    odd, lower = known & (2 * x + 1 < width), at < tl.where(2 * y + 1 < height, columns * CHANNELS, 0)
    tl.store(first, one, mask=known)
    tl.store(first + CHANNELS, two, mask=odd)
    tl.store(second, three, mask=lower)
    tl.store(second + CHANNELS, four, mask=odd & lower)


@torch.library.custom_op("pivotpatch::pool", mutates_args=())
def pool(images: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each window (B,C,h,w), and its place in it as int8."""
    images = images.contiguous(memory_format=torch.channels_last)
    largest, places = _make_results(images)
    _launch(_find_largest, images, largest, places, pixels=images, windows=largest)
    return largest, places


@torch.library.custom_op("pivotpatch::pool_back", mutates_args=())
def pool_back(gradient: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    """What the gradient (B,C,h,w) of the largest is to the pixels (B,C,height,width)."""
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    result: Tensor = _make_pixels(gradient, places, height, width)
    _launch(_send_back, gradient, places, result, pixels=result, windows=gradient)
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


def _launch(kernel: Any, *tensors: Tensor, pixels: Tensor, windows: Tensor) -> None:
    batch, channels, rows, columns = windows.shape
    grid = (batch * rows, triton.cdiv(columns * channels, _BLOCK))
    kernel[grid](*tensors, *pixels.shape[2:], rows, columns, CHANNELS=channels, BLOCK=_BLOCK)


def _remember(ctx: Any, inputs: Sequence[Tensor], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.size = inputs[0].shape[2:]


def _go_back(ctx: Any, gradient: Tensor, _places: Tensor) -> Tensor:
    back: Tensor = pool_back(gradient, *ctx.saved_tensors, *ctx.size)
    return back


pool.register_autograd(_go_back, setup_context=_remember)


class QuickPool(nn.Module):
    """The largest of 3 x 3 pixels with stride 2, the image bordered by nothing."""

    def forward(self, images: Tensor) -> Tensor:
        """Of images (B,C,H,W); anything but single or half precision on a GPU is left to torch."""
        if not images.is_cuda or images.dtype == torch.float64:
            return functional.max_pool2d(images, 3, 2, 1)
        largest: Tensor = pool(images)[0]
        return largest
