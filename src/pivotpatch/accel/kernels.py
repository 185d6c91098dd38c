"""Kernels of our own for a GPU, each one pass over memory where torch makes several, or a slow one.

Needs Triton, which comes with torch for CUDA on Linux. Feature maps are (B,C,H,W) in memory order B, H, W, C.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements that a program sees


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    maps,
    bias,
    gate,
    added,
    result,
    total,
    per_image,
    CHANNELS: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_GATE: tl.constexpr,  # noqa: N803
    HAS_ADDED: tl.constexpr,  # noqa: N803
    SLOPE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.arange(0, BLOCK)
    at = start + step
    known = at < total
    channel = ((start % CHANNELS).to(tl.int32) + step) % CHANNELS
    value = tl.load(maps + at, mask=known, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    if HAS_GATE:
        later = ((start % per_image).to(tl.int32) + step >= per_image).to(tl.int32)  # a block is in two images at most
        image = (start // per_image).to(tl.int32) + later
        value *= tl.load(gate + image * CHANNELS + channel, mask=known, other=0.0).to(tl.float32)
    if HAS_ADDED:
        value += tl.load(added + at, mask=known, other=0.0).to(tl.float32)
    tl.store(result + at, tl.where(value < 0, value * SLOPE, value), mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def _blur(  # type: ignore[no-untyped-def]
    maps,
    result,
    height,
    width,
    rows,
    columns,
    CHANNELS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    image, y = (row // rows).to(tl.int64), row % rows
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x, channel = at // CHANNELS, at % CHANNELS
    known = at < columns * CHANNELS
    found = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(9):
        top, left = 2 * y - 1 + step // 3, 2 * x - 1 + step % 3
        top = tl.where(top < 0, -top, tl.where(top >= height, 2 * height - 2 - top, top))
        left = tl.where(left < 0, -left, tl.where(left >= width, 2 * width - 2 - left, left))
        place = maps + (image * height + top) * width * CHANNELS + left * CHANNELS + channel
        value = tl.load(place, mask=known, other=0.0).to(tl.float32)
        found += value * ((1 + step // 3 % 2) * (1 + step % 3 % 2) / 16)
    tl.store(result + row.to(tl.int64) * columns * CHANNELS + at, found, mask=known)


def finish(
    maps: Tensor,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    added: Tensor | None = None,
    slope: float = 1.0,
) -> Tensor:
    """act((maps + bias) gate + added), where act(y) is slope y below 0 and y above it.

    Of maps (B,C,H,W), at least `BLOCK` elements an image, bias (C,), gate (B,C,1,1), added (B,C,H,W) of their dtype.
    """
    maps = maps.contiguous(memory_format=torch.channels_last)
    added = None if added is None else added.contiguous(memory_format=torch.channels_last)
    gate = None if gate is None else gate.flatten(1).contiguous()
    result = torch.empty_like(maps)
    held = [maps if part is None else part for part in (bias, gate, added)]  # an unused pointer may be any
    there = {"HAS_BIAS": bias is not None, "HAS_GATE": gate is not None, "HAS_ADDED": added is not None}
    grid = (triton.cdiv(maps.numel(), BLOCK),)
    sizes = (maps.numel(), maps[0].numel())
    with torch.cuda.device_of(maps):  # else Triton asks the first GPU
        _finish[grid](maps, *held, result, *sizes, CHANNELS=maps.shape[1], SLOPE=slope, BLOCK=BLOCK, **there)
    return result


def blur(maps: Tensor) -> Tensor:
    """The mean of 3 x 3 pixels of maps (B,C,H,W) with stride 2, weighed 1, 2, 1 both ways, bordered by reflection."""
    maps = maps.contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = maps.shape
    rows, columns = (height + 1) // 2, (width + 1) // 2
    result = maps.new_empty(batch, rows, columns, channels).permute(0, 3, 1, 2)
    grid = (batch * rows, triton.cdiv(columns * channels, BLOCK))
    with torch.cuda.device_of(maps):
        _blur[grid](maps, result, height, width, rows, columns, CHANNELS=channels, BLOCK=BLOCK)
    return result
