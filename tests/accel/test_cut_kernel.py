"""Our kernel against torch, by Triton's interpreter where there is no GPU."""

import pytest
from kernel_comparison import run_comparison

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

COMPARE = """
import torch
from pivotpatch.accel.cut_kernel import cut_bytes
from pivotpatch.core.patches import cut_patches, patch_boxes

generator = torch.Generator().manual_seed(0)
for shape, grid, overlap, size in (
    ((2, 3, 8, 8), 2, 0.0, (8, 8)),
    ((1, 3, 7, 9), 2, 0.25, (7, 9)),
    ((2, 3, 10, 6), 3, 0.0, (12, 6)),
    ((1, 1, 4, 4), 1, 0.0, (4, 4)),
    ((1, 3, 4, 1200), 1, 0.0, (4, 1300)),
):
    nested = torch.randint(256, (shape[0], *shape[2:], shape[1]), generator=generator, dtype=torch.uint8)
    source = nested.permute(0, 3, 1, 2)
    boxes = patch_boxes(*shape[2:], grid=grid, overlap=overlap)
    # Half a level more, so that cutting off rounds.
    expected = cut_patches(source.double() + 0.5, grid=grid, overlap=overlap, size=size)
    starts, span = [(box.top, box.left) for box in boxes], (boxes[0].bottom, boxes[0].right)
    for order in (source, source.contiguous()):
        found = cut_bytes(order.to(device), starts=starts, span=span, size=size).cpu()
        assert found.shape == expected.shape and found.dtype == torch.uint8
        beside = (found.double() - expected.floor()).abs()
        near = (expected - expected.round()).abs() < 1e-3  # single precision may cut off either way there
        assert bool((beside <= near).all()), (shape, grid, overlap, size)
        assert span != size or torch.equal(found[:, 0], source)
"""


def test_our_kernel_cuts_what_torch_cuts() -> None:
    run_comparison(COMPARE)
