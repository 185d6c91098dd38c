import json
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms.v2 import functional as transforms

from pivotpatch.core.patches import check_images, cut_patches, cut_views, resize_images, stack_views
from pivotpatch.errors import InputError
from pivotpatch.runtime.values import Patching, patch_boxes

NAN = float("nan")


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 40), st.just(0.0) | st.floats(0, 0.999))
def test_boxes_are_equal_and_cover_every_pixel(grid: int, more_rows: int, more_columns: int, overlap: float) -> None:
    height, width = grid + more_rows, grid + more_columns
    boxes = patch_boxes(height, width, grid=grid, overlap=overlap)
    covered = torch.zeros(height, width, dtype=torch.int64)
    for box in boxes:
        assert 0 <= box.left < box.right <= width
        assert 0 <= box.top < box.bottom <= height
        covered[box.top : box.bottom, box.left : box.right] += 1
    assert len(boxes) == grid * grid
    assert len({(b.right - b.left, b.bottom - b.top) for b in boxes}) == 1
    assert covered.min() >= 1
    if overlap == 0:
        assert (boxes[0].bottom, boxes[0].right) == (-(-height // grid), -(-width // grid))
        if height % grid == 0 and width % grid == 0:
            assert covered.max() == 1


@given(st.integers(2, 5), st.integers(5, 200), st.integers(0, 9))
def test_neighbours_have_the_share_in_common(grid: int, length: int, tenths: int) -> None:
    spans = [(box.left, box.right) for box in patch_boxes(length, length, grid=grid, overlap=tenths / 10)[:grid]]
    side = spans[0][1]
    # In tenths of pixels: the sides of all patches, less what neighbours share, are the length or just above it.
    assert side * (10 * grid - tenths * (grid - 1)) >= 10 * length
    assert (side - 1) * (10 * grid - tenths * (grid - 1)) < 10 * length
    common = [left[1] - right[0] for left, right in pairwise(spans)]
    assert max(common) - min(common) <= 1
    assert (spans[0][0], spans[-1][1]) == (0, length)


@pytest.mark.parametrize("overlap", [0.0, 0.4])
def test_patches_are_the_pixels_of_their_boxes(overlap: float) -> None:
    images = torch.rand(2, 3, 7, 9)
    boxes = patch_boxes(7, 9, grid=2, overlap=overlap)
    height, width = boxes[0].bottom - boxes[0].top, boxes[0].right - boxes[0].left
    patches = cut_patches(images, grid=2, overlap=overlap, size=(height, width))
    for j, box in enumerate(boxes):
        assert torch.equal(patches[:, j], images[:, :, box.top : box.bottom, box.left : box.right])


def test_one_value_cuts_as_its_parts_say() -> None:
    images, source = torch.rand(2, 3, 16, 16), torch.rand(2, 3, 40, 40)
    cut = Patching(grid=3, overlap=0.5, patch_size=8)
    assert cut.count == 9
    assert torch.equal(cut_views(cut, images), cut_patches(images, grid=3, overlap=0.5, size=(8, 8)))
    assert torch.equal(cut_views(cut, images, source=source), cut_patches(source, grid=3, overlap=0.5, size=(8, 8)))
    scalars: dict[str, Any] = {"grid": np.int64(3), "lam": np.float32(0.5), "source_size": np.int64(448)}
    of_numpy = Patching(**scalars)
    assert json.loads(json.dumps(asdict(of_numpy))) == asdict(Patching(grid=3, lam=0.5, source_size=448))
    for options in ({"grid": 0}, {"grid": np.float64(2)}, {"overlap": 1.0}, {"lam": -1.0}, {"temperature": 0.0}):
        with pytest.raises(InputError, match=f"patches: {next(iter(options))} is"):
            Patching(**options)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(16, 12), (80, 72)])
