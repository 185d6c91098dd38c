"""Folds of pictures, so that what is fitted on some is judged on others."""

import torch
from torch import Tensor

from pivotpatch.errors import InputError


def draw_folds(count: int, *, folds: int = 5, generator: torch.Generator | None = None) -> Tensor:
    """The fold (N,) of each picture, 0 to `folds` - 1, as even in size as can be.

    Args:
        count: N pictures.
        folds: how many.
        generator: draws which picture goes where; by default one of seed 0, so that a fit can be repeated.

    >>> draw_folds(5, folds=2).bincount().tolist()
    [3, 2]
    """
    if not 2 <= folds <= count:
        raise InputError("folds", f"{folds} folds of {count} pictures", "give 2 up to the number of pictures")
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    return (torch.arange(count) % folds)[torch.randperm(count, generator=generator)]
