"""Folds of images, so that what is fitted on some is judged on others."""

import numpy as np
import torch
from torch import Tensor

from pivotpatch.errors import InputError

FOLDS = 5


def draw_folds(count: int, *, generator: torch.Generator | None = None) -> Tensor:
    """The fold (N,) of each image, 0 to `FOLDS` - 1, as even in size as can be.

    Args:
        count: N images.
        generator: draws which image goes where; by default one of seed 0, so that a fit can be repeated.

    >>> sorted(draw_folds(7).bincount().tolist())
    [1, 1, 1, 2, 2]
    """
    if count < FOLDS:
        raise InputError("folds", f"there are {count} images", f"give {FOLDS} or more; hundreds are usual")
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    return (torch.arange(count) % FOLDS)[torch.randperm(count, generator=generator)]


def rank_among(values: Tensor, rows: Tensor) -> Tensor:
    """Ranks (M,L) of the values (N,L) in some rows (N,) among all, per label; equal ones share theirs.

    >>> rank_among(torch.tensor([[0.5], [0.1], [0.5]]), torch.tensor([True, False, True])).tolist()
    [[1], [1]]
    """
    ordered = torch.from_numpy(np.sort(values.T.contiguous().numpy()))  # torch would sort indices along, slower
    return torch.searchsorted(ordered, values[rows].T.contiguous()).T
