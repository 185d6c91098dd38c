"""Augment the views of a batch on its device, each on its own: crop, flip, cutout and RandAugment's operations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as TF

from pivotpatch.accel.device import call_compiled, choose_compiled, send_tensor
from pivotpatch.core.patches import crop_images

STEPS = 9
"""Magnitudes of the published operations, from 1."""
_MAX_MAGNITUDE = 30  # of torchvision's: 0 changes nothing, 30 is the strongest
_GREY = 128  # what the published operations see outside a view
_BOX = (125, 122, 113)  # the colour of the published cutout


@dataclass(frozen=True)
class AugmentPolicy:
    """What augmentation may do."""

    flip: float = 0.0  # probability of a horizontal flip
    cutout: float = 0.5  # side of the box that one random colour covers, as a part of the view's side; 0 for none
    operations: int = 2  # how many of RandAugment's operations follow, drawn with replacement
    # "torchvision": its fourteen operations, all of one magnitude; "published": the fifteen of the paper's
    # training code, each applied with probability 0.5, its magnitude drawn from nine steps.
    randaugment: Literal["torchvision", "published"] = "torchvision"
    magnitude: float = 9  # of torchvision's, 0 to 30
    # Smallest side of a crop that is enlarged to the view, as a part of the view's; both sides are drawn from it
    # to 1, the place from all that there are. 1 for none.
    crop: float = 1.0


class Augmentation(NamedTuple):
    """What happens to each of N views, as drawn; on the CPU."""

    crop: Tensor  # (N,2,2) first and last column, then row, of what is enlarged to the view, as parts of the sides
    flip: Tensor  # (N,) bool
    cutout: Tensor  # (N,4) top, left, bottom, right of the covered box, as parts of the side; may leave the view
    colour: Tensor  # (N,3) uint8 that covers it
    operation: Tensor  # (N,K) positions among torchvision's operations and then the published ones, in order
    strength: Tensor  # (N,K) of each, in its own unit
    place: Tensor  # (N,K,2) row and column of it, as parts of the sides, for those that have a place

    def split(self, count: int) -> tuple["Augmentation", "Augmentation"]:
        """That of the first `count` views, and that of the others."""
        return Augmentation(*(part[:count] for part in self)), Augmentation(*(part[count:] for part in self))

    def select(self, rows: Tensor) -> "Augmentation":
        """That of the views that `rows` (M,) names, in that order."""
        return Augmentation(*(part[rows] for part in self))

    @torch.no_grad()
    def apply(self, views: Tensor, *, compiled: bool = False) -> Tensor:
        """Crop, flip, cover a box, then apply the drawn operations.

        Args:
            views: (N,3,H,W) uint8, on any device; left as they are.
            compiled: compile each operation at its first use, which takes seconds; on a GPU it then passes over the
                pixels once and not several times.

        Returns:
            Views of the same shape and device.
        """
        assert views.dtype == torch.uint8, views.dtype
        assert views.shape[:2] == (len(self.flip), 3), views.shape
        with torch.autocast(views.device.type, enabled=False):  # grey levels and positions need more than 8 bits
            views = views.contiguous()
            crop, flip, cutout, colour = (send_tensor(part, views.device) for part in self[:4])
            if (self.crop[..., 1] - self.crop[..., 0] < 1).any():
                views = choose_compiled(_crop, compiled=compiled)(views, crop)
            if self.flip.any():
                views = choose_compiled(_flip, compiled=compiled)(views, flip)
            if (self.cutout[:, :2] < self.cutout[:, 2:]).any():
                views = choose_compiled(_cover, compiled=compiled)(views, cutout, colour)
            for drawn in zip(*(part.unbind(1) for part in self[4:]), strict=True):
                views = _operate(views, *drawn, compiled=compiled)
            return views


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
        operation = torch.where(applied, operation + len(OPERATIONS), list(OPERATIONS).index("identity"))
    else:
        strength = full * policy.magnitude / _MAX_MAGNITUDE
    crop = torch.tensor([0.0, 1.0]).expand(count, 2, 2)
    if policy.crop < 1:  # drawn last, so that all else is what it is without
        sides = policy.crop + (1 - policy.crop) * torch.rand(count, 2, generator=generator)
        first = (1 - sides) * torch.rand(count, 2, generator=generator)
        crop = torch.stack([first, first + sides], dim=2)
    return Augmentation(
        crop,
        flip,
        torch.cat([centre - policy.cutout / 2, centre + policy.cutout / 2], dim=1),
        colour,
        operation,
        torch.where(signed & negative, -strength, strength),
        place,
    )


def _crop(views: Tensor, crop: Tensor) -> Tensor:
    """Enlarge a part of each view."""
    return _to_bytes(crop_images(views.float(), *crop[:, :, None].unbind(1))[:, 0] + 0.5)


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
    kinds, order = (*OPERATIONS.values(), *PUBLISHED.values()), operation.argsort(stable=True)
    counts = operation.bincount(minlength=len(kinds)).tolist()
    groups = _take(views, order).split(counts)
    strengths = send_tensor(strength[order], views.device).reshape(-1, 1, 1, 1).split(counts)
    places = send_tensor(place[order], views.device).split(counts)
    results = []
    for kind, group, *drawn in zip(kinds, groups, strengths, places, strict=True):
        if len(group):
            apply = partial(call_compiled, kind.apply) if compiled else kind.apply
            results.append(apply(group, *drawn[: 1 + kind.placed]))
    return _take(torch.cat(results), order.argsort())


def _take(views: Tensor, rows: Tensor) -> Tensor:
    """Views of these rows, eight bytes at a time where possible: a GPU moves them in the time of one."""
    words = views.view(torch.int64) if views.shape[-1] % 8 == 0 else views
    return words[send_tensor(rows, views.device)].view(torch.uint8)


class Operation(NamedTuple):
    """One operation."""

    apply: Callable[..., Tensor]  # from views (N,3,H,W) uint8 and strength (N,1,1,1) to views of the same shape
    full: float = 0  # the strength at the largest magnitude, in the operation's own unit
    signed: bool = False  # whether it goes both ways
    placed: bool = False  # whether `apply` also takes a random place (N,2), row and column as parts of the sides


def _warp(
    views: Tensor,
    *,
    column: Sequence[Tensor | float] = (1, 0, 0),
    row: Sequence[Tensor | float] = (0, 1, 0),
    fill: int = 0,
) -> Tensor:
    """Fetch each pixel of views (N,3,H,W) from the nearest place of another; what lies outside has the level `fill`.

    From the column `a x + b y + c` and the row `d x + e y + f`, each of these a number or (N,1,1,1); x and y are pixels
    from the centre.
    """
    height, width = views.shape[-2:]
    x = torch.arange(width, device=views.device) - (width - 1) / 2
    y = (torch.arange(height, device=views.device) - (height - 1) / 2)[:, None]
    # Written out: as a matrix product it would round to ten bits where TF32 is allowed, and miss by pixels.
    (a, b, c), (d, e, f) = column, row
    across = (b * y + c) * (2 / width) + (a * (2 / width)) * x
    down = (e * y + f) * (2 / height) + (d * (2 / height)) * x
    places = torch.stack(torch.broadcast_tensors(across, down), dim=-1).expand(len(views), 1, -1, -1, -1)[:, 0]
    levels = F.grid_sample(views.float() - fill, places, mode="nearest", align_corners=False)
    return (levels + fill).to(torch.uint8)


def _rotate(views: Tensor, strength: Tensor, fill: int = 0) -> Tensor:
    angle = torch.deg2rad(strength)
    return _warp(views, column=(angle.cos(), -angle.sin(), 0), row=(angle.sin(), angle.cos(), 0), fill=fill)


def _to_bytes(levels: Tensor) -> Tensor:
    """Grey levels that lie half a level too high, as bytes: what is cut off rounds them. `levels` are overwritten."""
    return levels.clamp_(0, 255).to(torch.uint8)


def _blend(views: Tensor, plain: Tensor | float, strength: Tensor) -> Tensor:
    """Move away from a plain version of the view (strength above 0) or towards it, -1 being the plain one."""
    return _to_bytes(torch.addcmul(0.5 - strength * plain, views, 1 + strength))


def _grey(colours: Tensor) -> Tensor:
    """What red, green and blue (N,3,H,W) are without colour, (N,1,H,W)."""
    red, green, blue = colours.split(1, dim=1)
    grey: Tensor = red * 0.2989
    return grey.add_(green, alpha=0.587).add_(blue, alpha=0.114)


def _contrast(views: Tensor, strength: Tensor) -> Tensor:
    total = views.sum(dim=(2, 3), keepdim=True)  # in whole numbers: the same, however many views there are
    return _blend(views, _grey(total) / views[0, 0].numel(), strength)


def _sharpness(views: Tensor, strength: Tensor) -> Tensor:
    """Away from a blur whose centre weighs 5 and whose eight neighbours weigh 1; the border has no blur."""
    levels = views.float()
    around = F.avg_pool2d(levels, 3, stride=1, padding=1, divisor_override=1)  # the sum of nine
    inner, smooth = (each[..., 1:-1, 1:-1] for each in (levels, around))
    smooth.add_(inner, alpha=4).div_(13).round_()
    inner.lerp_(smooth, -strength)
    return _to_bytes(levels.add_(0.5))


OPERATIONS: Mapping[str, Operation] = {
    "identity": Operation(lambda views, _: views),
    # Columns per row; the first row, or column, stays where it is.
    "shear_x": Operation(lambda v, by: _warp(v, column=(1, by, by * (v.shape[-2] / 2))), 0.3, signed=True),
    "shear_y": Operation(lambda v, by: _warp(v, row=(by, 1, by * (v.shape[-1] / 2))), 0.3, signed=True),
    # Of the side.
    "translate_x": Operation(
        lambda v, by: _warp(v, column=(1, 0, -(by * v.shape[-1]).trunc())), 150 / 331, signed=True
    ),
    "translate_y": Operation(lambda v, by: _warp(v, row=(0, 1, -(by * v.shape[-2]).trunc())), 150 / 331, signed=True),
    "rotate": Operation(_rotate, 30, signed=True),  # degrees, counter-clockwise
    "brightness": Operation(lambda v, by: _blend(v, 0.0, by), 0.9, signed=True),
    "color": Operation(lambda v, by: _blend(v, _grey(v), by), 0.9, signed=True),
    "contrast": Operation(_contrast, 0.9, signed=True),
    "sharpness": Operation(_sharpness, 0.9, signed=True),
    "posterize": Operation(lambda v, by: v & (255 << by.round().int()).to(torch.uint8), 4),  # bits lost
    # Grey levels that are inverted, from the top.
    "solarize": Operation(lambda v, by: torch.where(v >= 255 - by, 255 - v, v), 255),
    "autocontrast": Operation(lambda views, _: TF.autocontrast(views)),
    "equalize": Operation(lambda views, _: TF.equalize(views)),
}
"""RandAugment's fourteen, with torchvision's ranges."""


def _shear_rows(views: Tensor, strength: Tensor) -> Tensor:
    """Shift each row by its own distance with Pillow's bicubic filter; what lies outside is grey."""
    height, width = views.shape[-2:]
    y = torch.arange(height, device=views.device)[:, None] + 0.5
    places = torch.arange(width, device=views.device) + strength * y
    first = places.floor()
    part = places - first

    def fetch(step: int) -> Tensor:
        index = (first + step).clamp(0, width - 1).long().expand(-1, 3, -1, -1)
        return views.gather(3, index).float()

    before, here, after, beyond = (fetch(step) for step in (-1, 0, 1, 2))
    curve = 2 * (before - here) + after - beyond + part * (here - before + beyond - after)
    levels = here + part * (after - before + part * curve)
    inside = (places >= -0.5) & (places < width - 0.5)
    return torch.where(inside, levels.clamp(0, 255), _GREY).to(torch.uint8)


