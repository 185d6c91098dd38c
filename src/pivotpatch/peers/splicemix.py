"""After SpliceMix (Wang et al., 2023): grids of shrunken images join a batch, with the labels of all; docs/peers.md.

With consistency, what the head says of a cell of a grid's feature map is drawn to what it says of the whole image.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

GRIDS, CHANCES = ((1, 2), (2, 2), (2, 3)), (0.3, 0.4, 0.3)
"""Rows and columns of grids, and how likely each is."""
BLANKED = 0.3
"""How likely it is that some cells of a grid are blank."""


def draw_cells(images: int, *, share: float) -> Tensor:
    """Which of a batch's images lie in the cells of grids, (M,rows,columns), M = share * images; -1 for a blank cell.

    An image lies in a grid once, unless the batch has fewer images than the grid has cells.
    """
    rows, columns = GRIDS[int(torch.multinomial(torch.tensor(CHANCES), 1))]
    cells, count = rows * columns, math.ceil(share * images)
    chosen = torch.stack([torch.cat([torch.randperm(images)] * -(-cells // images))[:cells] for _ in range(count)])
    blank = torch.where(torch.rand(count) < BLANKED, torch.randint(1, cells, (count,)), 0)
    order = torch.rand(count, cells).argsort(dim=1)
    return chosen.masked_fill(order < blank[:, None], -1).reshape(count, rows, columns)


def splice_images(images: Tensor, cells: Tensor) -> Tensor:
    """Grids (M,C,H,W) of shrunken images (B,C,H,W), by cells (M,rows,columns) as in `draw_cells`; blank ones are 0."""
    height, width = images.shape[2:]
    rows, columns = cells.shape[1:]
    size = (height // rows, width // columns)
    small = F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
    small = torch.cat([small, torch.zeros_like(small[:1])])  # the last one, which -1 finds, is blank
    spliced = small[cells].permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    return F.pad(spliced, (0, width - size[1] * columns, 0, height - size[0] * rows))


def unite_targets(target: Tensor, cells: Tensor) -> Tensor:
    """Targets (M,L) of grids from those of images (B,L): 1 if any image has it, else NaN if any is unknown, else 0."""
    held = torch.cat([target, torch.zeros_like(target[:1])])[cells.flatten(1)]
    united = held.nan_to_num(0).amax(dim=1)
    return torch.where((united < 1) & held.isnan().any(dim=1), torch.nan, united)


def split_cells(features: Tensor, rows: int, columns: int) -> list[Tensor]:
    """The feature maps of a grid's cells, row by row, cut from the grid's (M,D,h,w); a place between two is in both."""
    height, width = features.shape[2:]
    tops, lefts = (
        [(size * k // parts, -(-size * (k + 1) // parts)) for k in range(parts)]
        for size, parts in ((height, rows), (width, columns))
    )
    return [features[..., top:bottom, left:right] for top, bottom in tops for left, right in lefts]


def find_inconsistency(cell_logits: Tensor, whole_logits: Tensor, cells: Tensor) -> Tensor:
    """What the logits of cells (M,N,L) differ from those of whole images (B,L); blank cells cost nothing."""
    shown = cells.flatten(1)
    wanted = whole_logits.detach().float().sigmoid()[shown.clamp(min=0)]
    cost = F.binary_cross_entropy_with_logits(cell_logits.float(), wanted, reduction="none")
    return (cost * (shown >= 0)[..., None]).sum()
