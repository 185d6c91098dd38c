"""RandAugment's operations on a batch, each view with its own strength."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as TF

MAX_MAGNITUDE = 30
"""RandAugment's scale: 0 changes nothing, 30 is the strongest."""

Coefficients = tuple[Tensor | float, Tensor | float, Tensor | float]


class Operation(NamedTuple):
    """One operation.

    Attributes:
        apply: from views (N,3,H,W) uint8 and strength (N,1,1,1) to views of the same shape.
        full: the strength at `MAX_MAGNITUDE`, in the operation's own unit.
        signed: whether it goes both ways.
    """

    apply: Callable[[Tensor, Tensor], Tensor]
    full: float
    signed: bool


def _warp(views: Tensor, across: Coefficients, down: Coefficients) -> Tensor:
    """Fetch each pixel from the nearest place of another; what lies outside is black.

    Args:
        views: (N,C,H,W).
        across: a, b, c of the column `a * x + b * y + c` to fetch from, numbers or (N,1,1); x and y are pixels from
            the centre.
        down: the same for the row.
    """
    count, _, height, width = views.shape
    x = torch.arange(width, device=views.device) - (width - 1) / 2
    y = (torch.arange(height, device=views.device) - (height - 1) / 2)[:, None]

    # Written out: as a matrix product it would round to ten bits where TF32 is allowed, and miss by pixels.
    def fetch(row: Coefficients, extent: int) -> Tensor:
        return ((row[0] * x + row[1] * y + row[2]) * (2 / extent)).expand(count, height, width)

    grid = torch.stack([fetch(across, width), fetch(down, height)], dim=-1)
    return F.grid_sample(views.float(), grid, mode="nearest", align_corners=False).to(torch.uint8)


def _rotate(views: Tensor, strength: Tensor) -> Tensor:
    angle = torch.deg2rad(strength[:, 0])
    return _warp(views, (angle.cos(), -angle.sin(), 0), (angle.sin(), angle.cos(), 0))


# A shear leaves the first row or column where it is, as in torchvision.
def _shear_x(views: Tensor, strength: Tensor) -> Tensor:
    slope = strength[:, 0]
    return _warp(views, (1, slope, slope * (views.shape[-2] / 2)), (0, 1, 0))


def _shear_y(views: Tensor, strength: Tensor) -> Tensor:
    slope = strength[:, 0]
    return _warp(views, (1, 0, 0), (slope, 1, slope * (views.shape[-1] / 2)))


def _translate_x(views: Tensor, strength: Tensor) -> Tensor:
    return _warp(views, (1, 0, -(strength[:, 0] * views.shape[-1]).trunc()), (0, 1, 0))


def _translate_y(views: Tensor, strength: Tensor) -> Tensor:
    return _warp(views, (1, 0, 0), (0, 1, -(strength[:, 0] * views.shape[-2]).trunc()))


def _blend(views: Tensor, plain: Tensor, strength: Tensor) -> Tensor:
    """Move away from a plain version of the view (strength above 0) or towards it, -1 being the plain one."""
    blended = torch.lerp(plain.expand_as(views), views.float(), 1 + strength)
    return blended.round_().clamp_(0, 255).to(torch.uint8)


def _brightness(views: Tensor, strength: Tensor) -> Tensor:
    return _blend(views, views.new_zeros(1, dtype=torch.float32), strength)


def _color(views: Tensor, strength: Tensor) -> Tensor:
    return _blend(views, TF.rgb_to_grayscale(views.float()), strength)


def _contrast(views: Tensor, strength: Tensor) -> Tensor:
    return _blend(views, TF.rgb_to_grayscale(views.float()).mean(dim=(1, 2, 3), keepdim=True), strength)


def _sharpness(views: Tensor, strength: Tensor) -> Tensor:
    """Away from a blur whose centre weighs 5 and whose eight neighbours weigh 1; the border has no blur."""
    smooth = views.float()
    rows = smooth[..., :-2, :] + smooth[..., 1:-1, :] + smooth[..., 2:, :]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = smooth[..., 1:-1, 1:-1]
    inner.copy_(around.add_(inner, alpha=4).div_(13).round_())
    return _blend(views, smooth, strength)


def _posterize(views: Tensor, strength: Tensor) -> Tensor:
    return views & (255 << strength.round().int()).to(torch.uint8)


def _solarize(views: Tensor, strength: Tensor) -> Tensor:
    return torch.where(views >= 255 - strength, 255 - views, views)


OPERATIONS: Mapping[str, Operation] = {
    "identity": Operation(lambda views, _: views, 0, False),
    "shear_x": Operation(_shear_x, 0.3, True),  # columns a row
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