def test_images_are_resized_as_by_pil(size: tuple[int, int], interpolation: str) -> None:
    """Anti-aliased where they shrink, floats as bytes are."""
    picture = torch.randint(0, 256, (1, 3, 64, 48), dtype=torch.uint8)
    expected = Image.fromarray(picture[0].permute(1, 2, 0).numpy())
    expected = expected.resize(size[::-1], Image.Resampling[interpolation.upper()])
    resized = resize_images(picture, size, interpolation=interpolation)
    assert resized.dtype == torch.uint8
    rounded = 1 if interpolation == "bilinear" else 2  # rows after columns, each rounded
    assert (resized[0].int() - transforms.pil_to_tensor(expected).int()).abs().max() <= rounded
    pale = picture // 2 + 64  # so that nothing overshoots
    floats = resize_images(pale.float(), size, interpolation=interpolation)
    assert (floats - resize_images(pale, size, interpolation=interpolation)).abs().max() < 1.5


@pytest.mark.gpu
def test_a_gpu_cuts_off_what_overshoots() -> None:
    picture = torch.randint(0, 2, (1, 3, 64, 48), dtype=torch.uint8) * 255  # bicubic weights overshoot
    for size in ((16, 12), (80, 72)):
        found = resize_images(picture.cuda(), size, interpolation="bicubic").cpu()
        expected = resize_images(picture.float(), size, interpolation="bicubic").clamp(0, 255)
        assert (found - expected).abs().max() < 0.51


def test_bad_input_is_named() -> None:
    bad: list[tuple[torch.Tensor, dict[str, Any], str]] = [
        (torch.rand(3, 8, 8), {}, r"got images \(3, 8, 8\); give tensors images \(B, C, H, W\)"),
        (torch.rand(0, 3, 8, 8), {}, "the batch is empty"),
        (torch.rand(1, 8, 8, 3), {}, "look channels-last; permute them"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.int64), {}, "images are torch.int64"),
        (torch.rand(1, 3, 4, 8), {"grid": 5}, "grid 5 is larger than the image, 4 x 8 pixels"),
        *((torch.rand(1, 3, 8, 8), {"overlap": value}, f"overlap is {value!r}") for value in (1, -0.1, NAN, "half")),
    ]
    for images, options, message in bad:
        with pytest.raises(InputError, match=message):
            cut_patches(images, **options)
    with pytest.raises(InputError, match=r"stack_views: got images \(2, 3, 4, 4\), patches \(1, 4, 3, 4, 4\)"):
        stack_views(torch.rand(2, 3, 4, 4), torch.rand(1, 4, 3, 4, 4))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.float64, 1e-9), (torch.bfloat16, 0.03)])
def test_normalised_images_keep_what_is_below_zero(dtype: torch.dtype, close: float) -> None:
    images = torch.randn(2, 3, 16, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    for interpolation in ("bilinear", "bicubic"):
        for size in ((8, 6), (24, 20)):
            exact = resize_images(images.double(), size, interpolation=interpolation)
            assert (resize_images(images, size, interpolation=interpolation).double() - exact).abs().max() < close
            assert (resize_images(-images.double(), size, interpolation=interpolation) + exact).abs().max() < 1e-9


def test_sources_and_layouts_that_do_not_fit() -> None:
    images = torch.rand(2, 3, 16, 16)
    others = (
        torch.rand(2, 3, 8, 32),
        torch.rand(2, 3, 32, 8),
        torch.rand(1, 3, 32, 32),
        torch.rand(2, 3, 32, 32).double(),
    )
    for source in others:
        with pytest.raises(InputError, match="source is .*; give the same images"):
            cut_views(Patching(), images, source=source)
    for shape in ((1, 3, 8, 3), (1, 3, 8, 4), (2, 12, 8, 8)):
        check_images(torch.rand(shape), "here")  # narrow, or of many channels
    for channels in (1, 3, 4):
        with pytest.raises(InputError, match="look channels-last"):
            check_images(torch.rand(1, 8, 8, channels), "here")
