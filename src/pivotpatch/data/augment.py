"""Augment the views of a batch on its device, each on its own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pivotpatch.accel.device import send_tensor
from pivotpatch.core.patches import check_images
from pivotpatch.data.augment_ops import MAX_MAGNITUDE, OPERATIONS, warp_views
from pivotpatch.errors import InputError


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


def _choose(function: Callable[..., Tensor], *, compiled: bool) -> Callable[..., Tensor]:
    """A function, or what it is compiled to."""
    return _compile(function) if compiled else function


@cache
def _compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)  # the number of views becomes a variable once it has changed


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
    if views.dtype != torch.uint8 or views.shape[1] != 3:
        wrong = f"views are {views.dtype} of shape {tuple(views.shape)}"
        raise InputError("apply_augmentation", wrong, "give uint8 RGB (N, 3, H, W)")
    if len(augmentation.flip) != len(views):
        wrong = f"{len(augmentation.flip)} augmentations for {len(views)} views"
        raise InputError("apply_augmentation", wrong, "draw one a view, for a batch with patches B * (1 + P)")
    with torch.autocast(views.device.type, enabled=False):  # grey levels and positions need more than 8 bits
        views = views.contiguous()
        if augmentation.flip.any():
            views = _flip(views, augmentation.flip)
        if (augmentation.cutout[:, :2] < augmentation.cutout[:, 2:]).any():
            views = _cover(views, augmentation, compiled=compiled)
        rows = torch.arange(len(views))
        for operation, strength in zip(augmentation.operation.T, augmentation.strength.T, strict=True):
            views, rows = _operate(views, rows, operation=operation, strength=strength, compiled=compiled)
        return views if augmentation.operation.shape[1] == 0 else _gather(views, send_tensor(rows, views.device))


def _as_words(views: Tensor) -> Tensor:
    """The same memory eight bytes at a time, where its rows allow it: a GPU moves them in the time of one."""
    return views.view(torch.int64) if views.shape[-1] % 8 == 0 else views


def _gather(views: Tensor, rows: Tensor) -> Tensor:
    return _as_words(views)[rows].view(torch.uint8)


def _join(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([_as_words(part.contiguous()) for part in parts]).view(torch.uint8)


def _flip(views: Tensor, flip: Tensor) -> Tensor:
    """Flip some views."""
    result, rows = views.clone(), send_tensor(flip.nonzero().flatten(), views.device)
    _as_words(result).index_copy_(0, rows, _as_words(_gather(views, rows).flip(-1)))
    return result


def _cover(views: Tensor, augmentation: Augmentation, *, compiled: bool) -> Tensor:
    """Fill each view's box: the pixels whose centre it holds."""
    top, left, bottom, right = send_tensor(augmentation.cutout, views.device)[:, :, None, None, None].unbind(1)
    height, width = views.shape[-2:]
    y = ((torch.arange(height, device=views.device) + 0.5) / height)[:, None]
    x = (torch.arange(width, device=views.device) + 0.5) / width
    words = _as_words(views)
    colour = send_tensor(augmentation.colour, views.device)[:, :, None, None].expand(-1, -1, 1, words.element_size())
    # All bits of what a box holds, none of the rest: such masks work on words of any size.
    rows = -((top <= y) & (y < bottom)).to(words.dtype)
    columns = _as_words(-((left <= x) & (x < right)).to(torch.uint8))
    paint = _choose(_paint, compiled=compiled)
    return paint(words, colour.contiguous().view(words.dtype), rows & columns).view(torch.uint8)


def _paint(words: Tensor, colour: Tensor, mask: Tensor) -> Tensor:
    """The bits of the colour where the mask has them, else those that are there."""
    return (words ^ colour).bitwise_and_(mask).bitwise_xor_(words)


class _Moved(NamedTuple):
    """Views in another order.

    Attributes:
        views: (N,3,H,W).
        rows: (N,) on the CPU, where each of them lies now.
    """

    views: Tensor
    rows: Tensor


def _operate(views: Tensor, rows: Tensor, *, operation: Tensor, strength: Tensor, compiled: bool) -> _Moved:
    """Apply one operation (N,) of strength (N,) to each view, which lies in its row (N,): all that share one together.

    Every launch costs the host time, whatever the number of views; those that only move pixels share theirs. Results
    stay in the order of the operations, so that they are written once.
    """
    kinds, (height, width) = list(OPERATIONS.values()), views.shape[-2:]
    moving = torch.tensor([kind.matrix is not None for kind in kinds])
    order = torch.argsort(operation + len(kinds) * moving[operation], stable=True)  # the moving ones come last
    counts = operation.bincount(minlength=len(kinds)).tolist()
    places, forces = send_tensor(rows[order], views.device), strength[order]
    sent = send_tensor(forces, views.device).reshape(-1, 1, 1, 1)
    results, start, matrices = [], 0, []
    for kind, count in sorted(zip(kinds, counts, strict=True), key=lambda each: each[0].matrix is not None):
        part = slice(start, start + count)
        start += count
        if kind.matrix is not None:
            matrices.append(kind.matrix(forces[part], height, width))
        elif count:
            apply = _choose(kind.apply, compiled=compiled)
            results.append(apply(_gather(views, places[part]), sent[part]))
    matrix = torch.cat(matrices)
    if len(matrix):
        warp = _choose(warp_views, compiled=compiled)
        results.append(warp(_gather(views, places[-len(matrix) :]), send_tensor(matrix, views.device)))
    return _Moved(_join(results), order.argsort())
