"""Cut an image batch into a grid of patches, and say which pixels each patch covers."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pivotpatch.core.checks import check_shapes
from pivotpatch.errors import InputError
from pivotpatch.runtime.values import Patching, patch_boxes


class SplitViews(NamedTuple):
    """Rows of whole images (B, ...) and rows of their patches (B,P, ...)."""

    images: Tensor
    patches: Tensor


def check_images(images: Tensor, where: str) -> None:
    """Refuse what is not a batch of images (B,C,H,W) with at least one image in it.

    >>> check_images(torch.rand(1, 3, 8, 8), "here")
    """
    check_shapes(where, "BCHW", images=images)
    if images.shape[0] == 0:
        raise InputError(where, f"the batch is empty, shape {tuple(images.shape)}", "give at least one image")
    if images.shape[1] > 4 and images.shape[3] in (1, 3, 4):
        wrong = f"images of shape {tuple(images.shape)} have {images.shape[1]} channels and look channels-last"
        raise InputError(where, wrong, "permute them to (B, C, H, W)")
    if not (images.is_floating_point() or images.dtype == torch.uint8):
        raise InputError(where, f"images are {images.dtype}", "give a floating-point or uint8 tensor")


def resize_images(images: Tensor, size: tuple[int, int], *, interpolation: str = "bilinear") -> Tensor:
    """Resize a batch, anti-aliased where it shrinks.

    Args:
        images: (B,C,H,W), floating point or uint8.
        size: rows and columns of the result.
        interpolation: "bilinear" or "bicubic", the latter as Pillow does it.

    Returns:
        (B,C,*size) in the dtype of `images`; `images` itself where the size is already right.

    >>> resize_images(torch.ones(1, 3, 4, 4), (8, 6)).shape
    torch.Size([1, 3, 8, 6])
    """
    height, width = images.shape[-2:]
    if (height, width) == tuple(size):
        return images
    # The CPU has a kernel for bytes, many times faster than going through floats; CUDA has none.
    as_bytes = images.dtype == torch.uint8 and images.is_cpu
    direct = images.dtype in (torch.float32, torch.float64) or as_bytes
    # Anti-aliasing changes nothing when both sides grow, and exporters know the plain form better; not that of bytes,
    # which ONNX Runtime cuts to whole numbers where torch rounds, nor bicubic, whose plain form has other weights.
    smooth = as_bytes or size[0] < height or size[1] < width or interpolation == "bicubic"
    pixels = images if direct else images.float()
    if images.dtype == torch.uint8 and not direct:
        pixels += 0.5  # half a level more, so that cutting off rounds; cheaper here than where the image has grown
    resized = F.interpolate(pixels, size=size, mode=interpolation, align_corners=False, antialias=smooth)
    if interpolation == "bicubic" and images.dtype == torch.uint8 and not direct:
        resized = resized.clamp(0, 255)  # it overshoots at edges
    return resized.to(images.dtype)


def cut_patches(source: Tensor, *, grid: int = 2, overlap: float = 0.0, size: tuple[int, int] | None = None) -> Tensor:
    """Cut each image into grid x grid equal patches and resize every patch to the network's input.

    The paper cuts the image that the model sees, so `size` stays its default. Cutting a larger
    `source` instead ("native" patches) gives each patch the detail that the resized image has lost.

    Args:
        source: images (B,C,H,W) to cut, floating point or uint8.
        grid: patches per side, P = grid * grid.
        overlap: share of a patch's side that it has in common with its neighbour, in [0, 1).
        size: rows and columns of each patch after resizing; those of `source` by default.

    Returns:
        Patches (B,P,C,*size), row by row as in `patch_boxes`.

    >>> cut_patches(torch.rand(2, 3, 32, 32), grid=2).shape
    torch.Size([2, 4, 3, 32, 32])
    >>> cut_patches(torch.rand(2, 3, 64, 64), grid=2, size=(32, 32)).shape
    torch.Size([2, 4, 3, 32, 32])
    """
    check_images(source, "cut_patches")
    height, width = source.shape[-2:]
    boxes = patch_boxes(height, width, grid=grid, overlap=overlap)
    patches = torch.stack([source[..., b.top : b.bottom, b.left : b.right] for b in boxes], dim=1)
    resized: Tensor = resize_images(patches.flatten(0, 1), (height, width) if size is None else size)
    return resized.reshape(-1, len(boxes), *resized.shape[1:])


def crop_images(images: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """Cut crops out of images and enlarge each to the size of the image, by bilinear interpolation.

    Args:
        images: (B,C,H,W), floats.
        across: (B,N,2) first and last column of each of N crops, as parts of the width.
        down: (B,N,2) rows, likewise.

    Returns:
        (B,N,C,H,W).

    >>> crop_images(torch.arange(4.0).reshape(1, 1, 1, 4), torch.tensor([[[0.5, 1.0]]]), torch.tensor([[[0.0, 1.0]]]))
    tensor([[[[[1.7500, 2.2500, 2.7500, 3.0000]]]]])
    """
    height, width = images.shape[2:]
    grids = []
    for interval, size in ((across, width), (down, height)):
        place = (torch.arange(size, device=images.device) + 0.5) / size
        grids.append(2 * (interval[..., :1] + place * (interval[..., 1:] - interval[..., :1])) - 1)  # (B,N,size)
    columns = grids[0][:, :, None].expand(-1, -1, height, -1)
    rows = grids[1][..., None].expand(-1, -1, -1, width)
    grid = torch.stack([columns, rows], dim=4).to(images.dtype)  # (B,N,H,W,2)
    found = F.grid_sample(images, grid.flatten(1, 2), align_corners=False, padding_mode="border")
    return found.unflatten(2, (-1, height)).transpose(1, 2)


def stack_views(images: Tensor, patches: Tensor) -> Tensor:
    """Put whole images and their patches into one batch, so that the network runs once.

    Args:
        images: (B,C,H,W).
        patches: (B,P,C,H,W).

    Returns:
        Views (B + B * P,C,H,W): all images, then the patches image by image.

    >>> stack_views(torch.rand(2, 3, 8, 8), torch.rand(2, 4, 3, 8, 8)).shape
    torch.Size([10, 3, 8, 8])
    """
    check_shapes("stack_views", "BCHW BPCHW", images=images, patches=patches)
    return torch.cat([images, patches.flatten(0, 1)])


def split_views(outputs: Tensor, *, patches: int) -> SplitViews:
    """Undo `stack_views` on what the network made of the views.

    Args:
        outputs: (B + B * P, ...), one row a view.
        patches: P.

    >>> split = split_views(torch.arange(10), patches=4)
    >>> split.images.tolist(), split.patches[0].tolist()
    ([0, 1], [2, 3, 4, 5])
    """
    batch = outputs.shape[0] // (1 + patches)
    assert batch * (1 + patches) == outputs.shape[0], f"{outputs.shape[0]} rows for 1 + {patches} views an image"
    return SplitViews(outputs[:batch], outputs[batch:].reshape(batch, patches, *outputs.shape[1:]))


def align_patches(patching: Patching, other: Patching) -> Tensor:
    """The share (P,Q) of each of Q other patches of an image that lies in each of P patches.

    Patches that are cut in the same way stand each for itself, however they overlap.

    >>> align_patches(Patching(grid=1), Patching(grid=2)).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    >>> align_patches(Patching(grid=2), Patching(grid=3))[0].tolist()
    [1.0, 0.5, 0.0, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]
    """
    if (patching.grid, patching.overlap) == (other.grid, other.overlap):
        return torch.eye(patching.count)
    side = 5040  # which many numbers divide
    spans, others = (
        torch.tensor([(box.left, box.right) for box in patch_boxes(side, side, grid=cut.grid, overlap=cut.overlap)])
        for cut in (patching, other)
    )
    low, high = spans[: patching.grid].T[..., None]
    start, end = others[: other.grid].T
    shares = (torch.minimum(high, end) - torch.maximum(low, start)).clamp(min=0) / (end - start)
    return torch.kron(shares, shares)


def cut_views(patching: Patching, images: Tensor, *, source: Tensor | None = None) -> Tensor:
    """Patches (B,P,C,h,w) of images (B,C,H,W), cut from a larger `source` (B,C,H',W') where one is given.

    >>> cut_views(Patching(), torch.rand(2, 3, 32, 32), source=torch.rand(2, 3, 64, 64)).shape
    torch.Size([2, 4, 3, 32, 32])
    """
    check_images(images, "images")
    source = images if source is None else source
    check_images(source, "images: source")
    smaller = source.shape[2] < images.shape[2] or source.shape[3] < images.shape[3]
    kinds = [(each.shape[:2], each.dtype, each.device) for each in (source, images)]
    if smaller or kinds[0] != kinds[1]:
        told = [f"{tuple(each.shape)} {each.dtype} on {each.device}" for each in (source, images)]
        todo = "give the same images, preprocessed alike and no smaller, or leave it out"
        raise InputError("images", f"source is {told[0]} and images are {told[1]}", todo)
    side = patching.patch_size
    size = (images.shape[-2], images.shape[-1]) if side is None else (side, side)
    return cut_patches(source, grid=patching.grid, overlap=patching.overlap, size=size)
