"""Augment the views of a batch on its device, each on its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pivotpatch.accel.device import send_tensor
from pivotpatch.core.patches import check_images
from pivotpatch.data.augment_ops import MAX_MAGNITUDE, OPERATIONS, PUBLISHED, STEPS
from pivotpatch.errors import InputError

_ALL = (*OPERATIONS.values(), *PUBLISHED.values())
_IDENTITY = list(OPERATIONS).index("identity")


@dataclass(frozen=True)
class AugmentPolicy:
    """What augmentation may do.

    Attributes:
        flip: probability of a horizontal flip.
        cutout: side of the box that one random colour covers, as a part of the view's side; 0 for none.
        operations: how many of RandAugment's operations follow, drawn with replacement.
        randaugment: "torchvision": its fourteen operations, all of one magnitude; "published": the fifteen of the
            paper's training code, each applied with probability 0.5, its magnitude drawn from nine steps.
        magnitude: of torchvision's, 0 to 30.
    """

    flip: float = 0.0
    cutout: float = 0.5
    operations: int = 2
    randaugment: Literal["torchvision", "published"] = "torchvision"
    magnitude: float = 9


class Augmentation(NamedTuple):
    """What happens to each of N views, as drawn; on the CPU.

    Attributes:
        flip: (N,) bool.
        cutout: (N,4) top, left, bottom, right of the covered box, as parts of the side; may leave the view.
        colour: (N,3) uint8 that covers it.
        operation: (N,K) positions among torchvision's operations and then the published ones, applied one after the
            other.
        strength: (N,K) of each, in its own unit.
        place: (N,K,2) row and column of it, as parts of the sides, for those that have a place.
    """

    flip: Tensor
    cutout: Tensor
    colour: Tensor
    operation: Tensor
    strength: Tensor
    place: Tensor

    def split(self, count: int) -> tuple["Augmentation", "Augmentation"]:
        """That of the first `count` views, and that of the others."""
        return Augmentation(*(part[:count] for part in self)), Augmentation(*(part[count:] for part in self))

    def select(self, rows: Tensor) -> "Augmentation":
        """That of the views that `rows` (M,) names, in that order."""
        return Augmentation(*(part[rows] for part in self))

    def apply(self, views: Tensor, *, compiled: bool = False) -> Tensor:
        """Augment views (N,3,H,W); see `apply_augmentation`."""
        return apply_augmentation(views, self, compiled=compiled)


def draw_augmentation(count: int, *, policy: AugmentPolicy, generator: torch.Generator) -> Augmentation:
    """Draw the augmentation of `count` views, each on its own.

    Args:
        count: N; for `make_views` B * (1 + P).
        policy: what may happen.
        generator: on the CPU, whatever the device of the views: the host decides which views take which operation,
            so that it need never wait for the device.
    """
    slots, published = (count, policy.operations), policy.randaugment == "published"
    flip = torch.rand(count, generator=generator) < policy.flip
    centre = torch.rand(count, 2, generator=generator)
    colour = torch.randint(256, (count, 3), generator=generator, dtype=torch.uint8)
    kinds = PUBLISHED if published else OPERATIONS
    operation = torch.randint(len(kinds), slots, generator=generator)
    negative = torch.rand(slots, generator=generator) < 0.5
    full = torch.tensor([kind.full for kind in kinds.values()])[operation]
    signed = torch.tensor([kind.signed for kind in kinds.values()])[operation]
    place = torch.zeros(*slots, 2)
    if published:
        strength = full * torch.randint(1, STEPS + 1, slots, generator=generator) / STEPS
        place = torch.rand(*slots, 2, generator=generator)
        applied = torch.rand(slots, generator=generator) < 0.5
        operation = torch.where(applied, operation + len(OPERATIONS), _IDENTITY)
    else:
        strength = full * policy.magnitude / MAX_MAGNITUDE
    return Augmentation(
        flip,
        torch.cat([centre - policy.cutout / 2, centre + policy.cutout / 2], dim=1),
        colour,
        operation,
        torch.where(signed & negative, -strength, strength),
        place,
    )


@torch.no_grad()
def apply_augmentation(views: Tensor, augmentation: Augmentation, *, compiled: bool = False) -> Tensor:
    """Flip, cover a box, then apply the drawn operations.

    Args:
        views: (N,3,H,W) uint8, on any device.
        augmentation: of N views.
        compiled: compile each operation at its first use, which takes seconds; on a GPU it then passes over the pixels
            once and not several times.

    Returns:
        Views of the same shape and device; `views` is left as it is.
    """
    check_images(views, "apply_augmentation")
    if views.dtype != torch.uint8 or views.shape[1] != 3 or len(views) != len(augmentation.flip):
        wrong = f"{len(augmentation.flip)} augmentations for views of shape {tuple(views.shape)}, {views.dtype}"
        raise InputError("apply_augmentation", wrong, "draw B * (1 + P) for uint8 RGB views (B * (1 + P), 3, H, W)")
    with torch.autocast(views.device.type, enabled=False):  # grey levels and positions need more than 8 bits
        views = views.contiguous()
        flip, cutout, colour = (send_tensor(part, views.device) for part in augmentation[:3])
        if augmentation.flip.any():
            views = _choose(_flip, compiled=compiled)(views, flip)
        if (augmentation.cutout[:, :2] < augmentation.cutout[:, 2:]).any():
            views = _choose(_cover, compiled=compiled)(views, cutout, colour)
        for slot in range(augmentation.operation.shape[1]):
            drawn = (augmentation.operation[:, slot], augmentation.strength[:, slot], augmentation.place[:, slot])
            views = _operate(views, *drawn, compiled=compiled)
        return views


def _choose(function: Callable[..., Tensor], *, compiled: bool) -> Callable[..., Tensor]:
    """A function, or what it is compiled to."""
    return _compile(function) if compiled else function


@cache
def _compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)  # the number of views becomes a variable once it has changed


def _flip(views: Tensor, flip: Tensor) -> Tensor:
    """Flip some views."""
    return torch.where(flip[:, None, None, None], views.flip(-1), views)


def _cover(views: Tensor, cutout: Tensor, colour: Tensor) -> Tensor:
    """Fill each view's box: the pixels whose centre it holds."""
    top, left, bottom, right = cutout[:, :, None, None, None].unbind(1)
    height, width = views.shape[-2:]
    y = ((torch.arange(height, device=views.device) + 0.5) / height)[:, None]
    x = (torch.arange(width, device=views.device) + 0.5) / width
    inside = (top <= y) & (y < bottom) & (left <= x) & (x < right)
    return torch.where(inside, colour[:, :, None, None], views)


def _operate(views: Tensor, operation: Tensor, strength: Tensor, place: Tensor, *, compiled: bool) -> Tensor:
    """Apply one operation (N,) of strength (N,) at a place (N,2) to each view, all that share one together."""
    order = operation.argsort(stable=True)
    counts = operation.bincount(minlength=len(_ALL)).tolist()
    groups = _take(views, order).split(counts)
    strengths = send_tensor(strength[order], views.device).reshape(-1, 1, 1, 1).split(counts)
    places = send_tensor(place[order], views.device).split(counts)
    results = []
    for kind, group, force, where in zip(_ALL, groups, strengths, places, strict=True):
        if len(group):
            apply = _choose(kind.apply, compiled=compiled)
            results.append(apply(group, force, where) if kind.placed else apply(group, force))
    return _take(torch.cat(results), order.argsort())


def _take(views: Tensor, rows: Tensor) -> Tensor:
    """Views of these rows, eight bytes at a time where possible: a GPU moves them in the time of one."""
    words = views.view(torch.int64) if views.shape[-1] % 8 == 0 else views
    return words[send_tensor(rows, views.device)].view(torch.uint8)
