"""What a model sees of a batch of images: resized, cut into patches, augmented and normalised on their device."""

from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from pivotpatch.accel.device import choose_compiled, send_tensor
from pivotpatch.core.patches import check_images, cut_patches, resize_images, split_views
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import Classifier
from pivotpatch.models.patch_classifier import PatchClassifier


class Views(NamedTuple):
    """What the model sees."""

    image: Tensor  # (B,C,H,W)
    patches: Tensor  # (B,P,C,h,w)
    closer: Tensor | None = None  # (B,C,S,S) the whole image once more, larger; None where it is not wanted
    spliced: Tensor | None = None  # (M,C,H,W) grids of images of the batch; None where they are not wanted
    cells: Tensor | None = None  # (M,rows,columns) which image lies in each cell of them, -1 for none
    shown: tuple[Tensor, Tensor] | None = None  # image and patches, likewise, as a teacher sees them


class Drawn(Protocol):
    """What was drawn to happen to each of N views, such as `pivotpatch.data.augment.Augmentation`."""

    def split(self, count: int) -> tuple[Self, Self]:
        """That of the first `count` views, and that of the others."""
        ...

    def apply(self, views: Tensor, *, compiled: bool) -> Tensor:
        """Views (N,3,H,W) uint8 as they are afterwards."""
        ...


@torch.no_grad()
def make_views(
    model: Classifier,
    images: Tensor,
    *,
    augmentation: Drawn | None = None,
    patches: bool = True,
    size: int | None = None,
    compiled: bool = False,
) -> Views:
    """Turn a batch from the loader into what a model sees.

    Args:
        model: says its size S, how images are resized to it and normalised, and how patches are cut. With a
            `source_size` they are cut from `images` rather than from the image resized to S, so that they keep the
            detail of a larger source.
        images: (B,3,h,w) uint8 at the loader's size, on the device that is to do the work.
        augmentation: of B * (1 + P) views, all images first, then the patches image by image; none by default.
        patches: False leaves them out; regions of the feature map are none.
        size: another S, of the whole image.
        compiled: compile each operation at its first use, which takes seconds; on a GPU it then passes over the pixels
            once and not several times.

    Returns:
        Views of (B,3,S,S) and (B,P,3,s,s), float32; s is the `patch_size` or S.
    """
    check_images(images, "views")
    if images.dtype != torch.uint8:
        raise InputError("views", f"images are {images.dtype}", "give uint8 as the loader does")
    choose, side = partial(choose_compiled, compiled=compiled), size or model.preprocessing.image_size
    views = choose(resize_images)(images, (side, side), interpolation=model.preprocessing.interpolation)
    count = images.shape[0]
    colours = [
        send_tensor(torch.tensor(values), images.device)[:, None, None]
        for values in (model.preprocessing.mean, model.preprocessing.std)
    ]

    def finish(views: Tensor, augmentation: Drawn | None) -> Tensor:
        drawn = views if augmentation is None else augmentation.apply(views, compiled=compiled)
        return choose(_normalise)(drawn, *colours)

    if not patches or not isinstance(model, PatchClassifier) or model.regions:
        image = finish(views, augmentation)
        return Views(image, image.new_empty(count, 0, *image.shape[1:]))
    cut = model.patching
    source, small = views if cut.source_size is None else images, cut.patch_size or side
    parts = choose(cut_patches)(source, grid=cut.grid, overlap=cut.overlap, size=(small, small))
    views = views.contiguous()  # as the patches are: putting both into one batch is then much faster
    if augmentation is not None and small == side:  # all at once
        joined = finish(torch.cat([views, parts.flatten(0, 1)]), augmentation)
        return Views(*split_views(joined, patches=parts.shape[1]))
    first, others = (None, None) if augmentation is None else augmentation.split(count)
    return Views(finish(views, first), finish(parts.flatten(0, 1), others).unflatten(0, parts.shape[:2]))


def _normalise(views: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return torch.addcmul(-mean / std, views, 1 / (255 * std))
