"""RandAugment's operations on a batch, each view with its own strength."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as TF

MAX_MAGNITUDE = 30
"""RandAugment's scale: 0 changes nothing, 30 is the strongest."""


class Operation(NamedTuple):
    """One operation.

    Attributes:
        apply: from views (N,3,H,W) uint8 and strength (N,1,1,1) to views of the same shape.
        full: the strength at the largest magnitude, in the operation's own unit.
        signed: whether it goes both ways.
        placed: whether `apply` also takes a random place (N,2), row and column as parts of the sides.
    """

    apply: Callable[..., Tensor]
    full: float
    signed: bool
    placed: bool = False


Number = Tensor | float


def _warp(views: Tensor, a: Number, b: Number, c: Number, d: Number, e: Number, f: Number, *, fill: int = 0) -> Tensor:
    """Fetch each pixel of views (N,3,H,W) from the nearest place of another; what lies outside has the level `fill`.

    From the column `a x + b y + c` and the row `d x + e y + f`, each a number or (N,1,1,1); x and y are pixels from
    the centre.
    """
    height, width = views.shape[-2:]
    x = torch.arange(width, device=views.device) - (width - 1) / 2
    y = (torch.arange(height, device=views.device) - (height - 1) / 2)[:, None]
    # Written out: as a matrix product it would round to ten bits where TF32 is allowed, and miss by pixels.
    column = (b * y + c) * (2 / width) + (a * (2 / width)) * x
    row = (e * y + f) * (2 / height) + (d * (2 / height)) * x
    places = torch.stack(torch.broadcast_tensors(column, row), dim=-1).expand(len(views), 1, -1, -1, -1)[:, 0]
    levels = F.grid_sample(views.float() - fill, places, mode="nearest", align_corners=False)
    return (levels + fill).to(torch.uint8)


def _rotate(views: Tensor, strength: Tensor) -> Tensor:
    angle = torch.deg2rad(strength)
    return _warp(views, angle.cos(), -angle.sin(), 0, angle.sin(), angle.cos(), 0)


# A shear leaves the first row or column where it is, as in torchvision.
def _shear_x(views: Tensor, strength: Tensor) -> Tensor:
    return _warp(views, 1, strength, strength * (views.shape[-2] / 2), 0, 1, 0)


def _shear_y(views: Tensor, strength: Tensor) -> Tensor:
    return _warp(views, 1, 0, 0, strength, 1, strength * (views.shape[-1] / 2))


def _translate_x(views: Tensor, strength: Tensor) -> Tensor:
    return _warp(views, 1, 0, -(strength * views.shape[-1]).trunc(), 0, 1, 0)


def _translate_y(views: Tensor, strength: Tensor) -> Tensor:
    return _warp(views, 1, 0, 0, 0, 1, -(strength * views.shape[-2]).trunc())


def _to_bytes(levels: Tensor) -> Tensor:
    """Grey levels that lie half a level too high, as bytes: what is cut off rounds them. `levels` are overwritten."""
    return levels.clamp_(0, 255).to(torch.uint8)


def _blend(views: Tensor, plain: Tensor | float, strength: Tensor) -> Tensor:
    """Move away from a plain version of the view (strength above 0) or towards it, -1 being the plain one."""
    return _to_bytes(torch.addcmul(0.5 - strength * plain, views, 1 + strength))


def _brightness(views: Tensor, strength: Tensor) -> Tensor:
    return _blend(views, 0.0, strength)


def _grey(colours: Tensor) -> Tensor:
    """What red, green and blue (N,3,H,W) are without colour, (N,1,H,W)."""
    red, green, blue = colours.split(1, dim=1)
    grey: Tensor = red * 0.2989
    return grey.add_(green, alpha=0.587).add_(blue, alpha=0.114)


def _color(views: Tensor, strength: Tensor) -> Tensor:
    return _blend(views, _grey(views), strength)


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


