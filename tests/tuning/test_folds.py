import pytest
import torch

from pivotpatch.errors import InputError
from pivotpatch.tuning.folds import draw_folds


def test_folds_are_even_shuffled_and_drawn_again_alike() -> None:
    fold = draw_folds(103, folds=5)
    assert sorted(fold.bincount().tolist()) == [20, 20, 21, 21, 21]
    assert torch.equal(fold, draw_folds(103, folds=5))
    assert fold.tolist() != [index % 5 for index in range(103)]
    other = draw_folds(103, folds=5, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(fold, other)


@pytest.mark.parametrize("folds", [1, 4])
def test_folds_that_cannot_be_are_refused(folds: int) -> None:
    with pytest.raises(InputError, match=f"folds: {folds} folds of 3 pictures; give 2 up to the number"):
        draw_folds(3, folds=folds)
