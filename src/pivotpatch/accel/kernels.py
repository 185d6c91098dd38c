"""Kernels of our own for a GPU, each one pass over memory where torch makes several, or a slow one.

Needs Triton, which comes with torch for CUDA on Linux. Feature maps are (B,C,H,W) in memory order B, H, W, C.
"""

import math

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
    TOP: tl.constexpr,  # noqa: N803
    SILU: tl.constexpr,  # noqa: N803
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
    if SILU:
        value = value / (1 + tl.exp(-value))
    else:
        value = tl.where(value < 0, value * SLOPE, tl.where(value > TOP, TOP, value))
    tl.store(result + at, value, mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def _halve(  # type: ignore[no-untyped-def]
    maps,
    result,
    places,
    height,
    width,
    rows,
    columns,
    CHANNELS: tl.constexpr,  # noqa: N803
    SIDE: tl.constexpr,  # noqa: N803
    LARGEST: tl.constexpr,  # noqa: N803
    PLACES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    image, y = (row // rows).to(tl.int64), row % rows
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x, channel = at // CHANNELS, at % CHANNELS
    known = at < columns * CHANNELS
    found = tl.full((BLOCK,), float("-inf") if LARGEST else 0.0, tl.float32)
    chosen = tl.full((BLOCK,), 4, tl.int32)  # the middle, which is always inside
    for step in tl.static_range(SIDE * SIDE):
        top, left = 2 * y - SIDE + 2 + step // SIDE, 2 * x - SIDE + 2 + step % SIDE
        if LARGEST:
            held = tl.where((top >= 0) & (top < height), columns * CHANNELS, 0)  # by the row: all, or nothing
            inside = (at < held) & (left >= 0) & (left < width)
        else:
            top = tl.where(top < 0, -top, tl.where(top >= height, 2 * height - 2 - top, top))
            left = tl.where(left < 0, -left, tl.where(left >= width, 2 * width - 2 - left, left))
            inside = known
        place = maps + (image * height + top) * width * CHANNELS + left * CHANNELS + channel
        value = tl.load(place, mask=inside, other=float("-inf") if LARGEST else 0.0).to(tl.float32)
        if LARGEST:
            better = (value > found) | (value != value)  # the first of equals, and what is no number, as torch does
            found, chosen = tl.where(better, value, found), tl.where(better, step, chosen)
        elif SIDE == 3:
            found += value * ((1 + step // SIDE % 2) * (1 + step % SIDE % 2) / 16)
        else:
            found += value / (SIDE * SIDE)
    start = row.to(tl.int64) * columns * CHANNELS
    tl.store(result + start + at, found, mask=known)
    if PLACES:
        tl.store(places + start + at, chosen.to(tl.int8), mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def _send_back(  # type: ignore[no-untyped-def]
    gradient,
    places,
    result,
    height,
    width,
    rows,
    columns,
    CHANNELS: tl.constexpr,  # noqa: N803
    LARGEST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    # A program sees part of one row of windows and writes two rows of pixels: those that no window above holds.
    row = tl.program_id(0)
    image, y = (row // rows).to(tl.int64), row % rows
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x, channel, known = at // CHANNELS, at % CHANNELS, at < columns * CHANNELS
    here = row.to(tl.int64) * columns * CHANNELS + at
    right, below = known & (x + 1 < columns), at < tl.where(y + 1 < rows, columns * CHANNELS, 0)
    across, down = here + CHANNELS, here + columns * CHANNELS
    given = tl.load(gradient + here, mask=known, other=0.0).to(tl.float32)
    given_right = tl.load(gradient + across, mask=right, other=0.0).to(tl.float32)
    given_below = tl.load(gradient + down, mask=below, other=0.0).to(tl.float32)
    given_last = tl.load(gradient + down + CHANNELS, mask=right & below, other=0.0).to(tl.float32)
    if LARGEST:
        place = tl.load(places + here, mask=known, other=9)
        place_right = tl.load(places + across, mask=right, other=9)
        place_below = tl.load(places + down, mask=below, other=9)
        place_last = tl.load(places + down + CHANNELS, mask=right & below, other=9)
        one = tl.where(place == 4, given, 0.0)
        two = tl.where(place == 5, given, 0.0) + tl.where(place_right == 3, given_right, 0.0)
        three = tl.where(place == 7, given, 0.0) + tl.where(place_below == 1, given_below, 0.0)
        four = tl.where(place == 8, given, 0.0) + tl.where(place_right == 6, given_right, 0.0)
        four += tl.where(place_below == 2, given_below, 0.0) + tl.where(place_last == 0, given_last, 0.0)
    else:
        # Of a blur a pixel between two windows has a share in both: twice that where the border reflects it.
        share, share_right = tl.where(x == 0, 2.0, 1.0), tl.where(2 * x + 3 == width, 2.0, 1.0)
        share_above, share_below = tl.where(y == 0, 2.0, 1.0), tl.where(2 * y + 3 == height, 2.0, 1.0)
        between = share * given + share_right * given_right
        between_below = share * given_below + share_right * given_last
        one, two = given / 4, between / 8
        three = (share_above * given + share_below * given_below) / 8
        four = (share_above * between + share_below * between_below) / 16
    first = result + (image * height + 2 * y) * width * CHANNELS + 2 * x * CHANNELS + channel
    second = first + width * CHANNELS
    odd, lower = known & (2 * x + 1 < width), at < tl.where(2 * y + 1 < height, columns * CHANNELS, 0)
    tl.store(first, one, mask=known)
    tl.store(first + CHANNELS, two, mask=odd)
    tl.store(second, three, mask=lower)
    tl.store(second + CHANNELS, four, mask=odd & lower)


def finish(
    maps: Tensor,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    added: Tensor | None = None,
    slope: float = 1.0,
    top: float = math.inf,
    silu: bool = False,
) -> Tensor:
    """act((maps + bias) gate + added), where act(y) is y / (1 + exp(-y)), or slope y below 0 and at most top.

    Args:
        maps: (B,C,H,W), at least `BLOCK` elements an image.
        bias: (C,).
        gate: (B,C,1,1).
        added: (B,C,H,W) of the same dtype.
        slope: 1 for no activation.
        top: infinity for none.
        silu: take the first of the two activations.
    """
    maps = maps.contiguous(memory_format=torch.channels_last)
    added = None if added is None else added.contiguous(memory_format=torch.channels_last)
    gate = None if gate is None else gate.flatten(1).contiguous()
    result = torch.empty_like(maps)
    held = [maps if part is None else part for part in (bias, gate, added)]  # an unused pointer may be any
    flags = {
        "HAS_BIAS": bias is not None,
        "HAS_GATE": gate is not None,
        "HAS_ADDED": added is not None,
        "SLOPE": slope,
        "TOP": top,
        "SILU": silu,
    }
    grid = (triton.cdiv(maps.numel(), BLOCK),)
    sizes = (maps.numel(), maps[0].numel())
    with torch.cuda.device_of(maps):  # else Triton asks the first GPU
        _finish[grid](maps, *held, result, *sizes, CHANNELS=maps.shape[1], BLOCK=BLOCK, **flags)
    return result


def take_largest(maps: Tensor) -> Tensor:
    """The largest of 3 x 3 pixels with stride 2, the maps bordered by nothing."""
    return _shrink(maps, side=3, largest=True)


def blur(maps: Tensor) -> Tensor:
    """The mean of 3 x 3 pixels with stride 2, weighed 1, 2, 1 both ways, the maps bordered by their reflection.

    Args:
        maps: (B,C,H,W), at least two rows and columns.
    """
    return _shrink(maps, side=3, largest=False)


def take_mean(maps: Tensor) -> Tensor:
    """The mean of every 2 x 2 pixels of maps (B,C,H,W) with even sides."""
    return _shrink(maps, side=2, largest=False)


def take_largest_into(maps: Tensor, largest: Tensor, places: Tensor) -> None:
    """Write what `take_largest` gives (B,C,h,w), and the place of each in its window as int8, 0 to 8 row by row."""
    _launch_halve(maps, largest, places, side=3, is_largest=True)


def send_back_into(gradient: Tensor, places: Tensor | None, result: Tensor) -> None:
    """Write what the gradient (B,C,h,w) of the largest, or of a blur, is to the maps (B,C,H,W) that it was taken from.

    Args:
        gradient: in memory order B, H, W, C, as the other two.
        places: of the largest in their windows, int8; None of a blur.
        result: is written to.
    """
    batch, channels, rows, columns = gradient.shape
    grid = (batch * rows, triton.cdiv(columns * channels, BLOCK))
    sizes = (*result.shape[2:], rows, columns)
    with torch.cuda.device_of(gradient):
        _send_back[grid](
            gradient,
            gradient if places is None else places,
            result,
            *sizes,
            CHANNELS=channels,
            LARGEST=places is not None,
            BLOCK=BLOCK,
        )


def _shrink(maps: Tensor, *, side: int, largest: bool) -> Tensor:
    maps = maps.contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = maps.shape
    shape = (batch, channels, (height + 1) // 2, (width + 1) // 2)
    result = torch.empty(shape, dtype=maps.dtype, device=maps.device, memory_format=torch.channels_last)
    _launch_halve(maps, result, None, side=side, is_largest=largest)
    return result


def _launch_halve(maps: Tensor, result: Tensor, places: Tensor | None, *, side: int, is_largest: bool) -> None:
    batch, channels, rows, columns = result.shape
    grid = (batch * rows, triton.cdiv(columns * channels, BLOCK))
    given = (maps, result, result if places is None else places, *maps.shape[2:], rows, columns)
    flags = {"SIDE": side, "LARGEST": is_largest, "PLACES": places is not None}
    with torch.cuda.device_of(maps):
        _halve[grid](*given, CHANNELS=channels, BLOCK=BLOCK, **flags)