def _cover_box(views: Tensor, strength: Tensor, place: Tensor) -> Tensor:
    """Fill a box of about `strength` pixels per side around a random pixel."""
    half = strength.flatten().round() // 2
    height, width = views.shape[-2:]
    row, column = (place[:, 0] * height).floor(), (place[:, 1] * width).floor()
    box = [(row - half) / height, (column - half) / width, (row + half) / height, (column + half) / width]
    return _cover(views, torch.stack(box, dim=1), views.new_tensor([_BOX]))


PUBLISHED: Mapping[str, Operation] = {
    "invert": Operation(lambda views, _: 255 - views),
    "cutout": Operation(_cover_box, 20, placed=True),  # pixels
    "sharpness": OPERATIONS["sharpness"],
    "autocontrast": OPERATIONS["autocontrast"],
    "posterize": OPERATIONS["posterize"],
    "shear_x": Operation(_shear_rows, 0.3, signed=True),
    "translate_x": Operation(
        lambda v, by: _warp(v, column=(1, 0, by * v.shape[-1]), fill=_GREY), 150 / 331, signed=True
    ),
    "translate_y": Operation(lambda v, by: _warp(v, row=(0, 1, by * v.shape[-2]), fill=_GREY), 150 / 331, signed=True),
    "shear_y": Operation(
        lambda v, by: _shear_rows(v.transpose(2, 3), by).transpose(2, 3).contiguous(), 0.3, signed=True
    ),
    "rotate": Operation(lambda v, by: _rotate(v, by, _GREY), 30),
    "equalize": OPERATIONS["equalize"],
    "contrast": OPERATIONS["contrast"],
    "color": OPERATIONS["color"],
    "solarize": Operation(lambda v, by: torch.where(v >= 256 - by, 255 - v, v), 256),
    "brightness": OPERATIONS["brightness"],
}
"""The fifteen of the published training code, with its ranges."""
