"""A kernel of our own that cuts and enlarges patches of bytes in one pass; needs Triton."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["top", "left"])  # type: ignore[untyped-decorator]
def _enlarge(  # type: ignore[no-untyped-def]
    source,
    result,
    image_step,
    channel_step,
    row_step,
    column_step,
    result_step,
    top,
    left,
    rows,
    columns,
    height,
    width,
    row_scale,
    column_scale,
    CHANNELS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    image = (tl.program_id(0) // height).to(tl.int64)
    y = tl.program_id(0) % height
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Where the middle of a pixel lies in the box, as torch computes it.
    row = tl.maximum((y + 0.5) * row_scale - 0.5, 0.0)
    column = tl.maximum((x + 0.5) * column_scale - 0.5, 0.0)
    above, before = row.to(tl.int32), column.to(tl.int32)
    below, behind = tl.minimum(above + 1, rows - 1), tl.minimum(before + 1, columns - 1)
    down, right = row - above, column - before
    box = source + image * image_step + top * row_step + left * column_step
    for channel in tl.static_range(CHANNELS):
        upper = box + channel * channel_step + above * row_step
        lower = box + channel * channel_step + below * row_step
        inside = x < width
        one = tl.load(upper + before * column_step, mask=inside, other=0).to(tl.float32) + 0.5
        two = tl.load(upper + behind * column_step, mask=inside, other=0).to(tl.float32) + 0.5
        three = tl.load(lower + before * column_step, mask=inside, other=0).to(tl.float32) + 0.5
        four = tl.load(lower + behind * column_step, mask=inside, other=0).to(tl.float32) + 0.5
        level = (1 - down) * ((1 - right) * one + right * two) + down * ((1 - right) * three + right * four)
        place = result + image * result_step + (channel * height + y) * width + x
        tl.store(place, level.to(tl.uint8), mask=inside)


def cut_bytes(
    source: Tensor, *, starts: Sequence[tuple[int, int]], span: tuple[int, int], size: tuple[int, int]
) -> Tensor:
    """Cut boxes of equal size out of images and enlarge them with bilinear interpolation.

    Args:
        source: images (B,C,H,W) uint8, in any memory order.
        starts: first row and column of each of the P boxes.
        span: rows and columns of a box.
        size: rows and columns of each patch of the result, no fewer than those of a box.

    Returns:
        (B,P,C,*size) uint8.
    """
    batch, channels = source.shape[:2]
    result = torch.empty((batch, len(starts), channels, *size), dtype=torch.uint8, device=source.device)
    grid = (batch * size[0], triton.cdiv(size[1], 512))
    scales = (span[0] / size[0], span[1] / size[1])
    with torch.cuda.device_of(source):  # else Triton asks the first GPU
        for number, (top, left) in enumerate(starts):
            sizes = (*source.stride(), result.stride(0), top, left, *span, *size, *scales)
            _enlarge[grid](source, result[:, number], *sizes, CHANNELS=channels, BLOCK=512)
    return result
