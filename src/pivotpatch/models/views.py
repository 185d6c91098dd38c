"""What a model sees of a batch of images: resized, cut into patches, augmented and normalised on their device."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from pivotpatch.accel.device import send_tensor
from pivotpatch.core.patches import check_images, cut_patches, resize_images, split_views
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier


class Views(NamedTuple):
    """What the model sees.

    Attributes:
        image: (B,C,H,W).
        patches: (B,P,C,h,w).
        closer: (B,C,S,S) the whole image once more, larger; None where it is not wanted.
        spliced: (M,C,H,W) grids of images of the batch; None where they are not wanted.
        cells: (M,rows,columns) which image lies in each cell of them, -1 for none.
        shown: image (B,C,H,W) and patches (B,P,C,h,w) as a teacher sees them; None where there is none.
    """

    image: Tensor
    patches: Tensor
    closer: Tensor | None = None
    spliced: Tensor | None = None
    cells: Tensor | None = None
    shown: tuple[Tensor, Tensor] | None = None


class Drawn(Protocol):
    """What was drawn to happen to each of N views, such as `pivotpatch.data.augment.Augmentation`."""

    def split(self, count: int) -> tuple[Self, Self]:
        """That of the first `count` views, and that of the others."""
        ...

    def apply(self, views: Tensor, *, compiled: bool) -> Tensor:
        """Views (N,3,H,W) uint8 as they are afterwards."""
        ...


def make_network_views(
    model: Classifier,
    images: Tensor,
    *,
    augmentation: Drawn | None = None,
    patches: bool = True,
    size: int | None = None,
    compiled: bool = False,
) -> Views:
    """The views that a model sees of images (B,3,h,w) uint8 from the loader, on their device; see `make_views`.

    Args:
        model: says how it sees them.
        images: (B,3,h,w) uint8.
        augmentation: of all views; none by default.
        patches: False leaves them out; regions of the feature map are none.
        size: rows and columns of the whole image; those that the model sees by default.
        compiled: as in `make_views`.
    """
    prepare, side = model.preprocessing, size or model.preprocessing.image_size
    cut: dict[str, Any] = {"grid": 0}
    if patches and isinstance(model, PatchClassifier) and not model.regions:
        small = None if model.patch_size is None else (model.patch_size, model.patch_size)
        native = model.source_size is not None
        cut = {"grid": model.grid, "overlap": model.overlap, "native": native, "patch_size": small}
    seen: dict[str, Any] = {"size": (side, side), "mean": prepare.mean, "std": prepare.std}
    return make_views(images, **seen, **cut, augmentation=augmentation, compiled=compiled)


@torch.no_grad()
def make_views(
    images: Tensor,
    *,
    size: tuple[int, int],
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    grid: int = 2,
    overlap: float = 0.0,
    native: bool = False,
    patch_size: tuple[int, int] | None = None,
    augmentation: Drawn | None = None,
    compiled: bool = False,
) -> Views:
    """Turn a batch from the loader into what a model sees.

    Args:
        images: (B,3,h,w) uint8 at the loader's size, on the device that is to do the work.
        size: H and W, the model's input.
        mean: (3,) of the model's normalisation, for pixels from 0 to 1; a tensor on the device spares a transfer.
        std: (3,) likewise.
        grid: patches per side, P = grid * grid; 0 for none.
        overlap: share of a patch's side that it has in common with its neighbour, in [0, 1).
        native: cut the patches from `images` rather than from the image resized to the model's input, so that
            they keep the detail of a larger source.
        patch_size: h and w of each patch; H and W by default.
        augmentation: of B * (1 + P) views, all images first, then the patches image by image; none by default.
        compiled: compile each operation at its first use, which takes seconds; on a GPU it then passes over the pixels
            once and not several times.

    Returns:
        Views of (B,3,H,W) and (B,P,3,h,w), float32.
    """
    check_images(images, "make_views")
    if images.dtype != torch.uint8:
        raise InputError("make_views", f"images are {images.dtype}", "give uint8 as the loader does")
    choose = partial(_choose, compiled=compiled)
    views, count = choose(resize_images)(images, size), images.shape[0]
    colours = [_per_channel(values, images.device) for values in (mean, std)]

    def finish(views: Tensor, augmentation: Drawn | None) -> Tensor:
        drawn = views if augmentation is None else augmentation.apply(views, compiled=compiled)
        return choose(_normalise)(drawn, *colours)

    if grid == 0:
        image = finish(views, augmentation)
        return Views(image, image.new_empty(count, 0, *image.shape[1:]))
    source = images if native else views
    patches = choose(cut_patches)(source, grid=grid, overlap=overlap, size=patch_size or size)
    views = views.contiguous()  # as the patches are: putting both into one batch is then much faster
    if augmentation is not None and patches.shape[3:] == views.shape[2:]:  # all at once
        joined = finish(torch.cat([views, patches.flatten(0, 1)]), augmentation)
        return Views(*split_views(joined, patches=patches.shape[1]))
    whole, parts = (None, None) if augmentation is None else augmentation.split(count)
    return Views(finish(views, whole), finish(patches.flatten(0, 1), parts).unflatten(0, patches.shape[:2]))


def _normalise(views: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return torch.addcmul(-mean / std, views, 1 / (255 * std))


def _per_channel(values: Sequence[float] | Tensor, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(values, dtype=torch.float32)
    return (tensor if tensor.device == device else send_tensor(tensor, device)).reshape(-1, 1, 1)


@cache
def _choose(function: Callable[..., Tensor], *, compiled: bool) -> Callable[..., Tensor]:
    """A function, or what it is compiled to; the number of views becomes a variable once it has changed."""
    return torch.compile(function) if compiled else function