def _posterize(views: Tensor, strength: Tensor) -> Tensor:
    return views & (255 << strength.round().int()).to(torch.uint8)


def _solarize(views: Tensor, strength: Tensor) -> Tensor:
    return torch.where(views >= 255 - strength, 255 - views, views)


OPERATIONS: Mapping[str, Operation] = {
    "identity": Operation(lambda views, _: views, 0, False),
    "shear_x": Operation(_shear_x, 0.3, True),  # columns per row
    "shear_y": Operation(_shear_y, 0.3, True),
    "translate_x": Operation(_translate_x, 150 / 331, True),  # of the width
    "translate_y": Operation(_translate_y, 150 / 331, True),
    "rotate": Operation(_rotate, 30, True),  # degrees, counter-clockwise
    "brightness": Operation(_brightness, 0.9, True),
    "color": Operation(_color, 0.9, True),
    "contrast": Operation(_contrast, 0.9, True),
    "sharpness": Operation(_sharpness, 0.9, True),
    "posterize": Operation(_posterize, 4, False),  # bits lost
    "solarize": Operation(_solarize, 255, False),  # grey levels that are inverted, from the top
    "autocontrast": Operation(lambda views, _: TF.autocontrast(views), 0, False),
    "equalize": Operation(lambda views, _: TF.equalize(views), 0, False),
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
    return torch.where(inside, levels.clamp(0, 255), GREY).to(torch.uint8)


def _shear_columns(views: Tensor, strength: Tensor) -> Tensor:
    return _shear_rows(views.transpose(2, 3), strength).transpose(2, 3).contiguous()


def _rotate_grey(views: Tensor, strength: Tensor) -> Tensor:
    angle = torch.deg2rad(strength)
    return _warp(views, angle.cos(), -angle.sin(), 0, angle.sin(), angle.cos(), 0, fill=GREY)


def _cover_box(views: Tensor, strength: Tensor, place: Tensor) -> Tensor:
    """Fill a box of about `strength` pixels per side around a random pixel."""
    half = strength.round() // 2
    height, width = views.shape[-2:]
    row, column = ((place[:, at, None, None, None] * side).floor() for at, side in enumerate((height, width)))
    y = torch.arange(height, device=views.device)[:, None]
    x = torch.arange(width, device=views.device)
    inside = (y >= row - half) & (y < row + half) & (x >= column - half) & (x < column + half)
    return torch.where(inside, views.new_tensor(_BOX)[:, None, None], views)


GREY = 128
_BOX = (125, 122, 113)
STEPS = 9
"""Magnitudes of the published operations, from 1."""
PUBLISHED: Mapping[str, Operation] = {
    "invert": Operation(lambda views, _: 255 - views, 0, False),
    "cutout": Operation(_cover_box, 20, False, placed=True),  # pixels
    "sharpness": Operation(_sharpness, 0.9, True),
    "autocontrast": OPERATIONS["autocontrast"],
    "posterize": Operation(_posterize, 4, False),  # bits lost
    "shear_x": Operation(_shear_rows, 0.3, True),
    "translate_x": Operation(
        lambda views, strength: _warp(views, 1, 0, strength * views.shape[-1], 0, 1, 0, fill=GREY), 150 / 331, True
    ),
    "translate_y": Operation(
        lambda views, strength: _warp(views, 1, 0, 0, 0, 1, strength * views.shape[-2], fill=GREY), 150 / 331, True
    ),
    "shear_y": Operation(_shear_columns, 0.3, True),
    "rotate": Operation(_rotate_grey, 30, False),
    "equalize": OPERATIONS["equalize"],
    "contrast": Operation(_contrast, 0.9, True),
    "color": Operation(_color, 0.9, True),
    "solarize": Operation(lambda views, strength: torch.where(views >= 256 - strength, 255 - views, views), 256, False),
    "brightness": Operation(_brightness, 0.9, True),
}
"""The fifteen of the published training code, with its ranges."""
