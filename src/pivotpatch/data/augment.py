"""Make the views of a batch on its device: resize, cut, augment each on its own, normalise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pivotpatch.core.errors import InputError
from pivotpatch.core.patches import check_images, cut_patches, resize_images, split_views, stack_views
from pivotpatch.core.transfer import send_tensor
from pivotpatch.data.augment_ops import MAX_MAGNITUDE, OPERATIONS, warp_views


@dataclass(frozen=True)
class AugmentPolicy:
    """What augmentation may do; the defaults are the published recipe.

    Attributes:
        flip: probability of a horizontal flip.
        cutout: side of the box that one random colour covers, as a part of the view's side; 0 for none.
        operations: how many of RandAugment's operations follow, drawn with replacement.
        magnitude: their strength, 0 to 30.
    """

    flip: float = 0.0
    cutout: float = 0.5
    operations: int = 2
    magnitude: float = 9

    def __post_init__(self) -> None:
        limits = {"flip": 1, "cutout": 1, "magnitude": MAX_MAGNITUDE}
        for name, high in limits.items():
            value = getattr(self, name)
            if not 0 <= value <= high:
                raise InputError("augment policy", f"{name} is {value}", f"give 0 to {high}")
        if self.operations < 0:
            raise InputError("augment policy", f"operations is {self.operations}", "give 0 or more")


class Augmentation(NamedTuple):
    """What happens to each of N views, as drawn; on the CPU.

    Attributes:
        flip: (N,) bool.
        cutout: (N,4) top, left, bottom, right of the covered box, as parts of the side; may leave the view.
        colour: (N,3) uint8 that covers it.
        operation: (N,K) positions in `OPERATIONS`, applied one after the other.
        strength: (N,K) of each, in its own unit.
    """

    flip: Tensor
    cutout: Tensor
    colour: Tensor
    operation: Tensor
    strength: Tensor

    def split(self, count: int) -> tuple["Augmentation", "Augmentation"]:
        """That of the first `count` views, and that of the others."""
        return Augmentation(*(part[:count] for part in self)), Augmentation(*(part[count:] for part in self))


class Views(NamedTuple):
    """What the network sees.

    Attributes:
        image: (B,C,H,W).
        patches: (B,P,C,h,w).
    """

    image: Tensor
    patches: Tensor


def draw_augmentation(count: int, *, policy: AugmentPolicy, generator: torch.Generator) -> Augmentation:
    """Draw the augmentation of `count` views, each on its own.

    Args:
        count: N; for `make_views` B * (1 + P).
        policy: what may happen.
        generator: on the CPU, whatever the device of the views: the host decides which views take which operation,
            so that it need never wait for the device.
    """
    if generator.device.type != "cpu":
        raise InputError("draw_augmentation", f"the generator is on {generator.device}", "give one on the CPU")
    slots = (count, policy.operations)
    flip = torch.rand(count, generator=generator) < policy.flip
    centre = torch.rand(count, 2, generator=generator)
    colour = torch.randint(256, (count, 3), generator=generator, dtype=torch.uint8)
    operation = torch.randint(len(OPERATIONS), slots, generator=generator)
    negative = torch.rand(slots, generator=generator) < 0.5
    full = torch.tensor([kind.full for kind in OPERATIONS.values()])[operation]
    signed = torch.tensor([kind.signed for kind in OPERATIONS.values()])[operation]
    strength = full * policy.magnitude / MAX_MAGNITUDE
    return Augmentation(
        flip,
        torch.cat([centre - policy.cutout / 2, centre + policy.cutout / 2], dim=1),
        colour,
        operation,
        torch.where(signed & negative, -strength, strength),
    )


@torch.no_grad()
def apply_augmentation(views: Tensor, augmentation: Augmentation) -> Tensor:
    """Flip, cover a box, then apply the drawn operations.

    Args:
        views: (N,3,H,W) uint8, on any device.
        augmentation: of N views.

    Returns:
        Views of the same shape and device; `views` is left as it is.
    """
    check_images(views, "apply_augmentation")
    if views.dtype != torch.uint8 or views.shape[1] != 3:
        wrong = f"views are {views.dtype} of shape {tuple(views.shape)}"
        raise InputError("apply_augmentation", wrong, "give uint8 RGB (N, 3, H, W)")
    _check_drawn(augmentation, views=len(views))
    with torch.autocast(views.device.type, enabled=False):  # grey levels and positions need more than 8 bits
        if augmentation.flip.any():
            flip = send_tensor(augmentation.flip, views.device)
            views = torch.where(flip[:, None, None, None], views.flip(-1), views)
        if (augmentation.cutout[:, :2] < augmentation.cutout[:, 2:]).any():
            views = _cover(views, augmentation)
        for operation, strength in zip(augmentation.operation.T, augmentation.strength.T, strict=True):
            views = _operate(views, operation, strength)
    return views


def _check_drawn(augmentation: Augmentation, *, views: int) -> None:
    if len(augmentation.flip) != views:
        wrong = f"{len(augmentation.flip)} augmentations for {views} views"
        raise InputError("apply_augmentation", wrong, "draw one a view, for a batch with patches B * (1 + P)")


def _cover(views: Tensor, augmentation: Augmentation) -> Tensor:
    """Fill each view's box: the pixels whose centre it holds."""
    top, left, bottom, right = send_tensor(augmentation.cutout, views.device)[..., None].unbind(1)
    height, width = views.shape[-2:]
    y = (torch.arange(height, device=views.device) + 0.5) / height
    x = (torch.arange(width, device=views.device) + 0.5) / width
    rows, columns = (top <= y) & (y < bottom), (left <= x) & (x < right)
    inside = rows[:, None, :, None] & columns[:, None, None, :]
    return torch.where(inside, send_tensor(augmentation.colour, views.device)[:, :, None, None], views)


def _operate(views: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    """Apply one operation (N,) of strength (N,) to each view: all that share one go together.

    Every launch costs the host time, whatever the number of views; those that only move pixels share theirs.
    """
    kinds, (height, width) = list(OPERATIONS.values()), views.shape[-2:]
    moving = torch.tensor([kind.matrix is not None for kind in kinds])
    order = torch.argsort(operation + len(kinds) * moving[operation], stable=True)  # the moving ones come last
    counts = operation.bincount(minlength=len(kinds)).tolist()
    first = sum(count for kind, count in zip(kinds, counts, strict=True) if kind.matrix is None)
    places, forces = send_tensor(order, views.device), strength[order]
    sent = send_tensor(forces, views.device).reshape(-1, 1, 1, 1)
    result, start, matrices = views.clone(), 0, []
    for kind, count in sorted(zip(kinds, counts, strict=True), key=lambda each: each[0].matrix is not None):
        part = slice(start, start + count)
        start += count
        if kind.matrix is not None:
            matrices.append(kind.matrix(forces[part], height, width))
        elif count and kind is not OPERATIONS["identity"]:
            result.index_copy_(0, places[part], kind.apply(views[places[part]], sent[part]))
    if first < len(order):
        moved = places[first:]
        matrix = send_tensor(torch.cat(matrices), views.device)
        result.index_copy_(0, moved, warp_views(views[moved], matrix))
    return result


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
    augmentation: Augmentation | None = None,
) -> Views:
    """Turn a batch from the loader into what the network sees.

    Args:
        images: (B,3,h,w) uint8 at the loader's size, on the device that is to do the work.
        size: H and W, the network's input.
        mean: (3,) of the network's normalisation, for pixels from 0 to 1; a tensor on the device spares a transfer.
        std: (3,) likewise.
        grid: patches per side, P = grid * grid; 0 for none.
        overlap: share of a patch's side that it has in common with its neighbour, in [0, 1).
        native: cut the patches from `images` rather than from the image resized to the network's input, so that
            they keep the detail of a larger source.
        patch_size: h and w of each patch; H and W by default.
        augmentation: of B * (1 + P) views, all images first, then the patches image by image; none by default.

    Returns:
        Views of (B,3,H,W) and (B,P,3,h,w), float32.
    """
    check_images(images, "make_views")
    if images.dtype != torch.uint8:
        raise InputError("make_views", f"images are {images.dtype}", "give uint8 as the loader does")
    views, count = resize_images(images, size), images.shape[0]
    scale = 1 / (255 * _per_channel(std, views.device))
    shift = -255 * scale * _per_channel(mean, views.device)
    if grid == 0:
        patches = views.new_empty(count, 0, *views.shape[1:])
    else:
        seen = size if patch_size is None else patch_size
        patches = cut_patches(images if native else views, grid=grid, overlap=overlap, size=seen)
    if patches.shape[3:] == views.shape[2:]:  # all at once
        views = _finish(stack_views(views, patches), augmentation, scale=scale, shift=shift)
        return Views(*split_views(views, patches=patches.shape[1]))
    drawn: tuple[Augmentation | None, Augmentation | None] = None, None
    if augmentation is not None:
        _check_drawn(augmentation, views=count * (1 + patches.shape[1]))
        drawn = augmentation.split(count)
    parts = _finish(patches.flatten(0, 1), drawn[1], scale=scale, shift=shift).unflatten(0, patches.shape[:2])
    return Views(_finish(views, drawn[0], scale=scale, shift=shift), parts)


def _finish(views: Tensor, augmentation: Augmentation | None, *, scale: Tensor, shift: Tensor) -> Tensor:
    """Augment and normalise views (N,3,H,W)."""
    if augmentation is not None:
        views = apply_augmentation(views, augmentation)
    return (views * scale).add_(shift)


def _per_channel(values: Sequence[float] | Tensor, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(values, dtype=torch.float32)
    return (tensor if tensor.device == device else send_tensor(tensor, device)).reshape(-1, 1, 1)
